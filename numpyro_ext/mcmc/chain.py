"""The states of chains, and how one follows from another: coordinates, minibatch, gradient,
descent and divergence around a kernel's step."""

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.util import is_prng_key

from numpyro_ext._model.minibatch import draw_indices, start_plates
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc.heat import HEAT, say_if_hot, with_heat

__all__ = [
    "Chain",
    "Estimate",
    "GradFn",
    "GradientChain",
    "Transition",
    "Unchanged",
    "kernel_state",
    "shown_fields",
    "state_class",
]

_REPORTED = (
    "potential_energy",
    "grad_norm",
    "step_size",
    "diverging",
    "implied_variance_ratio",
    "kinetic_temperature",
    "thermostat",
    "accept_prob",
)

_BEFORE = {
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
    "heat": HEAT,
    "best": "lowest potential estimate of the warmup so far, and the flat vector where it was.",
}


def kernel_state(name: str, module: str, /, **own: str) -> Any:
    """
    The state class of a stochastic-gradient kernel: the fields that all of them have, and its own.

    Assign it to a name of the module, so that states pickle. The docstring of the class lists
    the fields.

    :param str name: name of the class.
    :param str module: ``__name__`` of the module that it belongs to.
    :param own: a description of each of the kernel's own fields, by name.

    .. doctest::

        >>> from numpyro_ext.mcmc import kernel_state
        >>> MyState = kernel_state("MyState", __name__, r="momentum, ``(n,)``.")
        >>> MyState._fields[-3:]
        ('r', 'resumed', 'rng_key')
    """
    return state_class(name, module, _BEFORE | own)


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
     - **estimate** - the :class:`Estimate` to report, and whose ``state`` the chain goes on with.
     - **fields** - new values of the kernel's own fields of the state, by name.
    """

    z: Array
    estimate: Estimate
    fields: dict[str, Array]


def state_class(name: str, module: str, fields: Mapping[str, str]) -> Any:
    """A named tuple with these fields, ``resumed`` and ``rng_key``; the texts make its docstring.

    ``MCMC.run`` goes on from a state by ``state._replace(rng_key=...)``, perhaps with other data.
    This is the only sign of it, so it sets ``resumed`` to True in this class.
    """
    fields = {
        **fields,
        "resumed": "True until the first draw after ``MCMC.run`` has taken the state up again.",
        "rng_key": "random number generator key of the next transition.",
    }
    base = namedtuple(name, tuple(fields), module=module)

    def replace(self: Any, **changes: Any) -> Any:
        if "rng_key" in changes:
            changes.setdefault("resumed", np.ones(np.shape(self.resumed), bool))
        return base._replace(self, **changes)

    text = "\n".join(f" - **{field}** - {what}" for field, what in fields.items())
    body = {"__doc__": f"State of one chain:\n\n{text}\n", "__module__": module, "__slots__": ()}
    return type(name, (base,), {**body, "_replace": replace})


def shown_fields(cls: Any, schedule: Any) -> tuple[str, ...]:
    """The fields that ``MCMC`` collects without being asked."""
    shown = ("z", *(name for name in _REPORTED if name in cls._fields))
    cyclical = hasattr(schedule, "sampling") and "sampling" in cls._fields
    return (*shown, "sampling") if cyclical else shown


class Unchanged:
    """The coordinates of the sites themselves, in which a kernel without a whitening moves."""

    def to_z(self, xi: Array) -> Array:
        return xi

    to_xi = pull = to_z


@dataclass(frozen=True)
class GradFn:
    """
    The gradient estimate as a step sees it: a function of the flat vector.

    Batch, keys and the estimator's state are those of the transition. Nothing is changed by a
    call, so a step may call it any number of times, also inside a JAX loop.
    """

    chain: "GradientChain"
    i: Array
    idx: dict[str, Array]
    rng_key: Array
    state: Any
    bound: Array | None = None

    def __call__(self, z: Array) -> Estimate:
        """The estimate at ``z`` from the batch of the transition."""
        return self._estimate(self.rng_key, self.idx, z)[1]

    def with_hvp(self, z: Array, v: Array) -> tuple[Estimate, Array]:
        """The estimate at ``z``, and the product of its Jacobian (the Hessian of U) with ``v``."""
        estimate = partial(self._estimate, self.rng_key, self.idx)
        _, hvp, found = jax.jvp(estimate, (z,), (v,), has_aux=True)
        return found, hvp

    def independent(self, rng_key: Array, z: Array) -> Estimate:
        """The estimate at ``z`` from a batch of its own, independent of the transition's."""
        key_batch, key_gradient = random.split(rng_key)
        return self._estimate(key_gradient, self.chain.new_batch(key_batch), z)[1]

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Estimate]:
        chain, info = self.chain, self.chain.potential.info
        sites = info.unravel(chain.coordinates.to_z(z))
        U, grad, state = chain.estimate(rng_key, self.i, sites, idx, self.state)
        g = chain.coordinates.pull(info.ravel(grad)).astype(z.dtype)
        if self.bound is not None:
            g = jnp.clip(g, -self.bound, self.bound)
        return g, Estimate(U, g, state)


@dataclass(frozen=True, eq=False)
class Chain(ABC):
    """
    The transitions of a kernel on one potential, as pure functions of the state.

    :meth:`start`, :meth:`transition`, :meth:`resume` and :meth:`finish` see a single chain and are
    traced.

    :param kernel: a :class:`ModelKernel`.
    :param potential: that of the model on the data of the run.
    :param coordinates: those in which a step moves.
    """

    kernel: Any
    potential: Potential
    coordinates: Whitening | Unchanged

    @abstractmethod
    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        """The first state at ``z``, with the rows and the gradient by which it is checked."""

    @abstractmethod
    def transition(self, state: Any) -> Any:
        """The state after one transition; ``state.z`` is flat."""

    @abstractmethod
    def resume(self, state: Any, resumed: Array) -> Any:
        """The state of a chain that goes on, perhaps on other data, where ``resumed`` is True."""

    def end(self, state: Any) -> Any:
        """The state at the end of the last transition of a draw."""
        return state

    def finish(self, state: Any) -> Any:
        """The state as the draw shows it."""
        return state

    def draw(self, state: Any) -> Any:
        """The state of one chain, or of several, after ``steps_per_sample`` transitions."""
        if is_prng_key(state.rng_key):
            return self._transitions(state.i, state.resumed, state)
        # All chains share these. Out of vmap, a lax.cond on them stays a branch.
        i, resumed = state.i[0], state.resumed[0]
        one = partial(self._transitions, i, resumed)
        return jax.vmap(one)(state._replace(i=None, resumed=None))

    def _transitions(self, i: Array, resumed: Array, state: Any) -> Any:
        state = self.resume(state, resumed)
        false = jnp.zeros((), bool)
        state = state._replace(i=i, z=self.kernel.flatten(state.z), diverging=false, resumed=false)
        inner = self.kernel.steps_per_sample - 1

        def not_shown(_: Any, state: Any) -> Any:
            # Left as they are, so that XLA need not compute what no draw shows.
            kept = {name: getattr(state, name) for name in self.kernel.last_step_fields}
            return self.transition(state)._replace(**kept)

        def all_transitions(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state = lax.fori_loop(0, inner, not_shown, carry[1]) if inner else carry[1]
            return jnp.zeros((), bool), self.end(self.transition(state))

        # A loop of one turn, though XLA cannot know that: on CPU it makes one function of a small
        # loop, but hands loose operations to its threads one by one, which takes longer than a
        # transition.
        true = (i | 1) != 0
        _, state = lax.while_loop(lambda carry: carry[0], all_transitions, (true, state))
        state = self.finish(state)
        return state._replace(z=self.kernel.unflatten(state.z))


@dataclass(frozen=True, eq=False)
class GradientChain(Chain):
    """
    The chain of a stochastic-gradient kernel: minibatch, gradient, descent and divergence around
    the kernel's step.

    :param gradient: the estimator in use; None for the plain one.
    """

    gradient: GradientEstimator | None

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

    def new_batch(self, rng_key: Array) -> dict[str, Array]:
        """One batch of the law of the chain's batches, apart from its passes over the data."""
        key_plates, key_index = random.split(rng_key)
        plates = start_plates(key_plates, self.potential.plates, self.kernel.minibatch)
        return draw_indices(key_index, plates, self.potential.plates, self.kernel.sharding)[0]

    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        kernel, plates = self.kernel, self.potential.plates
        i, flat = jnp.zeros((), int), kernel.flatten(z)
        key_index, key_gradient, key_fields = random.split(key_start, 3)
        counters = start_plates(key_plates, plates, kernel.minibatch)
        idx, _ = draw_indices(key_index, counters, plates, kernel.sharding)
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
            heat=jnp.full((), -jnp.inf, flat.dtype),
            best=(jnp.asarray(U, flat.dtype), flat),
            **kernel.init_state(key_fields, flat),
            resumed=jnp.zeros((), bool),
            rng_key=rng_key,
        )
        return state, idx, grad

    def transition(self, state: Any) -> Any:
        kernel, i, dtype = self.kernel, state.i, state.z.dtype
        rng_key, key_index, key_step = random.split(state.rng_key, 3)
        # Drawn only where they are used, which is seldom; far from the counters of the split.
        key_gradient, key_redraw = (random.fold_in(state.rng_key, 1000 + k) for k in range(2))
        idx, plates = draw_indices(key_index, state.plates, self.potential.plates, kernel.sharding)
        eps = kernel.step_size_at(i, dtype) * state.step_scale
        T = kernel.temperature_at(i, dtype)
        grad_fn = GradFn(self, i, idx, key_gradient, state.gradient)
        step = self._descend if kernel.num_descent else kernel.step
        z, (U, grad, gradient), fields = step(key_step, state, state.z, grad_fn, eps, T)
        # What only the last step shows, and what did not change, need not be looked at in all.
        shown = [
            x
            for name, x in fields.items()
            if name not in kernel.last_step_fields and x is not getattr(state, name)
        ]
        finite = _all_finite((z, grad, shown))
        new = fields | {
            "z": z,
            "potential_energy": U,
            "grad_norm": jnp.sqrt(jnp.vdot(grad, grad)),
            "gradient": gradient,
        }
        old = {name: getattr(state, name) for name in new}
        new = jax.tree.map(
            lambda a, b: b if a is b else jnp.where(finite, a, b).astype(b.dtype), new, old
        )
        if kernel.num_adapt:
            # Far from the mode the last finite state may be anywhere: back to the best one. The
            # potential is that of the old z, or of half a step from it.
            warm = i < kernel.num_adapt
            lower, back = warm & finite & (state.best[0] > U), warm & ~finite
            new["best"] = jax.tree.map(partial(jnp.where, lower), (U, state.z), state.best)
            new["z"] = jnp.where(back, state.best[1], new["z"])
            new["step_scale"] = jnp.where(back, 0.5, 1.0).astype(dtype) * state.step_scale
        if kernel.momentum:
            r = new[kernel.momentum]
            redraw = partial(kernel.draw_momentum, key_redraw, state.z, T)
            new[kernel.momentum] = lax.cond(finite, lambda: r, redraw)
        return state._replace(
            i=i + 1,
            step_size=eps,
            diverging=state.diverging | ~finite,
            sampling=kernel.sampling_at(i),
            plates=plates,
            resumed=state.resumed,
            rng_key=rng_key,
            **new,
        )

    def _descend(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        """A step without noise, with gradient and momentum kept below their thermal size, as long
        as ``i`` is in the first half of warmup; the kernel's own fields begin anew at its end."""
        kernel = self.kernel
        descending = state.i < kernel.num_descent
        scale = kernel.momentum_scale(jnp.where(T > 0, T, 1))
        grad_fn = replace(grad_fn, bound=jnp.where(descending, scale / eps, jnp.inf))
        T = jnp.where(descending, 0, T)
        z, estimate, fields = kernel.step(rng_key, state, z, grad_fn, eps, T)
        bound = jnp.where(descending, scale, jnp.inf)
        fields = fields | {kernel.momentum: jnp.clip(fields[kernel.momentum], -bound, bound)}
        fresh = partial(kernel.init_state, random.fold_in(rng_key, 1), z)
        names = jax.eval_shape(fresh)
        kept = {name: fields.get(name, getattr(state, name)) for name in names}
        last = state.i + 1 == kernel.num_descent
        return Transition(z, estimate, lax.cond(last, fresh, lambda: kept))

    def end(self, state: Any) -> Any:
        return with_heat(self.kernel, state)

    def finish(self, state: Any) -> Any:
        state = say_if_hot(self.kernel, state)
        if self.potential.plates:
            return state
        U = self.potential(self.kernel.unflatten(state.z), {})
        return state._replace(potential_energy=U.astype(state.potential_energy.dtype))

    def resume(self, state: Any, resumed: Array) -> Any:
        state = state._replace(heat=jnp.where(resumed, -jnp.inf, state.heat))
        old = place = state.gradient
        refresh = getattr(self.gradient, "refresh", None)
        if state.settings is not self.kernel.settings:  # of another kernel, with their own center
            refresh, place = getattr(self.gradient, "init", None), state.z
        if refresh is None:
            return state

        def again() -> Any:
            new = refresh(place, self.potential)
            return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)

        return state._replace(gradient=lax.cond(resumed, again, lambda: old))


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in leaves])))
