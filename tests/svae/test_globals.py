"""Global sites given local ones, and what they say about the width of a guide."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.diagnostics.limits import NARROW
from numpyro_ext.expfam import MNIW, NIW
from numpyro_ext.svae import GMMEP, LDS, SVAEGuide, recognition_network
from numpyro_ext.svae.judgement import narrowest, states_in_use
from tests.svae.models import CONCENTRATION, PARTS, K, N, Y, guide_of

DRAWS = 4000


def close(draws, mean):
    """Within five standard errors of this many draws."""
    error = 5 * np.std(draws, 0) / DRAWS**0.5
    assert np.all(np.abs(np.mean(draws, 0) - mean) < error)


@pytest.mark.slow
def test_globals_given_a_mixture_have_the_conjugate_posterior():
    z = jnp.arange(N) % K
    keys = random.split(random.key(0), DRAWS)
    sites = {"x": Y, "z": z}
    draws = jax.jit(jax.vmap(guide_of(GMMEP()).sample_globals, (0, None)))(keys, sites)
    counts = np.bincount(z, minlength=K)
    close(draws["pi"], (CONCENTRATION + counts) / (CONCENTRATION + counts).sum())
    for k in range(K):
        x, m, kappa = Y[z == k], PARTS["loc"][k], PARTS["kappa"]
        n, mean = len(x), jnp.mean(Y[z == k], 0)
        close(draws["mu"][:, k], (kappa * m + n * mean) / (kappa + n))
        S = PARTS["scale_matrix"] + (x - mean).T @ (x - mean)
        S += kappa * n / (kappa + n) * jnp.outer(mean - m, mean - m)
        close(draws["Sigma"][:, k], S / (PARTS["df"] + n - 3))


@pytest.mark.slow
def test_globals_given_a_chain_have_the_conjugate_posterior():
    M, precision, df, S = jnp.array([[0.7]]), jnp.array([[3.0]]), 20.0, jnp.array([[9.0]])
    initial = {"loc": jnp.ones(1), "kappa": 2.0, "df": 9.0, "scale_matrix": jnp.eye(1)}
    prior = {
        "initial": NIW.from_standard(**initial),
        "dynamics": MNIW.from_standard(weight=M, precision=precision, df=df, scale_matrix=S),
    }
    guide = SVAEGuide(prior, recognition_network(1), LDS())
    x = jnp.array([[1.0, 2.0, 1.5, 0.3, -0.4], [0.2, 0.1, 0.9, 1.1, 1.0]])
    keys = random.split(random.key(1), DRAWS)
    draws = jax.jit(jax.vmap(guide.sample_globals, (0, None)))(keys, {"x": x[..., None]})
    before, to = x[:, :-1].ravel(), x[:, 1:].ravel()
    K_n, B = 3 + before @ before, 3 * 0.7 + to @ before
    close(draws["A"][:, 0, 0], B / K_n)
    close(draws["Q"][:, 0, 0], (9 + 3 * 0.49 + to @ to - B**2 / K_n) / (df + len(to) - 2))
    close(draws["mu_1"][:, 0], (2 * 1 + x[:, 0].sum()) / 4)


class Hierarchy:
    """theta ~ N(0, 1), x_n ~ N(theta, 1), and ten y_n ~ N(x_n, s^2)."""

    size = 10

    def sample_globals(self, rng_key, sites):
        precision = 1 + self.size
        noise = random.normal(rng_key) / precision**0.5
        return {"theta": jnp.sum(sites["x"], -1) / precision + noise}


def test_narrow_globals_of_a_normal_hierarchy_are_found():
    """The best product of normals has precision 1 + n; a Gibbs step adds the variance of x to it.

    Quartiles of 20,000 draws are right to 1 %.
    """
    n, key_theta, key_x = Hierarchy.size, *random.split(random.key(2))
    for s, ok in ((0.3, True), (2.0, False)):
        variance = s**2 / (1 + s**2)
        theta = random.normal(key_theta, (1, 20_000)) / (1 + n) ** 0.5
        x = random.normal(key_x, (1, 20_000, n)) * variance**0.5
        draws = {"theta": np.asarray(theta), "x": np.asarray(x)}
        value, name = narrowest(Hierarchy(), random.key(3), draws)
        ratio = (1 + n * variance / (1 + n)) ** -0.5
        np.testing.assert_allclose(value, ratio, atol=0.03)
        assert (value >= NARROW) is ok and name == "theta"


def test_states_that_the_prior_uses_and_the_guide_does_not_are_found():
    """Of thirty data in three states; a prior with few in use asks for few."""
    rng = np.random.default_rng(0)
    flat, sparse = rng.integers(0, 3, (200, 30)), rng.integers(0, 1, (200, 30))
    merged = np.where(rng.integers(0, 3, (2, 50, 30)) > 0, 2, 0)
    row = states_in_use("z", merged, flat, vector=False)
    assert (row.ok, row.limit) == (False, "3")
    assert 1.9 < row.value <= 2
    assert states_in_use("z", flat[None], flat, vector=False).ok
    assert states_in_use("z", merged, sparse, vector=False).ok
