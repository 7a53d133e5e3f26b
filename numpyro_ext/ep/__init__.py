"""Expectation propagation."""

from numpyro_ext.ep.closed_form import ClosedForm
from numpyro_ext.ep.importance_sampling import ImportanceSampling
from numpyro_ext.ep.nuts_projection import NUTSProjection
from numpyro_ext.ep.projections import Projected, Projection
from numpyro_ext.ep.quadrature import Quadrature

__all__ = [
    "ClosedForm",
    "ImportanceSampling",
    "NUTSProjection",
    "Projected",
    "Projection",
    "Quadrature",
]
