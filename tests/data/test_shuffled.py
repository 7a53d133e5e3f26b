"""Copies of rows in random order, and minibatches of neighbours."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.minibatch import block_indices
from numpyro_ext.data import HostArray, shuffled_copy
from numpyro_ext.mcmc import SGLD
from numpyro_ext.objectives import taylor_proxy

N = 1000
ROWS = {"x": np.arange(2.0 * N).reshape(N, 2), "y": np.arange(N)}


@pytest.mark.parametrize("memory", [10**6, 5000], ids=["one file", "many files"])
def test_a_copy_has_each_row_once_with_its_columns(memory, tmp_path):
    copy = shuffled_copy(ROWS, tmp_path / "copy", memory=memory)
    y = np.asarray(copy["y"])
    assert copy["x"].dtype == float and np.array_equal(np.sort(y), ROWS["y"])
    np.testing.assert_array_equal(copy["x"], ROWS["x"][y])
    # The first 100 places of an exchangeable order: their mean, and steps between neighbours.
    assert abs(y[:100].mean() - N / 2) < 4 * N / 12**0.5 / 10
    assert abs(np.mean(np.diff(y) > 0) - 0.5) < 4 * (12 * N) ** -0.5
    with pytest.raises(FileExistsError):
        shuffled_copy(ROWS, tmp_path / "copy")


def test_a_block_is_contiguous_and_each_row_equally_likely():
    blocks = np.asarray(
        jax.vmap(lambda key: block_indices(key, 7, 3))(random.split(random.key(0), 7000))
    )
    assert np.all((np.diff(blocks) % 7) == 1)
    counts = np.bincount(blocks.ravel(), minlength=7)
    assert np.all(abs(counts - 3000) < 5 * 3000**0.5)


def model(x):
    loc = numpyro.sample("loc", dist.Normal(0, 10))
    with numpyro.plate("rows", len(x), subsample_size=50) as i:
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[i])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jnp.asarray, HostArray])
def test_a_chain_on_blocks_is_right_and_sorted_rows_are_told(kind):
    x = np.random.default_rng(0).normal(2.0, 1.0, N)
    kernel = SGLD(model, 2e-5, minibatch="block", steps_per_sample=5)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=2000, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferenceWarning)
        mcmc.run(random.key(1), kind(x))
    draws = mcmc.get_samples()["loc"]
    assert abs(draws.mean() - x.mean()) < 0.3 * N**-0.5 and 0.8 < draws.std() * N**0.5 < 1.3
    with pytest.warns(
        InferenceWarning, match=r"plate 'rows' are not in random order.*shuffled_copy"
    ):
        SGLD(model, 2e-5, minibatch="block").init(random.key(0), 0, None, (kind(np.sort(x)),))


@pytest.mark.slow
def test_blocks_that_are_the_rows_of_a_plate():
    """Twenty of fifty rows, a view of the same memory, have the sums of the rows."""

    def on_blocks(x):
        loc = numpyro.sample("loc", dist.Normal(0, 10))
        with numpyro.plate("blocks", len(x), subsample_size=2) as i:
            numpyro.sample("x", dist.Normal(loc, 1.0).expand([50]).to_event(1), obs=x[i])

    x, center = np.random.default_rng(0).normal(2.0, 1.0, N), {"loc": jnp.array(1.9)}
    by_rows = taylor_proxy(model, HostArray(x), center=center)
    by_blocks = taylor_proxy(on_blocks, HostArray(x.reshape(-1, 50)), center=center)
    for name in ("value", "grad", "hessian"):
        np.testing.assert_allclose(getattr(by_blocks, name), getattr(by_rows, name), rtol=1e-5)
