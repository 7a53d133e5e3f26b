"""Kernels between samples, score estimates and discrepancies built on them: arrays, no models."""

from numpyro_ext.scores.bandwidth import median_bandwidth
from numpyro_ext.scores.base import BaseKernel, RadialKernel, as_kernel
from numpyro_ext.scores.discrepancy import stein_kernel_matrix
from numpyro_ext.scores.heat_equation import he_bandwidth, he_objective, he_step
from numpyro_ext.scores.kde import KDEScore
from numpyro_ext.scores.kernels import IMQ, RBF
from numpyro_ext.scores.linear import Linear
from numpyro_ext.scores.matrix_rbf import MatrixRBF
from numpyro_ext.scores.stein import SteinScore

__all__ = [
    "BaseKernel",
    "IMQ",
    "KDEScore",
    "Linear",
    "MatrixRBF",
    "RBF",
    "RadialKernel",
    "SteinScore",
    "as_kernel",
    "he_bandwidth",
    "he_objective",
    "he_step",
    "median_bandwidth",
    "stein_kernel_matrix",
]
