"""The base of kernels: the state of a chain, how one state follows from another, and the kernel as
NumPyro's ``MCMC`` sees it.

**A draw.** ``MCMC`` calls :meth:`ModelKernel.sample`, which makes the :class:`Chain` of the kernel
on the model's potential, and of :meth:`GradientChain.transition` ``steps_per_sample``.

**The start.** ``MCMC`` calls :meth:`ModelKernel.init`, which reads the model, looks at its data,
finds settings by ``mcmc/settings.py`` if there is no ``step_size``, and makes :func:`first_states`.
"""

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.infer import init_to_uniform
from numpyro.util import identity, is_prng_key

from numpyro_ext._checks import (
    OwnArgumentsFirst,
    check_choice,
    check_count,
    check_nonnegative,
    check_positive,
    summary,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.checks import check_rows, read_global
from numpyro_ext._model.circles import circles_of, with_circles
from numpyro_ext._model.handlers import given_rows
from numpyro_ext._model.minibatch import draw_indices, start_plates
from numpyro_ext._model.mode_search import place_cuts, recut_sites
from numpyro_ext._model.modes import Mode, Modes, check_sites
from numpyro_ext._model.normal import Whitening
from numpyro_ext._model.operations import jit_on_data, linearized, on_numbers, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, check_site_table, refuse_scaled
from numpyro_ext._model.same import digest, is_same
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._numpyro import ResumableKernel
from numpyro_ext._typing import GradientEstimator, Kwargs, Model, Params, Sites
from numpyro_ext.mcmc.gradients import MinibatchGradient
from numpyro_ext.mcmc.heat import warn_if_hot
from numpyro_ext.mcmc.order import warn_if_sorted
from numpyro_ext.mcmc.settings import NO_LOCAL_SITES, Found, Settings, find_settings
from numpyro_ext.mcmc.sharding import check_sharding, spread_arrays

type Schedule = Callable[[Any], Any]
"""A number for every transition ``i``, counted from 0."""
type Coordinates = Whitening | Modes
"""The coordinates in which a step moves, or the modes from which they follow."""

_SHARED_FIELDS = {
    "i": "number of transitions made, from 0; it is not reset after warmup.",
    "z": "dict of the latent sites in unconstrained space.",
    "potential_energy": "potential at ``z``; with a minibatch, its estimate where the gradient was"
    " taken last.",
    "grad_norm": "2-norm of the last gradient estimate.",
    "step_size": "step size of the last transition.",
    "diverging": "True if a transition of the last draw met a value that was not finite.",
    "sampling": "False in the exploration stage of a cyclical schedule.",
    "gradient": "state of the gradient estimator.",
    "plates": '``{name: (epoch, offset, rng_key)}`` for ``minibatch="epoch"``, else empty.',
    "step_scale": "factor on the step size: 1, halved at each divergence in warmup.",
    "settings": "``kernel.settings``, None where the step size was given; not an array, so that"
    " ``MCMC`` compiles the chain again for others.",
    "heat": "sum of the ratios by which a hot chain is known, over up to 50 draws; infinite once it"
    " was said.",
    "best": "lowest potential estimate of the warmup so far, and the flat vector where it was.",
}
_KEY_FIELD = {"rng_key": "random number generator key of the next transition."}


def kernel_state(name: str, module: str, /, **own: str) -> Any:
    """
    The state class of a stochastic-gradient kernel: the fields that all of them have, and its own.

    :param str name: name of the class, and of the variable of the module to which it is assigned.
    :param str module: ``__name__`` of the module that it belongs to.
    :param own: a description of each of the kernel's own fields, by name, for the docstring.

    >>> MyState = kernel_state("MyState", __name__, r="momentum, ``(n,)``.")
    >>> MyState._fields[-2:]
    ('r', 'rng_key')
    """
    return documented_tuple(name, module, _SHARED_FIELDS | own | _KEY_FIELD)


def documented_tuple(name: str, module: str, fields: dict[str, str]) -> Any:
    """A named tuple with a docstring that describes its fields."""
    text = "\n".join(f" - **{field}** - {meaning}" for field, meaning in fields.items())
    state: Any = namedtuple(name, fields, module=module)
    state.__doc__ = f"State of one chain:\n\n{text}\n"
    return state


class Estimate(NamedTuple):
    """
    A gradient estimate at a point.

     - **potential** - estimate of U.
     - **grad** - ``(n,)``, estimate of its gradient.
     - **state** - state of the gradient estimator afterwards.
    """

    potential: Array
    grad: Array
    state: Any


class Transition(NamedTuple):
    """
    The result of a kernel's ``step``.

     - **z** - the new ``(n,)`` vector.
     - **estimate** - the :class:`Estimate` to report, with the ``state`` for the next transition.
     - **fields** - new values of the kernel's own fields of the state, by name.
    """

    z: Array
    estimate: Estimate
    fields: dict[str, Array]


class IdentityCoordinates:
    """The coordinates of the sites themselves, in which a kernel without a whitening moves."""

    def to_z(self, xi: Array) -> Array:
        return xi

    to_xi = pull = to_z


@dataclass(frozen=True)
class GradFn:
    """The gradient estimate of a transition's batch as a function of the flat vector."""

    chain: "GradientChain"
    i: Array
    idx: dict[str, Array]
    rng_key: Array
    state: Any
    bound: Array
    """The largest absolute value of a coordinate."""

    def __call__(self, z: Array) -> Estimate:
        """The estimate at ``z`` from the batch of the transition."""
        return self._estimate(self.rng_key, self.idx, z)[1]

    def with_hvp(self, z: Array, v: Array) -> tuple[Estimate, Array]:
        """The estimate at ``z``, and the product of its Jacobian (the Hessian of U) with ``v``."""
        function = partial(self._estimate, self.rng_key, self.idx)
        forward = self.chain.potential.has_curvature
        _, estimate, along = linearized(function, z, forward=forward)
        return estimate, along(v)

    def independent(self, rng_key: Array, z: Array) -> Estimate:
        """The estimate at ``z`` from a batch of its own, independent of the transition's."""
        key_batch, key_gradient = random.split(rng_key)
        return self._estimate(key_gradient, self.chain.new_batch(key_batch), z)[1]

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Estimate]:
        chain, info = self.chain, self.chain.potential.info
        sites = info.unravel(chain.coordinates.to_z(z))
        U, grad, state = chain.estimate(rng_key, self.i, sites, idx, self.state)
        g = chain.coordinates.pull(info.ravel(grad)).astype(z.dtype)
        g = jnp.clip(g, -self.bound, self.bound)
        return g, Estimate(U, g, state)


@dataclass(frozen=True, eq=False)
class Chain(ABC):
    """The transitions of a kernel on one potential, as functions of the state of one chain."""

    kernel: Any
    potential: Potential
    coordinates: Whitening | IdentityCoordinates

    @abstractmethod
    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        """The first state at ``z``, with the rows and the gradient by which it is checked."""

    @abstractmethod
    def transition(self, state: Any, batch: Any = None) -> Any:
        """The state after one transition, on a batch of :meth:`batches_ahead`; ``z`` is flat."""

    def batches_ahead(self, state: Any) -> Any:
        """The minibatches of all transitions of a draw, where their rows are read together."""
        return None

    def finish(self, state: Any) -> Any:
        """The state as the draw shows it."""
        return state

    def draw(self, state: Any) -> Any:
        """The state of one chain, or of several, after ``steps_per_sample`` transitions."""
        if is_prng_key(state.rng_key):
            return self._transitions(state.i, state)
        # All chains share i. Out of vmap, a lax.cond on it stays a branch.
        return jax.vmap(partial(self._transitions, state.i[0]))(state._replace(i=None))

    def _transitions(self, i: Array, state: Any) -> Any:
        false = jnp.zeros((), bool)
        state = state._replace(i=i, z=self.kernel.flatten(state.z), diverging=false)
        ahead = self.batches_ahead(state) if self.potential.reads_ahead else None

        def transition(k: Any, state: Any) -> Any:
            return self.transition(state, jax.tree.map(lambda x: x[k], ahead))

        # XLA cannot know the number of turns, and so compiles the loop into one function. On CPU
        # it would take a loop of one turn apart into operations that its threads get one by one.
        num = jnp.where(i < 0, 0, self.kernel.steps_per_sample)
        state = self.finish(lax.fori_loop(0, num, transition, state))
        return state._replace(z=self.kernel.unflatten(state.z))


@dataclass(frozen=True, eq=False)
class GradientChain(Chain):
    """The minibatch, the gradient and the divergence around the step of a kernel."""

    gradient: GradientEstimator | None
    """The estimator in use; None for the plain one."""

    def init_gradient(self, z: Sites) -> Any:
        """The state of the estimator at the start of a chain."""
        return () if self.gradient is None else self.gradient.init(z, self.potential)

    def estimate(
        self, rng_key: Array, i: Array, z: Sites, idx: dict[str, Array], state: Any
    ) -> tuple[Array, Sites, Any]:
        """U and its gradient from the rows ``idx``, and the state of the estimator afterwards."""
        if self.gradient is None:
            return *self.potential.value_and_grad(z, idx), state
        return self.gradient.estimate(rng_key, i, z, idx, self.potential, state)

    def draw_rows(self, rng_key: Array, counters: Any) -> tuple[dict[str, Array], Any]:
        """One minibatch of every plate, and the counters of the passes after it."""
        kernel, plates = self.kernel, self.potential.plates
        return draw_indices(rng_key, counters, plates, kernel.sharding, kernel.minibatch)

    def new_batch(self, rng_key: Array) -> dict[str, Array]:
        """One batch of the law of the chain's batches, apart from its passes over the data."""
        key_plates, key_index = random.split(rng_key)
        plates = start_plates(key_plates, self.potential.plates, self.kernel.minibatch)
        return self.draw_rows(key_index, plates)[0]

    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        kernel, plates = self.kernel, self.potential.plates
        i, flat = jnp.zeros((), int), kernel.flatten(z)
        key_index, key_gradient, key_fields = random.split(key_start, 3)
        counters = start_plates(key_plates, plates, kernel.minibatch)
        idx, _ = self.draw_rows(key_index, counters)
        gradient = jax.tree.map(jnp.asarray, self.init_gradient(z))
        U, grad, _ = self.estimate(key_gradient, i, z, idx, gradient)
        pulled = self.coordinates.pull(self.potential.info.ravel(grad))
        state = kernel.state_class(
            i=i,
            z=z,
            potential_energy=jnp.asarray(U, flat.dtype),
            grad_norm=jnp.linalg.norm(pulled).astype(flat.dtype),
            step_size=kernel.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            sampling=kernel.sampling_at(i),
            gradient=gradient,
            plates=counters,
            step_scale=jnp.ones((), flat.dtype),
            settings=kernel.settings,
            heat=jnp.zeros((), flat.dtype),
            best=(jnp.asarray(U, flat.dtype), flat),
            **kernel.init_state(key_fields, flat),
            rng_key=rng_key,
        )
        return state, idx, grad

    def batches_ahead(self, state: Any) -> Any:
        def draw(carry: tuple[Array, Any], _: Any) -> tuple[Any, Any]:
            rng_key, key_index, _ = random.split(carry[0], 3)
            idx, counters = self.draw_rows(key_index, carry[1])
            return (rng_key, counters), (idx, counters)

        start = state.rng_key, state.plates
        idx, counters = lax.scan(draw, start, length=self.kernel.steps_per_sample)[1]
        rows = self.potential.read_ahead(idx)
        return None if rows is None else (idx, counters, rows)

    def transition(self, state: Any, batch: Any = None) -> Any:
        kernel, i, dtype = self.kernel, state.i, state.z.dtype
        rng_key, key_index, key_step = random.split(state.rng_key, 3)
        # Drawn only where they are used, which is seldom; far from the counters of the split.
        key_gradient, key_redraw = (random.fold_in(state.rng_key, 1000 + k) for k in range(2))
        chain = self
        if batch is None:
            idx, plates = self.draw_rows(key_index, state.plates)
        else:
            idx, plates, rows = batch
            chain = replace(self, potential=self.potential.with_rows(idx, rows))
        eps = kernel.step_size_at(i, dtype) * state.step_scale
        T = kernel.temperature_at(i, dtype)
        bound = self._momentum_bound(i, T)
        grad_fn = GradFn(chain, i, idx, key_gradient, state.gradient, bound / eps)
        z, (U, grad, gradient), fields = kernel.step(key_step, state, state.z, grad_fn, eps, T)
        finite = _all_finite((z, grad, fields))
        new = fields | {
            "z": z,
            "potential_energy": U,
            "grad_norm": jnp.sqrt(jnp.vdot(grad, grad)),
            "gradient": gradient,
        }
        old = {name: getattr(state, name) for name in new}
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b).astype(b.dtype), new, old)
        if kernel.num_adapt:
            new |= self._best_of_warmup(state, new["z"], U, finite)
        if kernel.momentum:
            r = jnp.clip(new[kernel.momentum], -bound, bound)
            redraw = partial(kernel.draw_momentum, key_redraw, state.z, T)
            new[kernel.momentum] = lax.cond(finite, lambda: r, redraw)
        return state._replace(
            i=i + 1,
            step_size=eps,
            diverging=state.diverging | ~finite,
            sampling=kernel.sampling_at(i),
            plates=plates,
            rng_key=rng_key,
            **new,
        )

    def _momentum_bound(self, i: Array, T: Array) -> Array:
        """Three times the thermal size in the first half of warmup, and infinite later."""
        early = self.kernel.momentum is not None and i < self.kernel.num_adapt // 2
        return jnp.where(early, 3 * self.kernel.momentum_scale(jnp.where(T > 0, T, 1)), jnp.inf)

    def _best_of_warmup(self, state: Any, z: Array, U: Array, finite: Array) -> dict[str, Any]:
        """In warmup, the best state so far, to which a chain goes back after a divergence: far from
        the mode the last finite state may be anywhere."""
        warm = state.i < self.kernel.num_adapt
        lower, back = warm & finite & (state.best[0] > U), warm & ~finite
        return {
            "best": jax.tree.map(partial(jnp.where, lower), (U, state.z), state.best),
            "z": jnp.where(back, state.best[1], z),
            "step_scale": jnp.where(back, 0.5, 1.0).astype(z.dtype) * state.step_scale,
        }

    def finish(self, state: Any) -> Any:
        state = warn_if_hot(self.kernel, state)
        if self.potential.takes_minibatches:
            return state
        U = self.potential(self.kernel.unflatten(state.z), {})
        return state._replace(potential_energy=U.astype(state.potential_energy.dtype))


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in leaves])))


_COLLECTED = (
    "potential_energy",
    "grad_norm",
    "step_size",
    "diverging",
    "implied_variance_ratio",
    "kinetic_temperature",
    "thermostat",
    "accept_prob",
)
"""The fields that ``MCMC`` collects without being asked."""


_FOUND_IN_RUNS = (
    "settings",
    "circles",
    "chains_at",
    "num_adapt",
    "_search_result",
    "_params",
    "_key_params",
)
"""The attributes of a kernel that its runs have set, beside what it reads in its model."""


@dataclass(kw_only=True, eq=False, repr=False)
class ModelKernel(ResumableKernel):
    """Base of the kernels on the flat latent vector of a model; its fields hold the arguments that
    were given, and :meth:`in_use` what is found for the others."""

    __signature__ = OwnArgumentsFirst()

    model: Model = field(kw_only=False)
    step_size: float | Schedule | None = field(default=None, kw_only=False)
    whitening: Coordinates | None = None
    steps_per_sample: int = 1
    init_strategy: Callable[..., Any] = init_to_uniform

    state_class: ClassVar[Any]
    finds_whitening: ClassVar[bool] = True
    """True if steps are taken in the coordinates that ``step_size=None`` finds."""
    takes_gradients: ClassVar[bool] = True
    """False if the model need not have a gradient."""
    inference_method: ClassVar[str] = "mcmc"
    """The name by which a diagnosis calls the method, ``"mcmc"`` or ``"sgmcmc"``."""
    forward_mode_differentiation = False

    def __post_init__(self) -> None:
        self.settings: Settings | None = None
        self.chains_at: np.ndarray | None = None
        self.num_adapt = 0
        self._search_result: Found | None = None
        self._info: ModelInfo | None = None
        self._params: Params = {}
        self._arguments: tuple[tuple, dict[str, Any]] | None = None
        self._sums_of: str | None = None  # a digest of the data
        self._potential: Potential | None = None
        self._key_params: Array | None = None
        self.circles: Array | None = getattr(self.whitening, "circles", None)
        # Between the flat vector of the sites and the coordinates of a step.
        self.coordinates = self.given_whitening or IdentityCoordinates()
        if self.finds_settings and not self.can_find_settings:
            raise ValueError(
                f"step_size is None, but {type(self).__name__} has no law by which a step could be"
                " found; give step_size."
            )
        if self.step_size is not None and not callable(self.step_size):
            check_positive("step_size", self.step_size)
        self.steps_per_sample = check_count("steps_per_sample", self.steps_per_sample)

    @abstractmethod
    def chain(self, potential: Potential) -> Chain:
        """The transitions on this potential."""

    def setup(self, potential: Potential) -> None:
        """Checks that need the model's sites or plates, before chains start."""
        if callable(self.step_size):
            at_start = jax.jit(self.step_size)(np.zeros((), np.int32))
            check_positive("step_size at i = 0", at_start)

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        """The step, and what the kernel's law on a Gaussian predicts for it.

        :param noise: ``(n,)`` variances of the gradient's noise over the temperature, in the
            coordinates of ``normal.whitening``.
        :param normal: the normal approximation of the posterior.
        """
        raise NotImplementedError

    def temperature_at(self, i: Any, dtype: Any = float) -> Array | None:
        """Temperature of transition ``i``, None for a kernel without one."""
        return None

    def step_size_at(self, i: Any, dtype: Any = float) -> Array:
        """Step size of transition ``i``."""
        eps = self.in_use("step_size")
        return jnp.asarray(eps(i) if callable(eps) else eps, dtype)

    @property
    def keeps_sums(self) -> bool:
        """True if the state of a chain holds sums over all rows, which other data would change."""
        return False

    @property
    def finds_settings(self) -> bool:
        """True if :meth:`init` finds the step size, and what belongs to it."""
        return self.step_size is None

    @property
    def can_find_settings(self) -> bool:
        """True if there is a law by which a step could be found."""
        return type(self).choose is not ModelKernel.choose

    @property
    def if_hot(self) -> str:
        """What to do about a chain that is hotter than its law says."""
        if self.settings is not None:
            return self.settings.if_hot
        step = "a smaller step_size"
        if self.can_find_settings:
            step = "no step_size, which is then found, or a smaller one"
        return f"take {step}, or gradient=ControlVariate(...)"

    def in_use(self, argument: str) -> Any:
        """The value that a chain takes for an argument: found, or else given."""
        arguments = {} if self.settings is None else self.settings.arguments
        return arguments[argument] if argument in arguments else getattr(self, argument)

    @property
    def given_modes(self) -> Modes | None:
        """The result of ``find_modes``, if it was given as the whitening."""
        return self.whitening if isinstance(self.whitening, Modes) else None

    @property
    def given_whitening(self) -> Whitening | None:
        """The coordinates that were given, by themselves or by modes."""
        if isinstance(self.whitening, Modes):
            return self.whitening.whitening if self.finds_whitening else None
        return self.whitening

    def flatten(self, z: Sites) -> Array:
        """Unconstrained sites as the ``(n,)`` vector in which a step moves."""
        return self.coordinates.to_xi(self.info.ravel(z))

    def unflatten(self, x: Array) -> Sites:
        """The inverse of :meth:`flatten`."""
        return self.info.unravel(self.coordinates.to_z(x))

    def ravel_sites(self, what: str, value: Any, dtype: Any = float) -> Array:
        """A float as an array; a dict of per-site floats or arrays as ``(n,)``, in flat order."""
        flat = self.info.ravel_numbers(what, value) if isinstance(value, dict) else value
        return jnp.asarray(flat, dtype)

    @property
    def info(self) -> ModelInfo:
        """The sites, supports and plates that :meth:`init` read in the model."""
        if self._info is None:
            raise ValueError("the kernel has no model arguments yet; call init before sample.")
        return self._info

    @property
    def given_plates(self) -> dict[str, tuple[int, int]]:
        """``{plate: (N, B)}`` of the plates of which the arguments of :meth:`init` were B rows."""
        return {} if self._info is None else self._info.given

    @property
    def modes(self) -> Modes | None:
        """The modes at which chains start without ``init_params``, as by ``chains_at``, or None."""
        return self.given_modes if self._search_result is None else self._search_result.modes

    @property
    def params(self) -> Params:
        """Values of the model's ``param`` and ``mutable`` sites in the last run."""
        return self._params

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = self.state_class._fields
        cyclical = hasattr(self.step_size, "sampling") and "sampling" in fields
        collected = (*_COLLECTED, "sampling") if cyclical else _COLLECTED
        return ("z", *(name for name in collected if name in fields))

    def get_diagnostics_str(self, state: Any) -> str:
        # A value of the state in here would wait for the device at every draw.
        return f"{self.steps_per_sample} steps per draw"

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple = (),
        model_kwargs: Kwargs | None = None,
    ) -> Any:
        kwargs, single = model_kwargs or {}, is_prng_key(rng_key)
        first_key, num_chains = (rng_key, 1) if single else (rng_key[0], len(rng_key))
        resumes = self.takes_up_a_chain()
        if resumes and self._info is not None:
            return self._take_up(model_args, kwargs, num_chains)
        self._read_arguments(first_key, model_args, kwargs, resumes)
        info = self.info
        model = given_rows(self.model, info.given)
        check_rows(model, model_args, kwargs, self.init_strategy, bounded=info.bounded)
        self.num_adapt = num_warmup * self.steps_per_sample
        if init_params is not None:
            chains = () if single else (num_chains,)
            init_params = info.check_unconstrained("init_params", init_params, chains)
            init_params = recut_sites(init_params, with_circles(info, None), info)
        potential = self.potential(model_args, kwargs)
        if self.finds_settings:
            first = init_params
            if init_params is not None and not single:
                first = jax.tree.map(lambda x: x[0], init_params)
            self._find_settings(potential, first, resumes, num_chains)
        has_sums = self.keeps_sums and not is_traced((model_args, kwargs))
        self._sums_of = digest((model_args, kwargs)) if has_sums else None
        self._check_whitening()
        self.setup(potential)
        if resumes:
            return None
        near = self.modes if init_params is None else None
        self.chains_at = None if near is None else near.apportion(num_chains)
        return first_states(self, potential, rng_key, init_params, near)

    def _take_up(self, args: tuple, kwargs: Kwargs, num_chains: int) -> None:
        """An error unless a chain that goes on has the data, and the settings, of its start."""
        now = args, kwargs
        if self._sums_of and not is_traced(now) and self._sums_of != digest(now):
            raise ValueError(
                "a chain goes on with other data, of which its state has no sums; start a new"
                " chain (mcmc.post_warmup_state = None)."
            )
        if self.finds_settings:
            self._find_settings(self.potential(args, kwargs), None, True, num_chains)

    def _read_arguments(self, key: Array, args: tuple, kwargs: Kwargs, resumes: bool) -> None:
        """Read the model on the arguments of a new run, and draw its parameters."""
        if not isinstance(key, Tracer):
            # What is compiled for one chain or run serves the next, and holds its parameters.
            key = self._key_params = key if self._key_params is None else self._key_params
        keeps_cuts = resumes or self.whitening is not None or self.has_read(args, kwargs)
        self._info, self._params = self._read(key, args, kwargs)
        if not keeps_cuts:
            cut_at_pi = with_circles(self._info, None)
            self._info = place_cuts(self.model, cut_at_pi, self._params, args, kwargs)
            self.circles = circles_of(self._info)
        self._arguments = args, kwargs
        self._potential = self._potential_on(self._info, self._params, args, kwargs)

    def _find_settings(
        self, potential: Potential, start: Sites | None, resumes: bool, num_chains: int
    ) -> None:
        """Keep the settings, if a chain resumes, or if they are of these data and of the modes at
        which so many chains start; else search from ``start``."""
        if is_traced(start):  # of parallel chains, while the search is on numbers
            start = None
        before, modes, potential = self._search_result, self.given_modes, potential.on_one_batch()
        with on_numbers():  # a chain may start where a program is traced
            same = before is not None and before.is_of(potential)
            if before is not None and resumes:
                if not same and not potential.info.given:  # of a loader each batch is another
                    raise ValueError(
                        "a chain goes on with other data than those for which its settings were"
                        " found; set mcmc.post_warmup_state = None, so that the run finds settings"
                        " again."
                    )
                return
            if before is not None and same:
                # Of more chains some may start at a mode for which the step was not found.
                if before.modes.num_taken(num_chains) <= before.num_modes:
                    return
                modes = before.modes
            self._search_result = find_settings(self, potential, start, modes, num_chains)
        self.settings = self._search_result.settings
        self.coordinates = self.settings.whitening or IdentityCoordinates()

    def _check_whitening(self) -> None:
        """An error unless whitening and modes that were given are of this model."""
        whitening, size = self.coordinates, self.info.size
        if isinstance(whitening, Whitening) and whitening.size != size:
            raise ValueError(
                f"whitening has {whitening.size} coordinates, but the model's latent sites have"
                f" {size}; make it for this model and these arguments."
            )
        if self.given_modes is not None:
            check_sites(self.given_modes, self.info, "whitening")

    def sample(self, state: Any, model_args: tuple = (), model_kwargs: Kwargs | None = None) -> Any:
        return self.chain(self.potential(model_args, model_kwargs)).draw(state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: Kwargs | None) -> Any:
        if self._info is None:
            return identity
        kwargs = model_kwargs or {}
        if self.has_read(model_args, kwargs):
            return self.potential(model_args, kwargs).postprocess()
        return self._postprocess_elsewhere(model_args, kwargs)

    def _postprocess_elsewhere(self, args: tuple, kwargs: Kwargs) -> Any:
        here = self._read_sites(args, kwargs)
        # NumPyro's Gibbs leaves out the sites on which a block is conditioned.
        same = list(here.latents) == list(self.info.latents)
        info = replace(self.info, latents=here.latents) if same else self.info
        return self._potential_on(info, self._params, args, kwargs).postprocess()

    def potential(self, model_args: tuple, model_kwargs: Kwargs | None) -> Potential:
        """The potential on these arguments of the model that :meth:`init` has read."""
        kwargs = model_kwargs or {}
        if self._potential is not None and self.has_read(model_args, kwargs):
            return self._potential
        info = self._read_again(model_args, kwargs)
        return self._potential_on(info, self._params, model_args, kwargs)

    def _read_again(self, args: tuple, kwargs: Kwargs) -> ModelInfo:
        """The sites on other arguments than :meth:`init` has read, of the same shapes."""
        here = self._read_sites(args, kwargs)
        remedy = "start a new chain (mcmc.post_warmup_state = None)"
        here.check_shapes(self.info.shapes, "the chain that goes on", remedy)
        return replace(self.info, latents=here.latents, masked=here.masked)

    def has_read(self, args: tuple, kwargs: Kwargs) -> bool:
        """True for the arguments that :meth:`init` has read."""
        return is_same(self._arguments, (args, kwargs))

    def _potential_on(
        self, info: ModelInfo, params: Params, args: tuple, kwargs: Kwargs
    ) -> Potential:
        forward = self.forward_mode_differentiation
        return Potential(self.model, info, params, args, kwargs, forward_mode=forward)

    def _read_sites(self, args: tuple, kwargs: Kwargs) -> ModelInfo:
        options: dict[str, Any] = {"init_strategy": self.init_strategy, "sums": True}
        info = read_global(self.model, args, kwargs, because=NO_LOCAL_SITES, **options)
        refuse_scaled(set(info.scaled) - set(info.summed), type(self).__name__)
        return with_circles(info, self.circles)

    def _read(self, rng_key: Array | None, args: tuple, kwargs: Kwargs) -> tuple[ModelInfo, Params]:
        """The model's sites and plates, and its parameters from the key of a first chain."""
        strategy, info = self.init_strategy, self._read_sites(args, kwargs)
        if not (info.params or info.mutable):
            return info, {}
        key = random.key(0) if rng_key is None else random.split(rng_key, 4)[1]
        spread, whole = spread_arrays(args, kwargs)

        @jax.jit
        def draw(key: Array, spread: dict[int, Array]) -> Params:
            return draw_params(key, self.model, info, *whole(spread), init_strategy=strategy)

        return info, draw(key, spread)

    def saved(self) -> dict[str, Any]:
        """What the kernel has found in its runs, for :func:`numpyro_ext.saving.save`."""
        sites = None if self._info is None else self._info.site_table
        runs = {name: vars(self)[name] for name in _FOUND_IN_RUNS}
        return {"sites": sites, "sums_of": self._sums_of, **runs}

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: Kwargs) -> None:
        """Take what :meth:`saved` gave, of another kernel that was made alike."""
        self._sums_of = saved["sums_of"]
        if self._sums_of not in (None, digest((args, kwargs))):
            raise ValueError(
                "the chain in the file has sums over all rows of other data; give load the"
                " arguments of its run."
            )
        self.circles = saved["circles"]
        self._info = self._read_sites(args, kwargs)
        if saved["sites"] is not None:
            check_site_table(saved["sites"], self._info.site_table)
        vars(self).update({name: saved[name] for name in _FOUND_IN_RUNS})
        self._arguments = args, kwargs
        self._potential = self._potential_on(self._info, self._params, args, kwargs)
        if self.settings is not None:
            self.coordinates = self.settings.whitening or IdentityCoordinates()
        self._check_whitening()
        self.setup(self._potential)

    def __repr__(self) -> str:
        return summary(self, defaults=False)

    def __getstate__(self) -> dict[str, Any]:
        gone: dict[str, Any] = {"_info": None, "_potential": None, "_arguments": None}
        if is_traced(self._params):
            gone["_params"] = {}
        return vars(self) | gone


@dataclass(kw_only=True, eq=False, repr=False)
class SGMCMCKernel(ModelKernel):
    r"""
    Base of the stochastic-gradient kernels for :class:`~numpyro.infer.mcmc.MCMC`.

    Draws from :math:`\pi(z) \propto \exp(-U(z)/T)`, where U is NumPyro's potential in unconstrained
    space, summed over all N data, Jacobian included. Every ``plate`` with a ``subsample_size`` is a
    minibatch, redrawn at each transition in O(batch) work. There is no accept step: draws are
    biased by the step size and by the gradient noise, see each kernel.

    **Flat order.** A step moves the ``(n,)`` vector of the latent sites in the order in which the
    model samples them, which momenta, preconditioners and metrics have too.

    **Warmup.** A kernel with momentum keeps gradient and momentum below three times their thermal
    size in the first half of warmup, since a far start would turn its potential into momentum.

    **Divergence.** If the gradient or a new value is not finite, a chain keeps its last finite
    state, draws a new momentum if it has one, and marks the draw ``diverging``. During warmup it
    goes back to its best state so far and halves its step by ``step_scale``.

    A kernel supplies ``state_class`` (see :func:`kernel_state`) and :meth:`step`; the page *Adding
    an algorithm* lists the other hooks.

    :param model: Python callable containing NumPyro primitives; all latent sites continuous and
        outside of the subsampled plates. With funsor installed, discrete ones are summed out.
    :param step_size: positive float, or a schedule of the transition ``i`` (from 0); None has it
        found with the coordinates, the friction and the gradient estimator, see :class:`Settings`.
    :param float max_bias: relative error of a variance that a step which is found may cause.
    :param whitening: a :class:`Whitening`, the coordinates in which a step moves; or the result of
        ``find_modes``, in place of the search, where chains start too.
    :param temperature: non-negative float T or a callable of ``i``; 0 is descent without noise.
    :param gradient: an estimator: :class:`MinibatchGradient` by default, :class:`ControlVariate`,
        :class:`SVRG` or any object with their methods ``init`` and ``estimate``.
    :param str minibatch: ``"replace"`` draws rows with replacement, ``"epoch"`` each row once per
        pass, ``"block"`` contiguous rows from a random one on, which a disk reads faster, for rows
        in random order.
    :param int steps_per_sample: transitions per draw, all in one dispatch.
    :param sharding: a ``NamedSharding`` over the mesh axis (of type ``Auto``) along which the rows
        of the model's arguments are sharded; every device then takes its share of the batch. Use
        ``MCMC(..., jit_model_args=True)``.
    :param bool forward_mode_differentiation: whether to differentiate the potential in forward
        mode, as is done in any case for models with a ``while_loop``.
    """

    max_bias: float = 0.05
    temperature: float | Schedule = 1.0
    gradient: GradientEstimator | None = None
    minibatch: str = "replace"
    sharding: NamedSharding | None = None
    forward_mode_differentiation: bool = False

    momentum: ClassVar[str | None] = None
    """Name of the state's field that is the momentum, for kernels that have one."""
    inference_method: ClassVar[str] = "sgmcmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.temperature):
            check_nonnegative("temperature", self.temperature)
        check_positive("max_bias", self.max_bias)
        check_choice("minibatch", self.minibatch, ("replace", "epoch", "block"))
        check_sharding(self.sharding)

    @abstractmethod
    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        """
        One transition on the flat ``(n,)`` vector, with step size eps and temperature T.

        :param rng_key: a key of this step alone.
        :param state: the state before the step; ``state.i`` is not batched.
        :param grad_fn: the gradient estimate, ``estimate = grad_fn(z)``; further methods are
            ``grad_fn.with_hvp(z, v)`` and ``grad_fn.independent(rng_key, z)``.
        """

    @property
    def friction_in_use(self) -> float:
        """The friction of a kernel that has one: given, found, or else 1."""
        C = self.in_use("friction")
        return 1.0 if C is None else C

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        """The kernel's own fields at the start of one chain, at the flat ``z``: here its momentum,
        and the ratios that :func:`diagnose` judges, of which no transition has told yet."""
        unit = jnp.ones((), z.dtype)
        first = {"kinetic_temperature": 0 * unit, "implied_variance_ratio": unit}
        if self.momentum is not None:
            T = self.temperature_at(0, z.dtype)
            first[self.momentum] = self.draw_momentum(rng_key, z, T)
        return {name: x for name, x in first.items() if name in self.state_class._fields}

    def momentum_scale(self, T: Array) -> Array:
        """Standard deviation of the momentum at temperature T."""
        return jnp.sqrt(T)

    def draw_momentum(self, rng_key: Array, z: Array, T: Array) -> Array:
        """A new momentum, at the start and after a divergence."""
        return self.momentum_scale(T) * random.normal(rng_key, z.shape, z.dtype)

    def setup(self, potential: Potential) -> None:
        super().setup(potential)
        if self.minibatch == "block":
            warn_if_sorted(potential)
        if callable(self.temperature):
            at_start = jax.jit(self.temperature)(np.zeros((), np.int32))
            check_nonnegative("temperature at i = 0", at_start)

    def sampling_at(self, i: Any) -> Array:
        """False in the exploration stage of a cyclical schedule."""
        return jnp.asarray(getattr(self.step_size, "sampling", lambda i: True)(i), bool)

    def temperature_at(self, i: Any, dtype: Any = float) -> Array:
        """T of transition ``i``: 0 in the exploration stage of a cyclical schedule."""
        T = self.temperature(i) if callable(self.temperature) else self.temperature
        return jnp.where(self.sampling_at(i), jnp.asarray(T, dtype), 0)

    def chain(self, potential: Potential) -> GradientChain:
        return GradientChain(self, potential, self.coordinates, self.in_use("gradient"))

    @property
    def keeps_sums(self) -> bool:
        return not isinstance(self.in_use("gradient"), MinibatchGradient | None)

    def refresh(self, state: Any, model_args: tuple, model_kwargs: Kwargs | None) -> Any:
        chain = self.chain(self.potential(model_args, model_kwargs))
        return state._replace(gradient=chain.init_gradient(state.z))

    def estimate_gradient(
        self, rng_key: Array, z: Sites, model_args: tuple = (), model_kwargs: Kwargs | None = None
    ) -> tuple[Array, Sites]:
        """One draw of the gradient estimate at unconstrained sites z: ``(potential, grad)``."""
        kwargs = model_kwargs or {}
        info, params = self._read(None, model_args, kwargs)
        chain = self.chain(self._potential_on(info, params, model_args, kwargs))
        z = info.check_unconstrained("z", z)
        key_batch, key_gradient = random.split(rng_key)
        idx, i, state = chain.new_batch(key_batch), jnp.zeros((), int), chain.init_gradient(z)
        return chain.estimate(key_gradient, i, z, idx, state)[:2]


def first_states(
    kernel: ModelKernel,
    potential: Potential,
    rng_key: Array,
    init_params: Sites | None,
    near: Modes | None,
) -> Any:
    """The first state of one chain, or of several, of which each mode in ``near`` has its share; an
    error names the site where the potential or its gradient is not finite."""
    info, single = potential.info, is_prng_key(rng_key)
    spread, whole = spread_arrays(*potential.arguments)

    def begin(
        rng_key: Array, z: Sites | None, spread: dict[int, Array], scale: float
    ) -> tuple[Any, Any, Array]:
        args, kwargs = whole(spread)
        split = partial(random.split, num=4)
        keys = split(rng_key) if single else jnp.swapaxes(jax.vmap(split)(rng_key), 0, 1)
        rng_key, key_model, key_plates, key_start = keys
        drawn = None  # the potential of a start that was drawn
        if z is None and near is not None:

            def draw(key: Array, which: Array, modes: Modes = near) -> Sites:
                return info.unravel(modes.sample_at(key, which, scale))

            which = jnp.asarray(near.apportion(1 if single else len(rng_key)))
            z = draw(key_model, which[0]) if single else jax.vmap(draw)(key_model, which)
        elif z is None:
            z, drawn, _ = draw_start(
                key_model,
                kernel.model,
                info,
                args,
                kwargs,
                init_strategy=kernel.init_strategy,
                forward_mode=kernel.forward_mode_differentiation,
                validate_grad=kernel.takes_gradients,
            )

        start = kernel.chain(kernel.potential(args, kwargs)).start
        mapped: Any = start if single else jax.vmap(start)
        state, idx, grad = mapped(rng_key, key_plates, key_start, z)
        values = jax.tree.leaves((drawn, state.potential_energy, grad))
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in values])
        return state, (drawn, idx, grad), jnp.all(finite)

    # Compiled for one run.
    once: Any = partial(jit_on_data, options=quick_options())
    program = (jax.jit if isinstance(rng_key, Tracer) else once)(begin)
    failures: list[Any] = []
    for scale in (1.0,) if near is None else (1.0, 0.5, 0.1):
        state, seen, finite = program(rng_key, init_params, spread, scale)
        if is_traced((state, finite)) or finite:
            return state
        failures.append((state, *seen))
    state, drawn, idx, grad = failures[0]
    instead = "init_strategy=find_modes(model, *args), of numpyro_ext.optim, or init_params"
    check = partial(potential.check_start, give=instead)
    check(state.z, idx, state.potential_energy, grad)
    if drawn is not None:  # the search looks at the first rows
        rows = {
            name: jnp.broadcast_to(jnp.arange(size), (*jnp.shape(drawn), size))
            for name, (_, size) in potential.plates.items()
        }
        check(state.z, rows, drawn)
    return state
