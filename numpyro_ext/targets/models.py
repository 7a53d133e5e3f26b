"""Models: a logistic regression, a network, and targets with known answers."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist


def logistic_regression(
    x: Array, y: Array | None = None, *, subsample_size: int | None = None
) -> None:
    r"""The model of the quick start.

    .. math::
        s \sim \mathrm{HalfNormal}(1), \quad w_j \sim N(0, s^2), \quad b \sim N(0, 2.5^2), \quad
        y_n \sim \mathrm{Bernoulli}(\sigma(x_n^\top w + b)).

    :param x: features, shape ``(N, d)``, standardised.
    :param y: labels 0 or 1, shape ``(N,)``; ``None`` predicts them.
    :param int subsample_size: rows of a minibatch; all rows if ``None``.

    >>> from numpyro_ext.targets import logistic_regression
    >>> Predictive(logistic_regression, num_samples=9)(random.key(0), jnp.ones((7, 3)))["y"].shape
    (9, 7)
    """
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    weights = numpyro.sample("weights", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.5))
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        batch_x = numpyro.subsample(x, event_dim=1)
        batch_y = None if y is None else numpyro.subsample(y, event_dim=0)
        logits = jnp.matmul(batch_x, weights) + intercept
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=batch_y)


def bayesian_mlp(
    X: Array,
    y: Array | None = None,
    *,
    hidden: Sequence[int] = (50,),
    activation: Callable[[Array], Array] = jax.nn.relu,
    weight_prior: Any = None,
    noise_prior: Any = None,
    num_classes: int | None = None,
    subsample_size: int | None = None,
) -> None:
    r"""A Bayesian neural network for regression, or for classification.

    .. math::
        a_0 = x, \qquad a_{l+1} = h(a_l W_l + b_l), \qquad f = a_L W_L + b_L, \qquad
        y_n \sim N(f(x_n), 1 / \gamma),

    where ``num_classes`` makes f logits and y categorical, without a :math:`\gamma`. The sites are
    ``w0`` of shape (in, out), ``b0``, ``w1``, ..., ``noise_precision`` and ``y`` in the plate
    ``data``; without ``y`` there is the deterministic site ``f``, too.

    Standardise the data, and give guides ``init_loc_fn=init_to_fan_in()`` and a small
    ``init_scale``.

    :param X: features, shape ``(N, d)``.
    :param y: targets, shape ``(N,)``: numbers, or classes 0, 1, ...; None predicts them.
    :param hidden: widths of the hidden layers; ``()`` is a linear model.
    :param activation: the function h.
    :param weight_prior: of every weight and bias; None for the standard normal.
    :param noise_prior: of the precision :math:`\gamma`, or its value; None for ``Gamma(6, 6)``.
    :param int num_classes: number of classes; None for regression.
    :param int subsample_size: rows of a minibatch; all rows if None.

    >>> from numpyro_ext.targets import bayesian_mlp
    >>> Predictive(bayesian_mlp, num_samples=9)(random.key(0), jnp.ones((7, 3)))["f"].shape
    (9, 7)
    """
    if y is not None and jnp.shape(y) != (len(X),):
        raise ValueError(f"y has shape {jnp.shape(y)}; it must be ({len(X)},), one for each row.")
    outputs = 1 if num_classes is None else num_classes
    widths = [X.shape[1], *hidden, outputs]
    prior = dist.Normal(0.0, 1.0) if weight_prior is None else weight_prior
    layers = []
    for i, shape in enumerate(pairwise(widths)):
        w = numpyro.sample(f"w{i}", prior.expand(shape).to_event(2), infer={"in_axis": -2})
        layers.append((w, numpyro.sample(f"b{i}", prior.expand(shape[1:]).to_event(1))))
    prior_of_noise: Any = dist.Gamma(6.0, 6.0) if noise_prior is None else noise_prior
    precision = prior_of_noise
    if num_classes is None and isinstance(prior_of_noise, dist.Distribution):
        precision = numpyro.sample("noise_precision", prior_of_noise)
    with numpyro.plate("data", len(X), subsample_size=subsample_size):
        a: Any = numpyro.subsample(X, event_dim=1)
        target = None if y is None else numpyro.subsample(y, event_dim=0)
        for i, (w, b) in enumerate(layers):
            a = a @ w + b if i == 0 else activation(a) @ w + b
        f = a if num_classes is not None else a[:, 0]
        if y is None:
            numpyro.deterministic("f", f)
        if num_classes is None:
            likelihood: Any = dist.Normal(f, jnp.asarray(precision) ** -0.5)
        else:
            likelihood = dist.Categorical(logits=f)
        numpyro.sample("y", likelihood, obs=target)


def scale_mixture(
    pi: float = 0.5, scale_1: float = 1.0, scale_2: float = 0.1
) -> dist.MixtureSameFamily:
    r"""A prior of weights with a narrow peak and wide shoulders.

    .. math::
        p(w) = \pi\, N(w; 0, \sigma_1^2) + (1 - \pi)\, N(w; 0, \sigma_2^2) .

    It has no KL term in closed form: use ``Trace_ELBO``.

    :param float pi: share of the first component, in (0, 1); ``scale_1`` and ``scale_2`` are
        :math:`\sigma_1` and :math:`\sigma_2`.

    **Reference:** Blundell et al., *Weight uncertainty in neural networks* (ICML 2015), equation 7.

    >>> from numpyro_ext.targets import scale_mixture
    >>> prior = scale_mixture(0.5, 1.0, 0.1)
    >>> print(f"{prior.log_prob(0.0):.4f} {prior.variance:.4f}")
    0.7858 0.5050
    """
    weights = dist.CategoricalProbs(jnp.array([pi, 1 - pi]))
    return dist.MixtureSameFamily(weights, dist.Normal(0.0, jnp.array([scale_1, scale_2])))


class NormalMeanAnswer(NamedTuple):
    """The exact posterior ``N(mean, variance)`` of ``z``, and ``log p(x)``."""

    mean: Array
    variance: Array
    log_evidence: Array


def normal_mean(x: Array, *, subsample_size: int | None = None) -> None:
    r"""The model :math:`z \sim N(0, 1)`, :math:`x_n \mid z \sim N(z, 1)`.

    :param x: data, shape ``(N,)``.
    :param int subsample_size: rows of a minibatch; all rows if ``None``.

    >>> from numpyro.infer.util import log_density
    >>> x = jnp.array([0.5, -1.0, 2.0])
    >>> print(f"{log_density(normal_mean, (x,), {}, {'z': 0.375})[0]:.4f}")
    -6.0195
    """
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=subsample_size):
        numpyro.sample("x", dist.Normal(z, 1.0), obs=numpyro.subsample(x, event_dim=0))


def normal_mean_answer(x: Array) -> NormalMeanAnswer:
    r"""Posterior and evidence of :func:`normal_mean`.

    .. math::
        v = \frac1{1 + N}, \qquad m = v \sum_n x_n, \qquad
        \log p(x) = \log \frac{p(m)\, p(x \mid m)}{N(m \mid m, v)}.

    >>> from numpyro_ext.targets import normal_mean_answer
    >>> answer = normal_mean_answer(jnp.array([0.5, -1.0, 2.0]))
    >>> print(f"{answer.mean:.4f} {answer.variance:.4f} {answer.log_evidence:.4f}")
    0.3750 0.2500 -5.7937
    """
    variance = jnp.asarray(1.0 / (1.0 + x.shape[0]))
    mean = variance * x.sum()
    joint = dist.Normal(0.0, 1.0).log_prob(mean) + dist.Normal(mean, 1.0).log_prob(x).sum()
    return NormalMeanAnswer(mean, variance, joint + 0.5 * jnp.log(2 * jnp.pi * variance))


BEND, VARIANCE = 0.03, 100.0


def banana() -> None:
    r"""The model :math:`x_1 \sim N(0, v)`, :math:`x_2 \mid x_1 \sim N(b (x_1^2 - v), 1)`, of
    :math:`b = 0.03` and :math:`v = 100`.

    Its moments are :math:`E x = 0`, :math:`\mathrm{Var}\, x_1 = v`, :math:`\mathrm{Var}\, x_2 = 1 +
    2 b^2 v^2`, :math:`\mathrm{Cov}(x_1, x_2) = 0`, :math:`E\, x_1^2 x_2 = 2 b v^2`. The site ``z1``
    is :math:`x_1 / \sqrt v`.

    >>> from numpyro.infer.util import log_density
    >>> print(f"{log_density(banana, (), {}, {'z1': 1.0, 'x2': 0.0})[0]:.4f}")
    -2.3379
    """
    z1 = numpyro.sample("z1", dist.Normal(0.0, 1.0))
    numpyro.sample("x2", dist.Normal(BEND * VARIANCE * (z1**2 - 1.0), 1.0))


def banana_potential(x: Array) -> Array:
    r"""Minus the log density of :func:`banana` in :math:`(x_1, x_2)`, ``(2,)``, up to a constant.

    >>> from numpyro_ext.targets import banana_potential
    >>> float(banana_potential(jnp.array([0.0, -3.0])))
    0.0
    """
    residual = x[1] - BEND * (x[0] ** 2 - VARIANCE)
    return 0.5 * x[0] ** 2 / VARIANCE + 0.5 * residual**2
