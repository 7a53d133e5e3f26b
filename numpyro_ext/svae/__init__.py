"""Structured variational auto-encoders: graphical models with neural likelihoods."""

from numpyro_ext.svae.elbo import SVAEELBO
from numpyro_ext.svae.guide import SVAEGuide
from numpyro_ext.svae.local_inference import (
    GMMEP,
    HMMEP,
    LDS,
    CycleBPResult,
    CycleEP,
    CycleMeanField,
    FixedGaussian,
    GMMMeanField,
    HMMMeanField,
    LocalInference,
    LocalInfo,
    LocalPosterior,
    SLDSMeanField,
    cycle_bp,
    global_statistics,
    surrogate_elbo,
)
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
