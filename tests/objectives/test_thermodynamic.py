"""ThermodynamicELBO: Gaussians in closed form, discrete sites by enumeration, both gradients."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import ThermodynamicELBO
from tests.objectives.compare import NoInverse, assert_refuses
from tests.objectives.enumeration import (
    combinations,
    finite_difference,
    log_normal,
    log_softmax,
    mean_gradients,
)
from tests.objectives.models import (
    NONE,
    linear_gaussian,
)
from tests.objectives.test_vimco import (
    MEANS,
    PARAMS,
    PRIOR,
    S,
    X,
    assert_is_minus,
    discrete_guide,
    discrete_model,
    expected_bound,
)


@pytest.mark.x64
def test_covariance_gradient_of_the_elbo_is_unbiased_over_every_draw(tol):
    z = combinations(S, 2)
    grads = mean_gradients(
        lambda alpha, each: ThermodynamicELBO(1, 2, vectorize_particles=each),
        [1.0],
        discrete_model,
        discrete_guide,
        PARAMS,
        {"z": z},
        np.exp(log_softmax(PARAMS["logits"])[z].sum(1)),
    )
    expected = finite_difference(lambda p: expected_bound(p, 1.0, z), PARAMS)
    assert_is_minus(grads[1.0], expected, tol(2e-5, 1e-8))


def exact_discrete(params, betas, scale=1.0):
    log_q = log_softmax(params["logits"])
    lw = log_normal(X, MEANS, params["theta"]) + scale * (log_softmax(PRIOR) - log_q)
    total = 0.0
    for b, step in zip(betas[:-1], np.diff(betas), strict=True):
        pi = np.exp(log_softmax(log_q + b * lw))
        total += step * np.sum(pi * lw)
    return total


def test_discrete_sites():
    """Value and gradient of the whole sum against the sum over states, under a scale."""
    scale = 0.3
    betas = (0.0, 0.3, 0.7, 1.0)
    params = {name: jnp.asarray(value, float) for name, value in PARAMS.items()}

    def model():
        theta = numpyro.param("theta", 0.8)
        with handlers.scale(scale=scale):
            z = numpyro.sample("z", dist.Categorical(logits=jnp.asarray(PRIOR, float)))
        numpyro.sample("x", dist.Normal(jnp.asarray(MEANS, float)[z], theta), obs=X)

    loss = ThermodynamicELBO(num_particles=20_000, betas=betas)
    guide = handlers.scale(discrete_guide, scale=scale)
    fn = jax.value_and_grad(lambda p, key: loss.loss(key, p, model, guide))
    values, grads = jax.jit(lambda keys: jax.lax.map(lambda key: fn(params, key), keys))(
        random.split(random.key(1), 20)
    )
    expected = finite_difference(lambda p: exact_discrete(p, betas, scale), PARAMS)
    pairs = [(grads[name], expected[name]) for name in PARAMS]
    for got, exact in [(values, exact_discrete(PARAMS, betas, scale)), *pairs]:
        error = np.std(got, 0, ddof=1) / 20**0.5
        assert np.all(abs(np.mean(got, 0) + exact) < 4 * error + 1e-3)
        assert np.all(error < 0.01)


@pytest.mark.parametrize("gradient", ["covariance", "pathwise"])
def test_gradients_of_gaussians(gradient):
    """q = N(m, 1), p = N(0, 1): E_{pi_b}[log w] = m^2 (b - 1/2)."""
    m, betas = 0.8, np.array([0.0, 0.2, 0.6, 1.0])

    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0), 1.0))

    def both(key):
        return [
            jax.grad(
                lambda p, bound=bound: ThermodynamicELBO(
                    num_particles=20_000, betas=betas, bound=bound, gradient=gradient
                ).loss(key, {"m": p}, model, guide)
            )(m)
            for bound in ("lower", "upper")
        ]

    grads = np.array(jax.jit(lambda keys: jax.lax.map(both, keys))(random.split(random.key(2), 20)))
    error = grads.std(1, ddof=1) / 20**0.5
    steps = np.diff(betas)
    exact = [-2 * m * steps @ (betas[:-1] - 0.5), 2 * m * steps @ (betas[1:] - 0.5)]
    assert np.all(abs(grads.mean(1) - exact) < 4 * error + 1e-3)
    assert np.all(error < 0.02)


def test_covariance_needs_an_inverse():
    pathwise = ThermodynamicELBO(gradient="pathwise")

    def flow(x):
        numpyro.sample("z", dist.TransformedDistribution(dist.Normal(), NoInverse()))

    sentence = "guide site 'z' cannot be evaluated .*use gradient=\"pathwise\""
    assert_refuses(sentence, ThermodynamicELBO(), NONE, linear_gaussian, flow, 1.5)
    assert_refuses_nothing(pathwise, linear_gaussian, flow, 1.5)


def assert_refuses_nothing(loss, model, guide, *args):
    jax.eval_shape(lambda key: loss.loss(key, NONE, model, guide, *args), random.key(0))
