"""Modes of a posterior in which no draw lies, and the mass that they have."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from scipy import linalg, special

from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import model_info
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._descent import EACH, SEARCHES, End, descend
from numpyro_ext.diagnostics._evaluate import Prototype, default_block_size, model_trace_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._moves import Plan, name_of
from numpyro_ext.diagnostics._points import flat_draws, in_place_of_lost, potential_of
from numpyro_ext.diagnostics._spread import unit_root
from numpyro_ext.diagnostics.table import Row

__all__ = ["other_modes_rows"]

MOST_LATENTS, FEWEST_DRAWS = 100, 100
"""Coordinates up to which, and draws from which on, there is a search."""
SHARE = 0.02
"""Of the mass, from which on a mode is named."""
_WIDTHS = 2.0, 20.0
"""Of the points around the draws, in their standard deviations."""
_AT_MOST = 10.0
"""Nats by which the potential of a mode may be above that of half of the draws."""
_DECREMENT, _SAME = 0.2, 1.0
_LOOKED_AT = 3
_NORMAL_DRAWS, _BETWEEN, _NEAREST = 256, 24, 8
_BARRIER = 2.0
"""Nats below which the draws at one side of a barrier reach the other."""
_OF_SHARE = 0.1
QUANTITY = "mass of a mode without draws"


class _Mode(NamedTuple):
    x: np.ndarray
    """``(d,)``"""
    value: float
    """The potential."""
    log_mass: float


def other_modes_rows(
    fit: Fit,
    proto: Prototype,
    draws: dict[str, Any],
    potentials: np.ndarray | None,
    plan: Plan,
    rng_key: Array,
) -> list[Row] | None:
    """The line of the mode of most mass that has no draws, if such a mode is found; None where
    descents do not show the modes.

    Descents from draws, from points around them and near 0, and from draws of the prior end at
    modes. A mode to which the potential rises by 2 nats at least, on straight lines from the draws
    nearest to it, and in whose normal approximation (nearly) no draw lies, has been missed. Its
    mass is that of the approximation, or what importance sampling makes of it where that is less;
    that of the draws is :math:`e^{m/2 - U} |2 \\pi \\Sigma|^{1/2}` with the medians U of their
    potential and m of the chi-square law.

    :param draws: constrained, ``(m, *site)``.
    :param potentials: ``(m,)`` values of U at these draws; None where they are not known.
    """
    info, m = model_info(proto.trace), len(next(iter(draws.values())))
    if not plan.searches or m < FEWEST_DRAWS or info.size > min(MOST_LATENTS, m // 2):
        return None
    key_search, key_mass = random.split(rng_key)
    found = _search(fit, proto.trace, plan, {n: draws[n] for n in info.latents}, key_search)
    x, mean, root, ends = jax.tree.map(lambda y: np.asarray(y, np.float64), found)
    target = potential_of(fit, proto.trace, fit.params[0])
    at = _values_of(target, plan, default_block_size(proto.trace))
    potentials = at(x) if potentials is None else potentials
    fine = np.isfinite(potentials) & np.all(np.isfinite(x), 1)
    if not (fine.mean() > 0.9 and np.all(np.isfinite(root))):
        return None
    potentials = np.where(fine, potentials, np.nan)
    middle = float(np.nanmedian(potentials))
    xi = _solved(root, ends.x - mean)
    chosen, known = _chosen(xi, ends, middle + _AT_MOST)
    if not known.size:
        return None
    if not chosen:
        return []
    # Of a normal, whose U has the median of half a chi-square above the mode.
    of_draws = -middle + 0.5 * special.chdtri(info.size, 0.5) + _log_volume(root)
    curvatures = _curvatures(target, ends.x[chosen], plan)
    modes = _without_draws(at, x, potentials, root, ends.x[chosen], curvatures, of_draws, key_mass)
    if not modes:
        return []
    masses = np.array([of_draws, *(mode.log_mass for mode in modes)])
    shares = np.exp(masses - np.logaddexp.reduce(masses))[1:]
    largest = int(np.argmax(shares))
    if not shares[largest] >= SHARE:
        return []
    mode, share = modes[largest], float(shares[largest])
    where = _place(target, mode.x, draws, name_of(proto.trace))
    lowest = float(np.min(ends.value[known]))
    rounding = 256 * float(np.finfo(found[0].dtype).eps) * max(1.0, abs(lowest))
    if abs(mode.value - lowest) <= max(0.01, rounding):
        verdict = (
            f"not judged: no draw has found a mode at {where}, of the same height as that of the"
            " draws; if it is the same answer with other labels or signs, order or constrain them"
            " in the model, and if not, take AutoMixtureNormal."
        )
        return [Row(QUANTITY, share, None, f"{SHARE}", None, verdict)]
    verdict = (
        f"no draw has found a mode at {where}, which has this share of the mass by its normal"
        " approximation; take AutoMixtureNormal, or keep the best loss of several restarts, or run"
        " chains from dispersed starts."
    )
    return [Row(QUANTITY, share, None, f"{SHARE}", False, verdict)]


def _solved(L: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``(n, d)`` points times the transposed inverse of a lower triangular matrix."""
    return linalg.solve_triangular(L, x.T, lower=True, check_finite=False).T


def _log_volume(root: np.ndarray) -> float:
    """Half the log determinant of 2 pi times a covariance."""
    return float(np.sum(np.log(np.diagonal(root)))) + 0.5 * len(root) * math.log(2 * math.pi)


def _search(fit: Fit, trace: Trace, plan: Plan, draws: Any, rng_key: Array) -> Any:
    """Unconstrained draws with their mean and the root of their covariance, and the ends of the
    descents: first those from draws."""
    info, block = model_info(trace), default_block_size(trace)

    def run(params: Params, draws: Sites, rng_key: Array) -> tuple[Array, Array, Array, End]:
        target = potential_of(fit, trace, params)

        def of_prior(key: Array) -> Array:
            sites = model_trace_of(fit, params, {}, key)
            drawn = {name: sites[name]["value"] for name in info.latents}
            return info.ravel(target.unconstrain("x", drawn))

        x = flat_draws(target, draws, block)
        kept = in_place_of_lost(x)
        mean, root = jnp.mean(kept, 0), unit_root(kept)
        keys = random.split(rng_key, 4)
        widths = jnp.geomspace(*_WIDTHS, EACH, dtype=x.dtype)[:, None]
        moves = widths * random.normal(keys[0], (EACH, info.size), x.dtype)
        around = mean + jnp.matmul(moves, root.T, precision="highest")
        near_zero = random.uniform(keys[1], moves.shape, x.dtype, -2, 2)
        try:
            prior = jax.vmap(of_prior)(random.split(keys[2], EACH))
        except NotImplementedError:  # an improper one
            prior = random.uniform(keys[3], moves.shape, x.dtype, -10, 10)
        starts = jnp.concatenate([kept[:EACH], around, near_zero, prior])
        xi = jax.scipy.linalg.solve_triangular(root, (starts - mean).T, lower=True).T

        def to_x(xi: Array) -> Array:
            return mean + jnp.matmul(root, xi, precision="highest")

        def value_and_grad(xi: Array) -> tuple[Array, Array]:
            value, grad = target.value_and_grad_flat(to_x(xi), {})
            return value, jnp.matmul(root.T, grad, precision="highest")

        # A power of two, so that the blocks are all of one size.
        at_once = 2 ** int(math.log2(min(block, SEARCHES)))
        ends = lax.map(lambda xi: descend(value_and_grad, xi), xi, batch_size=at_once)
        return x, mean, root, ends._replace(x=jax.vmap(to_x)(ends.x))

    return jax.jit(run, compiler_options=plan.options)(fit.params[0], draws, rng_key)


def _chosen(xi: np.ndarray, ends: End, highest: float) -> tuple[list[int], np.ndarray]:
    """A few modes that descents from draws have not found, the lowest first; and those that they
    have found."""
    d = xi.shape[1]
    fine = np.isfinite(ends.value) & (ends.value <= highest) & (ends.decrement <= _DECREMENT)
    fine &= np.all(np.isfinite(xi), 1)
    # A first step may be a long one, into another mode.
    stayed = np.sum(xi[:EACH] ** 2, 1) <= d + 4 * math.sqrt(2 * d)
    known = np.flatnonzero(fine[:EACH] & stayed)
    chosen: list[int] = []
    for k in np.argsort(np.where(fine, ends.value, np.inf)).tolist():
        others = np.concatenate([known, np.array(chosen, int)])
        near = others.size and np.min(np.linalg.norm(xi[k] - xi[others], axis=1)) < _SAME
        if fine[k] and not near and len(chosen) < _LOOKED_AT:
            chosen.append(k)
    return (chosen, known) if known.size else ([], known)


def _values_of(target: Potential, plan: Plan, block: int) -> Callable[[np.ndarray], np.ndarray]:
    """U at ``(n, d)`` points, inf where it is no number."""

    def values(points: Array) -> Array:
        return lax.map(lambda x: target(target.info.unravel(x), {}), points, batch_size=block)

    compiled, dtype = jax.jit(values, compiler_options=plan.options), jnp.result_type(float)

    def at(points: np.ndarray) -> np.ndarray:
        found = np.asarray(compiled(jnp.asarray(points, dtype)), np.float64)
        return np.where(np.isfinite(found), found, np.inf)

    return at


def _curvatures(target: Potential, x: np.ndarray, plan: Plan) -> np.ndarray:
    """The ``(k, d, d)`` second derivatives of U at ``(k, d)`` points."""

    def curvature(x: Array) -> Array:
        return jax.jacfwd(lambda x: target.value_and_grad_flat(x, {})[1])(x)

    compiled = jax.jit(lambda x: lax.map(curvature, x), compiler_options=plan.options)
    H = np.asarray(compiled(jnp.asarray(x, jnp.result_type(float))), np.float64)
    return (H + H.transpose(0, 2, 1)) / 2


def _without_draws(
    at: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    potentials: np.ndarray,
    root: np.ndarray,
    ends: np.ndarray,
    curvatures: np.ndarray,
    of_draws: float,
    rng_key: Array,
) -> list[_Mode]:
    """Those of the ``(k, d)`` points ``ends`` that are modes with hardly a draw, with their masses.

    :param at: values of U.
    :param x: ``(m, d)`` draws, and their ``potentials``.
    :param of_draws: logarithm of the mass of the draws.
    """
    d = x.shape[1]
    e = np.asarray(random.normal(rng_key, (_NORMAL_DRAWS, d)), np.float64)
    found: list[_Mode] = []
    steps = np.linspace(0, 1, _BETWEEN + 2)[1:]  # from a draw to the mode, which is the last one
    for mode, H in zip(ends, curvatures, strict=True):
        scaled = root.T @ H @ root
        if not (np.all(np.isfinite(scaled)) and np.min(np.linalg.eigvalsh(scaled)) > 1e-4):
            continue
        L = np.linalg.cholesky(scaled)
        factor = _solved(L, root)  # its square is the inverse curvature
        distances = np.sum((_solved(root, x - mode) @ L) ** 2, 1)
        if any(np.linalg.norm(_solved(root, mode - other.x) @ L) < _SAME for other in found):
            continue
        distances = np.where(np.isfinite(potentials), distances, np.inf)
        nearest = np.argsort(distances)[:_NEAREST]
        lines = x[nearest, None] + steps[:, None] * (mode - x[nearest, None])
        points = np.concatenate([mode + e @ factor.T, lines.reshape(-1, d)])
        U = at(points)
        lines, value = U[_NORMAL_DRAWS:].reshape(_NEAREST, -1), float(U[-1])
        barrier = np.min(lines.max(1) - np.maximum(potentials[nearest], value))
        normal = _log_volume(root) - float(np.sum(np.log(np.diagonal(L))))
        weights = -U[:_NORMAL_DRAWS] + 0.5 * np.sum(e**2, 1)
        mean_weight = np.logaddexp.reduce(weights) - math.log(_NORMAL_DRAWS)
        mass = normal + min(-value, float(mean_weight))
        share = 1 / (1 + math.exp(min(of_draws - mass, 700.0)))
        inside = float(np.mean(distances <= d + 4 * math.sqrt(2 * d)))
        if barrier >= _BARRIER and inside < _OF_SHARE * share:
            found.append(_Mode(mode, value, mass))
    return found


def _place(
    target: Potential, x: np.ndarray, draws: dict[str, Any], name: Callable[[int], str]
) -> str:
    """The two numbers of the latent sites that are farthest from the draws there."""
    info = target.info
    values = target.postprocess()(info.unravel(jnp.asarray(x, jnp.result_type(float))))
    here = np.concatenate([np.ravel(values[n]) for n in info.latents])
    flat = np.concatenate([np.reshape(draws[n], (len(draws[n]), -1)) for n in info.latents], 1)
    away = np.abs(here - flat.mean(0)) / np.maximum(flat.std(0), 1e-30)
    first = np.sort(np.argsort(-away)[:2])
    return ", ".join(f"{name(int(k))} = {here[k]:.3g}" for k in first)
