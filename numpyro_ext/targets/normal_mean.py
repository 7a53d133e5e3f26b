"""A normal mean with a normal prior: posterior and evidence in closed form."""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


class NormalMeanAnswer(NamedTuple):
    """The exact posterior ``N(mean, variance)`` of ``z``, and ``log p(x)``."""

    mean: Array
    variance: Array
    log_evidence: Array


def normal_mean(
    x: Array,
    *,
    prior_mean: float = 0.0,
    prior_scale: float = 1.0,
    noise_scale: float = 1.0,
    subsample_size: int | None = None,
) -> None:
    r"""The model :math:`z \sim N(\mu_0, s_0^2)`, :math:`x_n \mid z \sim N(z, s^2)`.

    :param x: data, shape ``(N,)``.
    :param float prior_mean: :math:`\mu_0`.
    :param float prior_scale: :math:`s_0`.
    :param float noise_scale: :math:`s`.
    :param int subsample_size: rows of a minibatch; all rows if ``None``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro.infer.util import log_density
        >>> from numpyro_ext.targets import normal_mean, normal_mean_answer
        >>> x = jnp.array([0.5, -1.0, 2.0])
        >>> answer = normal_mean_answer(x)
        >>> print(f"{answer.mean:.4f} {answer.variance:.4f} {answer.log_evidence:.4f}")
        0.3750 0.2500 -5.7937
    """
    z = numpyro.sample("z", dist.Normal(prior_mean, prior_scale))
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        batch = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(z, noise_scale), obs=batch)


def normal_mean_answer(
    x: Array, *, prior_mean: float = 0.0, prior_scale: float = 1.0, noise_scale: float = 1.0
) -> NormalMeanAnswer:
    r"""Posterior and evidence of :func:`normal_mean`.

    .. math::
        \frac1{v} = \frac1{s_0^2} + \frac{N}{s^2}, \qquad
        m = v \Bigl(\frac{\mu_0}{s_0^2} + \frac{\sum_n x_n}{s^2}\Bigr), \qquad
        \log p(x) = \log \frac{p(m)\, p(x \mid m)}{N(m \mid m, v)}.

    The arguments are those of :func:`normal_mean`.

    .. doctest::

        >>> from numpyro_ext.targets import normal_mean_answer
        >>> float(normal_mean_answer(jnp.array([3.0])).mean)
        1.5
    """
    precision = jnp.asarray(1.0 / prior_scale**2 + x.shape[0] / noise_scale**2)
    variance = 1.0 / precision
    mean = variance * (prior_mean / prior_scale**2 + x.sum() / noise_scale**2)
    joint = dist.Normal(prior_mean, prior_scale).log_prob(mean)
    joint = joint + dist.Normal(mean, noise_scale).log_prob(x).sum()
    return NormalMeanAnswer(mean, variance, joint + 0.5 * jnp.log(2 * jnp.pi * variance))
