"""Improved variational online Newton (Shen et al., 2024)."""

from jax import Array
import jax.numpy as jnp
from numpyro.distributions.transforms import Transform
import optax

from numpyro_ext._checks import check_positive, check_share
from numpyro_ext.optim.heavy_ball import check_learning_rate, rate_at
from numpyro_ext.optim.mean_field import Gradient, mean_field_optimiser, retract

STEEPEST = 30.0
"""Limit of a gradient by a mean, in nats a standard deviation."""
LARGEST = 10.0
"""Limit of what a step adds to a precision, over the precision."""


def ivon(
    rate: optax.ScalarOrSchedule = 0.05,
    *,
    b1: float = 0.9,
    precision_rate: float = 0.01,
    scale_transform: Transform | None = None,
    other: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    r"""Natural-gradient descent of a mean-field normal, with one rate for means and one for
    precisions.

    For each number with mean mu and precision P = 1 / sd^2, with G the derivative of the loss by
    the mean, C twice its derivative by the variance (what natural gradients add to the precision),
    r the rate and p the ``precision_rate``, step t = 1, 2, ... is

    .. math::
        P_t &= P_{t-1} + p\,C + \frac{(p\,C)^2}{2 P_{t-1}}, \\
        m_t &= b_1 m_{t-1} + (1 - b_1) G, \qquad
        \mu_t = \mu_{t-1} - \mathrm{clip}\Big(r\, \frac{m_t / (1 - b_1^t)}{P_t},
            \pm P_t^{-1/2}\Big).

    **What differs from the paper.** G is the gradient of the whole loss, so that the momentum
    averages the gradient of the prior too; both have the same fixed points. A step of a mean is at
    most one standard deviation, since the draws know the curvature no farther out; a published
    start with a precision of the order of the number of rows serves the same end. And G is limited
    to 30 nats a standard deviation, :math:`\pm 30 P^{1/2}`, and :math:`p\,C` to :math:`\pm 10 P`. A
    draw at which a row is all but impossible, as it may be where a network predicts the logarithm
    of a scale, has a gradient of millions: without the limits the mean would follow it for a
    hundred steps, and the precision would end at infinity.

    The last term of the first line keeps each precision above half of the one before. G and C come
    from the gradients of the two leaves, so that NumPyro's ``Trace_ELBO`` is enough.

    Use it with ``AutoNormal`` or ``AutoDiagonalNormal``: it acts on every pair of leaves
    ``<x>_loc`` and ``<x>_scale`` of one shape, and leaves all others to ``other``. Start narrow,
    with ``init_scale=0.02``, and draw four or more particles a step.

    **When it fails.** If the rate is too large for parameters with a correlated curvature, the loss
    grows; take a smaller or a falling rate. Standard deviations are too small where parameters are
    correlated, as in every mean-field normal.

    :param rate: r, positive, or a schedule of the number of steps.
    :param float b1: share of the averaged gradient that is kept, in [0, 1).
    :param float precision_rate: p, in (0, 1).
    :param scale_transform: as for :func:`von`, and so ``other``.

    **References:** Shen et al., *Variational learning is effective for large deep networks* (ICML
    2024), algorithm 1; Lin et al., *Handling the positive-definite constraint in the Bayesian
    learning rule* (ICML 2020).

    >>> from numpyro_ext.optim import ivon
    >>> guide = AutoNormal(normal_mean, init_scale=0.02)
    >>> svi = SVI(normal_mean, guide, ivon(0.05), Trace_ELBO(4))
    >>> x = jnp.array([1.0, 2.0, 3.0])
    >>> params = svi.run(jax.random.key(0), 1000, x, progress_bar=False).params
    >>> loc, sd = params["z_auto_loc"], params["z_auto_scale"]
    >>> bool(abs(loc - 1.5) < 0.3), bool(abs(sd - 0.5) < 0.1)  # the posterior is N(1.5, 0.5^2)
    (True, True)
    """
    check_learning_rate(rate)
    check_share("b1", b1)
    check_positive("precision_rate", precision_rate)
    check_share("precision_rate", precision_rate)

    def start(name: str, mean: Array, precision: Array) -> Array:
        return jnp.zeros_like(mean)

    def rule(count: Array, g: Gradient, momentum: Array) -> tuple[Array, Array, Array]:
        steepest, largest = STEEPEST * g.precision**0.5, LARGEST * g.precision
        added = jnp.clip(precision_rate * g.of_precision, -largest, largest)
        precision = retract(g.precision, added)
        momentum = b1 * momentum + (1 - b1) * jnp.clip(g.of_mean, -steepest, steepest)
        unbiased, sd = momentum / (1 - b1 ** (count + 1.0)), precision**-0.5
        step = jnp.clip(rate_at(rate, count) * unbiased / precision, -sd, sd)
        return g.mean - step, precision, momentum

    return mean_field_optimiser(start, rule, scale_transform, other)
