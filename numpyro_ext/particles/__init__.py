"""Particle inference: a guide, velocity fields as losses for ``SVI``, a kernel for ``MCMC``."""

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.ensemble import ParVI, ParVIState
from numpyro_ext.particles.guide import AutoParticles
from numpyro_ext.particles.svgd import SVGD

__all__ = ["AutoParticles", "ParVI", "ParVIState", "ParticleField", "SVGD"]
