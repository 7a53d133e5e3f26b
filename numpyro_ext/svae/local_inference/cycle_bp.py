"""Belief propagation for binary variables on a cycle (Weiss, 1997)."""

from typing import NamedTuple

import jax
from jax import Array, lax
from jax.nn import logsumexp
import jax.numpy as jnp

Factors = tuple[Array, Array]


class CycleBPResult(NamedTuple):
    """Messages and marginals of :func:`cycle_bp`: ``(K,)`` log odds a and b that pair i sends to
    variables i and i + 1, the probabilities ``(K,)`` of 1 and ``(K, 2, 2)`` of pairs, and the Bethe
    approximation of the log normaliser."""

    a: Array
    b: Array
    prob: Array
    pair: Array
    log_z: Array


def cycle_bp(log_odds: Array, log_pair: Array) -> CycleBPResult:
    r"""Loopy belief propagation on one cycle of binary variables.

    The factor graph, with indices modulo K, and its fixed point:

    .. math::
        p(z) &\propto \prod_i e^{\lambda_i z_i} e^{\phi_i(z_i, z_{i+1})}, \qquad
        l_i = \lambda_i + b_{i-1}, \quad r_i = \lambda_{i+1} + a_{i+1}, \\
        a_i &= \log \frac{e^{\phi_i(1,0)} + e^{\phi_i(1,1) + r_i}}
                         {e^{\phi_i(0,0)} + e^{\phi_i(0,1) + r_i}}, \qquad
        b_i = \log \frac{e^{\phi_i(0,1)} + e^{\phi_i(1,1) + l_i}}
                        {e^{\phi_i(0,0)} + e^{\phi_i(1,0) + l_i}}.

    The marginals are not exact. With the eigenvalues :math:`l_1 \ge l_2` of the product of the
    transfer matrices around the cycle, ``log_z`` is :math:`\log l_1` where the exact one is
    :math:`\log(l_1 + l_2)`, and each marginal lies on the same side of 1/2 as the exact one.
    The messages into one variable are the eigenvectors of that product, and one pass gives the
    others, where sweeps would converge at the rate :math:`l_2 / l_1` for each K of them.

    :param log_odds: :math:`\lambda`, ``(K,)``, with K at least 2.
    :param log_pair: :math:`\phi`, ``(K, 2, 2)``, where ``log_pair[i, l, r]`` belongs to
        :math:`z_i = l, z_{i+1} = r`.

    References: Weiss, *Belief propagation and revision in networks with loops* (1997), section 3.

    >>> from numpyro_ext.svae import cycle_bp
    >>> ising = jnp.broadcast_to(jnp.array([[0.8, -0.8], [-0.8, 0.8]]), (4, 2, 2))
    >>> prob = cycle_bp(jnp.array([0.5, -0.3, 0.2, 0.1]), ising).prob
    >>> print([f"{p:.3f}" for p in prob])
    ['0.671', '0.616', '0.643', '0.654']
    """
    log_odds, log_pair = jnp.asarray(log_odds), jnp.asarray(log_pair)
    K = log_odds.shape[-1] if log_odds.ndim else 0
    if K < 2 or log_odds.ndim != 1 or log_pair.shape != (K, 2, 2):
        raise ValueError(
            f"log_odds has shape {log_odds.shape} and log_pair {log_pair.shape}; they must be (K,)"
            " and (K, 2, 2) with K at least 2."
        )
    a, b = _solve((log_odds, log_pair))
    left, right = log_odds + jnp.roll(b, 1), jnp.roll(log_odds + a, -1)
    bits = jnp.arange(2)
    log_r = bits[:, None] * left[:, None, None] + bits * right[:, None, None] + log_pair
    log_z_pairs = logsumexp(log_r, axis=(-2, -1))
    pair = jnp.exp(log_r - log_z_pairs[:, None, None])
    odds = log_odds + a + jnp.roll(b, 1)
    log_z = jnp.sum(log_z_pairs) - jnp.sum(jax.nn.softplus(odds))
    return CycleBPResult(a, b, jax.nn.sigmoid(odds), pair, log_z)


def _solve(factors: Factors) -> tuple[Array, Array]:
    odds, phi = factors
    transfer = phi + jnp.stack([jnp.zeros_like(odds), odds], -1)[..., None]

    def multiply(product: Array, factor: Array) -> tuple[Array, None]:
        terms = product[:, :, None] + factor[None]
        return logsumexp(terms, axis=1), None

    product, _ = lax.scan(multiply, transfer[0], transfer[1:])
    (A, B), (C, D) = product
    # The eigenvectors are (B, l - A) and (C, l - A), with l - A = half + sqrt(half^2 + BC) as a
    # product, without a difference that cancels; ``tiny`` keeps its argument finite.
    log_root = (B + C) / 2
    unit = lax.stop_gradient(jnp.maximum(jnp.maximum(A, D), log_root))
    half = (jnp.exp(D - unit) - jnp.exp(A - unit)) / 2
    tiny = jnp.maximum(log_root - unit, -40.0)
    gap = log_root + jnp.arcsinh(half * jnp.exp(-tiny))
    gap = gap + jnp.sign(half) * (tiny - (log_root - unit))

    def leftwards(right: Array, factor: Factors) -> tuple[Array, Array]:
        own, pair = factor
        log_one = jnp.logaddexp(pair[1, 0], pair[1, 1] + right)
        a = log_one - jnp.logaddexp(pair[0, 0], pair[0, 1] + right)
        return own + a, a

    def rightwards(incoming: Array, factor: Factors) -> tuple[Array, Array]:
        own, pair = factor
        left = own + incoming
        log_one = jnp.logaddexp(pair[0, 1], pair[1, 1] + left)
        b = log_one - jnp.logaddexp(pair[0, 0], pair[1, 0] + left)
        return b, b

    _, a = lax.scan(leftwards, gap - B, factors, reverse=True)
    _, b = lax.scan(rightwards, gap - C, factors)
    return a, b
