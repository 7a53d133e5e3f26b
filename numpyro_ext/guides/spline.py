"""A normal distribution bent by rational-quadratic splines."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpyro
from numpyro.distributions.transforms import Transform

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import RationalQuadraticSpline, SplineCoupling


@dataclass(kw_only=True, eq=False, repr=False)
class AutoSplineNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of spline couplings, over all latent sites together.

    Each flow of :class:`AutoFlowNormal` is a
    :class:`~numpyro_ext.transforms.spline.SplineCoupling`: a network of the first
    :math:`\lfloor d/2 \rfloor` coordinates gives each of the others an increasing spline of
    ``num_bins`` bins on ``[-bound, bound]``.

    *Where it fails.* Beyond ``bound`` standard deviations of the base the splines do nothing, so
    the tails are normal. The density has kinks at the ends of the bins, so that ``gradient="stl"``
    or ``"dreg"`` gain less than on other flows.

    :param int num_bins: bins of each spline, at least 2.
    :param float bound: half the length of the interval in which the splines bend, in standard
        deviations of the base.

    **Reference:** *Neural spline flows*, sections 3.1 and 3.2, Durkan et al. (NeurIPS 2019)

    >>> guide = AutoSplineNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    num_flows: int = 4
    num_bins: int = 8
    bound: float = 4.0

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)
        self.num_bins = check_count("num_bins", self.num_bins, minimum=2)
        super().__post_init__()

    def flow(self, i: int) -> Transform:
        if self.latent_dim > 1:
            return self.coupling(i)
        start = jnp.zeros((1, 3 * self.num_bins - 1))
        raw: Any = numpyro.param(f"{self.prefix}_spline__{i}", start)
        return RationalQuadraticSpline.from_unconstrained(raw, self.bound)

    def coupling(self, i: int) -> SplineCoupling:
        net, split = self.net(i, outputs=3 * self.num_bins - 1)
        return SplineCoupling(net, split, num_bins=self.num_bins, bound=self.bound)
