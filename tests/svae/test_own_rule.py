"""Rules that a user writes: the one of the documentation, and one that inherits."""

from functools import cache
from pathlib import Path
import re

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.expfam import NIW, Gaussian, GaussianNatural
from numpyro_ext.svae import (
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


@pytest.mark.nightly
def test_the_rule_of_the_page_is_one():
    rule = rule_of_the_page()
    assert isinstance(rule, LocalInference)
    guide = SVAEGuide({"prior": NIW.from_standard(**WIDE)}, NETWORK, rule)
    guide.check(learnt, random.key(0), Y[:5])


def test_a_rule_without_global_variables_is_checked_against_the_model():
    """Its own prior passes; another scale is refused."""
    guide = SVAEGuide({}, NETWORK, Scaled(PLAIN, 2.0))
    guide.check(lambda y: known(y, 2.0), random.key(0), Y[:5])
    with pytest.raises(ValueError, match="and Scaled have different log densities of 'x'"):
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
        with pytest.raises(ValueError, match="give both the same prior"):
            guide.check(model, random.key(0), Y[:5])
