"""Models with known answers, and real data, for tests, examples, benchmarks and first attempts."""

from numpyro_ext.targets.latent_cycle import LatentCycle, crosshair, latent_cycle, swirl
from numpyro_ext.targets.models import (
    NormalMeanAnswer,
    banana,
    banana_potential,
    bayesian_mlp,
    logistic_regression,
    normal_mean,
    normal_mean_answer,
    scale_mixture,
)
from numpyro_ext.targets.pinwheel import pinwheel
from numpyro_ext.targets.real_data import RegressionSplit, breast_cancer, regression_data

__all__ = [
    "LatentCycle",
    "NormalMeanAnswer",
    "RegressionSplit",
    "banana",
    "banana_potential",
    "bayesian_mlp",
    "breast_cancer",
    "crosshair",
    "latent_cycle",
    "logistic_regression",
    "normal_mean",
    "normal_mean_answer",
    "pinwheel",
    "regression_data",
    "scale_mixture",
    "swirl",
]
