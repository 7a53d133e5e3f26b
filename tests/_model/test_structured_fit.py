"""The normal of greatest ELBO of many groups, against a posterior by linear algebra."""

from functools import cache

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.arrow import Arrow
from numpyro_ext.optim import find_modes

FIRMS, WEEKS, N = 480, 60, 3000


@cache
def data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    firm, week = rng.integers(0, FIRMS, N), rng.integers(0, WEEKS, N)
    level = 5.0 + 0.8 * rng.normal(size=FIRMS)[firm] + 0.3 * rng.normal(size=WEEKS)[week]
    return {"firm": firm, "week": week, "y": level + rng.normal(size=N)}


def model(firm, week, y, scales=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    if scales is None:
        s_firm = numpyro.sample("s_firm", dist.HalfNormal(1.0))
        s_week = numpyro.sample("s_week", dist.HalfNormal(1.0))
    else:
        s_firm, s_week = scales
    with numpyro.plate("firms", FIRMS):
        of_firm = numpyro.sample("of_firm", dist.Normal(0.0, s_firm))
    with numpyro.plate("weeks", WEEKS):
        of_week = numpyro.sample("of_week", dist.Normal(0.0, s_week))
    with numpyro.plate("rows", N):
        level = mean + of_firm[firm] + of_week[week]
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def normal_given(s_firm: float, s_week: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Mean and covariance of mean and effects given the scales, and the log evidence."""
    d = data()
    X = np.zeros((N, 1 + FIRMS + WEEKS))
    X[:, 0] = 1
    X[np.arange(N), 1 + d["firm"]] = 1
    X[np.arange(N), 1 + FIRMS + d["week"]] = 1
    variances = np.r_[100.0, np.full(FIRMS, s_firm**2), np.full(WEEKS, s_week**2)]
    precision = X.T @ X + np.diag(1 / variances)
    covariance = np.linalg.inv(precision)
    center = covariance @ (X.T @ d["y"])
    log_det = np.linalg.slogdet(precision)[1] + np.sum(np.log(variances))
    fit = d["y"] @ d["y"] - center @ precision @ center
    return center, covariance, -0.5 * (fit + log_det + N * np.log(2 * np.pi))


@pytest.mark.slow
def test_a_normal_posterior_is_found_exactly():
    """Known scales: 541 crossed numbers of a linear model, and its evidence."""
    modes = find_modes(model, **data(), scales=(0.8, 0.3))
    assert not modes.problems
    center, covariance, evidence = normal_given(0.8, 0.3)
    fit, sds = modes.heaviest, np.sqrt(np.diag(covariance))
    assert isinstance(fit.factor, Arrow)
    np.testing.assert_allclose((np.asarray(fit.center) - center) / sds, 0, atol=0.02)
    np.testing.assert_allclose(fit.sds, sds, rtol=1e-3)
    root = np.asarray(fit.factor.dense(), float)
    correlation = root @ root.T / np.outer(sds, sds)
    np.testing.assert_allclose(correlation, covariance / np.outer(sds, sds), atol=2e-3)
    assert modes.log_evidence == pytest.approx(evidence, abs=0.1)


@cache
def scales_by_quadrature() -> np.ndarray:
    """Mean and sd of the logarithms of both scales, ``(2, 2)``."""
    grids = np.linspace(-0.42, 0.02, 12), np.linspace(-1.75, -0.75, 12)
    log_p = np.array(
        [[normal_given(*np.exp([a, b]))[2] - np.exp(2 * a) / 2 - np.exp(2 * b) / 2 + a + b
          for b in grids[1]] for a in grids[0]]
    )  # fmt: skip
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    means = [np.sum(p.sum(1 - i) * grid) for i, grid in enumerate(grids)]
    sds = [
        np.sum(p.sum(1 - i) * (grid - m) ** 2) ** 0.5
        for i, (grid, m) in enumerate(zip(grids, means, strict=True))
    ]
    return np.array([means, sds]).T


@pytest.mark.slow
def test_scales_are_those_of_the_posterior():
    """Unknown scales: a joint mode has them at 0, the ELBO within .2 sd of their posterior."""
    modes = find_modes(model, **data())
    assert not modes.problems
    places = [1, 2]
    for (mean, sd), k in zip(scales_by_quadrature(), places, strict=True):
        assert abs(float(modes.heaviest.center[k]) - mean) < 0.2 * sd
        assert modes.heaviest.sds[k] == pytest.approx(sd, rel=0.2)
    assert modes.heaviest.slope < 1
