"""Particle-based variational inference: a guide, fields that are losses for ``SVI``, and a kernel for ``MCMC``."""

from numpyro_ext.particles.ensemble import ParVI, ParVIState
from numpyro_ext.particles.fields import ParticleField
from numpyro_ext.particles.guide import AutoParticles
from numpyro_ext.particles.svgd import SVGD

__all__ = ["AutoParticles", "ParVI", "ParVIState", "ParticleField", "SVGD"]
