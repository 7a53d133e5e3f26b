"""`AmortizedMCMC`: explicit loops, laws of its chains, and what it refuses."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDelta
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import AmortizedMCMC
from numpyro_ext.objectives.amortized import energy_distance
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.samples import Samples
from tests.objectives.compare import assert_refuses
from tests.objectives.models import guide_draws


def standard(n=2):
    numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def guide():
    m, s = numpyro.param("m", 0.3), numpyro.param("s", 0.7)
    numpyro.sample("z", dist.Normal(m, s).expand([2]).to_event(1))


def energy_by_hand(z, y, sd):
    K = len(z)
    apart = lambda a, b: jnp.sqrt(jnp.sum(((a - b) / sd) ** 2))  # noqa: E731
    total = 0.0
    for i in range(K):
        for j in range(K):
            if i != j:
                total += 2 * apart(z[i], y[j]) - apart(z[i], z[j]) - apart(y[i], y[j])
    return total / (K * (K - 1))


def both_sd(z, y):
    return jnp.concatenate([z, y]).std(0)


@pytest.mark.slow
def test_energy_distance_is_that_of_an_explicit_loop():
    z, noise = random.normal(random.key(0), (2, 4, 3, 2)) * jnp.array([1.0, 50.0])
    y = 2.0 + z + 0.1 * noise
    expected = [energy_by_hand(z[:, n], y[:, n], both_sd(z, y)[n]) for n in range(3)]
    assert jnp.allclose(energy_distance(z, y), jnp.stack(expected), rtol=1e-4)
    # Draws that coincide have a gradient of zero, not NaN.
    assert jnp.isfinite(jax.grad(lambda z: energy_distance(z, y).sum())(jnp.zeros_like(z))).all()


def ends(params, key, push, K=4):
    """The draws of the base and where the transitions ``push`` carry them."""
    z = y = guide_draws(key, K, guide, params)["z"]
    for _ in range(3):
        y = push(y)
    return z, y


@pytest.mark.slow
def test_gradient_pulls_the_draws_to_the_ends_of_their_chains():
    loss, key = AmortizedMCMC(4, 3, transition=lambda key, z, U: 0.8 * z + 1.0), random.key(1)
    params = {"m": 0.3, "s": 0.7}
    unit = {"m": 0.0, "s": 1.0}
    _, y = ends(params, key, lambda z: 0.8 * z + 1.0)

    def by_hand(params):
        z = params["m"] + params["s"] * ends(unit, key, lambda z: z)[0]
        return energy_by_hand(z, y, jax.lax.stop_gradient(both_sd(z, y)))

    ours = jax.jit(jax.value_and_grad(lambda p: loss.loss(key, p, standard, guide)))(params)
    theirs = jax.jit(jax.value_and_grad(by_hand))(params)
    assert jnp.allclose(ours[0], theirs[0], rtol=1e-4)
    for name in params:
        assert jnp.allclose(ours[1][name], theirs[1][name], rtol=1e-3)


def one_dimension():
    numpyro.sample("z", dist.Normal())


def narrow():
    numpyro.sample("z", dist.Normal(0.0, numpyro.param("s", 0.1)))


@pytest.mark.parametrize(
    ("transition", "step", "s", "variance"),
    [
        # v <- (1 - eps)^2 v + 2 eps, five times from .01
        ("langevin", 0.1, 0.1, 0.6890884264),
        # started from the target, which one unadjusted step of this size would widen to 1.25
        ("mala", 0.5, 1.0, 1.0),
    ],
)
def test_transitions_have_their_law(transition, step, s, variance):
    K = 20_000
    loss = AmortizedMCMC(K, transition=transition, step_size=step)

    @jax.jit
    def ends_of_chains(s):
        draws = Draws(loss, random.key(2), {"s": s}, one_dimension, narrow, (), {})
        samples = Samples(draws, implicit=False)

        def end(key):
            return loss._run(key, samples, draws, samples.vector_of(draws.particle(key)))

        return jax.vmap(end)(draws.keys)

    square = jnp.mean(ends_of_chains(s) ** 2)
    assert jnp.abs(square - variance) < 4 * variance * (2 / K) ** 0.5  # Monte Carlo


@pytest.mark.nightly
def test_gradient_is_zero_on_average_at_the_posterior_and_not_elsewhere():
    loss = AmortizedMCMC(16, transition="mala", step_size=0.5)

    @jax.jit
    @jax.vmap
    def grads(key, s):
        one = lambda p: loss.loss(key, p, standard, guide)  # noqa: E731
        return jnp.stack(list(jax.grad(one)({"m": 0.0, "s": s}).values()))

    num = 20_000  # of which 300 have the gradient away from the posterior at 30 errors
    for s, zero in ((1.0, True), (0.7, False)):
        at = grads(random.split(random.key(3), num), jnp.full(num, s))
        assert (jnp.abs(at.mean(0)[1]) < 4 * at.std(0)[1] / num**0.5) == zero  # Monte Carlo


def with_param():
    numpyro.sample("z", dist.Normal(numpyro.param("theta", 1.0), 2.0).expand([2]).to_event(1))


def test_parameters_of_the_model_get_the_gradient_at_the_ends():
    push = lambda z: 0.5 * z + 1.0  # noqa: E731
    loss, key = AmortizedMCMC(4, 3, transition=lambda key, z, U: push(z)), random.key(4)
    params = {"m": 0.3, "s": 0.7}
    _, y = ends(params, key, push)
    value, grad = jax.jit(
        jax.value_and_grad(lambda t: loss.loss(key, {**params, "theta": t}, with_param, guide))
    )(0.4)
    assert jnp.allclose(grad, -jnp.mean(jnp.sum((y - 0.4) / 4.0, axis=1)), rtol=1e-4)
    plain = jax.jit(lambda p: loss.loss(key, p, standard, guide))(params)
    assert jnp.allclose(value, plain, rtol=1e-4)  # no value of its own


def test_a_point_has_no_gradient():
    with pytest.raises(ValueError, match="gives the latent site 'z' as a point"):
        AmortizedMCMC(2).loss(
            random.key(0), {"z_auto_loc": jnp.ones(2)}, standard, AutoDelta(standard)
        )


@pytest.mark.parametrize("transition", ["langevin", "mala"])
def test_kl_is_the_cross_entropy_of_the_ends(transition):
    """v <- (1 - eps)^2 v + 2 eps, five times from .01; MALA keeps the target's variance."""
    s, step, variance = (0.1, 0.1, 0.6890884264) if transition == "langevin" else (1.0, 0.5, 1.0)
    K = 20_000
    loss = AmortizedMCMC(K, transition=transition, step_size=step, divergence="kl")

    @jax.jit
    @jax.value_and_grad
    def value_and_slope(s):
        return loss.loss(random.key(2), {"s": s}, one_dimension, narrow)

    value, slope = value_and_slope(s)
    error = 4 * variance * (2 / K) ** 0.5  # Monte Carlo
    # The loss is log(2 pi s^2) / 2 + E y^2 / (2 s^2).
    found = (value - 0.5 * math.log(2 * math.pi * s**2)) * 2 * s**2
    assert jnp.abs(found - variance) < error
    assert jnp.abs((1 / s - slope) * s**3 - variance) < error


def quadratic(params, z):
    """A critic of one dimension, T(z) = a + b z + c z^2."""
    return params[0] + params[1] * z + params[2] * z**2


@pytest.mark.slow
def test_jensen_shannon_is_that_of_quadrature_at_the_best_critic():
    """The ends are N(1 + .5 m, .25 s^2), by a transition that is no Markov chain of a target."""
    K, m, s = 200_000, 0.3, 0.7
    push = lambda key, z, U: 0.5 * z + 1.0  # noqa: E731
    network = (lambda key, shape: ((1,), jnp.zeros(3)), quadratic)
    guide = with_critic(scalar_guide, network)
    loss = AmortizedMCMC(K, 1, transition=push, divergence="js")
    mean, sd = 0.5 * m + 1.0, 0.5 * s  # of the ends
    best = jnp.array(
        [
            jnp.log(sd / s) - m**2 / (2 * s**2) + mean**2 / (2 * sd**2),
            m / s**2 - mean / sd**2,
            1 / (2 * sd**2) - 1 / (2 * s**2),
        ]
    )
    z = jnp.linspace(-8.0, 8.0, 20_001)
    log_r = dist.Normal(mean, sd).log_prob(z)

    def divergence(m, s):
        log_q = dist.Normal(m, s).log_prob(z)
        log_half = jnp.logaddexp(log_q, log_r) - jnp.log(2.0)
        terms = jnp.exp(log_q) * (log_q - log_half) + jnp.exp(log_r) * (log_r - log_half)
        return jnp.sum(terms) * (z[1] - z[0]) / 2

    @jax.jit
    @jax.value_and_grad
    def ours(params):
        return loss.loss(random.key(5), params, one_dimension, guide)

    value, grads = ours({"m": m, "s": s, "critic$params": best})
    expected, slopes = jax.value_and_grad(divergence, (0, 1))(m, s)
    # softplus(T) and its slope have sds below 2 here: 4 errors of the mean of K draws.
    atol = 4 * 2 / K**0.5
    np.testing.assert_allclose(value, expected, atol=atol)
    np.testing.assert_allclose([grads["m"], grads["s"]], slopes, atol=3 * atol)
    np.testing.assert_allclose(grads["critic$params"], 0.0, atol=3 * atol)  # it is the best one


def scalar_guide():
    m, s = numpyro.param("m", 0.3), numpyro.param("s", 0.7)
    e = numpyro.sample("e", dist.Normal(), infer={"is_auxiliary": True})
    numpyro.sample("z", Implicit(m + s * e))


def mixed_by_noise():
    e = numpyro.sample("e", dist.Normal(), infer={"is_auxiliary": True})
    numpyro.sample("z", dist.Normal(e, 1.0))


def test_what_a_divergence_lacks_is_named():
    kl, params = AmortizedMCMC(2, divergence="kl"), {"m": 0.3, "s": 0.7}
    assert_refuses("has no density|has no log", kl, params, one_dimension, scalar_guide)
    sentence = 'auxiliary site .e. too.*use divergence="energy"'
    assert_refuses(sentence, kl, {}, one_dimension, mixed_by_noise)
    js, sentence = AmortizedMCMC(2, divergence="js"), "trains a critic, and the guide has none"
    assert_refuses(sentence, js, params, one_dimension, scalar_guide)
    with pytest.raises(ValueError, match="divergence is 'tv'"):
        AmortizedMCMC(2, divergence="tv")
