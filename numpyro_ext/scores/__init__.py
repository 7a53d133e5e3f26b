"""Kernels between samples, score estimates and discrepancies built on them: arrays, no models."""

from numpyro_ext.scores.bandwidth import median_bandwidth
from numpyro_ext.scores.denoising import DenoisingScore
from numpyro_ext.scores.discrepancy import stein_kernel_matrix
from numpyro_ext.scores.heat_equation import he_bandwidth
from numpyro_ext.scores.kde import KDEScore
from numpyro_ext.scores.kernel_ratio import KernelRatio
from numpyro_ext.scores.kernels import (
    IMQ,
    RBF,
    BaseKernel,
    Cauchy,
    Epanechnikov,
    RadialKernel,
    as_kernel,
)
from numpyro_ext.scores.linear import Linear
from numpyro_ext.scores.logistic_ratio import LogisticRatio, logistic_loss, whiten
from numpyro_ext.scores.matrix_rbf import MatrixRBF
from numpyro_ext.scores.score_matching import ScoreMatchingScore
from numpyro_ext.scores.spectral import SpectralScore
from numpyro_ext.scores.stein import SteinScore

__all__ = [
    "BaseKernel",
    "Cauchy",
    "DenoisingScore",
    "Epanechnikov",
    "IMQ",
    "KDEScore",
    "KernelRatio",
    "Linear",
    "LogisticRatio",
    "MatrixRBF",
    "RBF",
    "RadialKernel",
    "ScoreMatchingScore",
    "SpectralScore",
    "SteinScore",
    "as_kernel",
    "he_bandwidth",
    "logistic_loss",
    "median_bandwidth",
    "stein_kernel_matrix",
    "whiten",
]
