r"""The Taylor sites of all rows, of which a step on a minibatch adds only the difference.

.. math:: \tau_n = (g_n - H_n c, \; -H_n), \qquad \bar\tau = \frac1N \sum_n \tau_n, \qquad
    \frac1M \sum_m \lambda_m \;\text{ becomes }\; \bar\tau + \frac1M \sum_m (\lambda_m - \tau_m)

with the gradient :math:`g_n` and the Hessian :math:`H_n` of the log likelihood of a row at a center
c. Both have the same mean over minibatches, and so the same fixed point. With c at 0, a site of a
cavity with variance V around c differs from its Taylor site by the third derivative times V / 2 in
the shift, and by minus the fourth one times V / 2 in the precision, to first order in V.
"""

from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.factors import Factors
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.ep.normal import Cavity, Family, Moments, Site
from numpyro_ext.ep.projection import Projected


class TaylorSites(NamedTuple):
    """The center c, ``(D,)``, and the mean of the Taylor sites of all rows there, in x."""

    center: Array
    mean: Site


def sites_of_proxy(family: Family, proxy: TaylorProxy, factors: Factors) -> TaylorSites:
    """Those of the rows of a model, in the order of its flat vector; an error if the proxy is not
    one of them.

    :param proxy: of degree 2.
    """
    assert proxy.hessian is not None
    info, shapes = factors.info, dict(proxy.shapes)
    if (proxy.plate, proxy.size, shapes) != (factors.plate, factors.size, dict(info.shapes)):
        raise ValueError(
            f"the proxy is one of {proxy.size} rows of '{proxy.plate}' with the unconstrained sites"
            f" {shapes}, and the model has {factors.size} rows of '{factors.plate}' with"
            f" {dict(info.shapes)}; make it by taylor_proxy(model, *args) with this model and the"
            " arguments of this run."
        )
    order = np.asarray(info.ravel(proxy.unravel(jnp.arange(info.size))))
    c = proxy.location[order]
    gradient, hessian = proxy.grad[order], proxy.hessian[np.ix_(order, order)]
    whole = jnp.eye(len(c), dtype=c.dtype)
    return TaylorSites(c, _taylor(family, whole, c, gradient / proxy.size, hessian / proxy.size))


def site_of_row(
    family: Family, factors: Factors, spec: Any, n: Array, A: Array, center: Array
) -> Site:
    """The Taylor site of row n, which depends on A x alone."""
    u = A @ center

    def log_factor(v: Array) -> Array:
        return spec.log_factor(factors, n, center + (v - u) @ A)

    return _taylor(family, A, center, jax.grad(log_factor)(u), jax.hessian(log_factor)(u))


def _taylor(family: Family, A: Array, center: Array, gradient: Array, hessian: Array) -> Site:
    """The site whose log density has these derivatives at u = A c: that of a cavity which is a
    point."""
    u, none = A @ center, jnp.zeros((), center.dtype)
    point = Cavity(u, jnp.zeros_like(hessian), none, none, Moments(center, jnp.zeros_like(center)))
    derivatives = Projected(gradient - hessian @ u, -hessian, *[none] * 4)
    return family.site(A, point, derivatives, 1.0)
