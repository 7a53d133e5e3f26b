"""`AmortizedMCMC`: explicit loops, laws of its chains, and what it refuses."""

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDelta
import pytest

from numpyro_ext.objectives import AmortizedMCMC
from numpyro_ext.objectives.amortized import energy_distance
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.samples import Samples
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
