"""The base of the kernels: what they take, what they refuse, and how they behave under ``MCMC``."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import init_to_value
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext.mcmc import (
    SGHMC,
    SGLD,
    MinibatchGradient,
    SGMCMCKernel,
    Transition,
    kernel_state,
)
from tests.mcmc.models import (
    gaussian_mean,
    gaussian_mean_data,
    linear_data,
    linear_full,
    run,
)


def start(model, *args, step_size=1e-3, **options):
    return SGLD(model, step_size, **options).init(random.key(0), 0, None, args, {})


def local(x):
    loc = numpyro.sample("loc", dist.Normal())
    with numpyro.plate("data", len(x), subsample_size=5) as idx:
        h = numpyro.sample("h", dist.Normal(loc, 1))
        numpyro.sample("x", dist.Normal(h, 1), obs=x[idx])


def discrete():
    numpyro.sample("k", dist.Poisson(0.3))


def nothing():
    numpyro.sample("x", dist.Normal(), obs=1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step_size": 0.0}, ValueError, r"step_size is 0.0; it must be a positive, finite number"),
        ({"step_size": float("nan")}, ValueError, r"step_size is nan"),
        ({"temperature": -1.0}, ValueError, r"temperature is -1.0; it must be a non-negative"),
        ({"steps_per_sample": 0}, ValueError, r"steps_per_sample is 0"),
        ({"minibatch": "shuffle"}, ValueError, r"it must be one of 'replace'"),
        (
            {"dense_mass": True},
            TypeError,
            r"SGLD.* got an unexpected keyword argument 'dense_mass'",
        ),
    ],
)
def test_wrong_arguments(options, error, message):
    with pytest.raises(error, match=message):
        SGLD(gaussian_mean, **({"step_size": 0.1} | options))


@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (local, (jnp.zeros(20),), r"'h' is local to the subsampled plate 'data', and a chain"),
        (discrete, (), r"latent site 'k' is discrete; sum it out of the model, or"),
        (nothing, (), r"no latent sample site"),
        (gaussian_mean, (jnp.zeros(7),), r"'data' has subsample_size 10 but only 7 rows"),
    ],
)
def test_models_that_are_refused(model, args, message):
    with pytest.raises(ValueError, match=message):
        start(model, *args)


def test_schedules_that_start_wrong():
    with pytest.raises(ValueError, match=r"step_size at i = 0 is .*0"):
        start(gaussian_mean, jnp.zeros(20), step_size=lambda i: 0.1 * i)
    with pytest.raises(ValueError, match=r"temperature at i = 0 is .*-1"):
        start(gaussian_mean, jnp.zeros(20), temperature=lambda i: i - 1.0)


def test_start_that_is_not_finite_names_the_site():
    x = gaussian_mean_data()

    def root():
        z = numpyro.sample("z", dist.Normal())
        w = numpyro.sample("w", dist.Normal())
        numpyro.factor("f", -jnp.sqrt(jnp.abs(z)) + w)

    kernel = SGLD(root, 0.1, init_strategy=init_to_value(values={"z": 0.0, "w": 1.0}))
    with pytest.raises(ValueError, match=r"not finite at the initial point: see site 'z'"):
        kernel.init(random.key(0), 0, None, (), {})
    params = {"loc": jnp.array([0.0, 1e30, 0.0])}
    with pytest.raises(ValueError, match=r"see site"):
        SGLD(gaussian_mean, 1e-3).init(random.split(random.key(0), 3), 0, params, (x,), {})


def test_other_data_than_at_the_start_are_refused():
    kernel, x = SGLD(gaussian_mean, 1e-3), gaussian_mean_data()
    state = kernel.init(random.key(0), 0, None, (x,), {})
    with pytest.raises(ValueError, match=r"plate 'data' has 50 rows, but 100 when"):
        kernel.sample(state, (x[:50],), {})
    with pytest.raises(ValueError, match=r"call init before sample"):
        SGLD(gaussian_mean, 1e-3).sample(state, (x,), {})


def while_loop_model():
    z = numpyro.sample("z", dist.Normal(3.0, 1.0))
    _, total = jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + z), (0, jnp.zeros_like(z))
    )
    numpyro.factor("f", -total)


def test_forward_mode_differentiates_loops():
    """U = (z - 3)^2 / 2 + 3 z has its gradient 0 at 0."""
    kernel = SGLD(while_loop_model, 0.1, forward_mode_differentiation=True, temperature=0.0)
    state = kernel.init(random.key(0), 0, {"z": jnp.array(2.0)}, (), {})
    assert kernel.sample(state, (), {}).z["z"] == pytest.approx(1.8)
    kernel = SGLD(while_loop_model, 0.1, temperature=0.0)  # which finds that out by itself
    state = kernel.init(random.key(0), 0, {"z": jnp.array(2.0)}, (), {})
    assert kernel.sample(state, (), {}).z["z"] == pytest.approx(1.8)


def test_potential_energy_is_that_of_the_draw():
    """In a model without a minibatch."""
    data = linear_data()
    kernel = SGHMC(linear_full, 1e-3, steps_per_sample=2)
    state = kernel.init(random.key(0), 0, None, data, {})

    @jax.jit
    def draw(state):
        new = kernel.sample(state, data, {})
        return new, potential_energy(linear_full, data, {}, new.z)

    for _ in range(2):
        state, exact = draw(state)
        assert state.potential_energy == pytest.approx(float(exact), rel=1e-5)


class TwoSteps(SGMCMCKernel):
    state_class = kernel_state("TwoSteps", __name__)

    def step(self, rng_key, state, z, grad_fn, eps, T):
        z = jax.lax.fori_loop(0, 2, lambda _, z: z - eps * grad_fn(z).grad, z)
        return Transition(z, grad_fn(z), {})


def test_a_kernel_of_ones_own_takes_gradients_in_a_loop():
    x = gaussian_mean_data()
    kernel = TwoSteps(lambda x: gaussian_mean(x, None), 1e-3)
    state = kernel.init(random.key(0), 0, {"loc": jnp.array(0.2)}, (x,), {})
    mode = float(jnp.sum(x)) / 100.1
    expected = mode + (0.2 - mode) * (1 - 1e-3 * 100.1) ** 2
    assert kernel.sample(state, (x,), {}).z["loc"] == pytest.approx(expected, rel=1e-5)


def test_model_without_minibatch_takes_the_full_gradient():
    kernel, x = SGLD(gaussian_mean, 1e-3), gaussian_mean_data()
    grads = [
        kernel.estimate_gradient(
            random.key(k), {"loc": jnp.array(0.2)}, (x,), {"subsample_size": b}
        )
        for k, b in [(0, None), (1, None), (2, 10)]
    ]
    exact = 100.1 * 0.2 - float(jnp.sum(x))
    assert np.allclose([g["loc"] for _, g in grads[:2]], exact, rtol=1e-5)
    assert abs(float(grads[2][1]["loc"]) - exact) > 0.1


@pytest.mark.slow
def test_steps_per_sample_is_that_many_transitions():
    x = gaussian_mean_data()
    every = run(SGHMC(gaussian_mean, 0.02), x, warmup=3, draws=12)
    third = run(SGHMC(gaussian_mean, 0.02, steps_per_sample=3), x, warmup=1, draws=4)
    for field in ("potential_energy", "grad_norm", "kinetic_temperature"):
        a, b = (mcmc.get_extra_fields()[field] for mcmc in (every, third))
        assert jnp.allclose(a[2::3], b, rtol=1e-4)
    assert jnp.allclose(every.get_samples()["loc"][2::3], third.get_samples()["loc"], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
def test_too_large_a_step_is_reported():
    """SGLD diverges for eps h > 2: the draws stay finite and say so."""
    mcmc = run(SGLD(gaussian_mean, 1.0), gaussian_mean_data(), warmup=0, draws=60)
    diverging = mcmc.get_extra_fields()["diverging"]
    assert not diverging[0] and diverging[-1]
    assert jnp.all(jnp.isfinite(mcmc.get_samples()["loc"]))


def test_momentum_is_drawn_anew_after_a_divergence():
    """All inner steps count: one bad transition of four marks the draw, and the position stays."""

    class Bad(MinibatchGradient):
        def estimate(self, rng_key, i, z, idx, potential, state):
            value, grad = potential.value_and_grad(z, idx)
            return value, {"loc": jnp.where(i == 2, jnp.nan, grad["loc"])}, state

    x = gaussian_mean_data()
    for steps in (1, 4):
        kernel = SGHMC(gaussian_mean, 0.02, gradient=Bad(), steps_per_sample=steps)
        state = kernel.init(random.key(0), 0, None, (x,), {})
        step = jax.jit(lambda state, kernel=kernel: kernel.sample(state, (x,), {}))
        if steps == 4:
            new = step(state)
            assert bool(new.diverging) and not bool(step(new).diverging)
            continue
        before = step(step(state))
        after = step(before)
        assert bool(after.diverging) and int(after.i) == 3
        assert float(after.z["loc"]) == float(before.z["loc"])
        assert float(after.potential_energy) == float(before.potential_energy)
        assert float(after.r[0]) != float(before.r[0]) and bool(jnp.isfinite(after.r[0]))
        assert not bool(step(after).diverging)
