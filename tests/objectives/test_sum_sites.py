"""The parts of a loss by site, and a single particle, as ``Trace_ELBO`` has them."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import VRELBO


@pytest.mark.slow
def test_the_parts_of_sites_sum_to_the_elbo():
    """A site that the guide draws from its prior has no part in the loss."""

    def model(x):
        a = numpyro.sample("a", dist.Normal(0.0, 2.0))
        numpyro.sample("b", dist.Gamma(3.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=3) as idx:
            numpyro.sample("x", dist.Normal(a, 1.0), obs=x[idx])

    def guide(x):
        numpyro.sample("a", dist.Normal(0.3, 0.5))
        numpyro.sample("b", dist.Gamma(3.0, 1.0))

    x, key = jnp.arange(6.0), random.key(0)
    for K in (1, 4):
        parts = VRELBO(1.0, K, sum_sites=False).loss(key, {}, model, guide, x)
        assert set(parts) == {"a", "b", "x"} and abs(parts["b"]) < 1e-6
        whole = VRELBO(1.0, K).loss(key, {}, model, guide, x)
        np.testing.assert_allclose(sum(parts.values()), whole, rtol=1e-5)
    with pytest.raises(ValueError, match="the loss is a sum over sites"):
        VRELBO(0.5, sum_sites=False)


def test_one_particle_is_not_mapped_over():
    """As in NumPyro, where a ``vectorize_particles`` is asked from two particles on."""

    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        numpyro.sample("z", dist.Normal(1.0, 1.0))

    one = [
        VRELBO(0.5, 1, vectorize_particles=how).loss(random.key(0), {}, model, guide)
        for how in (True, lambda fn, xs: 1 / 0)
    ]
    assert one[0] == one[1]
    with pytest.raises(ZeroDivisionError):
        VRELBO(0.5, 2, vectorize_particles=lambda fn, xs: 1 / 0).loss(
            random.key(0), {}, model, guide
        )
