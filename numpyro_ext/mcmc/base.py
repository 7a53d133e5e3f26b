"""The bases of kernels: arguments that kernels share, and what a kernel supplies."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._checks import check_choice, check_count, check_nonnegative, check_positive
from numpyro_ext._model.mode_search import Mode
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.sharding import check_batches, num_devices
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc.adapter import Adapter
from numpyro_ext.mcmc.chain import GradFn, GradientChain, Transition, Unchanged
from numpyro_ext.mcmc.gradients import ControlVariate, warn_if_far
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import Settings

__all__ = ["GradFn", "ModelKernel", "SGMCMCKernel", "Schedule"]

Schedule = Callable[[Any], Any]
"""A number for every transition ``i``, counted from 0."""

_ADAPTS = (
    "takes no {name}, which adapts a kernel with an accept step; leave it out: without a step_size"
    " the settings are found from the model."
)
_INSTEAD = {
    "potential_fn": "takes a model and no potential_fn; write a model that samples from"
    " dist.ImproperUniform and adds numpyro.factor('U', -potential_fn(z)).",
    "adapt_mass_matrix": _ADAPTS,
    "adapt_step_size": _ADAPTS,
    "dense_mass": _ADAPTS,
    "max_tree_depth": _ADAPTS,
    "target_accept_prob": _ADAPTS,
    "trajectory_length": _ADAPTS,
}


@dataclass(kw_only=True, eq=False, repr=False)
class ModelKernel(Adapter):
    """
    Base of the kernels whose chains move on the flat latent vector of a model.

    A subclass supplies :meth:`chain`. Fields hold the arguments that were given; what a chain moves
    by, found settings in place of those that were left out, is :meth:`in_use`.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule; :meth:`init` finds one if it is None.
    :param whitening: the coordinates in which a step moves, those of the sites by default. Of
        ``Modes`` they are those of the heaviest one, and chains start at them.
    :param int steps_per_sample: transitions per draw.
    :param init_strategy: a per-site initialization function.
    """

    model: Model = field(kw_only=False)
    step_size: float | Schedule | None = field(default=None, kw_only=False)
    whitening: Whitening | Modes | None = None
    steps_per_sample: int = 1
    init_strategy: Callable[..., Any] = init_to_uniform

    state_class: ClassVar[Any]
    last_step_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that only the last transition of a draw computes, because no other one reads them."""
    finds_whitening: ClassVar[bool] = True
    """True if steps are taken in the coordinates that ``step_size=None`` finds."""
    inference_method: ClassVar[str] = "mcmc"
    """The name by which a diagnosis calls the method, ``"mcmc"`` or ``"sgmcmc"``."""
    forward_mode_differentiation = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for name in _INSTEAD.keys() & kwargs:
            raise TypeError(f"{cls.__name__} {_INSTEAD[name].format(name=name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.model):
            raise TypeError(
                f"model is {self.model!r}; it must be a callable with NumPyro primitives."
            )
        if isinstance(self.step_size, ConstantSchedule):
            self.step_size = self.step_size.value
        if self.finds_settings and type(self).choose is ModelKernel.choose:
            raise ValueError(
                f"step_size is None, but {type(self).__name__} has no law by which a step could be"
                " found; give step_size."
            )
        if self.step_size is not None and not callable(self.step_size):
            check_positive("step_size", self.step_size)
        if not isinstance(self.whitening, Whitening | Modes | None):
            raise TypeError(
                f"whitening is {self.whitening!r}; it must be a Whitening, such as"
                " Whitening.from_guide(guide, params), or the result of find_modes(model, *args)."
            )
        self.steps_per_sample = check_count("steps_per_sample", self.steps_per_sample)

    def setup(self, potential: Potential) -> None:
        """Checks that need the model's sites, supports or plates; :meth:`init` calls it before
        chains start."""
        if callable(self.step_size):
            at_start = jax.jit(self.step_size)(np.zeros((), np.int32))
            check_positive("step_size at i = 0", at_start)

    def check_state(self, states: Any, grads: Sites | None) -> None:
        """Checks of the first states and of the gradients there, stacked over chains; it is not
        called under a transform."""
        return

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        """
        The step, and what the kernel's law on a Gaussian predicts for it.

        Without this method ``step_size`` is required.

        :param noise: ``(n,)`` variances of the gradient's noise over the temperature, in the
            coordinates of ``normal.whitening``.
        :param normal: the normal approximation of the posterior.
        :param potential: that of the model.
        """
        raise NotImplementedError

    def gradients_per_transition(self, rows: float) -> float | None:
        """
        Minibatch gradients that one transition takes, None if that number is not known.

        :param float rows: the number of minibatch gradients that the gradient of all rows takes.
        """
        return None

    def temperature_at(self, i: Any, dtype: Any = float) -> Array | None:
        """Temperature of transition ``i``, None for a kernel without one."""
        return None

    def noise_share(self, state: Any) -> float | None:
        """The share of the injected noise that is left out because gradients have noise of their
        own, None for a kernel that does not correct for it."""
        return None

    def step_size_at(self, i: Any, dtype: Any = float) -> Array:
        """Step size of transition ``i``."""
        eps = self.in_use("step_size")
        return jnp.asarray(eps(i) if callable(eps) else eps, dtype)

    @property
    def finds_settings(self) -> bool:
        """True if :meth:`init` finds the step size, and what belongs to it."""
        return self.step_size is None

    def in_use(self, argument: str) -> Any:
        """What a chain takes for an argument: what was found for it, or else what was given."""
        found = {} if self.settings is None else self.settings.arguments
        return found[argument] if argument in found else getattr(self, argument)

    @property
    def given_modes(self) -> Modes | None:
        """The result of ``find_modes``, if that was given as the whitening."""
        return self.whitening if isinstance(self.whitening, Modes) else None

    @property
    def given_whitening(self) -> Whitening | None:
        """The coordinates that were given, by themselves or by modes."""
        if isinstance(self.whitening, Modes):
            return self.whitening.whitening if self.finds_whitening else None
        return self.whitening

    @property
    def coordinates(self) -> Whitening | Unchanged:
        """The map between the flat vector of the sites and the coordinates of a step."""
        found = self.given_whitening if self.settings is None else self.settings.whitening
        return Unchanged() if found is None else found

    def flatten(self, z: Sites) -> Array:
        """Unconstrained sites as the ``(n,)`` vector in which a step moves."""
        return self.coordinates.to_xi(self.info.ravel(z))

    def unflatten(self, x: Array) -> Sites:
        """The inverse of :meth:`flatten`."""
        return self.info.unravel(self.coordinates.to_z(x))

    def ravel_sites(self, what: str, value: Any, dtype: Any = float) -> Array:
        """A float as it is; a dict of per-site floats or arrays as ``(n,)``, in the flat order."""
        if not isinstance(value, dict):
            return jnp.asarray(value, dtype)
        self.info.check_names(what, value)
        full = {
            name: jnp.full(self.info.latents[name].unconstrained.shape, x)
            if jnp.ndim(x) == 0
            else x
            for name, x in value.items()
        }
        return self.info.ravel(self.info.check_unconstrained(what, full)).astype(dtype)


@dataclass(kw_only=True, eq=False, repr=False)
class SGMCMCKernel(ModelKernel):
    r"""
    Base of the stochastic-gradient kernels for :class:`~numpyro.infer.mcmc.MCMC`.

    Draws from :math:`\pi(z) \propto \exp(-U(z)/T)`, where U is NumPyro's potential in unconstrained
    space, summed over all N data, Jacobian included. Every ``plate`` with a ``subsample_size`` is a
    minibatch, redrawn at each transition in O(batch) work. There is no accept step: draws are
    biased by the step size and by the gradient noise, see each kernel.

    **Flat order.** A step moves the ``(n,)`` vector of the latent sites in the order in which the
    model samples them; momenta, preconditioners, metrics and per-site values have this order too.

    **Settings.** With ``step_size=None``, the default, :meth:`init` finds the coordinates, the
    step, the friction and the gradient estimator; ``kernel.settings`` is a :class:`Settings`.

    **Warmup.** A chain that starts far from the mode would turn its potential into momentum. So a
    kernel with momentum only descends during the first half of warmup, with gradient and momentum
    kept below their thermal size, unless it starts at the normal approximation. A chain that
    diverges during warmup goes back to its best state so far and halves its step; ``step_scale``
    in the state is the factor.

    If the gradient or a new value is not finite, a chain keeps its last finite state, draws a new
    momentum if it has one, and marks the draw ``diverging``; it requires a smaller step then.

    A kernel supplies ``state_class`` (see :func:`kernel_state`) and :meth:`step`. The other hooks
    have defaults; the page *Adding an algorithm* lists them.

    :param model: Python callable containing NumPyro primitives; all latent sites continuous and
        outside of the subsampled plates. With funsor installed others of few values are summed out,
        wherever they are, as they are for ``NUTS``.
    :param step_size: positive float, or a callable of the transition number ``i`` (from 0), such
        as a schedule; None has it found.
    :param float max_bias: relative error of a variance that a step which is found may cause.
    :param whitening: a :class:`Whitening`, the coordinates in which a step moves; or the result of
        ``find_modes``, in place of the search, where chains start too.
    :param temperature: non-negative float T or a callable of ``i``; 0 is descent without noise.
    :param gradient: an estimator: :class:`MinibatchGradient` by default, :class:`ControlVariate`,
        :class:`SVRG` or any object with their methods ``init`` and ``estimate``.
    :param str minibatch: ``"replace"`` draws rows with replacement, ``"epoch"`` each row once per
        pass.
    :param int steps_per_sample: transitions per draw, all in one dispatch.
    :param sharding: a ``NamedSharding`` over the mesh axis (of type ``Auto``) along which the rows
        of the model's arguments are sharded; every device then takes its share of the batch. Use
        ``MCMC(..., jit_model_args=True)``.
    :param bool forward_mode_differentiation: whether to differentiate the potential in forward
        mode, as models with a ``while_loop`` require.
    """

    max_bias: float = 0.05
    temperature: float | Schedule = 1.0
    gradient: GradientEstimator | None = None
    minibatch: str = "replace"
    sharding: NamedSharding | None = None
    forward_mode_differentiation: bool = False

    last_step_fields: ClassVar[tuple[str, ...]] = ("potential_energy", "grad_norm")
    momentum: ClassVar[str | None] = None
    """Name of the state's field that is the momentum, for kernels that have one."""
    inference_method: ClassVar[str] = "sgmcmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.temperature, ConstantSchedule):
            self.temperature = self.temperature.value
        if not callable(self.temperature):
            check_nonnegative("temperature", self.temperature)
        check_positive("max_bias", self.max_bias)
        if isinstance(self.gradient, type) or not isinstance(
            self.gradient, GradientEstimator | None
        ):
            raise TypeError(
                f"gradient is {self.gradient!r}; it must be an object with the methods init and"
                " estimate, such as ControlVariate(center)."
            )
        check_choice("minibatch", self.minibatch, ("replace", "epoch"))
        num_devices(self.sharding)

    @abstractmethod
    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        """
        One transition on the flat ``(n,)`` vector.

        :param rng_key: a key of this step alone.
        :param state: the state before the step; ``state.i`` is not batched.
        :param z: the flat vector.
        :param grad_fn: the gradient estimate, ``estimate = grad_fn(z)``; further methods are
            ``grad_fn.with_hvp(z, v)`` and ``grad_fn.independent(rng_key, z)``.
        :param eps: step size.
        :param T: temperature.
        """

    @property
    def _friction(self) -> float:
        """The friction in use, of kernels that have one."""
        C = self.in_use("friction")
        return 1.0 if C is None else C

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        """The kernel's own fields at the start of one chain, at the flat ``z``."""
        return {}

    def momentum_scale(self, T: Array) -> Array:
        """Standard deviation of the momentum at temperature T."""
        return jnp.sqrt(T)

    def draw_momentum(self, rng_key: Array, z: Array, T: Array) -> Array:
        """A new momentum, at the start and after a divergence."""
        return self.momentum_scale(T) * random.normal(rng_key, z.shape, z.dtype)

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        far = self.momentum is not None and not self._starts_near
        self.num_descent = self.num_adapt // 2 if far else 0
        check_batches(potential.plates, num_devices(self.sharding))
        if callable(self.temperature):
            at_start = jax.jit(self.temperature)(np.zeros((), np.int32))
            check_nonnegative("temperature at i = 0", at_start)

    def check_state(self, states: Any, grads: Sites | None) -> None:
        # A draw in coordinates without a scale says nothing, and one around the center is near.
        center = isinstance(self.in_use("gradient"), ControlVariate)
        whitened = isinstance(self.coordinates, Whitening)
        if grads and center and (self._start_is_given or (whitened and not self._starts_near)):
            warn_if_far(states, grads, self.flatten, whitened)

    def gradients_per_transition(self, rows: float) -> float:
        cost: Any = getattr(self.in_use("gradient"), "cost", None)
        return 1.0 if cost is None else float(cost(rows))

    def sampling_at(self, i: Any) -> Array:
        """False in the exploration stage of a cyclical schedule."""
        return jnp.asarray(getattr(self.step_size, "sampling", lambda i: True)(i), bool)

    def temperature_at(self, i: Any, dtype: Any = float) -> Array:
        """T of transition ``i``: 0 in the exploration stage of a cyclical schedule."""
        T = self.temperature(i) if callable(self.temperature) else self.temperature
        return jnp.where(self.sampling_at(i), jnp.asarray(T, dtype), 0)

    def chain(self, potential: Potential) -> GradientChain:
        return GradientChain(self, potential, self.coordinates, self.in_use("gradient"))

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        chain = self.chain(self.potential(model_args, model_kwargs))
        return state._replace(gradient=chain.init_gradient(state.z))

    def estimate_gradient(
        self,
        rng_key: Array,
        z: Sites,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Array, Sites]:
        """One draw of the gradient estimate at unconstrained sites z: ``(potential, grad)``."""
        kwargs = model_kwargs or {}
        info, params = self._read(None, model_args, kwargs)
        chain = self.chain(self._potential(info, params, model_args, kwargs))
        z = info.check_unconstrained("z", z)
        key_batch, key_gradient = random.split(rng_key)
        idx, i, state = chain.new_batch(key_batch), jnp.zeros((), int), chain.init_gradient(z)
        return chain.estimate(key_gradient, i, z, idx, state)[:2]
