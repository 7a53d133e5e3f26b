"""A normal distribution bent by rational-quadratic splines.

Durkan, Bekasov, Murray, Papamakarios, "Neural spline flows" (NeurIPS 2019), as a variational family
in the sense of Rezende, Mohamed, "Variational inference with normalizing flows" (ICML 2015).
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpyro
from numpyro.distributions.transforms import Transform

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext.guides.flows import CouplingFlowNormal
from numpyro_ext.transforms import RationalQuadraticSpline, SplineCoupling

__all__ = ["AutoSplineNormal"]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoSplineNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of spline couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \log|\det f_i'| - \sum_j \log scale_j ,

    where each :math:`f_i` is a :class:`~numpyro_ext.transforms.spline.SplineCoupling`: a network of
    the first :math:`\lfloor d/2 \rfloor` coordinates gives each of the others an increasing spline
    of ``num_bins`` bins on ``[-bound, bound]``. After the first flow the halves change places, and
    after the others new halves are made of every second coordinate. With one latent dimension each
    flow is a spline with parameters of its own. The splines start at the identity, so the guide
    starts at the normal approximation of the posterior at its mode.

    *Where it fails.* Beyond ``bound`` standard deviations of the base the splines do nothing, so
    the tails are those of a normal distribution with ``loc`` and ``scale``. The guide has more
    parameters than :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal`, and a step takes longer.
    The density has kinks at the ends of the bins, so that gradients which differentiate it at the
    draws (``gradient="stl"`` or ``"dreg"``) gain less over ``"standard"`` than on other flows.

    :param int num_flows: the number F of layers.
    :param int num_bins: bins of each spline, at least 2.
    :param float bound: half the length of the interval in which the splines bend, in standard
        deviations of the base.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, in place of
        that network, from :math:`\lfloor d/2 \rfloor` inputs to :math:`\lceil d/2 \rceil (3\,
        num\_bins - 1)` outputs.

    The other arguments are those of :class:`CouplingFlowNormal` and :class:`AutoFlowNormal`.

    **References**

    1. *Neural spline flows*, sections 3.1 and 3.2, Conor Durkan, Artur Bekasov, Iain Murray,
       George Papamakarios (2019)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro_ext.guides import AutoSplineNormal
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(2.0, 1.0))  # one dimension is enough
        >>> guide = AutoSplineNormal(model, init_from=None)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
        >>> bool((draws["rate"] > 0).all())
        True
    """

    num_flows: int = 4
    num_bins: int = 8
    bound: float = 4.0

    def __post_init__(self) -> None:
        check_positive("bound", self.bound)
        self.num_bins = check_count("num_bins", self.num_bins, minimum=2)
        super().__post_init__()

    def flow(self, i: int) -> Transform:
        outputs = 3 * self.num_bins - 1
        if self.latent_dim == 1:
            raw: Any = numpyro.param(f"{self.prefix}_spline__{i}", jnp.zeros((1, outputs)))
            return RationalQuadraticSpline.from_unconstrained(raw, self.bound)
        net, split = self.net(i, outputs)
        return SplineCoupling(net, split, num_bins=self.num_bins, bound=self.bound)
