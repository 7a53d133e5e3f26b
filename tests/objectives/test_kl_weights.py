"""The weights of the KL term: in an epoch, annealed and tempered."""

from functools import cache, partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.objectives import KLWeightedELBO, count_steps, minibatch_kl_weights


@pytest.mark.parametrize("num_batches", [1, 3, 2000])
def test_weights_of_an_epoch_sum_to_one_without_overflow(num_batches):
    weights = minibatch_kl_weights(num_batches)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-5)
    first = weights[: min(num_batches, 20)]
    np.testing.assert_allclose(first / weights[0], 0.5 ** np.arange(len(first)), rtol=1e-5)


X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


def normal_model(x, batch=4):
    """Global and local latents, one of them constrained, and a minibatch."""
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.3, 1.5))
    with numpyro.plate("data", len(x), subsample_size=batch):
        rows = numpyro.subsample(x, event_dim=0)
        z = numpyro.sample("z", dist.Normal(loc, 1.0))
        numpyro.sample("x", dist.Normal(z, scale), obs=rows)


@cache
def fitted():
    guide = AutoNormal(normal_model, init_scale=0.3)
    svi = SVI(normal_model, guide, optax.adam(0.1), Trace_ELBO())
    return guide, svi.get_params(svi.init(random.key(3), X))


BASES = {
    "Trace": Trace_ELBO(3),
    "mean field": TraceMeanField_ELBO(2, vectorize_particles=False),
    "one particle": TraceMeanField_ELBO(),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Trace", pytest.param("mean field", marks=pytest.mark.nightly), "one particle"]
)
def test_weight_one_is_the_base_and_the_loss_is_linear_in_the_weight(name, tol):
    """With one key the loss is a + weight b; at 1 it is that of the base, gradient included."""
    guide, params = fitted()
    base = BASES[name]

    @jax.jit
    def both(weight):
        def loss(params, loss):
            return loss.loss(random.key(1), params, normal_model, guide, X)

        weighted = jax.value_and_grad(loss)(params, KLWeightedELBO(weight, base))
        return weighted, jax.value_and_grad(loss)(params, base)

    (zero, base_of), (one, _), (three, _) = both(0.0), both(1.0), both(3.0)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=tol(1e-5, 1e-12)), one, base_of)

    def line(a, b, c):
        bound = tol(1e-4, 1e-10) * (1 + np.max(np.abs(c)))
        np.testing.assert_allclose(a + 3 * (b - a), c, atol=bound)

    jax.tree.map(line, zero, one, three)


@pytest.mark.x64
def test_the_parts_are_the_likelihood_and_the_closed_form(tol):
    """Weight 0 is minus the mean log likelihood; the rest is KL(N(.5, .09) || N(0, 1))."""

    def model():
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(w, 0.7), obs=1.2)

    def guide():
        numpyro.sample("w", dist.Normal(0.5, 0.3))

    def loss(weight, base, key):
        return KLWeightedELBO(weight, base).loss(key, {}, model, guide)

    base = TraceMeanField_ELBO()
    kl = jax.jit(lambda key: loss(2.5, base, key) - loss(0.0, base, key))(random.key(4))
    np.testing.assert_allclose(kl / 2.5, 0.873972804325936, rtol=tol(2e-5, 1e-12))
    many = Trace_ELBO(100_000)
    found = jax.jit(lambda key: loss(0.0, many, key))(random.key(5))
    mean = 0.5 * np.log(2 * np.pi * 0.49) + ((1.2 - 0.5) ** 2 + 0.09) / (2 * 0.49)
    # The log likelihood has a standard deviation of .45 under q.
    assert abs(found - mean) < 5 * 0.45 / 100_000**0.5


@pytest.mark.slow
def test_a_schedule_has_the_weights_of_an_epoch():
    """Three steps without learning, each with the loss of its weight."""
    guide, _ = fitted()
    weights = 3 * minibatch_kl_weights(3)
    svi = SVI(
        normal_model,
        count_steps(guide),
        optax.sgd(0.0),
        KLWeightedELBO(lambda i: weights[i % 3], Trace_ELBO(2)),
    )
    state = svi.init(random.key(7), X)
    params, update = svi.get_params(state), jax.jit(svi.update)

    @jax.jit
    def at(weight, key):
        return KLWeightedELBO(weight, Trace_ELBO(2)).loss(key, params, normal_model, guide, X)

    for step in range(4):
        key = random.split(state.rng_key)[1]
        state, value = update(state, X)
        np.testing.assert_allclose(value, at(weights[step % 3], key), rtol=1e-5)
    assert int(state.mutable_state["_objective_step"]["step"]) == 4


def test_mistakes_of_the_weight_have_one_sentence():
    guide, params = fitted()
    with pytest.raises(ValueError, match="weight is a callable of the step, but the guide does"):
        KLWeightedELBO(lambda i: i).loss(random.key(0), params, normal_model, guide, X)
    with pytest.raises(TypeError, match=r"base is .*RenyiELBO.*; it must be a Trace_ELBO"):
        KLWeightedELBO(0.5, RenyiELBO())
