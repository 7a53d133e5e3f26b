"""Natural gradients without a Fisher matrix: gradients in the mean parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax

from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.leaves import canonical

Family = type[ExponentialFamily]


def straight_through_mean(family: Family, natural: Any) -> Any:
    r"""The mean of a family, with the natural gradient as its gradient in the natural parameters.

    For a function :math:`g(n) = f(\mu(n))` of the mean,

    .. math:: [\nabla^2 A(n)]^{-1} \nabla g(n) = \nabla f(\mu),

    so that n is given the cotangent of the mean unchanged, its symmetric part where the leaf is
    symmetric. In an overcomplete family a step along it is a natural-gradient step of every minimal
    representation.

    **When it fails.** Everything that depends on n must do so through this mean, once: a function
    of n itself adds an ordinary gradient, in other units. Forward mode raises JAX's own error.

    References: Hoffman, Blei, Wang and Paisley, *Stochastic variational inference* (JMLR 2013),
    section 2.2.

    >>> from numpyro_ext.expfam import Bernoulli, BernoulliNatural, straight_through_mean
    >>> loss = lambda n: straight_through_mean(Bernoulli, n).prob ** 2
    >>> print(f"{jax.grad(loss)(BernoulliNatural(0.0)).log_odds:.1f}")
    1.0
    """
    return _mean(family, natural)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean(family: Family, natural: Any) -> Any:
    return family.mean(natural)


def _mean_fwd(family: Family, natural: Any) -> tuple[Any, None]:
    return family.mean(natural), None


def _mean_bwd(family: Family, saved: None, cotangent: Any) -> tuple[Any]:
    return (canonical(family.Natural(*cotangent)),)


_mean.defvjp(_mean_fwd, _mean_bwd)


def straight_through_kl(family: Family, q: Any, p: Any, mean: Any) -> Array:
    r"""KL(q || p), with the natural gradient as its gradient in q, through the mean of q.

    .. math:: \langle sg(q) - p, mean \rangle - A(sg(q)) + A(p),

    with sg for ``stop_gradient``. The value is ``family.kl(q, p)``. With ``mean =
    straight_through_mean(family, q)`` and a data term that is a function of the same mean, the
    gradient of KL minus data term is minus the natural gradient of the ELBO; for a data term
    :math:`\langle s, mean \rangle` it is :math:`q - p - s`, and a step of size 1 ends at the
    posterior p + s.

    References: Hoffman et al., *Stochastic variational inference* (JMLR 2013), equation 15.

    >>> from numpyro_ext.expfam import (
    ...     Beta, BetaNatural, straight_through_kl, straight_through_mean)
    >>> prior, data = BetaNatural(1.0, 1.0), BetaNatural(6.0, 4.0)
    >>> def loss(q):
    ...     mean = straight_through_mean(Beta, q)
    ...     return straight_through_kl(Beta, q, prior, mean) - Beta.inner(data, mean)
    >>> gradient = jax.grad(loss)(BetaNatural(2.0, 3.0))
    >>> print(2.0 - gradient.a, 3.0 - gradient.b)
    7.0 5.0
    """
    q = lax.stop_gradient(q)
    product = family.inner(q, mean) - family.inner(p, mean)
    return product - family.log_partition(q) + family.log_partition(p)


def natural_gradient_of(family: Family, f: Callable[[Any], Array], natural: Any) -> Any:
    r"""The natural gradient of :math:`f(\mu(n))` at n, a tuple of the natural type.

    It is the gradient of f at the mean, its symmetric part where the leaf is symmetric.

    References: Khan and Lin, *Conjugate-computation variational inference* (AISTATS 2017), sec. 3.

    >>> from numpyro_ext.expfam import Bernoulli, BernoulliNatural, natural_gradient_of
    >>> gradient = natural_gradient_of(Bernoulli, lambda m: m.prob**2, BernoulliNatural(0.0))
    >>> print(f"{gradient.log_odds:.1f}")
    1.0
    """
    return canonical(family.Natural(*jax.grad(f)(family.mean(natural))))
