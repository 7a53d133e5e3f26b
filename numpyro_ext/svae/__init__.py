"""Structured variational auto-encoders: graphical models with neural likelihoods."""

from numpyro_ext.svae.elbo import SVAEELBO
from numpyro_ext.svae.guide import SVAEGuide
from numpyro_ext.svae.local_inference.base import (
    LocalInference,
    LocalInfo,
    LocalPosterior,
    global_statistics,
    surrogate_elbo,
)
from numpyro_ext.svae.local_inference.cycle import CycleEP, CycleMeanField
from numpyro_ext.svae.local_inference.cycle_bp import CycleBPResult, cycle_bp
from numpyro_ext.svae.local_inference.fixed import FixedGaussian
from numpyro_ext.svae.local_inference.lds import LDS
from numpyro_ext.svae.local_inference.slds import SLDSMeanField
from numpyro_ext.svae.local_inference.states import GMMEP, HMMEP, GMMMeanField, HMMMeanField
from numpyro_ext.svae.missing import allow_missing
from numpyro_ext.svae.networks import decoder_network, recognition_network
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential

__all__ = [
    "CycleBPResult",
    "CycleEP",
    "CycleMeanField",
    "FixedGaussian",
    "GMMEP",
    "GMMMeanField",
    "GaussianPotential",
    "HMMEP",
    "HMMMeanField",
    "LDS",
    "LocalInference",
    "LocalInfo",
    "LocalPosterior",
    "MixturePotential",
    "SLDSMeanField",
    "SVAEELBO",
    "SVAEGuide",
    "allow_missing",
    "cycle_bp",
    "decoder_network",
    "global_statistics",
    "recognition_network",
    "surrogate_elbo",
]
