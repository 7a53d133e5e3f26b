"""The masked autoregressive flow: each coordinate is moved by a function of those before it."""

from collections.abc import Callable

from jax import Array, lax
import jax.numpy as jnp

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform, as_pytree, checked_output, softly_bounded


class _Autoregressive(VectorTransform):
    """The base of both directions: the two outputs of one network."""

    arrays = ("net",)

    def __init__(self, net: Callable[[Array], Array]) -> None:
        self.net = as_pytree(net)

    def _outputs(self, x: Array) -> tuple[Array, Array]:
        shape = (*x.shape[:-1], 2 * x.shape[-1])
        out = checked_output("net", x, self.net(x), shape, "m and s_raw concatenated")
        m, s_raw = jnp.split(out, 2, axis=-1)
        return m, s_raw


def _one_by_one(update: Callable[[Array], Array], like: Array) -> Array:
    """The fixed point of an autoregressive ``update``: after i turns i coordinates are right."""
    # A scan and not a while loop, so that gradients flow backwards through it.
    turns = lax.scan(lambda x, _: (update(x), None), jnp.zeros_like(like), None, like.shape[-1])
    return turns[0]


class MaskedAffineAutoregressive(_Autoregressive):
    r"""The masked autoregressive flow (MAF) on vectors of length :math:`d`.

    .. math::
        y_i = m_i(y_{<i}) + e^{s_i(y_{<i})} x_i, \qquad s = c \tanh(s_{raw} / c), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = \sum_i s_i(y_{<i}) ,

    where :math:`(m, s_{raw}) = net(y)` and :math:`c` is ``clamp``. Given y, all of x comes from one
    pass, :math:`x = (y - m) \odot e^{-s}`, so the density of a given point is cheap. Given x, the
    coordinates of y come one after the other: a draw takes :math:`d` passes.

    :param net: a callable from ``(*batch, d)`` to ``(*batch, 2 * d)``: m and :math:`s_{raw}`
        concatenated. Entry i of both must depend on the entries before i alone; nothing here can
        check that, and a network that is not autoregressive gives wrong densities.
    :param float clamp: the bound :math:`c > 0` of :math:`|s|`.

    **Reference:** *Masked autoregressive flow for density estimation*, equations 2-5, Papamakarios,
    Pavlakou and Murray (NIPS 2017)

    >>> def net(y):  # the second coordinate is shifted by the square of the first
    ...     m = jnp.stack([0 * y[..., 0], y[..., 0] ** 2], -1)
    ...     return jnp.concatenate([m, 0 * m], -1)
    >>> flow = MaskedAffineAutoregressive(net)
    >>> print(flow(jnp.array([2.0, 1.0])), flow.inv(jnp.array([2.0, 5.0])))
    [2. 5.] [2. 1.]
    """

    arrays = ("net", "clamp")

    def __init__(self, net: Callable[[Array], Array], *, clamp: float | Array = 2.0) -> None:
        check_positive("clamp", clamp)
        super().__init__(net)
        self.clamp = clamp

    def _shift_and_log_scale(self, y: Array) -> tuple[Array, Array]:
        m, s_raw = self._outputs(y)
        return m, softly_bounded(s_raw, self.clamp)

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        def update(y: Array) -> Array:
            m, s = self._shift_and_log_scale(y)
            return m + jnp.exp(s) * x

        y = _one_by_one(update, x)
        return y, self._shift_and_log_scale(y)[1].sum(-1)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        m, s = self._shift_and_log_scale(y)
        return (y - m) * jnp.exp(-s)


class GatedInverseAutoregressive(_Autoregressive):
    r"""The gated inverse autoregressive flow (IAF) on vectors of length :math:`d`.

    .. math::
        y_i = g_i x_i + (1 - g_i)\, m_i, \qquad g = \sigma(s_{raw} + 2), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = \sum_i \log g_i ,

    where :math:`(m, s_{raw}) = net(x)` are functions of :math:`x_{<i}`. A draw and its density cost
    one pass. The inverse takes :math:`d` passes, and where gates are nearly closed it loses digits.

    :param net: as of :class:`MaskedAffineAutoregressive`.

    **Reference:** *Improving variational inference with inverse autoregressive flow*, equations 14
    and 15 and algorithm 1, Kingma et al. (NIPS 2016)

    >>> flow = GatedInverseAutoregressive(lambda x: jnp.zeros((*x.shape[:-1], 4)))
    >>> y = flow(jnp.array([1.0, -2.0]))
    >>> print(f"{y[0]:.4f} {y[1]:.4f}")
    0.8808 -1.7616
    """

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        m, s_raw = self._outputs(x)
        gate, log_gate = _gate(s_raw)
        return gate * x + (1.0 - gate) * m, log_gate.sum(-1)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        def update(x: Array) -> Array:
            m, s_raw = self._outputs(x)
            gate, _ = _gate(s_raw)
            return (y - (1.0 - gate) * m) / gate

        return _one_by_one(update, y)


def _gate(s_raw: Array) -> tuple[Array, Array]:
    log_gate = -jnp.logaddexp(0.0, -(s_raw + 2.0))
    return jnp.exp(log_gate), log_gate
