"""Monotone rational-quadratic splines, elementwise and as a coupling layer."""

from collections.abc import Callable

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform
from numpyro_ext.transforms.coupling import Coupling

# The smallest width and height as a share of the mean one, and the smallest derivative.
MINIMUM = 1e-3


class RationalQuadraticSpline(VectorTransform):
    r"""An increasing piecewise rational-quadratic function of every coordinate.

    The interval :math:`[-B, B]` is cut into bins of widths :math:`w_k` and heights :math:`h_k`
    between knots :math:`(x_k, y_k)` with derivatives :math:`\delta_k`; outside it is the identity.
    In bin k, with :math:`t = (x - x_k) / w_k`, :math:`s = h_k / w_k` and
    :math:`D = s + (\delta_{k+1} + \delta_k - 2 s)\, t (1 - t)`,

    .. math::
        y = y_k + h_k \frac{s t^2 + \delta_k t (1 - t)}{D}, \qquad
        y' = \frac{s^2 \left(\delta_{k+1} t^2 + 2 s t (1 - t) + \delta_k (1 - t)^2\right)}{D^2} ,

    and the log determinant is the sum of :math:`\log y'` over the last axis. The inverse solves a
    quadratic equation in t. The function has one continuous derivative.

    :param widths: ``(..., K)`` positive numbers that add up to :math:`2B` along the last axis; the
        leading axes are of the coordinates, or none.
    :param heights: ``(..., K)``, likewise.
    :param derivatives: ``(..., K - 1)`` positive derivatives at the knots between the bins; those
        at the two ends are 1.
    :param float bound: :math:`B > 0`.

    **Reference:** Durkan et al., *Neural spline flows* (NeurIPS 2019), equations 4-8 and 25-31.

    >>> spline = RationalQuadraticSpline(
    ...     jnp.array([1.0, 2.0, 2.0, 1.0]), jnp.array([2.0, 1.0, 0.5, 2.5]),
    ...     jnp.array([0.5, 1.5, 2.0]), 3.0,
    ... )
    >>> print(", ".join(f"{y:.4f}" for y in spline(jnp.array([-2.5, 1.3, 4.0]))))
    -1.9091, 0.2396, 4.0000
    """

    arrays = ("widths", "heights", "derivatives", "bound")

    def __init__(
        self, widths: Array, heights: Array, derivatives: Array, bound: float | Array
    ) -> None:
        check_positive("bound", bound)
        sizes = [jnp.shape(value)[-1] for value in (widths, heights, derivatives)]
        if sizes[1:] != [sizes[0], sizes[0] - 1]:
            raise ValueError(
                f"widths, heights and derivatives end in axes of {sizes}, not K, K and K - 1."
            )
        if not any(isinstance(x, Tracer) for x in (widths, heights, derivatives, bound)):
            for name, value in (("widths", widths), ("heights", heights)):
                if not np.allclose(np.sum(np.asarray(value), axis=-1), 2 * bound, rtol=1e-4):
                    raise ValueError(f"{name} must add up to 2 * bound, which is {2 * bound}.")
            if any(np.any(np.asarray(x) <= 0) for x in (widths, heights, derivatives)):
                raise ValueError("widths, heights and derivatives must be positive.")
        self.widths, self.heights, self.derivatives = widths, heights, derivatives
        self.bound = bound

    @classmethod
    def from_unconstrained(
        cls, raw: Float[Array, "*batch k"], bound: float | Array
    ) -> "RationalQuadraticSpline":
        """The spline of ``3 K - 1`` free numbers along the last axis; zeros give the identity."""
        bins = (raw.shape[-1] + 1) // 3
        share = [jax.nn.softmax(raw[..., i * bins : (i + 1) * bins], axis=-1) for i in range(2)]
        widths, heights = (2 * bound * ((1 - MINIMUM) * part + MINIMUM / bins) for part in share)
        # softplus(log(e - 1)) = 1.
        free = raw[..., 2 * bins :] + jnp.log(jnp.expm1(1.0 - MINIMUM)).astype(raw.dtype)
        spline = cls.__new__(cls)
        spline.widths, spline.heights, spline.bound = widths, heights, bound
        spline.derivatives = MINIMUM + jax.nn.softplus(free)
        return spline

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        y, log_slopes = self.with_log_slopes(x, inverse=False)
        return y, log_slopes.sum(-1)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.with_log_slopes(y, inverse=True)[0]

    def with_log_slopes(self, x: Array, inverse: bool) -> tuple[Array, Array]:
        """The function (or its inverse) of each entry, and the log of the function's slope."""
        inside = jnp.abs(x) < self.bound
        # Clipped first: the formula of the bin would give NaN gradients outside the interval.
        clipped = jnp.where(inside, x, 0.0)
        x_left, w, y_left, h, d_left, d_right = self._bin(
            clipped, self.heights if inverse else self.widths
        )
        s = h / w
        bend = d_right + d_left - 2 * s
        if inverse:
            # a t^2 + b t + c = 0, by the form of the root that does not cancel.
            rise = clipped - y_left
            a = h * (s - d_left) + rise * bend
            b = h * d_left - rise * bend
            c = -s * rise
            square = jnp.maximum(b**2 - 4 * a * c, 0.0)
            t = 2 * c / (-b - jnp.sqrt(square))
            moved = x_left + w * t
        else:
            t = (clipped - x_left) / w
            moved = y_left + h * (s * t**2 + d_left * t * (1 - t)) / (s + bend * t * (1 - t))
        numerator = d_right * t**2 + 2 * s * t * (1 - t) + d_left * (1 - t) ** 2
        log_slope = 2 * jnp.log(s) + jnp.log(numerator) - 2 * jnp.log(s + bend * t * (1 - t))
        return jnp.where(inside, moved, x), jnp.where(inside, log_slope, 0.0)

    def _bin(self, x: Array, sizes: Array) -> tuple[Array, ...]:
        """Left knot, width, height and the two derivatives of the bin of each entry of x, of which
        ``sizes`` are the widths or, if x is an image, the heights."""
        ends = jnp.cumsum(sizes, axis=-1)[..., :-1] - self.bound
        k = jnp.sum(x[..., None] >= ends, axis=-1, keepdims=True)
        end = jnp.ones((*self.derivatives.shape[:-1], 1), self.derivatives.dtype)
        slopes = jnp.concatenate([end, self.derivatives, end], axis=-1)

        def pick(values: Array) -> Array:
            values = jnp.broadcast_to(values, (*x.shape, values.shape[-1]))
            return jnp.take_along_axis(values, k, axis=-1)[..., 0]

        def left(sizes: Array) -> Array:
            return jnp.cumsum(sizes, axis=-1) - sizes - self.bound

        return (
            pick(left(self.widths)),
            pick(self.widths),
            pick(left(self.heights)),
            pick(self.heights),
            pick(slopes[..., :-1]),
            pick(slopes[..., 1:]),
        )


class SplineCoupling(Coupling):
    r"""A coupling layer: the moving half goes through rational-quadratic splines.

    .. math::
        y = (a,\; \text{spline}(b; net(a))), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = \sum_i \log \text{spline}'(b_i) ,

    where each coordinate of :math:`b` has a :class:`RationalQuadraticSpline` with ``num_bins`` bins
    between ``-bound`` and ``bound``. A network that gives zeros is the identity. Widths and heights
    are softmax shares of :math:`2B`, and derivatives softplus, each with a minimum of 0.001.

    :param net: a callable from ``(*batch, split)`` to
        ``(*batch, (d - split) * (3 * num_bins - 1))``.
    :param int num_bins: bins of each spline, at least 2.
    :param float bound: :math:`B > 0`.

    **Reference:** Durkan et al., *Neural spline flows* (NeurIPS 2019), section 3.2.

    >>> layer = SplineCoupling(lambda a: jnp.zeros((*a.shape[:-1], 11)), 1, num_bins=4)
    >>> print(layer(jnp.array([0.5, -1.0])))
    [ 0.5 -1. ]
    """

    arrays = ("net", "bound")
    static = ("split", "num_bins")

    def __init__(
        self,
        net: Callable[[Array], Array],
        split: int,
        *,
        num_bins: int = 8,
        bound: float | Array = 4.0,
    ) -> None:
        check_positive("bound", bound)
        super().__init__(net, split)
        self.num_bins = check_count("num_bins", num_bins, minimum=2)
        self.bound = bound

    @property
    def outputs_per_coordinate(self) -> int:
        return 3 * self.num_bins - 1

    def move(self, b: Array, out: Array, inverse: bool) -> tuple[Array, Array]:
        raw = out.reshape(*b.shape, self.outputs_per_coordinate)
        return RationalQuadraticSpline.from_unconstrained(raw, self.bound).with_log_slopes(
            b, inverse
        )
