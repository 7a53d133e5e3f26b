"""What losses with a critic share, and `SteinDiscrepancy` through one (operator VI)."""

from functools import cache

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDiagonalNormal
import optax
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import SteinDiscrepancy, count_steps
from numpyro_ext.objectives.stein_discrepancy import divergence
from tests.objectives.compare import assert_refuses

NOISE = {"is_auxiliary": True}
MANY = 40_000


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


class WithOptimalField:
    """The critic that training converges to, and a multiple of it."""

    def __call__(self, *args):
        guide()

    def critic(self, params, z):
        p = jax.lax.stop_gradient(params)
        score_q = -(z - p["m"]) / p["s"] ** 2
        return params["multiple"] * (-(z - LOC) / SD**2 - score_q) / (2 * PENALTY)


def quarter_of_fisher(params):
    var = params["s"] ** 2
    fisher = jnp.sum((1 / var - 1 / SD**2) ** 2 * var + ((params["m"] - LOC) / SD**2) ** 2)
    return fisher / (4 * PENALTY)


@cache
def at_multiples():
    loss = SteinDiscrepancy(MANY, "critic", critic_penalty=PENALTY)

    @jax.jit
    def value_and_grad(multiple):
        fn = jax.value_and_grad(lambda p: loss.loss(random.key(1), p, model, WithOptimalField()))
        return fn({**PARAMS, "multiple": multiple})

    return {multiple: value_and_grad(jnp.array(multiple)) for multiple in (1.0, 0.5)}


def test_operator_vi_at_its_optimal_critic_is_a_quarter_of_the_fisher_divergence():
    value, grad = at_multiples()[1.0]
    expected, expected_grad = jax.value_and_grad(quarter_of_fisher)(PARAMS)
    # Standard errors on 40,000 draws: 10 / 200 of the value, 40 / 200 of the gradients.
    assert value == pytest.approx(float(expected), abs=4 * 0.05)
    for site in PARAMS:
        assert jnp.abs(grad[site] - expected_grad[site]).max() < 4 * 0.2, site
    assert jnp.abs(grad["multiple"]) < 4 * 0.1


def test_another_critic_is_below_and_ascends():
    value, grad = at_multiples()[0.5]
    expected = float(quarter_of_fisher(PARAMS))  # times 2 c - c^2
    assert value == pytest.approx(0.75 * expected, abs=4 * 0.05)
    assert grad["multiple"] == pytest.approx(-expected, abs=4 * 0.1)


def linear_field(params):
    """The loss with the field z @ W + b, of which all expectations are moments of a normal."""
    W, b = params["critic$params"][:4].reshape(2, 2), params["critic$params"][4:]
    mean = params["m"] @ W + b
    stein = -(params["m"] - LOC) / SD**2 @ mean
    stein += ((1 - params["s"] ** 2 / SD**2) * jnp.diagonal(W)).sum()
    return stein - PENALTY * ((mean**2).sum() + ((params["s"][:, None] * W) ** 2).sum())


@pytest.mark.slow
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


@pytest.mark.slow
def test_rows_of_a_plate_have_a_field_that_sees_their_data():
    """In one dimension, where the field is one number."""

    def model(x, batch=None):
        with numpyro.plate("N", 6, subsample_size=batch):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=numpyro.subsample(x, event_dim=0))

    class Guide:
        def __call__(self, x, batch=None):
            with numpyro.plate("N", 6, subsample_size=batch):
                b = numpyro.subsample(x, event_dim=0)
                e = numpyro.sample("e", dist.Normal(), infer=NOISE)
                numpyro.sample("z", Implicit(b + 0.7 * e))

        def features(self, x, batch=None):
            return numpyro.subsample(x, event_dim=0)[:, None]

        def critic(self, params, z, features):  # the optimum, of half the difference of scores
            x = features[..., 0]
            return 0.5 * ((x - 2 * z[..., 0]) + (z[..., 0] - x) / 0.49)

    loss = SteinDiscrepancy(MANY, "critic")
    x = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])
    value = jax.jit(lambda key: loss.loss(key, {}, model, Guide(), x))(random.key(0))
    # The difference of scores is -x + (1 / .49 - 2) (z - x).
    expected = jnp.sum(x**2 + (1 / 0.49 - 2) ** 2 * 0.49) / 4
    # A draw of one row has a standard deviation of about .7 |x|: over six rows 1.9, and 2.4 for the
    # thrice weighted two of the minibatch.
    assert value == pytest.approx(float(expected), abs=4 * 1.9 / 200)
    alike = jnp.full(6, 0.8)
    part = jax.jit(lambda key: loss.loss(key, {}, model, Guide(), alike, 2))(random.key(0))
    assert part == pytest.approx(6 * (0.64 + (1 / 0.49 - 2) ** 2 * 0.49) / 4, abs=4 * 2.4 / 200)


@pytest.mark.slow
def test_a_critic_is_found_under_a_handler():
    one = count_steps(with_critic(AutoDiagonalNormal(model), hidden_dims=(4,), output_dim=2))
    svi = SVI(model, one, optax.adam(1e-2), SteinDiscrepancy(5, "critic"))
    state, value = jax.jit(svi.update)(svi.init(random.key(0)))
    assert value == 0.0  # the field is zero at first
    assert state.mutable_state["_objective_step"]["step"] == 1


def test_what_does_not_fit_is_named():
    loss = SteinDiscrepancy(1, "critic")
    sentence = r"and the guide has none; .*with_critic\(guide, output_dim=2\).*with a kernel"
    assert_refuses(sentence, loss, PARAMS, model, guide)
    one = with_critic(guide, hidden_dims=(4,))
    trace = handlers.trace(handlers.seed(one, 0)).get_trace()
    params = {**PARAMS, "critic$params": trace["critic$params"]["value"]}
    assert_refuses(r"needs \(1, 2\); give it output_dim=2", loss, params, model, one)
    with pytest.raises(ValueError, match="critic_penalty is 0"):
        SteinDiscrepancy(4, "critic", critic_penalty=0.0)
    with pytest.raises(TypeError, match="kernel is 'net'"):
        SteinDiscrepancy(4, "net")
