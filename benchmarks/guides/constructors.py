"""The guides of the tables, each with its objective. A new guide joins by one line in `ROWS`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from numpyro.infer import ELBO, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoGatedIAFNormal,
    AutoHouseholderNormal,
    AutoHVI,
    AutoImplicit,
    AutoMAFNormal,
    AutoMixtureNormal,
    AutoNICENormal,
    AutoPlanarNormal,
    AutoRadialNormal,
    AutoRealNVPNormal,
    AutoSemiImplicit,
    AutoSplineNormal,
)
from numpyro_ext.objectives import VRELBO, ImplicitELBO, MixtureELBO, SemiImplicitELBO


class Row(NamedTuple):
    """``guide(model, init_loc_fn=...)``, trained by ``objective(num_particles)``."""

    guide: Callable[..., Any]
    objective: Callable[[int], ELBO] = Trace_ELBO
    """Its name in the table is that of its guide, with what is in brackets."""
    num_particles: int | None = None
    """Where the number of particles of the others would be too small."""
    is_bound: bool = False
    """Whether minus the loss is a bound, which stands for the ELBO of a guide without a density."""
    start: Callable[..., Any] | None = None
    """A normal guide that is fitted first, as long and in the same way, for `init_from`."""


def path(num_particles: int) -> ELBO:
    """The ELBO with the path derivative, which evaluates log q at the draws a second time."""
    return VRELBO(1.0, num_particles, gradient="stl")


def half(num_particles: int) -> ELBO:
    """The bound of order 0.5, which covers more than the ELBO does."""
    return VRELBO(0.5, num_particles, gradient="dreg")


NORMAL = AutoMultivariateNormal
WIDE = partial(AutoRealNVPNormal, num_flows=6, init_scale=1.0)
ROWS: dict[str, Row] = {
    "NumPyro AutoNormal": Row(AutoNormal),
    "NumPyro AutoMultivariateNormal": Row(AutoMultivariateNormal),
    "NumPyro AutoMultivariateNormal (order 0.5)": Row(AutoMultivariateNormal, half),
    "NumPyro AutoIAFNormal": Row(AutoIAFNormal),
    "NumPyro AutoIAFNormal (path)": Row(AutoIAFNormal, path),
    "NumPyro AutoBNAFNormal": Row(AutoBNAFNormal),
    "AutoHouseholderNormal": Row(AutoHouseholderNormal),
    "AutoPlanarNormal": Row(AutoPlanarNormal),
    "AutoRadialNormal": Row(AutoRadialNormal),
    "AutoNICENormal": Row(AutoNICENormal),
    "AutoRealNVPNormal": Row(AutoRealNVPNormal),
    "AutoRealNVPNormal (path)": Row(AutoRealNVPNormal, path),
    "AutoRealNVPNormal (6 flows, init_scale 1, path)": Row(WIDE, path),
    "AutoRealNVPNormal (init_from, path)": Row(AutoRealNVPNormal, path, start=NORMAL),
    "AutoRealNVPNormal (init_from, order 0.5)": Row(AutoRealNVPNormal, half, start=NORMAL),
    "AutoMAFNormal": Row(AutoMAFNormal),
    "AutoMAFNormal (3 flows, path)": Row(partial(AutoMAFNormal, num_flows=3), path),
    "AutoGatedIAFNormal": Row(AutoGatedIAFNormal),
    "AutoSplineNormal": Row(AutoSplineNormal),
    "AutoSplineNormal (path)": Row(AutoSplineNormal, path),
    "AutoMixtureNormal": Row(AutoMixtureNormal),
    "AutoMixtureNormal (stratified)": Row(AutoMixtureNormal, MixtureELBO),
    "AutoImplicit": Row(AutoImplicit, ImplicitELBO, num_particles=64),
    "AutoSemiImplicit": Row(AutoSemiImplicit, SemiImplicitELBO, is_bound=True),
    "AutoAuxiliary": Row(AutoAuxiliary, is_bound=True),
    "AutoHVI": Row(AutoHVI, is_bound=True),
}
