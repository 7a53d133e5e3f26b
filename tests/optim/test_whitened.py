"""Steps in units of the posterior: the step, what it does not depend on, and a fit of SVI."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_ext.optim import whitened

DENSE = {"auto_loc": np.array([2.0, -1.0]), "auto_scale_tril": np.array([[3.0, 0.0], [-4.0, 0.5]])}
SITES = {
    "w_auto_loc": np.array([[1.0, 2.0]]),
    "w_auto_scale": np.array([[0.1, 1e-3]]),
    "b_auto_loc": np.array(5.0),
    "b_auto_scale": np.array(20.0),
    "other": np.array(7.0),
}


@pytest.mark.x64
def test_a_step_is_a_a_transposed_times_the_gradient():
    gradient = {"auto_loc": np.array([1.0, 2.0]), "auto_scale_tril": np.ones((2, 2))}
    optim = whitened(optax.sgd(0.1), DENSE)
    steps, _ = optim.update(gradient, optim.init(DENSE), DENSE)
    a = DENSE["auto_scale_tril"]
    np.testing.assert_allclose(steps["auto_loc"], -0.1 * a @ a.T @ [1.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(steps["auto_scale_tril"], -0.1 * np.ones((2, 2)), rtol=1e-6)


def test_adam_moves_each_site_by_its_own_scale():
    optim = whitened(optax.adam(0.01), SITES)
    gradient = jax.tree.map(lambda x: np.full(np.shape(x), -3.0), SITES)
    steps, _ = optim.update(gradient, optim.init(SITES), SITES)
    np.testing.assert_allclose(steps["w_auto_loc"], [[1e-3, 1e-5]], rtol=1e-4)
    np.testing.assert_allclose(steps["b_auto_loc"], 0.2, rtol=1e-4)
    for plain in ("w_auto_scale", "b_auto_scale", "other"):
        np.testing.assert_allclose(steps[plain], np.full(np.shape(SITES[plain]), 0.01), rtol=1e-4)


def test_the_path_does_not_depend_on_the_units():
    """The loss 1/2 |A^-1 (mu - m)|^2 has the same path in xi for every A; weight decay, which
    reads the parameters, too."""

    def path(factor):
        start = {"auto_loc": jnp.array([5.0, 5.0]), "auto_scale_tril": factor}
        inverse = jnp.linalg.inv(factor)
        goal = start["auto_loc"] + factor @ jnp.array([1.0, -2.0])

        def loss(params):
            return jnp.sum((inverse @ (params["auto_loc"] - goal)) ** 2) / 2

        inner = optax.adamw(0.1, weight_decay=0.3)
        optim, params, state = whitened(inner, start), start, None
        state, kept = optim.init(params), []
        for _ in range(20):
            steps, state = optim.update(jax.grad(loss)(params), state, params)
            params = optax.apply_updates(params, steps)
            params["auto_scale_tril"] = factor
            kept.append(inverse @ (params["auto_loc"] - start["auto_loc"]))
        return np.array(kept)

    odd = jnp.array([[30.0, 0.0], [-2.0, 0.05]])
    np.testing.assert_allclose(path(odd), path(jnp.eye(2)), atol=2e-3)
