"""Exponential families and natural gradients: parameters go in and come out, no models."""

from numpyro_ext.expfam.base import ExponentialFamily, LocationFamily
from numpyro_ext.expfam.bernoulli import (
    Bernoulli,
    BernoulliMean,
    BernoulliNatural,
    BernoulliStandard,
)
from numpyro_ext.expfam.beta import Beta, BetaMean, BetaNatural, BetaStandard
from numpyro_ext.expfam.categorical import (
    Categorical,
    CategoricalMean,
    CategoricalNatural,
    CategoricalStandard,
)
from numpyro_ext.expfam.dirichlet import (
    Dirichlet,
    DirichletMean,
    DirichletNatural,
    DirichletStandard,
)
from numpyro_ext.expfam.gaussian import Gaussian, GaussianMean, GaussianNatural, GaussianStandard
from numpyro_ext.expfam.leaves import divide, multiply
from numpyro_ext.expfam.mniw import MNIW, MNIWMean, MNIWNatural, MNIWStandard
from numpyro_ext.expfam.niw import NIW, NIWMean, NIWNatural, NIWStandard

__all__ = [
    "Bernoulli",
    "BernoulliMean",
    "BernoulliNatural",
    "BernoulliStandard",
    "Beta",
    "BetaMean",
    "BetaNatural",
    "BetaStandard",
    "Categorical",
    "CategoricalMean",
    "CategoricalNatural",
    "CategoricalStandard",
    "Dirichlet",
    "DirichletMean",
    "DirichletNatural",
    "DirichletStandard",
    "ExponentialFamily",
    "Gaussian",
    "GaussianMean",
    "GaussianNatural",
    "GaussianStandard",
    "LocationFamily",
    "MNIW",
    "MNIWMean",
    "MNIWNatural",
    "MNIWStandard",
    "NIW",
    "NIWMean",
    "NIWNatural",
    "NIWStandard",
    "divide",
    "multiply",
]
