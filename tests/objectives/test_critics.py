"""What losses with a critic share, and `SteinDiscrepancy` through one (operator VI)."""

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import SteinDiscrepancy
from numpyro_ext.objectives.stein_discrepancy import divergence
from tests.objectives.compare import assert_refuses

NOISE = {"is_auxiliary": True}


def test_divergence_is_exact_in_few_dimensions():
    def field(z):
        return jnp.stack([z[..., 0] * z[..., 1], jnp.sin(z[..., 1]), z[..., 0] ** 2], -1)

    z = random.normal(random.key(0), (4, 2, 3))
    expected = z[..., 1] + jnp.cos(z[..., 1])
    assert jnp.allclose(divergence(random.key(1), field, z), expected, rtol=1e-5, atol=1e-5)


def test_divergence_of_many_dimensions_is_unbiased():
    A = random.normal(random.key(0), (21, 21))
    z = jnp.ones((20_000, 21))
    estimates = divergence(random.key(1), lambda z: z @ A.T, z)
    error = estimates.std() / 20_000**0.5
    assert jnp.abs(estimates.mean() - jnp.trace(A)) < 4 * error
    assert estimates.std() > 1.0  # one direction for each point, not d of them


LOC, SD = jnp.array([1.0, 0.2]), jnp.array([1.5, 0.6])
PARAMS = {"m": jnp.array([0.3, -0.5]), "s": jnp.array([0.9, 0.5])}


def model(*args):
    numpyro.sample("z", dist.Normal(LOC, SD).to_event(1))


def guide(*args):
    m, s = numpyro.param("m", PARAMS["m"]), numpyro.param("s", PARAMS["s"])
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
    numpyro.sample("z", Implicit(m + s * e, event_dim=1))


PENALTY = 0.7


def linear_field(params):
    """The loss with the field z @ W + b, of which all expectations are moments of a normal."""
    W, b = params["critic$params"][:4].reshape(2, 2), params["critic$params"][4:]
    mean = params["m"] @ W + b
    stein = -(params["m"] - LOC) / SD**2 @ mean
    stein += ((1 - params["s"] ** 2 / SD**2) * jnp.diagonal(W)).sum()
    return stein - PENALTY * ((mean**2).sum() + ((params["s"][:, None] * W) ** 2).sum())


@pytest.mark.nightly
def test_operator_vi_descends_in_the_guide_and_ascends_in_the_network():
    one = with_critic(guide, stax.Dense(2), output_dim=2)
    loss = SteinDiscrepancy(200, "critic", critic_penalty=PENALTY)
    params = {**PARAMS, "critic$params": jnp.array([0.5, -0.2, 0.3, -0.4, 0.6, -0.1])}

    @jax.jit
    def moments(keys):
        each = jax.vmap(lambda k: jax.value_and_grad(lambda p: loss.loss(k, p, model, one))(params))
        found = each(keys)
        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / len(x) ** 0.5), found)

    value, expected = jax.value_and_grad(linear_field)(params)
    expected["critic$params"] = -expected["critic$params"]
    (mean, error), grads = moments(random.split(random.key(0), 400))
    assert jnp.abs(mean - value) < 4.5 * error
    for name, (mean, error) in grads.items():
        assert (jnp.abs(mean - expected[name]) < 4.5 * error).all(), name
        # The test can fail: the derivatives differ from zero by many standard errors.
        assert (jnp.abs(expected[name]) > 10 * error).all(), name


def test_what_does_not_fit_is_named():
    loss = SteinDiscrepancy(1, "critic")
    sentence = r"and the guide has none; .*with_critic\(guide, output_dim=2\).*with a kernel"
    assert_refuses(sentence, loss, PARAMS, model, guide)
    one = with_critic(guide, hidden_dims=(4,))
    trace = handlers.trace(handlers.seed(one, 0)).get_trace()
    params = {**PARAMS, "critic$params": trace["critic$params"]["value"]}
    assert_refuses(r"needs \(1, 2\); give it output_dim=2", loss, params, model, one)
