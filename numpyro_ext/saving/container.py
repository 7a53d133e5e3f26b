"""A tree of arrays, numbers and records in one file: an ``npz`` archive with a header in JSON.

Each array is a member of the archive, in NumPy's format without pickled objects. The member
``header`` is the UTF-8 text of a JSON object: ``format``, the number of the format; ``versions`` of
the packages that wrote the file; and ``content``, the tree. In it a number, a word or ``null``
stands for itself, and anything else is an object with its ``kind``.
"""

from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
import json
import os
from pathlib import Path
import sys
from typing import Any, cast
from zipfile import BadZipFile

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.modes import Problem

FORMAT = 1
_PACKAGES = ("jax", "numpy", "numpyro")


@dataclass
class Unknown:
    """A node that a file cannot make: a pytree of another class, of which it has the leaves, or a
    named tuple of a class that is not imported, of which it has the fields."""

    name: str
    parts: list[Any]
    fields: tuple[str, ...] | None = None


def write(path: Any, content: Any, own_version: str) -> None:
    """Write a tree to a file, which is replaced once it is whole."""
    encoder = _Encoder()
    header = {
        "format": FORMAT,
        "versions": {"numpyro_ext": own_version, **{name: version(name) for name in _PACKAGES}},
        "content": encoder.encode(content, "the fit"),
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            np.savez(file, allow_pickle=False, header=text, **encoder.arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Any) -> Any:
    """The tree of a file."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes())
        number, versions, content = (header[name] for name in ("format", "versions", "content"))
    except (AttributeError, BadZipFile, EOFError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} was not written by numpyro_ext.saving.save, or is damaged or cut short"
            f" ({error})."
        ) from error
    if number != FORMAT:
        raise ValueError(
            f"{path} has format {number} of numpyro_ext {versions.get('numpyro_ext')}, and this"
            f" version reads format {FORMAT}; load it with that version."
        )
    return _Decoder(arrays, path).decode(content)


def _is_named_tuple(x: Any) -> bool:
    """Whether a tuple has names and JAX takes it by these; NumPyro's optimisers have other ones."""
    parts = jax.tree.leaves(x, is_leaf=lambda y: y is not x)
    own = len(parts) == len(x) and all(a is b for a, b in zip(parts, x, strict=True))
    return own and hasattr(x, "_fields")


def _is_record(cls: Any) -> bool:
    """Whether a class is a dataclass of this package, which the file has by its fields."""
    return is_dataclass(cls) and cls.__module__.partition(".")[0] == "numpyro_ext"


class _Encoder:
    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.records: dict[int, int] = {}  # numbers of the records, by their ids

    def encode(self, x: Any, place: str) -> Any:
        if x is None or type(x) in (bool, int, float, str):
            return x
        if isinstance(x, Problem):
            return {"kind": "problem", "sentence": str(x), "of": x.kind}
        if isinstance(x, Array | np.ndarray | np.generic):
            return self.array(x, place)
        if type(x) is dict:
            each = [
                [self.encode(k, place), self.encode(v, f"{place}[{k!r}]")] for k, v in x.items()
            ]
            return {"kind": "dict", "items": each}
        if type(x) in (list, tuple):
            each = [self.encode(v, f"{place}[{k}]") for k, v in enumerate(x)]
            return {"kind": type(x).__name__, "items": each}
        if isinstance(x, tuple) and _is_named_tuple(x):
            return self.parts("named tuple", x, cast(Any, x)._fields, place)
        if _is_record(type(x)):
            if id(x) in self.records:
                return {"kind": "again", "number": self.records[id(x)]}
            names = [field.name for field in fields(cast(Any, x)) if field.init]
            own = self.parts("record", x, names, place)
            self.records[id(x)] = len(self.records)
            return own
        leaves = jax.tree.leaves(x)
        if len(leaves) == 1 and leaves[0] is x:
            raise TypeError(
                f"{place} is a {type(x).__name__}, which a file cannot hold; it holds arrays,"
                " numbers, words, and dicts, lists, tuples and pytrees of these."
            )
        each = [self.encode(v, f"{place} (leaf {k})") for k, v in enumerate(leaves)]
        return {"kind": "pytree", "name": type(x).__name__, "items": each}

    def parts(self, kind: str, x: Any, names: Any, place: str) -> dict[str, Any]:
        cls = type(x)
        each = {name: self.encode(getattr(x, name), f"{place}.{name}") for name in names}
        return {"kind": kind, "module": cls.__module__, "name": cls.__qualname__, "fields": each}

    def array(self, x: Any, place: str) -> dict[str, Any]:
        if isinstance(x, Array) and not x.is_fully_addressable:
            raise ValueError(
                f"{place} is an array of several processes; gather it, as by"
                " jax.experimental.multihost_utils.process_allgather, and save it in one of them."
            )
        how: dict[str, Any] = {"kind": "array", "member": f"a{len(self.arrays)}"}
        if isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            how["key"] = str(random.key_impl(x))
            x = random.key_data(x)
        elif isinstance(x, Array):
            how["jax"] = "weak" if x.weak_type and x.ndim == 0 else True
        elif isinstance(x, np.generic):
            how["scalar"] = True
        values = np.asarray(x)
        if values.dtype.kind == "O":
            raise TypeError(f"{place} is an array of objects, which a file cannot hold.")
        if values.dtype.kind == "V":  # as bfloat16, which NumPy's format does not know
            how["dtype"] = values.dtype.name
            values = values.view(np.dtype(f"u{values.dtype.itemsize}"))
        self.arrays[how["member"]] = values
        return how


class _Decoder:
    def __init__(self, arrays: dict[str, np.ndarray], path: Any) -> None:
        self.arrays, self.path = arrays, path
        self.records: list[Any] = []

    def decode(self, x: Any) -> Any:
        if not isinstance(x, dict):
            return x
        kind = x["kind"]
        if kind == "array":
            return self.array(x)
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in x["items"]}
        if kind in ("list", "tuple"):
            each = [self.decode(v) for v in x["items"]]
            return each if kind == "list" else tuple(each)
        if kind == "problem":
            return Problem(x["sentence"], x["of"])
        if kind == "again":
            return self.records[x["number"]]
        if kind == "pytree":
            return Unknown(x["name"], [self.decode(v) for v in x["items"]])
        parts = {name: self.decode(v) for name, v in x["fields"].items()}
        cls = _imported(x["module"], x["name"])
        if kind == "named tuple":
            if isinstance(cls, type) and issubclass(cls, tuple):
                if getattr(cls, "_fields", None) == tuple(parts):
                    return tuple.__new__(cls, parts.values())
            return Unknown(x["name"], list(parts.values()), tuple(parts))
        if kind != "record" or not (isinstance(cls, type) and _is_record(cls)):
            raise ValueError(f"{self.path} has a {x['name']}, which this version does not know.")
        try:
            record = cls(**parts)
        except TypeError as error:
            raise ValueError(
                f"{self.path} has a {x['name']} of another version of numpyro_ext ({error})."
            ) from error
        self.records.append(record)
        return record

    def array(self, how: dict[str, Any]) -> Any:
        values = self.arrays[how["member"]]
        if "key" in how:
            return random.wrap_key_data(jnp.asarray(values), impl=how["key"])
        if "dtype" in how:
            values = values.view(jnp.dtype(how["dtype"]))
        if how.get("scalar"):
            return values[()]
        if "jax" not in how:
            return values
        if jax.dtypes.canonicalize_dtype(values.dtype) != values.dtype:
            raise ValueError(
                f"{self.path} has arrays of {values.dtype}; load it in double precision, as after"
                " jax.config.update('jax_enable_x64', True)."
            )
        return jnp.asarray(values.item() if how["jax"] == "weak" else values)


def _imported(module: str, name: str) -> Any:
    """A class of a module that is imported already; nothing is imported, and none of it is run."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def fit_to(got: Any, like: Any, place: str) -> Any:
    """What a file has, in the classes of a tree of the same structure, shapes and types; an error
    names the first place where they differ."""

    def differ(file: str, here: str) -> ValueError:
        return ValueError(
            f"{place} is {file} in the file, and {here} here; give load the same model, guide and"
            " optimiser, with the same sizes."
        )

    if isinstance(got, Unknown):
        if type(like).__name__ != got.name:
            raise differ(f"a {got.name}", _what(like))
        if got.fields is None:
            leaves, structure = jax.tree.flatten(like)
            return jax.tree.unflatten(structure, fit_to(got.parts, leaves, place))
        if getattr(like, "_fields", None) != got.fields:
            raise differ(f"a {got.name} of {got.fields}", _what(like))
        return type(like)(*fit_to(got.parts, list(like), place))
    if isinstance(got, dict) and isinstance(like, dict):
        if set(got) != set(like):
            raise differ(f"a dict of {sorted(got, key=str)}", f"one of {sorted(like, key=str)}")
        return {name: fit_to(got[name], like[name], f"{place}[{name!r}]") for name in like}
    if isinstance(like, list | tuple) and isinstance(got, list | tuple):
        fields = getattr(like, "_fields", None)
        if type(got).__name__ != type(like).__name__ or len(got) != len(like):
            raise differ(_what(got), _what(like))
        places = range(len(like)) if fields is None else fields
        mark = "[{}]" if fields is None else ".{}"
        parts = [
            fit_to(x, y, place + mark.format(name))
            for x, y, name in zip(got, like, places, strict=True)
        ]
        return type(like)(parts) if fields is None else type(like)(*parts)
    if _what(got) != _what(like):
        raise differ(_what(got), _what(like))
    return got


def _what(x: Any) -> str:
    if hasattr(x, "dtype"):
        return f"an array of {x.dtype} of shape {tuple(x.shape)}"
    if isinstance(x, list | tuple):
        return f"a {type(x).__name__} of {len(x)}"
    return f"a {type(x).__name__}"
