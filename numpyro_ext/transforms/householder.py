"""The Householder reflection: an orthogonal map with one parameter vector."""

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform


class HouseholderTransform(VectorTransform):
    r"""The reflection of vectors of length :math:`d` at the plane that is normal to v.

    .. math::
        f(z) = z - 2\, \frac{v \cdot z}{|v|^2}\, v, \qquad
        \log\left|\det \frac{\partial f}{\partial z}\right| = 0, \qquad f^{-1} = f .

    :param v: the ``(d,)`` normal vector, of any length but 0.

    **Reference:** *Improving variational auto-encoders using Householder flow*, equations 8 and 9,
    Tomczak and Welling (2016)

    >>> flow = HouseholderTransform(jnp.array([1.0, -2.0, 0.5]))
    >>> y = flow(jnp.array([0.3, 0.7, -1.0]))
    >>> print(f"{y[0]:.4f} {y[1]:.4f} {y[2]:.4f}")
    0.9095 -0.5190 -0.6952
    """

    arrays = ("v",)

    def __init__(self, v: Array) -> None:
        if not isinstance(v, Tracer) and not np.any(np.asarray(v)):
            raise ValueError("v is zero; a reflection needs a direction, so give any other vector.")
        self.v = v

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        # Scaled by its largest entry, so that the square neither overflows nor underflows.
        v = self.v / jnp.max(jnp.abs(self.v))
        y = x - (2.0 * (x @ v) / jnp.dot(v, v))[..., None] * v
        return y, jnp.zeros(x.shape[:-1], y.dtype)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self(y)
