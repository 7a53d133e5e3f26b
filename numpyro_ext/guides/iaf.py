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

    Each flow of :class:`AutoFlowNormal` is a
    :class:`~numpyro_ext.transforms.autoregressive.GatedInverseAutoregressive` of one network with
    masked weights, over :math:`\sigma(2) = 0.88`: the networks start at zero, where all gates have
    this value and each flow is the identity.

    A draw and its density cost one pass through the networks, and the density of another point
    :math:`d` passes; :class:`~numpyro_ext.guides.maf.AutoMAFNormal` has it the other way round.

    *Where it fails.* A flow shrinks a coordinate without a limit but stretches it by at most 1.14:
    wide parts of the posterior have to come from ``scale``.

    **Reference:** *Improving variational inference with inverse autoregressive flow*, equations 14
    and 15 and algorithm 1, Kingma et al. (NIPS 2016)

    >>> guide = AutoGatedIAFNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> numpyro.handlers.seed(guide, 0)()["x2"].shape
    ()
    """

    num_flows: int = 3

    def flow(self, i: int) -> ComposeTransform:
        widen = IndependentTransform(AffineTransform(0.0, _OPEN), 1)
        return ComposeTransform([GatedInverseAutoregressive(self.net(i)), widen])
