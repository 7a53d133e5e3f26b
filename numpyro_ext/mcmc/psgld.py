"""Preconditioned stochastic gradient Langevin dynamics: Li et al. (2016), eq. 5-8."""

from dataclasses import dataclass
from typing import Any

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_nonnegative
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.base import GradFn, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.laws import choose_sgld
from numpyro_ext.mcmc.settings import Settings
from numpyro_ext.mcmc.sgld import IMPLIED, implied_variance_ratio

PSGLDState = kernel_state(
    "PSGLDState",
    __name__,
    preconditioner="G of the last transition, ``(n,)`` in the flat order; coordinate k moves with"
    " the step ``step_size * preconditioner[k]``.",
    implied_variance_ratio=IMPLIED,
    second_moment=":math:`\\hat V`, ``(n,)`` in the flat order.",
)


@dataclass(kw_only=True, eq=False, repr=False)
class PSGLD(SGMCMCKernel):
    r"""
    Preconditioned SGLD: Langevin dynamics with a step per coordinate, as RMSprop has it.

    .. math::
        V_t &= \beta V_{t-1} + (1 - \beta)\, g^2, \quad \hat V = V_t / (1 - \beta^t), \quad
        G = (\lambda + \sqrt{\hat V})^{-1} \\
        z' &= z - \epsilon (G g - T\, \Gamma) + \sqrt{2 \epsilon T G}\, \zeta

    with ``decay`` :math:`\beta`, ``damping`` :math:`\lambda` and t gradients so far. The paper does
    not divide by :math:`1 - \beta^t`, so its first step is :math:`(1 - \beta)^{-1/2}` times too
    long. Its g is a mean over the data where ours is a sum, and its step is twice as long:
    ``damping`` is :math:`N \lambda_\text{paper}` and ``step_size`` is
    :math:`N \epsilon_\text{paper} / 2`, of the order of a posterior standard deviation.

    ``adapt="warmup"`` learns G in warmup and then keeps it: :class:`SGLD` with the step
    :math:`\epsilon G_k` in coordinate k, with the same biases and no other. ``adapt="always"`` is
    the paper's rule; G then follows z, and the draws are too wide, by more for a smaller step. The
    term :math:`\Gamma_k = \partial G_k / \partial z_k`, which the paper drops and
    ``gamma="hutchinson"`` estimates as

    .. math:: -G_k^2\, \frac{1 - \beta}{1 - \beta^t}\, \frac{g_k\, v_k (H v)_k}{\sqrt{\hat V_k}},
              \qquad v_k = \pm 1,

    with a Hessian-vector product per step, takes off only a part of this. G is about
    :math:`1/|g|`, not the inverse curvature: where gradient noise dominates, it evens that out.

    :param step_size: positive float or schedule, in units of the latent; None has it found, in
        whitened coordinates, for ``adapt="warmup"``.
    :param float decay: :math:`\beta`, in (0, 1).
    :param float damping: :math:`\lambda`, non-negative; 0 can divide by a gradient that is 0.
    :param str gamma: ``"none"`` or ``"hutchinson"``.
    :param str adapt: ``"warmup"`` or ``"always"``.

    **Reference:** *Preconditioned Stochastic Gradient Langevin Dynamics for Deep Neural Networks*,
    Chunyuan Li, Changyou Chen, David Carlson, Lawrence Carin (AAAI 2016), eq. 5-8

    >>> PSGLD(normal_mean, 0.02, gamma="hutchinson", adapt="always")
    PSGLD(model=normal_mean, step_size=0.02, gamma='hutchinson', adapt='always')
    """

    state_class = PSGLDState

    decay: float = 0.99
    damping: float = 1e-5
    gamma: str = "none"
    adapt: str = "warmup"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay < 1:
            raise ValueError(f"decay is {self.decay!r}; it must be between 0 and 1, both excluded.")
        check_nonnegative("damping", self.damping)
        check_choice("gamma", self.gamma, ("none", "hutchinson"))
        check_choice("adapt", self.adapt, ("warmup", "always"))
        if self.adapt == "always" and self.finds_settings:
            raise ValueError(
                "step_size is None and adapt is 'always', which widens the posterior, by more for a"
                " smaller step; take adapt='warmup', or give a step_size."
            )

    @property
    def if_hot(self) -> str:
        if self.adapt == "always":
            return "take adapt='warmup' without a step_size, or gradient=ControlVariate(...)"
        return super().if_hot

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        if self.adapt == "warmup" and self.num_adapt == 0:
            raise ValueError(
                "adapt is 'warmup' but num_warmup is 0; give it some draws, or use adapt='always'."
            )

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        own = {"preconditioner": jnp.ones_like(z), "second_moment": jnp.zeros_like(z)}
        return super().init_state(rng_key, z) | own

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        # At stationarity E g^2 is the curvature, 1, plus the noise.
        scale = 1 / (self.damping + np.sqrt(1 + noise))
        return choose_sgld(noise, self.max_bias, scale, stiffness=normal.stiffness)

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        if self.gamma == "hutchinson":
            rng_key, key_probe = random.split(rng_key)
            v = random.rademacher(key_probe, z.shape, z.dtype)
            estimate, Hv = grad_fn.with_hvp(z, v)
            curvature = v * Hv
        else:
            estimate = grad_fn(z)
            curvature = jnp.zeros_like(z)
        g = estimate.grad

        def adapt() -> tuple[Array, Array, Array]:
            # The weight (1 - decay) / (1 - decay^t) makes it the mean of t gradients.
            t = (state.i + 1).astype(z.dtype)
            weight = (1 - self.decay) / -jnp.expm1(t * jnp.log(jnp.asarray(self.decay, z.dtype)))
            V = state.second_moment + weight * (g**2 - state.second_moment)
            G = 1 / (self.damping + jnp.sqrt(V))
            root = jnp.sqrt(jnp.where(V > 0, V, 1))  # where V is 0, g is 0
            return G, V, -(G**2) * weight * g * curvature / root

        def keep() -> tuple[Array, Array, Array]:
            return state.preconditioner, state.second_moment, jnp.zeros_like(z)

        if self.adapt == "always":
            G, V, Gam = adapt()
        else:
            G, V, Gam = lax.cond(state.i < self.num_adapt, adapt, keep)
        zeta = random.normal(rng_key, z.shape, z.dtype)
        z = z - eps * (G * g - T * Gam) + jnp.sqrt(2 * eps * T * G) * zeta
        fields = {"preconditioner": G, "second_moment": V}
        fields["implied_variance_ratio"] = implied_variance_ratio(g, G * g, eps, T)
        return Transition(z, estimate, fields)
