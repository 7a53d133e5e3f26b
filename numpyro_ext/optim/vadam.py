"""Adam with a mean-field normal for its moving squares (Khan et al., 2018)."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from numpyro.distributions.transforms import Transform
import optax

from numpyro_ext._checks import check_choice, check_positive, check_share
from numpyro_ext.optim.heavy_ball import check_learning_rate, rate_at
from numpyro_ext.optim.mean_field import Gradient, mean_field_optimiser


class Moments(NamedTuple):
    """Moving averages of the mean gradient of a row, and of its square."""

    mean: Array
    square: Array


def vadam(
    step_size: optax.ScalarOrSchedule,
    *,
    num_data: int,
    prior_precision: float | Mapping[str, Array] = 1.0,
    b1: float = 0.9,
    b2: float = 0.99,
    squares: Literal["loc", "scale"] = "loc",
    scale_transform: Transform | None = None,
    other: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    r"""Variational Adam: the scale vector of Adam read as the precision of a mean-field normal.

    With G the derivative of the loss by the mean, N rows, prior N(0, 1 / lambda) and
    :math:`g = (G - \lambda \mu) / N` the mean gradient of a row, step t = 1, 2, ... is

    .. math::
        m_t &= b_1 m_{t-1} + (1 - b_1) G / N, \qquad
        s_t = b_2 s_{t-1} + (1 - b_2) g^2, \\
        \mu_t &= \mu_{t-1} - \epsilon\,
            \frac{m_t / (1 - b_1^t)}{\sqrt{s_t / (1 - b_2^t)} + \lambda / N}, \qquad
        \mathrm{sd}_t = (N s_t + \lambda)^{-1/2}.

    It is here to compare with the literature; :func:`~numpyro_ext.optim.ivon` is the one to use.

    **Biased by.** s tends to the expected square of the *mean* gradient of a minibatch: with
    minibatches of M rows the standard deviation is too large, by a factor of up to :math:`\sqrt M`
    (``squares="scale"`` with the loss ``CurvatureELBO("squared_gradient", K)`` averages the squares
    of K draws). The formula needs a normal prior of mean 0 on unconstrained sites,
    ``TraceMeanField_ELBO`` with ``AutoNormal`` and one particle.

    :param step_size: epsilon, positive, or a schedule of the number of steps.
    :param int num_data: N, times the scale of rows under ``numpyro.handlers.scale``.
    :param prior_precision: lambda, positive, or a dict of arrays by the name of the mean's leaf.
    :param float b1: share of the averaged gradient that is kept, in [0, 1).
    :param float b2: share of the averaged square that is kept, in [0, 1).
    :param str squares: where :math:`g^2` is taken from: ``"loc"``, the gradient of the mean, or
        ``"scale"``, the gradient of the scale, which is then :math:`N g^2 + \lambda -
        \mathrm{sd}^{-2}` in units of natural gradients, as ``CurvatureELBO("squared_gradient", K)``
        makes it.
    :param scale_transform: as for :func:`von`, and so ``other``.

    **References:** Khan et al., *Fast and scalable Bayesian deep learning by weight-perturbation in
    Adam* (ICML 2018), algorithm 1 (right).

    >>> from numpyro.infer import TraceMeanField_ELBO
    >>> from numpyro_ext.optim import vadam
    >>> def model(x, y):
    ...     w = numpyro.sample("w", dist.Normal(0, 1))
    ...     with numpyro.plate("data", 200, subsample_size=1) as idx:
    ...         numpyro.sample("y", dist.Normal(w * x[idx], 0.5), obs=y[idx])
    >>> x = jax.random.normal(jax.random.key(0), (200,))
    >>> guide = AutoNormal(model, init_scale=0.5)
    >>> svi = SVI(model, guide, vadam(0.01, num_data=200), TraceMeanField_ELBO())
    >>> params = svi.run(jax.random.key(1), 3000, x, 2 * x, progress_bar=False).params
    >>> bool(abs(params["w_auto_loc"] - 2) < 0.2)
    True
    """
    check_learning_rate(step_size)
    check_positive("num_data", num_data)
    check_choice("squares", squares, ("loc", "scale"))
    check_share("b1", b1)
    check_share("b2", b2)
    precisions: Any = prior_precision
    by_name = isinstance(precisions, Mapping)
    for lam in precisions.values() if by_name else [precisions]:
        if not isinstance(lam, Tracer) and not bool(jnp.all(jnp.asarray(lam) > 0)):
            raise ValueError(f"prior_precision is {lam!r}; precisions must be positive.")

    def prior_of(name: str) -> Array:
        return jnp.asarray(precisions[name] if by_name else precisions)

    def start(name: str, mean: Array, precision: Array) -> Moments:
        square = (precision - prior_of(name)) / num_data
        # The scale that is the prior's may come back from its leaf a rounding error too wide.
        if not isinstance(square, Tracer) and bool(jnp.any(square * num_data < -1e-4 * precision)):
            raise ValueError(
                f"'{name}' starts wider than its prior; use init_scale <= 1 / sqrt(prior_precision)"
                " in the guide."
            )
        return Moments(jnp.zeros_like(mean), jnp.maximum(square, 0))

    def rule(count: Array, g: Gradient, last: Moments) -> tuple[Array, Array, Moments]:
        t, lam = count + 1.0, prior_of(g.name)
        m = b1 * last.mean + (1 - b1) * g.of_mean / num_data
        of_loc = ((g.of_mean - lam * g.mean) / num_data) ** 2
        of_scale = (g.of_precision + g.precision - lam) / num_data
        s = b2 * last.square + (1 - b2) * (of_loc if squares == "loc" else of_scale)
        divisor = jnp.sqrt(s / (1 - b2**t)) + lam / num_data
        mean = g.mean - rate_at(step_size, count) * m / (1 - b1**t) / divisor
        return mean, num_data * s + lam, Moments(m, s)

    return mean_field_optimiser(start, rule, scale_transform, other)
