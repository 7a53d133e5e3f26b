"""evidence_bounds: reference numbers, errors against replicates, a model with a known answer."""

import math

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest
from scipy.stats import multivariate_normal

from numpyro_ext.diagnostics import evidence_bounds, to_arviz

LW = [-1.2, 0.3, -2.5, 0.9, -0.1, -4.0]
ALPHAS = (-1.0, 0.0, 0.5, 1.0, 2.0)


@pytest.mark.x64
def test_reference_values():
    bounds = evidence_bounds(LW, alphas=ALPHAS)
    expected = [0.1908302500, -0.1594072686, -0.5089126167, -1.1, -2.4898018670]
    np.testing.assert_allclose(bounds.values, expected, rtol=1e-9)
    assert bounds.alphas == ALPHAS
    np.testing.assert_allclose(bounds.log_evidence, expected[1], rtol=1e-9)
    assert bounds.log_evidence_se == bounds.standard_errors[1]
    share = np.exp(LW) / np.exp(LW).sum()
    np.testing.assert_allclose(bounds.effective_sample_size, 1 / np.sum(share**2))
    np.testing.assert_allclose(bounds.max_weight_share, share[3])


def test_orders_come_back_as_they_were_given_and_bounds_fall_with_them():
    assert evidence_bounds(LW).alphas == (1.0, 0.5, 0.0, -1.0)
    orders = (3.0, -2.0, 0.999, 1.0, 1.001)
    bounds = evidence_bounds(LW, alphas=orders)
    assert bounds.alphas == orders
    assert np.all(np.diff(bounds.values[np.argsort(orders)]) < 0)
    near = evidence_bounds(LW, alphas=(1 - 1e-9, 1.0))
    np.testing.assert_allclose(near.values[0], near.values[1], atol=1e-6)
    np.testing.assert_allclose(near.standard_errors[0], near.standard_errors[1], rtol=1e-6)


def test_units_are_bounded_separately_and_summed():
    rng = np.random.default_rng(0)
    lw = rng.normal(size=(50, 2, 3))
    whole = evidence_bounds(lw, alphas=ALPHAS)
    parts = [evidence_bounds(lw[:, i, j], alphas=ALPHAS) for i in range(2) for j in range(3)]
    np.testing.assert_allclose(whole.values, sum(p.values for p in parts), rtol=1e-12)
    squares = sum(p.standard_errors**2 for p in parts)
    np.testing.assert_allclose(whole.standard_errors, np.sqrt(squares), rtol=1e-12)
    for field in ("effective_sample_size", "max_weight_share"):
        each = np.reshape([getattr(p, field) for p in parts], (2, 3))
        np.testing.assert_allclose(getattr(whole, field), each, rtol=1e-12)


def test_standard_error_is_that_of_replicates():
    """lw ~ N(-s^2/2, s^2): the bound of order 1 - a is -s^2/2 + a s^2/2."""
    rng = np.random.default_rng(1)
    s = 0.5
    runs = [
        evidence_bounds(rng.normal(-(s**2) / 2, s, 2000), alphas=(1.0, 0.5, 0.0, -1.0, 1.5))
        for _ in range(400)
    ]
    values = np.array([run.values for run in runs])
    error = values.std(0, ddof=1)
    a = 1 - np.array(runs[0].alphas)
    exact = (a - 1) * s**2 / 2
    assert np.all(abs(values.mean(0) - exact) < 4 * error / 20 + 1e-3)
    # The sd of 400 replicates is known to about 4 %.
    np.testing.assert_allclose(np.mean([r.standard_errors for r in runs], 0), error, rtol=0.15)


def model(x):
    with numpyro.plate("data", len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)


def test_fits_and_trees_are_taken_like_weights_and_restarts_are_more_draws():
    """Restarts of the exact guide on a far data set: every weight is the evidence."""
    x = 6.0 + jnp.arange(3.0)

    def conjugate(x):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", dist.Normal(z).expand([3]).to_event(1), obs=x)

    svi = SVI(conjugate, AutoNormal(conjugate), numpyro.optim.Adam(0.1), Trace_ELBO())
    # p(z | x) = N(sum x / 4, 1 / 4); the second restart is a little too wide.
    fits = [{"z_auto_loc": jnp.array(21 / 4), "z_auto_scale": jnp.array(s)} for s in (0.5, 0.55)]
    args = {"result": fits, "model_args": (x,), "num_samples": 500}
    covariance = np.eye(3) + 1.0
    log_p = multivariate_normal(np.zeros(3), covariance).logpdf(np.asarray(x))
    tree = to_arviz(svi, log_likelihood=False, **args)
    of_fit = evidence_bounds(svi, **args)
    assert abs(of_fit.log_evidence - log_p) < 4 * of_fit.log_evidence_se + 1e-4
    assert of_fit.effective_sample_size.shape == ()
    for obj in (tree, tree.sample_stats.log_weight):
        np.testing.assert_array_equal(evidence_bounds(obj).values, of_fit.values)


def test_draws_without_density():
    lw = np.array([-np.inf, 0.3, -800.0, 800.0])
    bounds = evidence_bounds(lw, alphas=(1.0, 0.0, 2.0))
    assert bounds.values[0] == bounds.values[2] == -np.inf
    assert bounds.standard_errors[0] == bounds.standard_errors[2] == np.inf
    np.testing.assert_allclose(bounds.log_evidence, 800 - math.log(4))
    assert bounds.max_weight_share == 1
    nothing = evidence_bounds(np.full(3, -np.inf))
    assert np.all(nothing.values == -np.inf)
    assert np.all(np.isinf(nothing.standard_errors))


def test_bad_input():
    for lw in (1.0, [0.5], np.zeros((1, 4))):
        with pytest.raises(ValueError, match=r"log_weights has shape .* of 2 draws or more"):
            evidence_bounds(lw)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="log_weights holds nan or inf"):
            evidence_bounds([0.5, bad, 1.0])
        with pytest.raises(ValueError, match=r"alphas is .* every order must be a finite number"):
            evidence_bounds([0.5, 1.0], alphas=(bad,))
