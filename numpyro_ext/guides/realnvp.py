"""A normal distribution bent by affine coupling layers.

Dinh, Sohl-Dickstein, Bengio, "Density estimation using Real NVP" (ICLR 2017), as a variational
family in the sense of Rezende, Mohamed, "Variational inference with normalizing flows" (ICML 2015).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Model, Params
from numpyro_ext.guides.base import CouplingFlowNormal
from numpyro_ext.guides.networks import Network
from numpyro_ext.transforms import AffineCoupling

__all__ = ["AutoRealNVPNormal"]


class AutoRealNVPNormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of affine couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \sum_j s_{ij} - \sum_j \log scale_j ,

    where each :math:`f_i` is an :class:`~numpyro_ext.transforms.AffineCoupling`: the first
    :math:`\lfloor d/2 \rfloor` coordinates go through a network that gives log-scales :math:`s_i`
    and shifts for the others. Between flows the halves change places, or new halves are made of
    every second coordinate, turn by turn. The networks start at zero, so the guide starts at
    :math:`N(init\_loc, init\_scale^2 I)`, and ``num_flows=0`` is ``AutoDiagonalNormal`` with the
    same parameter names.

    A draw and its density cost one pass through the F networks, the density of a given point
    another: losses that re-evaluate :math:`\log q` work. NumPyro's ``AutoIAFNormal`` inverts
    coordinate by coordinate.

    *Where it fails.* A flow is a homeomorphism: separated modes stay joined by a thin bridge, and a
    minimised ``KL(q || p)`` may leave modes out. Each coupling stretches by at most
    :math:`e^{clamp}`. With one flow, half of the coordinates stay normal. Training is not convex:
    bands of KL depend on the learning rate; take ``num_particles`` of 8 or more and a falling rate,
    and above some tens of dimensions start from a fitted normal guide by ``init_from``.

    :param model: a NumPyro model whose latent sites are continuous and not local to a subsampled
        plate.
    :param int num_flows: the number F of couplings.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)`` in place of that network, from
        :math:`\lfloor d/2 \rfloor` inputs to :math:`2 \lceil d/2 \rceil` outputs; used by every
        coupling, each with weights of its own, the vector ``{prefix}_net__{i}$params``. With it the
        guide starts wherever the network's initial weights put it, and pickles only if the pair
        does (closures do not).
    :param float init_scale: initial standard deviation of every unconstrained coordinate.
    :param float clamp: bound of the couplings' log-scales.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function.
    :param tuple init_from: ``(guide, params)`` of a fitted ``AutoNormal``, ``AutoDiagonalNormal``,
        ``AutoMultivariateNormal``, ``AutoLowRankMultivariateNormal`` or
        ``AutoLaplaceApproximation`` on the same model, in place of ``init_loc_fn`` and
        ``init_scale``: the flow starts as exactly that normal distribution. With a full covariance
        the last layer is :math:`loc + L (f_F \circ \dots \circ f_1)(e)`, whose lower triangular
        factor ``{prefix}_scale_tril`` is trained too.

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

    outputs_per_coordinate = 2

    def __init__(
        self,
        model: Model,
        *,
        num_flows: int = 4,
        hidden_dims: Sequence[int] = (32, 32),
        network: Network | None = None,
        init_scale: float = 0.1,
        clamp: float = 2.0,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_from: tuple[Any, Params] | None = None,
    ) -> None:
        check_positive("clamp", clamp)
        self.clamp = clamp
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

    def coupling(self, net: Callable[[Array], Array], split: int) -> AffineCoupling:
        return AffineCoupling(net, split, clamp=self.clamp)
