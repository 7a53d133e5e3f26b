"""Sums of site log-probabilities and Jacobians, against NumPyro's and against autodiff."""

import jax
from jax import random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to, transforms
from numpyro.infer.util import log_density as numpyros_log_density
import pytest

from numpyro_ext._model.density import log_abs_det, log_density, log_prob, scaled
from numpyro_ext._model.read import read_model, trace_of
from tests._model.models import ORDER, data, unordered


def everything(x):
    """Scales, masks, a factor, a site that needs its intermediates, and a minibatch."""
    with handlers.scale(scale=0.25):
        z = numpyro.sample("z", dist.Normal(0.0, 2.0))
    numpyro.sample("quiet", dist.Normal().mask(False))
    flow = [transforms.AffineTransform(1.0, 2.0), transforms.SigmoidTransform()]
    numpyro.sample("u", dist.TransformedDistribution(dist.Normal(), flow))
    numpyro.factor("soft", -(z**2))
    with numpyro.plate("rows", 6, subsample_size=2), handlers.mask(mask=jnp.array([True, False])):
        numpyro.sample("x", dist.Normal(z, 1.0), obs=numpyro.subsample(x, event_dim=0))


@pytest.mark.x64
@pytest.mark.parametrize("model", [everything, unordered])
def test_log_density_is_that_of_numpyro(model, tol):
    seeded = handlers.seed(model, random.key(3))

    @jax.jit
    def both():
        ours = log_density(trace_of(seeded, (data(),)))
        return ours, numpyros_log_density(seeded, (data(),), {}, {})[0]

    ours, expected = both()
    assert jnp.allclose(ours, expected, rtol=tol(1e-6, 1e-12))


def test_a_scale_is_divided_by_what_the_caller_asks():
    trace = trace_of(handlers.seed(everything, 0), (data(),))
    value = log_prob(trace["x"])
    assert value.shape == (2,)
    assert jnp.allclose(scaled(trace["x"], value), 3 * value)
    assert jnp.allclose(scaled(trace["x"], value, 3.0), value)
    assert jnp.allclose(scaled(trace["quiet"], value, 2.0), value / 2)


@pytest.mark.x64
def test_jacobian_is_that_of_autodiff(tol):
    """A simplex counts as its first coordinates, in which its density is written."""
    info = read_model(unordered, (data(),))
    transform = {name: biject_to(info.latents[name].support) for name in ORDER}

    def constrained(x):
        z = info.unravel(x)
        y = {name: transform[name](z[name]) for name in ORDER}
        return info.ravel(y | {"shares": y["shares"][:-1]})

    @jax.jit
    def both():
        trace = trace_of(handlers.seed(unordered, 0), (data(),))
        z = {name: transform[name].inv(trace[name]["value"]) for name in ORDER}
        slopes = jax.jacfwd(constrained)(info.ravel(z))
        return log_abs_det(trace, ORDER), jnp.linalg.slogdet(slopes)[1]

    ours, expected = both()
    assert jnp.allclose(ours, expected, atol=tol(1e-5, 1e-11))
