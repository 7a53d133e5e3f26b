"""Pareto k-hat: reference values, the sign trap, and what has no weights."""

import warnings

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import pytest

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.diagnostics import (
    InferenceWarning,
    evidence_bounds,
    pareto_khat,
    to_arviz,
)

X = jnp.array([0.5, -1.0, 2.0])
EXACT = {"z_auto_loc": jnp.array(0.375), "z_auto_scale": jnp.array(0.5)}


def model(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def svi_of(guide, model=model):
    return SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())


def quantiles(k, size):
    return -k * np.log((np.arange(size) + 0.5) / size)


@pytest.mark.parametrize(("k", "size", "expected"), [(0.3, 1000, 0.323420), (0.5, 2000, 0.497635)])
def test_reference_values(k, size, expected):
    log_w = quantiles(k, size)
    found = pareto_khat(log_w)
    assert found.khat == pytest.approx(expected, abs=1e-6)
    permuted = np.random.default_rng(0).permutation(log_w)
    assert pareto_khat(permuted - 321.5).khat == pytest.approx(expected, abs=1e-6)
    assert pareto_khat(jnp.asarray(log_w)).khat == pytest.approx(expected, abs=1e-4)
    assert found.threshold == pytest.approx(min(1 - 1 / np.log10(size), 0.7))


def test_the_sign_is_that_of_importance_weights():
    log_w = quantiles(0.5, 2000)
    assert pareto_khat(-log_w).khat < -0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("level", [0.0, -5.79, 1e4])
def test_equal_weights_give_minus_infinity(level, dtype):
    rounding = np.random.default_rng(0).uniform(-4, 4, 200) * np.finfo(dtype).eps * max(1, level)
    found = pareto_khat((level + rounding).astype(dtype))
    assert found.khat == -np.inf
    np.testing.assert_allclose(found.log_weights, -np.log(200))


def test_draws_of_weight_zero_are_left_out_and_named():
    """What is left are draws of q on the support of the model, as many as there are."""
    alone = pareto_khat(quantiles(0.5, 100))
    log_w = np.concatenate([quantiles(0.5, 100), np.full(900, -np.inf)])
    with pytest.warns(InferenceWarning, match="^900 of 1,000 draws have weight 0"):
        found = pareto_khat(log_w)
    assert (found.khat, found.threshold) == (alone.khat, alone.threshold)
    np.testing.assert_array_equal(found.log_weights[:100], alone.log_weights)
    assert np.all(np.isneginf(found.log_weights[100:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pareto_khat(np.append(quantiles(0.5, 100), [-np.inf] * 5))


@pytest.mark.parametrize("noise", [0.0, 1e-7])
@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2])
def test_a_few_values_of_the_weights_are_bounded(share, noise):
    """Those of a discrete guide, up to rounding, which is neither a tail nor a part of one."""
    rounding = noise * np.random.default_rng(0).normal(size=1000)
    for above in (0.001, 0.01, 0.3, 1.0):
        log_w = np.where(np.arange(1000) < 1000 * share, above, 0.0) + rounding
        found = pareto_khat(log_w)
        assert found.khat == -np.inf
        expected = log_w - np.logaddexp.reduce(log_w)
        np.testing.assert_allclose(found.log_weights, expected, atol=1e-12)
    # One draw in a thousand that has nearly all of the weight.
    assert pareto_khat(np.where(np.arange(1000) < 1, 20.0, 0.0) + rounding).khat == np.inf


def test_ties_leave_the_shape_where_it_is():
    """Weights 2^j with P(j >= n) = 2^(-n / k) have the tail index k, and so have those without
    ties; the numbers are those of ArviZ wherever it has a number."""
    from arviz_stats.base.array import array_stats

    for k in (0.3, 0.5, 0.9):
        log_w = quantiles(k, 4000)
        rounded = np.round(log_w / 0.05) * 0.05
        for x in (log_w, rounded):
            found = pareto_khat(x)
            smoothed, khat = array_stats.psislw(-x)
            assert found.khat == khat
            np.testing.assert_allclose(found.log_weights, smoothed, atol=1e-12)
        # Half of the tail has its least weight, the next quarter of it the next one.
        coarse = np.floor(log_w / (k * np.log(2))) * k * np.log(2)
        assert np.isnan(array_stats.psislw(-coarse)[1])
        found = pareto_khat(coarse)
        assert (found.khat <= found.threshold) is (k < 0.7)


def local(x, batch=None):
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", dist.Normal(z), obs=x[i])


# The posterior of each z is N(x / 2, 1 / 2): exact for the first, too narrow for the second.
LOCAL = {"z_auto_loc": X / 2, "z_auto_scale": jnp.sqrt(0.5) * jnp.array([1.0, 0.2, 1.0])}


def test_each_unit_has_its_own_shape():
    log_w = np.stack([quantiles(0.3, 1000), quantiles(0.5, 1000)[::-1]], 1)
    found = pareto_khat(log_w)
    each = [pareto_khat(log_w[:, i]) for i in range(2)]
    np.testing.assert_array_equal(found.khat, [one.khat for one in each])
    np.testing.assert_array_equal(found.log_weights, np.stack([o.log_weights for o in each], 1))


@pytest.mark.nightly
def test_data_with_latents_of_their_own_are_units_of_a_fit_and_of_its_tree():
    svi = svi_of(AutoNormal(local), local)
    args = {"model_args": (X, 2), "num_samples": 2000}
    found = pareto_khat(svi, result=LOCAL, **args)
    assert found.log_weights.shape == (2000, 3)
    assert found.khat[0] == found.khat[2] == -np.inf
    assert found.khat[1] > found.threshold
    tree = to_arviz(svi, result=LOCAL, **args)
    assert tree.sample_stats.log_weight.dims == ("chain", "draw", "N")
    np.testing.assert_array_equal(pareto_khat(tree).khat, found.khat)
    stats = tree.sample_stats
    np.testing.assert_allclose(
        stats.log_weight.sum("N"), stats.lp - stats.log_q, rtol=1e-4, atol=1e-4
    )


def implicit_guide(x, batch=None):
    loc = numpyro.param("loc", 0.3)
    noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    numpyro.sample("z", Implicit(loc + 0.5 * jnp.tanh(noise)))


class Particles(AutoNormal):
    def particles(self, params):
        return {"z": params["z_auto_loc"] + jnp.arange(30.0)}


@pytest.mark.parametrize(
    ("guide", "params"),
    [
        (implicit_guide, {"loc": 0.3}),
        (Particles(model), EXACT),
        (AutoDelta(model), {"z_auto_loc": 0.3}),
    ],
    ids=["implicit", "particles", "AutoDelta"],
)
def test_a_guide_without_density_is_refused(guide, params):
    for judge in (pareto_khat, evidence_bounds):
        with pytest.raises(
            IntractableDensityError, match=r"kernel_stein_discrepancy.*maximum_mean"
        ):
            judge(svi_of(guide), result=params, model_args=(X,), num_samples=50)


def test_mcmc_and_its_tree_are_refused():
    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=30, progress_bar=False)
    with pytest.raises(IntractableDensityError, match=r"MCMC have no density.*kernel_stein"):
        pareto_khat(mcmc)
    tree = az.from_dict({"posterior": {"z": np.zeros((2, 30))}})
    with pytest.raises(IntractableDensityError, match="the DataTree has no log_weight"):
        pareto_khat(tree)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(24), "24 log weights.*at least 25"),
        (np.array([np.nan] + [0.0] * 50), "NaN or \\+inf"),
        (np.array([np.inf] + [0.0] * 50), "NaN or \\+inf"),
        (np.full(50, -np.inf), "every log weight is -inf"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        pareto_khat(weights)
