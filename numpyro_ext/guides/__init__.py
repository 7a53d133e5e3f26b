"""Guides for ``SVI(model, guide, ...)`` beyond NumPyro's own."""

from numpyro_ext.guides.realnvp import AutoRealNVPNormal
from numpyro_ext.util import Implicit, IntractableDensityError

__all__ = ["AutoRealNVPNormal", "Implicit", "IntractableDensityError"]
