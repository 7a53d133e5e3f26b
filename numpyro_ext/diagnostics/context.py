"""What the checks of ``diagnose`` read: a fit with its draws, or a ``DataTree`` alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
import math
from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.handlers import subsampled_plates
from numpyro_ext._model.operations import count_operations
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, model_info
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._evaluate import (
    Evaluate,
    Prototype,
    default_block_size,
    evaluator,
    prototype,
    warn_of_lost_draws,
)
from numpyro_ext.diagnostics._facts import Facts, Numbers, chains_of, facts_of, mcmc_stats
from numpyro_ext.diagnostics._fit import Fit, restarts_of
from numpyro_ext.diagnostics._points import (
    Points,
    has_gradient,
    particles_of,
    potential_of,
    score_points,
)
from numpyro_ext.diagnostics.full_data import minibatch_plates
from numpyro_ext.diagnostics.table import Row, equally_spaced

__all__ = ["DiagnosisContext", "FitContext", "Kind", "TreeContext", "cached", "title_of"]

Kind = Literal["chains", "guide", "particles"]
_MOST_DRAWS = 10_000
"""Draws of chains of which some are moved."""


def title_of(facts: Facts, size: str) -> str:
    """Its class and how many draws: of a kernel, an engine, or a guide by a loss."""
    return f"{facts.kernel or facts.engine or f'{facts.guide} by {facts.loss}'}, {size}"


def cached[T](function: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of a context, computed once for each context."""

    @wraps(function)
    def compute_once(context: Any) -> T:
        if function not in context.results_of:
            context.results_of[function] = function(context)
        return context.results_of[function]

    return compute_once


class DiagnosisContext:
    """Draws, statistics and facts, as a ``DataTree`` of :func:`to_arviz` holds them."""

    kind: Kind
    facts: Facts
    draws: Numbers
    """Values of all sites, deterministic ones too."""
    stats: Numbers
    latent: Numbers
    """Values of the sites at which weights are compared."""
    density: str
    undeclared: Sequence[str] = ()
    """``Delta`` sites of a guide whose Jacobian may be stated or not."""
    log_weight: np.ndarray | None
    """``(chain, draw, *units)``"""
    num_points: int
    """Particles."""
    cause: str | None = None
    """What to do about draws that are wrong, if it is known."""
    moving: frozenset[str] | set[str] = frozenset()
    """Sites that have to move."""

    @cached_property
    def results_of(self) -> dict[Callable[[Any], Any], Any]:
        """The results of :func:`cached` functions."""
        return {}

    def unit_of(self, name: str) -> np.ndarray:
        """The unit of every number of a site, by which the weights of a draw are split; -1 for a
        number outside of all."""
        raise NotImplementedError

    @property
    def is_biased(self) -> bool:
        """Chains whose stationary law is not the posterior."""
        return self.facts.inference_method == "sgmcmc"

    @property
    def has_chains(self) -> bool:
        """Chains, or several restarts, which are judged as chains are."""
        return self.kind == "chains" or len(next(iter(self.draws.values()))) > 1

    @property
    def title(self) -> str:
        if self.kind == "particles":
            return title_of(self.facts, f"{self.num_points} particles")
        chains, length = next(iter(self.draws.values())).shape[:2]
        return title_of(self.facts, f"{chains} x {length:,} draws")


class TreeContext(DiagnosisContext):
    """A ``DataTree`` that :func:`to_arviz` made, without the fit that it came from."""

    def __init__(self, tree: Any) -> None:
        facts = dict(tree.attrs)
        method = facts.get("inference_method")
        if method is None or "posterior" not in tree:
            raise ValueError(
                "the DataTree does not say which method made it, as those of arviz.from_numpyro do"
                " not; pass one that to_arviz made, or the fit itself."
            )
        of_chains = method in ("mcmc", "sgmcmc")
        self.kind = "chains" if of_chains else "particles" if method == "particles" else "guide"
        self.facts = Facts.of(facts)
        self.draws, self.stats = _numbers(tree, "posterior"), _numbers(tree, "sample_stats")
        self.latent, self.density = self.draws, facts.get("density", "")
        self.log_weight = self.stats.get("log_weight")
        self.num_points = tree["posterior"].sizes["chain" if "kernel" in facts else "draw"]
        self._dims = {str(n): _dims(x) for n, x in tree["posterior"].data_vars.items()}
        self._units = {} if self.log_weight is None else _dims(tree["sample_stats"]["log_weight"])

    def unit_of(self, name: str) -> np.ndarray:
        units, sizes = self._units, self._dims[name]
        if not set(units) <= set(sizes):
            return np.full(math.prod(sizes.values()), -1)
        count = np.arange(math.prod(units.values())).reshape(tuple(units.values()))
        order = [list(units).index(d) for d in sizes if d in units]
        shape = [size if d in units else 1 for d, size in sizes.items()]
        placed = count.transpose(order).reshape(shape)
        return np.ravel(np.broadcast_to(placed, tuple(sizes.values())))


def _dims(x: Any) -> dict[str, int]:
    """The dimensions of a variable without chain and draw."""
    return {str(d): int(n) for d, n in x.sizes.items() if d not in ("chain", "draw")}


def _numbers(tree: Any, group: str) -> Numbers:
    if group not in tree:
        return {}
    variables = tree[group].data_vars.items()
    return {str(n): x.transpose("chain", "draw", ...).to_numpy() for n, x in variables}


@dataclass(frozen=True)
class FitContext(DiagnosisContext):
    """A fit, the model on all of its data, and what is computed from both."""

    obj: Any
    fit: Fit
    """Of the object, with its result."""
    result: Any
    rng_key: Array
    num_samples: int = 1000
    num_moves: int | None = None
    target_lines: Sequence[Row] = ()
    """What is said of the density by which the fit is judged."""

    @cached_property
    def results(self) -> list[Any]:
        return restarts_of(self.result)

    @cached_property
    def kind(self) -> Kind:
        if self.fit.attributes["inference_method"] == "particles":
            return "particles"
        return "chains" if isinstance(self.obj, MCMC) else "guide"

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
    def facts(self) -> Facts:
        known = facts_of(self.obj, self.fit).known() if self.kind == "chains" else {}
        return Facts.of(self.fit.attributes, known)

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
        if self.kind == "chains":
            return chains_of(self.fit)
        return {**self.latent, **self.evaluated["deterministic"]}

    @cached_property
    def latent(self) -> Numbers:
        return self.evaluated["latent"]

    @cached_property
    def first(self) -> Sites:
        """The draws ``{site: (m, *site)}`` of the first restart, or the particles."""
        if self.kind == "particles":
            return particles_of(self.obj, self.fit)
        return {name: x[0] for name, x in self.latent.items()}

    @cached_property
    def mixed(self) -> tuple[Numbers, np.ndarray]:
        """The draws of all chains of a run together."""
        draws = {name: self.draws[name] for name in self.info.latents}
        kept = np.all([np.isfinite(y).all((0, *range(2, y.ndim))) for y in draws.values()], 0)
        if "sampling" in self.stats:
            kept &= np.asarray(self.stats["sampling"], bool).all(0)
        return self.mix({name: y[:, kept] for name, y in draws.items()})

    def mix(self, draws: Numbers) -> tuple[Numbers, np.ndarray]:
        """Draws ``{site: (m, *site)}`` of chains in a random order, of which the first ones are
        moved, and the effective sample sizes of their numbers."""
        from arviz_stats.base.array import array_stats

        chains, total = len(next(iter(draws.values()))), sum(y[0, 0].size for y in draws.values())
        most = min(_MOST_DRAWS, 10**7 // max(total, 1)) // chains
        length = next(iter(draws.values())).shape[1]
        chosen = equally_spaced(length, max(most, 1))
        draws = {name: y[:, chosen] for name, y in draws.items()}
        shape = chains, len(chosen)
        order = np.random.default_rng(0).permutation(math.prod(shape))
        mixed = {n: y.reshape(len(order), *y.shape[2:])[order] for n, y in draws.items()}
        if len(chosen) < 4:
            return mixed, np.zeros(1)
        flat = [y.reshape(*shape, math.prod(y.shape[2:])) for y in draws.values()]
        x = np.concatenate(flat, -1).astype(np.float64)
        # At most so many numbers get an effective size of their own; the others the least of these.
        some = equally_spaced(x.shape[-1], 1000)
        varies = np.any(x != x[:1, :1], (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            ess: Any = array_stats.ess(x[..., some], chain_axis=0, draw_axis=1)
        found = np.where(varies[some], ess, math.prod(shape))
        sizes = np.full(x.shape[-1], np.min(found))
        sizes[some] = found
        return mixed, sizes

    @cached_property
    def stats(self) -> Numbers:
        is_chains = self.kind == "chains"
        return mcmc_stats(self.obj, self.fit) if is_chains else self.evaluated["stats"]

    @property
    def density(self) -> str:
        return self.proto.density

    @property
    def undeclared(self) -> list[str]:
        return self.proto.undeclared

    @property
    def log_weight(self) -> np.ndarray | None:
        return self.stats.get("log_weight")

    @property
    def num_points(self) -> int:
        return len(next(iter(self.first.values())))

    @property
    def num_latents(self) -> int:
        """The numbers of the latent sites, of which some may have no coordinate."""
        return sum(math.prod(x.shape[1:]) for x in self.first.values())

    @cached_property
    def moving(self) -> set[str]:
        z = getattr(self.obj.last_state, "z", None)
        return set(z) if isinstance(z, dict) else set(self.draws)

    def unit_of(self, name: str) -> np.ndarray:
        units, site = self.proto.units, self.proto.trace[name]
        if units is None:
            return np.zeros(math.prod(jnp.shape(site["value"])), int)
        count = jnp.arange(math.prod(units.shape)).reshape(units.shape)
        return np.ravel(np.broadcast_to(units.along(site, count), jnp.shape(site["value"])))

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

    @cached_property
    def cause(self) -> str | None:
        """What to do where the loss takes the noise of a minibatch for uncertainty."""
        loss = getattr(self.obj, "loss", None)
        # Its mean over minibatches is then that of all rows, or each row has a term of its own.
        if getattr(loss, "linear", True) or getattr(loss, "per_datum", True):
            return None
        if getattr(loss, "proxy", None) is not None:
            return None
        plates = minibatch_plates(self.obj.model, self.fit.args, self.fit.kwargs)
        # The arguments may be all the data, where the run was given a batch.
        seen = subsampled_plates(getattr(self.obj.guide, "prototype_trace", None) or {})
        for plate, (size, batch) in {**seen, **plates}.items():
            if plate not in self.proto.plates:
                return (
                    f"{type(loss).__name__} takes the noise of its minibatches ({batch} of {size}"
                    f" rows of the plate '{plate}') for uncertainty of latent sites that all rows"
                    " share, so train with BBAlphaELBO or the order 1 (VRELBO(1.), Trace_ELBO), or"
                    " without subsample_size"
                )
        return None
