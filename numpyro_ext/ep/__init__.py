"""Expectation propagation: normal approximations by local moment matching, as NumPyro guides."""

from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.distributed import DAEP, DSEP, DistributedEP, StochasticDistributedEP
from numpyro_ext.ep.ep import ADF, EP
from numpyro_ext.ep.pbp.engine import PBP, PBPRunResult
from numpyro_ext.ep.pbp.epochs import PBPState
from numpyro_ext.ep.projection import ClosedForm, Projected, Projection
from numpyro_ext.ep.quadrature import Quadrature
from numpyro_ext.ep.sampling import ImportanceSampling, NUTSProjection
from numpyro_ext.ep.state import EPRunResult, EPState, Report
from numpyro_ext.ep.stochastic import StochasticEP

__all__ = [
    "ADF",
    "ClosedForm",
    "DAEP",
    "DSEP",
    "DistributedEP",
    "EP",
    "EPEngine",
    "EPRunResult",
    "EPState",
    "ImportanceSampling",
    "NUTSProjection",
    "PBP",
    "PBPRunResult",
    "PBPState",
    "Projected",
    "Projection",
    "Quadrature",
    "Report",
    "StochasticDistributedEP",
    "StochasticEP",
]
