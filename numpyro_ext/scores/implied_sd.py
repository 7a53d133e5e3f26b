"""Standard deviations of points compared with those that a density's scores imply.

Reference: Liu and Wang, *Stein variational gradient descent as moment matching* (NIPS 2018): the
Stein identity of linear functions.
"""

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_points

IMPLIED_RATIO, IMPLIED_SHIFT = (0.85, 1.2), 0.1
"""What is still fine. The shift may be larger where the error of the mean of m independent draws,
1 / sqrt(m), is."""


def implied_sd_ratio(
    x: ArrayLike, grad_log_p: ArrayLike
) -> tuple[Float[Array, " d"], Float[Array, ""]]:
    r"""Standard deviations of points over those that their gradients imply, and their shift.

    Under p the linear Stein identity :math:`E[(x - \bar x)\, g^\top] = -I` holds, with :math:`g =
    \nabla \log p(x)`. Of m points with mean :math:`\bar x` and covariance :math:`C = L L^\top`
    (divided by m),

    .. math::
        M = -\frac1m \sum_i (x_i - \bar x)\, g_i^\top, \qquad
        \text{ratio}_a = \frac{\mathrm{sd}(x_a)}{\sqrt{\mathrm{sym}(M^{-1} C)_{aa}}}, \qquad
        \text{shift} = \mathrm{rms}(L^\top \bar g),

    with the root of the mean square over the d coordinates. If p is a Gaussian, :math:`M^{-1} C` is
    its covariance whatever the points are, and :math:`L^\top \bar g` is the distance of the means
    in units of the posterior where C is right. Scaling the coordinates changes nothing.

    **Limits.** On a curved density the ratio is wrong for points that have not converged, and the
    weights of separated modes do not enter: a ratio of 1 is necessary, not sufficient.

    :param x: ``(m, d)`` points.
    :param grad_log_p: ``(m, d)`` gradients of the log density at the points, or ``(..., m, d)``
        estimates of them, which are averaged.
    :return: the ``(d,)`` ratios, NaN where the implied variance is not positive and everywhere for
        ``m <= d``, and the scalar shift.
    """
    x, g = as_points("x", x, finite=False), jnp.asarray(grad_log_p)
    if g.shape[-2:] != x.shape:
        raise ValueError(f"grad_log_p has shape {g.shape} and x has shape {x.shape}.")
    g = jnp.mean(g, axis=tuple(range(g.ndim - 2))).astype(x.dtype)
    m, d = x.shape
    if m <= d:
        return jnp.full(d, jnp.nan, x.dtype), jnp.full((), jnp.nan, x.dtype)
    # In units of the points' own spread, where M is near I and float32 is enough.
    x = x - jnp.mean(x, axis=0)
    sd = jnp.sqrt(jnp.mean(x**2, axis=0))
    g = g * sd
    # L of the correlations without forming them, which would square their condition.
    q, r = jnp.linalg.qr(x / sd)
    whitened, root = q * jnp.sqrt(m), r.T / jnp.sqrt(m)
    whitened_g = jnp.matmul(g, root, precision="highest")
    M = -jnp.matmul(whitened.T, whitened_g, precision="highest") / m
    # With x = L y, M^{-1} C is L M_y^{-1} L^T, and its diagonal is that of its symmetric part.
    variance = jnp.sum(root * jnp.linalg.solve(M, root.T).T, axis=1)
    ratio = 1 / jnp.sqrt(jnp.where(variance > 0, variance, jnp.nan))
    return ratio, jnp.sqrt(jnp.mean(jnp.mean(whitened_g, axis=0) ** 2))
