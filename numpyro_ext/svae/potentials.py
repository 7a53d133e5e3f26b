"""The factors by which recognition networks multiply the density of a latent vector."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
from jax import Array
from jax.nn import logsumexp, softmax
import jax.numpy as jnp

from numpyro_ext.expfam import GaussianMean, GaussianNatural, GaussianStandard
from numpyro_ext.expfam.linalg import (
    cholesky,
    half_logdet,
    inverse,
    matvec,
    outer,
    solve,
    symmetric,
)


class _Factor(ABC):
    """The methods that both potentials have; ``eta`` are natural parameters of batch shape E."""

    @abstractmethod
    def log_partition_ratio(self, eta: GaussianNatural) -> Array:
        r""":math:`\log \int N(x \mid \eta)\, \psi(x)\, dx`, an array ``(*batch, *E)``."""

    @abstractmethod
    def tilted_normal(self, eta: GaussianNatural) -> GaussianStandard:
        r"""Mean and covariance of :math:`N(x \mid \eta)\, \psi(x)`, of batch ``(*batch, *E)``."""

    def tilted_moments(self, eta: GaussianNatural) -> GaussianMean:
        r"""E x and E x x^T under :math:`N(x \mid \eta)\, \psi(x)`, of batch ``(*batch, *E)``."""
        loc, covariance = self.tilted_normal(eta)
        return GaussianMean(loc, covariance + outer(loc, loc))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GaussianPotential(_Factor):
    r"""The factor :math:`\psi(x) = \exp(h^\top x + x^\top W x)`, which need not be a density.

    With a normal of natural parameters :math:`\eta`, of precision J and mean m, and
    :math:`R = -2W, g = h - R m`,

    .. math::
        \log \int N(x \mid \eta)\, \psi(x)\, dx
        = h^\top m - \tfrac12 m^\top R m + \tfrac12 g^\top (J + R)^{-1} g
        - \tfrac12 \log \frac{|J + R|}{|J|},

    which is a difference of log partitions written so that float32 is enough far from the origin.
    A zero potential is the factor one and stands for no observation. h is ``(*batch, d)``, and W
    ``(*batch, d, d)``, of which only the symmetric part counts.

    References: Johnson et al. (NIPS 2016), section 4.

    >>> from numpyro_ext.expfam import Gaussian
    >>> from numpyro_ext.svae import GaussianPotential
    >>> psi = GaussianPotential(jnp.array([3.0]), jnp.array([[-1.0]]))
    >>> prior = Gaussian.from_standard(loc=jnp.zeros(1), covariance_matrix=jnp.eye(1))
    >>> print(f"{psi.tilted_moments(prior).x.item():.3f}")
    1.000
    """

    h: Array
    W: Array

    @classmethod
    def from_diagonal(cls, h: Array, precision: Array) -> "GaussianPotential":
        """The potential of independent coordinates, with h precision times mean."""
        return cls(h, -precision[..., None] * jnp.eye(h.shape[-1], dtype=h.dtype) / 2)

    def log_partition_ratio(self, eta: GaussianNatural) -> Array:
        return _tilt(*_beside(self.h, self.W, eta), normalized=False)[0]

    def tilted_normal(self, eta: GaussianNatural) -> GaussianStandard:
        return _tilt(*_beside(self.h, self.W, eta), normalized=False)[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixturePotential(_Factor):
    r"""The factor :math:`\psi(x) = \sum_c w_c\, \psi_c(x)` of Gaussian components.

    .. math:: \psi_c(x) = N(x \mid r_c),

    where :math:`r_c = (h_c, W_c)` must be the natural parameter of a density. The weights need not
    sum to one. Integrals leave out the factor :math:`(2\pi)^{-d/2}`. A component of h = 0 and
    W = 0, which stands for no observation, is the factor one. Weights are ``(*batch, C)``, h
    ``(*batch, C, d)`` and W ``(*batch, C, d, d)``.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.expfam import Gaussian
    >>> from numpyro_ext.svae import MixturePotential
    >>> h, W = jnp.array([[-4.0], [4.0]]), -jnp.ones((2, 1, 1))
    >>> psi = MixturePotential(jnp.log(jnp.array([0.5, 0.5])), h, W)
    >>> prior = Gaussian.from_standard(loc=jnp.zeros(1), covariance_matrix=jnp.eye(1))
    >>> print(f"{abs(psi.tilted_moments(prior).x.item()):.3f}")
    0.000
    """

    log_weights: Array
    h: Array
    W: Array

    def log_partition_ratio(self, eta: GaussianNatural) -> Array:
        return logsumexp(self._components(eta)[0], axis=-1)

    def tilted_normal(self, eta: GaussianNatural) -> GaussianStandard:
        log_weights, normals = self._components(eta)
        return merge_normals(softmax(log_weights, axis=-1), normals)

    def _components(self, eta: GaussianNatural) -> tuple[Array, GaussianStandard]:
        """The log weight and the normal of each component, ``(*batch, *E, C)``."""
        ones = (1,) * (eta.h.ndim - 1)
        batch = self.log_weights.shape[:-1]
        h = self.h.reshape(*batch, *ones, *self.h.shape[-2:])
        W = self.W.reshape(*batch, *ones, *self.W.shape[-3:])
        inner = GaussianNatural(eta.h[..., None, :], eta.W[..., None, :, :])
        log_ratio, normals = _tilt(h, W, inner, normalized=True)
        return log_ratio + self.log_weights.reshape(*batch, *ones, -1), normals


def merge_normals(weights: Array, normals: GaussianStandard) -> GaussianStandard:
    """Mean and covariance of a mixture of K normals, the last batch axis."""
    loc = jnp.einsum("...k,...ki->...i", weights, normals.loc)
    # About the common mean: a difference of second moments would lose the digits far out.
    away = normals.loc - loc[..., None, :]
    spread = normals.covariance_matrix + outer(away, away)
    return GaussianStandard(loc, jnp.einsum("...k,...kij->...ij", weights, spread))


def _beside(h: Array, W: Array, eta: GaussianNatural) -> tuple[Array, Array, GaussianNatural]:
    """The potential with a batch axis of length one for each of ``eta``."""
    batch, d, ones = h.shape[:-1], h.shape[-1], (1,) * (eta.h.ndim - 1)
    return h.reshape(*batch, *ones, d), W.reshape(*batch, *ones, d, d), eta


def _tilt(
    h: Array, W: Array, eta: GaussianNatural, *, normalized: bool
) -> tuple[Array, GaussianStandard]:
    """The log integral of normal times potential, and their product as a normal."""
    J, R = -2 * symmetric(eta.W), -2 * symmetric(W)
    L_J = cholesky(J)
    m = solve(L_J, eta.h)
    g = h - matvec(R, m)
    L = cholesky(J + R)
    step = solve(L, g)
    log_ratio = half_logdet(L_J) - half_logdet(L)
    if normalized:
        nothing = jnp.all(h == 0, axis=-1) & jnp.all(R == 0, axis=(-2, -1))
        L_R = cholesky(jnp.where(nothing[..., None, None], jnp.eye(h.shape[-1], dtype=R.dtype), R))
        away = m - solve(L_R, h)
        log_ratio = log_ratio + half_logdet(L_R) + _dot(step, matvec(J, away)) / 2
        log_ratio = jnp.where(nothing, 0.0, log_ratio)
    else:
        log_ratio = log_ratio + _dot(h, m) - _dot(m, matvec(R, m)) / 2 + _dot(g, step) / 2
    return log_ratio, GaussianStandard(m + step, inverse(L))


def _dot(x: Array, y: Array) -> Array:
    return jnp.sum(x * y, axis=-1)
