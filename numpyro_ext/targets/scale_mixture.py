"""The prior of Bayes by backprop: a mixture of a wide and a narrow normal."""

import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext._checks import check_positive


def scale_mixture(
    pi: float = 0.5, scale_1: float = 1.0, scale_2: float = 0.1
) -> dist.MixtureSameFamily:
    r"""A prior of weights with a narrow peak and wide shoulders.

    .. math::
        p(w) = \pi\, N(w; 0, \sigma_1^2) + (1 - \pi)\, N(w; 0, \sigma_2^2) .

    It is a distribution of one number; a prior of a matrix is
    ``scale_mixture().expand([m, n]).to_event(2)``, and modules of ``numpyro.contrib.module`` take
    it as ``prior=scale_mixture()``. The log density is a ``logsumexp``, so it is finite in the
    tails of the narrow component. It has no KL term in closed form: use ``Trace_ELBO``.

    :param float pi: share of the first component, in (0, 1).
    :param float scale_1: its standard deviation :math:`\sigma_1`.
    :param float scale_2: that of the second, :math:`\sigma_2`.

    **Reference:** *Weight uncertainty in neural networks*, Charles Blundell, Julien Cornebise,
    Koray Kavukcuoglu, Daan Wierstra, ICML 2015, Section 3.3 (eq. 7).

    .. doctest::

        >>> from numpyro_ext.targets import scale_mixture
        >>> prior = scale_mixture(0.5, 1.0, 0.1)
        >>> print(f"{prior.log_prob(0.0):.4f} {prior.variance:.4f}")
        0.7858 0.5050
    """
    check_positive("pi", pi)
    if float(pi) >= 1:
        raise ValueError(f"pi is {pi!r}; it must be in (0, 1): for one component use dist.Normal.")
    check_positive("scale_1", scale_1)
    check_positive("scale_2", scale_2)
    weights = dist.CategoricalProbs(jnp.array([pi, 1 - pi]))
    return dist.MixtureSameFamily(weights, dist.Normal(0.0, jnp.array([scale_1, scale_2])))
