"""What NumPyro's ``MCMC`` asks of every kernel apart from its transitions.

A kernel reads the model, starts its chains, and can be copied, printed and pickled.
"""

from abc import abstractmethod
from collections.abc import Callable
import copy
from dataclasses import dataclass, field
from functools import partial
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
from numpyro_ext._model.mistakes import check_rows, read_global
from numpyro_ext._model.mode_search import NormalFit
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.sharding import spread_arrays
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._model.whitening import UNCHANGED, Unchanged, Whitening
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import NO_LOCAL_SITES, Settings, find
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
    in one call. Fields hold the arguments that are in use, also after settings were found.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule; :meth:`init` finds one if it is None.
    :param whitening: the coordinates in which a step moves, those of the sites by default.
    :param int steps_per_sample: transitions per draw.
    :param init_strategy: a per-site initialization function.
    """

    model: Model = field(kw_only=False)
    step_size: float | Schedule | None = field(default=None, kw_only=False)
    whitening: Whitening | None = None
    steps_per_sample: int = 1
    init_strategy: Callable[..., Any] = init_to_uniform

    state_class: ClassVar[Any]
    last_step_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that only the last transition of a draw computes, because no other one reads them."""
    finds_whitening: ClassVar[bool] = True
    """True if steps are taken in the coordinates that ``step_size=None`` finds."""
    inference_method: ClassVar[str] = "mcmc"
    """The name by which a diagnosis calls the method, ``"mcmc"`` or ``"sgmcmc"``."""
    _forward_mode = False

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
        if self.step_size is None and type(self).choose is ModelKernel.choose:
            raise ValueError(
                f"step_size is None, but {type(self).__name__} has no law by which a step could be"
                " found; give step_size."
            )
        if self.step_size is not None and not callable(self.step_size):
            check_positive("step_size", self.step_size)
        if self.whitening is not None and not isinstance(self.whitening, Whitening):
            raise TypeError(
                f"whitening is {self.whitening!r}; it must be a Whitening, such as"
                " find_whitening(model, *args) or Whitening.from_guide(guide, params)."
            )
        self.steps_per_sample = check_count("steps_per_sample", self.steps_per_sample)
        self.finds_settings = self.step_size is None
        self.settings: Settings | None = None
        self._given: dict[str, Any] = {}
        self._settings_of: list[Any] | None = None
        self._normal: NormalFit | None = None
        self._starts_near = self._start_is_given = False
        self._num_adapt = 0
        self._info: ModelInfo | None = None
        self._params: Params = {}
        # `MCMC` calls `init` before it resumes a chain when this is None.
        self._sample_fn: Callable[..., Any] | None = None

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

    def choose(self, noise: np.ndarray, normal: NormalFit, potential: Potential) -> Settings:
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
        return jnp.asarray(self.step_size(i) if callable(self.step_size) else self.step_size, dtype)

    @property
    def coordinates(self) -> Whitening | Unchanged:
        """The map between the flat vector of the sites and the coordinates of a step."""
        return UNCHANGED if self.whitening is None else self.whitening

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
        return self.potential(model_args, model_kwargs).postprocess()

    def potential(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Potential:
        """The potential on these arguments of the model that :meth:`init` has read."""
        return self._potential(self.info, self._params, model_args, model_kwargs or {})

    def _potential(
        self, info: ModelInfo, params: Params, args: tuple, kwargs: dict[str, Any]
    ) -> Potential:
        return Potential(self.model, info, params, args, kwargs, forward_mode=self._forward_mode)

    def _read(
        self, rng_key: Array | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[ModelInfo, Params]:
        """The model's sites and plates, and its parameters from the key of a first chain."""
        strategy = self.init_strategy
        info = read_global(self.model, args, kwargs, because=NO_LOCAL_SITES, init_strategy=strategy)
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
        info, params = self._read(rng_key if single else rng_key[0], model_args, kwargs)
        self._info, self._params = info, params
        check_rows(self.model, model_args, kwargs, self.init_strategy)
        self._num_adapt = num_warmup * self.steps_per_sample
        if init_params is not None:
            chains = () if single else rng_key.shape[:1]
            init_params = info.check_unconstrained("init_params", init_params, chains)
        potential = self.potential(model_args, kwargs)
        if self.finds_settings:
            self._find(potential, init_params, single)
        if self.whitening is not None and self.whitening.size != info.size:
            raise ValueError(
                f"whitening has {self.whitening.size} coordinates, but the model's latent sites"
                f" have {info.size}; make it for this model and these arguments."
            )
        near = self._normal.whitening if self._normal and init_params is None else None
        self._starts_near, self._start_is_given = near is not None, init_params is not None
        self.setup(potential)
        spread, whole = spread_arrays(model_args, kwargs)

        @jax.jit
        def begin(
            rng_key: Array, z: Sites | None, spread: dict[int, Array]
        ) -> tuple[Any, Any, Array]:
            args, kwargs = whole(spread)
            split = partial(random.split, num=4)
            keys = split(rng_key) if single else jnp.swapaxes(jax.vmap(split)(rng_key), 0, 1)
            rng_key, key_model, key_plates, key_start = keys
            found = None
            if z is None and near is not None:
                # From the normal approximation, so that R-hat compares chains that began apart.
                def draw(key: Array, normal: Whitening = near) -> Sites:
                    xi = random.normal(key, (info.size,), normal.center.dtype)
                    return info.unravel(normal.to_z(xi))

                z = draw(key_model) if single else jax.vmap(draw)(key_model)
            elif z is None:
                z, found, _ = draw_start(
                    key_model,
                    self.model,
                    info,
                    args,
                    kwargs,
                    init_strategy=self.init_strategy,
                    forward_mode=self._forward_mode,
                )

            start = partial(self.start, self.potential(args, kwargs))
            mapped: Any = start if single else jax.vmap(start)
            state, idx, grad = mapped(rng_key, key_plates, key_start, z)
            values = jax.tree.leaves((found, state.potential_energy, grad))
            finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in values])
            return state, (found, idx, grad), jnp.all(finite)

        state, (found, idx, grad), finite = begin(rng_key, init_params, spread)
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((state, finite)))
        if not traced:
            if not finite:
                self._refuse_start(state, found, idx, grad, potential)
            first = state, grad
            self.check_state(*(jax.tree.map(lambda x: x[None], first) if single else first))
        # Under a transform the model's closures may hold its tracers, which die with it.
        self._sample_fn = None if traced else self.sample
        return state

    def _find(self, potential: Potential, init_params: Sites | None, single: bool) -> None:
        """Find settings and use them; once for all chains on the same arguments of the model."""
        leaves = jax.tree.leaves(potential.arguments)
        known = self._settings_of
        if known is not None and [id(x) for x in known] == [id(x) for x in leaves]:
            return
        vars(self).update(self._given)
        before, first = dict(vars(self)), init_params
        if init_params is not None and not single:
            first = jax.tree.map(lambda x: x[0], init_params)
        # A chain may start under a transform; the search is on numbers all the same.
        with jax.ensure_compile_time_eval():
            self.settings, self._normal = find(self, potential, first)
        self._given = {name: before[name] for name in self.settings.arguments}
        vars(self).update(self.settings.arguments)
        self._settings_of = leaves

    def _refuse_start(
        self, state: Any, found: Array | None, idx: Any, grad: Any, potential: Potential
    ) -> None:
        if found is not None:  # the search looks at the first rows
            rows = {
                name: jnp.broadcast_to(jnp.arange(size), (*jnp.shape(found), size))
                for name, (_, size) in potential.plates.items()
            }
            potential.check_start(state.z, rows, found)
        potential.check_start(state.z, idx, state.potential_energy, grad)

    def wrap_model(self, wrapper: Callable[[Model], Model]) -> Self:
        kernel = copy.copy(self)
        vars(kernel).update(self.__getstate__(), model=wrapper(self.model))
        return kernel

    def __repr__(self) -> str:
        return summary(self, defaults=False)

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_info": None, "_params": {}, "_sample_fn": None, "_settings_of": None}
        return vars(self) | gone
