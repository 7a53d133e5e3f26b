"""Kernels between samples, score estimates and discrepancies built on them: arrays, no models."""

from numpyro_ext.scores.bandwidth import median_bandwidth
from numpyro_ext.scores.base import BaseKernel, RadialKernel, as_kernel
from numpyro_ext.scores.discrepancy import stein_kernel_matrix
from numpyro_ext.scores.kde import KDEScore
from numpyro_ext.scores.kernels import IMQ, RBF
from numpyro_ext.scores.stein import SteinScore

__all__ = [
    "BaseKernel",
    "IMQ",
    "KDEScore",
    "RBF",
    "RadialKernel",
    "SteinScore",
    "as_kernel",
    "median_bandwidth",
    "stein_kernel_matrix",
]
