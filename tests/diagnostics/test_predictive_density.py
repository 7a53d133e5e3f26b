"""Log predictive densities against their formulas, for arrays and for fits."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.diagnostics import (
    gaussian_log_density_bound,
    held_out_log_likelihood,
    log_predictive_density,
    to_arviz,
)

LOG_LIK = np.array([[-1.0, -2.0, -0.5], [-1.5, -0.7, -3.0]])
Y = jnp.array([0.5, -1.0, 2.0])
PARAMS = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}


def model(y):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(y)):
        numpyro.sample("y", dist.Normal(z), obs=y)


def both(*args, **kwargs):
    return [log_predictive_density(*args, kind=k, **kwargs) for k in ("pointwise", "joint")]


def test_reference_values():
    np.testing.assert_allclose(both(LOG_LIK), [-1.1618221231, -1.3417870504], atol=1e-10)
    chains = np.stack([LOG_LIK, LOG_LIK])  # the same draws twice, on a grid of rows
    np.testing.assert_allclose(both(chains), both(LOG_LIK), atol=1e-12)
    np.testing.assert_allclose(both(LOG_LIK[:1]), LOG_LIK[0].mean(), atol=1e-12)


def test_neither_is_always_the_larger_and_both_are_between_the_mean_and_the_best_draw():
    """Equal rows: the joint density is the larger, by Jensen's inequality."""
    pointwise, joint = both(LOG_LIK)
    assert joint < pointwise
    pointwise, joint = both(np.repeat(LOG_LIK[:, :1], 5, axis=1))
    assert joint > pointwise
    draws = np.random.default_rng(0).normal(-1, 2, (40, 7))
    assert all(draws.mean() < x < draws.max(0).mean() for x in both(draws))
    assert both(draws)[1] < draws.mean(1).max()


def test_log_densities_far_below_the_smallest_number_do_not_underflow():
    shift = both(LOG_LIK - 1e4)
    np.testing.assert_allclose(shift, np.array(both(LOG_LIK)) - 1e4, rtol=1e-12)
    assert both([[-np.inf, -1.0], [-2.0, -np.inf]])[1] == -np.inf


@pytest.mark.slow
def test_a_fit_is_scored_as_its_closed_form_and_as_its_tree():
    """Exact posterior N(.375, .25): a row is N(.375, 1.25). The error of 4,000 draws is below .02,
    twice as much for the log of the product."""
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    given = {"model_args": (Y,), "num_samples": 4000}
    found = both(svi, PARAMS, **given)
    pointwise = np.mean(dist.Normal(0.375, 1.25**0.5).log_prob(Y))
    covariance = jnp.eye(3) + 0.25
    joint = dist.MultivariateNormal(jnp.full(3, 0.375), covariance).log_prob(Y) / 3
    np.testing.assert_allclose(found, [pointwise, joint], atol=0.04)
    rows = held_out_log_likelihood(svi, PARAMS, **given)
    np.testing.assert_allclose(found[0], rows.mean(), rtol=1e-6)
    tree = to_arviz(svi, PARAMS, model_args=(Y,), num_samples=50)
    expected = both(np.asarray(tree.log_likelihood.y[0]))
    for form in (tree, tree.log_likelihood, tree.log_likelihood.y):
        np.testing.assert_allclose(both(form), expected, rtol=1e-12)


def test_bound_of_a_normal_is_reached_by_a_calibrated_one():
    errors = np.array([1.0, -3.0, 0.5])
    rmse = np.sqrt(np.mean(errors**2))
    best = dist.Normal(0.0, rmse).log_prob(errors).mean()
    assert gaussian_log_density_bound(rmse) == pytest.approx(float(best), rel=1e-6)
    assert gaussian_log_density_bound(2.0) == pytest.approx(-2.112085713764618, rel=1e-12)
    assert gaussian_log_density_bound(0.0) == np.inf
    with pytest.raises(ValueError, match="rmse is -1"):
        gaussian_log_density_bound(-1.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "sentence"),
    [
        (([-1.0, -2.0],), {}, r"shape \(2,\); it must be \(S, N\)"),
        (([[np.nan, -2.0]],), {}, "log_lik has NaN"),
        (([[-1.0, -2.0]],), {"model_args": (1,)}, "model_args belongs to a fit, and log_lik is"),
    ],
)
def test_bad_input(args, kwargs, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        log_predictive_density(*args, **kwargs)


def test_a_tree_of_several_sites_asks_for_one():
    from xarray import Dataset

    both_sites = Dataset({k: (("chain", "draw", "n"), LOG_LIK[None]) for k in ("a", "b")})
    with pytest.raises(ValueError, match=r"variables .*'a', 'b'"):
        log_predictive_density(both_sites)
