"""A file is NumPy's, keeps every type that a fit has, and is whole or refused."""

import json

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_ext.saving.container import read, write


def test_a_tree_keeps_its_types(tmp_path):
    """Keys of both kinds, small floats, scalars, NaN, and containers with numbers as names."""
    tree = {
        "keys": (random.key(3, impl="rbg"), random.PRNGKey(4)),
        "half": jnp.arange(3, dtype=jnp.bfloat16),
        "numpy": np.float64(0.1),
        "words": ["a", None, True, 2, float("nan")],
        "numbered": {2: optax.EmptyState(), 1: np.arange(2)},
        "adam": optax.adam(0.1).init({"w": jnp.ones(2)}),
    }
    write(tmp_path / "tree.npz", tree, "0")
    again = read(tmp_path / "tree.npz")
    assert jax.tree.structure(tree) == jax.tree.structure(again)
    assert list(tree) == list(again) and list(again["numbered"]) == [2, 1]
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(again), strict=True):
        assert type(a) is type(b)
        if hasattr(a, "dtype"):
            assert a.dtype == b.dtype
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = random.key_data(a), random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_a_file_is_numpys_and_holds_no_pickle(tmp_path):
    write(tmp_path / "tree.npz", {"w": jnp.ones(2)}, "0")
    with np.load(tmp_path / "tree.npz", allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        np.testing.assert_array_equal(archive["a0"], [1.0, 1.0])
    assert header["format"] == 1 and set(header["versions"]) >= {"jax", "numpyro", "numpyro_ext"}
    with pytest.raises(TypeError, match="is a function, which a file cannot hold"):
        write(tmp_path / "tree.npz", {"f": lambda: 0}, "0")
    assert [path.name for path in tmp_path.iterdir()] == ["tree.npz"]
    assert read(tmp_path / "tree.npz")["w"].sum() == 2  # the file before the error


def test_a_damaged_file_and_one_of_a_later_format(tmp_path):
    path = tmp_path / "tree.npz"
    write(path, {"w": jnp.arange(1000.0)}, "0")
    whole = path.read_bytes()
    for text in (whole[:-100], whole[: len(whole) // 2], b"", b"words"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="damaged or cut short"):
            read(path)
    changed = bytearray(whole)
    changed[whole.index(np.float32(500).tobytes())] ^= 1
    path.write_bytes(bytes(changed))
    with pytest.raises(ValueError, match="damaged or cut short"):
        read(path)
    later = {"format": 99, "versions": {"numpyro_ext": "7.0"}, "content": None}
    np.savez(path, header=np.frombuffer(json.dumps(later).encode(), np.uint8))
    with pytest.raises(ValueError, match=r"format 99 of numpyro_ext 7\.0"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.npz")
