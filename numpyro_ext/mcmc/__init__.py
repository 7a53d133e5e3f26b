"""Kernels for ``MCMC(kernel, ...)`` that take one minibatch gradient per transition."""

from numpyro_ext._model.normal import Whitening
from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.base import Estimate, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.from_states import mcmc_from_states
from numpyro_ext.mcmc.geodesic import (
    GeodesicSGHMC,
    GeodesicSGHMCState,
    GeodesicSGNHT,
    GeodesicSGNHTState,
)
from numpyro_ext.mcmc.geometry import ExpandedMean
from numpyro_ext.mcmc.gradients import SVRG, ControlVariate, MinibatchGradient
from numpyro_ext.mcmc.kernel_hmc import KernelHMC, KernelHMCState
from numpyro_ext.mcmc.psgld import PSGLD, PSGLDState
from numpyro_ext.mcmc.recipe import RecipeKernel, RecipeKernelState
from numpyro_ext.mcmc.schedules import CyclicalSchedule, PolynomialSchedule
from numpyro_ext.mcmc.settings import Settings
from numpyro_ext.mcmc.sghmc import SGHMC, SGHMCState
from numpyro_ext.mcmc.sgld import SGLD, SGLDState
from numpyro_ext.mcmc.sgnht import SGNHT, SGNHTState
from numpyro_ext.mcmc.sgrld import SGRLD
from numpyro_ext.mcmc.simplex import GammaSimplexReparam, simplex_langevin_step
from numpyro_ext.mcmc.sphere import SphereReparam

__all__ = [
    "ControlVariate",
    "CyclicalSchedule",
    "Estimate",
    "ExpandedMean",
    "GammaSimplexReparam",
    "GeodesicSGHMC",
    "GeodesicSGHMCState",
    "GeodesicSGNHT",
    "GeodesicSGNHTState",
    "KernelHMC",
    "KernelHMCState",
    "MinibatchGradient",
    "PSGLD",
    "PSGLDState",
    "PolynomialSchedule",
    "Potential",
    "RecipeKernel",
    "RecipeKernelState",
    "SGHMC",
    "SGHMCState",
    "SGLD",
    "SGLDState",
    "SGMCMCKernel",
    "SGNHT",
    "SGNHTState",
    "SGRLD",
    "SVRG",
    "Settings",
    "SphereReparam",
    "Transition",
    "Whitening",
    "kernel_state",
    "mcmc_from_states",
    "simplex_langevin_step",
]
