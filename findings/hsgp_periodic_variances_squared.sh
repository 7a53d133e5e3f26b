#!/usr/bin/env bash
# The periodic Gaussian processes of NumPyro and PyMC by basis functions have another variance than their kernel.
#
# Guess: `hsgp_periodic_non_centered` and `HSGPPeriodic` are series of the periodic kernel. With sixty terms they
#   have its covariances to all digits: the amplitude squared at distance 0, whatever the length scale. Squared
#   exponential and Matern, as series in the same modules, do.
# Behaviour: the coefficient of each wave should have the variance q_j of the series, and has q_j^2: the q_j, which
#   add up to the amplitude squared, multiply standard normals without a root. The prior variance is .40 for 1 at
#   length scale 1 and .13 at .25, and grows with the fourth power of NumPyro's amplitude. Small q_j lose
#   most, so that the correlations are of a smoother function too: .52 for .37 a quarter of a period away. In
#   PyMC the q_j are moreover of half the length scale that its own kernel has. What a fit says of amplitude and
#   length scale is not what a prior or another program says. The root of `diag_spectral_density_periodic`
#   is right.
# Versions: numpyro 0.22.0 (contrib/hsgp/approximation.py: `cosines @ (q2 * beta_cos)`), pymc 6.3.2
#   (gp/hsgp_approx.py: `psd * self._beta`), jax and jaxlib 0.12.0.1, tfp-nightly 0.26.0.dev20261027, numpy 2.5.5.
# Seen (covariance at distance 0 and at a quarter of a period; got, right): NumPyro, amplitude 1, length 1: .400
#   1, .207 .368; amplitude 2: 6.40 4, 3.31 1.47; length .25: .132 1, -.010 0. PyMC, scale 1, length 1: .398
#   1, .208 .779; length .5: .242 1, -.010 .368 (Monte Carlo errors .003).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1 \
  tfp-nightly==0.26.0.dev20261027 pymc==6.3.2 numpy==2.5.5
JAX_PLATFORMS=cpu PYTENSOR_FLAGS="base_compiledir=$folder/compiled" "$folder/venv/bin/python" -W ignore - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import pymc as pm
from numpyro import handlers
from numpyro.contrib.hsgp.approximation import hsgp_periodic_non_centered
from numpyro.contrib.hsgp.laplacian import eigenfunctions_periodic
from numpyro.contrib.hsgp.spectral_densities import diag_spectral_density_periodic

M = 60
X = np.array([0.0, 0.25])  # of a period of 1


def of_numpyro(alpha, length):
    """The function is linear in its standard normal coefficients: J J' is its covariance."""

    def values(cos, sin):
        with handlers.seed(rng_seed=0), handlers.substitute(data={"beta_cos": cos, "beta_sin": sin}):
            return hsgp_periodic_non_centered(X, alpha, length, 2 * jnp.pi, M)

    J = jnp.concatenate(jax.jacobian(values, (0, 1))(jnp.zeros(M), jnp.zeros(M - 1)), -1)
    return np.asarray(J @ J.T)[0]


def by_roots(alpha, length):
    q = diag_spectral_density_periodic(alpha, length, M)
    waves = jnp.concatenate(eigenfunctions_periodic(X, 2 * jnp.pi, M), -1)
    return np.asarray((waves * jnp.tile(q, 2)) @ waves.T)[0]


for alpha, length in ((1.0, 1.0), (2.0, 1.0), (1.0, 0.25)):
    right = alpha**2 * np.exp(-2 * np.sin(np.pi * X) ** 2 / length**2)
    got = of_numpyro(alpha, length)
    print(f"NumPyro, amplitude {alpha}, length {length}: {got.round(4)}, right {right.round(4)}")
    np.testing.assert_allclose(by_roots(alpha, length), right, atol=1e-4)
    q = np.asarray(diag_spectral_density_periodic(alpha, length, M))
    np.testing.assert_allclose(got[0], (q**2).sum(), rtol=1e-4)
    assert abs(got[0] / right[0] - 1) > 0.4

for length in (1.0, 0.5):
    with pm.Model():
        kernel = pm.gp.cov.Periodic(1, period=1.0, ls=length)
        f = pm.gp.HSGPPeriodic(m=M, scale=1.0, cov_func=kernel).prior("f", X=X[:, None])
        right = kernel(X[:, None]).eval()[0]
        got = np.cov(pm.draw(f, 40_000, random_seed=0).T)[0]
    print(f"PyMC, scale 1, length {length}: {got.round(3)}, its kernel {right.round(4)}")
    assert abs(got[0] - right[0]) > 0.5 and abs(got[1] - right[1]) > 0.3
    assert abs(got[0] - of_numpyro(1.0, length)[0]) < 0.02  # the same waves, of NumPyro's length scale
PY
