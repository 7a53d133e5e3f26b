"""Chains as distributions of NumPyro, whose events are whole sequences."""

from jax import random
import jax.numpy as jnp

from numpyro_ext.expfam import GaussianChain, MarkovChain


def gaussian(loc):
    return GaussianChain.from_standard(
        initial_loc=loc,
        initial_covariance=jnp.diag(jnp.array([1.0, 0.5])),
        weight=0.9 * jnp.eye(2),
        covariance=0.2 * jnp.eye(2),
        num_steps=4,
    )


def discrete(p):
    rows = jnp.array([[0.9, 0.1], [0.2, 0.8]])
    return MarkovChain.from_standard(jnp.stack([p, 1 - p]), rows, num_steps=4)


def test_shapes_support_and_gradients_are_declared():
    q = GaussianChain.to_distribution(gaussian(jnp.ones(2)))
    p = MarkovChain.to_distribution(discrete(jnp.array(0.3)))
    assert (q.batch_shape, q.event_shape) == ((), (4, 2)) and q.has_rsample
    assert (p.batch_shape, p.event_shape) == ((), (4,)) and not p.has_rsample
    assert p.support.is_discrete and p.support(jnp.array([0, 1, 1, 0]))
    assert not p.support(jnp.array([0, 1, 2, 0])) and q.support(jnp.zeros((4, 2)))
    wide = q.expand([3])
    assert wide.sample(random.key(0)).shape == (3, 4, 2)
