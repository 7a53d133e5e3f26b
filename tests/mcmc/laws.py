"""Long averages over many independent coordinates, with their errors."""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from tests.mcmc.models import gaussian


def normal(h, loc=0.0):
    """The model of independent coordinates with the curvatures ``h``."""
    return partial(gaussian, loc, jnp.asarray(h, float))


def start(kernel, args=(), *, seed=0, num_warmup=0, **init_params):
    """The first state of a chain, and its jitted ``sample``."""
    init_params = {name: jnp.asarray(value, float) for name, value in init_params.items()}
    state = kernel.init(random.key(seed), num_warmup, init_params or None, args, {})
    return state, jax.jit(lambda state: kernel.sample(state, args, {}))


def step_at(make, z, *, seed=0):
    """``T -> z' - z`` of the kernel ``make(temperature=T)``, compiled once, and the step's key."""
    z = jnp.asarray(z, float)

    @jax.jit
    def moved(T):
        kernel = make(temperature=T)
        state = kernel.init(random.key(seed), 0, {"z": z}, (), {})
        return kernel.sample(state, (), {}).z["z"] - z

    key = random.split(random.split(random.key(seed), 4)[0], 3)[2]
    return lambda T: np.asarray(moved(T), float), key


def average(kernel, fns, num_steps, burn_in, *, seed=0, chains=None, init_params=None):
    """Means over ``num_steps`` draws after ``burn_in`` of the functions of the state, and the last
    state.
    """
    args, key = (), random.key(seed)
    key = key if chains is None else random.split(key, chains)
    state = kernel.init(key, burn_in, init_params, args, {})

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
