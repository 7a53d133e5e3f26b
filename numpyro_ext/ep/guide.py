"""NumPyro's normal guides, set up at a start that is known."""

from typing import Any

from jax import Array, random
from numpyro.handlers import block, seed
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_ext._numpyro import StartGiven
from numpyro_ext._typing import Model, Sites

__all__ = ["guide_of"]


class _Known:
    """The start of a guide: unconstrained sites in the order in which the model samples them."""

    locs: Sites | None = None

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        return None if self.locs is None else (random.key(0), self.locs)


class FullNormal(_Known, AutoMultivariateNormal, StartGiven):
    """``AutoMultivariateNormal`` whose latent vector is in the order of the model."""


class DiagonalNormal(_Known, AutoDiagonalNormal, StartGiven):
    """``AutoDiagonalNormal`` whose latent vector is in the order of the model."""


def guide_of(model: Model, family: str, prefix: str) -> Any:
    """A guide that has not seen its model."""
    cls = FullNormal if family == "full" else DiagonalNormal
    return cls(model, prefix=prefix, init_loc_fn=init_to_median)


def fits(guide: Any, locs: Sites) -> bool:
    """Whether a guide has not seen its model, or is set up on sites of these shapes."""
    known = guide.locs or locs
    return {n: x.shape for n, x in known.items()} == {n: x.shape for n, x in locs.items()}


def start_guide(
    guide: Any, locs: Sites, local: list[str], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Set a guide up on the global sites, at these values."""
    if guide.prototype_trace is not None:
        return
    guide.locs = locs
    if local:
        guide.model = block(seed(guide.model, random.key(0)), hide=local)
    guide.set_up(*args, **kwargs)
