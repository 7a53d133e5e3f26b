"""`SteinDiscrepancy`: explicit loops, its zero at the posterior, and what it refuses."""

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import SteinDiscrepancy
from numpyro_ext.scores import RBF
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
