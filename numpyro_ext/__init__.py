"""Approximate inference that NumPyro does not have, in the shapes that NumPyro already takes."""

from numpyro_ext import (
    diagnostics,
    ep,
    expfam,
    guides,
    mcmc,
    objectives,
    optim,
    particles,
    saving,
    scores,
    svae,
    targets,
    transforms,
)

__version__ = "0.2.0"

__all__ = [
    "diagnostics",
    "ep",
    "expfam",
    "guides",
    "mcmc",
    "objectives",
    "optim",
    "particles",
    "saving",
    "scores",
    "svae",
    "targets",
    "transforms",
]
