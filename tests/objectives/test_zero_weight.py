"""A draw of weight zero has no gradient, also where the model's density has an infinite one."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    BBAlphaELBO,
    ChiUpperBound,
    FDivergence,
    NestedVRELBO,
    TailAdaptive,
    ThermodynamicELBO,
)

# A rate of e^(400 z) overflows above z = 0.22: a log density of -inf, whose derivative is infinite.
# Half of the draws of N(0.1, 0.3) below 0.22 are ordinary ones.
PARAMS = {"m": 0.1, "log_s": np.log(0.3)}


def log_lik(z, written_safely):
    """``-e^(400 z)``, whose derivative where it overflows is infinite, or zero."""
    if not written_safely:
        return -jnp.exp(400.0 * z) / 1e30
    overflows = jnp.isinf(jnp.exp(400.0 * z))
    return jnp.where(overflows, -jnp.inf, -jnp.exp(jnp.where(overflows, 0.0, 400.0 * z)) / 1e30)


def single_unit(written_safely):
    z = numpyro.sample("z", dist.Normal(0.0, 0.5).expand([2]).to_event(1))
    numpyro.factor("x", jnp.sum(log_lik(z, written_safely)))


def single_unit_guide(written_safely):
    loc, log_s = numpyro.param("m", 0.0), numpyro.param("log_s", 0.0)
    numpyro.sample("z", dist.Normal(loc, jnp.exp(log_s)).expand([2]).to_event(1))


def units(written_safely):
    w = numpyro.sample("w", dist.Normal(0.2, 0.1))
    with numpyro.plate("data", 3):
        z = numpyro.sample("z", dist.Normal(0.0, 0.5))
        numpyro.factor("x", log_lik(z, written_safely) - 0.5 * (w - jnp.arange(3.0)) ** 2)


def units_guide(written_safely):
    loc, log_s = numpyro.param("m", 0.0), numpyro.param("log_s", 0.0)
    numpyro.sample("w", dist.Normal(loc, 0.1))
    with numpyro.plate("data", 3):
        numpyro.sample("z", dist.Normal(loc, jnp.exp(log_s)))


ONE = single_unit, single_unit_guide
EACH = units, units_guide
LOSSES = [
    (ONE, [IWELBO(8, vectorize_particles=False)]),
    (EACH, [NestedVRELBO(0.0, 2, num_inner=8)]),
    pytest.param(
        ONE,
        [
            VRELBO(0.5, 8),
            VRELBO(-np.inf, 8),
            VRELBO(0.5, 8, gradient="stl"),
            VRELBO(0.5, 8, gradient="dreg"),
            VRELBO(0.5, 8, gradient="single"),
            ChiUpperBound(2.0, 8),
            FDivergence("chi2", 8),
            FDivergence(TailAdaptive(), 8),
            ThermodynamicELBO(2, 8, betas=(0.0, 0.3, 1.0), bound="upper", gradient="pathwise"),
            VIMCO(num_particles=8),
        ],
        marks=pytest.mark.slow,
    ),
    pytest.param(EACH, [BBAlphaELBO(0.5, 8)], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("programs", "losses"), LOSSES)
def test_gradient_is_right_without_the_derivative_of_a_weightless_draw(programs, losses):
    """It is the gradient of a model whose density has a derivative of zero there; each datum has
    weights of its own."""
    params = {name: jnp.asarray(x) for name, x in PARAMS.items()}

    def value_and_grad(objective, written_safely):
        args = *programs, written_safely
        return jax.value_and_grad(lambda p: objective.loss(random.key(3), p, *args))(params)

    run = jax.jit(
        lambda: [[value_and_grad(loss, safe) for loss in losses] for safe in (False, True)]
    )
    for loss, (value, grad), (safe_value, safe_grad) in zip(losses, *run(), strict=True):
        np.testing.assert_allclose(value, safe_value, rtol=1e-6, err_msg=repr(loss))
        for name in PARAMS:
            np.testing.assert_allclose(grad[name], safe_grad[name], rtol=1e-5, err_msg=repr(loss))
            assert programs is EACH or abs(safe_grad[name]) > 1e-2


def test_a_small_weight_does_not_hide_an_infinite_gradient():
    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.factor("x", -jnp.sqrt(jnp.abs(z - jax.lax.stop_gradient(z))))

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("m", 0.3), 1.0))

    grad = jax.grad(lambda m: IWELBO(3).loss(random.key(0), {"m": m}, model, guide))
    with pytest.warns(InferenceWarning, match="gradient not finite in a step"):
        assert jax.jit(grad)(0.3) == 0
