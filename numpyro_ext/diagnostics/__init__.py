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
from numpyro_ext.diagnostics.table import Diagnosis

__all__ = [
    "Diagnosis",
    "EvidenceBounds",
    "InferenceWarning",
    "ParetoKhat",
    "diagnose",
    "evidence_bounds",
    "full_data",
    "held_out_log_likelihood",
    "kernel_stein_discrepancy",
    "maximum_mean_discrepancy",
    "pareto_khat",
    "restarts",
    "to_arviz",
]
