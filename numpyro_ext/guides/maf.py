"""A normal distribution under masked autoregressive flows."""

from dataclasses import dataclass

from numpyro_ext._checks import check_positive
from numpyro_ext.guides.flows import AutoregressiveFlowNormal
from numpyro_ext.transforms import MaskedAffineAutoregressive


@dataclass(kw_only=True, eq=False, repr=False)
class AutoMAFNormal(AutoregressiveFlowNormal):
    r"""A normalizing-flow guide of masked autoregressive flows, over all latent sites together.

    Each flow of :class:`AutoFlowNormal` is a
    :class:`~numpyro_ext.transforms.autoregressive.MaskedAffineAutoregressive` of one network with
    masked weights. The order of the coordinates is reversed between flows.

    The density of a given point costs one pass through the networks, but a draw (and its gradient)
    :math:`d` passes, so that steps are slow above some tens of dimensions. NumPyro's
    ``AutoIAFNormal`` has it the other way. Each flow stretches a coordinate by at most
    :math:`e^{clamp}`.

    :param hidden_dims: widths of the hidden layers of each network (ELU).
    :param float clamp: bound of the log-scales.

    **References:** *Masked autoregressive flow for density estimation*, equations 2-5, Papamakarios
    et al. (NIPS 2017); for the masks *MADE*, section 3, Germain et al. (ICML 2015)

    >>> guide = AutoMAFNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    num_flows: int = 2
    clamp: float = 5.0

    def __post_init__(self) -> None:
        check_positive("clamp", self.clamp)
        super().__post_init__()

    def flow(self, i: int) -> MaskedAffineAutoregressive:
        return MaskedAffineAutoregressive(self.net(i), clamp=self.clamp)
