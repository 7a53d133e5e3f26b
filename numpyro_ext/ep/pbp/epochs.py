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


class Counts(NamedTuple):
    """The updates that were left out, over all epochs.

    - **data** - rows whose cavity was improper.
    - **entries** - weights whose variance an update by a row would have made negative.
    - **noise** - updates of the noise precision that gave no Gamma with a mean variance.
    - **prior** - updates of a weight by its prior.
    """

    data: Array
    entries: Array
    noise: Array
    prior: Array


class PBPState(NamedTuple):
    """The state of :class:`~numpyro_ext.ep.PBP`.

    - **i** - number of epochs so far.
    - **q** - means, variances and noise of q, in standardised units.
    - **weight** - Gamma of the weight precision; None if it is known.
    - **prior** - the sites of the weights' priors; None if the prior is not refined.
    - **site** - of the data: None for ADF, ``(N, ...)`` arrays for EP, their sum for SEP.
    - **scaling** - mean and standard deviation of X and y.
    - **counts** - updates that were left out: data, entries, noise, prior.
    - **skipped** - rows that the last epoch left out, wholly or for the noise precision.
    - **num_data** - N.
    - **rng_key** - random number generator seed of the next epochs.
    """

    i: Array
    q: Belief
    weight: Gamma | None
    prior: PriorSites | None
    site: Site | None
    scaling: dict[str, Array]
    counts: Counts
    skipped: Array
    num_data: Array
    rng_key: Array


class Constants(NamedTuple):
    """Numbers that stay; None is static in the compiled program."""

    noise_precision: Array | None
    damping: Array | None


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


def _absorb(q: Belief, constants: Constants, x: Array, y: Array) -> tuple[Belief, Belief, Array]:
    """q after a row; a tree of the same form, true where an entry is sound; and log Z."""
    if q.noise is not None:
        noise_variance = q.noise.rate / (q.noise.shape - 1)
    else:
        noise_variance = 1 / jnp.asarray(constants.noise_precision)
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
    q: Belief, constants: Constants, site: Site | None, x: Array, y: Array
) -> tuple[Belief, Site | None, Array, Counts]:
    """One row in the context of q without its site: new q, the change of the site, log Z, counts.

    With damping d the site goes from f to f + d (g - f), where g = new / cavity, and q by as much.
    Without a site, in ADF, q itself is the context.
    """
    cavity, proper = (q, jnp.array(True)) if site is None else _cavity(q, site)
    new, sound, log_z = _absorb(cavity, constants, x, y)

    def number(bad: Array) -> Array:
        return jnp.sum(bad & proper, dtype=jnp.int32)

    entries = sum((number(~x) for x in sound.variances), jnp.int32(0))
    noise = jnp.int32(0) if sound.noise is None else number(~sound.noise.shape)
    counts = Counts((~proper).astype(jnp.int32), entries, noise, jnp.int32(0))
    log_z = jnp.where(proper, log_z, 0.0)
    taken = jax.tree.map(lambda x: x & proper, sound)
    # Entries that are not sound have to be numbers before natural parameters are taken.
    new = jax.tree.map(jnp.where, sound, new, cavity)
    moved = jax.tree.map(jnp.where, taken, new, q)
    if site is None:
        return moved, None, log_z, counts
    target = plus(_natural(new), _natural(cavity), -1.0)
    mask = Site(taken.variances, taken.variances, taken.noise)
    change = jax.tree.map(lambda m, g, f: jnp.where(m, g - f, 0), mask, target, site)
    if constants.damping is not None:
        change = jax.tree.map(lambda x: constants.damping * x, change)
        moved = _standard(plus(_natural(q), change))
    return moved, change, log_z, counts


def _pass(
    method: str,
    constants: Constants,
    q: Belief,
    sites: Site | None,
    order: Array,
    X: Array,
    y: Array,
) -> tuple[Belief, Site | None, Array, Counts]:
    """All rows in this order: new q and sites, the sum of log Z, and the updates left out.

    A row has its own site (EP), one of N equal parts of the shared site (SEP), or none (ADF).
    """
    shared, own = (sites, None) if method == "sep" else (None, sites)

    def visit(carry: Any, row: Any) -> Any:
        q, shared = carry
        *datum, own = row
        site = own if shared is None else jax.tree.map(lambda x: x / len(X), shared)
        q, change, log_z, counts = _update(q, constants, site, *datum)
        if shared is None:
            own = plus(own, change)
        else:
            shared = plus(shared, change)
        return (q, shared), (log_z, counts, own)

    rows = X[order], y[order], jax.tree.map(lambda x: x[order], own)
    (q, shared), (log_z, counts, own_in_order) = lax.scan(visit, (q, shared), rows)
    own = jax.tree.map(lambda x, new: x.at[order].set(new), own, own_in_order)
    counts = jax.tree.map(partial(jnp.sum, dtype=jnp.int32), counts)
    return q, shared if own is None else own, jnp.sum(log_z), counts


def _refine(q: Belief, weight: Gamma, prior: PriorSites) -> tuple[Belief, Gamma, PriorSites, Array]:
    """One sweep over the priors of the weights, in the flat order: EP, whose sites have mean 0."""

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
        return weight, (m, v, PriorSites(precision, site), ~good)

    (means, layers), (variances, _) = ravel_pytree(q.means), ravel_pytree(q.variances)
    weight, (m, v, prior, left) = lax.scan(visit, weight, (means, variances, prior))
    q = Belief(layers(m), layers(v), q.noise)
    return q, weight, prior, jnp.sum(left, dtype=jnp.int32)


@partial(jax.jit, static_argnums=0)
def epoch(
    method: str, constants: Constants, state: PBPState, X: Array, y: Array
) -> tuple[PBPState, Array]:
    """One pass over the data in random order, and the prior: state and loss."""
    scaling = state.scaling
    X = (X - scaling["X_mean"]) / scaling["X_sd"]
    y = (y - scaling["y_mean"]) / scaling["y_sd"]
    key, rng_key = random.split(state.rng_key)
    order = random.permutation(key, len(X))
    q, site, log_z, counts = _pass(method, constants, state.q, state.site, order, X, y)
    weight, prior = state.weight, state.prior
    if weight is not None and prior is not None:
        q, weight, prior, left = _refine(q, weight, prior)
        counts = counts._replace(prior=left)
    state = state._replace(
        i=state.i + 1,
        q=q,
        weight=weight,
        prior=prior,
        site=site,
        counts=jax.tree.map(jnp.add, state.counts, counts),
        skipped=counts.data + counts.noise,
        rng_key=rng_key,
    )
    return state, -log_z
