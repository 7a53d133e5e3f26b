"""A normal distribution with a covariance of scales and reflections."""

from dataclasses import dataclass
from typing import Any

from jax import random
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform

from numpyro_ext.guides.flows import AutoFlowNormal
from numpyro_ext.transforms import HouseholderTransform

__all__ = ["AutoHouseholderNormal"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoHouseholderNormal(AutoFlowNormal):
    r"""A normal guide whose covariance is a diagonal one, turned by reflections.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + H_F \cdots H_1 (scale \odot e), \qquad e \sim N(0, I_d), \qquad
        H_i = I - 2 \frac{v_i v_i^T}{|v_i|^2} ,

        \log q(z) = \log N(e; 0, I) - \sum_j \log scale_j ,

    so that :math:`q = N(loc, Q\, \text{diag}(scale^2)\, Q^T)` with :math:`Q = H_F \cdots H_1`
    (:class:`~numpyro_ext.transforms.householder.HouseholderTransform`). With :math:`F \ge d - 1`
    the family contains every normal distribution. Unlike in the other flows the scales come first,
    because a reflection leaves the spherical base unchanged.

    *Where it fails.* It is a normal distribution. From equal scales, training with few reflections
    misses correlations: take twice as many as dimensions. Where the guide starts at a mode, few
    will do, because a full factor is trained inside the fixed map.

    :param int num_flows: the number F of reflections. Reflection i has the vector
        ``{prefix}_reflection__{i}``.

    The other arguments are those of :class:`AutoFlowNormal`.

    **Reference:** *Improving variational auto-encoders using Householder flow*, equations 8 and 9,
    Jakub M. Tomczak, Max Welling (NIPS workshop 2016)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro_ext.guides import AutoHouseholderNormal
        >>> def model():
        ...     x = numpyro.sample("x", dist.Normal(0, 1))
        ...     numpyro.sample("y", dist.Normal(0.8 * x, 0.6))
        >>> guide = AutoHouseholderNormal(model, init_from=None)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))["y"].shape
        (100,)
    """

    def flow(self, i: int) -> HouseholderTransform:
        # Neighbours start equal, and so cancel each other.
        start = random.normal(random.key(i // 2), (self.latent_dim,))
        v: Any = numpyro.param(f"{self.prefix}_reflection__{i}", start)
        return HouseholderTransform(v)

    def latent_distribution(self) -> dist.TransformedDistribution:
        scaling, *others = self.last_layers()
        turns: list[Transform] = [self.flow(i) for i in range(self.num_flows)]
        return dist.TransformedDistribution(self.get_base_dist(), [scaling, *turns, *others])
