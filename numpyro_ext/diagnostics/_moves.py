"""Whether particles stay as wide as they are when a Markov chain moves each of them.

Reference: Neal, *MCMC using Hamiltonian dynamics* (Handbook of MCMC, 2011), section 5.3.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.potential import Potential, value_and_grad
from numpyro_ext._model.read import model_info, sample_sites
from numpyro_ext._typing import Params
from numpyro_ext.diagnostics._evaluate import count_of, default_block_size, prototype
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._memo import remember
from numpyro_ext.diagnostics._particles import Scored, name_in, worst_of
from numpyro_ext.diagnostics._rules import Row

__all__ = ["moves_row", "spread_after_moves"]

MOVES = 40
MOST = 10**9
"""So many log densities of sites are evaluated without being asked."""
SD_RATIO = (0.8, 1.2)
QUANTITY = "sd ratio after moves, worst"
_LEAPS = 4
"""Leapfrog steps of a trajectory: the fewer, the longer a particle in a narrow place takes."""
_ACCEPTED = 0.7
"""Share of accepted trajectories to which the step sizes are tuned."""
_STUCK = 0.1

ValueAndGrad = Callable[[Array], tuple[Array, Array]]


def spread_after_moves(
    potential: ValueAndGrad,
    numbers: Callable[[Array], Array],
    x: Array,
    rng_key: Array,
    num_moves: int,
    block: int,
) -> tuple[Array, Array]:
    r"""Standard deviations of particles over those that they have while a Markov chain moves them.

    Every particle makes trajectories of Hamiltonian Monte Carlo in the coordinates in which
    particles have unit covariance. Its step size is its own, because particles may lie where the
    density is much narrower than all of them together. It is tuned in the first three quarters of
    the trajectories, and the second half counts: a particle that comes back needs longer steps on
    its way.

    :param potential: the potential energy at a ``(d,)`` point and its gradient.
    :param numbers: the ``(n,)`` numbers of a point whose standard deviations are compared.
    :param x: ``(m, d)`` particles.
    :param block: so many particles move at a time.
    :return: ``(n,)`` ratios, NaN for a number that does not vary, and the share of accepted
        trajectories.
    """
    m, d = x.shape
    half, tuned = num_moves // 2, 3 * num_moves // 4
    before = jax.vmap(numbers)(x)
    centre, sd = jnp.mean(before, axis=0), jnp.std(before, axis=0)
    varies = sd > 1e-6 * jnp.abs(centre)
    unit = jnp.where(varies, sd, 1.0)
    scale = jnp.where(jnp.std(x, axis=0) > 0, jnp.std(x, axis=0), 1.0)
    u = (x - jnp.mean(x, axis=0)) / scale
    # The correlations are shrunk, as those of the particles' own step are.
    shrunk = jnp.matmul(u.T, u, precision="highest") / (m + d)
    root = scale[:, None] * jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))

    def at(x: Array) -> tuple[Array, Array, Array]:
        value, grad = potential(x)
        return x, -value, jnp.matmul(root.T, -grad, precision="highest")

    def move(state: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
        here, log_h, sums, accepted = state
        i, key = inputs
        key_momentum, key_accept, key_length = random.split(key, 3)
        # Of random length, or a trajectory could end where it began.
        h = jnp.exp(log_h) * random.uniform(key_length, dtype=x.dtype, minval=0.5)

        def leap(_: int, state: Any) -> Any:
            (place, _, force), p = state
            p = p + 0.5 * h * force
            there = at(place + jnp.matmul(root, h * p, precision="highest"))
            return there, p + 0.5 * h * there[2]

        momentum = random.normal(key_momentum, (d,), x.dtype)
        there, p = lax.fori_loop(0, _LEAPS, leap, (here, momentum))
        log_ratio = there[1] - here[1] + 0.5 * (jnp.sum(momentum**2) - jnp.sum(p**2))
        chance = jnp.exp(jnp.minimum(jnp.where(jnp.isfinite(log_ratio), log_ratio, -jnp.inf), 0.0))
        taken = random.uniform(key_accept, dtype=x.dtype) < chance
        here = jax.tree.map(lambda new, old: jnp.where(taken, new, old), there, here)
        log_h = log_h + jnp.where(i < tuned, chance - _ACCEPTED, 0.0)
        counts = i >= half
        y = jnp.where(counts, (numbers(here[0]) - centre) / unit, 0.0)
        sums = sums[0] + y, sums[1] + y**2
        return (here, log_h, sums, accepted + jnp.where(counts, chance, 0.0)), None

    def one(inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        start, key = inputs
        nothing = jnp.zeros_like(centre)
        log_h = jnp.asarray(math.log(1.6 * d ** (-1 / 6)), x.dtype)
        state = at(start), log_h, (nothing, nothing), jnp.zeros((), x.dtype)
        steps = jnp.arange(num_moves), random.split(key, num_moves)
        (_, _, sums, accepted), _ = lax.scan(move, state, steps)
        return jax.tree.map(lambda a: a / (num_moves - half), (sums, accepted))

    (first, second), accepted = lax.map(one, (x, random.split(rng_key, m)), batch_size=block)
    variance = jnp.mean(second, axis=0) - jnp.mean(first, axis=0) ** 2
    return jnp.where(varies, 1 / jnp.sqrt(variance), jnp.nan), jnp.mean(accepted)


def moves_row(
    obj: Any, fit: Fit, found: Scored, num_moves: int | None, rng_key: Array
) -> list[Row]:
    """The line of the worst number of a latent site; none for m <= d, or without moves."""
    m, d = found.x.shape
    if m <= d or num_moves == 0:
        return []
    kernel: Any = getattr(obj, "sampler", None)
    forward = getattr(kernel, "forward_mode_differentiation", False)
    if fit.model is None:
        unravel: Any = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], obj.last_state.z))[1]
        energy = value_and_grad(lambda x: kernel.potential_fn(unravel(x)), forward_mode=forward)
        num_moves = MOVES if num_moves is None else num_moves
        run = jax.jit(lambda x, key: spread_after_moves(energy, jnp.ravel, x, key, num_moves, m))
        ratios, accepted = run(found.x, rng_key)
        return [_row(ratios, accepted, found.name)]
    trace = prototype(fit, rng_key).trace
    count = m * MOVES * _LEAPS * sum(count_of(site) for site in sample_sites(trace))
    if num_moves is None and count > MOST:
        verdict = (
            f"a Markov chain of {MOVES} moves from each particle would take {count:.1g} log"
            f" densities; num_moves={MOVES} runs it."
        )
        return [Row(QUANTITY, math.nan, None, "", None, verdict)]
    num_moves = MOVES if num_moves is None else num_moves
    memo = {} if fit.memo is None else fit.memo
    run = remember(memo, ("moves", num_moves), lambda: _compiled(fit, trace, num_moves, forward))
    latents = model_info(trace).latents
    ends = np.cumsum([math.prod(site.constrained.shape) for site in latents.values()]).tolist()
    slices = dict(zip(latents, map(slice, [0, *ends[:-1]], ends), strict=True))
    ratios, accepted = run(fit.params[0], found.x, rng_key)
    return [_row(ratios, accepted, lambda k: name_in(slices, k))]


def _compiled(
    fit: Fit, trace: Any, num_moves: int, forward_mode: bool
) -> Callable[[Params, Array, Array], tuple[Array, Array]]:
    """The moves of particles on all data of a model, as a function of its parameters."""
    model, args, kwargs, info = fit.model, fit.args, fit.kwargs, model_info(trace)
    assert model is not None

    @jax.jit
    def run(params: Params, x: Array, rng_key: Array) -> tuple[Array, Array]:
        target = Potential(model, info, params, args, kwargs, forward_mode=forward_mode)
        constrain = target.postprocess()

        def energy(x: Array) -> tuple[Array, Array]:
            value, grad = target.value_and_grad(info.unravel(x), {})
            return value, info.ravel(grad)

        def numbers(x: Array) -> Array:
            values = constrain(info.unravel(x))
            return jnp.concatenate([jnp.ravel(values[name]) for name in info.latents])

        block = default_block_size(trace)
        return spread_after_moves(energy, numbers, x, rng_key, num_moves, block)

    return run


def _row(ratios: Any, accepted: Any, name: Callable[[int], str]) -> Row:
    low, high = SD_RATIO
    ratios, limit = np.asarray(ratios, float), f"{low} to {high}"
    # A number that does not vary is as wide as it can be.
    worst = worst_of(np.nan_to_num(ratios, nan=1.0), SD_RATIO)
    ratio = float(ratios[worst])
    if float(accepted) < _STUCK:
        verdict = (
            "a Markov chain on all data does not leave the particles, so nothing can be said of"
            " their spread; the density may be rough, or not a number near some of them."
        )
        return Row(QUANTITY, ratio, None, limit, False, verdict)
    ok = low <= ratio <= high
    verdict = "a Markov chain on all data leaves the particles as wide as they are."
    if not ok:
        verdict = (
            "a Markov chain on all data that starts from each particle makes the standard deviation"
            f" of {name(worst)} {1 / ratio:.2g} times what it is; reparametrise the model, take"
            " another field, or compare with NUTS."
        )
    return Row(QUANTITY, ratio, None, limit, ok, verdict)
