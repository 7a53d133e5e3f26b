"""Stochastic gradient Hamiltonian Monte Carlo: Chen, Fox & Guestrin (2014), eq. 13-15."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import (
    check_choice,
    check_count,
    check_nonnegative,
    check_positive,
    if_given,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Sites
from numpyro_ext.mcmc.base import Estimate, GradFn, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.laws import choose_sghmc
from numpyro_ext.mcmc.settings import Settings

SGHMCState = kernel_state(
    "SGHMCState",
    __name__,
    r="momentum, ``(n,)`` in the flat order.",
    kinetic_temperature="mean of ``r^2/M`` at the end of the step; above T where gradient noise"
    " heats the chain.",
    noise_variance="estimated variance of the gradient noise, ``(n,)`` in the flat order, for"
    ' ``noise_variance="warmup"``; else the value given.',
)

_MANY = 50
"""Latent numbers from which a model may have many effects of one scale."""

Move = tuple[Array, Array, Estimate, Array]
"""The new z and r, the gradient estimate, and the variance of the gradient noise."""


def _aboba(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, gradient: Callable
) -> Move:
    c = jnp.exp(-C * eps)
    zm = z + eps / 2 * r / M
    estimate, V = gradient(zm)
    k = eps / 2 * estimate.grad
    rb = c * (r - k) + _sqrt(T * M * (1 - c**2) - (1 + c) ** 2 / 4 * eps**2 * V) * zeta
    r = rb - k
    return zm + eps / 2 * r / M, r, estimate, V


def _baoab(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, gradient: Callable
) -> Move:
    c = jnp.exp(-C * eps)
    estimate, V = gradient(z)
    r = r - eps * estimate.grad
    zm = z + eps / 2 * r / M
    r = c * r + _sqrt(T * M * (1 - c**2)) * zeta
    return zm + eps / 2 * r / M, r, estimate, V


def _euler(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, gradient: Callable
) -> Move:
    z = z + eps * r / M
    estimate, V = gradient(z)
    noise = _sqrt(2 * C * T * M * eps - eps**2 * V) * zeta
    return z, r - eps * estimate.grad - eps * C * r + noise, estimate, V


_INTEGRATORS = {"aboba": _aboba, "baoab": _baoab, "euler": _euler}


@dataclass(kw_only=True, eq=False, repr=False)
class SGHMC(SGMCMCKernel):
    r"""
    Stochastic gradient Hamiltonian Monte Carlo: momentum, friction and noise, no accept step.

    .. math::
        dz = M^{-1} r\, dt, \qquad dr = -\nabla U\, dt - C r\, dt + \sqrt{2 C T M}\, dW,

    with the friction rate C (in 1/time; the paper's matrix is :math:`C M`), one gradient per step,
    and, with :math:`c = e^{-C\epsilon}` and the gradient noise variance :math:`\hat V`, the
    splitting ABOBA [2, 3]:

    .. math::
        z_m &= z + \tfrac{\epsilon}{2} M^{-1} r, \quad k = -\epsilon g(z_m), \quad r_a = r + k/2 \\
        r_b &= c\, r_a + \sqrt{T M (1 - c^2) - \tfrac{(1+c)^2}{4} \epsilon^2 \hat V}\, \zeta \\
        r' &= r_b + k/2, \quad z' = z_m + \tfrac{\epsilon}{2} M^{-1} r'

    Injected noise and gradient noise enter at the same place here, so the correction for a known
    :math:`\hat V` is exact in distribution. ``"baoab"`` has no such place, but the smallest bias in
    z without gradient noise: it takes gradients where the law of a Gaussian is right, and ABOBA
    where its variances are :math:`1 / (1 - \epsilon^2 h / 4)` times too large, which the scale of
    many effects feels from each of them. ``"euler"`` is the rule of [1], with a bias of first order
    in :math:`\epsilon`. The step is of the order of a posterior standard deviation over
    :math:`\sqrt M`; the splittings diverge for :math:`\epsilon^2 h / M > 4`, where h is the largest
    curvature.

    :math:`\hat V` is a diagonal. If the noise is correlated between coordinates, standard
    deviations become too small in the directions of little noise. If :math:`\hat V` exceeds the
    injected noise, :math:`4 T M \tanh(C\epsilon/2)/\epsilon^2`, a given number is refused, and an
    estimate from warmup is cut. Without ``noise_variance``, gradient noise of variance :math:`s^2`
    heats a Gaussian target to a temperature of
    :math:`T + \tfrac{\epsilon^2}{4} s^2 \coth(C\epsilon/2)`, as ``kinetic_temperature`` shows.

    :param step_size: positive float or schedule, in units of time; with None the kernel finds it,
        together with the friction, in whitened coordinates.
    :param float friction: rate C; by default 1, or found together with the step size.
    :param mass: M, a float or a dict of per-site floats or arrays of the shapes of the
        unconstrained sites.
    :param noise_variance: :math:`\hat V`, a float, a dict of per-site values (the paper's
        :math:`\hat B` is :math:`\epsilon \hat V / 2`), or ``"warmup"``: the mean of
        :math:`(g_1 - g_2)^2/2` over pairs of batches in the second half of warmup, at one more
        gradient per step.
    :param str integrator: ``"aboba"``, ``"baoab"`` or ``"euler"``; by default ``"aboba"``, or
        ``"baoab"`` where the step size is found, for at least 50 latent numbers, and gradients
        have no noise.
    :param int resample_every: draw a new momentum at every such transition; by default never.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Tianqi Chen, Emily B. Fox, Carlos Guestrin
       (ICML 2014), eq. 13-15
    2. *On the Convergence of Stochastic Gradient MCMC Algorithms with High-Order Integrators*,
       Changyou Chen, Nan Ding, Lawrence Carin (NeurIPS 2015)
    3. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, Benedict
       Leimkuhler, Charles Matthews (Applied Mathematics Research eXpress 2013)

    >>> x = jnp.sin(jnp.arange(100.0)) + 3
    >>> kernel = SGHMC(normal_mean, steps_per_sample=10)
    >>> mcmc = MCMC(kernel, num_warmup=50, num_samples=1000, progress_bar=False)
    >>> mcmc.run(random.key(0), x, subsample_size=10)
    >>> draws = mcmc.get_samples()["z"]                    # exactly: 2.97 +- 0.10
    >>> bool(abs(draws.mean() - 2.97) < 0.03 and abs(draws.std() - 0.1) < 0.02)
    True
    """

    state_class = SGHMCState
    momentum = "r"

    friction: float | None = None
    mass: float | Sites = 1.0
    noise_variance: float | Sites | str = 0.0
    integrator: str | None = None
    resample_every: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if_given(check_positive, "friction", self.friction)
        if self.integrator is not None:
            check_choice("integrator", self.integrator, tuple(_INTEGRATORS))
        self.resample_every = if_given(check_count, "resample_every", self.resample_every)
        for number in _numbers(self.mass):
            check_positive("mass", number)
        self._from_warmup = isinstance(self.noise_variance, str)
        if self._from_warmup:
            check_choice("noise_variance", self.noise_variance, ("warmup",))
        self._known_variance: Any = 0.0 if self._from_warmup else self.noise_variance
        variances = _numbers(self._known_variance)
        for number in variances:
            check_nonnegative("noise_variance", number)
        given = any(isinstance(V, Tracer) or V != 0 for V in variances)
        self._corrects = self._from_warmup or given
        if self.integrator == "baoab" and self._corrects:
            raise ValueError(
                "noise_variance is given with the integrator 'baoab', which cannot correct for it;"
                " use 'aboba' or 'euler'."
            )

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        if self._from_warmup and self.num_adapt == 0:
            raise ValueError("noise_variance is 'warmup' but num_warmup is 0; give it some draws.")
        eps, T = self.in_use("step_size"), self.temperature
        if callable(eps) or callable(T):
            return
        with jax.ensure_compile_time_eval():  # numbers, also under a transform
            M = self.ravel_sites("mass", self.mass)
            V = self.ravel_sites("noise_variance", self._known_variance)
        if is_traced((eps, T, self.friction_in_use, M, V)):
            return
        injected = self._injected(eps) * T * np.asarray(M)
        if np.any(np.asarray(V) > injected):
            raise ValueError(
                f"noise_variance is {np.max(V):.4g}, more than is injected, {np.min(injected):.4g};"
                " take a smaller step_size or more friction."
            )

    def _injected(self, eps: Any) -> Any:
        """Variance of the injected noise as one of the gradient, for T = M = 1."""
        C = self.friction_in_use
        return 2 * C / eps if self.integrator == "euler" else 4 * np.tanh(C * eps / 2) / eps**2

    def momentum_scale(self, T: Array) -> Array:
        return jnp.sqrt(T * self.ravel_sites("mass", self.mass, T.dtype))

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        V = self.ravel_sites("noise_variance", self._known_variance, z.dtype)
        V = jnp.zeros_like(z) if self._from_warmup else V
        return super().init_state(rng_key, z) | {"noise_variance": V}

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        if isinstance(self.mass, dict) or self.mass != 1.0:
            raise ValueError(
                "mass is given and step_size is None, but the whitening that is found takes the"
                " place of a mass; leave it out, or give step_size."
            )
        corrected = np.asarray(self.ravel_sites("noise_variance", self._known_variance))
        left = 0 * noise if self._from_warmup else np.maximum(noise - corrected, 0)
        is_exact = not self._corrects and np.max(noise, initial=0) == 0
        # The scale of few groups may be near 0, where BAOAB, at a step that is too long there,
        # leaves the posterior; and few effects move it little.
        is_exact &= noise.size >= _MANY
        return choose_sghmc(
            left,
            self.max_bias,
            friction=self.friction,
            # The estimate is corrected for by injecting less, so there must be enough to take off.
            least_injected=1.5 * float(np.max(noise - left)),
            law=self.integrator or ("baoab" if is_exact else "aboba"),
            stiffness=normal.stiffness,
        )

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        r = state.r
        M = self.ravel_sites("mass", self.mass, z.dtype)
        C = jnp.asarray(self.friction_in_use, z.dtype)
        key_noise = key_momentum = key_pair = rng_key
        if self._from_warmup or self.resample_every is not None:
            key_noise, key_momentum, key_pair = random.split(rng_key, 3)
        if self.resample_every is not None:
            r = self._resampled(key_momentum, state.i % self.resample_every == 0, r, T)
        zeta = random.normal(key_noise, z.shape, z.dtype)

        def gradient(z: Array) -> tuple[Estimate, Array]:
            estimate = grad_fn(z)
            if not self._from_warmup:
                return estimate, state.noise_variance
            return estimate, self._variance(key_pair, state, grad_fn, z, estimate.grad)

        move = _INTEGRATORS[self.in_use("integrator") or "aboba"]
        z, r, estimate, V = move(z, r, M, C, T, eps, zeta, gradient)
        fields = {"r": r, "kinetic_temperature": jnp.mean(r**2 / M), "noise_variance": V}
        return Transition(z, estimate, fields)

    def _resampled(self, rng_key: Array, now: Array, r: Array, T: Array) -> Array:
        return lax.cond(now, lambda: self.draw_momentum(rng_key, r, T), lambda: r)

    def _variance(self, rng_key: Array, state: Any, grad_fn: GradFn, z: Array, g: Array) -> Array:
        """Mean of (g1 - g2)^2 / 2 over the second half of warmup so far; frozen afterwards."""
        V = state.noise_variance

        def update() -> Array:
            other = grad_fn.independent(rng_key, z).grad
            num = jnp.maximum(state.i - self.num_adapt // 2 + 1, 1)
            return V + ((g - other) ** 2 / 2 - V) / num.astype(V.dtype)

        return lax.cond(state.i < self.num_adapt, update, lambda: V)


def _sqrt(variance: Array) -> Array:
    return jnp.sqrt(jnp.maximum(variance, 0))


def _numbers(value: Any) -> list[Any]:
    """All entries of a float or of a dict of per-site values; a traced value itself."""
    leaves = jax.tree.leaves(value)
    return [n for x in leaves for n in ([x] if isinstance(x, Tracer) else np.ravel(x).tolist())]
