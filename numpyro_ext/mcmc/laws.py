r"""The largest step at which each kernel's bias is what the user allows, from its law on a
Gaussian.

In whitened coordinates the target is near :math:`N(0, I)`, and minibatch gradients have noise of
the variances :math:`s_k^2`, ``(n,)``. The laws are exact in the step size. Variances are relative
to the right ones, and b is the user's bound on their relative error.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from scipy.linalg import solve_discrete_lyapunov

from numpyro_ext.mcmc.settings import Settings

LARGEST_STEP = 0.5
_SMALLEST_STEP = 1e-4
_FRICTIONS = np.geomspace(1.0, 1000.0, 60)


def choose_sgld(
    noise: np.ndarray, max_bias: float, scale: np.ndarray | float = 1.0, *, stiffness: float = 1.0
) -> Settings:
    r"""
    SGLD with the step :math:`\epsilon G_k` in coordinate k,

    .. math:: \mathrm{Var}_k = (2 + \epsilon G_k s_k^2) / (2 - \epsilon G_k),

    so :math:`\epsilon = \min_k 2b / (G_k (s_k^2 + 1 + b))`.

    :param scale: G, one number or ``(n,)``.
    :param stiffness: largest curvature h; the step is at most :math:`0.5 / (G h)`.
    """
    scale = np.broadcast_to(scale, np.shape(noise))
    eps = float(np.min(2 * max_bias / (scale * (noise + 1 + max_bias))))
    eps = min(eps, LARGEST_STEP / (float(np.max(scale)) * stiffness))
    step = eps * scale
    ratio = (2 + step * noise) / (2 - step)
    transitions = float(np.max((2 - step) / step))
    return Settings(eps, variance_ratio=_worst(ratio), transitions=transitions)


def choose_sghmc(
    noise: np.ndarray,
    max_bias: float,
    *,
    friction: float | None = None,
    least_injected: float = 0.0,
    law: str = "aboba",
    stiffness: float = 1.0,
) -> Settings:
    r"""
    With :math:`s^2` the largest noise that is not corrected for:

    - ABOBA: :math:`1 + \tfrac{\epsilon^2}{4} s^2 \coth(C\epsilon/2)`;
    - BAOAB: the same with the noise term over :math:`1 - \epsilon^2/4`;
    - Euler: :math:`(1 + \epsilon s^2 / 2C) (1 - \epsilon^2 / (2 (2 - \epsilon C)))^{-1}`.

    The kinetic temperature at the end of a step is that over :math:`1 - \epsilon^2/4` for ABOBA,
    that over :math:`1 - C\epsilon/2` for Euler, whose covariance of z and r is :math:`-\epsilon/2`
    times the variance of r, and for BAOAB 1 plus :math:`4 c^2 / (1 + c)^2` times the excess of that
    over 1, with :math:`c = e^{-C\epsilon}`.

    :param friction: C; None tries many.
    :param least_injected: variance that the injected noise, as a gradient noise, must not be below:
        :math:`4 \tanh(C\epsilon/2) / \epsilon^2`.
    :param stiffness: largest curvature h; the step is at most :math:`0.5 / \sqrt h`.
    """
    eps, C = _grid(friction, stiffness)
    s2, coth = float(np.max(noise)), 1 / np.tanh(C * eps / 2)
    if law == "euler":
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (1 + eps * s2 / (2 * C)) / (1 - eps**2 / (2 * (2 - eps * C)))
        ratio = np.where((eps * C < 1) & (ratio > 0), ratio, np.inf)
    else:
        ratio = 1 + eps**2 / 4 * s2 * coth / (1 - eps**2 / 4 if law == "baoab" else 1.0)
    ratio = np.where(4 / coth / eps**2 < least_injected, np.inf, ratio)
    choice = _cheapest(eps, C, C, ratio, max_bias)
    step, rate, excess = choice.step_size, cast(float, choice.friction), choice.variance_ratio - 1
    if law == "baoab":
        c = np.exp(-rate * step)
        temperatures = 1.0, float(1 + 4 * c**2 / (1 + c) ** 2 * excess)
    elif law == "aboba":
        temperatures = 1 / (1 - step**2 / 4), (1 + excess) / (1 - step**2 / 4)
    else:
        cold, wide = 1 / (1 - step**2 / (2 * (2 - step * rate))), 1 - step * rate / 2
        temperatures = cold / wide, (1 + excess) / wide
    return replace(choice, kinetic_temperature=temperatures, integrator=law)


def choose_sgnht(
    noise: np.ndarray,
    max_bias: float,
    *,
    friction: float | None = None,
    shared: bool = True,
    stiffness: float = 1.0,
) -> Settings:
    r"""
    The friction :math:`\xi` of a thermostat makes the mean over its coordinates of

    .. math:: \mathrm{Var}_k = (2 C\epsilon + \epsilon^2 s_k^2) \coth(\xi\epsilon/2)
              / (4 (1 - \epsilon^2/4))

    equal 1, so each is off by its share of noise above or below the mean.

    :param bool shared: True if several coordinates share a thermostat; else each has its own.
    """
    eps, C = _grid(friction, stiffness)
    mean = float(np.mean(noise))
    # coth(xi eps / 2) = 1 / level has a solution only for a level below 1.
    level = (2 * C * eps + eps**2 * mean) / (4 * (1 - eps**2 / 4))
    with np.errstate(invalid="ignore"):
        xi = 2 / eps * np.arctanh(np.where(level < 1, level, np.nan))
    total = 2 * C * eps + eps**2 * mean
    hot, cold = ((2 * C * eps + eps**2 * s) / total for s in (np.max(noise), np.min(noise)))
    ratio = np.where(hot - 1 > 1 - cold, hot, cold) if shared else np.ones_like(eps)
    return _cheapest(eps, C, xi, ratio, max_bias)


def choose_linear(diffusion: np.ndarray, noise: np.ndarray, max_bias: float) -> Settings:
    r"""
    Euler steps of a Langevin diffusion with a matrix D: the covariance solves

    .. math:: \Sigma = M \Sigma M^\top + 2 \epsilon D + \epsilon^2 D S D^\top,
              \qquad M = I - \epsilon D.

    :param diffusion: D, ``(n, n)`` in coordinates in which the target is N(0, I).
    :param noise: S, ``(n,)``.
    """

    def ratio(eps: float) -> float:
        M = np.eye(len(diffusion)) - eps * diffusion
        if np.max(np.abs(np.linalg.eigvals(M))) >= 1:
            return np.inf
        added = 2 * eps * diffusion + eps**2 * (diffusion * noise) @ diffusion.T
        return _worst(np.diag(solve_discrete_lyapunov(M, added)))

    slowest = 1 / np.min(np.abs(np.real(np.linalg.eigvals(diffusion))))
    eps = _largest(lambda eps: abs(ratio(eps) - 1) <= max_bias, slowest)
    return Settings(eps, variance_ratio=ratio(eps), transitions=2 * slowest / eps)


def _grid(friction: float | None, stiffness: float) -> list[np.ndarray]:
    """Steps and frictions to try, ``(60, frictions)`` each."""
    largest = max(LARGEST_STEP / stiffness**0.5, 2 * _SMALLEST_STEP)
    steps = np.geomspace(_SMALLEST_STEP, largest, 60)
    frictions = _FRICTIONS if friction is None else np.array([friction])
    return list(np.meshgrid(steps, frictions, indexing="ij"))


def _largest(allowed: Callable[[float], bool], scale: float) -> float:
    """The largest step of a fine geometric grid below which all are allowed."""
    grid = np.geomspace(1e-8, 10.0, 400) * scale
    num = next((k for k, eps in enumerate(grid) if not allowed(float(eps))), len(grid))
    return float(grid[max(num - 1, 0)])


def _worst(ratio: Any) -> float:
    """The entry farthest from 1."""
    ratio = np.ravel(ratio)
    return float(ratio[np.argmax(np.abs(ratio - 1))])


def _cheapest(
    eps: np.ndarray, C: np.ndarray, effective: np.ndarray, ratio: np.ndarray, max_bias: float
) -> Settings:
    """The fewest transitions per independent draw among the settings whose bias is allowed."""
    transitions = (effective + 1 / effective) / eps
    error = np.where(np.isfinite(transitions), np.abs(ratio - 1), np.inf)
    allowed = error <= max_bias
    score = np.where(allowed, transitions, np.inf) if np.any(allowed) else error
    best = np.unravel_index(np.argmin(score), ratio.shape)
    return Settings(float(eps[best]), float(C[best]), float(ratio[best]), float(transitions[best]))
