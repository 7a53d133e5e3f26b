"""What all stochastic-gradient kernels share: arguments, minibatches, gradients, divergence."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
from numpyro.infer import init_to_uniform

from numpyro_ext._checks import check_choice, check_nonnegative, check_positive
from numpyro_ext._model.minibatch import check_batches, draw_indices, num_devices, start_plates
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc.grad_fn import GradFn
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient, warn_if_far
from numpyro_ext.mcmc.kernel import ModelKernel, Schedule
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.settings import Settings
from numpyro_ext.mcmc.state import Transition
from numpyro_ext.mcmc.whitening import Whitening

__all__ = ["SGMCMCKernel"]


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

    **Settings.** With ``step_size=None``, the default, :meth:`init` finds the mode, whitens by the
    curvature there, measures the noise of minibatch gradients with and without a control variate,
    and takes the largest step (and the friction) at which the kernel's law on a Gaussian keeps the
    relative error of every variance within ``max_bias``. Chains then start at draws of the normal
    approximation. ``kernel.settings`` is the report, a :class:`Settings`; where it does not apply,
    an ``InferenceWarning`` says so. A ``step_size`` that is given is taken as it is.

    **Warmup.** A chain that starts far from the mode would turn its potential into momentum. So a
    kernel with momentum only descends during the first half of warmup, with gradient and momentum
    kept below their thermal size, unless it starts at the normal approximation. A chain that
    diverges during warmup goes back to its best state so far and halves its step; ``step_scale``
    in the state is the factor.

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
        as a schedule; None is found.
    :param float max_bias: largest relative error of a variance that a step which is found may have.
    :param whitening: a :class:`Whitening`, the coordinates in which a step moves. None is those of
        the sites or, with ``step_size=None``, found.
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
        step_size: float | Schedule | None = None,
        *,
        max_bias: float = 0.05,
        whitening: Whitening | None = None,
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
            whitening=whitening,
            steps_per_sample=steps_per_sample,
            init_strategy=init_strategy,
            forward_mode_differentiation=forward_mode_differentiation,
        )
        if not callable(temperature):
            check_nonnegative("temperature", temperature)
        check_positive("max_bias", max_bias)
        self.max_bias = max_bias
        self._gradient_is_given = gradient is not None
        gradient = MinibatchGradient() if gradient is None else gradient
        if isinstance(gradient, type) or not isinstance(gradient, GradientEstimator):
            raise TypeError(
                f"gradient is {gradient!r}; it must be an object with the methods init and"
                " estimate, such as ControlVariate(center)."
            )
        check_choice("minibatch", minibatch, ("replace", "epoch"))
        self._temperature = temperature if callable(temperature) else ConstantSchedule(temperature)
        self.gradient: GradientEstimator = gradient
        self.minibatch = minibatch
        self.sharding = sharding
        self._num_devices = num_devices(sharding)
        self.num_descent = 0
        """Transitions at the beginning that only descend: none without momentum."""

    def estimators(self, center: Sites) -> list[GradientEstimator]:
        if self._gradient_is_given:
            return [self.gradient]
        return [MinibatchGradient(), ControlVariate(center)] if self.info.plates else []

    def take(self, settings: Settings) -> None:
        super().take(settings)
        if not self._gradient_is_given:
            corrected = settings.control_variate
            self.gradient = ControlVariate(settings.center) if corrected else MinibatchGradient()

    def noise_ratio(self, noise: np.ndarray) -> np.ndarray:
        """Variances of the gradient noise over T, which is 1 here where it is 0 or a schedule."""
        constant = isinstance(self._temperature, ConstantSchedule)
        T = float(self._temperature.value) if constant else 1.0
        return noise / (T or 1.0)

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
        far = "r" in self.state_class._fields and not self._starts_near
        self.num_descent = self._num_adapt // 2 if far else 0
        check_batches(potential.plates, self._num_devices)
        for what, schedule, check in (
            ("step_size", self._schedule, check_positive),
            ("temperature", self._temperature, check_nonnegative),
        ):
            if not isinstance(schedule, ConstantSchedule):
                check(f"{what} at i = 0", jax.jit(schedule)(np.zeros((), np.int32)))

    def check_state(self, states: Any, grads: Sites | None) -> None:
        # Where a start is drawn in coordinates without a scale, it says nothing of the posterior.
        known = self._whitening is not None or self._start_is_given
        if known and grads and isinstance(self.gradient, ControlVariate):
            warn_if_far(states, grads, self.flatten, self._whitening is not None)

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
            step_scale=jnp.ones((), flat.dtype),
            best=(jnp.asarray(U, flat.dtype), flat),
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
        eps = self.step_size_at(i, dtype) * state.step_scale
        T = self.temperature_at(i, dtype)
        grad_fn = GradFn(self, potential, i, idx, key_gradient, state.gradient)
        if self.num_descent:
            z, (U, grad, gradient), fields = self._descend(key_step, state, grad_fn, eps, T)
        else:
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
        if self._num_adapt:
            # Far from the mode the last finite state may be anywhere: back to the best one. The
            # potential is that of the old z, or of half a step from it.
            warm = i < self._num_adapt
            lower, back = warm & finite & (state.best[0] > U), warm & ~finite
            new["best"] = jax.tree.map(partial(jnp.where, lower), (U, state.z), state.best)
            new["z"] = jnp.where(back, state.best[1], new["z"])
            new["step_scale"] = jnp.where(back, 0.5, 1.0).astype(dtype) * state.step_scale
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

    def _descend(
        self, rng_key: Array, state: Any, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        """
        A step that is a descent as long as ``i`` is in the first half of warmup.

        Far from the mode the potential would become momentum. So nothing is injected, gradient and
        momentum are kept below their thermal size (a coordinate then moves by about ``eps`` at
        most), and the kernel's own fields begin anew at the end.
        """
        descending = state.i < self.num_descent
        scale = self.momentum_scale(jnp.where(T > 0, T, 1))
        grad_fn = replace(grad_fn, bound=jnp.where(descending, scale / eps, jnp.inf))
        T = jnp.where(descending, 0, T)
        z, estimate, fields = self.step(rng_key, state, state.z, grad_fn, eps, T)
        bound = jnp.where(descending, scale, jnp.inf)
        fields = fields | {"r": jnp.clip(fields["r"], -bound, bound)}
        fresh = partial(self.init_state, random.fold_in(rng_key, 1), z)
        names = jax.eval_shape(fresh)
        kept = {name: fields.get(name, getattr(state, name)) for name in names}
        last = state.i + 1 == self.num_descent
        return Transition(z, estimate, lax.cond(last, fresh, lambda: kept))

    def momentum_scale(self, T: Array) -> Array:
        """Standard deviation of the momentum at temperature T."""
        return jnp.sqrt(T)

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
