"""What all stochastic-gradient kernels share: minibatches, gradients, transitions, divergence."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.util import is_prng_key

from numpyro_ext._checks import check_choice, check_nonnegative, check_positive
from numpyro_ext._model.minibatch import draw_indices, start_plates
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.sharding import num_devices
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient, warn_if_far
from numpyro_ext.mcmc.model_kernel import ModelKernel, Schedule
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.sharding import check_batches
from numpyro_ext.mcmc.state import Estimate, Transition

__all__ = ["GradFn", "SGMCMCKernel", "next_draw"]


@dataclass(frozen=True)
class GradFn:
    """
    The gradient estimate as a step sees it: a function of the flat vector.

    Batch, keys and the estimator's state are those of the transition. Nothing is changed by a
    call, so a step may call it any number of times, also inside a JAX loop.
    """

    kernel: "SGMCMCKernel"
    potential: Potential
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
        return self._estimate(key_gradient, self.kernel.new_batch(key_batch, self.potential), z)[1]

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Estimate]:
        potential, coordinates, state = self.potential, self.kernel.coordinates, self.state
        x = coordinates.to_z(z)
        estimator, sites = self.kernel.in_use("gradient"), potential.info.unravel(x)
        if estimator is None:
            U, by_site = potential.value_and_grad(sites, idx)
        else:
            U, by_site, state = estimator.estimate(rng_key, self.i, sites, idx, potential, state)
        g = coordinates.pull(potential.info.ravel(by_site)).astype(z.dtype)
        if self.bound is not None:
            g = jnp.clip(g, -self.bound, self.bound)
        return g, Estimate(U, g, state)


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
        outside of the subsampled plates.
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
        self._num_descent = self._num_adapt // 2 if far else 0
        check_batches(potential.plates, num_devices(self.sharding))
        if callable(self.temperature):
            at_start = jax.jit(self.temperature)(np.zeros((), np.int32))
            check_nonnegative("temperature at i = 0", at_start)

    def check_state(self, states: Any, grads: Sites | None) -> None:
        # A draw in coordinates without a scale says nothing, and one around the center is near.
        center = isinstance(self.estimator, ControlVariate)
        whitened = isinstance(self.coordinates, Whitening)
        if grads and center and (self._start_is_given or (whitened and not self._starts_near)):
            warn_if_far(states, grads, self.flatten, whitened)

    @property
    def estimator(self) -> GradientEstimator:
        """The gradient estimator in use."""
        given = self.in_use("gradient")
        return MinibatchGradient() if given is None else given

    def gradients_per_transition(self, rows: float) -> float:
        cost: Any = getattr(self.estimator, "cost", None)
        return 1.0 if cost is None else float(cost(rows))

    def sampling_at(self, i: Any) -> Array:
        """False in the exploration stage of a cyclical schedule."""
        return jnp.asarray(getattr(self.step_size, "sampling", lambda i: True)(i), bool)

    def temperature_at(self, i: Any, dtype: Any = float) -> Array:
        """T of transition ``i``: 0 in the exploration stage of a cyclical schedule."""
        T = self.temperature(i) if callable(self.temperature) else self.temperature
        return jnp.where(self.sampling_at(i), jnp.asarray(T, dtype), 0)

    def start(
        self, potential: Potential, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        i, flat = jnp.zeros((), int), self.flatten(z)
        key_index, key_gradient, key_fields = random.split(key_start, 3)
        plates = start_plates(key_plates, potential.plates, self.minibatch)
        idx, _ = draw_indices(key_index, plates, potential.plates, self.sharding)
        gradient = jax.tree.map(jnp.asarray, self.estimator.init(z, potential))
        U, grad, _ = self.estimator.estimate(key_gradient, i, z, idx, potential, gradient)
        pulled = self.coordinates.pull(self.info.ravel(grad))
        state = self.state_class(
            i=i,
            z=z,
            potential_energy=jnp.asarray(U, flat.dtype),
            grad_norm=jnp.linalg.norm(pulled).astype(flat.dtype),
            step_size=self.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            sampling=self.sampling_at(i),
            gradient=gradient,
            plates=plates,
            step_scale=jnp.ones((), flat.dtype),
            settings=self.settings,
            best=(jnp.asarray(U, flat.dtype), flat),
            **self.init_state(key_fields, flat),
            resumed=jnp.zeros((), bool),
            rng_key=rng_key,
        )
        return state, idx, grad

    def sample(
        self, state: Any, model_args: tuple = (), model_kwargs: dict[str, Any] | None = None
    ) -> Any:
        return next_draw(self, state, self.potential(model_args, model_kwargs))

    def transition(self, state: Any, potential: Potential) -> Any:
        i, dtype = state.i, state.z.dtype
        rng_key, key_index, key_step = random.split(state.rng_key, 3)
        # Drawn only where they are used, which is seldom; far from the counters of the split.
        key_gradient, key_redraw = (random.fold_in(state.rng_key, 1000 + k) for k in range(2))
        idx, plates = draw_indices(key_index, state.plates, potential.plates, self.sharding)
        eps = self.step_size_at(i, dtype) * state.step_scale
        T = self.temperature_at(i, dtype)
        grad_fn = GradFn(self, potential, i, idx, key_gradient, state.gradient)
        step = self._descend if self._num_descent else self.step
        z, (U, grad, gradient), fields = step(key_step, state, state.z, grad_fn, eps, T)
        # What only the last step shows, and what did not change, need not be looked at in all.
        shown = [
            x
            for name, x in fields.items()
            if name not in self.last_step_fields and x is not getattr(state, name)
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
        if self._num_adapt:
            # Far from the mode the last finite state may be anywhere: back to the best one. The
            # potential is that of the old z, or of half a step from it.
            warm = i < self._num_adapt
            lower, back = warm & finite & (state.best[0] > U), warm & ~finite
            new["best"] = jax.tree.map(partial(jnp.where, lower), (U, state.z), state.best)
            new["z"] = jnp.where(back, state.best[1], new["z"])
            new["step_scale"] = jnp.where(back, 0.5, 1.0).astype(dtype) * state.step_scale
        if self.momentum:
            r = new[self.momentum]
            redraw = partial(self.draw_momentum, key_redraw, state.z, T)
            new[self.momentum] = lax.cond(finite, lambda: r, redraw)
        return state._replace(
            i=i + 1,
            step_size=eps,
            diverging=state.diverging | ~finite,
            sampling=self.sampling_at(i),
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
        descending = state.i < self._num_descent
        scale = self.momentum_scale(jnp.where(T > 0, T, 1))
        grad_fn = replace(grad_fn, bound=jnp.where(descending, scale / eps, jnp.inf))
        T = jnp.where(descending, 0, T)
        z, estimate, fields = self.step(rng_key, state, z, grad_fn, eps, T)
        bound = jnp.where(descending, scale, jnp.inf)
        assert self.momentum is not None
        fields = fields | {self.momentum: jnp.clip(fields[self.momentum], -bound, bound)}
        fresh = partial(self.init_state, random.fold_in(rng_key, 1), z)
        names = jax.eval_shape(fresh)
        kept = {name: fields.get(name, getattr(state, name)) for name in names}
        last = state.i + 1 == self._num_descent
        return Transition(z, estimate, lax.cond(last, fresh, lambda: kept))

    def finish(self, state: Any, potential: Potential) -> Any:
        if potential.plates:
            return state
        U = potential(self.unflatten(state.z), {})
        return state._replace(potential_energy=U.astype(state.potential_energy.dtype))

    def resume(self, state: Any, resumed: Array, potential: Potential) -> Any:
        old = place = state.gradient
        refresh = getattr(self.in_use("gradient"), "refresh", None)
        if state.settings is not self.settings:  # those of another kernel, with their own center
            refresh, place = self.estimator.init, state.z
        if refresh is None:
            return state

        def again() -> Any:
            new = refresh(place, potential)
            return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)

        return state._replace(gradient=lax.cond(resumed, again, lambda: old))

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        potential = self.potential(model_args, model_kwargs)
        return state._replace(gradient=self.estimator.init(state.z, potential))

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
        potential = self._potential(info, params, model_args, kwargs)
        z = info.check_unconstrained("z", z)
        key_batch, key_gradient = random.split(rng_key)
        idx = self.new_batch(key_batch, potential)
        state, i = self.estimator.init(z, potential), jnp.zeros((), int)
        return self.estimator.estimate(key_gradient, i, z, idx, potential, state)[:2]

    def new_batch(self, rng_key: Array, potential: Potential) -> dict[str, Array]:
        """One batch of the law of the chain's batches, apart from its passes over the data."""
        key_plates, key_index = random.split(rng_key)
        plates = start_plates(key_plates, potential.plates, self.minibatch)
        return draw_indices(key_index, plates, potential.plates, self.sharding)[0]


def next_draw(kernel: ModelKernel, state: Any, potential: Potential) -> Any:
    """The state of one chain, or of several, after ``steps_per_sample`` transitions."""
    draw = partial(_transitions, kernel, potential)
    if is_prng_key(state.rng_key):
        return draw(state.i, state.resumed, state)
    # All chains share these. Out of vmap, a lax.cond on them stays a branch.
    i, resumed = state.i[0], state.resumed[0]
    return jax.vmap(partial(draw, i, resumed))(state._replace(i=None, resumed=None))


def _transitions(
    kernel: ModelKernel, potential: Potential, i: Array, resumed: Array, state: Any
) -> Any:
    state = kernel.resume(state, resumed, potential)
    false = jnp.zeros((), bool)
    state = state._replace(i=i, z=kernel.flatten(state.z), diverging=false, resumed=false)
    inner = kernel.steps_per_sample - 1

    def not_shown(_: Any, state: Any) -> Any:
        # Left as they are, so that XLA need not compute what no draw shows.
        kept = {name: getattr(state, name) for name in kernel.last_step_fields}
        return kernel.transition(state, potential)._replace(**kept)

    def all_transitions(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state = lax.fori_loop(0, inner, not_shown, carry[1]) if inner else carry[1]
        return jnp.zeros((), bool), kernel.transition(state, potential)

    # A loop of one turn, though XLA cannot know that: on CPU it makes one function of a small loop,
    # but hands loose operations to its threads one by one, which takes longer than a transition.
    true = (i | 1) != 0
    _, state = lax.while_loop(lambda carry: carry[0], all_transitions, (true, state))
    state = kernel.finish(state, potential)
    return state._replace(z=kernel.unflatten(state.z))


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in leaves])))
