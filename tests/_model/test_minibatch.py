"""Indices: a bijection without an O(N) array, exact passes over the data, uniform draws."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._model.minibatch import epoch_indices, permute, replace_indices, round_keys
from tests.mcmc.models import arrays_of_size


def keyed_permutation(rng_key, i, size):
    return permute(round_keys(rng_key), i, size)


@pytest.mark.x64
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 1000, 1025])
def test_permutation_is_a_bijection(size):
    order = keyed_permutation(random.key(size), jnp.arange(size), size)
    assert sorted(order.tolist()) == list(range(size))


def test_permutation_depends_on_the_key_and_mixes():
    """Each row's image is uniform over the keys: chi-square over 12 places, 3000 keys, rows 0 and
    7.
    """
    size, keys = 12, random.split(random.key(0), 3000)
    images = jax.vmap(lambda key: keyed_permutation(key, jnp.arange(size), size))(keys)
    for row in (0, 7):
        counts = np.bincount(images[:, row], minlength=size)
        chi2 = np.sum((counts - 250) ** 2 / 250)
        assert chi2 < 35  # 11 degrees of freedom: exceeded with probability 0.00025
    pairs = np.bincount(size * images[:, 0] + images[:, 1], minlength=size**2)
    expected = 3000 / (size * (size - 1))
    distinct = pairs[~np.eye(size, dtype=bool).ravel()]
    assert pairs[np.eye(size, dtype=bool).ravel()].sum() == 0
    assert np.sum((distinct - expected) ** 2 / expected) < 198  # 131 degrees of freedom: 0.00013


@pytest.mark.parametrize("size", [5, 6, 7, 8])
def test_orders_of_few_rows_are_all_alike(size):
    """Images of each pair of places: 50 000 keys, chi-square over the ordered pairs of rows.

    Its mean is 1 per degree of freedom, and 2 is exceeded with a probability below 0.0005.
    """
    keys = random.split(random.key(1), 50_000)
    images = jax.jit(jax.vmap(lambda key: keyed_permutation(key, jnp.arange(size), size)))(keys)
    images, expected = np.asarray(images), 50_000 / (size * (size - 1))
    for a in range(size):
        for b in range(a):
            counts = np.bincount(size * images[:, a] + images[:, b], minlength=size**2)
            counts = counts[~np.eye(size, dtype=bool).ravel()]
            assert np.sum((counts - expected) ** 2 / expected) < 2.2 * (size * (size - 1) - 1)


@pytest.mark.x64
@pytest.mark.parametrize(("size", "batch"), [(20, 5), (20, 7), (6, 6), (5, 1)])
def test_each_row_once_per_epoch(size, batch):
    """Also where a batch straddles two passes, and the counters never pass N."""
    step = jax.jit(lambda e, o: epoch_indices(random.key(1), e, o, size, batch))
    epoch, offset, rows = jnp.uint32(0), jnp.uint32(0), []
    for _ in range(4 * size // batch + 1):
        idx, epoch, offset = step(epoch, offset)
        assert idx.shape == (batch,)
        assert int(offset) < size
        rows += idx.tolist()
    assert len(rows) == int(epoch) * size + int(offset)
    passes = [rows[k * size : (k + 1) * size] for k in range(int(epoch))]
    assert len(passes) >= 4
    assert all(sorted(p) == list(range(size)) for p in passes)
    assert size == 5 or len({tuple(p) for p in passes}) > 1


def test_epoch_indices_near_the_largest_size():
    size = 2**31 - 1
    idx, epoch, offset = epoch_indices(random.key(0), jnp.uint32(9), jnp.uint32(size - 2), size, 5)
    assert (int(epoch), int(offset)) == (10, 3)
    assert jnp.all((idx >= 0) & (idx < size))
    first, _, _ = epoch_indices(random.key(0), jnp.uint32(10), jnp.uint32(0), size, 3)
    assert idx[2:].tolist() == first.tolist()


def test_replace_indices_are_uniform():
    """Chi-square over 10 rows, 20 000 draws."""
    counts = np.bincount(replace_indices(random.key(4), 10, 20_000), minlength=10)
    assert len(counts) == 10
    assert np.sum((counts - 2000) ** 2 / 2000) < 33  # 9 degrees of freedom: 0.00013


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: replace_indices(key, 10_000_000, 10),
        lambda key: epoch_indices(key, jnp.uint32(0), jnp.uint32(3), 10_000_000, 10),
    ],
    ids=["replace", "epoch"],
)
def test_drawing_makes_no_array_of_the_data_size(draw):
    jaxpr = jax.make_jaxpr(draw)(random.key(0)).jaxpr
    assert not arrays_of_size(jaxpr, 1000)
    assert arrays_of_size(jaxpr, 10)
