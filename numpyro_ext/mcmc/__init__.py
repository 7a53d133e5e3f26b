"""Kernels for ``MCMC(kernel, ...)`` that take one minibatch gradient per transition."""

from numpyro_ext.mcmc.base import SGMCMCKernel
from numpyro_ext.mcmc.gradients import SVRG, ControlVariate, MinibatchGradient
from numpyro_ext.mcmc.minibatch import epoch_indices, keyed_permutation, replace_indices
from numpyro_ext.mcmc.psgld import PSGLD, PSGLDState
from numpyro_ext.mcmc.schedules import ConstantSchedule, CyclicalSchedule, PolynomialSchedule
from numpyro_ext.mcmc.sghmc import SGHMC, SGHMCState
from numpyro_ext.mcmc.sgld import SGLD, SGLDState
from numpyro_ext.mcmc.sgnht import SGNHT, SGNHTState

__all__ = [
    "ConstantSchedule",
    "ControlVariate",
    "CyclicalSchedule",
    "MinibatchGradient",
    "PSGLD",
    "PSGLDState",
    "PolynomialSchedule",
    "SGHMC",
    "SGHMCState",
    "SGLD",
    "SGLDState",
    "SGMCMCKernel",
    "SGNHT",
    "SGNHTState",
    "SVRG",
    "epoch_indices",
    "keyed_permutation",
    "replace_indices",
]
