"""`AuxiliaryELBO` against known gaps, its formula, and the losses that compute the same."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.guides import with_reverse
from numpyro_ext.objectives import IWELBO, VRELBO, AuxiliaryELBO
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


class ByMethod:
    """A guide without a factor, whose reverse model is a method."""

    def __call__(self):
        guide()

    def reverse_log_prob(self, params, aux, latents):
        scale = jnp.sqrt(params["variance"])
        return dist.Normal(params["slope"] * latents["z"], scale).log_prob(aux["a"])


def test_takes_a_guide_with_the_method_alone():
    params = {"slope": 0.3, "variance": 0.7}

    @jax.jit
    def both(params):
        loss = AuxiliaryELBO(5, True)
        return [loss.loss(random.key(2), params, model, one) for one in (ByMethod(), PAIRED)]

    assert_same(*both(params), 1e-6)


def test_bad_arguments_and_guides_are_named():
    sentence = "needs a guide with reverse_log_prob; use AutoAuxiliary.*with_reverse"
    assert_refuses(sentence, AuxiliaryELBO(), {}, model, guide, error=TypeError)
