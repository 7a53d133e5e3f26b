"""The planar flow: the space is bent along one direction."""

from jax import Array, lax
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform

_NUM_BISECTIONS = 60


class PlanarTransform(VectorTransform):
    r"""The planar flow on vectors of length :math:`d`.

    .. math::
        f(z) = z + u \tanh(a), \qquad a = w \cdot z + b, \qquad
        \log\left|\det \frac{\partial f}{\partial z}\right|
        = \log\left|1 + (1 - \tanh^2 a)\, u \cdot w\right| .

    It is invertible exactly if :math:`u \cdot w > -1`; :meth:`constrain` turns any pair into one
    that is. Along w the inverse is the root :math:`t` of the increasing function
    :math:`t + (u \cdot w) \tanh(t + b) = w \cdot y`, found by bisection to the last digit and
    differentiated by the implicit function theorem.

    :param u: the ``(d,)`` direction of the shift.
    :param w: the ``(d,)`` normal vector of the plane.
    :param b: the offset of the plane, a number.

    **Reference:** Rezende and Mohamed, *Variational inference with normalizing flows* (ICML 2015),
    equations 10-12 and appendix A.1, with another map m in :meth:`constrain`.

    >>> flow = PlanarTransform(jnp.array([0.3, -0.4]), jnp.array([1.0, 2.0]), 0.1)
    >>> y = flow(jnp.array([0.5, -1.0]))
    >>> print(f"{y[0]:.4f} {y[1]:.4f}")
    0.2344 -0.6459
    """

    arrays = ("u", "w", "b")

    def __init__(self, u: Array, w: Array, b: float | Array) -> None:
        if not isinstance(u, Tracer) and not isinstance(w, Tracer):
            product = float(np.dot(u, w))
            if not product > -1.0:
                raise ValueError(
                    f"u.w is {product:.6g}; a planar flow is invertible only if u.w > -1: use"
                    " PlanarTransform(PlanarTransform.constrain(u, w), w, b)."
                )
        self.u, self.w, self.b = u, w, b

    @staticmethod
    def constrain(u: Float[Array, " d"], w: Float[Array, " d"]) -> Float[Array, " d"]:
        r"""A ``u`` with :math:`u \cdot w > -1`: :math:`u + (m(u \cdot w) - u \cdot w) w / |w|^2`.

        Here :math:`m(t) = -1 + \log(1 + (e - 1) e^t)`, the paper's increasing map of the numbers to
        :math:`(-1, \infty)`, moved so that :math:`m(0) = 0`. Hence the result is never longer than
        u. With :math:`w = 0` every u is allowed.
        """
        product, square = jnp.dot(u, w), jnp.dot(w, w)
        # m(t) - t, exact near 0, and in forms that overflow for neither sign.
        low = jnp.where(product < 0, product, 0.0)
        high = jnp.where(product < 0, 0.0, product)
        below = jnp.log1p((1 - jnp.exp(-1.0)) * jnp.expm1(low)) - low
        above = jnp.log1p(jnp.expm1(-high) * jnp.exp(-1.0))
        # Double where, for a finite gradient; smaller squares have lost their digits in float32.
        has_direction = square > 1e-30
        # Twice by |w|: the derivative of one division by its square has a |w|^4 that underflows.
        length = jnp.sqrt(jnp.where(has_direction, square, 1.0))
        return u + jnp.where(has_direction, (below + above) / length, 0.0) * (w / length)

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        h = jnp.tanh(x @ self.w + self.b)
        y = x + h[..., None] * self.u
        return y, jnp.log1p((1.0 - h**2) * jnp.dot(self.u, self.w))

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        c, target = jnp.dot(self.u, self.w), y @ self.w
        t = _root(*lax.stop_gradient((c, jnp.asarray(self.b), target)))
        # A step of Newton at the root has the derivatives of the implicit function theorem.
        h = jnp.tanh(t + self.b)
        t = t - (t + c * h - target) / (1.0 + c * (1.0 - lax.stop_gradient(h) ** 2))
        return y - jnp.tanh(t + self.b)[..., None] * self.u


def _root(c: Array, b: Array, target: Array) -> Array:
    """The root t of ``t + c tanh(t + b) = target``, which lies within ``|c|`` of the target."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        above = middle + c * jnp.tanh(middle + b) > target
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = lax.fori_loop(0, _NUM_BISECTIONS, halve, (target - jnp.abs(c), target + jnp.abs(c)))
    return 0.5 * (low + high)
