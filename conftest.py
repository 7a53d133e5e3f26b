"""The names that every example in a docstring may use without importing them."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def names_in_examples(doctest_namespace):
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal
    import optax

    from numpyro_ext.targets import banana, normal_mean

    def model():
        """A normal of two sites whose correlation is 0.96."""
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, 0.3))

    doctest_namespace |= {
        "jax": jax,
        "jnp": jnp,
        "numpyro": numpyro,
        "dist": dist,
        "optax": optax,
        "random": jax.random,
        "MCMC": MCMC,
        "SVI": SVI,
        "Predictive": Predictive,
        "Trace_ELBO": Trace_ELBO,
        "AutoNormal": AutoNormal,
        "banana": banana,
        "normal_mean": normal_mean,
        "model": model,
    }
