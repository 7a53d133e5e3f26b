"""Variational online Newton (Khan et al., 2018)."""

from typing import Literal, NamedTuple

from jax import Array
from numpyro.distributions.transforms import Transform
import optax

from numpyro_ext._checks import check_choice, check_share
from numpyro_ext.optim.heavy_ball import check_learning_rate, rate_at
from numpyro_ext.optim.mean_field import Gradient, mean_field_optimiser, retract


class LastNormal(NamedTuple):
    """The normal of the step before, for the momentum."""

    mean: Array
    precision: Array


def von(
    step_size: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    momentum_on: Literal["mean", "natural"] = "mean",
    retraction: bool = True,
    scale_transform: Transform | None = None,
    other: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    r"""Natural-gradient descent of a mean-field normal, with the heavy ball.

    For each number with mean mu and precision P = 1 / sd^2, with G the derivative of the loss by
    the mean, C twice that by the variance, rho the step size and g the momentum, a step is

    .. math::
        P_{t+1} &= P_t + s + \frac{s^2}{2 P_t}, \qquad s = \rho\, C + g (P_t - P_{t-1}), \\
        \mu_{t+1} &= \mu_t - \rho\, \frac{G}{P_{t+1}}
            + g\, \frac{P_{t-1}}{P_{t+1}} (\mu_t - \mu_{t-1}).

    That is momentum on the natural parameters. With ``momentum_on="mean"`` the precision has none,
    and :math:`P_t` stands for :math:`P_{t-1}` in the last line. The term of second order keeps the
    precision positive; without it (``retraction=False``) a precision that a step would make
    negative stays as it is and is counted in ``num_rejected`` of the state. One step of rho = 1
    without it, at the exact G and C of a normal target, ends at the best mean-field normal.

    It acts on every pair of leaves ``<x>_loc`` and ``<x>_scale`` of one shape, as ``AutoNormal``
    and ``AutoDiagonalNormal`` make them, and gives all others to ``other``.

    **When it fails.** The curvature that one draw of ``Trace_ELBO`` estimates is noisy: from a wide
    start (``init_scale=1``) it can throw the mean far off. The default ``init_scale=0.1``, a step
    size of 0.05 or less and 8 particles are safe. :func:`~numpyro_ext.optim.ivon` converges faster.

    :param step_size: rho, positive, or a schedule of the number of steps.
    :param float momentum: g, in [0, 1).
    :param str momentum_on: ``"mean"`` or ``"natural"``.
    :param bool retraction: whether the term of second order is added.
    :param scale_transform: NumPyro transform from the leaf of a scale to the standard deviation.
        None for softplus, which the guides have unless ``scale_constraint`` is given.
    :param other: optimiser of the other leaves; None for ``optax.adam(1e-3)``.

    **References:** Khan et al., *Fast and scalable Bayesian deep learning by weight-perturbation in
    Adam* (ICML 2018), equations 7, 8 and 16; Lin et al., *Handling the positive-definite constraint
    in the Bayesian learning rule* (ICML 2020).

    >>> from numpyro.distributions.transforms import ExpTransform
    >>> from numpyro_ext.optim import von
    >>> def loss(p):  # KL from N(mu, sd^2) to N(3, 1 / 4), with sd = exp(leaf)
    ...     mu, log_sd = p["w_loc"], p["w_scale"]
    ...     return 2 * ((mu - 3) ** 2 + jnp.exp(2 * log_sd)) - log_sd
    >>> optim = von(1.0, retraction=False, scale_transform=ExpTransform())
    >>> p = {"w_loc": jnp.array(-1.0), "w_scale": jnp.array(0.0)}
    >>> steps, _ = optim.update(jax.grad(loss)(p), optim.init(p), p)
    >>> p = optax.apply_updates(p, steps)
    >>> print(f"{p['w_loc']:.3f} {jnp.exp(p['w_scale']):.3f}")
    3.000 0.500
    """
    check_learning_rate(step_size)
    check_share("momentum", momentum)
    check_choice("momentum_on", momentum_on, ("mean", "natural"))
    natural = momentum_on == "natural"

    def start(name: str, mean: Array, precision: Array) -> LastNormal:
        return LastNormal(mean, precision)

    def rule(count: Array, g: Gradient, last: LastNormal) -> tuple[Array, Array, LastNormal]:
        rho = rate_at(step_size, count)
        before = last.precision if natural else g.precision
        step = rho * g.of_precision + momentum * (g.precision - before)
        precision = retract(g.precision, step) if retraction else g.precision + step
        allowed = (precision > 0) | (precision != precision)  # a negative one stays unchanged
        divisor = precision * allowed + g.precision * ~allowed
        ball = momentum * before / divisor * (g.mean - last.mean)
        return g.mean - rho * g.of_mean / divisor + ball, precision, LastNormal(g.mean, g.precision)

    return mean_field_optimiser(start, rule, scale_transform, other)
