"""Rows on the host or on disk: what is read, from which sources, and what is said of a bad read."""

from functools import partial
import os
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.data import Batches, HostArray, _mapped

N = 40
X = np.random.default_rng(0).normal(size=(N, 3)) * [1.0, 10.0, 0.1] + [0.0, 5.0, 0.0]
Y = np.arange(N) % 7
INDEX = np.array([[5, 39, 5], [0, 1, 2]])


def memmap(x, folder):
    np.save(folder / "x.npy", x)
    return np.load(folder / "x.npy", mmap_mode="r")


def zarr_array(x, folder):
    zarr = pytest.importorskip("zarr")
    z = zarr.create_array(store=str(folder / "x.zarr"), shape=x.shape, chunks=(7,), dtype=x.dtype)
    z[:] = x
    return z


def hdf5(x, folder):
    file = pytest.importorskip("h5py").File(folder / "x.h5", "w")
    return file.create_dataset("x", data=x)


def arrow(x, folder, batches=3):
    """A memory-mapped Arrow file, whose columns are in pieces."""
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema([("x", pa.from_numpy_dtype(x.dtype))])
    with pa.OSFile(str(folder / "x.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as out:
        for part in np.array_split(x, batches):
            out.write_batch(pa.record_batch([pa.array(part)], schema=schema))
    return pa.ipc.open_file(pa.memory_map(str(folder / "x.arrow"))).read_all().column("x")


def one_piece_of_arrow(x, folder):
    return arrow(x, folder, batches=1)


def pandas_column(x, folder):
    return pytest.importorskip("pandas").DataFrame({"x": x}, index=np.arange(N)[::-1])["x"]


def polars_column(x, folder):
    return pytest.importorskip("polars").DataFrame({"x": x})["x"]


class Items:
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        if not isinstance(k, int):
            raise TypeError("one row")
        return self.x[k]


class ItemsOfLists(Items):
    def __getitems__(self, numbers):
        return [self.x[k] for k in numbers]


def grain(x, folder):
    return pytest.importorskip("grain").MapDataset.source(Items(x))


SOURCES = {
    "array": lambda x, folder: x,
    "memmap": memmap,
    "part of a memmap": lambda x, folder: memmap(np.concatenate([x, x]), folder)[N:],
    "zarr": zarr_array,
    "h5py": hdf5,
    "arrow in pieces": arrow,
    "arrow": one_piece_of_arrow,
    "pandas": pandas_column,
    "polars": polars_column,
    "items": lambda x, folder: Items(x),
    "lists of items": lambda x, folder: ItemsOfLists(x),
    "grain": grain,
}


@pytest.mark.parametrize("column", [X[:, 0].copy(), Y], ids=["float64", "int64"])
@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_a_source_are_those_of_the_array(name, column, tmp_path):
    make = SOURCES[name]
    source = make(column, tmp_path)
    x, like = HostArray(source), jnp.asarray(column)
    assert (len(x), x.shape, x.ndim, x.dtype) == (N, like.shape, 1, like.dtype)
    np.testing.assert_array_equal(jax.jit(lambda i: x[i])(INDEX), like[INDEX])
    np.testing.assert_array_equal(x[INDEX], like[INDEX])
    for piece in (slice(0, 16), slice(16, 32), slice(32, 40)):  # the last of which is read ahead
        np.testing.assert_array_equal(x[piece], like[piece])
    assert x == HostArray(source) and hash(x) == hash(HostArray(source))
    assert x != HostArray(source, transform=np.abs)


def test_a_matrix_under_every_transformation_of_jax():
    x, like = HostArray(X), jnp.asarray(X)
    index = jnp.asarray(INDEX)
    np.testing.assert_array_equal(jax.jit(lambda i: x[i, 1:])(index), like[index, 1:])
    np.testing.assert_array_equal(jax.vmap(lambda i: x[i])(index), like[index])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda i: x[i]))(index), like[index])
    np.testing.assert_array_equal(jax.jit(lambda i: x[i])(-index - 1), like[-index - 1])

    def loss(x, w, i):
        return jnp.sum((x[i] @ w) ** 2)

    w = jnp.array([1.0, -0.5, 2.0])
    for transform in (jax.grad, jax.hessian, jax.checkpoint):
        of_host, of_array = (jax.jit(transform(partial(loss, rows))) for rows in (x, like))
        np.testing.assert_allclose(of_host(w, index[0]), of_array(w, index[0]), rtol=1e-6)
    both = jax.lax.map(lambda i: x[i], index)
    np.testing.assert_array_equal(both, like[index])


def test_columns_are_read_together_and_transformed():
    calls = []

    def standardise(rows):
        calls.append(len(rows["y"]))
        return {"x": (rows["x"] - 5.0) / 2.0, "y": rows["y"] > 3}

    rows = HostArray({"x": X, "y": Y}, transform=standardise)
    read = jax.jit(lambda i: rows[i])(INDEX)
    np.testing.assert_allclose(read["x"], jnp.asarray((X[INDEX] - 5) / 2), rtol=1e-6)
    np.testing.assert_array_equal(read["y"], Y[INDEX] > 3)
    assert calls == [2, INDEX.size]
    assert rows.shape == (N,) and rows == HostArray({"x": X, "y": Y}, transform=standardise)
    x, y = HostArray((X, Y))[INDEX]
    np.testing.assert_array_equal(y, Y[INDEX])
    assert x.shape == (2, 3, 3)
    column = HostArray({"x": X, "y": Y})["y"]
    assert column == HostArray(Y) and column.dtype == jnp.asarray(Y).dtype


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_frame_is_its_columns(library):
    pytest.importorskip(library)
    columns = {"x": X[:, 0].copy(), "y": Y}
    if library == "pyarrow":
        import pyarrow as pa

        frame = pa.table(columns)
    else:
        frame = pytest.importorskip(library).DataFrame(columns)
    rows = HostArray(frame)
    np.testing.assert_array_equal(rows[INDEX]["y"], Y[INDEX])
    np.testing.assert_array_equal(rows["x"][INDEX], jnp.asarray(X[:, 0])[INDEX])


def test_items_that_are_dicts_are_made_once():
    class Set(Items):
        def __getitem__(self, k):
            made.append(k)
            return {"x": X[k], "y": int(Y[k])}

    made: list[int] = []
    rows = HostArray(Set(X))
    made.clear()
    read = rows[INDEX]
    np.testing.assert_array_equal(read["y"], Y[INDEX])
    np.testing.assert_array_equal(read["x"], jnp.asarray(X)[INDEX])
    assert made == INDEX.ravel().tolist()


def test_a_new_object_of_the_same_source_compiles_nothing_anew(tmp_path):
    traced = []

    @partial(jax.jit, static_argnums=0)
    def take(x, i):
        traced.append(i)
        return x[i]

    memmap(X, tmp_path)
    for _ in range(2):
        take(HostArray(X), jnp.arange(3))
        take(HostArray(X[:]), jnp.arange(3))
    assert len(traced) == 1
    for _ in range(2):
        take(HostArray(np.load(tmp_path / "x.npy", mmap_mode="r")), jnp.arange(3))
    assert len(traced) == 2


def test_a_source_that_changes_is_read_as_it_is():
    x = np.zeros(4)
    take = jax.jit(lambda i: HostArray(x)[i])
    assert take(jnp.arange(2)).sum() == 0
    x[:] = 1.0
    assert take(jnp.arange(2)).sum() == 2


def test_a_pickled_source_is_read_again(tmp_path):
    x = HostArray(X, transform=np.abs)
    again = pickle.loads(pickle.dumps(x))
    np.testing.assert_array_equal(again[INDEX], x[INDEX])


def test_what_is_wrong_with_a_read(tmp_path):
    x = HostArray(Y)
    with pytest.raises(IndexError, match=r"row 40 of an array of shape \(40,\) was asked for"):
        x[np.array([3, 40])]
    with pytest.raises(Exception, match="row -41 of an array"):
        jax.block_until_ready(jax.jit(lambda i: x[i])(jnp.array([3, -41])))
    with pytest.raises(TypeError, match="taken by integers, and the index is of dtype bool"):
        x[np.ones(N, bool)]
    for whole in (np.asarray, jnp.sum, lambda x: x * jnp.ones(N)):
        with pytest.raises(TypeError, match="is not in memory"):
            whole(x)
    with pytest.raises(TypeError, match="not iterable"):
        list(x)
    bad = X.copy()
    bad[7, 2] = np.nan
    with pytest.raises(ValueError, match=r"row 7 of an array .* has NaN; leave such rows out"):
        HostArray(bad)[np.array([1, 7, 2])]
    assert np.isnan(HostArray(bad, allow_nan=True)[7, 2])
    if not jax.config.jax_enable_x64:
        large = np.array([1, 2**40])
        with pytest.raises(ValueError, match="has 1099511627776, too large for int32"):
            HostArray(large)[np.arange(2)]
        with pytest.raises(ValueError, match=r"has 1e\+39, too large for float32"):
            HostArray(np.array([1.0, 1e39]))[np.arange(2)]
        assert np.isinf(HostArray(np.array([1.0, np.inf]))[1])
    mapped = HostArray(memmap(X, tmp_path))
    os.truncate(tmp_path / "x.npy", 500)
    with pytest.raises(RuntimeError, match=r"rows 1 to 3 of the file .*x\.npy could not be read"):
        mapped[np.array([3, 1])]

    class Broken(Items):
        def __getitem__(self, k):
            if k == 9:
                raise ValueError("a bad sector")
            return self.x[k]

    with pytest.raises(Exception, match=r"Broken of 40 rows could not be read: .* a bad sector"):
        jax.block_until_ready(jax.jit(lambda i: HostArray(Broken(Y))[i])(jnp.array([9])))


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">u2"])
def test_bytes_in_the_other_order_are_read_alike(dtype, tmp_path):
    y = Y.astype(dtype)
    for x in (HostArray(y), HostArray(memmap(y, tmp_path)), HostArray(Items(y))):
        for taken in (x[INDEX], jax.jit(lambda i, x=x: x[i])(INDEX)):
            np.testing.assert_array_equal(taken, Y[INDEX])
            assert taken.dtype == x.dtype


def test_chunks_that_nobody_has_written_are_counted(tmp_path):
    """They are read as zeros."""
    h5py = pytest.importorskip("h5py")
    file = h5py.File(tmp_path / "x.h5", "w")
    chunked = file.create_dataset("x", (40, 3), chunks=(10, 3), dtype="f4")
    chunked[:20] = 1.0
    with pytest.warns(InferenceWarning, match="2 of the 4 chunks of .* have not been written"):
        HostArray(chunked)
    with pytest.warns(InferenceWarning, match="1 of the 1 chunks"):
        HostArray(file.create_dataset("y", (40,), dtype="f4"))
    chunked[20:] = 0.0
    HostArray(chunked)  # warnings are errors here


def test_chunks_of_zarr_that_nobody_has_written_are_counted(tmp_path):
    zarr = pytest.importorskip("zarr")
    z = zarr.create_array(store=str(tmp_path / "x.zarr"), shape=(40,), chunks=(7,), dtype="f4")
    z[:14] = 1.0
    with pytest.warns(InferenceWarning, match="4 of the 6 chunks of .* are read as 0"):
        HostArray(z)


def test_what_is_wrong_with_a_source():
    with pytest.raises(TypeError, match="of dtype <U1, which JAX does not have; store numbers"):
        HostArray(np.array(["a", "b"]))
    with pytest.raises(TypeError, match="the source is a list; give an array of rows"):
        HostArray([1.0, 2.0])
    with pytest.raises(ValueError, match=r"have \[2, 40\] rows"):
        HostArray({"x": X, "y": Y[:2]})
    with pytest.raises(ValueError, match="has no row"):
        HostArray(X[:0])
    with pytest.raises(ValueError, match="must keep their number"):
        HostArray(X, transform=np.sum).shape  # noqa: B018
    with pytest.raises(TypeError, match="the source is a HostArray"):
        HostArray(HostArray(X))
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="1 missing values; fill them"):
        HostArray(pa.array([1.0, None]))


class Counted:
    """A source that counts its reads."""

    shape, dtype = X.shape, X.dtype

    def __init__(self):
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return X[index]


LOOPS = {
    "scan": lambda at, key: jax.lax.scan(lambda s, i: (s + at(key, i), None), 0.0, jnp.arange(5))[
        0
    ],
    "fori_loop": lambda at, key: jax.lax.fori_loop(0, 5, lambda i, s: s + at(key, i), 0.0),
    "cond": lambda at, key: sum(
        jax.lax.cond(
            i < jnp.argmax(random.bits(key, (1,))) + 5, lambda i=i: at(key, i), lambda: 0.0
        )
        for i in range(8)
    ),
    "vmap in scan": lambda at, key: jax.lax.scan(
        lambda s, i: (s + jax.vmap(lambda k: at(k, i))(random.split(key, 3)).sum(), None),
        0.0,
        jnp.arange(5),
    )[0],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_reads_once_a_step(loop):
    """Five steps, of three chains too; a branch that is not taken reads nothing."""
    rows = Counted()
    x = HostArray(rows)
    batches = Batches(list(np.arange(N, dtype=np.float32).reshape(10, 4)), N)

    def at(key, i):
        index = random.randint(random.fold_in(key, i), (4,), 0, N)
        return x[index].sum() + batches[index].sum()

    run = jax.jit(lambda key: LOOPS[loop](at, key))
    jax.block_until_ready(run(random.key(0)))
    rows.reads, before = 0, len(batches._kept)
    jax.block_until_ready(run(random.key(1)))
    assert rows.reads == 5
    assert len(batches._kept) - before == (15 if "vmap" in loop else 5)


def test_rows_are_the_same_in_loops_and_of_several_chains():
    x = HostArray(X)

    @jax.jit
    def run(key):
        def step(total, key):
            i = random.randint(key, (5,), 0, N)
            return total + x[i].sum(), i

        return jax.lax.scan(step, 0.0, random.split(key, 20))

    total, index = run(random.key(0))
    np.testing.assert_allclose(total, jnp.asarray(X)[index].sum(), rtol=1e-5)


@pytest.mark.parametrize("shape", [(5000, 3), (50, 3000), (5000,)])
def test_pages_of_a_file_are_asked_for_where_reads_are_slow(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(_mapped, "_SLOW", -1.0)
    numbers = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    part = slice(shape[0] // 5, shape[0] - 3)
    x, like = HostArray(memmap(numbers, tmp_path)[part]), numbers[part]
    for _ in range(2):
        index = np.random.default_rng(1).integers(0, len(like), 40)
        np.testing.assert_array_equal(x.read(index), like[index])
        np.testing.assert_array_equal(x.read(np.arange(7, len(like))), like[7:])


def test_a_transform_cannot_change_the_source():
    numbers = np.ones((8, 2), np.float32)

    def doubled(x):
        x *= 2
        return x

    x = HostArray(numbers, transform=doubled)
    assert np.all(x[:] == 2) and np.all(x[:] == 2) and np.all(numbers == 1)


@pytest.mark.parametrize("in_axes", [0, 1])
def test_reads_under_vmap_and_without_a_program(in_axes):
    index = np.arange(12).reshape(3, 4)
    rows = jax.vmap(lambda i: HostArray(X)[i] + 0, in_axes)(index)
    np.testing.assert_array_equal(rows, jnp.asarray(X)[index if in_axes == 0 else index.T])
    with jax.disable_jit():
        np.testing.assert_array_equal(
            jax.jit(lambda i: HostArray(X)[i])(index), jnp.asarray(X)[index]
        )
