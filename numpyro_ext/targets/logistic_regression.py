"""Logistic regression with an unknown prior scale, which many examples and benchmarks use."""

from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def logistic_regression(
    x: Array, y: Array | None = None, *, subsample_size: int | None = None
) -> None:
    r"""The model of the quick start: a constrained scale, weights, an intercept, one data plate.

    .. math::
        s \sim \mathrm{HalfNormal}(1), \quad w_j \sim N(0, s^2), \quad b \sim N(0, 2.5^2), \quad
        y_n \sim \mathrm{Bernoulli}(\sigma(x_n^\top w + b)).

    :param x: features, shape ``(N, d)``, standardised.
    :param y: labels 0 or 1, shape ``(N,)``; ``None`` predicts them.
    :param int subsample_size: rows of a minibatch; all rows if ``None``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.targets import logistic_regression
        >>> prior = Predictive(logistic_regression, num_samples=5)(random.key(0), jnp.ones((7, 3)))
        >>> prior["y"].shape, prior["weights"].shape
        ((5, 7), (5, 3))
    """
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    weights = numpyro.sample("weights", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.5))
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        batch_x = numpyro.subsample(x, event_dim=1)
        batch_y = None if y is None else numpyro.subsample(y, event_dim=0)
        logits = jnp.matmul(batch_x, weights) + intercept
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=batch_y)
