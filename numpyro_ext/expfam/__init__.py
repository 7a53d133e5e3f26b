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
from numpyro_ext.expfam.fixed_point import FixedPointResult, fixed_point
from numpyro_ext.expfam.gamma import Gamma, GammaMean, GammaNatural, GammaStandard
from numpyro_ext.expfam.gaussian import Gaussian, GaussianMean, GaussianNatural, GaussianStandard
from numpyro_ext.expfam.gaussian_chain import (
    GaussianChain,
    GaussianChainMean,
    GaussianChainNatural,
    GaussianChainStandard,
)
from numpyro_ext.expfam.inverse_gamma import (
    InverseGamma,
    InverseGammaMean,
    InverseGammaNatural,
    InverseGammaStandard,
)
from numpyro_ext.expfam.leaves import divide, multiply
from numpyro_ext.expfam.markov_chain import (
    MarkovChain,
    MarkovChainMean,
    MarkovChainNatural,
    MarkovChainStandard,
)
from numpyro_ext.expfam.mniw import MNIW, MNIWMean, MNIWNatural, MNIWStandard
from numpyro_ext.expfam.natural_gradient import (
    natural_gradient_of,
    straight_through_kl,
    straight_through_mean,
)
from numpyro_ext.expfam.niw import NIW, NIWMean, NIWNatural, NIWStandard
from numpyro_ext.expfam.poisson import Poisson, PoissonMean, PoissonNatural, PoissonStandard
from numpyro_ext.expfam.wishart import Wishart, WishartMean, WishartNatural, WishartStandard

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
    "FixedPointResult",
    "Gamma",
    "GammaMean",
    "GammaNatural",
    "GammaStandard",
    "Gaussian",
    "GaussianChain",
    "GaussianChainMean",
    "GaussianChainNatural",
    "GaussianChainStandard",
    "GaussianMean",
    "GaussianNatural",
    "GaussianStandard",
    "InverseGamma",
    "InverseGammaMean",
    "InverseGammaNatural",
    "InverseGammaStandard",
    "LocationFamily",
    "MNIW",
    "MNIWMean",
    "MNIWNatural",
    "MNIWStandard",
    "MarkovChain",
    "MarkovChainMean",
    "MarkovChainNatural",
    "MarkovChainStandard",
    "NIW",
    "NIWMean",
    "NIWNatural",
    "NIWStandard",
    "Poisson",
    "PoissonMean",
    "PoissonNatural",
    "PoissonStandard",
    "Wishart",
    "WishartMean",
    "WishartNatural",
    "WishartStandard",
    "divide",
    "fixed_point",
    "multiply",
    "natural_gradient_of",
    "straight_through_kl",
    "straight_through_mean",
]
