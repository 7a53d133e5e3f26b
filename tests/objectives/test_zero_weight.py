"""A particle of weight zero has no gradient, also where its density has an infinite one."""

from functools import partial

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
    base,
)
from tests.objectives.models import linear_gaussian, normal_guide

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


OF_ONE_UNIT = [
    VRELBO(0.5, 8),
    IWELBO(8, vectorize_particles=False),
    VRELBO(-np.inf, 8),
    VRELBO(0.5, 8, gradient="stl"),
    VRELBO(0.5, 8, gradient="dreg"),
    VRELBO(0.5, 8, gradient="single"),
    ChiUpperBound(2.0, 8),
    FDivergence("chi2", 8),
    FDivergence(TailAdaptive(), 8),
    ThermodynamicELBO(2, 8, betas=(0.0, 0.3, 1.0), bound="upper", gradient="pathwise"),
    VIMCO(num_particles=8),
]
OF_UNITS = [NestedVRELBO(0.0, 2, num_inner=8), BBAlphaELBO(0.5, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("losses", "programs"),
    [(OF_ONE_UNIT, (single_unit, single_unit_guide)), (OF_UNITS, (units, units_guide))],
    ids=["one unit", "units"],
)
def test_gradient_is_that_of_the_others(losses, programs):
    """Of the bound with the same K where the particle's density has no derivative at all; each
    datum has weights of its own."""
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
            assert losses is OF_UNITS or abs(safe_grad[name]) > 1e-2


def test_without_any_weight_the_loss_is_infinite():
    params = {"m": 2.0, "log_s": -3.0}
    loss = IWELBO(4).loss(random.key(0), params, single_unit, single_unit_guide, False)
    assert loss == jnp.inf


def test_a_weight_that_is_small_does_not_hide_an_infinite_gradient():
    """Only a weight of exactly zero does; the step is then none, and says so."""

    def model():
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.factor("x", -jnp.sqrt(jnp.abs(z - jax.lax.stop_gradient(z))))

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("m", 0.3), 1.0))

    grad = jax.grad(lambda m: IWELBO(3).loss(random.key(0), {"m": m}, model, guide))
    with pytest.warns(InferenceWarning, match="gradient not finite in a step"):
        assert jax.jit(grad)(0.3) == 0


@pytest.mark.slow
def test_finite_gradients_are_untouched(monkeypatch):
    def grad():
        params = {"m": 0.3, "s": 0.7}
        loss = partial(VRELBO(0.5, 3).loss, random.key(0))
        gradient = jax.grad(lambda p: loss(p, linear_gaussian, normal_guide, 1.5))
        return jax.jit(gradient)(params)

    dropped = grad()
    monkeypatch.setattr(
        base, "weightless_dropped", lambda trace, _: (trace, jnp.zeros(()), jnp.zeros(()))
    )
    # The cotangents of z are summed in another order, which is a rounding of float32.
    for name, kept in grad().items():
        np.testing.assert_allclose(dropped[name], kept, rtol=1e-6)
