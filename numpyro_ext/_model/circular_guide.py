"""The cuts of circles as a parameter of a guide over all latent sites."""

from collections.abc import Iterator
from contextlib import contextmanager
import copy
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import validation_enabled
from numpyro.handlers import block, seed

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.circles import (
    circles_of,
    circular_sites,
    cut_at,
    finite,
    on_circle,
    on_supports,
    with_circles,
    with_supports,
)
from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.mode_search import place_cuts
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.operations import on_numbers
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import ModelInfo, elementwise, has_fixed_bounds, shape_trace
from numpyro_ext._model.same import is_same
from numpyro_ext._numpyro import ContinuousGuide
from numpyro_ext._typing import Model, Params, Sites


class CircularGuide(ContinuousGuide):
    """A guide of one latent vector, in which each circle is cut where the posterior has least mass.

    The parameter ``{prefix}_cut``, ``(latent_dim,)`` and without a gradient, holds the angles
    opposite of the cuts, and 0 for other coordinates.
    """

    supports: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    """Of the latent sites on circles, with the cuts of the guide's set-up or of the call."""
    first_arguments: tuple[tuple, dict[str, Any]] | None = (), {}
    """None if they were traced."""

    def cut(
        self, info: ModelInfo, args: tuple, kwargs: dict[str, Any], modes: Modes | None = None
    ) -> ModelInfo:
        """The same with the cuts at which the guide is set up, of ``modes`` if there are any."""
        if not (names := circular_sites(info)):
            return info
        known = numpyro.param(self.cut_name)
        if modes is not None:
            info = with_circles(info, modes.circles)
        elif known is None:
            info = place_cuts(self.model, info, None, args, kwargs)
        elif not is_traced(known):
            info = with_circles(info, known)
        info = info if circles_of(info) is not None else with_circles(info, jnp.zeros(info.size))
        self.supports = {name: info.latents[name].support for name in names}
        self.first_arguments = None if is_traced((args, kwargs)) else (args, kwargs)
        return info

    @property
    def cuts(self) -> Sites:
        """The angles opposite of the cuts of each circle, at which the guide was set up."""
        return {name: elementwise(support).middle for name, support in self.supports.items()}

    def take_cuts(self, cuts: Sites, args: tuple, kwargs: dict[str, Any]) -> None:
        """Be set up at the cuts of another guide of the same model."""
        trace = shape_trace(seed(on_first_rows(self.model), random.key(0)), args, kwargs)
        self.supports = {n: cut_at(trace[n]["fn"].support, cut) for n, cut in cuts.items()}
        self.first_arguments = args, kwargs

    def cut_model(self, model: Model) -> Model:
        """The model with the cuts of this call."""
        return on_supports(model, self.supports) if self.supports else model

    def in_cuts(self, info: ModelInfo) -> ModelInfo:
        """The same with the cuts of this call."""
        return with_supports(info, self.supports)

    @property
    def seen_model(self) -> Model:
        return self.cut_model(super().seen_model)

    def start_circles(self) -> Array | None:
        """The middles at which the guide begins in this call; None to keep the earlier ones."""

    def cut_params(self) -> Params:
        """The parameter in this call; none where there is no circle."""
        return {self.cut_name: self._middles(None)} if self.supports else {}

    @property
    def first_param(self) -> str:
        """The name of a parameter that every fit has."""
        return f"{self.prefix}_loc"

    @property
    def cut_name(self) -> str:
        return f"{self.prefix}_cut"

    def _middles(self, params: Params | None) -> Array:
        """The parameter, of ``params`` or of this call."""
        before = jnp.zeros(self.latent_dim)  # NumPyro's, of a fit without the parameter
        if params is not None:
            return jnp.asarray(params.get(self.cut_name, before))
        value = numpyro.param(self.cut_name)
        if value is None and numpyro.param(self.first_param) is None:
            middles = self.start_circles()
            if middles is None:
                sites = {name: jnp.zeros(x.shape) for name, x in self.unpack(before).items()}
                for name, support in self.supports.items():
                    sites[name] = elementwise(support).middle
                middles = jnp.concatenate([jnp.ravel(sites[name]) for name in self.latent_sites])
            before = finite(middles)
        value = numpyro.param(self.cut_name, before) if value is None else value
        return lax.stop_gradient(jnp.asarray(value))

    @contextmanager
    def on_cuts(self, params: Params | None = None) -> Iterator[None]:
        """Let the guide's sites and its model have the cuts of the parameter."""
        if not self.supports:
            yield
            return
        trace: Any = self.prototype_trace
        before = trace, self.supports
        middles = self.unpack(self._middles(params))
        self.supports = {n: cut_at(x, middles[n]) for n, x in self.supports.items()}
        moved = {
            name: {**trace[name], "fn": on_circle(trace[name]["fn"], support)}
            for name, support in self.supports.items()
        }
        self.prototype_trace = {**trace, **moved}
        try:
            yield
        finally:
            self.prototype_trace, self.supports = before

    def begin_fit(self, *args: Any, **kwargs: Any) -> bool:
        """Set up the guide, and say whether it was new. Where a later fit begins, keep its
        arguments; an error if they give a latent site another support than the guide has."""
        is_new = self.prototype_trace is None
        self.set_up(*args, **kwargs)
        if is_new or is_traced((args, kwargs)) or numpyro.param(self.first_param) is not None:
            return is_new
        self._check_supports(args, kwargs)
        if self.begun_on and not is_same(self.begun_on[0], (args, kwargs)):
            self.begun_on = self.begun_on[0], (args, kwargs)
        return is_new

    def _check_supports(self, args: tuple, kwargs: dict[str, Any]) -> None:
        trace: Any = self.prototype_trace
        before = {name: trace[name]["fn"].support for name in self.latent_sites}
        model = on_first_rows(self.seen_model)
        with block(), on_numbers(), validation_enabled(False):
            if has_fixed_bounds(list(before.values())):
                sites = shape_trace(seed(model, random.key(0)), args, kwargs)
            else:
                values = {name: trace[name]["value"] for name in before}
                sites = Program(model, args, kwargs).trace(values=values, rng_key=random.key(0))
        for name, support in before.items():
            bounds = zip(
                *(jax.tree.leaves(x) for x in (support, sites[name]["fn"].support)), strict=True
            )
            if not all(is_traced(pair) or np.array_equal(*pair) for pair in bounds):
                raise ValueError(
                    f"'{name}' has other bounds than when this {type(self).__name__} was set up,"
                    " on other arguments of the model; make a new guide for these."
                )

    def _check_begun_once(self, params: Params) -> None:
        """An error if draws without arguments are not known, since fits began on two sets of them
        that give other sites."""
        with on_numbers():
            z = jnp.asarray(self.init_latent)
            first_sites, later_sites = (
                self.constrain(z, params, *arguments, anew=True) for arguments in self.begun_on
            )
        for name, x in first_sites.items():
            y = later_sites[name]
            if x.shape != y.shape or not (is_traced((x, y)) or jnp.allclose(x, y, equal_nan=True)):
                raise ValueError(
                    f"this {type(self).__name__} has begun on two sets of arguments, with which"
                    f" '{name}' differs; give sample_posterior the arguments of the model, or make"
                    " a guide for each set."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_fit(*args, **kwargs)
        with self.on_cuts():
            return super().__call__(*args, **kwargs)

    def constrain(
        self,
        latent: Array,
        params: Params,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        anew: bool = False,
    ) -> Sites:
        if not (args or kwargs or anew) and len(self.begun_on) > 1:
            self._check_begun_once(params)
        if not self.supports:
            return super().constrain(latent, params, args, kwargs, anew)
        guide = copy.copy(self)
        if not (args or kwargs) and self.first_arguments is not None:
            (args, kwargs), anew = self.first_arguments, True  # also of a model without any
        with guide.on_cuts(params):
            return super(CircularGuide, guide).constrain(latent, params, args, kwargs, anew)
