"""The factors of a model, the few directions in which each changes, and their projections."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.circles import circular_sites
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import gradient
from numpyro_ext._typing import Sites
from numpyro_ext.ep import integral
from numpyro_ext.ep.projection import Projection
from numpyro_ext.ep.quadrature import Quadrature
from numpyro_ext.ep.reading import ONCE, Center, ModelReading, Prior
from numpyro_ext.ep.sampling import ImportanceSampling

_SCALES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)
_TAME = 20.0  # the largest change of l, in nats, from the mean to a tame point
_LARGEST = 2**25  # numbers that an array over factors and points may hold
QUADRATURE, SAMPLING = Quadrature(), ImportanceSampling()
SAMPLING_OF_LOCAL = ImportanceSampling(num_samples=2048)
"""The projections by default, the last for rows with several local coordinates: one object for all
engines, so that they share what is compiled."""


class Subspace(NamedTuple):
    """The few directions in which a factor changes."""

    rank: Array  # 0 for a constant, -1 above the largest rank that is allowed
    directions: Array  # (R, D), orthonormal in units of the prior's standard deviations


@dataclass(frozen=True)
class FactorGroupSpec:
    """The static part of a group of factors, of which ``batch_size`` are computed at a time."""

    names: tuple[str, ...] | None  # of the sites with these batch elements; None for rows
    power: float
    projection: Projection
    batch_size: int
    local: int = 0  # coordinates of local sites that the projection integrates over
    rank: int | None = None  # r, if directions are found at each visit, or D for all coordinates

    def log_factor(self, factors: Factors, index: Array, x: Array, z: Array | None = None) -> Array:
        """l of a factor at the flat vector x, and at local sites z if given."""
        if self.names is not None:
            return factors.elements(x, self.names)[index]
        if index.size == 1:
            return marginal(factors, x, index.reshape(()), z)
        each = jax.vmap(partial(marginal, factors), (None, 0))(x, jnp.maximum(index, 0))
        return jnp.sum(jnp.where(index >= 0, each, 0))

    def basis(self, factors: Factors, group: "FactorGroup", center: Center, n: Array) -> Array:
        """The ``(r, D)`` basis of the n-th factor of the group."""
        if self.rank is None:
            return group.basis[n]
        D = len(center.mean)
        if self.rank == D:
            return jnp.eye(D, dtype=center.mean.dtype)
        subspace = find_subspace(partial(self.log_factor, factors, n), *center, self.rank)
        # A row of a larger rank than those that were looked at is skipped: its marginal is a point.
        return jnp.where(subspace.rank < 0, 0, basis_of(subspace.directions, center.sd))


def marginal(factors: Factors, x: Array, n: Array, z: Array | None = None) -> Array:
    """The log likelihood of row ``n`` at ``x``, with its local sites integrated out, or at z."""
    if not factors.states:
        return _in_state(factors, x, n, {}, z)
    each = jax.vmap(lambda state: _in_state(factors, x, n, state, z))(factors.states)
    return logsumexp(each)


def _in_state(factors: Factors, x: Array, n: Array, state: Sites, z: Array | None) -> Array:
    flat, unravel = ravel_pytree(factors.local)

    def log_lik(z: Array, x: Array) -> Array:
        return factors.row(x, n, {**state, **unravel(z.reshape(flat.shape))})

    if factors.local and z is None:
        return integral.log_integral(log_lik, x)
    return log_lik(flat if z is None else z, x)


def num_points(factors: Factors) -> int:
    """The number of places at which :func:`marginal` evaluates a row."""
    states = len(next(iter(factors.states.values()), [0]))
    return states * (integral.NUM_NODES if factors.local_size == 1 else 1)


@dataclass(frozen=True)
class EPPlan:
    """The static part of a fit, for which its programs are compiled."""

    reading: ModelReading
    specs: tuple[FactorGroupSpec, ...]
    normal: tuple[str, ...]  # sites with normal terms in the prior

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.reading.factors.size

    @property
    def angles(self) -> dict[str, slice]:
        """The places of the sites on circles."""
        info = self.reading.factors.info
        return {name: info.slices[name] for name in circular_sites(info)}

    @property
    def needs_key(self) -> tuple[bool, ...]:
        """Whether the projection of each group takes random keys."""
        return tuple(spec.projection.needs_key for spec in self.specs)


class FactorGroup(NamedTuple):
    """The n factors of one group."""

    index: Array
    basis: Array  # (n, r, D): the orthonormal rows A of a factor, which depends on A x alone


class FactorTable(NamedTuple):
    """The factors on given data."""

    groups: tuple[FactorGroup, ...]  # one for each spec of the plan, the rows of the data first
    constant: Array  # the log of the normal part of the prior at 0
    center: Center
    times: Array | None = None  # (S,), how often q has each of S sites that the rows share, if any
    taylor: Any = None  # the TaylorSites of all rows, with a proxy


def map_factors(fn: Callable[..., Any], arrays: Any, batch_size: int) -> Any:
    """``fn`` of each factor: vectorised, at most ``batch_size`` of them at a time."""
    if len(jax.tree.leaves(arrays)[0]) <= batch_size:
        return jax.vmap(fn)(*arrays)
    return lax.map(lambda xs: fn(*xs), arrays, batch_size=batch_size)


@partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=ONCE)
def _subspaces(
    reading: ModelReading,
    spec: FactorGroupSpec,
    max_rank: int,
    arrays: list[Array],
    index: Array,
    center: Center,
) -> Subspace:
    def find(n: Array) -> Subspace:
        log_factor = partial(spec.log_factor, reading.factors_of(arrays), n)
        return find_subspace(log_factor, *center, max_rank)

    return map_factors(find, (index,), spec.batch_size)


@partial(jax.jit, static_argnums=0)
def _bases(r: int, directions: Array, places: np.ndarray, sd: Array) -> Array:
    return jax.vmap(partial(basis_of, sd=sd))(directions[places, :r])


def find_table(
    reading: ModelReading,
    arrays: list[Array],
    prior: Prior,
    rows: np.ndarray,
    power: float,
    projection: Projection | None,
    max_rank: int,
    largest_share: float,
) -> tuple[EPPlan, FactorTable]:
    """The factors, each with its projection; the data have these ``rows``."""
    # All of a low rank have the largest one, since further directions change nothing. The others
    # have all coordinates; all rows do if more than ``largest_share`` are such.
    factors, center, D = reading.factors, Center(*prior.center), len(prior.center.mean)
    floats = max(D, num_points(factors))  # that one point of a factor needs
    local = factors.local_size if factors.local_size > 1 else 0
    takes_local = projection is None or projection.takes_local
    if local and (not takes_local or power != 1 or rows.size > len(rows)):
        raise ValueError(
            f"a row has {factors.local_size} coordinates of the local latent sites"
            f" {sorted(factors.local)}, which takes power=1, a factor for each row, and"
            " ImportanceSampling() or NUTSProjection(); use these, or move the sites out of the"
            f" plate '{factors.plate}'."
        )
    specs, groups = [], []

    def add(spec: FactorGroupSpec, index: np.ndarray, share: float) -> None:
        """The groups of these factors; ``spec`` has the projection for a low rank."""
        rank, directions, chosen = np.full(len(index), -1), None, spec.projection
        if max_rank > 0 and not spec.local and not chosen.whole:
            probe = replace(spec, projection=QUADRATURE, batch_size=_size(2**7 * floats))
            subspaces = _subspaces(reading, probe, max_rank, arrays, index, center)
            rank, directions = np.asarray(subspaces.rank), subspaces.directions
            if np.any(rank < 0) and chosen.max_rank is not None:
                _warn_of_ranks(spec.names, rank, max_rank)
        if np.mean(rank < 0) > share:
            rank = np.full_like(rank, -1)
        highest = int(max(1, rank.max()))
        for places, r in ((np.flatnonzero(rank >= 0), highest), (np.flatnonzero(rank < 0), 0)):
            if len(places) == 0:
                continue
            if r:
                basis = _bases(r, directions, places, center.sd)
            else:
                eye = np.eye(D, dtype=center.mean.dtype)
                basis = jnp.asarray(np.broadcast_to(eye, (len(places), D, D)))
                if chosen.max_rank is not None:
                    chosen = SAMPLING_OF_LOCAL if spec.local else SAMPLING
            points = {1: 128, 2: 2**12, 3: 2**17}.get(r, 2**11) if chosen.max_rank else 2**11
            specs.append(replace(spec, projection=chosen, batch_size=_size(points * floats)))
            groups.append(FactorGroup(jnp.asarray(index[places]), basis))

    add(FactorGroupSpec(None, power, projection or QUADRATURE, 1, local), rows, largest_share)
    if prior.names:
        elements = np.arange(len(prior.owners))
        add(FactorGroupSpec(prior.names, 1.0, QUADRATURE, 1), elements, 1.0)
    table = FactorTable(
        tuple(groups), jnp.asarray(prior.constant), jax.tree.map(jnp.asarray, center)
    )
    return EPPlan(reading, tuple(specs), prior.normal_names), table


def _size(floats: int) -> int:
    """The number of factors of so many numbers that are computed at a time."""
    return max(1, _LARGEST // floats)


def _warn_of_ranks(names: Any, rank: np.ndarray, max_rank: int) -> None:
    what = "rows" if names is None else f"elements of {', '.join(names)}"
    bad = np.flatnonzero(rank < 0)
    words = (
        f"{len(bad)} of {len(rank)} {what} (such as {', '.join(map(str, bad[:3]))}) depend on more"
        f" than {max_rank} directions of the latent sites, so their moments are found by"
        " importance sampling; choose its draws by projection=ImportanceSampling(num_samples=...)."
    )
    warnings.warn(InferenceWarning(words), stacklevel=7)


def find_subspace(
    log_factor: Callable[[Array], Array], mean: Array, sd: Array, max_rank: int
) -> Subspace:
    """The directions of one factor l(mean + sd z): the rank of its gradients at some points, which
    steps orthogonal to them confirm, or raise until they do not change l."""
    D = len(mean)
    x64 = mean.dtype == jnp.float64
    drop, cutoff = (1e-4, 1e-8) if x64 else (1e-2, 3e-5)
    generator = np.random.default_rng(1)  # which compiles nothing
    probes = generator.standard_normal((2 * max_rank + 6, D)).astype(mean.dtype)

    def whitened(z: Array) -> Array:
        return log_factor(mean + sd * z)

    # Each use of l is compiled for itself, so there are three: values, gradients, steps.
    scales = jnp.asarray(_SCALES, mean.dtype)
    places = (scales[:, None, None] * probes).reshape(-1, D)
    values = jax.vmap(whitened)(jnp.concatenate([jnp.zeros((1, D), mean.dtype), places]))
    at_mean, values = values[0], values[1:].reshape(len(scales), -1)  # (scales, K)
    tame = jnp.isfinite(values) & (jnp.abs(values - at_mean) < _TAME)
    first = jnp.where(jnp.any(tame, 0), jnp.argmax(tame, 0), len(_SCALES) - 1)
    near = scales[first][:, None] * probes

    points = jnp.concatenate([near, probes, jnp.zeros((1, D), mean.dtype)])
    g = jax.vmap(gradient(whitened))(points)
    largest = jnp.max(jnp.abs(g), 1, keepdims=True)
    finite = jnp.all(jnp.isfinite(g), 1, keepdims=True) & (largest > 0)
    # Not the norm itself: its squares overflow.
    g = jnp.where(finite, g / jnp.where(finite, largest, 1), 0)
    length = jnp.linalg.norm(g, axis=1, keepdims=True)
    size = jnp.where(finite, largest, 0) * length
    # A saturated gradient is rounding noise.
    keep = finite & (size > drop * jnp.max(size[: len(near)]))
    B = jnp.where(keep, g / jnp.where(keep, length, 1), 0)
    _, s, directions = jnp.linalg.svd(B, full_matrices=False)
    by_gradients = jnp.sum(s > cutoff * s[0])

    start = near[:4]
    before = values[first[:4], jnp.arange(4)]
    step = generator.standard_normal(start.shape).astype(mean.dtype)
    R = min(max_rank, D)
    # Outside of the first r directions, for each r: (R, 4, D).
    along = np.tri(R, dtype=mean.dtype)[:, None] * (step @ directions[:R].T)
    outside = step - along @ directions[:R]
    outside = outside / jnp.linalg.norm(outside, axis=-1, keepdims=True)
    change = jnp.abs(jax.vmap(jax.vmap(whitened))(start + outside) - before)
    is_flat = jnp.all(change < 1e-3 * (1 + 0.1 * jnp.abs(before)), 1)
    # What rounding leaves of a step outside of all D directions is no direction.
    is_flat |= jnp.arange(1, R + 1) == D
    fits = is_flat & (by_gradients <= jnp.arange(1, R + 1))
    rank = jnp.where(jnp.any(fits), jnp.argmax(fits) + 1, -1)
    flat = jnp.all(jnp.abs(values - at_mean) <= 1e-6 * (1 + jnp.abs(at_mean)))
    return Subspace(jnp.where(flat, 0, rank), directions[:R])


def basis_of(directions: Array, sd: Array) -> Array:
    """``(r, D)`` orthonormal rows A, with l a function of ``A x``, of directions of z."""
    if len(directions) == len(sd):  # a rotation would mix coordinates of any unit
        return jnp.eye(len(sd), dtype=directions.dtype)
    # By Gram and Schmidt, twice: errors of reflections are relative to the largest entry, and an
    # entry in large units is small.
    basis: list[Array] = []
    for row in directions / sd:
        for _ in range(2):
            for other in basis:
                row = row - (other @ row) * other
            row = row / jnp.max(jnp.abs(row))
            row = row / jnp.linalg.norm(row)
        basis.append(row)
    return jnp.stack(basis)
