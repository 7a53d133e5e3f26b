"""Judging a result: conversion for ArviZ, and the diagnostics that ArviZ does not have."""

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.diagnostics.arviz import to_arviz
from numpyro_ext.diagnostics.diagnosis import diagnose
from numpyro_ext.diagnostics.discrepancy import (
    kernel_stein_discrepancy,
    maximum_mean_discrepancy,
)
from numpyro_ext.diagnostics.evidence import EvidenceBounds, evidence_bounds
from numpyro_ext.diagnostics.full_data import full_data
from numpyro_ext.diagnostics.held_out import held_out_log_likelihood
from numpyro_ext.diagnostics.psis import ParetoKhat, pareto_khat
from numpyro_ext.diagnostics.restarts import restarts
from numpyro_ext.diagnostics.simulation import SBCResult, simulation_based_calibration
from numpyro_ext.diagnostics.simulation_fits import fit_engine, fit_mcmc, fit_svi
from numpyro_ext.diagnostics.table import Diagnosis
from numpyro_ext.diagnostics.weighted_ess import weighted_ess

__all__ = [
    "Diagnosis",
    "EvidenceBounds",
    "InferenceWarning",
    "ParetoKhat",
    "SBCResult",
    "diagnose",
    "evidence_bounds",
    "fit_engine",
    "fit_mcmc",
    "fit_svi",
    "full_data",
    "held_out_log_likelihood",
    "kernel_stein_discrepancy",
    "maximum_mean_discrepancy",
    "pareto_khat",
    "restarts",
    "simulation_based_calibration",
    "to_arviz",
    "weighted_ess",
]
