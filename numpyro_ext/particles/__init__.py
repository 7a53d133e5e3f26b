"""Particle inference: a guide, velocity fields as losses for ``SVI``, a kernel for ``MCMC``."""

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.blob import Blob
from numpyro_ext.particles.dynamics import PSGHMC
from numpyro_ext.particles.ensemble import ParVI, ParVIState
from numpyro_ext.particles.gfsd import GFSD
from numpyro_ext.particles.gfsf import GFSF
from numpyro_ext.particles.guide import AutoParticles
from numpyro_ext.particles.langevin import EnsembleLangevin, EnsembleLangevinState
from numpyro_ext.particles.regularized_svgd import RegularizedSVGD
from numpyro_ext.particles.riemannian_svgd import RiemannianSVGD
from numpyro_ext.particles.stein_newton import SteinNewton
from numpyro_ext.particles.step import ParticleStepState, particle_step
from numpyro_ext.particles.summary import print_particles
from numpyro_ext.particles.svgd import SVGD

__all__ = [
    "AutoParticles",
    "Blob",
    "EnsembleLangevin",
    "EnsembleLangevinState",
    "GFSD",
    "GFSF",
    "PSGHMC",
    "ParVI",
    "ParVIState",
    "ParticleField",
    "ParticleStepState",
    "RegularizedSVGD",
    "RiemannianSVGD",
    "SVGD",
    "SteinNewton",
    "particle_step",
    "print_particles",
]
