"""ChiUpperBound: closed forms, its relation to VRELBO, and where it is refused."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import VRELBO, ChiUpperBound
from tests.objectives.compare import assert_same
from tests.objectives.models import (
    NONE,
    linear_gaussian,
    normal_guide,
    value_and_grad,
)


@pytest.mark.parametrize("gradient", ["standard", "dreg"])
def test_is_plus_the_renyi_bound_of_order_one_minus_n(gradient, tol):
    losses = [ChiUpperBound(2.5, 4, gradient=gradient), VRELBO(-1.5, 4, gradient=gradient)]
    params = {"m": 0.3, "s": 0.9}
    chi, renyi = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    assert_same(chi, jax.tree.map(jnp.negative, renyi), tol(1e-5, 1e-12))


def test_closed_forms():
    """n - 1 for two Gaussians one apart in each of two dimensions, and a linear Gaussian model."""

    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))

    def guide():
        numpyro.sample("z", dist.Normal(jnp.ones(2), 1.0).to_event(1))

    K = 400_000

    @jax.jit
    def bounds(key):
        return [
            ChiUpperBound(1.0, K).loss(key, NONE, model, guide),
            ChiUpperBound(1.5, K).loss(key, NONE, model, guide),
            ChiUpperBound(2.0, K).loss(
                key, {"m": 0.0, "s": 1.0}, linear_gaussian, normal_guide, 1.5
            ),
        ]

    one, more, gaussian = bounds(random.key(0))
    # n lw has variance 2 n^2, so w^n a relative one of exp(2 n^2) - 1.
    for n, value in ((1.0, one), (1.5, more)):
        error = math.sqrt(math.expm1(2 * n**2) / K) / n
        assert abs(value - (n - 1)) < 4 * error < 0.1
    assert abs(gaussian + 1.5685916054) < 0.01


@pytest.mark.slow
def test_optimum_covers_a_correlated_gaussian():
    """The mean-field optimum has rho times the conditional precision, 0.4 for order 2 (VI: 1)."""
    rho = 0.4
    precision = jnp.array([[2.0, 1.2], [1.2, 1.5]])

    def model():
        numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=precision))

    def guide():
        rho = numpyro.param("rho", 1.0)
        sd = (rho * jnp.diag(precision)) ** -0.5
        numpyro.sample("z", dist.Normal(jnp.zeros(2), sd).to_event(1))

    @jax.jit
    def gradients(keys):
        loss = ChiUpperBound(2.0, 2000)

        def gradient(rho, key):
            return jax.grad(lambda r: loss.loss(key, {"rho": r}, model, guide))(rho)

        return jax.vmap(jax.vmap(gradient, (None, 0)), (0, None))(
            jnp.array([0.8 * rho, rho, 1.2 * rho]), keys
        )

    grads = np.array(gradients(random.split(random.key(1), 40)))
    mean, error = grads.mean(1), grads.std(1) / 40**0.5
    assert mean[0] < -4 * error[0]
    assert abs(mean[1]) < 4 * error[1]
    assert mean[2] > 4 * error[2]


@pytest.mark.x64
def test_exact_guide_gives_the_evidence_and_no_dreg_gradient(tol):
    losses = [ChiUpperBound(3.0, 5), ChiUpperBound(2.0, 5, gradient="dreg")]
    params = {"m": 0.75, "s": 0.5**0.5}
    (value, _), (dreg, grad) = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    log_p = -0.5 * (math.log(4 * math.pi) + 1.5**2 / 2)
    np.testing.assert_allclose([value, dreg], log_p, rtol=tol(1e-5, 1e-12))
    for g in grad.values():
        assert abs(g) < tol(1e-5, 1e-12)


def test_without_density_the_loss_is_infinite():
    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.factor("x", jnp.where(z > 1e6, 0.0, -jnp.inf))

    ((value, grad),) = value_and_grad(
        [ChiUpperBound(2.0, 3)], {"m": 0.1, "s": 1.0}, model, normal_guide
    )
    assert value == jnp.inf
    assert all(g == 0 for g in grad.values())


def test_bad_input():
    for kwargs, sentence in (
        ({"num_particles": 1}, "num_particles is 1; it must be at least 2, because with one"),
        ({"order": 0.5}, r"order is 0.5; it must be at least 1.*VRELBO\(1 - order\)"),
        ({"order": math.nan}, "order is nan; it must be at least 1"),
        ({"order": math.inf, "gradient": "dreg"}, "order is inf; it must be finite"),
        ({"gradient": "stl"}, "gradient is 'stl'; it must be one of 'standard', 'dreg'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            ChiUpperBound(**kwargs)
    for order in ("2", 2j, None):
        with pytest.raises(TypeError, match=r"order is .*; it must be a real number"):
            ChiUpperBound(order)
