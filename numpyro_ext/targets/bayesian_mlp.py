"""A fully connected network with priors on its weights, written with plain sample sites."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_ext._checks import check_count, check_positive


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

    with the prior ``weight_prior`` on every weight and bias, and ``noise_prior`` on the precision
    :math:`\gamma`. With ``num_classes`` f is a vector of logits, y is categorical and there is no
    :math:`\gamma`. The sites are ``w0``, ``b0``, ``w1``, ..., with ``w0`` of shape (in, out),
    ``noise_precision`` and ``y`` in the plate ``data``. Without ``y`` there is the deterministic
    site ``f``, ``(N,)`` or ``(N, num_classes)``, too.

    Nothing is standardised: do that with the mean and standard deviation of the training rows. Give
    guides ``init_loc_fn=init_to_fan_in()`` and a small ``init_scale``; NumPyro's default start of
    +-2 ruins every method on a network.

    :param X: features, shape ``(N, d)``.
    :param y: targets, shape ``(N,)``: real numbers, or classes 0, 1, ...; None predicts them.
    :param hidden: widths of the hidden layers; ``()`` is a linear model.
    :param activation: the function h.
    :param weight_prior: distribution of one weight; None for the standard normal.
    :param noise_prior: distribution of the noise precision, or its known value as a number; None
        for ``Gamma(6, 6)``.
    :param int num_classes: number of classes; None for regression.
    :param int subsample_size: rows of a minibatch; all rows if None.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.targets import bayesian_mlp
        >>> prior = Predictive(bayesian_mlp, num_samples=5)
        >>> draws = prior(random.key(0), jnp.ones((7, 3)), hidden=(10, 4))
        >>> draws["w1"].shape, draws["f"].shape
        ((5, 10, 4), (5, 7))
    """
    if jnp.ndim(X) != 2:
        raise ValueError(
            f"X has shape {jnp.shape(X)}; it must be (rows, features): for one feature pass"
            " X[:, None]."
        )
    if y is not None and jnp.shape(y) != (len(X),):
        raise ValueError(f"y has shape {jnp.shape(y)}; it must be ({len(X)},), one for each row.")
    if num_classes is not None:
        check_count("num_classes", num_classes, 2)
    if num_classes is not None and noise_prior is not None:
        raise ValueError("noise_prior was given with num_classes; a class label has no noise.")
    outputs = 1 if num_classes is None else num_classes
    widths = [X.shape[1], *(check_count("hidden", width) for width in hidden), outputs]
    prior = dist.Normal(0.0, 1.0) if weight_prior is None else weight_prior
    layers = []
    for i, shape in enumerate(pairwise(widths)):
        w = numpyro.sample(f"w{i}", prior.expand(shape).to_event(2), infer={"in_axis": -2})
        layers.append((w, numpyro.sample(f"b{i}", prior.expand(shape[1:]).to_event(1))))
    scale = None if num_classes is not None else _noise(noise_prior)
    with numpyro.plate("data", len(X), subsample_size=subsample_size):
        a: Any = numpyro.subsample(X, event_dim=1)
        target = None if y is None else numpyro.subsample(y, event_dim=0)
        for i, (w, b) in enumerate(layers):
            a = a @ w + b if i == 0 else activation(a) @ w + b
        f = a if num_classes is not None else a[:, 0]
        if y is None:
            numpyro.deterministic("f", f)
        likelihood: Any = dist.Categorical(logits=f) if scale is None else dist.Normal(f, scale)
        numpyro.sample("y", likelihood, obs=target)


def _noise(prior: Any) -> Any:
    """The standard deviation of the noise."""
    if prior is None:
        prior = dist.Gamma(6.0, 6.0)
    if not isinstance(prior, dist.Distribution):
        check_positive("noise_prior", prior)
        return jnp.asarray(prior, float) ** -0.5
    precision: Any = numpyro.sample("noise_precision", prior)
    return precision**-0.5
