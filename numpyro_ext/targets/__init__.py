"""Models with known answers, and real data that installed packages carry.

They serve tests, examples and benchmarks, and trials of new methods. No other part of the package
imports this module.
"""

from numpyro_ext.targets.banana import banana, banana_potential
from numpyro_ext.targets.bayesian_mlp import bayesian_mlp
from numpyro_ext.targets.breast_cancer import breast_cancer
from numpyro_ext.targets.latent_cycle import LatentCycle, crosshair, latent_cycle, swirl
from numpyro_ext.targets.logistic_regression import logistic_regression
from numpyro_ext.targets.normal_mean import NormalMeanAnswer, normal_mean, normal_mean_answer
from numpyro_ext.targets.pinwheel import pinwheel
from numpyro_ext.targets.regression_data import RegressionSplit, regression_data
from numpyro_ext.targets.scale_mixture import scale_mixture

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
