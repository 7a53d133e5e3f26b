"""A normal distribution under gated inverse autoregressive flows."""

from dataclasses import dataclass
import math

from numpyro.distributions.transforms import AffineTransform, ComposeTransform, IndependentTransform

from numpyro_ext.guides.flows import AutoregressiveFlowNormal
from numpyro_ext.transforms import GatedInverseAutoregressive

_OPEN = 1.0 + math.exp(-2.0)
"""The inverse of the gate where a network gives zeros."""


@dataclass(kw_only=True, eq=False, repr=False)
class AutoGatedIAFNormal(AutoregressiveFlowNormal):
    r"""A normalizing-flow guide of gated inverse autoregressive flows, over all latent sites.

    The flows of :class:`AutoFlowNormal` are

    .. math::
        f_i(x) = \frac{g_i \odot x + (1 - g_i) \odot m_i}{\sigma(2)}, \qquad
        \log|\det f_i'| = \sum_j \log \frac{g_{ij}}{\sigma(2)} ,

    where the shifts :math:`m_i` and the gates :math:`g_i`, between 0 and 1, are functions of the
    coordinates before each, all from one network with masked weights
    (:class:`~numpyro_ext.transforms.autoregressive.GatedInverseAutoregressive`). The order of the
    coordinates is reversed between flows. The networks start at zero, where all gates are
    :math:`\sigma(2) = 0.88`, and each flow is the identity.

    A draw and its density cost one pass through the networks, and the density of another point
    :math:`d` passes; :class:`~numpyro_ext.guides.maf.AutoMAFNormal` has it the other way round.

    *Where it fails.* A flow shrinks a coordinate without a limit but stretches it by at most 1.14:
    wide parts of the posterior have to come from ``scale``.

    :param hidden_dims: widths of the hidden layers of each network (ELU).

    **Reference:** *Improving variational inference with inverse autoregressive flow*, equations 14
    and 15 and algorithm 1, Kingma et al. (NIPS 2016)

    >>> guide = AutoGatedIAFNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    num_flows: int = 3

    def flow(self, i: int) -> ComposeTransform:
        widen = IndependentTransform(AffineTransform(0.0, _OPEN), 1)
        return ComposeTransform([GatedInverseAutoregressive(self.net(i)), widen])
