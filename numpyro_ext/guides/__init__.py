"""Guides for ``SVI(model, guide, ...)`` beyond NumPyro's own."""

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.guides.critic import with_critic
from numpyro_ext.guides.householder import AutoHouseholderNormal
from numpyro_ext.guides.iaf import AutoGatedIAFNormal
from numpyro_ext.guides.maf import AutoMAFNormal
from numpyro_ext.guides.nice import AutoNICENormal
from numpyro_ext.guides.planar import AutoPlanarNormal
from numpyro_ext.guides.radial import AutoRadialNormal
from numpyro_ext.guides.realnvp import AutoRealNVPNormal
from numpyro_ext.guides.spline import AutoSplineNormal

__all__ = [
    "AutoGatedIAFNormal",
    "AutoHouseholderNormal",
    "AutoMAFNormal",
    "AutoNICENormal",
    "AutoPlanarNormal",
    "AutoRadialNormal",
    "AutoRealNVPNormal",
    "AutoSplineNormal",
    "Implicit",
    "IntractableDensityError",
    "with_critic",
]
