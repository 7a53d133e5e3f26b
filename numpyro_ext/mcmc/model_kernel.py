"""What NumPyro's ``MCMC`` asks of every kernel apart from its transitions.

A kernel reads the model, starts its chains, and can be copied, printed and pickled.
"""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_ext._checks import check_count, check_positive, summary
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.checks import check_rows, read_global
from numpyro_ext._model.init_from import check_sites
from numpyro_ext._model.mode_search import Mode
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_params
from numpyro_ext._model.whitening import UNCHANGED, Unchanged, Whitening
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.mcmc.first_states import first_states
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import NO_LOCAL_SITES, Fitness, Settings, check_resumed, find
from numpyro_ext.mcmc.sharding import spread_arrays
from numpyro_ext.mcmc.state import shown_fields

__all__ = ["ModelKernel", "Schedule"]

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
class ModelKernel(MCMCKernel):
    """
    Base of the kernels whose chains move on the flat latent vector of a model.

    A subclass supplies :meth:`start`, :meth:`transition`, :meth:`resume` and ``sample``. The first
    three see a single chain and are traced; this class maps the start over chains and compiles it
    in one call. Fields hold the arguments that were given; what a chain moves by, found settings
    in place of those that were left out, is :meth:`in_use`.

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
        self.settings: Settings | None = None
        self._fitness: Fitness | None = None
        self._modes = self.given_modes
        self._num_modes = 1
        self.chains_at: np.ndarray | None = None
        self._starts_near = self._start_is_given = False
        self._num_adapt = self._num_descent = 0
        self._info: ModelInfo | None = None
        self._params: Params = {}
        self._arguments: list[Any] = []
        self._ready = self._resumes = False
        self._key_params: Array | None = None

    @abstractmethod
    def start(
        self, potential: Potential, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        """The first state at ``z``, with the rows and the gradient by which it is checked."""

    @abstractmethod
    def transition(self, state: Any, potential: Potential) -> Any:
        """The state after one transition; ``state.z`` is flat."""

    @abstractmethod
    def resume(self, state: Any, resumed: Array, potential: Potential) -> Any:
        """The state of a chain that goes on, perhaps on other data, where ``resumed`` is True."""

    def finish(self, state: Any, potential: Potential) -> Any:
        """The state as the draw shows it, after its last transition."""
        return state

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
        return UNCHANGED if found is None else found

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

    @property
    def info(self) -> ModelInfo:
        """The sites, supports and plates that :meth:`init` read in the model."""
        if self._info is None:
            raise ValueError("the kernel has no model arguments yet; call init before sample.")
        return self._info

    @property
    def modes(self) -> Modes | None:
        """The modes at which chains start without ``init_params``; None for a kernel that starts
        elsewhere. The last ones that started together did so at the places ``chains_at``, which is
        None where they did not."""
        return self._modes

    @property
    def params(self) -> Params:
        """Values of the model's ``param`` and ``mutable`` sites in the last run."""
        return self._params

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return shown_fields(self.state_class, self.step_size)

    def get_diagnostics_str(self, state: Any) -> str:
        # A value of the state in here would wait for the device at every draw.
        return f"{self.steps_per_sample} steps per draw"

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        if self._info is None:
            return identity
        kwargs = model_kwargs or {}
        info = self._info_on(model_args, kwargs)
        if list(info.latents) != list(self.info.latents):
            # NumPyro's Gibbs leaves out what a block is conditioned on.
            info = self.info
        return self._potential(info, self._params, model_args, kwargs).postprocess()

    def potential(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Potential:
        """The potential on these arguments of the model that :meth:`init` has read."""
        kwargs = model_kwargs or {}
        info = self._info_on(model_args, kwargs)
        info.check_same_latents(self.info)
        return self._potential(info, self._params, model_args, kwargs)

    def _info_on(self, args: tuple, kwargs: dict[str, Any]) -> ModelInfo:
        """What :meth:`init` has read, with the supports on these arguments of the model."""
        if self._seen(args, kwargs):
            return self.info
        return replace(self.info, latents=self._read_sites(args, kwargs).latents)

    def _seen(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """True for the arguments that :meth:`init` has read."""
        return [id(x) for x in jax.tree.leaves((args, kwargs))] == [id(x) for x in self._arguments]

    def _potential(
        self, info: ModelInfo, params: Params, args: tuple, kwargs: dict[str, Any]
    ) -> Potential:
        forward = self.forward_mode_differentiation
        return Potential(self.model, info, params, args, kwargs, forward_mode=forward)

    def _read_sites(self, args: tuple, kwargs: dict[str, Any]) -> ModelInfo:
        strategy = self.init_strategy
        return read_global(self.model, args, kwargs, because=NO_LOCAL_SITES, init_strategy=strategy)

    def _read(
        self, rng_key: Array | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[ModelInfo, Params]:
        """The model's sites and plates, and its parameters from the key of a first chain."""
        strategy, info = self.init_strategy, self._read_sites(args, kwargs)
        key = random.key(0) if rng_key is None else random.split(rng_key, 4)[1]
        spread, whole = spread_arrays(args, kwargs)

        @jax.jit
        def draw(key: Array, spread: dict[int, Array]) -> Params:
            return draw_params(key, self.model, info, *whole(spread), init_strategy=strategy)

        return info, draw(key, spread)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, single = model_kwargs or {}, is_prng_key(rng_key)
        first_key = rng_key if single else rng_key[0]
        resumes, self._resumes = self._resumes, False
        goes_on = resumes and self._info is not None
        if not goes_on:
            key = first_key
            if not isinstance(key, Tracer):
                # What is compiled for one chain or run serves the next, and holds its parameters.
                key = self._key_params = key if self._key_params is None else self._key_params
            self._info, self._params = self._read(key, model_args, kwargs)
            self._arguments = jax.tree.leaves((model_args, kwargs))
        info = self.info
        check_rows(self.model, model_args, kwargs, self.init_strategy)
        self._num_adapt = num_warmup * self.steps_per_sample
        if init_params is not None:
            chains = () if single else rng_key.shape[:1]
            init_params = info.check_unconstrained("init_params", init_params, chains)
        potential = self.potential(model_args, kwargs)
        if self.finds_settings:
            first = init_params
            if init_params is not None and not single:
                first = jax.tree.map(lambda x: x[0], init_params)
            if is_traced(first):
                first = None  # of parallel chains, while the search is on numbers
            self._find(potential, first, first_key, resumes, 1 if single else len(rng_key))
        coordinates = self.coordinates
        if isinstance(coordinates, Whitening) and coordinates.size != info.size:
            raise ValueError(
                f"whitening has {coordinates.size} coordinates, but the model's latent sites"
                f" have {info.size}; make it for this model and these arguments."
            )
        if goes_on:
            return None
        if self.given_modes is not None:
            check_sites(self.given_modes, info, "whitening")
        near = self._modes if init_params is None else None
        if not resumes:
            num_chains = 1 if single else len(rng_key)
            self.chains_at = None if near is None else near.apportion(num_chains)
            if self.settings and self._starts_near != (near is not None):
                self.settings = replace(self.settings)  # a chain compiled with a descent or without
            self._starts_near, self._start_is_given = near is not None, init_params is not None
        self.setup(potential)
        if resumes:  # `MCMC` has a state
            self._ready = not isinstance(rng_key, Tracer)
            return None
        state, traced = first_states(self, potential, rng_key, init_params, near)
        # Under a transform the model's closures may hold its tracers, which die with it.
        self._ready = not traced
        return state

    @property
    def _sample_fn(self) -> Callable[..., Any] | None:
        """``MCMC`` asks for this only where it has a state, and calls :meth:`init` if it is None:
        then it is seen whether settings that were found are those of the data."""
        if self._ready and not self.finds_settings:
            return self.sample
        self._resumes = True
        return None

    def _find(
        self,
        potential: Potential,
        start: Sites | None,
        rng_key: Array,
        resumes: bool,
        num_chains: int,
    ) -> None:
        """Find settings and use them, unless those that were found before fit these data, and the
        modes at which so many chains start."""
        # A chain may start where a program is traced; the search is on numbers all the same.
        # Elsewhere this would compile each constant of the model by itself.
        traced = isinstance(jnp.zeros(()), Tracer)
        with jax.ensure_compile_time_eval() if traced else nullcontext():
            fit = "other" if self._fitness is None else self._fitness.of(potential)
            if resumes and self._fitness is not None:
                return check_resumed(fit, compiled=self._seen(*potential.arguments))
            modes = self._modes if fit == "same" else self.given_modes
            # Of more chains some may start at a mode for which the step was not found.
            if fit == "same" and modes and modes.num_taken(num_chains) <= self._num_modes:
                return
            if self.settings is not None and fit == "near":
                # Another object, for which `MCMC` compiles the chain, and its data, again.
                self.settings = replace(self.settings)
                return
            found = find(self, potential, start, rng_key, modes, num_chains)
            self.settings, self._modes, self._fitness = found
            self._num_modes = self._modes.num_taken(num_chains)

    def wrap_model(self, wrapper: Callable[[Model], Model]) -> Self:
        kernel = copy.copy(self)
        vars(kernel).update(self.__getstate__(), model=wrapper(self.model))
        return kernel

    def __repr__(self) -> str:
        return summary(self, defaults=False)

    def __getstate__(self) -> dict[str, Any]:
        gone: dict[str, Any] = {"_info": None, "_arguments": [], "_ready": False}
        if is_traced(self._params):
            gone["_params"] = {}
        return vars(self) | gone
