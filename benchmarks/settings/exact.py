"""Means and standard deviations of posteriors that are known given one or two numbers, in double
precision: the rest in closed form or by quadrature, these numbers on a fine grid."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import betaln, polygamma, psi

Moments = tuple[np.ndarray, np.ndarray]


def mixed(log_weight: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> Moments:
    """Moments of a mixture over a grid: weights ``(G,)``, means and variances ``(G, n)``."""
    weight = np.exp(log_weight - np.max(log_weight))[:, None]
    weight /= weight.sum()
    middle = (weight * mean).sum(0)
    return middle, np.sqrt((weight * (variance + (mean - middle) ** 2)).sum(0))


def linear_regression(
    x: np.ndarray,
    y: np.ndarray,
    center: np.ndarray,
    precision: np.ndarray,
    log_prior: Callable[[np.ndarray], np.ndarray],
) -> tuple[Moments, Moments]:
    """Those of beta and sigma in ``y ~ N(x beta, sigma)``, ``beta ~ N(center, 1 / precision)``."""
    y = y - x @ center
    rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    middle = np.log(np.std(rest))
    u = middle + np.linspace(-12, 12, 801) / np.sqrt(2 * len(y))
    found = [_given(x, y, precision, np.exp(s)) for s in u]
    log_weight = np.array([w for w, _, _ in found]) + log_prior(np.exp(u)) + u
    beta = mixed(
        log_weight,
        center + np.array([m for _, m, _ in found]),
        np.array([np.diag(c) for _, _, c in found]),
    )
    sigma = mixed(log_weight, np.exp(u)[:, None], np.zeros((len(u), 1)))
    return beta, (sigma[0][0], sigma[1][0])


def _given(x: np.ndarray, y: np.ndarray, precision: np.ndarray, sigma: Any) -> Any:
    """Log evidence, mean and covariance of beta given sigma, a number or ``(rows,)``."""
    x, y = x / np.reshape(sigma, (-1, 1)), y / sigma
    A = x.T @ x + np.diag(precision)
    mean = np.linalg.solve(A, x.T @ y)
    log_sigma = np.sum(np.log(np.broadcast_to(sigma, np.shape(y))))
    fit = 0.5 * (y @ y - mean @ A @ mean)
    return -log_sigma - 0.5 * np.linalg.slogdet(A)[1] - fit, mean, np.linalg.inv(A)


def eight_schools(y: np.ndarray, sigma: np.ndarray, *, centred: bool) -> dict[str, Moments]:
    """Given tau, ``(mu, theta_trans)`` is Gaussian."""
    u = np.linspace(-12, 8, 2001)
    weights, means, variances = [], [], []
    for log_tau in u:
        tau = np.exp(log_tau)
        x = np.column_stack([np.ones(8), tau * np.eye(8)])
        w, m, c = _given(x, y, np.array([1 / 25, *np.ones(8)]), sigma)
        weights.append(w - np.log(25 + tau**2) + log_tau)
        shown = _shown(8, tau, centred)
        means.append(shown @ m)
        variances.append(np.diag(shown @ c @ shown.T))
    weight, mean, variance = (np.array(v) for v in (weights, means, variances))
    found, sd = mixed(weight, mean, variance)
    tau = mixed(weight, np.exp(u)[:, None], np.zeros((len(u), 1)))
    site = "theta" if centred else "theta_trans"
    return {
        "mu": (found[0], sd[0]),
        site: (found[1:], sd[1:]),
        "tau": (tau[0][0], tau[1][0]),
    }


def _shown(groups: int, tau: float, centred: bool) -> np.ndarray:
    """Maps ``(mu, offsets / tau)`` to what the model samples."""
    shown = np.eye(groups + 1)
    if centred:
        shown[1:, 1:] *= tau
        shown[1:, 0] = 1
    return shown


def varying_intercepts(
    group: np.ndarray, x: np.ndarray, y: np.ndarray, *, centred: bool
) -> dict[str, Moments]:
    """Given tau and sigma, ``(mu, a_raw, slope)`` is Gaussian."""
    groups, rows = int(group.max()) + 1, len(y)
    z = np.column_stack([np.ones(rows), np.eye(groups)[group], x])
    residual = y - z @ np.linalg.lstsq(z, y, rcond=None)[0]
    log_taus = np.log(0.7) + np.linspace(-8, 8, 97) / np.sqrt(2 * groups)
    log_sigmas = np.log(np.std(residual)) + np.linspace(-8, 12, 97) / np.sqrt(2 * rows)
    G, b, yy = z.T @ z, z.T @ y, y @ y
    prior = np.array([1 / 25, *np.ones(groups), 1 / 25])
    weights, means, variances, scales = [], [], [], []
    for log_tau in log_taus:
        tau = np.exp(log_tau)
        by = np.array([1, *np.full(groups, tau), 1])
        shown = np.eye(groups + 2)
        shown[:-1, :-1] = _shown(groups, tau, centred)
        for log_sigma in log_sigmas:
            s2 = np.exp(2 * log_sigma)
            A = by[:, None] * G * by / s2 + np.diag(prior)
            cov = np.linalg.inv(A)
            m = cov @ (by * b) / s2
            fit = 0.5 * (yy / s2 - m @ A @ m)
            log_prior = -(np.exp(2 * log_tau) + s2) / 8 + log_tau + log_sigma
            weights.append(-rows * log_sigma - 0.5 * np.linalg.slogdet(A)[1] - fit + log_prior)
            means.append(shown @ m)
            variances.append(np.einsum("ij,jk,ik->i", shown, cov, shown))
            scales.append((tau, np.exp(log_sigma)))
    weight, scale = np.array(weights), np.array(scales)
    mean, sd = mixed(weight, np.array(means), np.array(variances))
    ends, end_sds = mixed(weight, scale, np.zeros_like(scale))
    return {
        "mu": (mean[0], sd[0]),
        "a" if centred else "a_raw": (mean[1:-1], sd[1:-1]),
        "slope": (mean[-1], sd[-1]),
        "tau": (ends[0], end_sds[0]),
        "sigma": (ends[1], end_sds[1]),
    }


def baseball(hits: np.ndarray, at_bats: int) -> dict[str, Moments]:
    """Given m and kappa, every phi is Beta; all as unconstrained numbers."""
    logit_m, log_kappa = np.meshgrid(np.linspace(-3, 1, 401), np.linspace(-8, 16, 801))
    m, kappa = 1 / (1 + np.exp(-logit_m)).ravel(), 1 + np.exp(log_kappa).ravel()
    a = m[:, None] * kappa[:, None] + hits
    b = (1 - m[:, None]) * kappa[:, None] + at_bats - hits
    evidence = betaln(a, b).sum(1) - len(hits) * betaln(m * kappa, (1 - m) * kappa)
    log_prior = np.log(m * (1 - m)) - 2.5 * np.log(kappa) + log_kappa.ravel()
    phi = psi(a) - psi(b), polygamma(1, a) + polygamma(1, b)
    scales = np.stack([logit_m.ravel(), log_kappa.ravel()], 1)
    mean, sd = mixed(evidence + log_prior, scales, np.zeros_like(scales))
    return {
        "m": (mean[0], sd[0]),
        "kappa": (mean[1], sd[1]),
        "phi": mixed(evidence + log_prior, *phi),
    }


def baseball_logits(hits: np.ndarray, at_bats: int) -> dict[str, Moments]:
    """Given loc and scale, every alpha is an integral by itself."""
    nodes, node_weights = np.polynomial.hermite_e.hermegauss(100)
    locs, log_scales = np.linspace(-2.5, 0.0, 201), np.linspace(-12, 3, 301)
    weights, means, variances, scales = [], [], [], []
    for log_scale in log_scales:
        scale = np.exp(log_scale)
        alpha = locs[:, None] + scale * nodes
        success, failure = -np.logaddexp(0, -alpha), -np.logaddexp(0, alpha)
        rows = hits[:, None, None] * success + (at_bats - hits[:, None, None]) * failure
        top = rows.max(-1, keepdims=True)
        w = node_weights * np.exp(rows - top)
        total = w.sum(-1)
        mean = (w * alpha).sum(-1) / total
        variances.append(((w * (alpha - mean[..., None]) ** 2).sum(-1) / total).T)
        log_prior = -0.5 * (locs + 1) ** 2 - np.log1p(scale**2) + log_scale
        weights.append((np.log(total) + top[..., 0]).sum(0) + log_prior)
        means.append(mean.T)
        scales.append(np.stack([locs, np.full_like(locs, log_scale)], 1))
    weight = np.concatenate(weights)
    ends = np.concatenate(scales)
    mean, sd = mixed(weight, ends, np.zeros_like(ends))
    return {
        "loc": (mean[0], sd[0]),
        "scale": (mean[1], sd[1]),
        "alpha": mixed(weight, np.concatenate(means), np.concatenate(variances)),
    }


def normal_groups(
    log_likelihoods: np.ndarray,
    points: np.ndarray,
    mean: tuple[np.ndarray, np.ndarray],
    scale: tuple[np.ndarray, np.ndarray],
) -> tuple[Moments, Moments, Moments]:
    """Those of m, s and the numbers ``x_j ~ N(m, s)``: given m and s, each is an integral by
    itself, over evenly spaced points that resolve s.

    :param log_likelihoods: ``(J, P)``, of the data of each group at the points.
    :param points: ``(P,)``.
    :param mean: evenly spaced values of m, and their log prior.
    :param scale: values of s whose logarithms are evenly spaced, and their log prior.
    """
    top = log_likelihoods.max(1)
    likelihoods = np.exp(log_likelihoods - top[:, None]).T
    powers = np.concatenate([likelihoods, likelihoods * points[:, None]], 1)
    powers = np.concatenate([powers, likelihoods * points[:, None] ** 2], 1)
    parts = []
    for m in mean[0]:
        density = np.exp(-0.5 * ((points - m) / scale[0][:, None]) ** 2) / scale[0][:, None]
        parts.append(np.split(density @ powers, 3, axis=1))
    mass, first, second = (np.concatenate(part) for part in zip(*parts, strict=True))
    with np.errstate(divide="ignore"):
        log_weight = np.log(mass).sum(1)
    log_weight += np.add.outer(mean[1], scale[1] + np.log(scale[0])).ravel()
    middle = first / np.maximum(mass, 1e-300)
    numbers = mixed(log_weight, middle, second / np.maximum(mass, 1e-300) - middle**2)
    both = np.stack(np.meshgrid(mean[0], scale[0], indexing="ij"), -1).reshape(-1, 2)
    (m, s), (m_sd, s_sd) = mixed(log_weight, both, np.zeros_like(both))
    return (m, m_sd), (s, s_sd), numbers


def sorted_pair(x: np.ndarray, scale: float, prior: float) -> Moments:
    """Of the smaller and the larger of two locations of an even mixture of normals."""
    grid = np.linspace(-4, 4, 801)
    kernel = np.exp(-0.5 * ((x[:, None] - grid) / scale) ** 2)
    log_weight = np.zeros((len(grid), len(grid)))
    for row in kernel:
        log_weight += np.log(row[:, None] + row + 1e-300)
    log_weight -= 0.5 * (grid[:, None] ** 2 + grid**2) / prior**2
    pair = np.stack([np.minimum(grid[:, None], grid), np.maximum(grid[:, None], grid)], -1)
    pair = pair.reshape(-1, 2)
    return mixed(log_weight.ravel(), pair, np.zeros_like(pair))


def logistic(x: np.ndarray, y: np.ndarray, scale: float) -> Moments:
    """Mode and standard deviations of a logistic regression: exact up to order 1/N."""
    w = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(w)) / scale**2
        w = w - np.linalg.solve(hessian, x.T @ (p - y) + w / scale**2)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))
