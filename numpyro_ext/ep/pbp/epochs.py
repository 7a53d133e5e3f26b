"""What a fit of probabilistic backpropagation holds, and one pass of it over the data."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_ext.ep.pbp.moments import gamma_update, normal_update, prior_update

CHUNK = 256
"""Epochs of one compiled call."""


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
    """The factors of q that stand for the weights' priors, ``(num_weights,)`` each: their means are
    zero, and each has a part of the weight precision."""

    precision: Array
    weight: Gamma


class Counts(NamedTuple):
    """What was left as it was, over all epochs.

    - **data** - data whose cavity was improper.
    - **entries** - weights whose variance an update by a datum would have made negative.
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
    - **q** - :class:`Belief`, in standardised units.
    - **weight** - Gamma of the weight precision; None if it is known.
    - **prior** - :class:`PriorSites`; None if the prior is not refined.
    - **site** - of the data: None for ADF, ``(N, ...)`` arrays for EP, their sum for SEP.
    - **scaling** - mean and standard deviation of X and y.
    - **counts** - :class:`Counts`.
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


class Known(NamedTuple):
    """Numbers that a pass reads and leaves alone; None is part of the compiled program."""

    noise_precision: Array | None
    damping: Array | None


def start_sites(method: str, q: Belief, num_data: int) -> Site | None:
    """Sites that hold the random means, which are forgotten as the sites are replaced."""
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


def _cavity(q: Belief, site: Site) -> tuple[Belief, Array]:
    """q without a site, and whether that is a distribution; if not, its numbers mean nothing."""
    rest = jax.tree.map(jnp.subtract, _natural(q), site)
    proper = jnp.array(True)
    for precision in rest.precision:
        proper &= jnp.all(precision > 0)
    if rest.noise is not None:
        proper &= (rest.noise.shape > 1) & (rest.noise.rate > 0)
    variances = [1 / jnp.where(proper, x, 1) for x in rest.precision]
    means = [v * x for v, x in zip(variances, rest.shift, strict=True)]
    noise = rest.noise
    if noise is not None:
        noise = Gamma(jnp.where(proper, noise.shape, 2), jnp.where(proper, noise.rate, 1))
    return Belief(means, variances, noise), proper


def _absorb(q: Belief, known: Known, x: Array, y: Array) -> tuple[Belief, Belief, Array]:
    """q after a datum, which of its entries are sound (a tree of the same form), and log Z."""
    if q.noise is not None:
        noise_variance = q.noise.rate / (q.noise.shape - 1)
    else:
        noise_variance = 1 / jnp.asarray(known.noise_precision)
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


def _where(mask: Any, new: Any, old: Any) -> Any:
    return jax.tree.map(jnp.where, mask, new, old)


def _count(sound: Belief, proper: Array) -> Counts:
    def number(bad: Array) -> Array:
        return jnp.sum(bad & proper, dtype=jnp.int32)

    entries = sum((number(~x) for x in sound.variances), jnp.int32(0))
    noise = jnp.int32(0) if sound.noise is None else number(~sound.noise.shape)
    return Counts((~proper).astype(jnp.int32), entries, noise, jnp.int32(0))


def _filter(q: Belief, known: Known, x: Array, y: Array) -> tuple[Belief, Array, Counts]:
    """One datum, in the context of q itself (ADF)."""
    new, sound, log_z = _absorb(q, known, x, y)
    return _where(sound, new, q), log_z, _count(sound, jnp.array(True))


def _site_update(
    q: Belief, known: Known, site: Site, x: Array, y: Array
) -> tuple[Belief, Site, Array, Counts]:
    """One datum, in the context of q without its site: new q, the change of the site, log Z.

    With rate d the site goes from f to f + d (g - f), g = new / cavity, and q by as much; at d = 1
    q is new itself.
    """
    cavity, proper = _cavity(q, site)
    new, sound, log_z = _absorb(cavity, known, x, y)
    taken = jax.tree.map(lambda x: x & proper, sound)
    mask = Site(taken.variances, taken.variances, taken.noise)
    # Entries that are not sound have to be numbers before natural parameters are taken.
    new = _where(sound, new, cavity)
    target = jax.tree.map(jnp.subtract, _natural(new), _natural(cavity))
    change = jax.tree.map(lambda m, g, f: jnp.where(m, g - f, 0), mask, target, site)
    if known.damping is None:
        q = _where(taken, new, q)
    else:
        change = jax.tree.map(lambda x: known.damping * x, change)
        total = jax.tree.map(jnp.add, _natural(q), change)
        variances = [1 / x for x in total.precision]
        means = [v * x for v, x in zip(variances, total.shift, strict=True)]
        q = Belief(means, variances, total.noise)
    return q, change, jnp.where(proper, log_z, 0.0), _count(sound, proper)


def _pass(
    method: str, known: Known, q: Belief, site: Site | None, order: Array, X: Array, y: Array
) -> tuple[Belief, Site | None, Array, Counts]:
    """All data in this order: new q and sites, the sum of log Z, and what was left out."""

    def adf(q: Belief, xs: Any) -> Any:
        q, log_z, counts = _filter(q, known, *xs)
        return q, (log_z, counts)

    def ep(q: Belief, xs: Any) -> Any:
        *datum, f = xs
        q, change, log_z, counts = _site_update(q, known, f, *datum)
        return q, (log_z, counts, jax.tree.map(jnp.add, f, change))

    def sep(carry: Any, xs: Any) -> Any:
        q, total = carry
        f = jax.tree.map(lambda x: x / len(X), total)
        q, change, log_z, counts = _site_update(q, known, f, *xs)
        return (q, jax.tree.map(jnp.add, total, change)), (log_z, counts)

    data = X[order], y[order]
    if method == "adf":
        q, (log_z, counts) = lax.scan(adf, q, data)
    elif method == "ep":
        of_order = jax.tree.map(lambda x: x[order], site)
        q, (log_z, counts, sites) = lax.scan(ep, q, (*data, of_order))
        site = jax.tree.map(lambda old, new: old.at[order].set(new), site, sites)
    else:
        (q, site), (log_z, counts) = lax.scan(sep, (q, site), data)
    counts = jax.tree.map(partial(jnp.sum, dtype=jnp.int32), counts)
    return q, site, jnp.sum(log_z), counts


def _refine(q: Belief, weight: Gamma, prior: PriorSites) -> tuple[Belief, Gamma, PriorSites, Array]:
    """One sweep over the priors of the weights, in the flat order: EP, whose sites have mean 0."""

    def one(weight: Gamma, xs: Any) -> Any:
        m, v, (precision, site) = xs
        rest = 1 / v - precision
        a, b = weight.shape - site.shape, weight.rate - site.rate
        proper = (rest > 0) & (1 / rest < 1e6) & (a > 1) & (b > 0)
        vc = jnp.where(proper, 1 / rest, 1.0)
        a, b = jnp.where(proper, a, 2.0), jnp.where(proper, b, 1.0)
        mc = jnp.where(proper, vc * m / v, 0.0)
        m_new, v_new, a_new, b_new = prior_update(mc, vc, a, b)
        good = proper & jnp.isfinite(m_new) & jnp.isfinite(v_new) & (v_new > 0)
        moved = good & (a_new != a)
        xs = (m_new, v_new, (a - 1) / b), (m, v, precision)
        m, v, precision = (jnp.where(good, x, y) for x, y in zip(*xs, strict=True))
        weight = _where(Gamma(moved, moved), Gamma(a_new, b_new), weight)
        site = _where(Gamma(moved, moved), Gamma(a_new - a, b_new - b), site)
        return weight, (m, v, PriorSites(precision, site), ~good)

    (means, layers), (variances, _) = ravel_pytree(q.means), ravel_pytree(q.variances)
    xs = means, variances, prior
    weight, (m, v, prior, left) = lax.scan(one, weight, xs)
    q = Belief(layers(m), layers(v), q.noise)
    return q, weight, prior, jnp.sum(left, dtype=jnp.int32)


def _epoch(
    method: str, known: Known, state: PBPState, X: Array, y: Array
) -> tuple[PBPState, Array]:
    """One pass over the standardised data in random order, and the prior: state and loss."""
    key, rng_key = random.split(state.rng_key)
    order = random.permutation(key, len(X))
    q, site, log_z, counts = _pass(method, known, state.q, state.site, order, X, y)
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


@partial(jax.jit, static_argnums=0)
def epochs(
    method: str, known: Known, state: PBPState, X: Array, y: Array, n: Array
) -> tuple[PBPState, Array]:
    """``n`` epochs, and their losses."""
    scaling = state.scaling
    X = (X - scaling["X_mean"]) / scaling["X_sd"]
    y = (y - scaling["y_mean"]) / scaling["y_sd"]

    def body(k: Array, carry: Any) -> Any:
        state, losses = carry
        state, loss = _epoch(method, known, state, X, y)
        return state, losses.at[k].set(loss)

    return lax.fori_loop(0, n, body, (state, jnp.zeros(CHUNK, X.dtype)))


def left_out(before: Counts, state: PBPState, visits: int) -> str:
    """A phrase for each kind of update of which more than 1 % was left out."""
    left = jax.tree.map(lambda a, b: int(a) - int(b), state.counts, before)
    size = sum(m.size for m in state.q.means)
    shares = {
        "of the data, whose cavities were improper,": left.data / visits,
        "of the weights' updates": left.entries / (visits * size),
        "of the noise precision's updates": left.noise / visits,
    }
    return " and ".join(f"{share:.1%} {what}" for what, share in shares.items() if share > 0.01)
