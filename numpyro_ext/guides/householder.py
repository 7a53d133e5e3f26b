"""A normal distribution with a covariance of scales and reflections."""

from dataclasses import dataclass
from typing import Any

from jax import random
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform

from numpyro_ext.guides.flows import AutoFlowNormal
from numpyro_ext.transforms import HouseholderTransform


@dataclass(kw_only=True, eq=False, repr=False)
class AutoHouseholderNormal(AutoFlowNormal):
    r"""A normal guide with a diagonal covariance that reflections turn.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::
        z = loc + H_F \cdots H_1 (scale \odot e), \qquad e \sim N(0, I_d), \qquad
        H_i = I - 2 \frac{v_i v_i^T}{|v_i|^2} ,

        \log q(z) = \log N(e; 0, I) - \sum_j \log scale_j ,

    a normal with the covariance :math:`Q\, \text{diag}(scale^2)\, Q^T`, :math:`Q = H_F \cdots H_1`
    (:class:`~numpyro_ext.transforms.householder.HouseholderTransform`). With :math:`F \ge d - 1`
    the family contains every normal distribution.

    *Where it fails.* From equal scales, training with few reflections misses correlations: take
    twice as many as dimensions. From a mode few will do.

    :param int num_flows: the number F of reflections. Reflection i has the vector
        ``{prefix}_reflection__{i}``.

    **Reference:** *Improving variational auto-encoders using Householder flow*, equations 8 and 9,
    Tomczak and Welling (NIPS workshop 2016)

    >>> guide = AutoHouseholderNormal(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["y"].shape
    (9,)
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
