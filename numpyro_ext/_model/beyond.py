"""The share of a posterior's mass that lies beyond the normals at its modes."""

import math
from typing import Any

from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np

from numpyro_ext._model.circles import circular_sites, rolled_out_of
from numpyro_ext._model.modes import Modes, Problem
from numpyro_ext._model.normal import Whitening
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.spheres import has_poles
from numpyro_ext._model.surface import some_rows

_STRETCHES, _FEWEST_WEIGHED, _MOST_WEIGHED = (2.0, 6.0), 2000, 10_000
"""How many times as wide as a mode points are drawn; the number of these, and of rows, at most."""
_AT_ONCE, _LARGEST_WEIGHT, _BEYOND = 32, 0.1, 0.1
"""Points together; and the share of one weight up to which they are known, and of the mass beyond
the modes from which it is said."""


def mass_beyond(
    rng_key: Array, potential: Potential, modes: Modes
) -> tuple[float, float, tuple[Problem, ...]]:
    r"""The share of the mass that lies where these normals have nearly none, with its standard
    error, both NaN where it is not known; and what there is to say about it.

    By importance sampling: a draw is :math:`c_k + A_k \xi` at the mode k in turn, where one of the
    n coordinates of :math:`\xi \sim N(0, I)`, each in turn, is s times as wide, s being 2 and 6.
    The density of all these together is at least a part of the normal's own density, so that no
    weight is large on account of the others. Where one draw far out has a large part of all weight,
    as of a posterior with heavy tails, the share is not known.
    """
    n, parts, info = modes.size, modes.modes, potential.info
    rows = sum(size for size, _ in potential.plates.values())
    normal = all(mode.is_matrix and mode.bend is None for mode in parts)
    # Roots of probabilities have a mirror image of each mode, at which there is as much mass.
    closed = circular_sites(info) or any(has_poles(x.support) for x in info.latents.values())
    closed = closed or rolled_out_of(info).any()
    if not normal or rows > _MOST_WEIGHED or info.given or info.mutable or closed:
        return math.nan, math.nan, ()
    num = -(-_FEWEST_WEIGHED // (n * len(parts) * len(_STRETCHES)))
    idx = some_rows(potential, rows)
    which, axis, _ = (
        jnp.ravel(a)
        for a in jnp.meshgrid(*map(jnp.arange, (len(parts), n, 2 * num)), indexing="ij")
    )
    stretch = jnp.tile(jnp.asarray(_STRETCHES), len(axis) // 2)

    def weigh(parts: tuple[Whitening, ...], xi: Array, which: Array, axis: Array, s: Array) -> Any:
        x = jnp.stack([part.to_z(xi.at[axis].multiply(s)) for part in parts])[which]
        each = jnp.stack([part.to_xi(x) for part in parts])
        wide = jnp.stack([each**2 / 2 * (1 - s**-2) - math.log(s) for s in _STRETCHES])
        square = jnp.sum(each**2, 1)
        volumes = jnp.stack([part.log_volume for part in parts])
        log_q = logsumexp(logsumexp(wide, (0, 2)) - square / 2 - volumes)
        U = potential.with_rows(idx).value_and_grad_flat(x, idx)[0]
        return -U - log_q, jnp.min(square)

    def run(parts: tuple[Whitening, ...], xi: Array, *of_draws: Array) -> Any:
        each = (xi, *of_draws)
        return lax.map(lambda draw: weigh(parts, *draw), each, batch_size=_AT_ONCE)

    whitenings = tuple(mode.whitening for mode in parts)
    xi = random.normal(rng_key, (len(axis), n))
    compiled = jit_on_data(run, quick_options())
    log_w, away = (np.asarray(a, float) for a in compiled(whitenings, xi, which, axis, stretch))
    with np.errstate(invalid="ignore"):  # of a density that is nowhere finite
        w = np.exp(np.nan_to_num(log_w - np.nanmax(log_w), nan=-np.inf))
    w /= w.sum()
    far = (away > n + 4 * math.sqrt(2 * n)).astype(float)
    share = float(w @ far)
    error = float(np.sqrt(np.sum((w * (far - share)) ** 2)))
    if not np.isfinite(share):
        return math.nan, math.nan, ()
    largest = int(np.argmax(w))
    if w[largest] < _LARGEST_WEIGHT:
        sentence = (
            f"{share:.2f} +- {error:.1g} of the mass lies where normals at the modes have nearly"
            " none; take particles (AutoParticles), a flow or NUTS."
        )
        is_problem = share - 2 * error > _BEYOND
    else:
        sentence = (
            f"the share of the mass beyond the modes is not known: one of {len(w):,} draws around"
            f" them has {w[largest]:.0%} of the importance weight and lies far out, as where tails"
            " are heavy, or another mode was missed; give more starts, and take NUTS, or priors"
            " with lighter tails."
        )
        is_problem, share, error = bool(far[largest]), math.nan, math.nan
    return share, error, (Problem(sentence, "mass beyond"),) if is_problem else ()
