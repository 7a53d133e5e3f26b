"""FDivergence: population values of Gaussians, its laws with VRELBO, and rank weights."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDelta
import pytest

from numpyro_ext.objectives import VRELBO, FDivergence, TailAdaptive
from tests.objectives.compare import NoInverse, assert_refuses
from tests.objectives.models import (
    LOCAL_PARAMS,
    NONE,
    linear_gaussian,
    local_guide,
    local_model,
    normal_guide,
    value_and_grad,
)

FORMULAS = {
    "kl_qp": lambda t: -jnp.log(t),
    "kl_pq": lambda t: t * jnp.log(t),
    "chi2": lambda t: (t - 1) ** 2,
    "hellinger": lambda t: (jnp.sqrt(t) - 1) ** 2,
}


@pytest.mark.x64
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_weights_are_those_of_the_formula(name, tol):
    """f(t) - f(1) and t^2 f''(t), by autodiff, of the self-normalised ratios of each unit."""
    f, lw = FORMULAS[name], jnp.array([[0.3, -2.0], [-1.0, 0.5], [1.2, 0.1], [-0.4, -0.6]])
    value, weights = FDivergence(name, 4)._value_and_weights(lw)
    t = jnp.exp(lw) / jnp.mean(jnp.exp(lw), 0)
    second = jax.vmap(jax.vmap(jax.grad(jax.grad(f))))(t)
    np.testing.assert_allclose(value, jnp.mean(f(t), 0) - f(1.0), rtol=tol(1e-4, 1e-10))
    np.testing.assert_allclose(weights, t**2 * second / 4, rtol=tol(1e-4, 1e-10))


@pytest.mark.parametrize("name", FORMULAS)
def test_a_callable_is_the_named_one_far_in_the_tail_too(name):
    """Log ratios down to -70, where f'' = t^-2 is no float32."""
    lw = jnp.array([0.3, -1.0, -44.0, -60.0, -70.0])
    named, own = (jax.jit(FDivergence(f, 5)._value_and_weights)(lw) for f in (name, FORMULAS[name]))
    np.testing.assert_allclose(own[0], named[0], rtol=1e-5)
    np.testing.assert_allclose(own[1], named[1], rtol=1e-4, atol=1e-9)


def test_weights_of_minus_infinity_are_finite():
    lw = jnp.array([0.3, -70.0, -jnp.inf])
    for name in FORMULAS:
        value, weights = FDivergence(name, 3)._value_and_weights(lw)
        assert jnp.isfinite(weights).all() and jnp.isfinite(value) == (name != "kl_qp")


@pytest.mark.slow
def test_laws_with_the_renyi_bound():
    losses = [
        VRELBO(1.0, 4, gradient="stl"),
        VRELBO(0.0, 4),
        FDivergence("kl_qp", 4),
        FDivergence(TailAdaptive(0.0), 4),
        FDivergence(TailAdaptive(), 4),
        FDivergence("chi2", 4),
    ]
    (elbo, stl), (_, evidence), *results = value_and_grad(
        losses, LOCAL_PARAMS, local_model, local_guide
    )
    rtol = 2e-5
    for _, grad in results[:2]:
        for name in ("c", "s"):
            np.testing.assert_allclose(grad[name], stl[name], rtol=rtol)
    for value, _ in results[1:3]:  # the rank weights report the ELBO
        np.testing.assert_allclose(value, elbo, rtol=rtol)
    for _, grad in results:  # the model's parameter always follows the evidence
        np.testing.assert_allclose(grad["b"], evidence["b"], rtol=rtol)
    assert abs(results[2][1]["c"] - stl["c"]) > 1e-2


@pytest.mark.slow
def test_population_values_and_gradients():
    """p = N(0, I), q = N(m, I): every divergence depends on h = |m|^2."""
    m = np.array([0.3, 0.4])
    h = m @ m
    expected = {
        "kl_qp": (h / 2, m),
        "kl_pq": (h / 2, m),
        "chi2": (math.expm1(h), 2 * m * math.exp(h)),
        "hellinger": (-2 * math.expm1(-h / 8), m / 2 * math.exp(-h / 8)),
    }

    def model():
        numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.factor("constant", 3.0)  # the evidence cancels

    def guide():
        numpyro.sample("z", dist.Normal(numpyro.param("m", jnp.zeros(2)), 1.0).to_event(1))

    def both(key):
        def fn(p, f):
            return FDivergence(f, 20_000).loss(key, p, model, guide)

        return {f: jax.value_and_grad(fn)({"m": jnp.asarray(m, float)}, f) for f in expected}

    results = jax.jit(lambda keys: jax.lax.map(both, keys))(random.split(random.key(0), 20))
    for f, (value, grad) in expected.items():
        for got, exact in ((results[f][0], value), (results[f][1]["m"], grad)):
            error = np.std(got, 0, ddof=1) / 20**0.5
            # Self-normalisation biases by O(1/K).
            assert np.all(abs(np.mean(got, 0) - exact) < 4 * error + 1e-3), f
            assert np.all(error < 0.02)


def test_rank_weights():
    lw = jnp.array([0.0, 9.0, -5.0, 0.0])
    # Fbar is 3/4, 1/4, 1, 3/4: those that tie share the larger count.
    np.testing.assert_allclose(
        TailAdaptive().weights(lw), np.array([4 / 3, 4, 1, 4 / 3]) / (8 / 3 + 5), rtol=1e-6
    )
    np.testing.assert_allclose(TailAdaptive(0.0).weights(lw), 0.25)
    heavy = jnp.exp(jnp.linspace(0, 80, 30))[:, None] * jnp.array([1.0, -1.0])
    weights = TailAdaptive().weights(heavy)
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-6)
    np.testing.assert_allclose(weights.max(0) / weights.min(0), 30, rtol=1e-5)
    np.testing.assert_allclose(weights[:, 0], weights[::-1, 1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.x64
def test_exact_guide_has_no_divergence_and_no_gradient(tol):
    losses = [FDivergence(f, 5) for f in (*FORMULAS, TailAdaptive())]
    params = {"m": 0.75, "s": 0.5**0.5}
    *results, tail = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    for value, _ in results:
        assert abs(value) < tol(1e-5, 1e-12)
    for _, grad in [*results, tail]:
        assert all(abs(g) < tol(1e-5, 1e-12) for g in grad.values())
    log_p = -0.5 * (math.log(4 * math.pi) + 1.5**2 / 2)
    np.testing.assert_allclose(tail[0], -log_p, rtol=tol(1e-5, 1e-12))


def test_refuses_what_has_no_path_gradient():
    loss = FDivergence()

    def flow(x):
        shift = dist.transforms.AffineTransform(numpyro.param("shift", 0.0), 1.0)
        numpyro.sample("z", dist.TransformedDistribution(dist.Normal(), [shift, NoInverse()]))

    sentence = "guide site 'z' cannot be evaluated .*VRELBO, or ThermodynamicELBO"
    assert_refuses(sentence, loss, NONE, linear_gaussian, flow, 1.5)
    point = AutoDelta(linear_gaussian)
    params = {"z_auto_loc": 0.2}
    sentence = "site 'z' of the guide is a Delta .*; use VRELBO"
    assert_refuses(sentence, loss, params, linear_gaussian, point, 1.5)
