"""What the tests of the kernels share: targets with many independent coordinates, noise, long averages."""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints


def gaussian(h, loc=0.0):
    """``U = h (z - loc)^2 / 2``, a coordinate for each entry of ``h``."""

    def model():
        h_ = jnp.asarray(h, float)
        numpyro.sample("z", dist.Normal(loc, 1 / jnp.sqrt(h_)).to_event(h_.ndim))

    return model


def potential(u, n):
    """``n`` independent coordinates with the potential ``u``."""

    def model():
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), (n,)))
        numpyro.factor("u", -jnp.sum(u(z)))

    return model


class Noisy:
    """The exact gradient plus normal noise of variance ``s2``."""

    def __init__(self, s2):
        self.s2 = s2

    def init(self, z, oracle):
        return ()

    def estimate(self, rng_key, i, z, idx, oracle, state):
        u, grad = oracle.value_and_grad(z, idx)
        keys = random.split(rng_key, len(grad))
        noisy = {
            name: g + jnp.sqrt(jnp.asarray(self.s2, g.dtype)) * random.normal(key, g.shape, g.dtype)
            for key, (name, g) in zip(keys, grad.items(), strict=True)
        }
        return u, noisy, state


def average(kernel, fns, num_steps, burn_in, *, seed=0, init_params=None, args=(), num_warmup=None):
    """Means over ``num_steps`` draws after ``burn_in`` of the functions of the state, and the last state."""
    num_warmup = burn_in if num_warmup is None else num_warmup
    state = kernel.init(random.key(seed), num_warmup, init_params, args, {})

    def body(carry, _):
        state, total = carry
        state = kernel.sample(state, args, {})
        now = {name: fn(state) for name, fn in fns.items()}
        return (state, jax.tree.map(lambda a, b: a + b, total, now)), None

    @jax.jit
    def run(state):
        state = lax.fori_loop(0, burn_in, lambda _, s: kernel.sample(s, args, {}), state)
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, float),
            jax.eval_shape(lambda s: {name: fn(s) for name, fn in fns.items()}, state),
        )
        (state, total), _ = lax.scan(body, (state, zeros), length=num_steps)
        return jax.tree.map(lambda x: x / num_steps, total), state

    means, state = run(state)
    assert not np.any(state.diverging)
    return {name: np.asarray(value, float) for name, value in means.items()}, state


def second_moment(loc):
    """``(z - loc)^2``, which needs no estimate of the mean."""
    return lambda state: (state.z["z"] - loc) ** 2


def mean_and_error(values):
    """The mean over independent coordinates and its standard error."""
    values = np.ravel(values)
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))
