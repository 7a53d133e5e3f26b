"""Variational online Newton (Khan et al., 2018)."""

from jax import Array
from numpyro.distributions.transforms import Transform
import optax

from numpyro_ext._checks import check_share
from numpyro_ext.optim.heavy_ball import check_learning_rate, rate_at
from numpyro_ext.optim.mean_field import Gradient, mean_field_optimiser, retract


def von(
    step_size: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    scale_transform: Transform | None = None,
    other: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    r"""Natural-gradient descent of a mean-field normal, with the heavy ball.

    For each number with mean mu and precision P = 1 / sd^2, with G the derivative of the loss by
    the mean, C twice that by the variance, rho the step size and g the momentum, a step is

    .. math::
        P_{t+1} &= P_t + s + \frac{s^2}{2 P_t}, \qquad s = \rho\, C, \\
        \mu_{t+1} &= \mu_t - \rho\, \frac{G}{P_{t+1}}
            + g\, \frac{P_t}{P_{t+1}} (\mu_t - \mu_{t-1}).

    The term of second order keeps the precision above half of the one before.

    It acts on every pair of leaves ``<x>_loc`` and ``<x>_scale`` of one shape, as ``AutoNormal``
    and ``AutoDiagonalNormal`` make them, and gives all others to ``other``.

    **When it fails.** The curvature that one draw of ``Trace_ELBO`` estimates is noisy: from a wide
    start (``init_scale=1``) it can throw the mean far off. A step size of 0.05 or less and 8
    particles are safe. :func:`~numpyro_ext.optim.ivon` converges faster.

    :param step_size: rho, positive, or a schedule of the number of steps.
    :param float momentum: g, in [0, 1).
    :param scale_transform: NumPyro transform from the leaf of a scale to the standard deviation.
        None for softplus, which the guides have unless ``scale_constraint`` is given.
    :param other: optimiser of the other leaves; None for ``optax.adam(1e-3)``.

    **References:** Khan et al., *Fast and scalable Bayesian deep learning by weight-perturbation in
    Adam* (ICML 2018), equations 7 and 8; Lin et al., *Handling the positive-definite constraint in
    the Bayesian learning rule* (ICML 2020).

    >>> from numpyro.distributions.transforms import ExpTransform
    >>> from numpyro_ext.optim import von
    >>> def loss(p):  # KL from N(mu, sd^2) to N(3, 1 / 4), with sd = exp(leaf)
    ...     mu, log_sd = p["w_loc"], p["w_scale"]
    ...     return 2 * ((mu - 3) ** 2 + jnp.exp(2 * log_sd)) - log_sd
    >>> optim = von(0.5, scale_transform=ExpTransform())
    >>> p = {"w_loc": jnp.array(-1.0), "w_scale": jnp.array(0.0)}
    >>> state = optim.init(p)
    >>> for _ in range(20):
    ...     steps, state = optim.update(jax.grad(loss)(p), state, p)
    ...     p = optax.apply_updates(p, steps)
    >>> print(f"{p['w_loc']:.3f} {jnp.exp(p['w_scale']):.3f}")
    3.000 0.500
    """
    check_learning_rate(step_size)
    check_share("momentum", momentum)

    def start(name: str, mean: Array, precision: Array) -> Array:
        return mean

    def rule(count: Array, g: Gradient, last: Array) -> tuple[Array, Array, Array]:
        rho = rate_at(step_size, count)
        precision = retract(g.precision, rho * g.of_precision)
        ball = momentum * g.precision * (g.mean - last)
        return g.mean + (ball - rho * g.of_mean) / precision, precision, g.mean

    return mean_field_optimiser(start, rule, scale_transform, other)
