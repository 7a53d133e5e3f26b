"""Batches of a loader: which rows come, in which order, and what is said of a bad loader."""

import pickle
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.data import Batches

N, B = 12, 4
X = np.arange(N, dtype=float)
Y = X[:, None] * [1.0, -1.0]


def split(x, sizes):
    return np.split(x, np.cumsum(sizes)[:-1])


def reads(batches, keys):
    """What a compiled program gets for the index arrays of these keys."""
    take = jax.jit(lambda i: batches[i])
    size = batches.batch_size
    return [jax.device_get(take(jnp.arange(size) + 100 * key)) for key in keys]


@pytest.mark.parametrize("sizes", [[4, 4, 4], [4, 4, 3, 1], [4, 6, 2]], ids=str)
@pytest.mark.parametrize("kind", ["list", "function"])
def test_batches_come_in_turn_and_begin_anew(sizes, kind):
    """Of any sizes; the first one is B."""
    parts = split(X, sizes)
    batches = Batches(parts if kind == "list" else lambda: iter(parts))
    assert (len(batches), batches.shape, batches.batch_size) == (N, (N,), B)
    found = np.concatenate(reads(batches, range(6)))
    np.testing.assert_array_equal(found, np.tile(X, 2))


def test_a_rest_is_filled_up_from_the_next_pass():
    batches = Batches(split(X[:10], [4, 4, 2]))
    found = np.concatenate(reads(batches, range(5)))
    np.testing.assert_array_equal(found, np.tile(X[:10], 2))


def test_the_same_index_has_the_same_batch():
    batches = Batches([(x, y) for x, y in zip(split(X, [4] * 3), split(Y, [4] * 3), strict=True)])
    a, b, again, c = reads(batches, [0, 1, 0, 2])
    np.testing.assert_array_equal(a[1], Y[:4])
    np.testing.assert_array_equal(b[0], X[4:8])
    np.testing.assert_array_equal(again[1], a[1])
    np.testing.assert_array_equal(c[0], X[8:])


def test_each_chain_has_batches_of_its_own():
    batches = Batches([{"x": x} for x in split(X, [4] * 3)])
    index = jnp.arange(3 * B).reshape(3, B)
    found = jax.jit(jax.vmap(lambda i: batches[i]["x"] + jnp.zeros(B)))(index)
    np.testing.assert_array_equal(found.ravel(), X)


def test_the_number_of_rows_is_given_known_or_counted():
    class Loader(list):
        dataset = SimpleNamespace(__len__=None)

    loader = Loader(split(X, [4] * 3))
    loader.dataset = range(N)
    assert len(Batches(loader)) == len(Batches(list(loader))) == N
    assert len(Batches(list(loader), N + 3)) == N + 3


def test_a_transform_and_a_pickled_object():
    batches = Batches(split(X, [4] * 3), transform=np.negative)
    for one in (batches, pickle.loads(pickle.dumps(batches))):
        np.testing.assert_array_equal(np.concatenate(reads(one, range(3))), -X)
    assert batches == Batches(batches.loader, transform=np.negative) != Batches(batches.loader)


def test_what_is_wrong_with_a_loader():
    with pytest.raises(TypeError, match="a int, which cannot be iterated"):
        Batches(3)
    with pytest.raises(Exception, match="has ended after 12 rows, and its size is 100"):
        reads(Batches(split(X, [4] * 3), 100), range(4))
    with pytest.raises(TypeError, match="an iterator, which can be used once; give the list"):
        Batches(iter(split(X, [4] * 3)), N)
    with pytest.raises(Exception, match=r"batch 1 .* has rows of .*, and the first has"):
        reads(Batches([Y[:4], X[4:8]], N), range(2))
    with pytest.raises(RuntimeError, match=r"batch 0 .* the arrays of a batch have the shapes"):
        len(Batches([(X[:4], Y[:3])]))

    def broken():
        yield X[:4]
        raise OSError("no such shard")

    batches = Batches(broken, N)
    for _ in range(2):  # the error does not end the object
        with pytest.raises(Exception, match=r"batch 1 of the loader broken .* no such shard"):
            reads(batches, range(10, 13))
    with pytest.raises(Exception, match=r"passes over all rows .* needs a HostArray"):
        jax.jit(lambda i: batches[i])(jnp.arange(N)).block_until_ready()
