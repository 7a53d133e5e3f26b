"""A normal distribution sheared by additive couplings.

Dinh, Krueger, Bengio, "NICE: non-linear independent components estimation" (ICLR workshop 2015), as
a variational family in the sense of Rezende, Mohamed, "Variational inference with normalizing
flows" (ICML 2015).
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._typing import Model, Params
from numpyro_ext.guides.base import CouplingFlowNormal
from numpyro_ext.guides.networks import Network
from numpyro_ext.transforms import AdditiveCoupling

__all__ = ["AutoNICENormal"]


class AutoNICENormal(CouplingFlowNormal):
    r"""A normalizing-flow guide of additive couplings, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_j \log scale_j ,

    where each :math:`f_i` is an :class:`~numpyro_ext.transforms.coupling.AdditiveCoupling`: a
    network of the first :math:`\lfloor d/2 \rfloor` coordinates shifts the others. Between flows
    the halves change places, or new halves are made of every second coordinate, turn by turn. The
    networks start at zero, so the guide starts at :math:`N(init\_loc, init\_scale^2 I)`, and
    ``num_flows=0`` is ``AutoDiagonalNormal``.

    *Where it fails.* The couplings keep volume. The guide follows curved posteriors (a banana
    exactly), but the highest density of q is the same as that of its normal base, and posteriors
    whose scale varies (a funnel) need :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal`. In
    return it cannot explode: it is the calmest of the flows to train. Separated modes stay joined.

    :param model: a NumPyro model whose latent sites are continuous and not local to a subsampled
        plate.
    :param int num_flows: the number F of couplings.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)`` in place of that network, from
        :math:`\lfloor d/2 \rfloor` inputs to :math:`\lceil d/2 \rceil` outputs; used by every
        coupling, each with weights of its own, the vector ``{prefix}_net__{i}$params``.
    :param float init_scale: initial standard deviation of every unconstrained coordinate.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function.
    :param tuple init_from: ``(guide, params)`` of a fitted normal guide on the same model, in place
        of ``init_loc_fn`` and ``init_scale``: the flow starts as exactly that distribution.

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
        >>> guide = AutoNICENormal(model, num_flows=2)
        >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
        >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
        >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(100,))["y"].shape
        (100,)
    """

    outputs_per_coordinate = 1

    def __init__(
        self,
        model: Model,
        *,
        num_flows: int = 4,
        hidden_dims: Sequence[int] = (32, 32),
        network: Network | None = None,
        init_scale: float = 0.1,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_from: tuple[Any, Params] | None = None,
    ) -> None:
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

    def coupling(self, net: Callable[[Array], Array], split: int) -> AdditiveCoupling:
        return AdditiveCoupling(net, split)
