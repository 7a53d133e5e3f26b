"""A Laplace EM of the models with one linear predictor, in NumPy alone, to hold the others against.

Newton's steps find the mode of all effects for given scales; with v, the variances of the normal
there, each scale goes to the root of ``sum(E[u^2]) / (J + s^2)``, by which the expected log density
of J effects and of its half-normal prior is largest (of s fixed in the prior's part). The effects
of the largest factor are independent given the others, so they are eliminated first.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import digamma, expit

Data = dict[str, np.ndarray]


class Linear(NamedTuple):
    """``eta`` is the sum of columns times coefficients and of one effect of each factor."""

    columns: np.ndarray
    means: np.ndarray
    """Of the normal priors of the coefficients, with their ``sds``."""
    sds: np.ndarray
    factors: dict[str, tuple[np.ndarray, int]]
    """The level of each row, and their number; the last factor is the largest one."""
    slopes: Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray]]
    """The derivative and the curvature (minus the second one) of each row in eta, from eta and its
    variance, which is 0 at a mode, and the shape."""
    widths: dict[str, float]
    """Of the half-normal priors of the scales."""
    walk: str = ""
    """The factor with effects that are the sums of independent steps."""
    y_of_shape: np.ndarray | None = None
    """Of gamma distributed numbers, the shape of which is estimated too."""


class Fit(NamedTuple):
    scales: dict[str, float]
    shape: float
    means: dict[str, np.ndarray]
    sds: dict[str, np.ndarray]


def claims(data: Data) -> Linear:
    y, x = np.asarray(data["y"], float), np.asarray(data["x"], float)
    names = ("brand", "region", "vehicle")
    factors = {n: (np.asarray(data[n]), int(np.max(data[n])) + 1) for n in names}

    def slopes(eta: np.ndarray, variance: np.ndarray, shape: float) -> tuple:
        ratio = shape * y * np.exp(-eta + variance / 2)
        return ratio - shape, ratio

    columns = np.column_stack([np.ones(len(y)), x])
    means, sds = np.array([5.0, 0, 0]), np.array([3.0, 1, 1])
    return Linear(columns, means, sds, factors, slopes, dict.fromkeys(names, 1.0), "", y)


def answers(data: Data) -> Linear:
    """With the effect of a customer around its region."""
    y, customer = np.asarray(data["y"], float), np.asarray(data["customer"])
    number = int(customer.max()) + 1
    regions = 100 if number > 10_000 else 20
    factors = {"region": (customer % regions, regions), "customer": (customer, number)}

    def slopes(eta: np.ndarray, _: np.ndarray, __: float) -> tuple:
        p = expit(eta)
        return y - p, p * (1 - p)

    columns = np.column_stack([np.ones(len(y)), np.asarray(data["x"], float)])
    widths = {"region": 1.0, "customer": 1.0}
    return Linear(columns, np.zeros(2), np.array([2.0, 1]), factors, slopes, widths)


def counts(data: Data) -> Linear:
    y, exposure = (np.asarray(data[name], float) for name in ("y", "exposure"))
    sizes = {n: int(np.max(data[n])) + 1 for n in ("shop", "week", "product")}
    factors = {n: (np.asarray(data[n]), size) for n, size in sizes.items()}

    def slopes(eta: np.ndarray, _: np.ndarray, __: float) -> tuple:
        rate = exposure * np.exp(eta)
        return y - rate, rate

    widths = {"shop": 1.0, "product": 1.0, "week": 0.5}
    one = np.ones((len(y), 1))
    return Linear(one, np.zeros(1), np.full(1, 2.0), factors, slopes, widths, walk="week")


MODELS: dict[str, Callable[[Data], Linear]] = {
    made.__name__: made for made in (claims, answers, counts)
}


class Normal(NamedTuple):
    """The inverse curvature in blocks: the columns and the other factors (``rest``), the largest
    factor (``own``, its diagonal), and between them."""

    rest: np.ndarray
    between: np.ndarray
    own: np.ndarray


def fit(model: Linear, sweeps: int = 200, tol: float = 1e-5) -> Fit:
    names, big = list(model.factors), list(model.factors)[-1]
    C, (own, J) = model.columns.shape[1], model.factors[big]
    starts, R = {}, C
    for name in names[:-1]:
        starts[name] = R
        R += model.factors[name][1]
    at = np.column_stack(
        [np.arange(C)[None].repeat(len(own), 0)]
        + [model.factors[name][0][:, None] + starts[name] for name in names[:-1]]
    )
    values = np.column_stack([model.columns, np.ones((len(own), len(names) - 1))])
    scales, shape = {name: 0.5 * width for name, width in model.widths.items()}, 1.0
    rest, effect = np.zeros(R), np.zeros(J)
    rest[:C] = model.means

    def precision() -> np.ndarray:
        P = np.zeros((R, R))
        P[np.arange(C), np.arange(C)] = model.sds**-2.0
        for name, start in starts.items():
            stop = start + model.factors[name][1]
            K = np.eye(stop - start)
            if name == model.walk:
                K = (step := K - np.eye(stop - start, k=-1)).T @ step
            P[start:stop, start:stop] = K / scales[name] ** 2
        return P

    def newton() -> tuple[np.ndarray, np.ndarray, Normal]:
        eta = np.sum(rest[at] * values, 1) + effect[own]
        slope, curvature = model.slopes(eta, np.zeros_like(eta), shape)
        P, H, B = precision(), np.zeros((R, R)), np.zeros((R, J))
        gradient = np.zeros(R)
        for i in range(at.shape[1]):
            np.add.at(gradient, at[:, i], slope * values[:, i])
            np.add.at(B, (at[:, i], own), curvature * values[:, i])
            for j in range(at.shape[1]):
                np.add.at(H, (at[:, i], at[:, j]), curvature * values[:, i] * values[:, j])
        prior_mean = np.r_[model.means, np.zeros(R - C)]
        gradient -= P @ (rest - prior_mean)
        D = np.bincount(own, curvature, J) + scales[big] ** -2
        g_own = np.bincount(own, slope, J) - effect / scales[big] ** 2
        S = np.linalg.inv(H + P - (B / D) @ B.T)
        step = S @ (gradient - B @ (g_own / D))
        between = -(S @ B) / D
        normal = Normal(S, between, 1 / D - np.sum((B / D) * between, 0))
        return step, (g_own - B.T @ step) / D, normal

    for _ in range(sweeps):
        for _ in range(20):
            step, step_own, normal = newton()
            rest, effect = rest + step, effect + step_own
            if max(np.abs(step).max(), np.abs(step_own).max()) < 1e-4:
                break
        before = dict(scales, shape=shape)
        for name in names:
            J_of = model.factors[name][1]
            if name == big:
                squares = np.sum(effect**2 + normal.own)
            else:
                here = slice(starts[name], starts[name] + J_of)
                second = np.outer(rest[here], rest[here]) + normal.rest[here, here]
                D = np.eye(J_of)
                if name == model.walk:
                    D = D - np.eye(J_of, k=-1)
                squares = np.sum((D @ second) * D)
            w = model.widths[name] ** -2  # squares / s^3 - J / s - w s = 0
            scales[name] = float(np.sqrt((np.sqrt(J_of**2 + 4 * w * squares) - J_of) / (2 * w)))
        if model.y_of_shape is not None:
            shape = best_shape(model, at, values, own, rest, effect, normal)
        now = dict(scales, shape=shape)
        if all(abs(now[k] / before[k] - 1) < tol for k in now):
            break
    variances = np.diagonal(normal.rest)
    means = {n: rest[s : s + model.factors[n][1]] for n, s in starts.items()} | {big: effect}
    sds = {n: variances[s : s + model.factors[n][1]] ** 0.5 for n, s in starts.items()}
    means["columns"], sds["columns"] = rest[:C], variances[:C] ** 0.5
    return Fit(scales, shape, means, sds | {big: normal.own**0.5})


def best_shape(
    model: Linear,
    at: np.ndarray,
    values: np.ndarray,
    own: np.ndarray,
    rest: np.ndarray,
    effect: np.ndarray,
    normal: Normal,
) -> float:
    """The shape a of gamma distributed y with mean exp(eta), eta normal, and the LogNormal(0, 1)
    prior: a zero of the derivative of the expected log density."""
    y = model.y_of_shape
    assert y is not None
    eta = np.sum(rest[at] * values, 1) + effect[own]
    variance = normal.own[own].copy()
    for i in range(at.shape[1]):
        variance += 2 * normal.between[at[:, i], own] * values[:, i]
        for j in range(at.shape[1]):
            variance += normal.rest[at[:, i], at[:, j]] * values[:, i] * values[:, j]
    total = np.sum(np.log(y) - eta - y * np.exp(-eta + variance / 2) + 1)

    def slope(log_a: float) -> float:
        a = np.exp(log_a)
        return float(len(y) * (log_a - digamma(a)) + total - log_a / a)

    return float(np.exp(brentq(slope, -5, 5)))
