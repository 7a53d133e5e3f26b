"""Log densities, cdfs and draws of distributions with large parameters against SciPy."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest
from scipy import stats
from scipy.special import expit, polygamma

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.exact import exact, imprecise, numbers_of
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.optim import find_modes

C = 1e8
CASES = {
    "Poisson": (dist.Poisson(1e7), 10_001_000, stats.poisson(1e7)),
    "NegativeBinomial2": (dist.NegativeBinomial2(4.0, C), 3, stats.poisson(4.0)),
    "many counts": (dist.NegativeBinomial2(1e6, 1e6), 1_001_000, stats.nbinom(1e6, 0.5)),
    "StudentT": (dist.StudentT(C, 1.0, 2.0), 0.5, stats.norm(1.0, 2.0)),
    "Binomial": (dist.Binomial(10**7, 0.25), 2_500_800, stats.binom(10**7, 0.25)),
    "logits": (dist.Binomial(10**7, logits=-1.0), 2_689_000, stats.binom(10**7, expit(-1.0))),
    "BetaBinomial": (dist.BetaBinomial(C, C, 10), 3, stats.binom(10, 0.5)),
    "Gamma": (dist.Gamma(C, C), 1.0, stats.gamma(C, scale=1 / C)),
    "InverseGamma": (dist.InverseGamma(C, C), 1.0, stats.invgamma(C, scale=C)),
    "Beta": (dist.Beta(1e5, 1e5), 0.499, stats.beta(1e5, 1e5)),
}


@pytest.mark.parametrize("name", CASES)
def test_large_parameters_have_the_density_and_cdf_of_double_precision(name):
    """A limit stands for NegativeBinomial2, StudentT and BetaBinomial, of which it is 1e-7 off."""
    fn, value, right = CASES[name]
    fn = exact(fn.expand([2]).mask(jnp.array([True, False])))
    value = np.asarray(value, np.float32 if np.asarray(value).dtype.kind == "f" else int)
    log_p = right.logpmf(value) if hasattr(right.dist, "logpmf") else right.logpdf(value)
    log_prob = jax.jit(jax.vmap(fn.log_prob))(jnp.array([value, value]))
    np.testing.assert_allclose(log_prob, [[log_p, 0.0]] * 2, rtol=2e-6)
    inner = fn.base_dist.base_dist
    np.testing.assert_allclose(inner.cdf(value), right.cdf(value), rtol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Poisson", "Binomial", "NegativeBinomial2"])
def test_draws_of_large_counts_have_their_variance_and_skewness(name):
    """20,000 draws: the error of a variance is a hundredth."""
    fn = {
        "Poisson": dist.Poisson(1e8),
        "Binomial": dist.Binomial(10**8, 0.3),
        "NegativeBinomial2": dist.NegativeBinomial2(1e8, 1e12),
    }[name]
    x = np.asarray(jax.jit(lambda key: exact(fn).sample(key, (20_000,)))(random.key(0)), float)
    variance = float(fn.variance)
    assert abs(x.mean() - float(fn.mean)) < 4 * (variance / 20_000) ** 0.5
    assert abs(x.var() / variance - 1) < 0.04
    few = dist.Poisson(1.5 * np.ones(1000))
    np.testing.assert_array_equal(exact(few).sample(random.key(0)), few.sample(random.key(0)))


WIDE = dist.LogNormal(17.0, 4.0)


def heavy_tails(y, df=None, prior=WIDE):
    df = numpyro.sample("df", prior) if df is None else df
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(df, loc), obs=y)


@pytest.mark.slow
def test_a_density_above_its_limit_is_named():
    """Of 1,000 normal rows StudentT of 1e8 degrees of freedom has 919 nats more than Normal."""
    y = np.random.default_rng(0).normal(size=1000)
    match = "'y', a StudentT with df up to 1e.08, 9.2e.02 nats above its value; use Normal there"
    with pytest.warns(InferenceWarning, match=match):
        find_modes(heavy_tails, y, 1e8, starts=1)


@pytest.mark.slow
def test_a_climb_that_single_precision_has_made_up_is_named():
    y = np.random.default_rng(0).normal(size=1000)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        find_modes(heavy_tails, y, starts=2)
    (sentences,) = [str(x.message) for x in warned]
    assert "'y', a StudentT with df up to" in sentences
    assert "the density jumps" not in sentences


def counts(y):
    rate = numpyro.sample("rate", dist.LogNormal(11.0, 2.0))
    shape = numpyro.sample("shape", dist.LogNormal(2.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.NegativeBinomial2(rate, shape), obs=y)


@pytest.mark.nightly
def test_rounding_that_cancels_is_no_climb():
    rng = np.random.default_rng(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        find_modes(counts, rng.negative_binomial(5, 5 / (5 + 1e5), 1000), starts=2)
        find_modes(heavy_tails, rng.standard_t(5, 1000), None, dist.Gamma(2.0, 0.1), starts=2)


@pytest.mark.parametrize(
    ("fn", "is_wrong"),
    [
        # Half a nat of its coefficient in each row, at any share alike.
        (dist.Binomial(10**6, np.full(300, 0.31)), False),
        (dist.Binomial(10**6, logits=np.full(300, -0.8)), False),
        # Rounding to 8 nats, which is another at each rate.
        (dist.Poisson(np.full(300, 1e7)), True),
    ],
)
def test_an_error_that_does_not_move_with_the_parameter_is_none(fn, is_wrong):
    mean, sd = np.asarray(fn.mean), np.asarray(fn.variance) ** 0.5
    y = np.round(mean + sd * np.random.default_rng(0).normal(size=300)).astype(int)

    def model():
        with numpyro.plate("rows", 300):
            numpyro.sample("y", fn, obs=jnp.asarray(y))

    trace = handlers.trace(model).get_trace()
    numbers = jax.device_get(numbers_of(trace))
    off = np.mean(np.abs(fn.log_prob(y) - exact(fn).log_prob(y)))
    assert off > 0.4
    assert bool(imprecise(trace, numbers)) == is_wrong


def flat(x, df):
    loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
    share = numpyro.sample("share", dist.Beta(0.02, 0.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.StudentT(df, loc + share), obs=x)


def flat_guide(x, df):
    numpyro.sample("loc", dist.Normal(0.0, 0.1))
    numpyro.sample("share", dist.Beta(numpyro.param("a", 0.02), 0.5))


@pytest.mark.slow
def test_diagnose_names_both():
    """A density that is wrong at the draws, and draws whose gradient is lost."""
    svi = SVI(flat, flat_guide, optax.adam(0.01), Trace_ELBO())
    x = np.random.default_rng(0).normal(size=100)
    text = str(diagnose(svi, {"a": 0.02}, model_args=(x, 1e8), num_moves=0, num_samples=100))
    words = " ".join(text.split())
    assert "the log density of site 'x', a StudentT" in words
    assert "the guide draws 'share' with a concentration of 0.02" in words


@pytest.mark.slow
def test_the_gradient_of_a_draw_of_small_concentration_is_lost():
    """Its mean is the trigamma function, of which single precision has 58 % at 0.01."""
    keys = random.split(random.key(0), 20_000)

    def ratio(a):
        grads = jax.vmap(jax.grad(random.loggamma, 1), (0, None))(keys, a)
        return float(grads.mean() / polygamma(1, a)), float(grads.std() / 141 / polygamma(1, a))

    lost, _ = ratio(0.01)
    at_limit, error = ratio(0.05)
    assert jax.config.jax_enable_x64 or lost < 0.7
    assert abs(at_limit - 1) < 0.05 + 3 * error
