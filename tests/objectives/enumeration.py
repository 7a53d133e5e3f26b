"""Exact expectations over discrete draws: every combination is fed to the particles by hand."""

import itertools

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro import handlers


def combinations(num_states, num_draws):
    """``(num_states ** num_draws, num_draws)``."""
    return np.array(list(itertools.product(range(num_states), repeat=num_draws)))


def mean_gradients(make_loss, alphas, model, guide, params, draws, probabilities):
    """``{alpha: sum_c probabilities_c grad loss}`` over the combinations c of ``draws``.

    ``draws`` are values ``{site: (C, K, ...)}`` of the guide's sites, ``make_loss(alpha,
    vectorize_particles)`` makes the objective, with a traced order.
    """
    box = {}

    def fed_guide(*args):
        with handlers.substitute(data=dict(box)):
            return guide(*args)

    def loss(params, alpha, draws):
        def each(fn, xs):
            out = []
            for k in range(len(jax.tree.leaves(xs)[0])):
                box.update({name: value[k] for name, value in draws.items()})
                out.append(fn(jax.tree.map(lambda x, k=k: x[k], xs)))
            return jax.tree.map(lambda *x: jnp.stack(x), *out)

        return make_loss(alpha, each).loss(random.key(0), params, model, fed_guide)

    params = {name: jnp.asarray(value, float) for name, value in params.items()}
    over_draws = jax.vmap(jax.grad(loss), (None, None, 0))
    grads = jax.jit(jax.vmap(over_draws, (None, 0, None)))(params, jnp.asarray(alphas), draws)
    return {
        alpha: {name: np.tensordot(probabilities, g[i], 1) for name, g in grads.items()}
        for i, alpha in enumerate(alphas)
    }


def finite_difference(fn, params, step=1e-5):
    """Central differences of ``fn(params)`` in double precision, for every entry."""
    grads = {}
    for name, value in params.items():
        value = np.asarray(value, np.float64)
        grad = np.zeros(value.shape)
        for i in np.ndindex(value.shape):
            delta = np.zeros(value.shape)
            delta[i] = step
            up, down = (fn({**params, name: value + sign * delta}) for sign in (1, -1))
            grad[i] = (up - down) / (2 * step)
        grads[name] = grad
    return grads


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.sum(np.exp(x), -1, keepdims=True))


def log_normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def renyi(lw, alpha, axis=-1):
    """The K-particle estimate in plain numpy."""
    a = 1 - alpha
    return np.mean(lw, axis) if a == 0 else np.log(np.mean(np.exp(a * lw), axis)) / a
