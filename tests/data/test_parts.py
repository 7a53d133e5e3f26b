"""Rows on the host that are read in parts, one by each device."""

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from numpyro_ext.data import HostArray, shuffled_copy

ROWS = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)


def along(axis, **axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, PartitionSpec(axis))


@pytest.fixture(scope="module", params=[{"rows": 2}, {"other": 2, "rows": 1}])
def sharding(request):
    return along("rows", **request.param)


@pytest.mark.parametrize("index", [[3], [0, 29, 14, 15, -1, 15], [[1, 16], [28, 2]], 17, []])
def test_rows_are_those_of_the_array(sharding, index):
    x, index = HostArray(ROWS, sharding=sharding), np.array(index, int)
    assert x.shape == (30, 3) and x == HostArray(ROWS, sharding=sharding) != HostArray(ROWS)
    assert np.array_equal(x[index], ROWS[index])
    assert np.array_equal(jax.jit(lambda i: x[i])(index), ROWS[index])


class Columns(dict):
    def __getitem__(self, i):
        return {name: column[i] for name, column in self.items()}


def test_transforms(sharding):
    x = HostArray({"x": ROWS, "n": np.arange(30)}, sharding=sharding)
    index = random.randint(random.key(1), (5, 4), 0, 30)

    def loss(w, i):
        rows = x[i]
        return jnp.sum(jnp.exp(rows["x"] @ w) * rows["n"])

    def steps(w):
        return lax.scan(lambda w, i: (w - 1e-3 * jax.grad(loss)(w, i), loss(w, i)), w, index)

    w = jnp.array([0.1, -0.2, 0.3])
    with_rows = jax.jit(steps)(w), jax.vmap(loss, (None, 0))(w, index)
    x = Columns({"x": jnp.asarray(ROWS), "n": jnp.arange(30)})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
        with_rows,
        (jax.jit(steps)(w), jax.vmap(loss, (None, 0))(w, index)),
    )


def test_a_device_reads_its_part_alone():
    x = HostArray(ROWS, sharding=along("rows", rows=2))
    seen = []
    x.read = lambda index: (seen.append(set(index.tolist())), ROWS[index])[1]
    jax.block_until_ready(x[np.arange(0, 30, 5)])
    assert sorted(map(sorted, seen)) == [[0, 5, 10], [15, 20, 25]]


def test_bad_input():
    with pytest.raises(ValueError, match=r"spec .* must name one mesh axis, as P\('rows'\)"):
        HostArray(ROWS, sharding=along(None, rows=2))
    x = HostArray(ROWS, sharding=along("rows", rows=2))
    with pytest.raises(IndexError, match="row 30 was asked for, of 30 rows of all processes"):
        x.parts.of(0, np.array([1, 30]))


def test_a_copy_is_one_of_the_rows_of_a_process(sharding, tmp_path):
    with pytest.raises(ValueError, match=r"spread over devices .*; give x\.source"):
        shuffled_copy(HostArray(ROWS, sharding=sharding), tmp_path / "copy")
