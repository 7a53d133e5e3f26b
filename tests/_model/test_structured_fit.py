"""The normal of greatest ELBO of many groups, against a posterior by linear algebra."""

from functools import cache

from jax import random
import jax.numpy as jnp
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
    fit = fit_structured(Potential(model, info, {}, args, {}), np.zeros(info.size))
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
    mean, sd = of_density(log_p + t - np.exp(2 * t) / 2, t)
    draws = draws_at_start(few_rows, y)[:, 1]
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


def draws_at_start(model, *args) -> np.ndarray:
    """4,000 draws of the guide before any step."""
    guide = AutoStructuredNormal(model, init_from=fit_few(model, *args))
    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), *args))
    return np.asarray(guide.sample_latent(random.key(1), params, 4000))


def of_density(log_p: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """Mean and sd of a density on a grid."""
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ t
    return float(mean), float((p @ (t - mean) ** 2) ** 0.5)


def unknown_noise(y):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("groups", 40):
        own = numpyro.sample("own", dist.Normal(mean, s))
    with numpyro.plate("rows", 80):
        numpyro.sample("y", dist.Normal(own[np.arange(80) // 2], noise), obs=y)


@pytest.mark.parametrize("data", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.slow
def test_forty_groups_of_two_rows_with_an_unknown_noise(data):
    """Before any step: the scale, which may be 0, and the noise. Their posterior is on a grid: the
    sums of squares between groups and within are independent, given the flat mean. The steps from
    the first start do not end on the data of seed 2."""
    rng = np.random.default_rng(data)
    y = 2 + np.repeat(0.3 * rng.normal(size=40), 2) + rng.normal(size=80)
    pairs_of = y.reshape(-1, 2)
    between = np.sum((pairs_of.mean(1) - y.mean()) ** 2)
    within = np.sum((pairs_of - pairs_of.mean(1, keepdims=True)) ** 2)
    t, u = np.linspace(-9, 1, 500), np.linspace(-0.7, 0.7, 300)
    T, U = np.meshgrid(t, u, indexing="ij")
    variance = np.exp(2 * T) + np.exp(2 * U) / 2
    log_p = T + U - np.exp(2 * T) / 2 - np.exp(2 * U) / 8
    log_p -= 40 * U + within / np.exp(2 * U) / 2
    log_p -= (39 * np.log(variance) + between / variance) / 2
    guide = AutoStructuredNormal(unknown_noise)
    svi = SVI(unknown_noise, guide, optax.adam(1e-3), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), y))
    draws = np.exp(guide.sample_latent(random.key(1), params, 4000)[:, 1:3])
    for x, axis, grid in zip(draws.T, (1, 0), (t, u), strict=True):
        p = np.exp(log_p - log_p.max()).sum(axis)
        p /= p.sum()
        mean = p @ np.exp(grid)
        sd = (p @ (np.exp(grid) - mean) ** 2) ** 0.5
        assert abs(float(x.mean()) - mean) < 0.2 * sd
        assert float(x.std()) == pytest.approx(sd, rel=0.2)


WEEK, SHOP = np.random.default_rng(5).integers(0, 20, (2, 60))


def walk(y):
    """Three rows in a week, of which the walk has a scale that may be near 0."""
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    path = numpyro.sample("path", dist.GaussianRandomWalk(s, 20))
    with numpyro.plate("shops", 20):
        own = numpyro.sample("own", dist.Normal(0.0, 0.5))
    with numpyro.plate("rows", 60):
        numpyro.sample("y", dist.Normal(path[WEEK] + own[SHOP], 1.0), obs=y)


@pytest.mark.slow
def test_the_scale_of_a_walk_of_few_rows():
    """Given s all rows are normal, with s^2 min(t, t') between weeks t and t'."""
    t = np.linspace(-7, 1, 1000)
    weeks = np.minimum.outer(WEEK + 1, WEEK + 1)
    rest = np.eye(60) + 0.25 * np.equal.outer(SHOP, SHOP)
    root = np.linalg.cholesky(rest + 0.2**2 * weeks)
    y = root @ np.random.default_rng(6).normal(size=60)
    log_p = []
    for u in t:
        C = rest + np.exp(2 * u) * weeks
        log_p.append(-(np.linalg.slogdet(C)[1] + y @ np.linalg.solve(C, y)) / 2)
    mean, sd = of_density(np.array(log_p) + t - np.exp(2 * t) / 2, t)
    draws = draws_at_start(walk, y)[:, 0]
    assert abs(float(draws.mean()) - mean) < 0.2 * sd
    assert float(draws.std()) == pytest.approx(sd, rel=0.2)


PATIENTS, WHEN, NOISE = 60, np.linspace(-1, 1, 5), 1.5


def pairs(y):
    """An intercept and a slope of each patient, which go together."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(2).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("patients", PATIENTS):
        law = dist.MultivariateNormal(jnp.zeros(2), scale_tril=tau[:, None] * root)
        own = numpyro.sample("own", law)
    with numpyro.plate("rows", y.size):
        of_row = np.repeat(np.arange(PATIENTS), len(WHEN))
        level = own[of_row, 0] + (slope + own[of_row, 1]) * np.tile(WHEN, PATIENTS)
        numpyro.sample("y", dist.Normal(level, NOISE), obs=y.ravel())


def log_scales_of_pairs(y) -> np.ndarray:
    """Mean and sd of log tau ``(2, 2)``, on a grid of tau and the correlation: given these all rows
    of a patient are normal, and the slope is one more normal number."""
    a, b, r = np.meshgrid(
        np.linspace(-0.7, 0.9, 30), np.linspace(-4, 1, 40), np.linspace(-0.98, 0.98, 25)
    )
    X, T = np.stack([np.ones(5), WHEN], 1), np.exp([a, b])
    both = r * T[0] * T[1]
    S = np.moveaxis(np.array([[T[0] ** 2, both], [both, T[1] ** 2]]), (0, 1), (3, 4))
    C = X @ S @ X.T + NOISE**2 * np.eye(5)
    P = np.linalg.inv(C)
    total, scatter = y.sum(0), y.T @ y
    precision = 1 + PATIENTS * np.einsum("...ij,i,j", P, WHEN, WHEN)
    pull = np.einsum("...ij,i,j", P, WHEN, total)
    log_p = -PATIENTS / 2 * np.linalg.slogdet(C)[1] - np.einsum("...ij,ij", P, scatter) / 2
    log_p += pull**2 / precision / 2 - np.log(precision) / 2
    log_p += a + b - np.sum(T**2, 0) / 8 + np.log(1 - r**2)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    means = np.array([np.sum(p * t) for t in (a, b)])
    sds = [np.sum(p * (t - m) ** 2) ** 0.5 for t, m in zip((a, b), means, strict=True)]
    return np.stack([means, sds], 1)


@pytest.mark.slow
def test_pairs_of_which_the_slopes_say_little():
    """Steps that are taken whole run away here, since the curvature depends on where they end. The
    scale of the slopes has a long tail to 0, which the normal of greatest ELBO leaves out."""
    rng = np.random.default_rng(1)
    own = rng.multivariate_normal([0, 0], [[1.5, 0.4], [0.4, 0.3]], PATIENTS)
    y = own[:, :1] + (0.5 + own[:, 1:]) * WHEN + NOISE * rng.normal(size=(PATIENTS, 5))
    fit, right = fit_few(pairs, y).heaviest, log_scales_of_pairs(y)
    off = (np.asarray(fit.center)[1:3] - right[:, 0]) / right[:, 1]
    assert np.all(np.abs(off) < [0.2, 1.0])
    ratio = fit.sds[1:3] / right[:, 1]
    assert np.all((ratio > [0.85, 0.3]) & (ratio < 1.1))
