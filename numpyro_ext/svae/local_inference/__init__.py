"""Rules that make the local part of q from expected statistics and potentials."""

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
from numpyro_ext.svae.local_inference.gmm import GMMEP, GMMMeanField
from numpyro_ext.svae.local_inference.hmm import HMMEP, HMMMeanField
from numpyro_ext.svae.local_inference.lds import LDS
from numpyro_ext.svae.local_inference.slds import SLDSMeanField

__all__ = [
    "CycleBPResult",
    "CycleEP",
    "CycleMeanField",
    "FixedGaussian",
    "GMMEP",
    "GMMMeanField",
    "HMMEP",
    "HMMMeanField",
    "LDS",
    "LocalInference",
    "LocalInfo",
    "LocalPosterior",
    "SLDSMeanField",
    "cycle_bp",
    "global_statistics",
    "surrogate_elbo",
]
