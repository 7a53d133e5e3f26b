"""The radial flow: the space is contracted or expanded around one point."""

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform


class RadialTransform(VectorTransform):
    r"""The radial flow on vectors of length :math:`d`.

    With :math:`r = |z - c|` and :math:`h = 1 / (\alpha + r)`,

    .. math::
        f(z) = z + \beta h\, (z - c), \qquad
        \log\left|\det \frac{\partial f}{\partial z}\right|
        = (d - 1) \log(1 + \beta h) + \log(1 + \alpha \beta h^2) ,

    where c is ``center``. It is invertible for :math:`\alpha > 0` and :math:`\beta > -\alpha`
    (write :math:`\beta = -\alpha + \text{softplus}(\hat\beta)`), and the inverse has a closed form:
    :math:`r` is the positive root of :math:`r^2 + (\alpha + \beta - r') r - \alpha r' = 0`, with
    :math:`r'` the radius of the image.

    :param center: the ``(d,)`` point c.
    :param alpha: :math:`\alpha > 0`, a length.
    :param beta: :math:`\beta > -\alpha`, a length; positive values expand.

    **Reference:** *Variational inference with normalizing flows*, equation 14 and appendix A.2,
    Rezende and Mohamed (ICML 2015)

    >>> flow = RadialTransform(jnp.array([0.2, 0.3]), 0.8, -0.5)
    >>> y = flow(jnp.array([0.5, -1.0]))
    >>> print(f"{y[0]:.4f} {y[1]:.4f}")
    0.4297 -0.6954
    """

    arrays = ("center", "alpha", "beta")

    def __init__(self, center: Array, alpha: float | Array, beta: float | Array) -> None:
        check_positive("alpha", alpha)
        if not isinstance(alpha, Tracer) and not isinstance(beta, Tracer) and beta <= -alpha:
            raise ValueError(
                f"beta is {beta} and alpha is {alpha}; a radial flow is invertible only if beta >"
                " -alpha: use beta = -alpha + softplus(...)."
            )
        self.center, self.alpha, self.beta = center, alpha, beta

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        offset = x - self.center
        h = 1.0 / (self.alpha + _norm(offset))
        log_det = (x.shape[-1] - 1) * jnp.log1p(self.beta * h)
        log_det = log_det + jnp.log1p(self.alpha * self.beta * h**2)
        return x + self.beta * h[..., None] * offset, log_det

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        offset = y - self.center
        radius = _norm(offset)
        p = radius - self.alpha - self.beta
        q = 4.0 * self.alpha * radius
        # The root is 0 at the centre, where its square root has no derivative.
        square = p**2 + q
        root = jnp.sqrt(jnp.where(square > 0, square, 1.0))
        # The conjugate form where the difference would cancel.
        denominator = jnp.where(p < 0, root - p, 1.0)
        r = jnp.where(p < 0, 0.5 * q / denominator, 0.5 * (p + root))
        return self.center + offset / (1.0 + self.beta / (self.alpha + r))[..., None]


def _norm(x: Array) -> Array:
    """Length of the vectors along the last axis, with gradient 0 at the origin."""
    square = jnp.sum(x**2, axis=-1)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)
