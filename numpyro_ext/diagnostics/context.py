"""What the checks of ``diagnose`` read: a fit with its draws, and what is computed from it once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
import math
from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.operations import count_operations
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, model_info
from numpyro_ext._typing import DiagnosableChains, Params, Sites
from numpyro_ext.diagnostics._evaluate import (
    Evaluate,
    Prototype,
    default_block_size,
    evaluator,
    prototype,
    warn_of_lost_draws,
)
from numpyro_ext.diagnostics._fit import Fit, Numbers, chains_of, mcmc_stats, restarts_of
from numpyro_ext.diagnostics._points import (
    Points,
    has_gradient,
    particles_of,
    potential_of,
    score_points,
)

Kind = Literal["chains", "guide", "particles"]


def title_of(attributes: dict[str, Any], size: str) -> str:
    """The class of the fit and how many draws: of a kernel, an engine, or a guide by a loss."""
    guide = f"{attributes.get('guide')} by {attributes.get('loss')}"
    return f"{attributes.get('kernel') or attributes.get('engine') or guide}, {size}"


def cached[T](function: Callable[["FitContext"], T]) -> Callable[["FitContext"], T]:
    """A function of a context, computed once for each context."""

    @wraps(function)
    def compute_once(context: "FitContext") -> T:
        if function not in context.results_of:
            context.results_of[function] = function(context)
        return context.results_of[function]

    return compute_once


@dataclass(frozen=True)
class FitContext:
    """A fit, the model on all of its data, and what is computed from both."""

    obj: Any
    fit: Fit
    """Of the object, with its result."""
    result: Any
    rng_key: Array
    num_samples: int = 1000
    num_moves: int | None = None
    problems: tuple[str, ...] = ()
    """Sentences on the density by which the fit is judged."""

    @cached_property
    def results_of(self) -> dict[Callable[[Any], Any], Any]:
        """The results of :func:`cached` functions."""
        return {}

    @cached_property
    def results(self) -> list[Any]:
        return restarts_of(self.result)

    @cached_property
    def kind(self) -> Kind:
        if self.fit.attributes["inference_method"] == "particles":
            return "particles"
        return "chains" if isinstance(self.obj, MCMC) else "guide"

    @property
    def is_biased(self) -> bool:
        """Chains whose stationary law is not the posterior."""
        return self.fit.attributes["inference_method"] == "sgmcmc"

    @property
    def title(self) -> str:
        if self.kind == "particles":
            return title_of(self.fit.attributes, f"{self.num_points} particles")
        chains, length = next(iter(self.draws.values())).shape[:2]
        return title_of(self.fit.attributes, f"{chains} x {length:,} draws")

    # The kernel of chains.

    @cached_property
    def kernel(self) -> DiagnosableChains | None:
        """The kernel, if it says of itself what its law is."""
        kernel = getattr(self.obj, "sampler", None)
        return kernel if isinstance(kernel, DiagnosableChains) else None

    @property
    def settings(self) -> Any:
        """The settings that a kernel has found."""
        return None if self.kernel is None else self.kernel.settings

    @cached_property
    def temperature(self) -> float | None:
        """T of the transitions that were drawn; None where it changes, or where there is none."""
        kernel, state = self.kernel, getattr(self.obj, "last_state", None)
        if kernel is None or (i := getattr(state, "i", None)) is None:
            return None
        last = int(np.max(jax.device_get(i)))
        first = max(0, last - self.obj.num_samples * kernel.steps_per_sample)
        # Not jitted, which would compile anew at each look at the run.
        seen = jnp.linspace(first, last - 1, 100).astype(int)
        values = jax.device_get(jax.vmap(kernel.temperature_at)(seen))
        if values is None:
            return None
        # It is 0 while a cyclical schedule explores.
        different = {float(T) for T in values.tolist() if T > 0}
        return different.pop() if len(different) == 1 else None

    # The model, and draws that run through it.

    @cached_property
    def _keys(self) -> tuple[Array, Array]:
        """For the prototype, and for the draws."""
        if self.kind == "particles":
            return self.rng_key, self.rng_key
        key_prototype, key_draws = jax.random.split(self.rng_key)
        return key_prototype, key_draws

    @property
    def key_moves(self) -> Array:
        return self._keys[1] if isinstance(self.obj, MCMC) else self.rng_key

    @cached_property
    def proto(self) -> Prototype:
        return prototype(self.fit, self._keys[0])

    @cached_property
    def info(self) -> ModelInfo:
        """What is static in the model on all data."""
        return model_info(self.proto.trace, sums=True)

    @cached_property
    def evaluate(self) -> Evaluate:
        return evaluator(self.fit, self.proto, lp=True)

    @cached_property
    def evaluated(self) -> dict[str, Any]:
        """The draws of a guide, run through the model."""
        out = self.evaluate(self._keys[1], self.num_samples)
        warn_of_lost_draws(out)
        return out

    @cached_property
    def draws(self) -> Numbers:
        """Values of all sites, deterministic ones too."""
        if self.kind == "chains":
            return chains_of(self.fit)
        return {**self.latent, **self.evaluated["deterministic"]}

    @cached_property
    def latent(self) -> Numbers:
        return self.evaluated["latent"]

    @property
    def particles(self) -> Numbers:
        """The particles, as the draws of one chain."""
        return {name: np.asarray(x)[None] for name, x in self.first.items()}

    @cached_property
    def first(self) -> Sites:
        """The draws ``{site: (m, *site)}`` of the first restart, or the particles."""
        if self.kind == "particles":
            return particles_of(self.obj, self.fit)
        return {name: x[0] for name, x in self.latent.items()}

    @cached_property
    def stats(self) -> Numbers:
        is_chains = self.kind == "chains"
        return mcmc_stats(self.obj, self.fit) if is_chains else self.evaluated["stats"]

    @cached_property
    def sampling(self) -> np.ndarray | None:
        """``(chain, draw)``: draws that a cyclical schedule did not mark as exploration; None
        without a schedule."""
        marks = self.stats.get("sampling")
        return None if marks is None else np.asarray(marks, bool)

    @property
    def log_weight(self) -> np.ndarray | None:
        """``(chain, draw, *units)``"""
        return self.stats.get("log_weight")

    @property
    def num_points(self) -> int:
        return len(next(iter(self.first.values())))

    @cached_property
    def moving(self) -> set[str]:
        """Sites of chains that have to move."""
        z = getattr(self.obj.last_state, "z", None)
        return set(z) if isinstance(z, dict) else set(self.draws)

    def unit_of(self, name: str) -> np.ndarray:
        """The unit of every number of a site, by which the weights of a draw are split."""
        units, site = self.proto.units, self.proto.trace[name]
        if units is None:
            return np.zeros(math.prod(jnp.shape(site["value"])), int)
        count = jnp.arange(math.prod(units.shape)).reshape(units.shape)
        return np.ravel(np.broadcast_to(units.along(site, count), jnp.shape(site["value"])))

    # The density on all data.

    def potential(
        self, params: Params | None = None, deterministic: tuple[str, ...] = ()
    ) -> Potential:
        """The potential on all data, of a latent vector; by default of the first restart."""
        params = self.fit.params[0] if params is None else params
        return potential_of(self.fit, self.info, params, deterministic)

    @cached_property
    def block(self) -> int:
        """Draws that are run through the model at a time."""
        return default_block_size(self.proto.trace)

    @cached_property
    def has_gradient(self) -> bool:
        return has_gradient(self.proto)

    @cached_property
    def points(self) -> Points:
        """The first draws in unconstrained space, with their score."""
        return score_points(self.fit, self.proto, self.first)

    @cached_property
    def gradient_cost(self) -> float | None:
        """The numbers that a gradient on all data computes; None where there is none in reverse
        mode."""

        def gradient(params: Params, x: Array) -> tuple[Array, Array]:
            return self.potential(params).value_and_grad_flat(x, {})

        x = jax.ShapeDtypeStruct((self.info.size,), jnp.result_type(float))
        try:
            return max(count_operations(gradient, self.fit.params[0], x), 1.0)
        except ValueError as error:
            if "Reverse-mode" not in str(error):
                raise
            return None
