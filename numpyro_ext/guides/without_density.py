"""The base of guides whose latent vector has draws, but no density of its own."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from jax import Array
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext._typing import Params
from numpyro_ext.guides.base import AutoAtModes

__all__ = ["AutoWithoutDensity"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoWithoutDensity(AutoAtModes):
    """Base of the guides that draw the latent vector along with auxiliary sites.

    A subclass writes ``sample_vector``; a call for the density of the vector alone is an error.
    """

    @abstractmethod
    def sample_vector(self, sample_shape: tuple[int, ...], args: tuple, kwargs: Params) -> Array:
        """Latent vectors ``(*sample_shape, latent_dim)``, and the guide's own sites on the way."""

    def loc_and_scale(self) -> tuple[Any, Any, list[Transform]]:
        """The trained location and standard deviations, and the fixed map after them, if any."""
        loc, scale, fixed, _ = self.begin()
        loc, positive = numpyro.param(f"{self.prefix}_loc", loc), constraints.softplus_positive
        return loc, numpyro.param(f"{self.prefix}_scale", scale, constraint=positive), fixed

    def latent_distribution(self) -> dist.Distribution:
        raise IntractableDensityError(
            f"{type(self).__name__} has no density of its latent vector alone; use its draws, by"
            " sample_posterior, or a guide that has one, such as AutoRealNVPNormal."
        )

    def get_base_dist(self) -> dist.Distribution:
        return self.latent_distribution()  # there is none
