#!/usr/bin/env bash
# JAX's odeint returns a number when it runs out of steps.
#
# Guess: a solver that reaches `mxstep` before the next time says so: SciPy's odeint warns and
#   solve_ivp returns success=False; diffrax raises; in JAX, where a raise is not possible, NaN.
# Behaviour: `jax.experimental.ode.odeint(..., mxstep=n)` leaves its loop and evaluates the polynomial of
#   the last accepted step at the time that was asked for, which lies outside of it. The result is
#   finite, of any size, and has a gradient. A posterior over the rate of a stiff equation then has a
#   likelihood there that belongs to no solution.
# Versions: jax and jaxlib 0.12.0.1, scipy 1.18.1.
# Seen (y' = -1000 (y - cos t), y(0) = 1, t = 0, 2.5, ..., 10): with mxstep=1000 the values are up to
#   1.7e8, with a gradient of -1.9e18 in the rate; with 100,000 they are within 2e-6 of the solution.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 scipy==1.18.1
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
from jax.experimental.ode import odeint
import jax.numpy as jnp
import numpy as np
from scipy.integrate import solve_ivp

times = jnp.linspace(0.0, 10.0, 5)
rate = jnp.array(1000.0)


def velocity(y, t, rate):
    return -rate * (y - jnp.cos(t))


exact = solve_ivp(
    lambda t, y: -1000 * (y - np.cos(t)), (0, 10), [1.0], "LSODA", np.asarray(times), rtol=1e-8, atol=1e-8
).y[0]
for steps in (1000, 100_000):
    y = odeint(velocity, jnp.array(1.0), times, rate, mxstep=steps)
    slope = jax.grad(lambda r: odeint(velocity, jnp.array(1.0), times, r, mxstep=steps)[-1])(rate)
    error = np.abs(np.asarray(y) - exact).max()
    print(f"mxstep {steps}: {np.asarray(y)} error {error:.3g} finite {bool(jnp.isfinite(y).all())}")
    assert bool(jnp.isfinite(y).all())
    assert error > 1 if steps == 1000 else error < 0.01
    print("  gradient of the last in the rate", slope)
PY
