"""Sums over the transitions of linear dynamics, which the chains' rules share."""

from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam import (
    GaussianChain,
    GaussianChainMean,
    GaussianChainNatural,
    GaussianMean,
    MNIWMean,
    NIWMean,
)
from numpyro_ext.svae.local_inference.base import expected_log_normal
from numpyro_ext.svae.potentials import GaussianPotential


def chain_given(
    initial: NIWMean, dynamics: MNIWMean, potential: GaussianPotential, r: Array
) -> GaussianChainNatural:
    """The chain of expected natural parameters, averaged over which of K systems moves each step.

    The matrices are not those of a normalised linear system, because dynamics are uncertain.

    :param potential: of batch ``(*batch, T)``; the factors of the systems have batch ``(K,)``.
    :param r: ``(*batch, T, K)``, the weight of each system at each step.
    """
    h = jnp.einsum("...k,ki->...i", r[..., 0, :], initial.precision_loc)
    first = jnp.einsum("...k,kij->...ij", r[..., 0, :], initial.neg_half_precision)
    later = r[..., 1:, :]
    to = jnp.einsum("...tk,kij->...tij", later, dynamics.neg_half_precision)
    back = jnp.einsum("...tk,kij->...tij", later, dynamics.neg_half_quad)
    V = jnp.einsum("...tk,kij->...tij", later, dynamics.precision_weight)
    W = potential.W + jnp.concatenate([first[..., None, :, :], to], axis=-3)
    return GaussianChainNatural(potential.h.at[..., 0, :].add(h), W.at[..., :-1, :, :].add(back), V)


def expected_log_steps(initial: NIWMean, dynamics: MNIWMean, moments: GaussianChainMean) -> Array:
    """The expected log density of each step under each system, ``(*batch, T, K)``, without the
    constant ``-d/2 log 2 pi``."""
    first = GaussianMean(moments.x[..., :1, None, :], moments.xx[..., :1, None, :, :])
    to, before = moments.xx[..., 1:, :, :], moments.xx[..., :-1, :, :]
    later = (
        jnp.einsum("kij,...tij->...tk", dynamics.neg_half_precision, to)
        + jnp.einsum("kij,...tij->...tk", dynamics.precision_weight, moments.xx_next)
        + jnp.einsum("kij,...tij->...tk", dynamics.neg_half_quad, before)
        + dynamics.half_logdet
    )
    return jnp.concatenate([expected_log_normal(initial, first), later], axis=-2)


def chain_negative_entropy(natural: GaussianChainNatural) -> Array:
    """``E log q`` of a chain, without ``-T d/2 log 2 pi``."""
    T, d = natural.h.shape[-2:]
    return T * d / 2 * jnp.log(2 * jnp.pi) - GaussianChain.entropy(natural)
