"""Guides for ``SVI(model, guide, ...)`` beyond NumPyro's own."""

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.guides.realnvp import AutoRealNVPNormal

__all__ = ["AutoRealNVPNormal", "Implicit", "IntractableDensityError"]
