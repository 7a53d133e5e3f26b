"""`AuxiliaryELBO` against known gaps, its formula, and the losses that compute the same."""

from functools import cache, partial

import jax
from jax import random
from jax.nn import logsumexp
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext._model.handlers import seed_plates
from numpyro_ext._model.program import trace_of
from numpyro_ext.guides import with_reverse
from numpyro_ext.objectives import IWELBO, VRELBO, AuxiliaryELBO
from numpyro_ext.objectives.auxiliary import HasReverse
from tests.objectives.compare import assert_refuses, assert_same

# E_q log p - E_q log q for the marginal q = N(0, 1.25) and p = N(0, 1):
# (1 + log 1.25 - 1.25) / 2.
ELBO = -0.0134282243
# slope and variance of r(a | z) to KL(q(a | z) || r): log(1 / .2) / 2, 0, and
# (log 2 + (.2 + .09 * 1.25) / .4 - 1) / 2.
GAPS = {(0.0, 1.0): 0.8047189562, (0.8, 0.2): 0.0, (0.5, 0.4): 0.2371985903}


def model():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


def guide():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
    numpyro.sample("z", dist.Normal(a, 0.5))


def reverse(latents):
    slope, variance = numpyro.param("slope", 0.8), numpyro.param("variance", 0.2)
    numpyro.sample("a", dist.Normal(slope * latents["z"], jnp.sqrt(variance)))


PAIRED = with_reverse(guide, reverse)


@cache
def losses():
    """A jitted function of (key, slope, variance) with 200,000 particles."""

    def run(key, slope, variance):
        params = {"slope": slope, "variance": variance}
        K = 200_000
        return {
            "plain": -AuxiliaryELBO(K).loss(key, params, model, PAIRED),
            "weighted": -AuxiliaryELBO(K, True).loss(key, params, model, PAIRED),
            "VRELBO": -VRELBO(1.0, K).loss(key, params, model, PAIRED),
            "IWELBO": -IWELBO(K).loss(key, params, model, PAIRED),
        }

    return jax.jit(run)


@pytest.mark.parametrize("reverse", GAPS)
def test_gap_is_the_divergence_of_the_reverse_model(reverse):
    # The log weights have a standard deviation of at most 2.3: an error of .005.
    found = losses()(random.key(0), *reverse)
    assert abs(found["plain"] - (ELBO - GAPS[reverse])) < 4 * 0.005
    assert found["weighted"] > found["plain"]
    assert_same(found["VRELBO"], found["plain"], 1e-6)
    assert_same(found["IWELBO"], found["weighted"], 1e-6)


def test_weighted_bound_reaches_the_evidence():
    # With the exact r the weights are p(z) / q(z), below 1.12: an error of .0007.
    found = losses()(random.key(1), 0.8, 0.2)
    assert abs(found["weighted"]) < 4 * 0.0007


def test_is_the_number_of_trace_elbo_on_the_same_draw():
    key, params = random.key(3), {"slope": 0.3, "variance": 0.7}
    (draw,) = random.split(random.split(key)[1], 1)

    @jax.jit
    def both(params):
        theirs = Trace_ELBO().loss(draw, params, model, PAIRED)
        return AuxiliaryELBO(1).loss(key, params, model, PAIRED), theirs

    ours, theirs = both(params)
    assert_same(ours, theirs, 1e-6)
    a, z = (trace_of(seed(guide, random.split(draw)[1]))[name]["value"] for name in "az")
    log_r = dist.Normal(0.3 * z, 0.7**0.5).log_prob(a)
    log_q = dist.Normal().log_prob(a) + dist.Normal(a, 0.5).log_prob(z)
    assert_same(-ours, dist.Normal().log_prob(z) + log_r - log_q, 1e-6)


class ByMethod:
    """A guide without a factor, whose reverse model is a method."""

    def __call__(self):
        guide()

    def reverse_log_prob(self, params, aux, latents):
        scale = jnp.sqrt(params["variance"])
        return dist.Normal(params["slope"] * latents["z"], scale).log_prob(aux["a"])


def test_takes_a_guide_with_the_method_alone():
    params = {"slope": 0.3, "variance": 0.7}
    assert isinstance(ByMethod(), HasReverse) and isinstance(PAIRED, HasReverse)

    @jax.jit
    def both(params):
        loss = AuxiliaryELBO(5, True)
        return [loss.loss(random.key(2), params, model, one) for one in (ByMethod(), PAIRED)]

    assert_same(*both(params), 1e-6)


X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


def local_model(x=X):
    with numpyro.plate("data", len(x), subsample_size=4):
        x = numpyro.subsample(x, event_dim=0)
        z = numpyro.sample("z", dist.Normal(0.5, 1.5))
        numpyro.sample("x", dist.Normal(z, 0.8), obs=x)


def local_guide(x=X):
    with numpyro.plate("data", len(x), subsample_size=4):
        x = numpyro.subsample(x, event_dim=0)
        a = numpyro.sample("a", dist.Normal(x, 1.0), infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Normal(0.7 * a, 0.5))


def local_reverse(latents, x=X):
    with numpyro.plate("data", len(x), subsample_size=4):
        x = numpyro.subsample(x, event_dim=0)
        slope = numpyro.param("slope", 0.6)
        numpyro.sample("a", dist.Normal(slope * latents["z"] + 0.2 * x, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_each_datum_of_a_minibatch_has_its_own_bound(weighted):
    key, slope, K = random.key(4), 0.9, 3
    paired = with_reverse(local_guide, local_reverse)

    @jax.jit
    def both(slope):
        plate_key, rest = random.split(key)
        lw = []
        for one in random.split(rest, K):
            sites = trace_of(seed(seed_plates(local_guide, plate_key), random.split(one)[1]))
            a, z, x = sites["a"]["value"], sites["z"]["value"], X[sites["data"]["value"]]
            log_p = dist.Normal(0.5, 1.5).log_prob(z) + dist.Normal(z, 0.8).log_prob(x)
            log_q = dist.Normal(x, 1.0).log_prob(a) + dist.Normal(0.7 * a, 0.5).log_prob(z)
            lw.append(log_p - log_q + dist.Normal(slope * z + 0.2 * x, 0.7).log_prob(a))
        lw = jnp.stack(lw)
        bound = logsumexp(lw, 0) - jnp.log(K) if weighted else lw.mean(0)
        ours = AuxiliaryELBO(K, weighted)
        return (
            jax.value_and_grad(lambda s: ours.loss(key, {"slope": s}, local_model, paired))(slope),
            -6 / 4 * bound.sum(),
        )

    (ours, gradient), expected = both(slope)
    assert_same(ours, expected, 1e-5)
    assert abs(gradient) > 1e-3


def test_bad_arguments_and_guides_are_named():
    with pytest.raises(TypeError, match="importance_weighted is 5; it must be True or False"):
        AuxiliaryELBO(1, 5)
    sentence = r"needs a guide with reverse_log_prob\(.*which guide does not.*with_reverse"
    assert_refuses(sentence, AuxiliaryELBO(), {}, model, guide, error=TypeError)
    auto = AutoNormal(model)
    params = {"z_auto_loc": 0.0, "z_auto_scale": 1.0}
    seed(auto, 0)()
    sentence = "which AutoNormal does not have; use AutoAuxiliary"
    assert_refuses(sentence, AuxiliaryELBO(), params, model, auto, error=TypeError)


@pytest.mark.parametrize("gradient", ["stl", "dreg"])
def test_gradients_at_given_draws_are_refused(gradient):
    params = {"slope": 0.3, "variance": 0.7}
    sentence = "'auto_reverse_a' of the guide is a factor and depends on a parameter"
    assert_refuses(sentence, VRELBO(1.0, 2, gradient=gradient), params, model, PAIRED)


def test_handlers_around_the_guide_are_looked_through():
    params = {"slope": 0.3, "variance": 0.7}
    inside = substitute(PAIRED, data={"unused": 0.0})
    loss = partial(AuxiliaryELBO(1).loss, random.key(2), params, model)
    assert_same(*jax.jit(lambda: [loss(inside), loss(PAIRED)])(), 1e-6)
