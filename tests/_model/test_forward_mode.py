"""Models with loops of unknown length, which JAX differentiates in forward mode alone."""

import warnings

from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoHVI, AutoRealNVPNormal
from numpyro_ext.objectives import taylor_proxy
from numpyro_ext.optim import find_modes
from numpyro_ext.particles import SVGD, AutoParticles


def looped(x):
    """The mean of the data is 4 a + b."""
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    b = numpyro.sample("b", dist.Normal(1.0, 1.0))
    _, mean = lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] + a), (0, b))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(mean, 0.5), obs=x)


X = jnp.array([2.0, 3.5, 1.0])
ROW = np.array([4.0, 1.0])
COV = np.linalg.inv(np.diag([0.25, 1.0]) + len(X) / 0.25 * np.outer(ROW, ROW))
MEAN = COV @ (np.array([0.0, 1.0]) + ROW * float(X.sum()) / 0.25)


@pytest.mark.slow
def test_modes_are_found_in_forward_mode():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mode = find_modes(looped, X).heaviest
    root = np.asarray(mode.factor)
    np.testing.assert_allclose(root @ root.T, COV, rtol=1e-3)
    assert mode.distance(MEAN) < 0.1


@pytest.mark.slow
def test_a_guide_takes_the_argument_of_numpyros_guides():
    guide = AutoRealNVPNormal(looped, init_from=None, forward_mode_differentiation=True)
    svi = SVI(looped, guide, optax.adam(1e-2), Trace_ELBO())
    state = svi.init(random.key(0), X)
    _, loss = svi.update(state, X, forward_mode_differentiation=True)
    assert jnp.isfinite(loss)


def unrolled(x):
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    b = numpyro.sample("b", dist.Normal(1.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(4 * a + b, 0.5), obs=x)


@pytest.mark.slow
def test_particles_move_as_without_the_loop():
    moved = []
    for model in (looped, unrolled):
        svi = SVI(model, AutoParticles(model, 4, init_from=None), optax.sgd(1e-2), SVGD())
        state = svi.update(svi.init(random.key(0), X), X)[0]
        moved.append(svi.get_params(state)["auto_particles"])
    np.testing.assert_allclose(*moved, rtol=1e-4, atol=1e-4)


def looped_in_batches(x, batch=None):
    a = numpyro.sample("a", dist.Normal(0.0, 2.0))
    b = numpyro.sample("b", dist.Normal(1.0, 1.0))
    _, mean = lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, c[1] + a), (0, b))
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        numpyro.sample("x", dist.Normal(mean, 0.5), obs=x[idx])


@pytest.mark.slow
def test_expectation_propagation_is_exact_on_normal_rows():
    """Up to the rounding of 30 precisions of which one is 500 times the other."""
    engine = EP(looped)
    params = engine.run(random.key(0), 30, X, progress_bar=False).params
    np.testing.assert_allclose(params["auto_loc"], MEAN, atol=5e-3)
    root = np.asarray(params["auto_scale_tril"])
    np.testing.assert_allclose(root @ root.T, COV, rtol=5e-3, atol=1e-4)


@pytest.mark.slow
def test_the_expansion_of_normal_rows_is_exact():
    center = {"a": jnp.array(0.3), "b": jnp.array(1.5)}
    proxy = taylor_proxy(looped_in_batches, X, batch=2, center=center)
    residuals = np.asarray(X) - (4 * 0.3 + 1.5)
    np.testing.assert_allclose(proxy.grad, ROW * residuals.sum() / 0.25, rtol=1e-4)
    np.testing.assert_allclose(proxy.hessian, -len(X) / 0.25 * np.outer(ROW, ROW), rtol=1e-4)


@pytest.mark.slow
def test_hamiltonian_guides_move_as_without_the_loop():
    losses = []
    for model in (looped, unrolled):
        svi = SVI(model, AutoHVI(model, init_from=None), optax.sgd(1e-2), Trace_ELBO())
        state = svi.init(random.key(0), X)
        losses.append(svi.update(state, X, forward_mode_differentiation=model is looped)[1])
    np.testing.assert_allclose(*losses, rtol=1e-4)
