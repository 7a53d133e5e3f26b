"""Bijections of vectors: NumPyro ``Transform`` objects that NumPyro does not have."""

from numpyro_ext.transforms.autoregressive import (
    GatedInverseAutoregressive,
    MaskedAffineAutoregressive,
)
from numpyro_ext.transforms.base import VectorTransform
from numpyro_ext.transforms.coupling import AdditiveCoupling, AffineCoupling, Coupling
from numpyro_ext.transforms.householder import HouseholderTransform
from numpyro_ext.transforms.leapfrog import LeapfrogTransform
from numpyro_ext.transforms.planar import PlanarTransform
from numpyro_ext.transforms.radial import RadialTransform
from numpyro_ext.transforms.spline import RationalQuadraticSpline, SplineCoupling

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "Coupling",
    "GatedInverseAutoregressive",
    "HouseholderTransform",
    "LeapfrogTransform",
    "MaskedAffineAutoregressive",
    "PlanarTransform",
    "RadialTransform",
    "RationalQuadraticSpline",
    "SplineCoupling",
    "VectorTransform",
]
