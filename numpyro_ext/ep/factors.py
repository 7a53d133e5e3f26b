"""The factors of a model in groups of one rank, each with its projection."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.factors import Factors
from numpyro_ext._typing import Sites
from numpyro_ext.ep import integral
from numpyro_ext.ep.projection import Projection
from numpyro_ext.ep.quadrature import Quadrature
from numpyro_ext.ep.reading import ONCE, Center, ModelReading, Prior
from numpyro_ext.ep.sampling import ImportanceSampling
from numpyro_ext.ep.subspaces import Subspace, basis_of, find_subspace
from numpyro_ext.ep.taylor_sites import TaylorSites

_LARGEST = 2**25
"""Numbers that an array over factors and points may hold."""
QUADRATURE, SAMPLING = Quadrature(), ImportanceSampling()
SAMPLING_OF_LOCAL = ImportanceSampling(num_samples=2048)
"""The projections by default, the last for rows with several local coordinates: one object for all
engines, so that they share what is compiled."""


@dataclass(frozen=True)
class FactorGroupSpec:
    """The static part of a group of factors.

    - **names** - the sites whose batch elements they are; None for rows of the data.
    - **power** - the power alpha at which they are updated.
    - **projection** - how their tilted moments are found.
    - **batch_size** - factors that are computed at a time.
    - **local** - coordinates of the local sites that the projection integrates over; 0 if the
      factor does so itself.
    - **rank** - the r of rows whose directions are found at each visit, or D for all coordinates;
      None if the group has the bases.
    - **blocks** - whether each block of rows has its own factors, which are computed there.
    """

    names: tuple[str, ...] | None
    power: float
    projection: Projection
    batch_size: int
    local: int = 0
    rank: int | None = None
    blocks: bool = False

    def log_factor(self, factors: Factors, index: Array, x: Array, z: Array | None = None) -> Array:
        """l of the factor of this index, at the flat vector x, and at local sites z if given."""
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
        log_factor = partial(self.log_factor, factors, n)
        subspace = find_subspace(log_factor, *center, rng_key=random.key(1), max_rank=self.rank)
        # A row of a larger rank than those that were looked at is skipped: its marginal is a point.
        return jnp.where(subspace.rank < 0, 0, basis_of(subspace.directions, center.sd))

    def number(self, group: "FactorGroup", n: Array) -> Array:
        """The index of the n-th factor of the group."""
        return group.index[n] if self.rank is None else n


def marginal(factors: Factors, x: Array, n: Array, z: Array | None = None) -> Array:
    """The log likelihood of row ``n`` at ``x``, with a sum over its discrete local sites and an
    integral over a continuous one of a single coordinate.

    :param z: ``(local_size,)``, values of the continuous local sites, unconstrained and flat, in
        place of the integral.
    """
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
    """The static part of a fit, for which its programs are compiled; ``normal`` are the sites whose
    terms of the prior are normal."""

    reading: ModelReading
    specs: tuple[FactorGroupSpec, ...]
    normal: tuple[str, ...]


class FactorGroup(NamedTuple):
    """The n factors of one group: their indices, and the ``(r, D)`` orthonormal rows A of each,
    which depends on :math:`u = A x` alone."""

    index: Array
    basis: Array


class FactorTable(NamedTuple):
    """The factors on given data.

    - **groups** - as many as the plan has specs, the rows of the data first.
    - **constant** - log of the normal part of the prior at 0.
    - **center** - the scale of the latent vector.
    - **times** - ``(S,)``, how often q has each of S sites that the rows of the data share; None if
      each factor has its own.
    - **taylor** - the Taylor sites of all rows; None without a proxy.
    """

    groups: tuple[FactorGroup, ...]
    constant: Array
    center: Center
    times: Array | None = None
    taylor: TaylorSites | None = None


def map_factors(fn: Callable[..., Any], arrays: Any, batch_size: int) -> Any:
    """``fn`` of each factor: vectorised, at most ``batch_size`` of them at a time."""
    if len(jax.tree.leaves(arrays)[0]) <= batch_size:
        return jax.vmap(fn)(*arrays)
    return lax.map(lambda xs: fn(*xs), arrays, batch_size=batch_size)


def map_rows(
    fn: Callable[..., Any],
    factors: Factors,
    spec: FactorGroupSpec,
    index: Array,
    arrays: tuple[Any, ...],
) -> Any:
    """``fn(factors, index, *arrays)`` of each factor of a group, where its rows are."""

    def of_block(there: Factors, arrays: tuple[Any, ...]) -> Any:
        return map_factors(partial(fn, there), arrays, spec.batch_size)

    if not spec.blocks:
        return of_block(factors, (index, *arrays))
    inside = jnp.where(index < 0, index, index % (factors.size // factors.blocks))
    return factors.by_blocks(of_block, (inside, *arrays))


def _are_in_blocks(factors: Factors, rows: np.ndarray) -> bool:
    """Whether each block of rows has the rows of an equal share of the factors, in order."""
    if factors.blocks == 1 or len(rows) % factors.blocks:
        return False
    rows = rows.reshape(factors.blocks, -1)
    block = np.arange(factors.blocks)[:, None]
    return bool(np.all((rows < 0) | (rows // (factors.size // factors.blocks) == block)))


@partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=ONCE)
def _subspaces(
    reading: ModelReading,
    spec: FactorGroupSpec,
    max_rank: int,
    arrays: list[Array],
    index: Array,
    center: Center,
) -> Subspace:
    def find(factors: Factors, n: Array) -> Subspace:
        log_factor = partial(spec.log_factor, factors, n)
        return find_subspace(log_factor, *center, rng_key=random.key(1), max_rank=max_rank)

    return map_rows(find, reading.factors_of(arrays), spec, index, ())


@partial(jax.jit, static_argnums=0)
def _bases(r: int, directions: Array, sd: Array) -> Array:
    return jax.vmap(partial(basis_of, sd=sd))(directions[:, :r])


def find_table(
    reading: ModelReading,
    arrays: list[Array],
    prior: Prior,
    rows: Array,
    power: float,
    projection: Projection | None,
    max_rank: int,
    largest_share: float,
) -> tuple[EPPlan, FactorTable]:
    """The factors in groups of one rank, each with its projection.

    :param rows: ``(n,)`` row of each factor of the data; ``(n, m)`` if a factor has several, with
        -1 where it has fewer than m.
    """
    factors = reading.factors
    local = factors.local_size if factors.local_size > 1 else 0
    if local:
        _check_local(factors, power, projection, rows.size > len(rows))
    elements = jnp.arange(len(prior.owners))
    find = partial(_groups, reading, arrays, prior.center, max_rank)
    both = [
        *find(None, jnp.asarray(rows), power, projection, local, largest_share),
        *find(prior.names, elements, 1.0, None, 0, None),
    ]
    constant, center = jnp.asarray(prior.constant, float), Center(*prior.center)
    table = FactorTable(tuple(group for _, group in both), constant, center)
    return EPPlan(reading, tuple(spec for spec, _ in both), prior.normal_names), table


def _groups(
    reading: ModelReading,
    arrays: list[Array],
    center: Center,
    max_rank: int,
    names: tuple[str, ...] | None,
    index: Array,
    power: float,
    projection: Projection | None,
    local: int,
    largest_share: float | None,
) -> list[tuple[FactorGroupSpec, FactorGroup]]:
    """The rows of the data, or the elements of the prior, in groups of one rank.

    :param names: the sites of these elements; None for rows, which may have ``local`` coordinates.
    """
    factors, D = reading.factors, len(center.mean)
    floats = max(D, num_points(factors))  # that one point of a factor needs
    rank, directions = np.full(len(index), -1), jnp.zeros((len(index), 0, D))

    def in_blocks(index: Array) -> bool:
        return names is None and _are_in_blocks(factors, np.asarray(index))

    whole = local > 0 or (projection is not None and projection.whole)
    if len(index) and max_rank > 0 and not whole:
        size = max(1, _LARGEST // (2**7 * floats))
        probe = FactorGroupSpec(names, power, QUADRATURE, size, blocks=in_blocks(index))
        subspaces = _subspaces(reading, probe, max_rank, arrays, index, center)
        rank, directions = np.asarray(subspaces.rank), subspaces.directions
        if np.any(rank < 0) and (projection is None or projection.max_rank is not None):
            _warn_of_ranks(names, rank, max_rank)
    groups = []
    for places, r in _by_rank(rank, largest_share):
        if r:
            of_group = directions if len(places) == len(rank) else directions[places]
            basis = _bases(r, of_group, center.sd)
        else:
            eye = jnp.eye(D, dtype=center.mean.dtype)
            basis = jnp.broadcast_to(eye, (len(places), D, D))
        chosen = QUADRATURE if r else SAMPLING_OF_LOCAL if local else SAMPLING
        if projection is not None and (r or projection.max_rank is None):
            chosen = projection
        # A projection that takes the number of a row takes it among all rows.
        blocks = not chosen.whole and in_blocks(index[places])
        points = {1: 128, 2: 2**12, 3: 2**17}.get(r, 2**11) if chosen.max_rank else 2**11
        size = max(1, _LARGEST // (points * floats))
        spec = FactorGroupSpec(names, power, chosen, size, local, blocks=blocks)
        group = FactorGroup(index[places], basis)
        groups.append(
            (spec, device_put_rows(group, len(places), factors.sharding) if blocks else group)
        )
    return groups


def _check_local(
    factors: Factors, power: float, projection: Projection | None, several: bool
) -> None:
    """An error if the local coordinates of a row, which are several, cannot be integrated out."""
    problem = ""
    if projection is not None and not projection.takes_local:
        problem = f"{type(projection).__name__} integrates over one at most"
    elif power != 1:
        problem = f"power is {power:g}, which only their integral has"
    elif several:
        problem = "they are too many for factors of several rows"
    if problem:
        raise ValueError(
            f"a row has {factors.local_size} coordinates of the local latent sites"
            f" {sorted(factors.local)}, and {problem}; use power=1 and ImportanceSampling() or"
            f" NUTSProjection(), or move them out of the plate '{factors.plate}', as in theta ="
            " sample(..., dist.Normal(mu, tau).expand([N])) before the plate."
        )


def _by_rank(rank: np.ndarray, largest_share: float | None) -> list[tuple[np.ndarray, int]]:
    """The places of the factors of each group, and its rank r, which is 0 for all coordinates.

    A factor of a smaller rank has further directions, which change nothing. Rows are one group, so
    that other data of the same shapes have the same groups.

    :param largest_share: the share of rows without a rank above which all are taken in all
        coordinates; None for elements of the prior.
    """
    if largest_share is not None and np.mean(rank < 0) > largest_share:
        rank = np.full_like(rank, -1)
    highest = int(max(1, rank.max(initial=1)))
    small = highest if largest_share is not None else min(2, highest)
    groups = [
        (np.flatnonzero((rank >= 0) & (rank <= small)), small),
        (np.flatnonzero(rank > small), highest),
        (np.flatnonzero(rank < 0), 0),
    ]
    return [(places, r) for places, r in groups if len(places)]


def _warn_of_ranks(names: Any, rank: np.ndarray, max_rank: int) -> None:
    what = "rows" if names is None else f"elements of {', '.join(names)}"
    bad = np.flatnonzero(rank < 0)
    words = (
        f"{len(bad)} of {len(rank)} {what} (such as {', '.join(map(str, bad[:3]))}) depend on more"
        f" than {max_rank} directions of the latent sites, so their moments are found by importance"
        " sampling; pass projection=ImportanceSampling(num_samples=...) to choose its draws, or"
        " NUTSProjection()."
    )
    warnings.warn(InferenceWarning(words), stacklevel=7)


def device_put_rows(tree: Any, size: int, sharding: NamedSharding | None) -> Any:
    """The arrays of so many rows on their devices, and the others on all of them."""
    if sharding is None:
        return tree
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())

    def place(x: Any) -> Array:
        return jax.device_put(x, sharding if jnp.shape(x)[:1] == (size,) else everywhere)

    return jax.tree.map(place, tree)
