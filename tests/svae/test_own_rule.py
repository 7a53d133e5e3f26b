"""Rules that a user writes: the one of the documentation, and one that inherits."""

from functools import cache
from pathlib import Path
import re

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
import optax
import pytest

from numpyro_ext.diagnostics import held_out_log_likelihood
from numpyro_ext.expfam import NIW, Gaussian, GaussianNatural
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    SVAEELBO,
    FixedGaussian,
    GaussianPotential,
    LocalInference,
    LocalInfo,
    LocalPosterior,
    SVAEGuide,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api" / "svae.md"
N, D = 200, 2
MEAN, SD, NOISE = jnp.array([1.0, -3.0]), jnp.array([2.0, 0.7]), 0.5
Y = MEAN + (SD**2 + NOISE**2) ** 0.5 * random.normal(random.key(0), (N, D))
WIDE = {"loc": jnp.zeros(D), "kappa": 0.1, "df": 4.0, "scale_matrix": jnp.eye(D)}
PLAIN = jax.jit(Gaussian.from_standard)(MEAN, jnp.diag(SD**2))


@cache
def rule_of_the_page():
    (code,) = re.findall(r"```python\n(class LearntNormal.*?)```", PAGE.read_text(), re.S)
    names = {
        "NIW": NIW,
        "Gaussian": Gaussian,
        "GaussianNatural": GaussianNatural,
        "LocalInfo": LocalInfo,
        "LocalPosterior": LocalPosterior,
        "jnp": jnp,
    }
    exec(code, names)
    return names["LearntNormal"]()


def exact(params, y):
    """The potentials of x + noise."""
    return GaussianPotential.from_diagonal(y / NOISE**2, jnp.full(y.shape, NOISE**-2))


NETWORK = (lambda rng_key, shape: (shape, {"unused": jnp.zeros(())})), exact


def learnt(y):
    Sigma = numpyro.sample("Sigma", dist.InverseWishart(4.0, scale_matrix=jnp.eye(D)))
    mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(D), Sigma / 0.1))
    with numpyro.plate("data", len(y)):
        x = numpyro.sample("x", dist.MultivariateNormal(mu, Sigma))
        numpyro.sample("y", dist.Normal(x, NOISE).to_event(1), obs=y)


def known(y, scale=1.0):
    with numpyro.plate("data", len(y)):
        x = numpyro.sample("x", dist.MultivariateNormal(MEAN, scale**2 * jnp.diag(SD**2)))
        numpyro.sample("y", dist.Normal(x, NOISE).to_event(1), obs=y)


class Scaled(FixedGaussian):
    """x has a normal prior that is wider than the one given."""

    def __init__(self, natural, scale):
        super().__init__(GaussianNatural(natural.h / scale**2, natural.W / scale**2))


@cache
def fitted():
    guide = SVAEGuide({"prior": NIW.from_standard(**WIDE)}, NETWORK, rule_of_the_page())
    groups = {"natural": natural_gradient(0.5, guide.domain), "network": optax.adam(1e-3)}
    optim = optax.multi_transform(groups, guide.param_labels)
    svi = SVI(learnt, guide, optim, SVAEELBO("explicit_only"))
    return svi, svi.run(random.key(0), 60, Y, progress_bar=False)


@pytest.mark.nightly
def test_the_rule_of_the_page_is_one():
    rule = rule_of_the_page()
    assert isinstance(rule, LocalInference)
    guide = SVAEGuide({"prior": NIW.from_standard(**WIDE)}, NETWORK, rule)
    guide.check(learnt, random.key(0), Y[:5])


def test_new_data_go_through_its_fit():
    svi, result = fitted()
    new = Y[:4] + 1
    draws = Predictive(svi.guide, params=result.params, num_samples=300)(random.key(1), new)["x"]
    q = svi.guide.local_posterior(result.params, new).mean["x"]
    sd = np.sqrt(np.diagonal(q.xx, axis1=-2, axis2=-1) - q.x**2)
    assert np.all(np.abs(draws.mean(0) - q.x) < 5 * sd / 300**0.5)
    each = held_out_log_likelihood(svi, result, model_args=(new,), num_samples=2000)
    noisy = jnp.cov(Y.T)
    expected = dist.MultivariateNormal(Y.mean(0), noisy).log_prob(new)
    np.testing.assert_allclose(each, expected, atol=0.2)


def test_a_rule_without_global_variables_is_checked_against_the_model():
    """Its own prior passes; another scale is refused."""
    guide = SVAEGuide({}, NETWORK, Scaled(PLAIN, 2.0))
    guide.check(lambda y: known(y, 2.0), random.key(0), Y[:5])
    with pytest.raises(ValueError, match=r"log density of 'x' is .* and Scaled has"):
        guide.check(lambda y: known(y, 2.1), random.key(0), Y[:5])


def test_another_mean_or_family_of_a_known_prior_is_refused():
    guide = SVAEGuide({}, NETWORK, FixedGaussian(PLAIN))

    def moved(y):
        with numpyro.plate("data", len(y)):
            numpyro.sample("x", dist.Normal(MEAN + 0.05, SD).to_event(1))

    def heavy(y):
        with numpyro.plate("data", len(y)):
            numpyro.sample("x", dist.StudentT(5.0, MEAN, SD).to_event(1))

    for model in (moved, heavy):
        with pytest.raises(ValueError, match="give both the same prior of 'x'"):
            guide.check(model, random.key(0), Y[:5])


def test_an_inherited_rule_has_the_evidence_of_its_prior():
    """With exact potentials every weight is the evidence, whatever x is drawn."""
    guide = SVAEGuide({}, NETWORK, Scaled(PLAIN, 2.0))
    svi = SVI(lambda y: known(y, 2.0), guide, optax.adam(1e-3), SVAEELBO())
    params = {"svae_recognition$params": {"unused": jnp.zeros(())}}
    outcome = held_out_log_likelihood(svi, params, model_args=(Y,), num_samples=2)
    covariance = jnp.diag(4 * SD**2 + NOISE**2)
    evidence = dist.MultivariateNormal(MEAN, covariance).log_prob(Y)
    np.testing.assert_allclose(outcome, evidence, rtol=1e-4)
