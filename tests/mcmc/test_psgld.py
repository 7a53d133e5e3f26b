"""PSGLD is SGLD with a step per coordinate once G is frozen, and the paper's rule before."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.mcmc import PSGLD, PSGLDState
from tests.mcmc.laws import average, mean_and_error, normal, second_moment, start
from tests.mcmc.models import NoisyGradient, from_potential


@pytest.mark.slow
def test_frozen_preconditioner_has_the_exact_law():
    """``Var z = (2T + e s2) / (h (2 - e h))`` with ``e = eps G_k``, for curvatures a factor 50
    apart.
    """
    h, T, s2 = np.repeat([0.1, 1.0, 5.0], 500), 0.5, 3.0
    kernel = PSGLD(normal(h, loc=-2.0), 0.3, temperature=T, gradient=NoisyGradient(s2))
    out, state = average(
        kernel, {"zz": second_moment(-2.0), "G": lambda s: s.preconditioner}, 3000, 1000
    )
    np.testing.assert_allclose(out["G"], state.preconditioner, rtol=1e-4)
    e = 0.3 * np.asarray(state.preconditioner, float)
    ratio = out["zz"] * h * (2 - e * h) / (2 * T + e * s2)
    for k in range(3):
        mean, error = mean_and_error(ratio[500 * k : 500 * (k + 1)])
        assert error < 0.02
        assert abs(mean - 1) < 4 * error, (k, mean, error)
    assert e[-500:].mean() < e[:500].mean()


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("gamma", ["none", "hutchinson"])
def test_first_steps_are_the_formula(gamma, tol):
    """Bias-corrected G, and Gam as JAX differentiates G; the Hessian is diagonal, so the probe is
    exact.
    """
    beta, damping, eps, T = 0.9, 0.3, 0.05, 1.0

    def u(z):
        return z**4 / 4 + jnp.array([1.0, 2.0, 0.5]) * z**2

    kernel = PSGLD(
        from_potential(lambda z: u(z).sum(), 3),
        eps,
        decay=beta,
        damping=damping,
        gamma=gamma,
        adapt="always",
    )
    state, step = start(kernel, z=[0.7, -1.2, 2.0])
    hotter = jax.jit(lambda s: _at_temperature(kernel, 4 * T).sample(s, (), {}))
    grad = jax.vmap(jax.grad(lambda z, k: u(z)[k], argnums=0), (None, 0), 0)

    def diagonal(z):
        return jnp.diagonal(grad(z, jnp.arange(3)))

    V = jnp.zeros(3)
    for t in (1, 2, 3):

        def preconditioner(z, V=V, t=t):
            return 1 / (
                damping + jnp.sqrt((beta * V + (1 - beta) * diagonal(z) ** 2) / (1 - beta**t))
            )

        z = state.z["z"]
        G, dG = preconditioner(z), jnp.diagonal(jax.jacfwd(preconditioner)(z))
        V = beta * V + (1 - beta) * diagonal(z) ** 2
        new = step(state)
        np.testing.assert_allclose(new.preconditioner, G, rtol=tol(2e-5, 1e-12))
        # With noise x T^(1/2) + drift: z(T=4) and z(T=1) give the drift without the noise.
        noise_free = 2 * new.z["z"] - hotter(state).z["z"]
        Gam = dG if gamma == "hutchinson" else 0.0
        drift = -eps * G * diagonal(z) + eps * (2 * T - 4 * T) * Gam
        np.testing.assert_allclose(noise_free - z, drift, rtol=0, atol=tol(3e-6, 1e-12))
        state = new
    assert state.i == 3


def _at_temperature(kernel, T):
    other = PSGLD.__new__(PSGLD)
    other.__dict__ = kernel.__dict__ | {"temperature": lambda i: T}
    return other


def test_preconditioner_is_frozen_after_warmup():
    kernel = PSGLD(normal([1.0, 4.0]), 0.1, steps_per_sample=3)
    state, step = start(kernel, num_warmup=5)
    seen = []
    for _ in range(8):
        state = step(state)
        seen.append(np.asarray(state.preconditioner))
    assert not np.array_equal(seen[3], seen[4])
    assert np.array_equal(seen[4], seen[7])
    assert isinstance(state, PSGLDState)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"decay": 1.0}, "decay is 1.0"),
        ({"damping": -1e-3}, "damping is -0.001"),
        ({"adapt": "always", "step_size": None}, "widens the posterior, by more for a smaller"),
    ],
)
def test_bad_input(arguments, match):
    with pytest.raises(ValueError, match=match):
        PSGLD(normal([1.0]), **({"step_size": 0.1} | arguments))


def test_no_warmup_to_adapt_in():
    with pytest.raises(ValueError, match="num_warmup is 0"):
        PSGLD(normal([1.0]), 0.1).init(random.key(0), 0, None, (), {})
