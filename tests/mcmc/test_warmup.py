"""A safe beginning: far starts, thermostats and steps that are too long."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.mcmc import SGHMC, SGLD


def far(x):
    """Its transform saturates where a far start would throw a chain with momentum."""
    a, b = numpyro.sample("a", dist.Uniform(0, 1)), numpyro.sample("b", dist.Uniform(0, 1))
    numpyro.sample("x", dist.Normal(a * b, 0.1).expand([1000]).to_event(1), obs=x)


@pytest.mark.slow
def test_a_far_start_does_not_become_momentum():
    """The product is known to 0.1 / sqrt(1000); by NUTS its sd is 0.0031."""
    x = 0.9 + 0.1 * random.normal(random.key(0), (1000,))

    @jax.jit
    @jax.vmap
    def run(step_size):
        kernel = SGHMC(far, step_size, steps_per_sample=20)
        state = kernel.init(random.split(random.key(0), 2), 500, None, (x,))

        def draw(state, _):
            state = kernel.sample(state, (x,))
            return state, (jax.nn.sigmoid(state.z["a"]), jax.nn.sigmoid(state.z["b"]))

        state, _ = jax.lax.scan(draw, state, length=500)
        return jax.lax.scan(draw, state, length=1000)[1]

    a, b = run(jnp.array([0.01, 0.003, 0.001]))
    product = np.asarray(a * b).reshape(3, -1)
    assert np.max(np.abs(product.mean(1) - float(x.mean()))) < 0.002
    assert np.all((product.std(1) > 0.002) & (product.std(1) < 0.005))
    assert float(a.max()) < 1.0


def test_a_chain_that_diverges_in_warmup_halves_its_step():
    x = 5 + 2 * random.normal(random.key(1), (1000,))

    def model(x):
        mu, sd = numpyro.sample("mu", dist.Normal(0, 10)), numpyro.sample("sd", dist.HalfNormal(10))
        numpyro.sample("x", dist.Normal(mu, sd).expand([1000]).to_event(1), obs=x)

    mcmc = MCMC(SGLD(model, 1.0), num_warmup=2000, num_samples=2000, progress_bar=False)
    mcmc.run(random.key(0), x)
    state = mcmc.last_state
    assert float(state.step_scale) < 0.01
    assert float(state.step_size) == pytest.approx(float(state.step_scale))
    assert not np.any(mcmc.get_extra_fields()["diverging"])
    assert mcmc.get_samples()["mu"].mean() == pytest.approx(5.0, abs=0.3)


def test_a_chain_goes_back_to_its_best_state_in_warmup_alone():
    """After warmup a divergence stays where it is, or draws would gather at the best state."""

    def model(broken):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([1]).to_event(1))
        numpyro.factor("broken", jnp.where(broken, jnp.nan, 0.0) * z[0])

    kernel, good, bad = SGLD(model, 0.1), jnp.array(False), jnp.array(True)
    first = kernel.init(random.key(0), 10, None, (good,), {})
    best = jnp.asarray(100.0), jnp.array([7.0])

    @jax.jit
    def step(i, broken):
        state = first._replace(i=jnp.asarray(i), best=best)
        return kernel.sample(state, (broken,), {})

    in_warmup, after = step(9, bad), step(10, bad)
    assert in_warmup.z["z"] == best[1] and in_warmup.step_scale == 0.5
    assert after.z["z"] == first.z["z"] and after.step_scale == 1.0
    assert step(9, good).best[1] == first.z["z"] and step(10, good).best[1] == best[1]
