"""A loader's batches in the place of rows."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
import functools
import threading
from typing import Any

import jax
import numpy as np

from numpyro_ext.data._rows import HostRows, Rows, Same

_KEPT = 64
"""Batches that are kept for whoever asks for them again: as many as there may be chains."""


@jax.tree_util.register_static
class Batches(HostRows):
    r"""
    The batches of a loader, in the place of an array of which a plate takes rows:
    ``with numpyro.plate("rows", len(b), subsample_size=b.batch_size) as i: x, y = b[i]``.

    Each new index that a plate draws gets the loader's next batch, whatever its numbers are; the
    same index gets the same batch again, so that the model and a guide, and all particles of a
    step, see the same rows. With M chains in ``jax.vmap`` each has batches of its own. The loader
    begins anew when it ends, the next batch is fetched by a thread while one is used, and a batch
    of another size, as the last one of a pass, is filled up by rows of the next one. The plate's
    scale N / B is right if the loader goes through all N rows, or draws them uniformly. The search
    for a mode or for settings reads the first batch, scaled to N rows: units are right, and the
    mode is about :math:`\sqrt{N / B}` standard deviations away.

    :param loader: a ``DataLoader`` of PyTorch or Grain, a data set of TensorFlow in NumPy, a list,
        or whatever can be iterated again; or a function that returns an iterator. A batch is an
        array, or a dict, tuple or list of arrays, with rows in front.
    :param int size: the number N of rows of one pass; counted by a pass, or known by
        ``loader.dataset``, if None.
    :param transform: a function of a batch, in NumPy.

    .. doctest::

        >>> import numpy as np, numpyro, numpyro.distributions as dist, optax
        >>> from jax import random
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_ext.data import Batches
        >>> def loader():
        ...     rows = np.random.default_rng(0).permutation(np.linspace(1.0, 3.0, 1000))
        ...     yield from np.split(rows, 20)
        >>> batches = Batches(loader)
        >>> len(batches), batches.batch_size
        (1000, 50)
        >>> def model(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("rows", len(x), subsample_size=x.batch_size) as i:
        ...         numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[i])
        >>> svi = SVI(model, AutoNormal(model), optax.adam(0.01), Trace_ELBO())
        >>> result = svi.run(random.key(0), 1000, batches, progress_bar=False)
        >>> print(f"{result.params['loc_auto_loc']:.1f}")
        2.0
    """

    is_stream = True

    def __init__(
        self,
        loader: Iterable[Any] | Callable[[], Iterator[Any]],
        size: int | None = None,
        *,
        transform: Callable[[Rows], Rows] | None = None,
    ) -> None:
        if not callable(loader) and not hasattr(loader, "__iter__"):
            raise TypeError(f"the loader is a {type(loader).__name__}, which cannot be iterated.")
        if isinstance(loader, Iterator):
            raise TypeError(
                f"the loader is a {type(loader).__name__}, an iterator, which can be used once;"
                " give the list, loader or function that makes it."
            )
        self.loader, self.size, self.transform = loader, size, transform
        self._set_up()

    def _set_up(self) -> None:
        super().__init__((Same(self.loader), self.size, self.transform))
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        self._stream = self._endless()
        self._next: Future[Rows] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"loader": self.loader, "size": self.size, "transform": self.transform}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.loader, self.size, self.transform = state.values()
        self._set_up()

    @property
    def name(self) -> str:
        """The loader, for a message."""
        return f"the loader {getattr(self.loader, '__name__', type(self.loader).__name__)}"

    def __len__(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        if self.size is not None:
            return int(self.size)
        dataset = getattr(self.loader, "dataset", None)
        if dataset is not None and hasattr(dataset, "__len__"):
            return len(dataset)
        return sum(_rows_of(batch) for batch in self._once())

    @functools.cached_property
    def _first(self) -> Rows:
        return next(self._once())

    @property
    def batch_size(self) -> int:
        """The number B of rows in a batch."""
        return _rows_of(self._first)

    @functools.cached_property
    def row(self) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self._first)

    def read(self, index: np.ndarray) -> Rows:
        """A batch for each index along the last axis: the next one, or the same for the same."""
        if index.shape[-1:] != (self.batch_size,):
            raise ValueError(
                f"{self.name} has batches of {self.batch_size} rows, and the index has shape"
                f" {index.shape}: what passes over all rows (a proxy, an anchor) needs a HostArray."
            )
        batches = [self._batch_of(i) for i in index.reshape(-1, self.batch_size)]
        shape = index.shape
        return jax.tree.map(lambda *x: np.stack(x).reshape(*shape, *x[0].shape[1:]), *batches)

    def _batch_of(self, index: np.ndarray) -> Rows:
        key = index.tobytes()
        with self._lock:
            if key not in self._kept:
                ready = self._next or _fetcher().submit(next, self._stream)
                self._next = None
                try:
                    self._kept[key] = ready.result()
                except Exception:
                    self._stream = self._endless()  # the old one has ended with the error
                    raise
                self._next = _fetcher().submit(next, self._stream)
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]

    def _endless(self) -> Iterator[Rows]:
        """Batches of B rows, pass after pass."""
        size, waiting = self.batch_size, []
        while True:
            num_rows = 0
            for batch in self._once():
                num_rows += _rows_of(batch)
                waiting.append(batch)
                if sum(map(_rows_of, waiting)) < size:
                    continue
                rows = waiting[0]
                if len(waiting) > 1:
                    rows = jax.tree.map(lambda *x: np.concatenate(x), *waiting)
                for begin in range(0, _rows_of(rows) - size + 1, size):
                    yield jax.tree.map(lambda x, b=begin: x[b : b + size], rows)
                left = _rows_of(rows) % size
                waiting = [jax.tree.map(lambda x, n=left: x[-n:], rows)] if left else []
            if abs(num_rows - len(self)) >= size:
                raise ValueError(
                    f"{self.name} has ended after {num_rows} rows, and its size is {len(self)}:"
                    " give the size of one pass."
                )

    def _once(self) -> Iterator[Rows]:
        """The batches of a pass in NumPy."""
        loader = self.loader
        batches: Any = loader() if callable(loader) else loader
        whole = iter(batches)
        first = self.__dict__.get("row")
        for k in range(2**62):
            try:
                batch = _as_numpy(next(whole))
                batch = batch if self.transform is None else _as_numpy(self.transform(batch))
                num_rows = _rows_of(batch)
            except StopIteration:
                return
            except Exception as error:
                raise RuntimeError(
                    f"batch {k} of {self.name} could not be had: {type(error).__name__}: {error}"
                ) from error
            row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
            first = row if first is None else first
            if row != first:
                raise ValueError(
                    f"batch {k} of {self.name} has rows of {row}, and the first has {first}."
                )
            if num_rows:
                yield batch


def _as_numpy(batch: Any) -> Rows:
    if isinstance(batch, list):
        batch = tuple(batch)
    return jax.tree.map(np.asarray, batch)


def _rows_of(batch: Rows) -> int:
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"the arrays of a batch have the shapes {sizes} of rows; give one number")
    return sizes.pop()[0]


@functools.cache
def _fetcher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, "batches")
