"""`SteinDiscrepancy`: explicit loops, its zero at the posterior, and what it refuses."""

from functools import partial

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import SteinDiscrepancy
from numpyro_ext.objectives.stein_discrepancy import divergence
from numpyro_ext.scores import RBF
from tests.objectives.compare import assert_refuses
from tests.objectives.models import guide_draws

X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])
LENGTH = 0.8


def model():
    """The potential is not quadratic, so that the score's own derivative matters."""
    z = numpyro.sample("z", dist.Normal(1.0, 2.0).expand([2]).to_event(1))
    numpyro.factor("bend", -0.1 * jnp.sum(z**4))


def guide():
    m, s = numpyro.param("m", 0.3), numpyro.param("s", 0.7)
    numpyro.sample("z", dist.Normal(m, s).expand([2]).to_event(1))


def stein_kernel(x, y, score):
    k = lambda x, y: jnp.exp(-jnp.sum((x - y) ** 2) / (2 * LENGTH**2))  # noqa: E731
    mixed = jax.jacfwd(jax.grad(k, 1), 0)(x, y)
    own = k(x, y) * score(x) @ score(y)
    return own + score(x) @ jax.grad(k, 1)(x, y) + score(y) @ jax.grad(k)(x, y) + jnp.trace(mixed)


def ksd_by_hand(z, score):
    """The U- and the V-statistic."""
    K = len(z)
    k0 = jax.vmap(lambda x: jax.vmap(lambda y: stein_kernel(x, y, score))(z))(z)
    return jnp.array([(k0.sum() - jnp.trace(k0)) / (K * (K - 1)), k0.mean()])


@pytest.mark.slow
def test_value_and_gradient_are_those_of_all_pairs():
    losses = [SteinDiscrepancy(3, RBF(LENGTH), statistic=one) for one in ("u", "v")]
    key = random.key(1)

    def ours(p):
        params = {"m": p[0], "s": p[1]}
        return jnp.stack([loss.loss(key, params, model, guide) for loss in losses])

    def theirs(p):
        noise = guide_draws(key, 3, guide, {"m": 0.0, "s": 1.0})["z"]
        return ksd_by_hand(p[0] + p[1] * noise, lambda z: -(z - 1.0) / 4.0 - 0.4 * z**3)

    p = jnp.array([0.3, 0.7])
    a, b = (jax.jit(lambda p, f=f: (f(p), jax.jacrev(f)(p)))(p) for f in (ours, theirs))
    assert jnp.allclose(a[0], b[0], rtol=1e-4)
    assert jnp.allclose(a[1], b[1], rtol=1e-3, atol=1e-4)


def with_param():
    numpyro.sample("z", dist.Normal(numpyro.param("theta", 1.0), 2.0))


def globals_and_locals(x):
    loc = numpyro.sample("loc", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=4) as i:
        z = numpyro.sample("z", dist.Normal(loc, 1.0))
        numpyro.sample("x", dist.Normal(z, 0.5), obs=x[i])


def prior_of_both(x):
    numpyro.sample("loc", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=4):
        numpyro.sample("z", dist.Normal())


def test_bad_input_is_named():
    loss, key = SteinDiscrepancy(2), random.key(0)
    with pytest.raises(ValueError, match="the model has the param site 'theta'"):
        loss.loss(
            key, {"theta": 1.0}, with_param, numpyro.handlers.block(with_param, hide=["theta"])
        )
    with pytest.raises(ValueError, match="'z' lies in the subsampled plate 'N'"):
        loss.loss(key, {}, globals_and_locals, prior_of_both, X)


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


LOC, SD, PENALTY = jnp.array([1.0, 0.2]), jnp.array([1.5, 0.6]), 0.7
PARAMS = {"m": jnp.array([0.3, -0.5]), "s": jnp.array([0.9, 0.5])}


def normal():
    numpyro.sample("z", dist.Normal(LOC, SD).to_event(1))


def draws_alone():
    m, s = numpyro.param("m", PARAMS["m"]), numpyro.param("s", PARAMS["s"])
    noise = dist.Normal().expand([2]).to_event(1)
    e = numpyro.sample("e", noise, infer={"is_auxiliary": True})
    numpyro.sample("z", Implicit(m + s * e, event_dim=1))


def linear_field(params):
    """The loss with the field z @ W + b, of which all expectations are moments of a normal."""
    W, b = params["critic$params"][:4].reshape(2, 2), params["critic$params"][4:]
    mean = params["m"] @ W + b
    stein = -(params["m"] - LOC) / SD**2 @ mean
    stein += ((1 - params["s"] ** 2 / SD**2) * jnp.diagonal(W)).sum()
    return stein - PENALTY * ((mean**2).sum() + ((params["s"][:, None] * W) ** 2).sum())


@pytest.mark.slow
def test_operator_vi_descends_in_the_guide_and_ascends_in_the_network():
    one = with_critic(draws_alone, stax.Dense(2), output_dim=2)
    loss = SteinDiscrepancy(200, "critic", critic_penalty=PENALTY)
    params = {**PARAMS, "critic$params": jnp.array([0.5, -0.2, 0.3, -0.4, 0.6, -0.1])}

    @jax.jit
    def moments(keys):
        each = jax.value_and_grad(lambda p, key: loss.loss(key, p, normal, one))
        found = jax.vmap(partial(each, params))(keys)
        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / len(x) ** 0.5), found)

    value, expected = jax.value_and_grad(linear_field)(params)
    expected["critic$params"] = -expected["critic$params"]
    (mean, error), grads = moments(random.split(random.key(0), 400))
    assert jnp.abs(mean - value) < 4.5 * error
    for name, (mean, error) in grads.items():
        assert (jnp.abs(mean - expected[name]) < 4.5 * error).all(), name
        # The test can fail: the derivatives differ from zero by many standard errors.
        assert (jnp.abs(expected[name]) > 10 * error).all(), name


def test_a_critic_that_is_missing_is_named():
    sentence = r"and the guide has none; .*with_critic\(guide, output_dim=2\).*with a kernel"
    assert_refuses(sentence, SteinDiscrepancy(1, "critic"), PARAMS, normal, draws_alone)
