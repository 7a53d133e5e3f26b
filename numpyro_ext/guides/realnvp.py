"""A normal distribution bent by affine coupling layers."""

from dataclasses import dataclass

from numpyro_ext._checks import check_positive
from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import AffineCoupling


@dataclass(kw_only=True, eq=False, repr=False)
class AutoRealNVPNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of affine couplings, over all latent sites together.

    Each flow :math:`f_i` of :class:`AutoFlowNormal` is an
    :class:`~numpyro_ext.transforms.coupling.AffineCoupling`: a network of the first
    :math:`\lfloor d/2 \rfloor` coordinates a gives log-scales :math:`s_i` and shifts :math:`t_i`
    for the others,

    .. math::
        f_i(a, b) = (a,\; b \odot e^{s_i(a)} + t_i(a)), \qquad \log|\det f_i'| = \sum_j s_{ij}(a) .

    **When it fails.** Each coupling stretches by at most :math:`e^{clamp}`, and with a single flow
    half of the coordinates remain normal.

    :param float clamp: bound of the couplings' log-scales.

    **Reference:** *Density estimation using Real NVP*, equations 4-8, Dinh et al. (ICLR 2017)

    >>> guide = AutoRealNVPNormal(banana, num_flows=2)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
    >>> draws["x2"].shape
    (100,)
    """

    clamp: float = 2.0

    def __post_init__(self) -> None:
        check_positive("clamp", self.clamp)
        super().__post_init__()

    def coupling(self, i: int) -> AffineCoupling:
        net, split = self.net(i, outputs=2)
        return AffineCoupling(net, split, clamp=self.clamp)
