"""What every kernel does for NumPyro's ``MCMC``: it reads the model, starts chains, and draws."""

from abc import abstractmethod
from collections.abc import Callable
import copy
from functools import partial
from typing import Any, ClassVar, Self

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_ext._checks import check_count, check_positive, summary
from numpyro_ext._model.minibatch import spread_arrays
from numpyro_ext._model.mistakes import check_rows
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._typing import GradientEstimator, Model, Params, Sites
from numpyro_ext.mcmc._laws import Choice
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import Found, Settings, argument_of, find_settings, read_latents
from numpyro_ext.mcmc.state import shown_fields
from numpyro_ext.mcmc.whitening import Whitening

__all__ = ["ModelKernel", "Schedule"]

Schedule = Callable[[Any], Any]
"""A number for every transition ``i``, counted from 0."""

_OF_NUTS = {"adapt_mass_matrix", "adapt_step_size", "dense_mass", "max_tree_depth"} | {
    "target_accept_prob",
    "trajectory_length",
}


class ModelKernel(MCMCKernel):
    """
    Base of the kernels whose chains move on the flat latent vector of a model.

    A subclass supplies :meth:`start`, :meth:`transition` and :meth:`renew`. They see a single
    chain and are traced; this class maps them over chains and compiles the start in one call.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule; None is found by :meth:`init`.
    :param whitening: the coordinates in which a step moves; None is those of the sites, or, with
        ``step_size=None``, found.
    :param int steps_per_sample: transitions per draw.
    :param init_strategy: a per-site initialization function.
    :param bool forward_mode_differentiation: whether to differentiate in forward mode.
    """

    state_class: ClassVar[Any]
    last_step_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that only the last transition of a draw computes, because no other one reads them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "potential_fn" in kwargs:
            raise TypeError(
                f"{cls.__name__} takes a model and no potential_fn; write a model that samples from"
                " dist.ImproperUniform and adds numpyro.factor('U', -potential_fn(z))."
            )
        for name in _OF_NUTS & set(kwargs):
            raise TypeError(
                f"{cls.__name__} takes no {name}, which adapts a kernel with an accept step;"
                " leave it out: without a step_size the settings are found from the model."
            )
        return super().__new__(cls)

    def __init__(
        self,
        model: Model,
        step_size: float | Schedule | None,
        *,
        whitening: Whitening | None = None,
        steps_per_sample: int,
        init_strategy: Callable[..., Any],
        forward_mode_differentiation: bool = False,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model is {model!r}; it must be a callable with NumPyro primitives.")
        if step_size is not None and not callable(step_size):
            check_positive("step_size", step_size)
        if whitening is not None and not isinstance(whitening, Whitening):
            raise TypeError(
                f"whitening is {whitening!r}; it must be a Whitening, such as"
                " find_whitening(model, *args) or Whitening.from_guide(guide, params)."
            )
        self._model = model
        self._finds_settings = step_size is None
        self._schedule: Any = step_size
        if step_size is not None and not callable(step_size):
            self._schedule = ConstantSchedule(step_size)
        self.given_whitening = self._whitening = whitening
        self.settings: Settings | None = None
        self._settings_of: list[Any] | None = None
        self._normal: Whitening | None = None
        self._starts_near = self._start_is_given = False
        self.steps_per_sample = check_count("steps_per_sample", steps_per_sample)
        self._init_strategy = init_strategy
        self._forward_mode = forward_mode_differentiation
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
    def renew(self, state: Any, resumed: Array, potential: Potential) -> Any:
        """Where ``resumed``, compute again what the state knows of the data, as they may differ."""

    def finish(self, state: Any, potential: Potential) -> Any:
        """The state as the draw shows it, after its last transition."""
        return state

    def setup(self, potential: Potential) -> None:
        """Checks that need the model's sites, supports or plates; called by :meth:`init` first."""
        return

    def check_state(self, states: Any, grads: Sites | None) -> None:
        """Checks of the first states and of the gradients there, stacked over chains; not called
        under a transform."""
        return

    def step_size_at(self, i: Any, dtype: Any = float) -> Array:
        """Step size of transition ``i``."""
        return jnp.asarray(self._schedule(i), dtype)

    # The coordinates of a step: everything that enters it or leaves it passes through these three.

    def flatten(self, z: Sites) -> Array:
        """Unconstrained sites as the ``(n,)`` vector in which a step moves."""
        x = self.info.ravel(z)
        return x if self._whitening is None else self._whitening.to_xi(x)

    def unflatten(self, x: Array) -> Sites:
        """The inverse of :meth:`flatten`."""
        z = x if self._whitening is None else self._whitening.to_z(x)
        return self.info.unravel(z)

    def flatten_gradient(self, grad: Sites) -> Array:
        """The gradient with respect to the flat vector, from that with respect to the sites."""
        g = self.info.ravel(grad)
        return g if self._whitening is None else self._whitening.pull(g)

    @property
    def init_strategy(self) -> Callable[..., Any]:
        return self._init_strategy

    moves_whitened: ClassVar[bool] = True
    """Whether steps are taken in the coordinates that ``step_size=None`` finds."""

    def estimators(self, center: Sites) -> list[GradientEstimator]:
        """Gradient estimators among which to choose the one of least noise; empty if it has
        none."""
        return []

    def choose(self, noise: np.ndarray, found: Found) -> Choice:
        """The step by the kernel's law, in the coordinates of ``found.whitening``."""
        raise NotImplementedError

    def take(self, settings: Settings) -> None:
        """Use settings that were found."""
        self.settings = settings
        self._schedule = ConstantSchedule(settings.step_size)
        self._whitening = settings.whitening

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
        """What :meth:`init` read of the model."""
        if self._info is None:
            raise ValueError("the kernel has no model arguments yet; call init before sample.")
        return self._info

    @property
    def model(self) -> Model:
        return self._model

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return shown_fields(self.state_class, self._schedule)

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
        return Potential(self._model, info, params, args, kwargs, forward_mode=self._forward_mode)

    def _read(
        self, rng_key: Array | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[ModelInfo, Params]:
        """What the model contains, and values of its parameters from the key of a first chain."""
        strategy = self._init_strategy
        info = read_latents(self._model, args, kwargs, strategy)
        key = random.key(0) if rng_key is None else random.split(rng_key, 4)[1]
        spread, whole = spread_arrays(args, kwargs)

        @jax.jit
        def draw(key: Array, spread: dict[int, Array]) -> Params:
            return draw_params(key, self._model, info, *whole(spread), init_strategy=strategy)

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
        check_rows(self._model, model_args, kwargs, self._init_strategy)
        self._num_adapt = num_warmup * self.steps_per_sample
        if init_params is not None:
            chains = () if single else rng_key.shape[:1]
            init_params = info.check_unconstrained("init_params", init_params, chains)
        potential = self.potential(model_args, kwargs)
        near = self._find(potential, init_params, single) if self._finds_settings else None
        if self._whitening is not None and self._whitening.size != info.size:
            raise ValueError(
                f"whitening has {self._whitening.size} coordinates, but the model's latent sites"
                f" have {info.size}; make it for this model and these arguments."
            )
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
                    self._model,
                    info,
                    args,
                    kwargs,
                    init_strategy=self._init_strategy,
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

    def _find(
        self, potential: Potential, init_params: Sites | None, single: bool
    ) -> Whitening | None:
        """Find settings, once for all chains; where chains start unless ``init_params`` says it."""
        leaves = jax.tree.leaves(potential.arguments)
        known = self._settings_of
        if known is None or [id(x) for x in known] != [id(x) for x in leaves]:
            first = init_params
            if init_params is not None and not single:
                first = jax.tree.map(lambda x: x[0], init_params)
            # A chain may start under a transform; the search is on numbers all the same.
            with jax.ensure_compile_time_eval():
                settings, self._normal = find_settings(self, self._model, potential, first)
            self.take(settings)
            self._settings_of = leaves
        return None if init_params is not None else self._normal

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

    def sample(
        self, state: Any, model_args: tuple = (), model_kwargs: dict[str, Any] | None = None
    ) -> Any:
        potential = self.potential(model_args, model_kwargs)
        if is_prng_key(state.rng_key):
            return self._draw(potential, state.i, state.resumed, state)
        # All chains share these. Kept out of vmap, a lax.cond on them stays a branch instead of
        # taking both.
        draw = partial(self._draw, potential, state.i[0], state.resumed[0])
        return jax.vmap(draw)(state._replace(i=None, resumed=None))

    def _draw(self, potential: Potential, i: Array, resumed: Array, state: Any) -> Any:
        """``steps_per_sample`` transitions, the first of number ``i``."""
        state = self.renew(state, resumed, potential)
        false = jnp.zeros((), bool)
        state = state._replace(i=i, z=self.flatten(state.z), diverging=false, resumed=false)
        inner = self.steps_per_sample - 1

        def not_shown(_: Any, state: Any) -> Any:
            # Left as they are, so that XLA need not compute what no draw shows.
            kept = {name: getattr(state, name) for name in self.last_step_fields}
            return self.transition(state, potential)._replace(**kept)

        def all_transitions(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state = lax.fori_loop(0, inner, not_shown, carry[1]) if inner else carry[1]
            return jnp.zeros((), bool), self.transition(state, potential)

        # A loop of one turn, though XLA cannot know that: on CPU it makes one function of a small
        # loop, but hands loose operations to its threads one by one, which takes longer than a
        # transition.
        true = (i | 1) != 0
        _, state = lax.while_loop(lambda carry: carry[0], all_transitions, (true, state))
        state = self.finish(state, potential)
        return state._replace(z=self.unflatten(state.z))

    def wrap_model(self, wrapper: Callable[[Model], Model]) -> Self:
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._info, kernel._params, kernel._sample_fn = None, {}, None
        kernel._settings_of = None
        return kernel

    def __repr__(self) -> str:
        return summary(self, argument_of, defaults=False)

    def __getstate__(self) -> dict[str, Any]:
        gone = {"_info": None, "_params": {}, "_sample_fn": None, "_settings_of": None}
        return self.__dict__ | gone
