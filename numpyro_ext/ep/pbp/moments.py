r"""Moments of a rectifier network with independent normal weights, and the updates that use them.

A weight is N(m, v), where v is a variance, and a precision is Gamma(a, b) of shape a and rate b. A
layer is a pair of matrices m and v of shape (outputs, inputs + 1), with a last column for the
constant 1, or (outputs, inputs) without a bias.
"""

from collections.abc import Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import log_ndtr
from jax.scipy.stats import norm

_SERIES = -30.0  # below this many standard deviations the ratio phi / Phi is taken from its series

Layers = Sequence[Array]


def _normals(mean: Array, var: Array) -> tuple[Array, Array, Array, Array]:
    """The standard deviation s, mean / s, and Phi and phi there; a variance of 0 is made tiny."""
    s = jnp.sqrt(jnp.maximum(var, 1e-30))
    al = mean / s
    return s, al, jnp.exp(log_ndtr(al)), norm.pdf(al)


@jax.custom_jvp
def rectified_normal_moments(mean: Array, var: Array) -> tuple[Array, Array]:
    """Mean and variance of max(0, x) for x ~ N(mean, var), of any equal shapes."""
    s, al, cdf, _ = _normals(mean, var)
    safe = jnp.maximum(al, _SERIES)
    far = jnp.minimum(al, _SERIES)
    kap = jnp.exp(norm.logpdf(safe) - log_ndtr(safe))
    kap = jnp.where(al < _SERIES, -far - 1 / far + 2 / far**3, kap)
    t = mean + s * kap
    mu = cdf * t
    return mu, mu * t * jnp.exp(log_ndtr(-al)) + cdf * s * s * (1 - kap * (kap + al))


@rectified_normal_moments.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    (mean, var), (d_mean, d_var) = primals, tangents
    mu, s2 = rectified_normal_moments(mean, var)
    s, al, cdf, pdf = _normals(mean, var)
    d_mu = cdf * d_mean + pdf / (2 * s) * d_var
    d_s2 = 2 * mu * jnp.exp(log_ndtr(-al)) * d_mean + (cdf - mu * pdf / s) * d_var
    return (mu, s2), (d_mu, d_s2)


def forward_moments(means: Layers, variances: Layers, x: Array) -> tuple[Array, Array]:
    r"""Mean and variance of the output of the network at one input.

    .. math::

        \mu_a = M \mu / \sqrt d, \qquad \sigma_a^2 = \left[ (M \circ M) \sigma^2 + V (\mu \circ \mu
        + \sigma^2) \right] / d

    in a layer of d inputs, the constant among them, and the exact moments of the rectifier between
    layers, with the units of every layer treated as independent normal.
    """
    bias = means[0].shape[1] - x.shape[0]
    constant = jnp.ones(bias, x.dtype)
    mu, s2, out = x, None, (x, x)
    for i, (m, v) in enumerate(zip(means, variances, strict=True)):
        if i:
            mu, s2 = rectified_normal_moments(*out)
        d = m.shape[1]
        if bias:
            mu = jnp.concatenate([mu, constant])
            s2 = None if s2 is None else jnp.concatenate([s2, 0 * constant])
        # The input has no variance.
        spread = v @ (mu * mu) if s2 is None else (m * m) @ s2 + v @ (mu * mu + s2)
        out = (m @ mu) / d**0.5, spread / d
    return out[0][0], out[1][0]


def gamma_update(a: Array, b: Array, r2: Array, s2: Array) -> tuple[Array, Array]:
    r"""The Gamma(a, b) of the precision after a residual with square r2.

    Its evidence is :math:`K_s = \mathrm N(r; 0, V_s)` with :math:`V_s = s_2 + b / (a - 1 + s)`, and
    the paper's update

    .. math::

        a' = \left( K_0 K_2 K_1^{-2} (a + 1) / a - 1 \right)^{-1}, \qquad
        b' = \left( K_2 K_1^{-1} (a + 1) / b - K_1 K_0^{-1} a / b \right)^{-1}

    subtracts numbers that agree to all digits of single precision once a is some thousands. So
    :math:`a' - a` and :math:`\log(K_1 / K_0)` come from differences of :math:`V_s` in closed form.
    Where a' is at most 1, b' at most 0 or either is not finite, (a, b) stays.
    """
    d0, d1 = b / ((a - 1) * a), b / (a * (a + 1))
    difference = 2 * b / (a * (a * a - 1))  # of d0 and d1
    V0 = s2 + b / (a - 1)
    V1, V2 = V0 - d0, V0 - d0 - d1
    e0 = -0.5 * jnp.log1p(-d0 / V0) - 0.5 * r2 * d0 / (V0 * V1)
    # log K0 + log K2 - 2 log K1
    u = 0.5 * jnp.log1p((d0 * d0 - V0 * difference) / (V0 * V2))
    u += 0.5 * r2 * (V0 * difference - d0 * (d0 + d1)) / (V0 * V1 * V2)
    grown = (a + 1) * jnp.expm1(u)
    a_new = a - a * grown / (1 + grown)
    b_new = b * (a_new / a) * jnp.exp(-e0)
    good = (a_new > 1) & (b_new > 0) & jnp.isfinite(a_new) & jnp.isfinite(b_new)
    return jnp.where(good, a_new, a), jnp.where(good, b_new, b)


def prior_update(m: Array, v: Array, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    """N(m, v) and Gamma(a, b) after the factor N(w; 0, 1 / precision) of one weight."""
    c = b / (a - 1)
    a_new, b_new = gamma_update(a, b, m * m, v)
    return m * c / (v + c), v * c / (v + c), a_new, b_new


def normal_update(
    means: Layers, variances: Layers, noise_variance: Array, x: Array, y: Array
) -> tuple[list[Array], list[Array], Array, Array, Array]:
    """The weights after one datum of known noise variance: means and variances, which may be
    negative, the log evidence, and the squared residual and variance of the output before."""

    def log_evidence(means: Layers, variances: Layers) -> tuple[Array, tuple[Array, Array]]:
        mean, var = forward_moments(means, variances, x)
        r2, total = (y - mean) ** 2, var + noise_variance
        return -0.5 * (jnp.log(2 * jnp.pi * total) + r2 / total), (r2, var)

    of_both = jax.value_and_grad(log_evidence, argnums=(0, 1), has_aux=True)
    (log_z, (r2, s2)), grads = of_both(list(means), list(variances))
    new_means, new_variances = [], []
    for m, v, dm, dv in zip(means, variances, *grads, strict=True):
        new_means.append(m + v * dm)
        new_variances.append(v - v * v * (dm * dm - 2 * dv))
    return new_means, new_variances, log_z, r2, s2
