"""ThermodynamicELBO: Gaussians in closed form, discrete sites by enumeration, both gradients."""

import jax
from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import ThermodynamicELBO
from tests.objectives.compare import NoInverse, assert_refuses
from tests.objectives.models import NONE, linear_gaussian


@pytest.mark.parametrize("gradient", ["covariance", "pathwise"])
def test_gradients_of_gaussians(gradient):
    """q = N(m, 1), p = N(0, 1): E_{pi_b}[log w] = m^2 (b - 1/2)."""
    m, betas = 0.8, np.array([0.0, 0.2, 0.6, 1.0])

    def model():
        numpyro.sample("z", dist.Normal(0.0, 1.0))

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0), 1.0))

    def both(key):
        return [
            jax.grad(
                lambda p, bound=bound: ThermodynamicELBO(
                    num_particles=20_000, betas=betas, bound=bound, gradient=gradient
                ).loss(key, {"m": p}, model, guide)
            )(m)
            for bound in ("lower", "upper")
        ]

    grads = np.array(jax.jit(lambda keys: jax.lax.map(both, keys))(random.split(random.key(2), 20)))
    error = grads.std(1, ddof=1) / 20**0.5
    steps = np.diff(betas)
    exact = [-2 * m * steps @ (betas[:-1] - 0.5), 2 * m * steps @ (betas[1:] - 0.5)]
    assert np.all(abs(grads.mean(1) - exact) < 4 * error + 1e-3)
    assert np.all(error < 0.02)


def test_covariance_needs_an_inverse():
    pathwise = ThermodynamicELBO(gradient="pathwise")

    def flow(x):
        numpyro.sample("z", dist.TransformedDistribution(dist.Normal(), NoInverse()))

    sentence = "guide site 'z' cannot be evaluated .*use gradient=\"pathwise\""
    assert_refuses(sentence, ThermodynamicELBO(), NONE, linear_gaussian, flow, 1.5)
    assert_refuses_nothing(pathwise, linear_gaussian, flow, 1.5)


def assert_refuses_nothing(loss, model, guide, *args):
    jax.eval_shape(lambda key: loss.loss(key, NONE, model, guide, *args), random.key(0))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"betas": [[0.0, 1.0]]}, "must increase from 0 to 1"),
        ({"betas": []}, "must increase from 0 to 1"),
        ({"beta_min": 0.0}, "beta_min is 0.0; it must be a positive"),
    ],
)
def test_bad_paths(arguments, match):
    with pytest.raises(ValueError, match=match):
        ThermodynamicELBO(**arguments)
