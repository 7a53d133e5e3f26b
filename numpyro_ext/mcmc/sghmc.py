"""Stochastic gradient Hamiltonian Monte Carlo: Chen, Fox & Guestrin (2014), eq. 13-15."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._checks import check_choice, check_count, check_nonnegative, check_positive
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc._laws import Choice, choose_sghmc
from numpyro_ext.mcmc.base import SGMCMCKernel
from numpyro_ext.mcmc.grad_fn import GradFn
from numpyro_ext.mcmc.kernel import Schedule
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import Found, Settings
from numpyro_ext.mcmc.state import Estimate, Transition, kernel_state
from numpyro_ext.mcmc.whitening import Whitening

__all__ = ["SGHMC", "SGHMCState"]

SGHMCState = kernel_state(
    "SGHMCState",
    __name__,
    r="momentum, ``(n,)`` in the flat order.",
    kinetic_temperature="mean of ``r^2/M`` at the end of the step; above T where gradient noise"
    " heats the chain.",
    noise_variance="estimated variance of the gradient noise, ``(n,)`` in the flat order, for"
    ' ``noise_variance="warmup"``; else the value given.',
)

Move = tuple[Array, Array, Estimate, Array]
"""The new z and r, the gradient estimate, and the variance of the gradient noise."""


def _aboba(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, take: Callable
) -> Move:
    c = jnp.exp(-C * eps)
    zm = z + eps / 2 * r / M
    estimate, V = take(zm)
    k = eps / 2 * estimate.grad
    rb = c * (r - k) + _sqrt(T * M * (1 - c**2) - (1 + c) ** 2 / 4 * eps**2 * V) * zeta
    r = rb - k
    return zm + eps / 2 * r / M, r, estimate, V


def _baoab(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, take: Callable
) -> Move:
    c = jnp.exp(-C * eps)
    estimate, V = take(z)
    r = r - eps * estimate.grad
    zm = z + eps / 2 * r / M
    r = c * r + _sqrt(T * M * (1 - c**2)) * zeta
    return zm + eps / 2 * r / M, r, estimate, V


def _euler(
    z: Array, r: Array, M: Array, C: Array, T: Array, eps: Array, zeta: Array, take: Callable
) -> Move:
    z = z + eps * r / M
    estimate, V = take(z)
    noise = _sqrt(2 * C * T * M * eps - eps**2 * V) * zeta
    return z, r - eps * estimate.grad - eps * C * r + noise, estimate, V


_INTEGRATORS = {"aboba": _aboba, "baoab": _baoab, "euler": _euler}


class SGHMC(SGMCMCKernel):
    r"""
    Stochastic gradient Hamiltonian Monte Carlo [1]: momentum, friction and noise, no accept step.

    .. math::

        dz = M^{-1} r\, dt, \qquad dr = -\nabla U\, dt - C r\, dt + \sqrt{2 C T M}\, dW,

    with the friction rate C (in 1/time; the paper's matrix is :math:`C M`), one gradient per step,
    and, with :math:`c = e^{-C\epsilon}` and the gradient noise variance :math:`\hat V`, the
    splitting ABOBA [2, 3]:

    .. math::

        z_m &= z + \tfrac{\epsilon}{2} M^{-1} r, \quad k = -\epsilon g(z_m), \quad r_a = r + k/2 \\
        r_b &= c\, r_a + \sqrt{T M (1 - c^2) - \tfrac{(1+c)^2}{4} \epsilon^2 \hat V}\, \zeta \\
        r' &= r_b + k/2, \quad z' = z_m + \tfrac{\epsilon}{2} M^{-1} r'

    Here injected and gradient noise enter at one place, so a known :math:`\hat V` is corrected
    exactly in law. ``"baoab"`` has the smallest bias in z without gradient noise, but no such
    place; ``"euler"`` is the rule of [1] (position first, gradient at the new position), with a
    bias of first order in :math:`\epsilon`. The step is of the order of a posterior standard
    deviation over :math:`\sqrt M`, so larger than for :class:`SGLD`.

    :math:`\hat V` is a diagonal. Noise that is correlated between coordinates, as that of
    correlated covariates is, is corrected too much in the directions of little noise, mostly the
    widest of the posterior: standard deviations come out too small (in a logistic regression with
    25 covariates by 3 % where a fifth of the injected noise is taken off). Where it exceeds the
    injected noise, :math:`4 T M \tanh(C\epsilon/2)/\epsilon^2`, no correction is enough: a number
    is refused, an estimate from warmup is cut (:meth:`noise_share` of ``mcmc.last_state`` is above
    1), and ``kinetic_temperature`` stays above T. Then take a smaller step or more friction.

    Without ``noise_variance`` gradient noise of variance :math:`s^2` heats a Gaussian target to the
    temperature :math:`T + \tfrac{\epsilon^2}{4} s^2 \coth(C\epsilon/2)`; ``kinetic_temperature``
    shows it. The splittings diverge for :math:`\epsilon^2 h / M > 4`, where h is the largest
    curvature.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule, in units of time; None is found, with the
        friction, in whitened coordinates.
    :param float friction: rate C; None is found with the step size, and 1 if that is given.
    :param mass: M, a float or a dict of per-site floats or arrays of the shapes of the
        unconstrained sites.
    :param noise_variance: :math:`\hat V`, a float, a dict of per-site values (the paper's
        :math:`\hat B` is :math:`\epsilon \hat V / 2`), or ``"warmup"``: the mean of
        :math:`(g_1 - g_2)^2/2` over pairs of independent batches during warmup, at one more
        gradient per warmup step.
    :param str integrator: ``"aboba"``, ``"baoab"`` or ``"euler"``.
    :param int resample_every: draw a new momentum at every such transition; None is never.
    :param float max_bias: largest relative error of a variance that a step which is found may have.
    :param whitening: the coordinates in which the kernel moves, a :class:`Whitening`.
    :param temperature: T, a non-negative float or a callable of ``i``.
    :param gradient: an estimator, such as :class:`ControlVariate`.
    :param str minibatch: ``"replace"`` or ``"epoch"``.
    :param int steps_per_sample: transitions per draw.
    :param sharding: how the rows of the data are spread over devices.
    :param init_strategy: a per-site initialization function.
    :param bool forward_mode_differentiation: whether to differentiate in forward mode.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Tianqi Chen, Emily B. Fox, Carlos Guestrin
       (ICML 2014), eq. 13-15
    2. *On the Convergence of Stochastic Gradient MCMC Algorithms with High-Order Integrators*,
       Changyou Chen, Nan Ding, Lawrence Carin (NeurIPS 2015)
    3. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, Benedict
       Leimkuhler, Charles Matthews (AMRX 2013)

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.mcmc import SGHMC
        >>> def model(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(x), subsample_size=10) as idx:
        ...         numpyro.sample("x", dist.Normal(loc, 1), obs=x[idx])
        >>> x = jnp.sin(jnp.arange(100.0)) + 3
        >>> kernel = SGHMC(model, 0.02, friction=10.0, noise_variance="warmup")
        >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> abs(mcmc.get_samples()["loc"].mean() - 3) < 0.1
        Array(True, dtype=bool)
    """

    state_class = SGHMCState
    last_step_fields = (*SGMCMCKernel.last_step_fields, "kinetic_temperature")

    def __init__(
        self,
        model: Model,
        step_size: float | Schedule | None = None,
        *,
        friction: float | None = None,
        mass: float | Sites = 1.0,
        noise_variance: float | Sites | str = 0.0,
        integrator: str = "aboba",
        resample_every: int | None = None,
        max_bias: float = 0.05,
        whitening: Whitening | None = None,
        temperature: float | Schedule = 1.0,
        gradient: GradientEstimator | None = None,
        minibatch: str = "replace",
        steps_per_sample: int = 1,
        sharding: NamedSharding | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
        forward_mode_differentiation: bool = False,
    ) -> None:
        super().__init__(
            model,
            step_size,
            max_bias=max_bias,
            whitening=whitening,
            temperature=temperature,
            gradient=gradient,
            minibatch=minibatch,
            steps_per_sample=steps_per_sample,
            sharding=sharding,
            init_strategy=init_strategy,
            forward_mode_differentiation=forward_mode_differentiation,
        )
        if friction is not None:
            check_positive("friction", friction)
        check_choice("integrator", integrator, tuple(_INTEGRATORS))
        if resample_every is not None:
            resample_every = check_count("resample_every", resample_every)
        for number in _numbers(mass):
            check_positive("mass", number)
        self._from_warmup = isinstance(noise_variance, str)
        if isinstance(noise_variance, str):
            check_choice("noise_variance", noise_variance, ("warmup",))
            variances = [1.0]
        else:
            variances = _numbers(noise_variance)
            for number in variances:
                check_nonnegative("noise_variance", number)
        if integrator == "baoab" and any(isinstance(v, Tracer) or v != 0 for v in variances):
            raise ValueError(
                f"noise_variance is {noise_variance!r} with the integrator 'baoab', which cannot"
                " correct for it; use 'aboba' or 'euler'."
            )
        self._given_friction = friction
        self._friction = 1.0 if friction is None else friction
        self._mass = mass
        self.noise_variance = noise_variance
        self._noise_variance = 0.0 if self._from_warmup else noise_variance
        self._integrator = integrator
        self._resample_every = resample_every

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        if self._from_warmup and self._num_adapt == 0:
            raise ValueError("noise_variance is 'warmup' but num_warmup is 0; give it some draws.")
        jax.eval_shape(lambda: self.ravel_sites("mass", self._mass))
        jax.eval_shape(lambda: self.ravel_sites("noise_variance", self._noise_variance))
        schedule, temperature = self._schedule, self._temperature
        if not isinstance(schedule, ConstantSchedule) or not isinstance(
            temperature, ConstantSchedule
        ):
            return
        C, eps, T = self._friction, schedule.value, temperature.value
        if any(isinstance(x, Tracer) for x in (C, eps, T)):
            return
        rate = self._rate(C, eps)
        for site in self.info.latents:
            M, V = (
                value[site] if isinstance(value, dict) else value
                for value in (self._mass, self._noise_variance)
            )
            if isinstance(M, Tracer) or isinstance(V, Tracer):
                continue
            # In numpy: under a transform, jnp would give tracers, which cannot be compared.
            M, V = np.asarray(M), np.asarray(V)
            if np.any(V > rate * T * M):
                raise ValueError(
                    f"noise_variance is {np.max(V):.4g} at site '{site}', more than the noise that"
                    f" this step size and friction inject, {np.min(rate * T * M):.4g}; take a"
                    " smaller step_size or more friction."
                )

    def _rate(self, C: Any, eps: Any) -> Any:
        """Variance of the injected noise as one of the gradient, for T = M = 1."""
        return 2 * C / eps if self._integrator == "euler" else 4 * np.tanh(C * eps / 2) / eps**2

    def noise_share(self, state: Any) -> float:
        """
        The largest share of the injected noise that ``noise_variance`` takes off, over coordinates
        and chains.

        Above 1 the estimate of ``"warmup"`` was cut: the noise of the gradients is not corrected
        for in full.

        :param state: ``mcmc.last_state``.
        """
        i, eps = np.max(np.asarray(state.i)), np.min(np.asarray(state.step_size, float))
        T = float(self.temperature_at(max(i - 1, 0)))
        M = np.asarray(self.ravel_sites("mass", self._mass), float)
        V = np.max(np.asarray(state.noise_variance, float).reshape(-1, self.info.size), 0)
        return float(np.max(V / (self._rate(self._friction, eps) * (T or np.nan) * M)))

    def momentum_scale(self, T: Array) -> Array:
        return jnp.sqrt(T * self.ravel_sites("mass", self._mass, T.dtype))

    def redraw_momentum(self, rng_key: Array, z: Array, T: Array) -> dict[str, Array]:
        M = self.ravel_sites("mass", self._mass, z.dtype)
        return {"r": jnp.sqrt(T * M) * random.normal(rng_key, z.shape, z.dtype)}

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        V = self.ravel_sites("noise_variance", self._noise_variance, z.dtype)
        return self.redraw_momentum(rng_key, z, self.temperature_at(0, z.dtype)) | {
            "kinetic_temperature": jnp.zeros((), z.dtype),
            "noise_variance": jnp.zeros_like(z) if self._from_warmup else V,
        }

    def choose(self, noise: np.ndarray, found: Found) -> Choice:
        if isinstance(self._mass, dict) or self._mass != 1.0:
            raise ValueError(
                f"mass is {self._mass!r} and step_size is None, but the whitening that is found"
                " takes the place of a mass; leave it out, or give step_size."
            )
        given = self.ravel_sites("noise_variance", self._noise_variance)
        noise = self.noise_ratio(noise)
        left = 0 * noise if self._from_warmup else np.maximum(noise - np.asarray(given), 0)
        return choose_sghmc(
            left,
            self.max_bias,
            friction=self._given_friction,
            # The estimate is corrected for by injecting less, so there must be enough to take off.
            least_injected=1.5 * float(np.max(noise - left)),
            law=self._integrator,
            stiffness=found.stiffness,
        )

    def take(self, settings: Settings) -> None:
        super().take(settings)
        self._friction = settings.friction or 1.0

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        r = state.r
        M = self.ravel_sites("mass", self._mass, z.dtype)
        C = jnp.asarray(self._friction, z.dtype)
        key_noise = key_momentum = key_pair = rng_key
        if self._from_warmup or self._resample_every is not None:
            key_noise, key_momentum, key_pair = random.split(rng_key, 3)
        if self._resample_every is not None:
            r = lax.cond(
                state.i % self._resample_every == 0,
                lambda: self.redraw_momentum(key_momentum, z, T)["r"],
                lambda: r,
            )
        zeta = random.normal(key_noise, z.shape, z.dtype)

        def take(z: Array) -> tuple[Estimate, Array]:
            estimate = grad_fn(z)
            return estimate, self._variance(key_pair, state, grad_fn, z, estimate.grad)

        move = _INTEGRATORS[self._integrator]
        z, r, estimate, V = move(z, r, M, C, T, eps, zeta, take)
        fields = {"r": r, "kinetic_temperature": jnp.mean(r**2 / M), "noise_variance": V}
        return Transition(z, estimate, fields)

    def _variance(self, rng_key: Array, state: Any, grad_fn: GradFn, z: Array, g: Array) -> Array:
        """Mean of (g1 - g2)^2 / 2 over the pairs of warmup so far; frozen afterwards."""
        V = state.noise_variance
        if not self._from_warmup:
            return V

        def update() -> Array:
            other = grad_fn.independent(rng_key, z).grad
            num = state.i - self.num_descent + 1
            return V + ((g - other) ** 2 / 2 - V) / jnp.maximum(num, 1).astype(V.dtype)

        return lax.cond(state.i < self._num_adapt, update, lambda: V)


def _sqrt(variance: Array) -> Array:
    return jnp.sqrt(jnp.maximum(variance, 0))


def _numbers(value: Any) -> list[Any]:
    """All entries of a float or of a dict of per-site values; a traced value as it is."""
    values = value.values() if isinstance(value, dict) else [value]
    return [
        number
        for x in values
        for number in ([x] if isinstance(x, Tracer) else np.ravel(np.asarray(x)).tolist())
    ]
