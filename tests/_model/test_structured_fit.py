"""The normal of greatest ELBO of many groups, against a posterior by linear algebra."""

from functools import cache

from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.checks import read_global
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.structured_fit import fit_structured
from numpyro_ext.guides import AutoStructuredNormal
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


FEW_GROUPS, SD = 100, 1.5


def few_rows(y):
    """Two rows in each group, which say little of its effect."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("groups", FEW_GROUPS):
        own = numpyro.sample("own", dist.Normal(mean, s))
    with numpyro.plate("rows", 2 * FEW_GROUPS):
        numpyro.sample("y", dist.Normal(own[np.arange(2 * FEW_GROUPS) // 2], SD), obs=y)


def fit_few(model, *args) -> Modes:
    info = read_global(model, args, {}, because="")
    fit = fit_structured(Potential(model, info, {}, args, {}), np.zeros(info.size), 0.0)
    assert fit is not None
    return Modes((fit,), info.shapes)


@pytest.mark.slow
def test_a_scale_has_the_spread_of_its_posterior_where_groups_have_few_rows():
    """The group means are N(mean, s^2 + SD^2 / 2), and their sum of squares alone says of s, given
    the flat mean. With the share r = s^2 / (s^2 + SD^2 / 2) a centred normal has r / (1 - 2 r (1 -
    r))^(1/2) = 0.59 of the standard deviation; 4,000 draws know it to 2 %."""
    rng = np.random.default_rng(0)
    y = np.repeat(2.0 + 0.9 * rng.normal(size=FEW_GROUPS), 2)
    y += SD * rng.normal(size=2 * FEW_GROUPS)
    of_group = y.reshape(-1, 2).mean(1)
    t = np.linspace(-4, 1, 2000)
    variance = np.exp(2 * t) + SD**2 / 2
    square = np.sum((of_group - of_group.mean()) ** 2)
    log_p = -0.5 * ((FEW_GROUPS - 1) * np.log(variance) + square / variance)
    log_p += t - np.exp(2 * t) / 2
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = np.sum(p * t)
    sd = np.sum(p * (t - mean) ** 2) ** 0.5
    guide = AutoStructuredNormal(few_rows, init_from=fit_few(few_rows, y))
    svi = SVI(few_rows, guide, optax.adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), y))
    draws = guide.sample_latent(random.key(1), params, 4000)[:, 1]
    assert abs(float(draws.mean()) - mean) < 0.2 * sd
    assert float(draws.std()) == pytest.approx(sd, rel=0.15)


@pytest.mark.slow
def test_a_factor_nested_in_another_and_levels_with_one_row():
    """Of a linear model with known scales the normal is the posterior."""
    rng = np.random.default_rng(3)
    pupil = np.r_[rng.integers(0, 50, 100), np.arange(50, 60)]  # ten have one row
    school = pupil % 20
    y = rng.normal(size=110) + 1.0

    def nested(y):
        effects = []
        for name, size in (("school", 20), ("pupil", 60)):
            with numpyro.plate(f"{name}s", size):
                effects.append(numpyro.sample(name, dist.Normal(0.0, 0.7)))
        with numpyro.plate("rows", 110):
            numpyro.sample("y", dist.Normal(effects[0][school] + effects[1][pupil], 1.0), obs=y)

    X = np.concatenate([np.eye(20)[school], np.eye(60)[pupil]], axis=1)
    covariance = np.linalg.inv(X.T @ X + np.eye(80) / 0.49)
    fit, sds = fit_few(nested, y).heaviest, np.sqrt(np.diag(covariance))
    assert not fit.problems
    np.testing.assert_allclose(np.asarray(fit.center), covariance @ X.T @ y, atol=0.02)
    np.testing.assert_allclose(fit.sds, sds, rtol=1e-3)
