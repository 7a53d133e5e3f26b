"""What all stochastic-gradient kernels share: arguments, minibatches, gradients, divergence."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._checks import check_choice, check_nonnegative, check_positive
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc.gradients import MinibatchGradient
from numpyro_ext.mcmc.kernel import ModelKernel, Schedule, state_class
from numpyro_ext.mcmc.minibatch import check_batches, draw_indices, num_devices, start_plates
from numpyro_ext.mcmc.schedules import ConstantSchedule

__all__ = ["Estimate", "GradFn", "SGMCMCKernel", "Schedule", "Transition", "kernel_state"]

_BEFORE = {
    "i": "number of transitions made, from 0; it is not reset after warmup.",
    "z": "dict of the latent sites in unconstrained space.",
    "potential_energy": "potential at ``z``; with a minibatch, its estimate where the gradient was"
    " taken last.",
    "grad_norm": "2-norm of the last gradient estimate.",
    "step_size": "step size of the last transition.",
    "diverging": "whether a transition of the last draw met a value that was not finite.",
    "sampling": "False in the exploration stage of a cyclical schedule.",
    "gradient": "state of the gradient estimator.",
    "plates": '``{name: (epoch, offset, rng_key)}`` for ``minibatch="epoch"``, else empty.',
}


def kernel_state(name: str, module: str, /, **own: str) -> Any:
    """
    The state class of a stochastic-gradient kernel: the fields that all of them have, and its own.

    Assign it to a name of the module, so that states pickle. The docstring of the class lists
    the fields.

    :param str name: name of the class.
    :param str module: ``__name__`` of the module that it belongs to.
    :param own: what each of the kernel's own fields is.

    .. doctest::

        >>> from numpyro_ext.mcmc import kernel_state
        >>> MyState = kernel_state("MyState", __name__, r="momentum, ``(n,)``.")
        >>> MyState._fields[-3:]
        ('r', 'resumed', 'rng_key')
    """
    return state_class(name, module, _BEFORE | own)


class Estimate(NamedTuple):
    """
    A gradient estimate at a point:

     - **potential** - estimate of U.
     - **grad** - ``(n,)``, estimate of its gradient.
     - **state** - state of the gradient estimator afterwards.
    """

    potential: Array
    grad: Array
    state: Any


class Transition(NamedTuple):
    """
    What a kernel's ``step`` returns:

     - **z** - the new ``(n,)`` vector.
     - **estimate** - the :class:`Estimate` to report, and whose ``state`` the chain goes on with.
     - **fields** - new values of the kernel's own fields of the state, by name.
    """

    z: Array
    estimate: Estimate
    fields: dict[str, Array]


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

    def __call__(self, z: Array) -> Estimate:
        """The estimate at ``z`` from the batch of the transition."""
        grad, (potential, state) = self._estimate(self.rng_key, self.idx, z)
        return Estimate(potential, grad, state)

    def with_hvp(self, z: Array, v: Array) -> tuple[Estimate, Array]:
        """The estimate at ``z``, and the product of its Jacobian (the Hessian of U) with ``v``."""
        estimate = partial(self._estimate, self.rng_key, self.idx)
        grad, hvp, (potential, state) = jax.jvp(estimate, (z,), (v,), has_aux=True)
        return Estimate(potential, grad, state), hvp

    def independent(self, rng_key: Array, z: Array) -> Estimate:
        """The estimate at ``z`` from a batch of its own, independent of the transition's."""
        key_batch, key_gradient = random.split(rng_key)
        idx = self.kernel.new_batch(key_batch, self.potential)
        grad, (potential, state) = self._estimate(key_gradient, idx, z)
        return Estimate(potential, grad, state)

    def _estimate(self, rng_key: Array, idx: dict[str, Array], z: Array) -> tuple[Array, Any]:
        sites = self.kernel.unflatten(z)
        potential, grad, state = self.kernel.gradient.estimate(
            rng_key, self.i, sites, idx, self.potential, self.state
        )
        return self.kernel.flatten_gradient(grad).astype(z.dtype), (potential, state)


class SGMCMCKernel(ModelKernel):
    r"""
    Base of the stochastic-gradient kernels for :class:`~numpyro.infer.mcmc.MCMC`.

    Draws from :math:`\pi(z) \propto \exp(-U(z)/T)`, where U is NumPyro's potential in unconstrained
    space, summed over all N data, Jacobian included. Every ``plate`` with a ``subsample_size`` is a
    minibatch, redrawn at each transition in O(batch) work; a model without one runs with the full
    gradient. There is no accept step: draws are biased by the step size and by the gradient noise,
    see each kernel.

    **Flat order.** A step moves the ``(n,)`` vector of the latent sites in the order in which the
    model samples them, each ravelled in C order. This is the order of NumPyro's ``AutoContinuous``
    guides; momenta, preconditioners, metrics and per-site values have it too.

    **Extra fields.** With a minibatch ``potential_energy`` is the estimate where the gradient was
    taken last; without one it is U at the draw. ``grad_norm`` is the 2-norm of the last gradient
    estimate. ``step_size`` is the one used, so a weighted average is
    ``sum(step_size * f) / sum(step_size)``. If the gradient or a new value is not finite, the chain
    keeps its last finite state, draws a new momentum if it has one, and marks the draw
    ``diverging``; it requires a smaller step then. Deterministic sites inside a subsampled plate
    are computed for its first ``subsample_size`` rows.

    **Chains.** For the same keys, chains have the same random numbers and batches under every
    ``chain_method``. ``num_warmup`` counts draws, not transitions; schedules continue through
    warmup and resumption (``mcmc.post_warmup_state = mcmc.last_state``). A chain may be resumed on
    other data of the same size.

    With a progress bar ``MCMC`` dispatches every draw of a sequential chain from Python, which
    takes as long as some fifty transitions of a small model: set ``steps_per_sample``, or switch
    the bar off. For large data use ``progress_bar=False`` or leave ``jit_model_args`` False: with
    both on, ``MCMC`` copies the data at every draw.

    A kernel supplies ``state_class`` (see :func:`kernel_state`), :meth:`step`, and, as needed,
    :meth:`init_state`, :meth:`redraw_momentum` and :meth:`setup`.

    :param model: Python callable containing NumPyro primitives; all latent sites continuous and
        outside of the subsampled plates.
    :param step_size: positive float, or a callable of the transition number ``i`` (from 0), such
        as a schedule.
    :param temperature: non-negative float T or a callable of ``i``; 0 is descent without noise.
    :param gradient: an estimator: :class:`MinibatchGradient` by default, :class:`ControlVariate`,
        :class:`SVRG` or any object with the methods ``init(z, potential)`` and
        ``estimate(rng_key, i, z, idx, potential, state)``, where ``potential`` is the model's
        :class:`Potential`. An optional third method ``refresh(state, potential)`` returns the
        state for other data, when a chain is resumed.
    :param str minibatch: ``"replace"`` draws rows with replacement, ``"epoch"`` each row once per
        pass.
    :param int steps_per_sample: transitions per draw, all in one dispatch.
    :param sharding: a ``NamedSharding`` over the mesh axis (of type ``Auto``) along which the rows
        of the model's arguments are sharded; every device then takes its share of the batch. Use
        ``MCMC(..., jit_model_args=True)``.
    :param init_strategy: a per-site initialization function.
    :param bool forward_mode_differentiation: whether to differentiate the potential in forward
        mode, as models with a ``while_loop`` require.
    """

    state_class: ClassVar[Any]
    last_step_fields: ClassVar[tuple[str, ...]] = ("potential_energy", "grad_norm")

    def __init__(
        self,
        model: Model,
        step_size: float | Schedule,
        *,
        temperature: float | Schedule = 1.0,
        gradient: GradientEstimator | None = None,
        minibatch: str = "replace",
        steps_per_sample: int = 1,
        sharding: NamedSharding | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
        forward_mode_differentiation: bool = False,
    ) -> None:
        super().__init__(
            model,
            step_size,
            steps_per_sample=steps_per_sample,
            init_strategy=init_strategy,
            forward_mode_differentiation=forward_mode_differentiation,
        )
        if not callable(temperature):
            check_nonnegative("temperature", temperature)
        gradient = MinibatchGradient() if gradient is None else gradient
        if isinstance(gradient, type) or not isinstance(gradient, GradientEstimator):
            raise TypeError(
                f"gradient is {gradient!r}; it must be an object with the methods init and"
                " estimate, such as ControlVariate(center)."
            )
        check_choice("minibatch", minibatch, ("replace", "epoch"))
        self._temperature = temperature if callable(temperature) else ConstantSchedule(temperature)
        self.gradient = gradient
        self.minibatch = minibatch
        self.sharding = sharding
        self._num_devices = num_devices(sharding)

    @abstractmethod
    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        """
        One transition on the flat ``(n,)`` vector.

        :param rng_key: a key of this step alone.
        :param state: the state before the step; ``state.z`` is flat, and ``state.i`` is not
            batched.
        :param z: the flat vector.
        :param grad_fn: the gradient estimate, ``estimate = grad_fn(z)``; further methods are
            ``grad_fn.with_hvp(z, v)`` and ``grad_fn.independent(rng_key, z)``.
        :param eps: step size.
        :param T: temperature.
        """

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        """The kernel's own fields at the start of one chain, at the flat ``z``."""
        return {}

    def redraw_momentum(self, rng_key: Array, z: Array, T: Array) -> dict[str, Array]:
        """Those of the kernel's fields that are drawn anew after a divergence."""
        return {}

    def setup(self, potential: Potential) -> None:
        """Checks that need the model's sites, supports or plates; called by :meth:`init` first."""
        check_batches(potential.plates, self._num_devices)
        for what, schedule, check in (
            ("step_size", self._schedule, check_positive),
            ("temperature", self._temperature, check_nonnegative),
        ):
            if not isinstance(schedule, ConstantSchedule):
                check(f"{what} at i = 0", jax.jit(schedule)(np.zeros((), np.int32)))

    def sampling_at(self, i: Any) -> Array:
        """False in the exploration stage of a cyclical schedule."""
        sampling = getattr(self._schedule, "sampling", None)
        return jnp.asarray(True if sampling is None else sampling(i), bool)

    def temperature_at(self, i: Any, dtype: Any = float) -> Array:
        """T of transition ``i``: 0 in the exploration stage of a cyclical schedule."""
        return jnp.where(self.sampling_at(i), jnp.asarray(self._temperature(i), dtype), 0)

    def start(
        self, potential: Potential, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites | None]:
        i, flat = jnp.zeros((), int), self.flatten(z)
        key_index, key_gradient, key_fields = random.split(key_start, 3)
        plates = self._plates(key_plates, potential)
        idx, _ = self._batch(key_index, plates, potential)
        gradient = jax.tree.map(jnp.asarray, self.gradient.init(z, potential))
        U, grad, _ = self.gradient.estimate(key_gradient, i, z, idx, potential, gradient)
        state = self.state_class(
            i=i,
            z=z,
            potential_energy=jnp.asarray(U, flat.dtype),
            grad_norm=jnp.linalg.norm(self.flatten_gradient(grad)).astype(flat.dtype),
            step_size=self.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            sampling=self.sampling_at(i),
            gradient=gradient,
            plates=plates,
            **self.init_state(key_fields, flat),
            resumed=jnp.zeros((), bool),
            rng_key=rng_key,
        )
        return state, idx, grad

    def transition(self, state: Any, potential: Potential) -> Any:
        i, dtype = state.i, state.z.dtype
        rng_key, key_index, key_step = random.split(state.rng_key, 3)
        # Drawn only where they are used, which is seldom; far from the counters of the split.
        key_gradient, key_redraw = (random.fold_in(state.rng_key, 1000 + k) for k in range(2))
        idx, plates = self._batch(key_index, state.plates, potential)
        eps = self.step_size_at(i, dtype)
        T = self.temperature_at(i, dtype)
        grad_fn = GradFn(self, potential, i, idx, key_gradient, state.gradient)
        z, (U, grad, gradient), fields = self.step(key_step, state, state.z, grad_fn, eps, T)
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
        redraw = partial(self.redraw_momentum, key_redraw, state.z, T)
        if drawn := jax.eval_shape(redraw):
            new |= lax.cond(finite, lambda: {name: new[name] for name in drawn}, redraw)
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

    def finish(self, state: Any, potential: Potential) -> Any:
        if potential.plates:
            return state
        U = potential(self.unflatten(state.z), {})
        return state._replace(potential_energy=U.astype(state.potential_energy.dtype))

    def renew(self, state: Any, resumed: Array, potential: Potential) -> Any:
        refresh = getattr(self.gradient, "refresh", None)
        if refresh is None:
            return state
        old = state.gradient

        def again() -> Any:
            new = refresh(old, potential)
            return jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype), new, old)

        return state._replace(gradient=lax.cond(resumed, again, lambda: old))

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        potential = self.potential(model_args, model_kwargs)
        return state._replace(gradient=self.gradient.init(state.z, potential))

    def estimate_gradient(
        self,
        rng_key: Array,
        z: Sites,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Array, Sites]:
        """
        One draw of the gradient estimate at a fixed point: ``(potential, grad)``.

        It may be jitted and mapped.

        :param rng_key: random number generator key of the batch.
        :param dict z: unconstrained values of the latent sites.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        """
        kwargs = model_kwargs or {}
        info, params = self._read(None, model_args, kwargs)
        potential = self._potential(info, params, model_args, kwargs)
        z = info.check_unconstrained("z", z)
        key_batch, key_gradient = random.split(rng_key)
        idx = self.new_batch(key_batch, potential)
        state = self.gradient.init(z, potential)
        U, grad, _ = self.gradient.estimate(
            key_gradient, jnp.zeros((), int), z, idx, potential, state
        )
        return U, grad

    def new_batch(self, rng_key: Array, potential: Potential) -> dict[str, Array]:
        """One batch of the law of the chain's batches, apart from its passes over the data."""
        key_plates, key_index = random.split(rng_key)
        return self._batch(key_index, self._plates(key_plates, potential), potential)[0]

    def _plates(self, rng_key: Array, potential: Potential) -> dict[str, Any]:
        return start_plates(rng_key, potential.plates, self.minibatch)

    def _batch(self, rng_key: Array, plates: Any, potential: Potential) -> tuple[Any, Any]:
        return draw_indices(rng_key, plates, potential.plates, self.sharding)


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in leaves])))
