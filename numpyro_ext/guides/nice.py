"""A normal distribution bent by additive coupling layers."""

from dataclasses import dataclass

from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import AdditiveCoupling


@dataclass(kw_only=True, eq=False, repr=False)
class AutoNICENormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of additive couplings, over all latent sites together.

    Each flow of :class:`AutoFlowNormal` is an
    :class:`~numpyro_ext.transforms.coupling.AdditiveCoupling`: a network of the first
    :math:`\lfloor d/2 \rfloor` coordinates shifts the others.

    *Where it fails.* The couplings keep volume. The guide follows curved posteriors (a banana
    exactly), but q is nowhere denser than its normal base at its mode, and posteriors of a scale
    that varies (a funnel) need :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal`.

    **Reference:** *NICE: non-linear independent components estimation*, equations 9-12, Dinh,
    Krueger and Bengio (ICLR workshop 2015)

    >>> guide = AutoNICENormal(banana, num_flows=2, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    def coupling(self, i: int) -> AdditiveCoupling:
        return AdditiveCoupling(*self.net(i, outputs=1))
