"""The complete recipe for stochastic-gradient MCMC: Ma, Chen & Fox (2015), eq. 3-4."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext.mcmc.base import GradFn, Schedule, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.geometry import VectorFn, check_values, recipe_correction

RecipeKernelState = kernel_state(
    "RecipeKernelState",
    __name__,
    r="auxiliary variables, ``(num_auxiliary * n,)``, each block in the flat order.",
)


@dataclass(kw_only=True, eq=False, repr=False)
class RecipeKernel(SGMCMCKernel):
    r"""Any continuous Markov process with the right stationary law, from its matrices D and Q.

    .. math::
        x' = x - \epsilon \bigl((D + Q) \nabla H - T\, \Gamma\bigr)
        + \sqrt{2 \epsilon T}\, D^{1/2} \zeta, \qquad
        \Gamma_k = \textstyle\sum_l \partial (D_{kl} + Q_{kl}) / \partial x_l,

    where x is the flat, unconstrained z (latent sites in the order in which the model samples them)
    followed by ``num_auxiliary`` blocks r of its size, m numbers in all, and
    :math:`H(x) = U(z) + |r|^2 / 2`. D(x) is positive semidefinite, Q(x) skew-symmetric; as
    :math:`\epsilon \to 0` every such pair keeps :math:`e^{-H(x)/T}`. :class:`SGLD` is D = 1;
    :class:`SGHMC`, unsplit, is ``num_auxiliary=1`` with

    .. math:: D = \begin{pmatrix} 0 & 0 \\ 0 & C I \end{pmatrix}, \qquad
              Q = \begin{pmatrix} 0 & -I \\ I & 0 \end{pmatrix}.

    For trying out dynamics, and for tests: this is one explicit Euler step, with a bias of first
    order in :math:`\epsilon`; curl dynamics diverge where friction is below :math:`\epsilon` times
    the curvature. Gradient noise of variance :math:`s^2` adds
    :math:`\epsilon^2 (D + Q) s^2 (D + Q)^\top`. O(m^2) per step, and O(m^3) for a matrix D.

    :param step_size: positive float or schedule; it is not found from the model.
    :param diffusion: D, a callable from x to a scalar, to ``(m,)`` (a diagonal) or to ``(m, m)``;
        it may be singular.
    :param curl: Q, a callable from x to ``(m, m)``; by default it is 0.
    :param int num_auxiliary: number of auxiliary blocks, each standard normal a priori.
    :param correction: ``"autodiff"``, or a callable from x to :math:`\Gamma`, ``(m,)``.

    **Reference:** *A Complete Recipe for Stochastic Gradient MCMC*, Yi-An Ma, Tianqi Chen, Emily B.
    Fox (NeurIPS 2015), eq. 3-4

    >>> kernel = RecipeKernel(normal_mean, 1e-3, diffusion=lambda x: 1 / (1 + x[0] ** 2))
    """

    state_class = RecipeKernelState
    momentum = "r"

    step_size: float | Schedule = field(kw_only=False)  # pyright: ignore
    diffusion: VectorFn
    curl: VectorFn | None = None
    num_auxiliary: int = 0
    correction: str | VectorFn = "autodiff"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.correction):
            check_choice("correction", self.correction, ("autodiff",))
        self.num_auxiliary = check_count("num_auxiliary", self.num_auxiliary, 0)

    def draw_momentum(self, rng_key: Array, z: Array, T: Array) -> Array:
        return jnp.sqrt(T) * random.normal(rng_key, (self.num_auxiliary * len(z),), z.dtype)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        state = super().init(*args, **kwargs)
        if state is not None and not is_traced(state):
            first = jax.tree.map(
                lambda x: x if jnp.ndim(state.i) == 0 else x[0], (state.z, state.r)
            )
            x = jnp.concatenate([self.flatten(first[0]), first[1]])
            check_values("diffusion", self.diffusion, x, (0, 1, 2), "positive semidefinite")
            if self.curl is not None:
                check_values("curl", self.curl, x, (2,), "skew-symmetric")
            if callable(self.correction):
                check_values("correction", self.correction, x, (1,))
        return state

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        n, x = len(z), jnp.concatenate([z, state.r])
        estimate = grad_fn(z)
        grad_H = jnp.concatenate([estimate.grad, state.r])
        zeta = random.normal(rng_key, x.shape, x.dtype)
        D = jnp.asarray(self.diffusion(x), x.dtype)
        if D.ndim == 2:
            # Not Cholesky, because D may be singular; rounding of an eigenvalue of 0 is no noise.
            scales, directions = jnp.linalg.eigh(D)
            least = len(x) * jnp.finfo(x.dtype).eps * scales[-1]
            noise = directions @ (jnp.sqrt(jnp.where(scales > least, scales, 0)) * zeta)
            drift = D @ grad_H
        else:
            drift, noise = D * grad_H, jnp.sqrt(D) * zeta
        if self.curl is not None:
            drift = drift + jnp.asarray(self.curl(x), x.dtype) @ grad_H
        if callable(self.correction):
            Gam = jnp.asarray(self.correction(x), x.dtype)
        else:
            Gam = recipe_correction(self.diffusion, self.curl, x)
        x = x - eps * (drift - T * Gam) + jnp.sqrt(2 * eps * T) * noise
        return Transition(x[:n], estimate, {"r": x[n:]})
