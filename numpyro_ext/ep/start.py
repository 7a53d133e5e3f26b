"""The first sites of the prior's factors, so that q is a distribution before the data are seen."""

from collections.abc import Sequence
from functools import partial, reduce

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.factor_table import Plan, Prior, Table
from numpyro_ext.ep.normal import FAMILIES, Family, Site

__all__ = ["change_of", "is_positive", "natural", "start_sites"]


@partial(jax.jit, static_argnums=0)
def natural(family: Family, normal: Site, table: Table, sites: Sequence[Site]) -> Site:
    """Natural parameters of the prior and all sites, from scratch."""
    shift, precision = normal
    for group, site in zip(table.groups, sites, strict=True):
        total = family.total(group.basis, site)
        shift, precision = shift + total.shift, precision + total.precision
    return Site(shift, precision)


def change_of(family: Family, table: Table, new: Sequence[Site], old: Sequence[Site]) -> Site:
    """The change of q's natural parameters by new sites, for which no large sums are subtracted."""
    parts = [
        family.total(group.basis, jax.tree.map(jnp.subtract, a, b))
        for group, a, b in zip(table.groups, new, old, strict=True)
    ]
    return reduce(partial(jax.tree.map, jnp.add), parts)


def is_positive(total: Site) -> bool:
    """Return whether a precision is positive definite beyond rounding."""
    P = np.asarray(total.precision, np.float64)
    if P.ndim == 1:
        return bool(np.all(P > 0))
    scale = np.sqrt(np.maximum(np.diag(P), 0))
    if not np.all(scale > 0):
        return False
    smallest = np.linalg.eigvalsh(P / scale / scale[:, None])[0]
    return bool(smallest > 100 * np.finfo(np.asarray(total.precision).dtype).eps)


def start_sites(family: str, plan: Plan, table: Table, prior: Prior) -> tuple[Site, ...]:
    """Sites by which each latent site whose prior is not normal has the spread of its draws."""
    sites = []
    for kind, group in zip(plan.kinds, table.groups, strict=True):
        zeros = FAMILIES[family].zeros(group.basis)
        if kind.names is not None:
            one = _start_full if family == "full" else _start_diagonal
            owners = jnp.asarray(prior.owners)[group.index]
            one = partial(one, draws=jnp.asarray(prior.draws))
            zeros = jax.jit(jax.vmap(one))(group.basis, owners)
        sites.append(zeros)
    return tuple(sites)


def _spread(s: Array) -> tuple[Array, Array]:
    """Median and variance by the quartiles, over the first axis."""
    low, middle, high = jnp.nanquantile(s, jnp.array([0.25, 0.5, 0.75]), axis=0)
    return middle, ((high - low) / 1.349) ** 2


def _start_full(A: Array, owners: Array, draws: Array) -> Site:
    """The site of a term of the prior: the spread of its own value, as far as A sees it."""
    W = jnp.where(owners >= 0, A[:, owners], 0)  # (r, e)
    length = jnp.sum(W**2, 0)
    known = length > 1e-4
    s = draws @ A.T @ (W / jnp.where(known, length, 1))
    mean, variance = _spread(s)
    tau = jnp.where(known & (variance > 0), 1 / jnp.where(variance > 0, variance, 1), 0)
    W = W / jnp.where(known, length, 1)
    return Site(W @ (tau * mean), W * tau @ W.T)


def _start_diagonal(A: Array, owners: Array, draws: Array) -> Site:
    mean, variance = _spread(draws[:, owners])
    tau = jnp.where((owners >= 0) & (variance > 0), 1 / jnp.where(variance > 0, variance, 1), 0)
    zero = jnp.zeros(A.shape[1], A.dtype)
    return Site(zero.at[owners].add(tau * mean), zero.at[owners].add(tau))
