"""The KDE score equals its reference values, the gradient of the log density, and its limit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import IMQ, RBF, Cauchy, Epanechnikov, KDEScore

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])


@pytest.mark.parametrize(
    "kernel",
    [
        RBF(0.6),
        IMQ(1.1, beta=-0.3),
        Cauchy(0.8),
        lambda x, y: jnp.exp(-abs(x[:, None] - y).sum(-1)),
    ],
    ids=["RBF", "IMQ", "Cauchy", "own"],
)
def test_is_the_gradient_of_the_log_density(kernel):
    x, y = jnp.array(X) + 3.0, jnp.array(Y) + 3.0
    log_density = lambda p: jnp.log(kernel(x, p[None]).sum())  # noqa: E731
    expected = jax.vmap(jax.grad(log_density))(y)
    np.testing.assert_allclose(KDEScore(kernel).fit(x)(y), expected, rtol=2e-5)


def test_a_point_far_from_all_samples_is_pulled_to_the_nearest():
    x, far = jnp.array(X), jnp.array([[300.0, 0.0]])
    np.testing.assert_allclose(KDEScore(RBF(0.5)).fit(x)(far), (x[1] - far) / 0.25, rtol=1e-5)


def test_bad_input_is_one_clear_sentence():
    with pytest.raises(ValueError, match="gives no density; use RBF, IMQ or Cauchy"):
        KDEScore(Epanechnikov())
