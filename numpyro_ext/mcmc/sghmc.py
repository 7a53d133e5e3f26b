"""Stochastic gradient Hamiltonian Monte Carlo: Chen, Fox & Guestrin (2014), eq. 13-15."""

from typing import Any, NamedTuple, Unpack

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_nonnegative, check_positive
from numpyro_ext._typing import Model, Sites
from numpyro_ext.mcmc._grad_fn import GradFn
from numpyro_ext.mcmc._oracle import Oracle
from numpyro_ext.mcmc.base import Common, Schedule, SGMCMCKernel
from numpyro_ext.mcmc.minibatch import PlateState
from numpyro_ext.mcmc.schedules import ConstantSchedule

__all__ = ["SGHMC", "SGHMCState"]


class SGHMCState(NamedTuple):
    """
    State of one chain: the fields of :class:`SGLDState`, and

     - **r** - momentum, ``(n,)`` in the order of the ravelled ``z`` (sites sorted by name).
     - **kinetic_temperature** - mean of ``r^2/M`` after the noise was added; T if all is well.
     - **noise_variance** - estimated variance of the gradient noise, ``(n,)``, for ``noise_variance="warmup"``;
       else the value given.
    """

    i: Array
    z: Sites
    potential_energy: Array
    grad_norm: Array
    step_size: Array
    diverging: Array
    sampling: Array
    gradient: Any
    plates: dict[str, PlateState]
    r: Array
    kinetic_temperature: Array
    noise_variance: Array
    rng_key: Array


class SGHMC(SGMCMCKernel):
    r"""
    Stochastic gradient Hamiltonian Monte Carlo [1]: momentum, friction and noise, no accept step.

    .. math::

        dz = M^{-1} r\, dt, \qquad dr = -\nabla U\, dt - C r\, dt + \sqrt{2 C T M}\, dW,

    with the friction rate C (in 1/time; the paper's matrix is :math:`C M`), one gradient per step, and, with
    :math:`c = e^{-C\epsilon}` and the gradient noise variance :math:`\hat V`, the splitting ABOBA [2, 3]:

    .. math::

        z_m &= z + \tfrac{\epsilon}{2} M^{-1} r, \quad k = -\epsilon g(z_m), \quad r_a = r + k/2 \\
        r_b &= c\, r_a + \sqrt{T M (1 - c^2) - \tfrac{(1+c)^2}{4} \epsilon^2 \hat V}\, \zeta \\
        r' &= r_b + k/2, \quad z' = z_m + \tfrac{\epsilon}{2} M^{-1} r'

    Here injected and gradient noise enter at one place, so a known :math:`\hat V` is corrected exactly in law.
    ``"baoab"`` has the smallest bias in z without gradient noise, but no such place; ``"euler"`` is the rule of [1]
    (position first, gradient at the new position), with a bias of first order in :math:`\epsilon`.
    The step is of the order of a posterior standard deviation over :math:`\sqrt M`, so larger than for :class:`SGLD`.

    :math:`\hat V` is a diagonal. Noise that is correlated between coordinates, as that of correlated covariates is, is
    corrected too much in the directions of little noise, mostly the widest of the posterior: standard deviations come
    out too small (in a logistic regression with 25 covariates by 3 % where a fifth of the injected noise is taken off).
    Where it exceeds the injected noise, :math:`4 T M \tanh(C\epsilon/2)/\epsilon^2`, no correction is enough: a number
    is refused, an estimate from warmup is cut, and ``kinetic_temperature`` stays above T. Then take a smaller step or
    more friction.

    Without ``noise_variance`` gradient noise of variance :math:`s^2` heats a Gaussian target to the temperature
    :math:`T + \tfrac{\epsilon^2}{4} s^2 \coth(C\epsilon/2)`; ``kinetic_temperature`` shows it. The splittings diverge
    for :math:`\epsilon^2 h / M > 4`, where h is the largest curvature.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule, in units of time.
    :param float friction: rate C.
    :param mass: M, a float or a dict of per-site floats or arrays of the shapes of the unconstrained sites.
    :param noise_variance: :math:`\hat V`, a float, a dict of per-site values (the paper's :math:`\hat B` is
        :math:`\epsilon \hat V / 2`), or ``"warmup"``: the mean of :math:`(g_1 - g_2)^2/2` over pairs of independent
        batches during warmup, at one more gradient per warmup step.
    :param str integrator: ``"aboba"``, ``"baoab"`` or ``"euler"``.
    :param int resample_every: draw a new momentum at every such transition; None is never.
    :param common: keyword arguments of :class:`SGMCMCKernel`: ``temperature``, ``gradient``, ``minibatch``,
        ``steps_per_sample``, ``sharding``, ``init_strategy``.

    **References:**

    1. *Stochastic Gradient Hamiltonian Monte Carlo*, Tianqi Chen, Emily B. Fox, Carlos Guestrin (ICML 2014), eq. 13-15
    2. *On the Convergence of Stochastic Gradient MCMC Algorithms with High-Order Integrators*, Changyou Chen, Nan Ding,
       Lawrence Carin (NeurIPS 2015)
    3. *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*, Benedict Leimkuhler, Charles
       Matthews (AMRX 2013)

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
        step_size: float | Schedule,
        *,
        friction: float = 1.0,
        mass: float | Sites = 1.0,
        noise_variance: float | Sites | str = 0.0,
        integrator: str = "aboba",
        resample_every: int | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(model, step_size, **common)
        check_positive("friction", friction)
        check_choice("integrator", integrator, ("aboba", "baoab", "euler"))
        if resample_every is not None:
            check_count("resample_every", resample_every)
        for number in _numbers(mass):
            check_positive("mass", number)
        self._from_warmup = isinstance(noise_variance, str)
        if self._from_warmup:
            check_choice("noise_variance", noise_variance, ("warmup",))
        else:
            for number in _numbers(noise_variance):
                check_nonnegative("noise_variance", number)
        if integrator == "baoab" and (self._from_warmup or np.any(_numbers(noise_variance))):
            raise ValueError(
                f"noise_variance is {noise_variance!r} with the integrator 'baoab', which cannot correct for"
                " it; use 'aboba' or 'euler'."
            )
        self._friction = friction
        self._mass = mass
        self._noise_variance = 0.0 if self._from_warmup else noise_variance
        self._integrator = integrator
        self._resample_every = resample_every

    def setup(self, oracle: Oracle) -> None:
        if self._from_warmup and self._num_adapt == 0:
            raise ValueError("noise_variance is 'warmup' but num_warmup is 0; give it some draws.")
        self.ravel_sites("mass", self._mass)
        self.ravel_sites("noise_variance", self._noise_variance)
        schedule, temperature = self._schedule, self._temperature
        if not isinstance(schedule, ConstantSchedule) or not isinstance(
            temperature, ConstantSchedule
        ):
            return
        C, eps, T = self._friction, schedule.value, temperature.value
        rate = 2 * C / eps if self._integrator == "euler" else 4 * np.tanh(C * eps / 2) / eps**2
        for site in oracle.like:
            # In numpy: under a transform, jnp would give tracers, which cannot be compared.
            M, V = (
                np.asarray(value[site] if isinstance(value, dict) else value)
                for value in (self._mass, self._noise_variance)
            )
            if np.any(V > rate * T * M):
                raise ValueError(
                    f"noise_variance is {np.max(V):.4g} at site '{site}', more than the noise that this step size"
                    f" and friction inject, {np.min(rate * T * M):.4g}; take a smaller step_size or more friction."
                )

    def redraw_momentum(self, rng_key: Array, z: Array, T: Array) -> dict[str, Array]:
        M = self.ravel_sites("mass", self._mass, z.dtype)
        return {"r": jnp.sqrt(T * M) * random.normal(rng_key, z.shape, z.dtype)}

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        V = self.ravel_sites("noise_variance", self._noise_variance, z.dtype)
        return self.redraw_momentum(rng_key, z, self.temperature_at(0, z.dtype)) | {
            "kinetic_temperature": jnp.zeros((), z.dtype),
            "noise_variance": jnp.zeros_like(z) if self._from_warmup else V,
        }

    def step(
        self, rng_key: Array, state: SGHMCState, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> tuple[Array, dict[str, Array], Array, Array]:
        r, V = state.r, state.noise_variance
        M = self.ravel_sites("mass", self._mass, z.dtype)
        C = jnp.asarray(self._friction, z.dtype)
        c = jnp.exp(-C * eps)
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
        if self._integrator == "aboba":
            zm = z + eps / 2 * r / M
            potential, g = grad_fn(zm)
            V = self._update_variance(key_pair, state, grad_fn, zm, g)
            ra = r - eps / 2 * g
            rb = c * ra + _sqrt(T * M * (1 - c**2) - (1 + c) ** 2 / 4 * eps**2 * V) * zeta
            r = rb - eps / 2 * g
            z = zm + eps / 2 * r / M
        elif self._integrator == "baoab":
            potential, g = grad_fn(z)
            r = r - eps * g
            zm = z + eps / 2 * r / M
            rb = r = c * r + _sqrt(T * M * (1 - c**2)) * zeta
            z = zm + eps / 2 * r / M
        else:
            z = z + eps * r / M
            potential, g = grad_fn(z)
            V = self._update_variance(key_pair, state, grad_fn, z, g)
            noise = _sqrt(2 * C * T * M * eps - eps**2 * V) * zeta
            rb = r = r - eps * g - eps * C * r + noise
        fields = {"r": r, "kinetic_temperature": jnp.mean(rb**2 / M), "noise_variance": V}
        return z, fields, potential, g

    def _update_variance(
        self, rng_key: Array, state: SGHMCState, grad_fn: GradFn, z: Array, g: Array
    ) -> Array:
        """Mean of (g1 - g2)^2 / 2 over the pairs of warmup so far; frozen afterwards."""
        V = state.noise_variance
        if not self._from_warmup:
            return V

        def update() -> Array:
            _, other = grad_fn.independent(rng_key, z)
            return V + ((g - other) ** 2 / 2 - V) / (state.i + 1).astype(V.dtype)

        return lax.cond(state.i < self._num_adapt, update, lambda: V)


def _sqrt(variance: Array) -> Array:
    return jnp.sqrt(jnp.maximum(variance, 0))


def _numbers(value: Any) -> np.ndarray:
    """All entries of a float or of a dict of per-site values."""
    values = value.values() if isinstance(value, dict) else [value]
    return np.concatenate([np.ravel(np.asarray(x)) for x in values])
