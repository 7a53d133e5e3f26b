"""Kernels between samples and discrepancies built on them: mathematics on arrays, no models."""

from numpyro_ext.scores.bandwidth import median_bandwidth
from numpyro_ext.scores.base import BaseKernel, RadialKernel, as_kernel
from numpyro_ext.scores.discrepancy import kernel_stein_discrepancy, mmd, stein_kernel_matrix
from numpyro_ext.scores.kernels import IMQ, RBF

__all__ = [
    "BaseKernel",
    "IMQ",
    "RBF",
    "RadialKernel",
    "as_kernel",
    "kernel_stein_discrepancy",
    "median_bandwidth",
    "mmd",
    "stein_kernel_matrix",
]
