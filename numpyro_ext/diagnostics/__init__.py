"""Judging a result: conversion for ArviZ, and the diagnostics that ArviZ does not have."""

from numpyro_ext._checks import InferenceWarning
from numpyro_ext.diagnostics.arviz import site_names, to_arviz
from numpyro_ext.diagnostics.calibration import Calibration, regression_calibration
from numpyro_ext.diagnostics.classification import (
    PredictiveUncertainty,
    ReliabilityBins,
    brier_score,
    expected_calibration_error,
    predictive_uncertainty,
    reliability_bins,
)
from numpyro_ext.diagnostics.diagnosis import diagnose
from numpyro_ext.diagnostics.discrepancy import (
    kernel_stein_discrepancy,
    maximum_mean_discrepancy,
)
from numpyro_ext.diagnostics.evidence import EvidenceBounds, evidence_bounds
from numpyro_ext.diagnostics.full_data import full_data
from numpyro_ext.diagnostics.held_out import held_out_log_likelihood
from numpyro_ext.diagnostics.plots import plot_diagnosis
from numpyro_ext.diagnostics.predictive_density import (
    gaussian_log_density_bound,
    log_predictive_density,
)
from numpyro_ext.diagnostics.predictive_scores import (
    ClassificationScores,
    RegressionScores,
    predictive_scores,
)
from numpyro_ext.diagnostics.psis import ParetoKhat, pareto_khat
from numpyro_ext.diagnostics.restarts import restarts
from numpyro_ext.diagnostics.simulation import SBCResult, simulation_based_calibration
from numpyro_ext.diagnostics.simulation_fits import fit_engine, fit_mcmc, fit_svi
from numpyro_ext.diagnostics.table import Diagnosis
from numpyro_ext.diagnostics.weighted_ess import weighted_ess

__all__ = [
    "Calibration",
    "ClassificationScores",
    "Diagnosis",
    "EvidenceBounds",
    "InferenceWarning",
    "ParetoKhat",
    "PredictiveUncertainty",
    "RegressionScores",
    "ReliabilityBins",
    "SBCResult",
    "brier_score",
    "diagnose",
    "evidence_bounds",
    "expected_calibration_error",
    "fit_engine",
    "fit_mcmc",
    "fit_svi",
    "full_data",
    "gaussian_log_density_bound",
    "held_out_log_likelihood",
    "kernel_stein_discrepancy",
    "log_predictive_density",
    "maximum_mean_discrepancy",
    "pareto_khat",
    "plot_diagnosis",
    "predictive_scores",
    "predictive_uncertainty",
    "regression_calibration",
    "reliability_bins",
    "restarts",
    "simulation_based_calibration",
    "site_names",
    "to_arviz",
    "weighted_ess",
]
