"""What the checks of ``diagnose`` read: a fit with its draws, and what is computed from it once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from importlib.util import find_spec
from typing import Any, Literal

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.circles import circular_sites, cut_by_draws, unrolled
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
)
from numpyro_ext.diagnostics._fit import Fit, Numbers, chains_of, mcmc_stats
from numpyro_ext.diagnostics.full_data import minibatch_plates


def potential_of(
    fit: Fit, info: ModelInfo, params: Params, deterministic: tuple[str, ...] = ()
) -> Potential:
    """The potential of a model, without its other deterministic sites, which cost another run."""
    info = replace(info, deterministic=deterministic)
    return Potential(fit.model, info, params, fit.args, fit.kwargs)


def flat_draws(target: Potential, draws: Sites, block: int) -> Array:
    """Constrained draws of the latent sites as ``(m, d)`` points."""
    ravel, unconstrain = target.info.ravel, target.unconstrain
    return lax.map(lambda draw: ravel(unconstrain("x", draw)), draws, batch_size=block)


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
    """The fit of the object, with its result."""
    result: Any
    rng_key: Array
    num_samples: int = 1000
    num_moves: int | None = None
    problems: tuple[str, ...] = ()
    """Sentences on the density by which the fit is judged."""

    @cached_property
    def results_of(self) -> dict[Callable[[Any], Any], Any]:
        return {}

    @cached_property
    def kind(self) -> Literal["chains", "guide", "particles", "ensemble"]:
        """An ensemble has particles that are independent draws at every time, all of which are
        judged."""
        method = self.fit.attributes["inference_method"]
        if method in ("particles", "ensemble"):
            return method
        return "chains" if isinstance(self.obj, MCMC) else "guide"

    @property
    def is_biased(self) -> bool:
        """True for chains with another stationary law than the posterior."""
        return self.fit.attributes["inference_method"] == "sgmcmc"

    @property
    def title(self) -> str:
        chains, length = next(iter(self.draws.values())).shape[:2]
        if self.kind == "particles":
            return self.fit.title(f"{length} particles")
        if self.kind == "ensemble":
            chains, length = self.fit.num_chains, length // self.fit.num_chains
        return self.fit.title(f"{chains} x {length:,} draws")

    @cached_property
    def noise_problem(self) -> str | None:
        """What a loss does wrong on minibatches, and what to do; None if it does nothing wrong."""
        ask = getattr(getattr(self.obj, "loss", None), "noise_problem", None)
        if ask is None:
            return None
        plates = minibatch_plates(self.obj.model, self.fit.args, self.fit.kwargs)
        units = () if self.proto.units is None else self.proto.units.plates
        return ask({plate: rows for plate, rows in plates.items() if plate not in units})

    # The kernel of chains.

    @cached_property
    def kernel(self) -> DiagnosableChains | None:
        """The kernel, if it states its own stationary law."""
        kernel = getattr(self.obj, "sampler", None)
        return kernel if isinstance(kernel, DiagnosableChains) else None

    @cached_property
    def temperature(self) -> float | None:
        """T of the transitions that were drawn; None where it changes, or does not exist."""
        kernel, state = self.kernel, getattr(self.obj, "last_state", None)
        if kernel is None or (i := getattr(state, "i", None)) is None:
            return None
        last = int(np.max(jax.device_get(i)))
        first = max(0, last - self.obj.num_samples * kernel.steps_per_sample)
        # Not jitted, which would compile anew at each look at the run.
        steps = jnp.linspace(first, last - 1, 100).astype(int)
        values = jax.device_get(jax.vmap(kernel.temperature_at)(steps))
        if values is None:
            return None
        # It is 0 while a cyclical schedule explores.
        different = {float(T) for T in values.tolist() if T > 0}
        return different.pop() if len(different) == 1 else None

    # The model, and draws that run through it.

    @cached_property
    def keys(self) -> tuple[Array, ...]:
        """A key for the prototype, and another one for draws or moves."""
        return tuple(jax.random.split(self.rng_key))

    @cached_property
    def proto(self) -> Prototype:
        return prototype(self.fit, self.keys[0])

    @cached_property
    def info(self) -> ModelInfo:
        """The parts of the model that are static on all data, with each circle cut where the draws
        are not."""
        info = model_info(self.proto.trace, sums=True)
        return cut_by_draws(info, self._drawn) if circular_sites(info) else info

    @cached_property
    def evaluate(self) -> Evaluate:
        return evaluator(self.fit, self.proto, lp=True)

    @cached_property
    def evaluated(self) -> dict[str, Any]:
        return self.evaluate(self.keys[1], self.num_samples)

    @cached_property
    def _drawn(self) -> Numbers:
        """The draws ``(chain, draw, *site)`` as they are; particles are the draws of one chain, the
        last time first."""
        if self.kind == "guide":
            return {**self.evaluated["latent"], **self.evaluated["deterministic"]}
        by_chain = chains_of(self.fit)
        if self.kind == "chains" or not isinstance(self.obj, MCMC):
            return by_chain
        # The chains are the particles, and their last draw is the answer.
        by_time = {name: np.swapaxes(x, 0, 1)[::-1] for name, x in by_chain.items()}
        if self.kind == "ensemble":
            return {name: x.reshape(1, -1, *x.shape[2:]) for name, x in by_time.items()}
        return {name: x[:1] for name, x in by_time.items()}

    @cached_property
    def draws(self) -> Numbers:
        """The same of all sites, with angles within pi of the middle of their circle."""
        return unrolled(self._drawn, self.info)

    @property
    def latent(self) -> Numbers:
        """The draws of the latent sites."""
        return {name: x for name, x in self.draws.items() if name in self.proto.latents}

    @property
    def first(self) -> dict[str, Any]:
        """The draws ``{site: (m, *site)}`` that belong to the first parameters."""
        draws = self.draws
        if self.kind == "guide":
            draws = {name: x[:1] for name, x in draws.items()}
        return {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}

    @cached_property
    def stats(self) -> Numbers:
        is_chains = self.kind == "chains"
        return mcmc_stats(self.obj, self.fit) if is_chains else self.evaluated["stats"]

    @cached_property
    def sampling(self) -> np.ndarray | None:
        """``(chain, draw)``: draws that a cyclical schedule did not mark as exploration."""
        marks = self.stats.get("sampling")
        return None if marks is None else np.asarray(marks, bool)

    # The density on all data.

    @cached_property
    def block(self) -> int:
        """Draws that are run through the model at a time."""
        return default_block_size(self.proto.trace)

    @cached_property
    def has_gradient(self) -> bool:
        """True if no drawn site is discrete, and sites that were not drawn can be summed out."""
        supports = (self.proto.trace[name]["fn"].support for name in self.proto.latents)
        summable = not self.proto.marginalized or find_spec("funsor") is not None
        return summable and not any(support.is_discrete for support in supports)

    @cached_property
    def gradient_cost(self) -> float:
        """How many numbers a gradient on all data computes; but for what does not depend on the
        draw, as the normaliser of a prior with known parameters, which all draws share."""

        def gradient(params: Params, x: Array) -> tuple[Array, Array]:
            return potential_of(self.fit, self.info, params).value_and_grad_flat(x, {})

        x = jax.ShapeDtypeStruct((self.info.size,), jnp.result_type(float))
        return max(count_operations(gradient, self.fit.params[0], x, fixed=1), 1.0)
