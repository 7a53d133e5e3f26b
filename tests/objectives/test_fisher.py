"""`FisherDivergence`: closed forms, the envelope of its critic, and its blindness."""

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
import pytest

from numpyro_ext.guides import Implicit, IntractableDensityError, with_critic
from numpyro_ext.objectives import FisherDivergence
from tests.objectives.compare import assert_refuses
from tests.objectives.models import guide_draws

NOISE = {"is_auxiliary": True}
MANY = 40_000


def standard():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def normal_guide():
    m = numpyro.param("m", 0.3)
    s = numpyro.param("s", 0.7)
    numpyro.sample("z", dist.Normal(m, s))


def divergence_of_normals(m, s):
    """Of N(m, s^2) from N(0, 1)."""
    return (1.0 - 1.0 / s**2) ** 2 * s**2 + m**2


def test_explicit_value_and_gradient_are_the_closed_form():
    assert divergence_of_normals(0.3, 0.7) == pytest.approx(0.6208163265, abs=1e-9)
    params = {"m": jnp.array(0.3), "s": jnp.array(0.7)}
    loss = FisherDivergence(MANY)
    value, grad = jax.jit(
        jax.value_and_grad(lambda p: loss.loss(random.key(0), p, standard, normal_guide))
    )(params)
    # Standard errors: .9 / 200 of the value, 6 / 200 of the gradients.
    assert value == pytest.approx(0.6208163265, abs=4 * 0.0045)
    expected = jax.grad(lambda p: divergence_of_normals(**p))(params)
    assert grad["m"] == pytest.approx(float(expected["m"]), abs=4 * 0.03)
    assert grad["s"] == pytest.approx(float(expected["s"]), abs=4 * 0.03)


def positive():
    """Two sites of which the Jacobians matter, in an order that is not the alphabet's."""
    numpyro.sample("b", dist.Gamma(3.0, 2.0))
    numpyro.sample("a", dist.Normal(1.0, 0.5))


def scores_by_hand(z, loc, scale):
    """Of the target, Gamma(3, 2) in log coordinates and N(1, .25), and of N(loc, scale^2)."""
    target = jnp.stack([3.0 - 2.0 * jnp.exp(z[0]), -(z[1] - 1.0) / 0.25])
    return target - (-(z - loc) / scale**2)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AutoDiagonalNormal, AutoNormal])
def test_space_is_the_unconstrained_one_for_each_guide(make):
    guide = make(positive, init_scale=0.4)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    params = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    if make is AutoNormal:
        loc = jnp.stack([params["b_auto_loc"], params["a_auto_loc"]])
    else:
        loc = params["auto_loc"]
    K, key = 3, random.key(4)

    @jax.jit
    def both(params):
        drawn = guide_draws(key, K, guide, params)
        z = jnp.stack([jnp.log(drawn["b"]), drawn["a"]], -1)
        expected = sum(jnp.sum(scores_by_hand(x, loc, 0.4) ** 2) for x in z) / K
        return FisherDivergence(K).loss(key, params, positive, guide), expected

    assert jnp.allclose(*both(params), rtol=1e-4)


class SemiNormal:
    """psi ~ N(m, c^2), z | psi ~ N(psi, s^2) in two dimensions, so that q is N(m, c^2 + s^2)."""

    def __call__(self):
        m = numpyro.param("m", jnp.array([0.3, -0.5]))
        c, s = numpyro.param("c", 0.8), numpyro.param("s", 0.4)
        e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
        u = numpyro.sample("u", dist.Normal().expand([2]).to_event(1), infer=NOISE)
        numpyro.sample("z", Implicit(m + c * e + s * u, event_dim=1))

    def sample_mixing(self, rng_key, params, num_samples):
        return params["m"] + params["c"] * random.normal(rng_key, (num_samples, 2))

    def conditional(self, params, psi):
        return dist.Normal(psi, params["s"]).to_event(1)


LOC, SD = jnp.array([1.0, 0.2]), jnp.array([1.5, 0.6])
SEMI = {"m": jnp.array([0.3, -0.5]), "c": jnp.array(0.8), "s": jnp.array(0.4)}


def normal_target():
    numpyro.sample("z", dist.Normal(LOC, SD).to_event(1))


def linear_field(params):
    """The loss with the field z @ W + b: E f(z).(score of z | psi) is minus the trace of W."""
    W, b = params["critic$params"][:4].reshape(2, 2), params["critic$params"][4:]
    mean, var = params["m"] @ W + b, params["c"] ** 2 + params["s"] ** 2
    along = -(params["m"] - LOC) / SD**2 @ mean + ((1 - var / SD**2) * jnp.diagonal(W)).sum()
    return 2 * along - (mean**2).sum() - var * (W**2).sum()


@pytest.mark.slow
def test_minimax_descends_in_the_guide_and_ascends_in_the_network():
    guide = with_critic(SemiNormal(), stax.Dense(2), output_dim=2)
    loss = FisherDivergence(200, "minimax")
    params = {**SEMI, "critic$params": jnp.array([0.5, -0.2, 0.3, -0.4, 0.6, -0.1])}

    @jax.jit
    def moments(keys):
        def one(key):
            return jax.value_and_grad(lambda p: loss.loss(key, p, normal_target, guide))(params)

        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / len(x) ** 0.5), jax.vmap(one)(keys))

    value, expected = jax.value_and_grad(linear_field)(params)
    expected["critic$params"] = -expected["critic$params"]
    (mean, error), grads = moments(random.split(random.key(0), 400))
    assert jnp.abs(mean - value) < 4.5 * error
    for name, (mean, error) in grads.items():
        assert (jnp.abs(mean - expected[name]) < 4.5 * error).all(), name
        # The test can fail: the derivatives differ from zero by many standard errors.
        assert jnp.median(jnp.abs(expected[name]) / error) > 10, name


def with_param():
    numpyro.sample("z", dist.Normal(numpyro.param("theta", 0.0), 1.0))


def implicit():
    e = numpyro.sample("e", dist.Normal(), infer=NOISE)
    numpyro.sample("z", Implicit(e))


def hierarchical():
    a = numpyro.sample("a", dist.Normal(), infer=NOISE)
    numpyro.sample("z", dist.Normal(a, 1.0))


def test_what_does_not_fit_is_named():
    explicit, minimax = FisherDivergence(3), FisherDivergence(3, "minimax")
    params = {"m": 0.3, "s": 0.7, "theta": 0.0}
    sentence = "FisherDivergence: the model has the param site 'theta', but the minimum"
    assert_refuses(sentence, explicit, params, with_param, normal_guide)
    sentence = "sample_mixing and conditional; use AutoSemiImplicit"
    assert_refuses(sentence, minimax, params, standard, normal_guide, error=TypeError)
    sentence = r"critic, and the guide has none; .*with_critic\(guide, output_dim=2\)"
    assert_refuses(sentence, minimax, SEMI, normal_target, SemiNormal())
    one = with_critic(SemiNormal(), output_dim=1)
    trace = handlers.trace(handlers.seed(one, 0)).get_trace()
    weights = {"critic$params": trace["critic$params"]["value"]}
    sentence = r"gives shape \(3,\), and must give \(3, 2\); give it output_dim=2"
    assert_refuses(sentence, minimax, SEMI | weights, normal_target, one)
    error = IntractableDensityError
    assert_refuses("an Implicit site has no density", explicit, {}, standard, implicit, error=error)
    sentence = "draws the auxiliary site 'a' too, so that log q of the latents alone is not known"
    assert_refuses(sentence, explicit, {}, standard, hierarchical)
