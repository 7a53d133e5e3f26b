"""Data that are not in one array of JAX: rows on the host or on disk, and batches of a loader."""

from numpyro_ext.data.batches import Batches
from numpyro_ext.data.host_array import HostArray
from numpyro_ext.data.shuffled import shuffled_copy

__all__ = ["Batches", "HostArray", "shuffled_copy"]
