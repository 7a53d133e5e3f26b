"""What NumPyro's ``MCMC`` asks of every kernel apart from its transitions.

A kernel reads the model, starts its chains at values that are given, drawn, or drawn at the modes,
and can be copied, printed and pickled.
"""

from abc import abstractmethod
from collections.abc import Callable
import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_ext._checks import summary
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.checks import check_rows, read_global
from numpyro_ext._model.init_from import check_sites
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.operations import quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.sharding import spread_arrays
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.mcmc.chain import Chain, Unchanged, shown_fields
from numpyro_ext.mcmc.settings import NO_LOCAL_SITES, Found, Settings, settings_for

__all__ = ["Adapter"]


class Adapter(MCMCKernel):
    """
    A kernel as ``MCMC`` sees it; its chains are those of :meth:`chain`.

    This class maps the start over chains and compiles it in one call.
    """

    model: Model
    steps_per_sample: int
    init_strategy: Callable[..., Any]
    state_class: ClassVar[Any]
    step_size: Any
    finds_settings: bool
    forward_mode_differentiation: bool
    given_modes: Modes | None
    coordinates: Whitening | Unchanged
    setup: Callable[..., None]
    check_state: Callable[..., None]

    def __post_init__(self) -> None:
        self.settings: Settings | None = None
        self._found: Found | None = None
        self.chains_at: np.ndarray | None = None
        self._starts_near = self._start_is_given = False
        self.num_adapt = self.num_descent = 0
        self._info: ModelInfo | None = None
        self._params: Params = {}
        self._arguments: list[Any] = []
        self._ready = self._resumes = False
        self._key_params: Array | None = None

    @abstractmethod
    def chain(self, potential: Potential) -> Chain:
        """The transitions on this potential."""

    def sample(
        self, state: Any, model_args: tuple = (), model_kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.chain(self.potential(model_args, model_kwargs)).draw(state)

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
        return self.given_modes if self._found is None else self._found.modes

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
        if self.has_read(args, kwargs):
            return self.info
        return replace(self.info, latents=self._read_sites(args, kwargs).latents)

    def has_read(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """True for the arguments that :meth:`init` has read."""
        return [id(x) for x in jax.tree.leaves((args, kwargs))] == [id(x) for x in self._arguments]

    def _potential(
        self, info: ModelInfo, params: Params, args: tuple, kwargs: dict[str, Any]
    ) -> Potential:
        forward = self.forward_mode_differentiation
        return Potential(self.model, info, params, args, kwargs, forward_mode=forward)

    def _read_sites(self, args: tuple, kwargs: dict[str, Any]) -> ModelInfo:
        how: dict[str, Any] = {"init_strategy": self.init_strategy, "sums": True}
        return read_global(self.model, args, kwargs, because=NO_LOCAL_SITES, **how)

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
        self.num_adapt = num_warmup * self.steps_per_sample
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
            num_chains = 1 if single else len(rng_key)
            found = settings_for(
                self, self._found, potential, first, first_key, resumes, num_chains
            )
            if found is not self._found:
                self._found, self.settings = found, found.settings
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
        near = self.modes if init_params is None else None
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


def first_states(
    kernel: "Adapter",
    potential: Potential,
    rng_key: Array,
    init_params: Sites | None,
    near: Modes | None,
) -> tuple[Any, bool]:
    """
    The first state of one chain, or of several, and whether it is traced; an error names the site
    where the potential or its gradient is not finite.

    Starts that were drawn, and are not finite for some chain, are drawn again: nearer to a mode, or
    with the gradient looked at.

    :param kernel: it makes a state by the ``start`` of its chain.
    :param init_params: unconstrained sites, with a leading axis if there are several chains.
    :param near: the modes to draw at. Each has its share of the chains that start together; a
        single one starts at the heaviest.
    """
    info, single = potential.info, is_prng_key(rng_key)
    spread, whole = spread_arrays(*potential.arguments)

    # Compiled for one run.
    options = None if isinstance(rng_key, Tracer) else quick_options()

    @partial(jax.jit, static_argnames="validate_grad", compiler_options=options)
    def begin(
        rng_key: Array, z: Sites | None, spread: dict[int, Array], scale: float, validate_grad: bool
    ) -> tuple[Any, Any, Array]:
        args, kwargs = whole(spread)
        split = partial(random.split, num=4)
        keys = split(rng_key) if single else jnp.swapaxes(jax.vmap(split)(rng_key), 0, 1)
        rng_key, key_model, key_plates, key_start = keys
        found = None
        if z is None and near is not None:
            # From the normal approximation, so that R-hat compares chains that began apart.
            def draw(key: Array, which: Array, modes: Modes = near) -> Sites:
                return info.unravel(modes.sample_at(key, which, scale))

            which = jnp.asarray(near.apportion(1 if single else len(rng_key)))
            z = draw(key_model, which[0]) if single else jax.vmap(draw)(key_model, which)
        elif z is None:
            z, found, _ = draw_start(
                key_model,
                kernel.model,
                info,
                args,
                kwargs,
                init_strategy=kernel.init_strategy,
                forward_mode=kernel.forward_mode_differentiation,
                validate_grad=validate_grad,
            )

        start = kernel.chain(kernel.potential(args, kwargs)).start
        mapped: Any = start if single else jax.vmap(start)
        state, idx, grad = mapped(rng_key, key_plates, key_start, z)
        values = jax.tree.leaves((found, state.potential_energy, grad))
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in values])
        return state, (found, idx, grad), jnp.all(finite)

    tries = [(1.0, False)]
    if near is not None:
        tries += [(0.5, False), (0.1, False)]
    elif init_params is None:
        tries += [(1.0, True)]
    refused: list[Any] = []
    for how in tries:
        state, (found, idx, grad), finite = begin(rng_key, init_params, spread, *how)
        traced = is_traced((state, finite))
        if traced or finite:
            break
        refused.append((state, found, idx, grad))
    else:
        _refuse(potential, *refused[0])
    if not traced:
        first = state, grad
        kernel.check_state(*(jax.tree.map(lambda x: x[None], first) if single else first))
    return state, traced


def _refuse(potential: Potential, state: Any, found: Array | None, idx: Any, grad: Any) -> None:
    if found is not None:  # the search looks at the first rows
        rows = {
            name: jnp.broadcast_to(jnp.arange(size), (*jnp.shape(found), size))
            for name, (_, size) in potential.plates.items()
        }
        potential.check_start(state.z, rows, found)
    potential.check_start(state.z, idx, state.potential_energy, grad)
