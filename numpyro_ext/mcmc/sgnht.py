"""Stochastic gradient Nose-Hoover thermostat: Ding et al. (2014), algorithm 2."""

from dataclasses import dataclass
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_positive, if_given
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.base import GradFn, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.laws import choose_sgnht
from numpyro_ext.mcmc.settings import Settings

SGNHTState = kernel_state(
    "SGNHTState",
    __name__,
    r="momentum, ``(n,)`` in the flat order.",
    thermostat='friction xi that was found: ``()`` for ``thermostat="scalar"``, ``(number of'
    ' sites,)`` in the order of the model for ``"per_site"``, ``(n,)`` for ``"per_parameter"``.',
    kinetic_temperature="mean of ``r^2`` over all n.",
)


@dataclass(kw_only=True, eq=False, repr=False)
class SGNHT(SGMCMCKernel):
    r"""
    Stochastic gradient Nose-Hoover thermostat: a friction adapts until the temperature is right.

    .. math::
        dz = r\, dt, \quad dr = -\nabla U\, dt - \xi r\, dt + \sqrt{2 C T}\, dW, \quad
        d\xi = \tfrac{n_g}{\mu} \bigl(\tfrac{1}{n_g} |r|^2 - T\bigr)\, dt,

    with unit mass, :math:`n_g` coordinates to a thermostat and its mass :math:`\mu`. One step, with
    :math:`\xi(0) = C` and :math:`c = e^{-\xi\epsilon}`:

    .. math::
        r' &= c\, r + \tfrac{1 + c}{2} \bigl(-\epsilon g(z) + \sqrt{2 C T \epsilon}\, \zeta\bigr),
        \quad z' = z + \epsilon r' \\
        \xi' &= \xi + \epsilon \tfrac{n_g}{\mu} \bigl(\operatorname{mean}_g r'^2 - T\bigr)

    Gradient noise of unknown variance :math:`s^2` is injected noise that nobody declared, and
    :math:`\xi` finds it: at stationarity :math:`\xi \approx C + \epsilon s^2 / (2T)`, and a
    Gaussian target has its variance T/h at any step (with many coordinates to a thermostat). The
    step is of the order of a posterior standard deviation, as for :class:`SGHMC`; the paper's ``h``
    is :math:`\epsilon`, its ``A`` is C, and its thermostat has :math:`\mu = n_g`, the default here
    for 10 coordinates or more.

    A scalar thermostat makes the *average* temperature right: parts of the model with unequal
    gradient noise end too hot and too cold. ``"per_parameter"`` heals this [2], but :math:`\xi`
    then fluctuates with variance :math:`T/\mu`. The noise must not vary much along the chain. Once
    :math:`\epsilon C + \epsilon^2 s^2 / (2T) \ge 2 - \epsilon^2 h/2` no friction is enough and
    :math:`\xi` runs away: ``thermostat`` shows it, and at last ``diverging``.

    :math:`\xi` settles within about :math:`\mu \xi / (n_g T \epsilon)` steps. For latents with
    standard deviations all near a :math:`\sigma` far below 1, take ``thermal_mass``
    :math:`= \sigma^2 \max(n_g, 10)`, or warm up longer.

    :param step_size: positive float or schedule, in units of time; None has it found, with the
        friction, in whitened coordinates.
    :param float friction: C, a rate in 1/time; by default 1, or found with the step size.
    :param str thermostat: ``"scalar"``, ``"per_site"`` or ``"per_parameter"``: the coordinates that
        share a friction.
    :param float thermal_mass: :math:`\mu`, in units of squared time; by default the larger of
        :math:`n_g` and 10.

    **References:**

    1. *Bayesian Sampling Using Stochastic Gradient Thermostats*, Nan Ding, Youhan Fang, Ryan
       Babbush, Changyou Chen, Robert D. Skeel, Hartmut Neven (NeurIPS 2014), algorithm 2
    2. *Adaptive Thermostats for Noisy Gradient Systems*, Benedict Leimkuhler, Xiaocheng Shang (SIAM
       Journal on Scientific Computing, 2016)

    >>> SGNHT(normal_mean, 0.02, thermostat="per_parameter")
    SGNHT(model=normal_mean, step_size=0.02, thermostat='per_parameter')
    """

    state_class = SGNHTState
    momentum = "r"

    friction: float | None = None
    thermostat: str = "scalar"
    thermal_mass: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if_given(check_positive, "friction", self.friction)
        check_choice("thermostat", self.thermostat, ("scalar", "per_site", "per_parameter"))
        if_given(check_positive, "thermal_mass", self.thermal_mass)

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        shape = {"scalar": (), "per_site": (len(self._sizes()),), "per_parameter": z.shape}
        xi = jnp.full(shape[self.thermostat], self.friction_in_use, z.dtype)
        return super().init_state(rng_key, z) | {"thermostat": xi}

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        return choose_sgnht(
            noise,
            self.max_bias,
            friction=self.friction,
            shared=self.thermostat != "per_parameter",
            stiffness=normal.stiffness,
        )

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        xi = state.thermostat
        C = jnp.asarray(self.friction_in_use, z.dtype)
        estimate = grad_fn(z)
        zeta = random.normal(rng_key, z.shape, z.dtype)
        per_site, sizes = self.thermostat == "per_site", self._sizes()
        spread = jnp.repeat(xi, sizes, total_repeat_length=len(z)) if per_site else xi
        c = jnp.exp(-spread * eps)
        kick = -eps * estimate.grad + jnp.sqrt(2 * C * T * eps) * zeta
        r = c * state.r + (1 + c) / 2 * kick
        z = z + eps * r
        K, size = (jnp.mean(r**2), np.array(len(z))) if xi.ndim == 0 else (r**2, np.array(1))
        if per_site:
            K = jnp.stack([jnp.mean(r[part] ** 2) for part in self.info.slices.values()])
            size = sizes
        mass = np.maximum(size, 10) if self.thermal_mass is None else self.thermal_mass
        xi = xi + eps * jnp.asarray(size / mass, z.dtype) * (K - T)
        fields = {"r": r, "thermostat": xi, "kinetic_temperature": jnp.mean(r**2)}
        return Transition(z, estimate, fields)

    def _sizes(self) -> np.ndarray:
        """The number of coordinates of each site, in the order of the model."""
        return np.array([part.stop - part.start for part in self.info.slices.values()])
