"""Guides for ``SVI(model, guide, ...)`` beyond NumPyro's own."""

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.guides.auxiliary import AutoAuxiliary
from numpyro_ext.guides.critic import with_critic
from numpyro_ext.guides.hamiltonian import AutoHVI
from numpyro_ext.guides.householder import AutoHouseholderNormal
from numpyro_ext.guides.maf import AutoMAFNormal
from numpyro_ext.guides.nice import AutoNICENormal
from numpyro_ext.guides.planar import AutoPlanarNormal
from numpyro_ext.guides.radial import AutoRadialNormal
from numpyro_ext.guides.realnvp import AutoRealNVPNormal
from numpyro_ext.guides.reverse import with_reverse
from numpyro_ext.guides.semi_implicit import AutoSemiImplicit
from numpyro_ext.guides.spline import AutoSplineNormal

__all__ = [
    "AutoAuxiliary",
    "AutoHVI",
    "AutoHouseholderNormal",
    "AutoMAFNormal",
    "AutoNICENormal",
    "AutoPlanarNormal",
    "AutoRadialNormal",
    "AutoRealNVPNormal",
    "AutoSemiImplicit",
    "AutoSplineNormal",
    "Implicit",
    "IntractableDensityError",
    "with_critic",
    "with_reverse",
]
