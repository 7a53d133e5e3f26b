"""A normal distribution sheared by additive couplings.

Dinh, Krueger, Bengio, "NICE: non-linear independent components estimation" (ICLR workshop 2015), as
a variational family in the sense of Rezende, Mohamed, "Variational inference with normalizing
flows" (ICML 2015).
"""

from dataclasses import dataclass

from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import AdditiveCoupling

__all__ = ["AutoNICENormal"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoNICENormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of additive couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_j \log scale_j ,

    where each :math:`f_i` is an :class:`~numpyro_ext.transforms.coupling.AdditiveCoupling`: a
    network of the first :math:`\lfloor d/2 \rfloor` coordinates shifts the others. After the first
    flow the halves change places, and after the others new halves are made of every second
    coordinate. The networks start at zero, so the guide starts at the normal approximation of the
    posterior at its mode.

    *Where it fails.* The couplings keep volume. The guide follows curved posteriors (a banana
    exactly), but the highest density of q is the same as that of its normal base, and posteriors
    whose scale varies (a funnel) need :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal`. In
    return it cannot explode: it is the calmest of the flows to train.

    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, in place of
        that network, from :math:`\lfloor d/2 \rfloor` inputs to :math:`\lceil d/2 \rceil` outputs.

    The other arguments are those of :class:`CouplingFlowNormal` and :class:`AutoFlowNormal`.

    **References**

    1. *NICE: non-linear independent components estimation*, equations 9-12, Laurent Dinh,
       David Krueger, Yoshua Bengio (2015)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro_ext.guides import AutoNICENormal
        >>> def model():
        ...     x = numpyro.sample("x", dist.Normal(0, 1))
        ...     numpyro.sample("y", dist.Normal(3 * (x**2 - 1), 1))
        >>> guide = AutoNICENormal(model, num_flows=2, init_from=None)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))["y"].shape
        (100,)
    """

    def coupling(self, i: int) -> AdditiveCoupling:
        return AdditiveCoupling(*self.net(i, outputs=1))
