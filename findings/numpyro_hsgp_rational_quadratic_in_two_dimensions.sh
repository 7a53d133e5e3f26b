#!/usr/bin/env bash
# In two dimensions the variance of NumPyro's rational quadratic process is its amplitude over its length scale.
#
# Guess: `hsgp_rational_quadratic` with enough basis functions has the kernel's covariances: the amplitude `alpha` at
#   distance 0, in one dimension as in two, at every length scale, as `hsgp_squared_exponential` and `hsgp_matern`
#   have. A test against the kernel at one length scale settles the formula.
# Behaviour: the spectral density has the length scale to the power of 1 for the power of the dimension. In two
#   dimensions the variance is alpha / length, 4 for 1 at .25; in three it would be alpha / length^2. At a
#   length scale of 1, and in one dimension at any, all is right. Correlations are right, so that a
#   map looks well; the amplitude that is fitted is length times the right one, and a prior for both is a
#   prior for something else, where amplitude and length scale are the least identified. `alpha *
#   length ** (dim - 1)` in the place of `alpha` is the remedy.
# Versions: numpyro 0.22.0 (contrib/hsgp/spectral_densities.py: `log(a)` and `log_dim_factor` of 2
#   scale_mixture alone), jax and jaxlib 0.12.0.1, tfp-nightly 0.26.0.dev20261027, numpy 2.5.5.
# Seen (variance at the centre of the box, covariance one length scale away; amplitude 1, scale mixture 3, right 1
#   and .630): length .25: one dimension 1.000 .630, two 4.000 2.519; length .5: 1.000 .630, 2.000 1.259; length
#   1: right.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1 \
  tfp-nightly==0.26.0.dev20261027 numpy==2.5.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.contrib.hsgp.approximation import hsgp_rational_quadratic, hsgp_squared_exponential

BOX, M, MIXTURE = 4.0, 64, 3.0


def covariance(process, dim, *parameters):
    """The function is linear in its standard normal coefficients: J J' is its covariance."""
    length = parameters[1]
    x = np.zeros((2, dim))
    x[1, 0] = length

    def values(beta):
        with handlers.seed(rng_seed=0), handlers.substitute(data={"beta": beta}):
            return process(x if dim > 1 else x[:, 0], *parameters, BOX, M)

    J = jax.jacobian(values)(jnp.zeros(M**dim))
    return np.asarray(J @ J.T)[0]


right = np.array([1.0, (1 + 1 / (2 * MIXTURE)) ** -MIXTURE])
for length in (0.25, 0.5, 1.0):
    one, two = (covariance(hsgp_rational_quadratic, dim, 1.0, length, MIXTURE) for dim in (1, 2))
    smooth = covariance(hsgp_squared_exponential, 2, 1.0, length)
    mended = covariance(hsgp_rational_quadratic, 2, length, length, MIXTURE)
    print(f"length {length}: one dimension {one.round(3)}, two {two.round(3)}, right {right.round(3)}", end=", ")
    print(f"squared exponential in two {smooth.round(3)}, by alpha * length {mended.round(3)}")
    np.testing.assert_allclose(one, right, atol=0.01)
    np.testing.assert_allclose(smooth, [1.0, np.exp(-0.5)], atol=0.01)
    np.testing.assert_allclose(mended, right, atol=0.01)
    np.testing.assert_allclose(two, right / length, rtol=0.01)
PY
