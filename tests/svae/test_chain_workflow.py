"""Chains as a user meets them: the check of the model, and a long chain's prior."""

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.expfam import MNIW, NIW, Dirichlet, GaussianChain, MarkovChain
from numpyro_ext.svae import (
    HMMEP,
    LDS,
    SVAEGuide,
    checks,
    decoder_network,
    recognition_network,
)

N, T, D, K = 4, 3, 2, 2
EYE = jnp.eye(D)
Y = jnp.sin(jnp.arange(N * T * 3.0)).reshape(N, T, 3)
DECODER = decoder_network(3, hidden=(4,))


def linear(y, turned=False):
    Sigma = numpyro.sample("Sigma_1", dist.InverseWishart(4.0, scale_matrix=EYE))
    mu = numpyro.sample("mu_1", dist.MultivariateNormal(jnp.ones(D), Sigma))
    Q = numpyro.sample("Q", dist.InverseWishart(4.0, scale_matrix=EYE))
    A = numpyro.sample("A", dist.MatrixNormal(0.5 * EYE, jnp.linalg.cholesky(Q), EYE / 2))
    with numpyro.plate("data", len(y)):
        chain = GaussianChain.from_standard(mu, Sigma, A.T if turned else A, Q, T)
        observe(numpyro.sample("x", GaussianChain.to_distribution(chain)), y)


def hidden_markov(y):
    pi = numpyro.sample("pi", dist.Dirichlet(jnp.array([1.0, 2.0])))
    with numpyro.plate("states", K):
        P = numpyro.sample("P", dist.Dirichlet(jnp.ones(K)))
        Sigma = numpyro.sample("Sigma", dist.InverseWishart(4.0, scale_matrix=EYE))
        mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.ones(D), Sigma))
    with numpyro.plate("data", len(y)):
        chain = MarkovChain.from_standard(pi, P, T)
        z = numpyro.sample("z", MarkovChain.to_distribution(chain))
        observe(numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]).to_event(1)), y)


def observe(x, y):
    decode = numpyro.module("decoder", DECODER, (D,))
    numpyro.sample("y", dist.Normal(*decode(x)).to_event(2), obs=y)


def guide_of(model):
    rule, prior = (
        HMMEP(),
        {
            "initial": Dirichlet.from_standard(jnp.array([1.0, 2.0])),
            "transition": Dirichlet.from_standard(jnp.ones((K, K))),
            "emission": NIW.from_standard(jnp.ones((K, D)), 1.0, 4.0, EYE),
        },
    )
    if model is linear:
        rule, prior = (
            LDS(),
            {
                "initial": NIW.from_standard(jnp.ones(D), 1.0, 4.0, EYE),
                "dynamics": MNIW.from_standard(0.5 * EYE, 4 * EYE, 4.0, EYE),
            },
        )
    return SVAEGuide(prior, recognition_network(D, hidden=(4,)), rule)


@pytest.mark.slow
@pytest.mark.parametrize("model", [linear, hidden_markov])
def test_check_passes_the_chain_that_the_rule_stands_for(model):
    guide_of(model).check(model, random.key(0), Y)


@pytest.mark.slow
def test_check_names_a_transition_the_wrong_way_round():
    with pytest.raises(ValueError, match=r"log density of 'x' changes by .* but that of LDS by"):
        guide_of(linear).check(lambda y: linear(y, turned=True), random.key(0), Y)


@pytest.mark.slow
def test_dynamics_whose_density_a_long_chain_loses_to_rounding_are_told_apart():
    """Over 150 steps, a variance that doubles in each is one to the 45th power of ten."""
    x = jnp.zeros((1, 150, D))
    initial = NIW.statistics((jnp.zeros(D), EYE))
    for weight, grows in ((0.9 * EYE, False), (2**0.5 * EYE, True)):
        mean = {"initial": initial, "dynamics": MNIW.statistics((weight, EYE))}
        assert checks._grows(LDS(), mean, x) == grows


def test_a_transition_that_grows_makes_a_distribution_of_a_long_chain():
    """A draw from a wide prior, when SVI is initialised; only its shape counts there."""
    weight = jnp.array([[2.5, 0.3], [-1.0, 1.8]])
    natural = GaussianChain.from_standard(jnp.zeros(D), EYE, weight, 1e-3 * EYE, 300)
    assert GaussianChain.to_distribution(natural).event_shape == (300, D)
    with pytest.raises(ValueError, match="requires a positive definite initial_covariance"):
        GaussianChain.from_standard(jnp.zeros(D), EYE, weight, -EYE, 300)
