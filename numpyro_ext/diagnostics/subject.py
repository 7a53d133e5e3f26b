"""What judges read: a fit with its draws, or a ``DataTree`` alone.

Each part is computed when a judge asks for it, once.
"""

from collections.abc import Callable
from functools import cached_property
import math
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._model.handlers import subsampled_plates
from numpyro_ext._model.operations import count_operations
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, model_info
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._typing import Params, Sites
from numpyro_ext.diagnostics._by_penalties import by_penalties
from numpyro_ext.diagnostics._by_proxy import by_proxy, proxy_of
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

__all__ = ["Judge", "Kind", "OfFit", "OfTree", "Subject", "title_of"]

T = TypeVar("T")
Kind = Literal["chains", "guide", "particles"]
_MOST_DRAWS = 10_000
"""Draws of chains of which some are moved."""


@runtime_checkable
class ReadsMinibatches(Protocol):
    """A loss that says of itself how it takes the rows of a minibatch."""

    linear: bool
    """True if it is linear in the log joint, so that its mean over minibatches is that of all
    rows."""
    per_datum: bool
    """True if each row has a term of its own, and latent sites may be shared by all rows."""


def title_of(facts: Facts, size: str) -> str:
    """Its class and how many draws: of a kernel, an engine, or a guide by a loss."""
    return f"{facts.kernel or facts.engine or f'{facts.guide} by {facts.loss}'}, {size}"


class Judge(NamedTuple):
    """What reads a :class:`Subject` and yields lines."""

    lines: Callable[[Any], list[Row]]
    of: tuple[Kind, ...]
    needs: tuple[str, ...] = ()
    """What must be true of the subject, asked in this order."""


class Subject:
    """Draws, statistics and facts, as a ``DataTree`` of :func:`to_arviz` holds them."""

    kind: Kind
    facts: Facts
    draws: Numbers
    """Values of all sites, deterministic ones too."""
    stats: Numbers
    latent: Numbers
    """Values of the sites at which weights are compared."""
    density: str
    log_weight: np.ndarray | None
    """``(chain, draw, *units)``"""
    num_points: int
    """Particles."""
    is_fit: bool = False
    has_moves: bool = False
    """Whether draws of a guide have a gradient, and are no points."""
    cause: str | None = None
    """What to do about draws that are wrong, if it is known."""
    moving: frozenset[str] | set[str] = frozenset()
    """Sites that have to move."""

    def __init__(self) -> None:
        self.judges: dict[str, Judge] = {}
        self.answered: Callable[[], Any] = lambda: None
        """Called after each judge, for a progress bar."""
        self._known: dict[Callable[[Any], Any], Any] = {}

    def once(self, of: Callable[[Any], T]) -> T:
        """What a function of a subject says of this one."""
        if of not in self._known:
            self._known[of] = of(self)
        return self._known[of]

    def lines(self, *names: str) -> list[Row]:
        """The lines of these judges, each of which is asked once; none of those who do not sit."""
        judges = [self.judges[name] for name in names if name in self.judges]
        asked = (one for one in judges if all(getattr(self, need) for need in one.needs))
        rows: list[Row] = []
        for judge in asked:
            new = judge.lines not in self._known
            rows += self.once(judge.lines)
            if new:
                self.answered()
        return rows

    def others(self, *names: str) -> list[Row]:
        """The lines of all judges but these."""
        return self.lines(*(name for name in self.judges if name not in names))

    def unit_of(self, name: str) -> np.ndarray:
        """The unit of every number of a site, by which the weights of a draw are split; -1 for a
        number outside of all."""
        raise NotImplementedError

    @property
    def is_biased(self) -> bool:
        """Chains whose stationary law is not the posterior."""
        return self.facts.inference_method == "sgmcmc"

    @property
    def is_exact(self) -> bool:
        return not self.is_biased

    @property
    def is_implicit(self) -> bool:
        """Draws without a density."""
        return self.density == "none"

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


class OfTree(Subject):
    """A ``DataTree`` that :func:`to_arviz` made, without the fit that it came from."""

    def __init__(self, tree: Any) -> None:
        super().__init__()
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


class OfFit(Subject):
    """A fit, the model on all of its data, and what is computed from both.

    :param fit: of the object ``obj``, with its ``result``.
    """

    def __init__(
        self,
        obj: Any,
        fit: Fit,
        result: Any,
        rng_key: Array,
        num_samples: int = 1000,
        num_moves: int | None = None,
        proxy: TaylorProxy | None = None,
    ) -> None:
        super().__init__()
        self.is_fit = True
        self.obj, self.results, self.rng_key = obj, restarts_of(result), rng_key
        self.num_samples, self.num_moves = num_samples, num_moves
        self.fit, self.target_lines = by_penalties(fit, obj, proxy, rng_key)
        if not self.target_lines:
            self.fit, self.target_lines = by_proxy(fit, obj, proxy_of(obj, proxy), rng_key)
        particles = fit.attributes["inference_method"] == "particles"
        of_chains = isinstance(obj, MCMC)
        self.kind = "particles" if particles else "chains" if of_chains else "guide"
        self._key_prototype, key = (rng_key, rng_key) if particles else jax.random.split(rng_key)
        self._key_draws, self.key_moves = key, key if of_chains else rng_key

    @cached_property
    def facts(self) -> Facts:
        known = facts_of(self.obj, self.fit).known() if self.kind == "chains" else {}
        return Facts.of(self.fit.attributes, known)

    @cached_property
    def proto(self) -> Prototype:
        return prototype(self.fit, self._key_prototype)

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
        out = self.evaluate(self._key_draws, self.num_samples)
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
    def has_moves(self) -> bool:
        # Where a density has collapsed to a point, moves say how far.
        points = self.lines("points")
        is_estimate = self.is_implicit and any(row.ok is None for row in points)
        return self.has_gradient and not is_estimate

    @property
    def nothing_wrong(self) -> bool:
        """Whether no line has found the draws wrong, so that what they miss is worth a search; of
        chains the lines of exact moves say so."""
        without = ("target", "losses", "other modes")
        rows = self.others(*without) if self.kind == "guide" else self.lines("exact moves")
        return all(row.ok is not False for row in rows)

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
        if not isinstance(loss, ReadsMinibatches) or loss.linear or loss.per_datum:
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
