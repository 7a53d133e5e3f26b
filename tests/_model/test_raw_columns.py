"""The searches for a center, on columns and on a sequence as they come."""

import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
import pytest

from numpyro_ext._model import surface
from numpyro_ext._model.checks import read_global
from numpyro_ext._model.descent import make_search
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.start import draw_params
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.objectives import taylor_proxy
from numpyro_ext.optim import find_modes

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
SCALES = np.array([1.0, 10.0, 100.0, 300.0])
RAW = np.column_stack([np.ones(500), (1 + RNG.standard_normal((500, 4))) * SCALES])
ETA = RAW @ np.array([0.3, 0.3, 0.02, 0.003, -0.001])
YEAR = np.column_stack([np.ones(500), np.float32(RNG.normal(2000.0, 2.0, 500))])

# The likelihood of a row given its linear predictor, the data, and its first two derivatives.
FAMILIES = {
    "counts": (
        RAW,
        RNG.poisson(np.exp(ETA)),
        lambda eta: dist.Poisson(jnp.exp(eta)),
        lambda y, eta: (y - np.exp(eta), -np.exp(eta)),
    ),
    "durations": (
        RAW,
        RNG.gamma(2.0, np.exp(ETA)),
        lambda eta: dist.Gamma(2.0, jnp.exp(-eta)),
        lambda y, eta: (y * np.exp(-eta) - 2, -y * np.exp(-eta)),
    ),
    "years": (
        YEAR,
        0.15 * (YEAR[:, 1] - 2000) + RNG.standard_normal(500),
        lambda eta: dist.Normal(eta, 1.0),
        lambda y, eta: (y - eta, -np.ones_like(eta)),
    ),
}
PRIOR_SD = 100.0


def searches_of(model, *args):
    """The searches of ``find_modes``, without what takes the place of a mode."""
    info = read_global(model, args, {}, because="the test has one", sums=True)
    params = draw_params(random.key(0), model, info, args, {})
    return make_search(random.key(1), Potential(model, info, params, args, {}).on_one_batch())


def mode_of(x, y, derivatives):
    """The mode by Newton steps in double precision, and the precision there."""
    b = np.linalg.lstsq(x, np.log(np.maximum(y, 0.5)), rcond=None)[0]
    for _ in range(50):
        first, second = derivatives(y, x @ b)
        H = -x.T @ (x * second[:, None]) + np.eye(len(b)) / PRIOR_SD**2
        step = np.linalg.solve(H, x.T @ first - b / PRIOR_SD**2)
        b = b + step * min(1.0, 1 / np.max(np.abs(x @ step)))
    return b, H


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mode_is_found_where_most_starts_overflow(family):
    """Coefficients within 2 of 0, where NumPyro begins, are predictors of some hundreds."""
    x, y, likelihood, derivatives = FAMILIES[family]

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, PRIOR_SD).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=100) as i:
            numpyro.sample("y", likelihood(x[i] @ b), obs=y[i])

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proxy = taylor_proxy(model, *args, rng_key=random.key(0))
    mode, H = mode_of(x, y, derivatives)
    off = np.asarray(proxy.center["b"], np.float64) - mode
    assert np.sqrt(off @ H @ off) < 0.2


def test_a_search_resolves_the_least_curvature_beside_the_largest():
    """A year in place of a centred one: the eigenvalues are 1 to four million million after a
    division by the diagonal, so the least one is below the rounding of float32."""
    x, y, likelihood, derivatives = FAMILIES["years"]

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1))
        numpyro.sample("y", likelihood(x @ b).to_event(1), obs=y)

    args = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    mode = find_modes(model, *args, starts=1).heaviest
    center, H = mode_of(x, y, derivatives)
    off = np.asarray(mode.center, np.float64) - center
    assert np.sqrt(off @ H @ off) < 0.1
    np.testing.assert_allclose(mode.sds, np.sqrt(np.diag(np.linalg.inv(H))), rtol=0.01)


def test_correlated_columns_have_a_center_where_a_matrix_is_too_large(monkeypatch):
    """There the scales are a diagonal, whose steps alone would end far away."""
    monkeypatch.setattr(surface, "MATRIX_UP_TO", 512)
    rng, n = np.random.default_rng(1), 520
    x = rng.standard_normal((2000, n)) @ (rng.standard_normal((n, n)) / n**0.5) + 0.5
    y = x @ rng.standard_normal(n) + rng.standard_normal(2000)

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([n]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    search = searches_of(model, jnp.asarray(x), jnp.asarray(y))
    mode = next(search([np.zeros(n)]))
    H = x.T @ x + np.eye(n) / 100
    off = np.asarray(mode.center, np.float64) - np.linalg.solve(H, x.T @ y)
    assert np.sqrt(off @ H @ off) < 0.2  # of sqrt(520) = 23 for a draw
    assert mode.decrement < 0.05 and mode.factor.shape == (n,)


def local_level(y):
    """A path in raw units whose steps have an unknown width: its density has no mode."""
    step_sd = numpyro.sample("step_sd", dist.HalfNormal(100))
    noise_sd = numpyro.sample("noise_sd", dist.HalfNormal(300))

    def step(z, y):
        z = numpyro.sample("z", dist.Normal(z, step_sd))
        numpyro.sample("y", dist.Normal(z, noise_sd), obs=y)
        return z, None

    scan(step, numpyro.sample("start", dist.Normal(1000, 300)), y)


def test_a_fit_that_has_not_come_near_begins_again_in_units_of_the_prior():
    rng = np.random.default_rng(0)
    level = 1100 + np.cumsum(40 * rng.standard_normal(60))
    y = jnp.asarray(level + 120 * rng.standard_normal(60))
    with pytest.warns(InferenceWarning, match="come from a variational fit instead"):
        modes = find_modes(local_level, y)
    z = modes.unravel(modes.heaviest.center)
    assert modes.heaviest.departure < 1
    assert np.sqrt(np.mean((np.asarray(z["z"]) - level) ** 2)) < 100
    assert 15 < jnp.exp(z["step_sd"]) < 100 and 80 < jnp.exp(z["noise_sd"]) < 180
