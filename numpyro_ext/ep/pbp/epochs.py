"""The state of probabilistic backpropagation, and one pass of it over the data."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_ext.ep.normal import choose, plus
from numpyro_ext.ep.pbp.moments import gamma_update, normal_update, prior_update


class Gamma(NamedTuple):
    """Shape and rate of the Gamma of a precision, or their parts in a site."""

    shape: Array
    rate: Array


class Belief(NamedTuple):
    """q of the weights, a matrix per layer, and of the noise precision; None if it is known."""

    means: list[Array]
    variances: list[Array]
    noise: Gamma | None


class Site(NamedTuple):
    """A factor of q, in natural parameters: ``precision``, and ``shift = precision * mean``."""

    shift: list[Array]
    precision: list[Array]
    noise: Gamma | None


class PriorSites(NamedTuple):
    """The sites of the weights' priors, ``(num_weights,)``: their means are zero, and each has a
    part of the Gamma of the weight precision."""

    precision: Array
    weight: Gamma


class PBPState(NamedTuple):
    """The state of :class:`~numpyro_ext.ep.PBP` after i epochs.

    - **q** - means, variances and noise of q, in standardised units.
    - **weight** - Gamma of the weight precision; None if it is known.
    - **prior** - the sites of the weights' priors; None if it is known.
    - **site** - of the data: None for ADF, ``(N, ...)`` arrays for EP, their sum for SEP.
    - **scaling** - mean and standard deviation of X and y.
    - **skipped** - rows that the last epoch left out, because their cavity was improper, or for the
      noise precision, because it would have had no mean variance.
    """

    i: Array
    q: Belief
    weight: Gamma | None
    prior: PriorSites | None
    site: Site | None
    scaling: dict[str, Array]
    skipped: Array
    rng_key: Array


def start_sites(method: str, q: Belief, num_data: int) -> Site | None:
    """Sites with the random means, which are forgotten as the sites are replaced."""
    if method == "adf":
        return None
    shift = [m / v for m, v in zip(q.means, q.variances, strict=True)]
    total = Site(shift, [0 * v for v in q.variances], jax.tree.map(jnp.zeros_like, q.noise))
    if method == "sep":
        return total
    return jax.tree.map(lambda x: jnp.broadcast_to(x / num_data, (num_data, *x.shape)), total)


def _natural(q: Belief) -> Site:
    shift = [m / v for m, v in zip(q.means, q.variances, strict=True)]
    return Site(shift, [1 / v for v in q.variances], q.noise)


def _standard(total: Site) -> Belief:
    variances = [1 / x for x in total.precision]
    means = [v * x for v, x in zip(variances, total.shift, strict=True)]
    return Belief(means, variances, total.noise)


def _cavity(q: Belief, site: Site) -> tuple[Belief, Array]:
    """q without a site, and whether this is a distribution."""
    rest = plus(_natural(q), site, -1.0)
    proper = jnp.all(jnp.stack([jnp.all(x > 0) for x in rest.precision]))
    if rest.noise is not None:
        proper &= (rest.noise.shape > 1) & (rest.noise.rate > 0)
    return _standard(rest), proper


def _absorb(
    q: Belief, known_noise: Array | None, x: Array, y: Array
) -> tuple[Belief, Belief, Array]:
    """q after a row; a tree of the same form, true where an entry is sound; and log Z."""
    if q.noise is not None:
        noise_variance = q.noise.rate / (q.noise.shape - 1)
    else:
        noise_variance = 1 / jnp.asarray(known_noise)
    means, variances, log_z, r2, s2 = normal_update(q.means, q.variances, noise_variance, x, y)
    sound = [
        jnp.isfinite(m) & jnp.isfinite(v) & (v > 0) for m, v in zip(means, variances, strict=True)
    ]
    noise = moved = None
    if q.noise is not None:
        noise = Gamma(*gamma_update(*q.noise, r2, s2))
        differs = noise.shape != q.noise.shape  # it was left alone otherwise
        moved = Gamma(differs, differs)
    return Belief(means, variances, noise), Belief(sound, sound, moved), log_z


def _update(
    q: Belief, known_noise: Array | None, site: Site | None, x: Array, y: Array
) -> tuple[Belief, Site | None, Array, Array]:
    """New q and the change of the site after one row, log Z, and whether the row was left out."""
    cavity, proper = (q, jnp.array(True)) if site is None else _cavity(q, site)
    new, sound, log_z = _absorb(cavity, known_noise, x, y)
    left = ~proper if sound.noise is None else ~(proper & sound.noise.shape)
    log_z = jnp.where(proper, log_z, 0.0)
    taken = jax.tree.map(lambda x: x & proper, sound)
    # Entries that are not sound have to be numbers before natural parameters are taken.
    new = jax.tree.map(jnp.where, sound, new, cavity)
    moved = jax.tree.map(jnp.where, taken, new, q)
    if site is None:
        return moved, None, log_z, left
    target = plus(_natural(new), _natural(cavity), -1.0)
    mask = Site(taken.variances, taken.variances, taken.noise)
    change = jax.tree.map(lambda m, g, f: jnp.where(m, g - f, 0), mask, target, site)
    return moved, change, log_z, left


def _pass(
    method: str, known_noise: Array | None, state: PBPState, order: Array, X: Array, y: Array
) -> tuple[Belief, Site | None, Array, Array]:
    """All rows in this order: new q and sites, the sum of log Z, and the number of rows left out. A
    row has its own site (EP), one of N equal parts of the shared site (SEP), or none (ADF)."""
    shared, own = (state.site, None) if method == "sep" else (None, state.site)

    def visit(carry: Any, row: Any) -> Any:
        q, shared = carry
        *datum, own = row
        site = own if shared is None else jax.tree.map(lambda x: x / len(X), shared)
        q, change, log_z, left = _update(q, known_noise, site, *datum)
        if shared is None:
            own = plus(own, change)
        else:
            shared = plus(shared, change)
        return (q, shared), (log_z, left, own)

    rows = X[order], y[order], jax.tree.map(lambda x: x[order], own)
    (q, shared), (log_z, left, own_in_order) = lax.scan(visit, (state.q, shared), rows)
    own = jax.tree.map(lambda x, new: x.at[order].set(new), own, own_in_order)
    left = jnp.sum(left, dtype=jnp.int32)
    return q, shared if own is None else own, jnp.sum(log_z), left


def _refine(q: Belief, weight: Gamma, prior: PriorSites) -> tuple[Belief, Gamma, PriorSites]:
    """One sweep over the priors of the weights, in the flat order: EP, by sites of mean 0."""

    def visit(weight: Gamma, xs: Any) -> Any:
        m, v, (precision, site) = xs
        rest = 1 / v - precision
        a, b = weight.shape - site.shape, weight.rate - site.rate
        proper = (rest > 0) & (1 / rest < 1e6) & (a > 1) & (b > 0)
        vc = 1 / rest
        m_new, v_new, a_new, b_new = prior_update(vc * m / v, vc, a, b)
        good = proper & jnp.isfinite(m_new) & jnp.isfinite(v_new) & (v_new > 0)
        moved = good & (a_new != a)
        m, v, precision = choose(good, (m_new, v_new, (a - 1) / b), (m, v, precision))
        weight = choose(moved, Gamma(a_new, b_new), weight)
        site = choose(moved, Gamma(a_new - a, b_new - b), site)
        return weight, (m, v, PriorSites(precision, site))

    (means, layers), (variances, _) = ravel_pytree(q.means), ravel_pytree(q.variances)
    weight, (m, v, prior) = lax.scan(visit, weight, (means, variances, prior))
    return Belief(layers(m), layers(v), q.noise), weight, prior


@partial(jax.jit, static_argnums=0)
def epoch(
    method: str, known_noise: Array | None, state: PBPState, X: Array, y: Array
) -> tuple[PBPState, Array]:
    """One pass over the data in random order, and the prior: state and loss."""
    scaling = state.scaling
    X = (X - scaling["X_mean"]) / scaling["X_sd"]
    y = (y - scaling["y_mean"]) / scaling["y_sd"]
    key, rng_key = random.split(state.rng_key)
    order = random.permutation(key, len(X))
    q, site, log_z, left = _pass(method, known_noise, state, order, X, y)
    weight, prior = state.weight, state.prior
    if weight is not None and prior is not None:
        q, weight, prior = _refine(q, weight, prior)
    state = state._replace(
        i=state.i + 1, q=q, weight=weight, prior=prior, site=site, skipped=left, rng_key=rng_key
    )
    return state, -log_z
