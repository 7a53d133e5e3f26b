"""The search for a mode on ever more rows."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.optim import find_modes

N = 1_000_000


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=100) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


@pytest.mark.slow
def test_a_search_takes_few_passes_of_all_rows():
    """Four searches: 2,000 minibatches each, then 10,000 and 100,000 rows, then all."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 3)) * [1.0, 10.0, 0.1]
    y = rng.random(N) < 1 / (1 + np.exp(-x @ [0.5, 0.1, 3.0]))
    modes = find_modes(model, jnp.asarray(x, jnp.float32), jnp.asarray(y, int))
    some_rows = 4 * (2000 * 100 + 10 * (10_000 + 100_000))
    assert modes.row_gradients < some_rows + 4 * N
    w = np.zeros(3)
    for _ in range(10):
        p = 1 / (1 + np.exp(-x @ w))
        H = (x.T * (p * (1 - p))) @ x + np.eye(3) / 100
        w = w - np.linalg.solve(H, x.T @ (p - y) + w / 100)
    root = np.linalg.cholesky(H)
    assert np.linalg.norm(root.T @ (np.asarray(modes.heaviest.center, float) - w)) < 0.05
    inside = root.T @ np.asarray(modes.heaviest.factor, float)
    assert np.all(abs(np.linalg.svd(inside, compute_uv=False) - 1) < 0.1)
