"""Chains as distributions of NumPyro, whose events are whole sequences."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax

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


def test_in_a_model_and_a_guide_the_bound_is_the_evidence():
    """y_t ~ N(x_t, .5): with the exact posterior as its guide every draw has the ELBO log p(y)."""
    y = np.array([[1.0, 0.2], [0.3, -0.5], [2.0, 0.1], [1.5, 0.0]], np.float32)
    prior = gaussian(jnp.ones(2))

    def model():
        x = numpyro.sample("x", GaussianChain.to_distribution(prior))
        numpyro.sample("y", dist.Normal(x, 0.5**0.5).to_event(2), obs=y)

    def guide():
        posterior = prior._replace(h=prior.h + 2 * y, W=prior.W - jnp.eye(2))
        numpyro.sample("x", GaussianChain.to_distribution(posterior))

    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    state = svi.init(random.key(0))
    found = [float(svi.evaluate(state._replace(rng_key=random.key(i)))) for i in range(2)]
    # The same by the dense normal: y has the covariance of x plus .5 on the diagonal.
    mean, covariance = np.ones((4, 2)), np.zeros((4, 2, 4, 2))
    for i, variance in enumerate([1.0, 0.5]):
        marginal = []
        for t in range(4):
            marginal.append(variance if t == 0 else 0.81 * marginal[-1] + 0.2)
            mean[t, i] = 0.9**t
        for s in range(4):
            for t in range(4):
                covariance[s, i, t, i] = 0.9 ** abs(s - t) * marginal[min(s, t)]
    total = covariance.reshape(8, 8) + 0.5 * np.eye(8)
    gap = y.ravel() - mean.ravel()
    logdet = np.linalg.slogdet(2 * np.pi * total)[1]
    evidence = -(gap @ np.linalg.solve(total, gap) + logdet) / 2
    np.testing.assert_allclose(found, -evidence, rtol=1e-4)
