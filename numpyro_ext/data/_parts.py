"""Rows of which each process has a part, and each device of a process reads a part of that."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np


class Parts:
    """Which device along the axis of a mesh reads which rows; this process has ``length``."""

    def __init__(self, sharding: NamedSharding, length: int) -> None:
        spec = sharding.spec
        if len(spec) != 1 or not isinstance(spec[0], str):
            raise ValueError(f"the spec {spec} of sharding must name one mesh axis, as P('rows').")
        self.sharding, self.axis = sharding, spec[0]
        mesh = sharding.mesh
        devices = np.moveaxis(np.asarray(mesh.devices), mesh.axis_names.index(self.axis), 0)
        processes = [device.flat[0].process_index for device in devices.reshape(len(devices), -1)]
        missing = set(range(jax.process_count())) - set(processes)
        if missing:
            raise ValueError(
                f"process {min(missing)} has no device along '{self.axis}'; make the mesh of all"
                " devices, as jax.make_mesh((jax.device_count(),), ...)."
            )
        lengths = np.atleast_1d(multihost_utils.process_allgather(np.int32(length)))
        first = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.begin, self.length = int(first[jax.process_index()]), int(first[-1])
        self.bounds = []
        for k, process in enumerate(processes):
            place, count = processes[:k].count(process), processes.count(process)
            rows = first[process] + lengths[process] * np.array([place, place + 1]) // count
            self.bounds.append((int(rows[0]), int(rows[1])))

    @property
    def key(self) -> tuple:
        return self.sharding, tuple(self.bounds)

    def of(self, device: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these rows the device reads, and the numbers of all in this process's part."""
        index = np.where(index < 0, index + self.length, index)
        outside = (index < 0) | (index >= self.length)
        if outside.any():
            raise IndexError(
                f"row {index[outside][0]} was asked for, of {self.length} rows of all processes."
            )
        begin, end = self.bounds[device]
        return (index >= begin) & (index < end), index - self.begin

    def together(self, read: Callable, row: Any, index: Array, spread: bool = True) -> Any:
        """The rows ``index``, each read by its device; a batch that they divide is spread."""
        spread = spread and index.ndim > 0 and index.size > 0
        spread = spread and index.shape[0] % len(self.bounds) == 0

        def on_device(device: Array, index: Array) -> Any:
            shapes = read_shapes(row, index)
            rows = jax.pure_callback(read, shapes, device, index, vmap_method="expand_dims")
            if spread:
                return jax.tree.map(lambda x: lax.psum_scatter(x, self.axis, tiled=True), rows)
            return lax.psum(rows, self.axis)

        return jax.shard_map(
            on_device,
            mesh=self.sharding.mesh,
            in_specs=(PartitionSpec(self.axis), PartitionSpec()),
            out_specs=PartitionSpec(self.axis) if spread else PartitionSpec(),
            check_vma=False,
        )(jnp.arange(len(self.bounds)), index)

    def everywhere(self, read: Callable, row: Any, index: Any) -> Any:
        """The rows ``index`` on all devices, for a look at them outside a compiled program."""
        return jax.jit(lambda index: self.together(read, row, index, spread=False))(index)


def read_shapes(row: Any, index: Any) -> Any:
    """The shapes of the rows ``index``, from the shape of a row."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*index.shape, *x.shape), x.dtype), row)
