"""A particle of weight zero has no gradient, also where its density has an infinite one."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.guides import AutoRealNVPNormal
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

pytestmark = pytest.mark.slow

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


def value_and_grad(objective, model, guide, seed=3):
    """Of the loss as it is and with the density written safely, in one program."""

    def loss(params, written_safely):
        return objective.loss(random.key(seed), params, model, guide, written_safely)

    params = {name: jnp.asarray(x) for name, x in PARAMS.items()}
    both = jax.jit(lambda p: [jax.value_and_grad(loss)(p, safe) for safe in (False, True)])
    return both(params)


@pytest.mark.parametrize(
    "objective",
    [
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
    ],
    ids=repr,
)
def test_gradient_is_that_of_the_others(objective):
    """Of the bound with the same K where the particle's density has no derivative at all."""
    (value, grad), (safe_value, safe_grad) = value_and_grad(
        objective, single_unit, single_unit_guide
    )
    np.testing.assert_allclose(value, safe_value, rtol=1e-6)
    assert all(abs(g) > 1e-2 for g in safe_grad.values())
    for name in PARAMS:
        np.testing.assert_allclose(grad[name], safe_grad[name], rtol=1e-5)


@pytest.mark.parametrize(
    "objective", [NestedVRELBO(0.0, 2, num_inner=8), BBAlphaELBO(0.5, 8)], ids=repr
)
def test_gradient_of_local_latents_is_that_of_the_others(objective):
    """Each datum has weights of its own."""
    (value, grad), (safe_value, safe_grad) = value_and_grad(objective, units, units_guide)
    np.testing.assert_allclose(value, safe_value, rtol=1e-6)
    for name in PARAMS:
        np.testing.assert_allclose(grad[name], safe_grad[name], rtol=1e-5)


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


def test_forward_mode_agrees_with_reverse_mode():
    def loss(m):
        params = {"m": m, "s": 0.7}
        return VRELBO(0.5, 3).loss(random.key(0), params, linear_gaussian, normal_guide, 1.5)

    np.testing.assert_allclose(jax.jacfwd(loss)(0.3), jax.grad(loss)(0.3), rtol=1e-6)


def test_flow_from_scratch_fits_a_zero_inflated_regression():
    """44 coefficients; in the first steps the probability of a zero rounds to 1 for some draws,
    where NumPyro's log density has no finite derivative."""
    rng = np.random.default_rng(0)
    x = 0.3 * np.c_[np.ones(300), rng.normal(size=(300, 21))]
    zero = rng.uniform(size=300) < 1 / (1 + np.exp(-x @ rng.normal(size=22)))
    y = jnp.asarray(np.where(zero, 0, rng.poisson(np.exp(x @ rng.normal(size=22)))))
    x = jnp.asarray(x)

    def model():
        gate = numpyro.sample("gate", dist.Normal(0.0, 1.0).expand([22]).to_event(1))
        rate = numpyro.sample("rate", dist.Normal(0.0, 1.0).expand([22]).to_event(1))
        with numpyro.plate("rows", 300):
            y_dist = dist.ZeroInflatedPoisson(gate=jax.nn.sigmoid(x @ gate), rate=jnp.exp(x @ rate))
            numpyro.sample("y", y_dist, obs=y)

    svi = SVI(model, AutoRealNVPNormal(model, init_from=None), optax.adam(1e-2), IWELBO(10))
    losses = svi.run(random.key(0), 100, progress_bar=False).losses
    assert np.all(np.isfinite(losses))
    # A median, because a draw of one step in a hundred is far out.
    assert np.median(losses[-20:]) < 0.7 * np.median(losses[:5])
