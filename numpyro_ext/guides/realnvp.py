"""A normal distribution bent by affine coupling layers.

Dinh, Sohl-Dickstein, Bengio, "Density estimation using Real NVP" (ICLR 2017), as a variational
family in the sense of Rezende, Mohamed, "Variational inference with normalizing flows" (ICML 2015).
"""

from dataclasses import dataclass

from numpyro_ext._checks import check_positive
from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import AffineCoupling

__all__ = ["AutoRealNVPNormal"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoRealNVPNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of affine couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \sum_j s_{ij} - \sum_j \log scale_j ,

    where each :math:`f_i` is an :class:`~numpyro_ext.transforms.AffineCoupling`: the first
    :math:`\lfloor d/2 \rfloor` coordinates go through a network that gives log-scales :math:`s_i`
    and shifts for the others. After the first flow the halves change places, and after each of the
    others every second coordinate goes into one new half. The networks start at zero, so the guide
    starts at the normal approximation of the posterior at its mode.

    A draw and its density cost one pass through the F networks, and so does the density of a given
    point, so losses that evaluate :math:`\log q` again are cheap. (NumPyro's ``AutoIAFNormal``
    inverts coordinate by coordinate.)

    **When it fails.** The limits of every flow apply (:class:`AutoFlowNormal`). In addition each
    coupling stretches by at most :math:`e^{clamp}`, and with a single flow half of the coordinates
    remain normal.

    :param float clamp: bound of the couplings' log-scales.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, in place of
        that network, from :math:`\lfloor d/2 \rfloor` inputs to :math:`2 \lceil d/2 \rceil`
        outputs.

    The other arguments are those of :class:`CouplingFlowNormal` and :class:`AutoFlowNormal`.

    **References**

    1. *Density estimation using Real NVP*, equations 4-8, Laurent Dinh, Jascha Sohl-Dickstein,
       Samy Bengio (2017)
    2. *Variational inference with normalizing flows*, equation 15, Danilo Jimenez Rezende,
       Shakir Mohamed (2015)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro_ext.guides import AutoRealNVPNormal
        >>> def model():
        ...     x = numpyro.sample("x", dist.Normal(0, 1))
        ...     numpyro.sample("y", dist.Normal(3 * (x**2 - 1), 1))
        >>> guide = AutoRealNVPNormal(model, num_flows=2)  # was: AutoNormal(model)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
        >>> draws["y"].shape
        (100,)
    """

    clamp: float = 2.0

    def __post_init__(self) -> None:
        check_positive("clamp", self.clamp)
        super().__post_init__()

    def coupling(self, i: int) -> AffineCoupling:
        net, split = self.net(i, outputs=2)
        return AffineCoupling(net, split, clamp=self.clamp)
