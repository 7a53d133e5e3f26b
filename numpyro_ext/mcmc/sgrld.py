"""Stochastic gradient Riemannian Langevin dynamics: Patterson & Teh (2013), eq. 8."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
import numpy as np

from numpyro_ext._checks import check_choice
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.base import GradFn, SGMCMCKernel, Transition
from numpyro_ext.mcmc.geometry import ExpandedMean, VectorFn, check_values, recipe_correction
from numpyro_ext.mcmc.laws import choose_linear
from numpyro_ext.mcmc.settings import Settings
from numpyro_ext.mcmc.sgld import SGLDState, implied_variance_ratio


@dataclass(kw_only=True, eq=False, repr=False)
class SGRLD(SGMCMCKernel):
    r"""Riemannian SGLD: Langevin dynamics with a step and noise that follow a metric G(z).

    .. math::
        z' = z - \epsilon (A g - T\, \Gamma) + \sqrt{2 \epsilon T}\, A^{1/2} \zeta, \qquad
        A = G(z)^{-1}, \quad \Gamma_k = \textstyle\sum_l \partial A_{kl} / \partial z_l,

    on the flat, unconstrained z: the latent sites in the order in which the model samples them.
    With the constant metric :math:`G = I` it is :class:`SGLD`; with G near the curvature of the
    potential :math:`\epsilon` has no units and all directions mix alike. ``metric=ExpandedMean()``
    moves positive sites in a metric of their own, and with :class:`GammaSimplexReparam`
    probabilities too. The state is a :class:`SGLDState`.

    Biased at a fixed step as :class:`SGLD` is, with :math:`\epsilon A` for :math:`\epsilon`:
    gradient noise of variance :math:`s^2` adds :math:`\epsilon^2 A s^2 A`. Where A changes much
    within one step the bias is larger. The correction in [1], eq. 8, equals :math:`\Gamma` for
    special metrics only and is not used. A diagonal metric costs n forward passes of it for
    :math:`\Gamma`, a dense one its ``(n, n, n)`` Jacobian and a Cholesky factor.

    :param step_size: positive float or schedule, in units of the squared latent times the metric;
        None has it found, without a whitening, as G is a function of the coordinates in which the
        kernel moves.
    :param metric: G, a callable from the flat z to ``(n,)`` (a diagonal) or ``(n, n)``
        (symmetric positive definite), or an :class:`ExpandedMean`.
    :param correction: ``"autodiff"``, or a callable from the flat z to :math:`\Gamma`, ``(n,)``.

    **References:**

    1. *Stochastic Gradient Riemannian Langevin Dynamics on the Probability Simplex*, Sam Patterson,
       Yee Whye Teh (NeurIPS 2013), eq. 8
    2. *Langevin Diffusions and the Metropolis-Adjusted Langevin Algorithm*, Tatiana Xifara, Chris
       Sherlock, Samuel Livingstone, Simon Byrne, Mark Girolami (Statistics & Probability Letters,
       2014), on the correction

    >>> kernel = SGRLD(normal_mean, 0.1, metric=lambda z: jnp.full(1, 100.0))
    """

    state_class = SGLDState
    finds_whitening = False  # its functions take z

    metric: VectorFn | ExpandedMean
    correction: str | VectorFn = "autodiff"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.correction):
            check_choice("correction", self.correction, ("autodiff",))
        elif isinstance(self.metric, ExpandedMean):
            raise ValueError(
                "correction is given with an ExpandedMean metric, which needs none; leave it out."
            )
        self._mask: np.ndarray | None = None

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        if isinstance(self.metric, ExpandedMean):
            self._mask = self.metric.mask(self.info)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        state = super().init(*args, **kwargs)
        if state is not None and not is_traced(state):
            z = state.z if jnp.ndim(state.i) == 0 else jax.tree.map(lambda x: x[0], state.z)
            self._check_functions(self.flatten(z))
        return state

    def _check_functions(self, z: Array) -> None:
        if isinstance(self.metric, ExpandedMean):
            return
        check_values("metric", self.metric, z, (1, 2), "positive definite")
        if callable(self.correction):
            check_values("correction", self.correction, z, (1,))

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        x = normal.center
        if isinstance(self.metric, ExpandedMean):
            # A positive site moves like log theta with the diffusion 1 / theta.
            mask = self.metric.mask(self.info)
            A = np.where(mask, np.exp(-np.where(mask, x, 0)), 1.0)
        else:
            self._check_functions(x)
            G = np.asarray(self.metric(x), float)
            A = 1 / G if G.ndim == 1 else np.linalg.inv(G)
        root = normal.factor if isinstance(normal.factor, Array) else jnp.asarray(normal.sds)
        A, root = (np.diag(x) if x.ndim == 1 else x for x in (A, np.asarray(root, float)))
        # The diffusion of z as one of the whitened coordinates.
        D = np.linalg.solve(root, np.linalg.solve(root, A).T).T
        return choose_linear(D, noise, self.max_bias)

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        estimate = grad_fn(z)
        g = estimate.grad
        zeta = random.normal(rng_key, z.shape, z.dtype)
        if isinstance(self.metric, ExpandedMean):
            assert self._mask is not None
            phi = jnp.where(self._mask, z, 0)  # exp of the other sites might overflow
            plain = z - eps * g + jnp.sqrt(2 * eps * T) * zeta
            z = jnp.where(self._mask, ExpandedMean.move(phi, g, zeta, eps, T), plain)
            # Below a step from 0 the reflection moves a site, and not its gradient.
            A = jnp.where(self._mask, 1 / jnp.maximum(jnp.exp(phi), eps), 1)
            ratio = implied_variance_ratio(g, A * g, eps, T)
            return Transition(z, estimate, {"implied_variance_ratio": ratio})
        metric = self.metric

        def inverse(z: Array) -> Array:
            G = jnp.asarray(metric(z), z.dtype)
            return 1 / G if G.ndim == 1 else jnp.linalg.inv(G)

        if callable(self.correction):
            Gam = jnp.asarray(self.correction(z), z.dtype)
        else:
            Gam = recipe_correction(inverse, None, z)
        G = jnp.asarray(metric(z), z.dtype)
        if G.ndim == 1:
            drift, noise = g / G, zeta / jnp.sqrt(G)
        else:
            L = jnp.linalg.cholesky(G)
            drift = cho_solve((L, True), g)
            noise = solve_triangular(L, zeta, lower=True, trans=1)
        z = z - eps * (drift - T * Gam) + jnp.sqrt(2 * eps * T) * noise
        ratio = implied_variance_ratio(g, drift, eps, T)
        return Transition(z, estimate, {"implied_variance_ratio": ratio})
