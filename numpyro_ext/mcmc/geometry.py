"""Position-dependent noise: the drift that it requires, and the metric of positive numbers."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_ext._model.read import ModelInfo

type VectorFn = Callable[[Array], Any]
"""A function of the flat vector: a scalar, a vector or a matrix."""


def recipe_correction(diffusion: VectorFn, curl: VectorFn | None, x: Array) -> Array:
    r"""The drift :math:`\Gamma_k(x) = \sum_l \partial (D_{kl} + Q_{kl}) / \partial x_l` (eq. 3).

    Without it noise of the variance D(x) pushes draws to where D is large. D maps ``(m,)`` to a
    scalar, to ``(m,)`` (a diagonal) or to ``(m, m)``, and Q to a skew ``(m, m)``. The equation is
    of *A Complete Recipe for Stochastic Gradient MCMC*, Yi-An Ma, Tianqi Chen, Emily B. Fox
    (NeurIPS 2015).
    """
    x = jnp.asarray(x, jnp.result_type(float, x))
    drift = _divergence(diffusion, x)
    return drift if curl is None else drift + _divergence(curl, x)


def _divergence(fn: VectorFn, x: Array) -> Array:
    """``sum_l dA_kl/dx_l`` of a scalar, a diagonal or a matrix."""

    def along(direction: Array) -> Array:
        slope = jax.jvp(lambda x: jnp.asarray(fn(x), x.dtype), (x,), (direction,))[1]
        return slope if slope.ndim == 0 else jnp.vdot(slope, direction)

    if jax.eval_shape(lambda x: jnp.asarray(fn(x)), x).ndim < 2:
        return jax.vmap(along)(jnp.eye(len(x), dtype=x.dtype))
    jacobian = jax.jacfwd(lambda x: jnp.asarray(fn(x), x.dtype))(x)
    return jnp.trace(jacobian, axis1=1, axis2=2)


def check_values(what: str, fn: VectorFn, x: Array, ranks: tuple[int, ...], kind: str = "") -> None:
    """An error unless ``fn`` maps the ``(m,)`` vector x to finite numbers of an allowed rank and
    the length m, which are of this ``kind``: a matrix, or its diagonal."""
    value, shapes = np.asarray(fn(x), float), [x.shape * rank for rank in ranks]
    if value.shape not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(
            f"{what} returns shape {value.shape} for a vector of {len(x)} numbers; it must be"
            f" {allowed}."
        )
    skew, right = kind == "skew-symmetric", bool(np.all(np.isfinite(value)))
    if right and value.ndim == 2:
        right = np.allclose(value, -value.T if skew else value.T)
    if right and kind and not skew:
        scales = np.linalg.eigvalsh(value) if value.ndim == 2 else value
        # Rounding may make an eigenvalue of 0 a little negative.
        least = -1e-5 * np.max(np.abs(value)) if kind == "positive semidefinite" else 0.0
        right = bool(np.all(scales > 0 if kind == "positive definite" else scales >= least))
    if not right:
        raise ValueError(
            f"{what} is not {kind or 'finite'} at the initial point, where it is"
            f" {np.array2string(value, precision=3, threshold=9)}."
        )


class ExpandedMean:
    r"""Metric for :class:`SGRLD` in which positive sites move as numbers :math:`\theta`, with noise
    of variance :math:`\propto \theta`, and the others by plain :class:`SGLD`.

    With :math:`\theta = e^\phi` and g the gradient of the potential in :math:`\phi` (Jacobian
    included) the metric :math:`\operatorname{diag}(\theta)^{-1}` has all its corrections cancel, at
    every temperature:

    .. math:: \theta' = |\theta - \epsilon g + \sqrt{2 \epsilon T \theta}\, \zeta|, \qquad
              \phi' = \log \theta'.

    The noise falls to 0 with :math:`\theta`, so small values are no harder than large ones. The
    reflection at 0 is exact as :math:`\epsilon \to 0` only. ``step_size`` is in units of
    :math:`\theta`: a Gamma(a, b) comes out with the mean a/b and the variance
    :math:`\frac{a}{b^2} (1 - \epsilon b/2)^{-1}`.

    :param sites: names of positive latent sites (support ``positive``); by default all of them.

    **Reference:** *Stochastic Gradient Riemannian Langevin Dynamics on the Probability Simplex*,
    Sam Patterson, Yee Whye Teh (NeurIPS 2013), eq. 11

    >>> from numpyro_ext.mcmc import SGRLD
    >>> def model():
    ...     numpyro.sample("rate", dist.Gamma(3.0, 2.0).expand([100]).to_event(1))
    >>> kernel = SGRLD(model, 0.02, metric=ExpandedMean())
    """

    def __init__(self, sites: list[str] | tuple[str, ...] | None = None) -> None:
        self.sites = None if sites is None else tuple(sites)

    def mask(self, info: ModelInfo) -> np.ndarray:
        """``(n,)``, True for the coordinates that are logarithms and that this metric moves."""
        supports = {name: latent.support for name, latent in info.latents.items()}
        # For a vector, the support of its numbers.
        of_number = {name: getattr(x, "base_constraint", x) for name, x in supports.items()}
        positive = [name for name, support in of_number.items() if support is constraints.positive]
        chosen = positive if self.sites is None else self.sites
        if not chosen or not set(chosen) <= set(positive):
            raise ValueError(
                f"ExpandedMean has the sites {list(chosen)}, and the positive latent sites of the"
                f" model are {positive}; use SGLD, or GammaSimplexReparam for a Dirichlet site."
            )
        mask = np.zeros(info.size, bool)
        for name in chosen:
            mask[info.slices[name]] = True
        return mask

    @staticmethod
    def move(phi: Array, g: Array, zeta: Array, eps: Array, T: Array) -> Array:
        """One step of the logarithms ``phi``."""
        theta = jnp.exp(phi)
        theta = jnp.abs(theta - eps * g + jnp.sqrt(2 * eps * T * theta) * zeta)
        return jnp.log(jnp.maximum(theta, jnp.finfo(theta.dtype).tiny))
