"""The base of guides of local latents by a network that reads the data of a plate row by row."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro.distributions import biject_to, constraints
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoGuide, AutoNormal

from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.handlers import every_row, on_first_rows, valid_plates
from numpyro_ext._model.operations import on_numbers
from numpyro_ext._model.read import (
    continuous_latents,
    frames,
    moving_supports,
    shape_trace,
    trace_of,
)
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Model, Params, Shape, Sites
from numpyro_ext.guides.base import check_model, check_params, draws_of

_FIXED = "sample it on a fixed support, and shift and scale it in the model"


class LocalSite(NamedTuple):
    """A latent site of the plate: the unconstrained shape of one row, and the axis of the rows."""

    rest: tuple[int, ...]
    axis: int
    event_dim: int
    support: constraints.Constraint


@dataclass(kw_only=True, eq=False, repr=False)
class AmortizedGuide(AutoGuide):
    """Base of the guides that make the latents of a plate from its data, by one network for all.

    A subclass writes :meth:`draw_local` and :meth:`register`. Latents outside the plate come from
    another guide. New data need no training: call ``Predictive`` or ``sample_posterior`` with other
    arguments of the model, also with other rows. :class:`FlowGuide` describes the arguments.

    **Reference:** *Amortized inference in probabilistic reasoning*, Gershman, Goodman (CogSci 2014)
    """

    model: Model = field(kw_only=False)
    network: Network = field(kw_only=False)
    plate: str
    features: Callable[..., Array]
    global_guide: Callable[[Model], Any] = AutoNormal
    prefix: str = "auto"

    def __post_init__(self) -> None:
        check_model(type(self), self.model)
        self.network = as_pair(self.network)
        self.local: dict[str, LocalSite] = {}
        self.dim, self.outside = -1, None
        super().__init__(self.model, prefix=self.prefix)

    @property
    def local_dim(self) -> int:
        """Length of the local vector of one row."""
        return sum(math.prod(site.rest) for site in self.local.values())

    @abstractmethod
    def draw_local(self, x: Array) -> Array:
        """Unconstrained local vectors ``(M, local_dim)`` from the features, inside the plate."""

    @abstractmethod
    def register(self, name: str, u: Array, site: LocalSite) -> Array:
        """``numpyro.sample`` of a local site at its unconstrained value."""

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        if self.prototype_trace is None:
            self._set_up(args, kwargs)
        values: Sites = {} if self.outside is None else {**self.outside(*args, **kwargs)}
        with self.rows(args, kwargs) as x:
            latent, start = self.draw_local(x), 0
            for name, site in self.local.items():
                stop = start + math.prod(site.rest)
                u = latent[:, start:stop].reshape(len(x), *site.rest)
                values[name] = self.register(name, jnp.moveaxis(u, 0, site.axis), site)
                start = stop
        return values

    @contextmanager
    def rows(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Array]:
        """Enter the plate, of the size that it has with these arguments, and give the features."""
        model = every_row(seed(self.model, random.key(0)))
        shape_trace(model, args, kwargs)
        size, batch = model.plates[self.plate]
        with numpyro.plate(self.plate, size, subsample_size=batch, dim=self.dim) as rows:
            x = self.features(*args, **kwargs)
            if jnp.ndim(x) < 2 or len(x) != len(rows):
                raise ValueError(
                    f"features returns shape {jnp.shape(x)}, but the plate '{self.plate}' has"
                    f" {len(rows)} of {size} rows; the shape must be ({len(rows)}, number of"
                    " features) or more axes, as of numpyro.subsample(x, event_dim=1)."
                )
            yield x

    def sample_posterior(
        self, rng_key: Array, params: Params, *args: Any, sample_shape: Shape = (), **kwargs: Any
    ) -> Sites:
        """As :meth:`AutoJoint.sample_posterior`, for all rows of the data in ``args``."""
        check_params(params, [f"{self.prefix}_net$params"], self)

        def draw(key: Array) -> Sites:
            guide: Any = substitute(seed(every_row(self), key), data=params)
            model = seed(every_row(self.model), random.key(0))
            with block():
                values: Sites = guide(*args, **kwargs)
                trace = trace_of(substitute(model, data={**params, **values}), args, kwargs)
            computed = (site for site in trace.values() if site["type"] == "deterministic")
            return {**values, **{site["name"]: site["value"] for site in computed}}

        return draws_of(draw, rng_key, sample_shape) if sample_shape else draw(rng_key)

    def _set_up(self, args: tuple, kwargs: dict[str, Any]) -> None:
        seeded = valid_plates(on_first_rows(seed(valid_data(self.model), random.key(0))))
        with block(), on_numbers():
            trace = trace_of(substitute(seeded, substitute_fn=init_to_uniform), args, kwargs)
        latents = continuous_latents(trace)
        moving = moving_supports(self.model, args, kwargs, trace)
        for name, site in latents.items():
            if self.plate in frames(site):
                if name in moving:
                    raise ValueError(
                        f"the support of latent site '{name}' depends on another latent site;"
                        f" {_FIXED}."
                    )
                self.local[name] = self._local_site(name, site)
        if not self.local:
            plates = [name for name, site in trace.items() if site["type"] == "plate"]
            raise ValueError(
                f"no latent site lies in the plate '{self.plate}'; the plates of the model are"
                f" {plates}, and its latent sites {list(latents)}."
            )
        self.dim = frames(latents[next(iter(self.local))])[self.plate]
        has_global = len(self.local) < len(latents)
        self.outside = self.global_guide(_Global(self.model, self.plate)) if has_global else None
        self.prototype_trace = {}

    def _local_site(self, name: str, site: dict[str, Any]) -> LocalSite:
        others = [plate for plate in frames(site) if plate != self.plate]
        if others:
            raise ValueError(
                f"latent site '{name}' lies in the plates {others} beside '{self.plate}'; declare"
                " their dimensions with .to_event()."
            )
        fn, value = site["fn"], site["value"]
        if any(jnp.ndim(bound) for bound in jax.tree.leaves(fn.support)):
            raise ValueError(
                f"the support of latent site '{name}' differs between rows or entries; {_FIXED}."
            )
        axis = jnp.ndim(value) - fn.event_dim + frames(site)[self.plate]
        shape = jax.eval_shape(biject_to(fn.support).inv, value).shape
        return LocalSite(shape[:axis] + shape[axis + 1 :], axis, fn.event_dim, fn.support)


class _Global:
    """The model without its sample sites inside the plate."""

    def __init__(self, model: Model, plate: str) -> None:
        self.model, self.plate = model, plate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = numpyro.prng_key()
        # Hidden sites get no key from outside.
        with block(hide_fn=self._hidden), seed(rng_seed=random.key(0) if key is None else key):
            return self.model(*args, **kwargs)

    def _hidden(self, site: dict[str, Any]) -> bool:
        return site["type"] == "sample" and self.plate in frames(site)
