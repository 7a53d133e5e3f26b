"""A normal distribution bent by rational-quadratic splines.

Durkan, Bekasov, Murray, Papamakarios, "Neural spline flows" (NeurIPS 2019), as a variational family
in the sense of Rezende, Mohamed, "Variational inference with normalizing flows" (ICML 2015).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro.distributions.transforms import Transform
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Model, Params
from numpyro_ext.guides.base import CouplingFlowNormal
from numpyro_ext.guides.networks import Network
from numpyro_ext.transforms import RationalQuadraticSpline, SplineCoupling

__all__ = ["AutoSplineNormal"]


class AutoSplineNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of spline couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \log|\det f_i'| - \sum_j \log scale_j ,

    where each :math:`f_i` is a :class:`~numpyro_ext.transforms.spline.SplineCoupling`: a network of
    the first :math:`\lfloor d/2 \rfloor` coordinates gives each of the others an increasing spline
    of ``num_bins`` bins on ``[-bound, bound]``. Between flows the halves change places, or new
    halves are made of every second coordinate, turn by turn. With one latent
    dimension each flow is a spline with parameters of its own. The splines start at the identity,
    so the guide starts at :math:`N(init\_loc, init\_scale^2 I)`, and ``num_flows=0`` is
    ``AutoDiagonalNormal``.

    *Where it fails.* Beyond ``bound`` standard deviations of the base the splines do nothing, so
    the tails are those of a normal distribution with ``loc`` and ``scale``. A flow is a
    homeomorphism: separated modes stay joined by a bridge, which a spline can make thin. It has
    more parameters than :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal`, and a step takes
    longer. The density has kinks at the ends of the bins, so that gradients which
    differentiate it at the draws (``gradient="stl"`` or ``"dreg"``) are noisy.

    :param model: a NumPyro model whose latent sites are continuous and not local to a subsampled
        plate.
    :param int num_flows: the number F of layers.
    :param int num_bins: bins of each spline, at least 2.
    :param float bound: half the length of the interval in which the splines bend, in standard
        deviations of the base.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)`` in place of that network, from
        :math:`\lfloor d/2 \rfloor` inputs to
        :math:`\lceil d/2 \rceil (3\, num\_bins - 1)` outputs; used by every coupling, each with
        weights of its own, the vector ``{prefix}_net__{i}$params``.
    :param float init_scale: initial standard deviation of every unconstrained coordinate.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function.
    :param tuple init_from: ``(guide, params)`` of a fitted normal guide on the same model, in place
        of ``init_loc_fn`` and ``init_scale``: the flow starts as exactly that distribution.

    **References**

    1. *Neural spline flows*, sections 3.1 and 3.2, Conor Durkan, Artur Bekasov, Iain Murray,
       George Papamakarios (2019)

    .. doctest::

        >>> import jax, numpyro, numpyro.distributions as dist, optax
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro_ext.guides import AutoSplineNormal
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(2.0, 1.0))  # one dimension is enough
        >>> guide = AutoSplineNormal(model)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))
        >>> bool((draws["rate"] > 0).all())
        True
    """

    def __init__(
        self,
        model: Model,
        *,
        num_flows: int = 2,
        num_bins: int = 8,
        bound: float = 4.0,
        hidden_dims: Sequence[int] = (32, 32),
        network: Network | None = None,
        init_scale: float = 0.1,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_from: tuple[Any, Params] | None = None,
    ) -> None:
        check_positive("bound", bound)
        self.num_bins = check_count("num_bins", num_bins, minimum=2)
        self.bound = bound
        self.outputs_per_coordinate = 3 * self.num_bins - 1
        super().__init__(
            model,
            num_flows=num_flows,
            hidden_dims=hidden_dims,
            network=network,
            init_scale=init_scale,
            prefix=prefix,
            init_loc_fn=init_loc_fn,
            init_from=init_from,
        )

    def coupling(self, net: Callable[[Array], Array], split: int) -> SplineCoupling:
        return SplineCoupling(net, split, num_bins=self.num_bins, bound=self.bound)

    def flow(self, i: int) -> Transform:
        if self.latent_dim > 1:
            return super().flow(i)
        raw: Any = numpyro.param(
            f"{self.prefix}_spline__{i}", jnp.zeros((1, self.outputs_per_coordinate))
        )
        return RationalQuadraticSpline.from_unconstrained(raw, self.bound)
