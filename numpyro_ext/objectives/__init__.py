"""Divergences and bounds for ``SVI(..., loss=)``, in the shape of ``numpyro.infer.Trace_ELBO``."""

from numpyro_ext.objectives.amortized import AmortizedMCMC
from numpyro_ext.objectives.auxiliary import AuxiliaryELBO
from numpyro_ext.objectives.base import Objective, count_steps
from numpyro_ext.objectives.black_box_alpha import BBAlphaELBO
from numpyro_ext.objectives.chi import ChiUpperBound
from numpyro_ext.objectives.curvature import CurvatureELBO
from numpyro_ext.objectives.density_ratio import DensityRatioELBO
from numpyro_ext.objectives.evaluation import log_weights
from numpyro_ext.objectives.f_divergence import FDivergence, TailAdaptive
from numpyro_ext.objectives.filtering import FilteringELBO
from numpyro_ext.objectives.fisher import FisherDivergence
from numpyro_ext.objectives.implicit import ImplicitELBO
from numpyro_ext.objectives.kl_weights import KLWeightedELBO, minibatch_kl_weights
from numpyro_ext.objectives.mixture import MixtureELBO
from numpyro_ext.objectives.nested import NestedVRELBO
from numpyro_ext.objectives.posterior_regularized import PosteriorRegularizedELBO
from numpyro_ext.objectives.renyi import IWELBO, VRELBO
from numpyro_ext.objectives.semi_implicit import SemiImplicitELBO
from numpyro_ext.objectives.stein_discrepancy import SteinDiscrepancy
from numpyro_ext.objectives.symmetric_kl import SymmetricKL
from numpyro_ext.objectives.taylor_proxy import taylor_proxy
from numpyro_ext.objectives.thermodynamic import ThermodynamicELBO
from numpyro_ext.objectives.vimco import VIMCO
from numpyro_ext.objectives.wake_sleep import ReweightedWakeSleep, WakeSleep

__all__ = [
    "AmortizedMCMC",
    "AuxiliaryELBO",
    "BBAlphaELBO",
    "ChiUpperBound",
    "CurvatureELBO",
    "DensityRatioELBO",
    "FDivergence",
    "FilteringELBO",
    "FisherDivergence",
    "IWELBO",
    "ImplicitELBO",
    "KLWeightedELBO",
    "MixtureELBO",
    "NestedVRELBO",
    "Objective",
    "PosteriorRegularizedELBO",
    "ReweightedWakeSleep",
    "SemiImplicitELBO",
    "SteinDiscrepancy",
    "SymmetricKL",
    "TailAdaptive",
    "ThermodynamicELBO",
    "VIMCO",
    "VRELBO",
    "WakeSleep",
    "count_steps",
    "log_weights",
    "minibatch_kl_weights",
    "taylor_proxy",
]
