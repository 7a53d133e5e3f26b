"""Particle inference: a guide, velocity fields as losses for ``SVI``, a kernel for ``MCMC``."""

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.blob import Blob
from numpyro_ext.particles.ensemble import ParVI, ParVIState
from numpyro_ext.particles.gfsd import GFSD
from numpyro_ext.particles.gfsf import GFSF
from numpyro_ext.particles.guide import AutoParticles
from numpyro_ext.particles.regularized_svgd import RegularizedSVGD
from numpyro_ext.particles.step import ParticleStepState, particle_step
from numpyro_ext.particles.svgd import SVGD

__all__ = [
    "AutoParticles",
    "Blob",
    "GFSD",
    "GFSF",
    "ParVI",
    "ParVIState",
    "ParticleField",
    "ParticleStepState",
    "RegularizedSVGD",
    "SVGD",
    "particle_step",
]
