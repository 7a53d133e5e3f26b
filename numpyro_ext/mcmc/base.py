"""What all stochastic-gradient kernels share: their arguments, the checks of them, and the contract with ``MCMC``."""

from abc import abstractmethod
from collections.abc import Callable
import copy
from functools import partial
from typing import Any, ClassVar, Self, TypedDict

import jax
from jax import Array, random
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import NamedSharding
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_ext._checks import check_choice, check_count, check_nonnegative, check_positive
from numpyro_ext._typing import GradientEstimator, Model, Sites
from numpyro_ext.mcmc._chain import Chain
from numpyro_ext.mcmc._grad_fn import GradFn
from numpyro_ext.mcmc._oracle import (
    Oracle,
    PreparedModel,
    check_names,
    check_sites,
    prepare_model,
)
from numpyro_ext.mcmc.gradients import MinibatchGradient
from numpyro_ext.mcmc.minibatch import check_batches, num_devices
from numpyro_ext.mcmc.schedules import ConstantSchedule

__all__ = ["Common", "SGMCMCKernel", "Schedule"]

Schedule = Callable[[Any], Any]


class Common(TypedDict, total=False):
    """The arguments that every kernel hands on to :class:`SGMCMCKernel`."""

    temperature: float | Schedule
    gradient: GradientEstimator | None
    minibatch: str
    steps_per_sample: int
    sharding: NamedSharding | None
    init_strategy: Callable[..., Any]


class SGMCMCKernel(MCMCKernel):
    r"""
    Base of the stochastic-gradient kernels for :class:`~numpyro.infer.mcmc.MCMC`.

    Draws from :math:`\pi(z) \propto \exp(-U(z)/T)`, where U is NumPyro's potential in unconstrained space, summed over
    all N data, Jacobian included. Every ``plate`` with a ``subsample_size`` is a minibatch, redrawn at each transition
    in O(batch) work; a model without one runs with the full gradient. There is no accept step: draws are biased by
    the step size and by the gradient noise, see each kernel.

    In the extra fields, ``potential_energy`` and ``grad_norm`` (2-norm of the gradient estimate) belong to the
    minibatch and to the place where the gradient was taken last; they are not exact values at ``z``. ``step_size`` is
    the one used, so a weighted average is ``sum(step_size * f) / sum(step_size)``. If the gradient or a new value is
    not finite, the chain keeps its last finite state, draws a new momentum if it has one, and marks the draw
    ``diverging``; it needs a smaller step then. Deterministic sites inside a subsampled plate are computed for its
    first ``subsample_size`` rows.

    For the same keys, chains have the same random numbers and batches under every ``chain_method``. ``num_warmup``
    counts draws, not transitions; schedules run on through warmup and resumption
    (``mcmc.post_warmup_state = mcmc.last_state``).

    With a progress bar ``MCMC`` dispatches every draw of a sequential chain from Python, which takes as long as some
    fifty transitions of a small model: give it ``steps_per_sample``, or switch it off. For large data use
    ``progress_bar=False`` or leave ``jit_model_args`` False: with both on, ``MCMC`` copies the data at every draw.

    A kernel supplies ``state_class`` (a ``NamedTuple`` with the fields of :class:`SGLDState` and its own), :meth:`step`,
    and, as needed, :meth:`init_state`, :meth:`redraw_momentum` and :meth:`setup`.

    :param model: Python callable containing NumPyro primitives; all latent sites continuous and outside of the
        subsampled plates.
    :param step_size: positive float, or a callable of the transition number ``i`` (from 0), such as a schedule.
    :param temperature: non-negative float T or a callable of ``i``; 0 is descent without noise.
    :param gradient: an estimator: :class:`MinibatchGradient` by default, :class:`ControlVariate`, :class:`SVRG` or any
        object with the methods ``init(z, oracle)`` and ``estimate(rng_key, i, z, idx, oracle, state)``, where
        ``oracle.value_and_grad(z, idx)`` is one minibatch and ``oracle.full_value_and_grad(z)`` all rows.
    :param str minibatch: ``"replace"`` draws rows with replacement, ``"epoch"`` each row once per pass.
    :param int steps_per_sample: transitions per draw, all in one dispatch.
    :param sharding: a ``NamedSharding`` over the mesh axis (of type ``Auto``) along which the rows of the model's
        arguments are sharded; every device then takes its share of the batch. Use ``MCMC(..., jit_model_args=True)``.
    :param init_strategy: a per-site initialization function.
    """

    state_class: ClassVar[Any]
    takes_gradient: ClassVar[bool] = True
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
    ) -> None:
        if not callable(model):
            raise TypeError(f"model is {model!r}; it must be a callable with NumPyro primitives.")
        if not callable(step_size):
            check_positive("step_size", step_size)
        if not callable(temperature):
            check_nonnegative("temperature", temperature)
        gradient = MinibatchGradient() if gradient is None else gradient
        if isinstance(gradient, type) or not isinstance(gradient, GradientEstimator):
            raise TypeError(
                f"gradient is {gradient!r}; it must be an object with the methods init and estimate, such as"
                " ControlVariate(center)."
            )
        check_choice("minibatch", minibatch, ("replace", "epoch"))
        check_count("steps_per_sample", steps_per_sample)
        self._model = model
        self._schedule = step_size if callable(step_size) else ConstantSchedule(step_size)
        self._temperature = temperature if callable(temperature) else ConstantSchedule(temperature)
        self.gradient = gradient
        self.minibatch = minibatch
        self.steps_per_sample = steps_per_sample
        self.sharding = sharding
        self._num_devices = num_devices(sharding)
        self._init_strategy = init_strategy
        self._num_adapt = 0
        self._prepared: PreparedModel | None = None
        # `MCMC` calls `init` before it resumes a chain when this is None.
        self._sample_fn: Callable[..., Any] | None = None

    @abstractmethod
    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> tuple[Array, dict[str, Array], Array, Array]:
        """
        One transition on the ravelled ``(n,)`` vector: ``(z, fields, potential, grad)``.

        :param rng_key: a key of this step alone.
        :param state: the state before the step; ``state.z`` is ravelled, and ``state.i`` is not batched.
        :param z: ravelled unconstrained sites, in the order of their sorted names.
        :param grad_fn: the gradient estimate, ``potential, g = grad_fn(z)``, to be taken once.
        :param eps: step size.
        :param T: temperature.
        """

    def init_state(self, rng_key: Array, z: Array) -> dict[str, Array]:
        """The kernel's own fields at the start of one chain, at the ravelled ``z``."""
        return {}

    def redraw_momentum(self, rng_key: Array, z: Array, T: Array) -> dict[str, Array]:
        """Those of the kernel's fields that are drawn anew after a divergence."""
        return {}

    def setup(self, oracle: Oracle) -> None:
        """Checks that need the model's sites, supports or plates; called by :meth:`init` first."""
        return

    def sampling_at(self, i: Any) -> Array:
        """False in the exploration stage of a cyclical schedule."""
        sampling = getattr(self._schedule, "sampling", None)
        return jnp.asarray(True if sampling is None else sampling(i), bool)

    def step_size_at(self, i: Any, dtype: Any = float) -> Array:
        """Step size of transition ``i``."""
        return jnp.asarray(self._schedule(i), dtype)

    def temperature_at(self, i: Any, dtype: Any = float) -> Array:
        """T of transition ``i``: 0 in the exploration stage of a cyclical schedule."""
        return jnp.where(self.sampling_at(i), jnp.asarray(self._temperature(i), dtype), 0)

    def ravel_sites(self, what: str, value: Any, dtype: Any = float) -> Array:
        """A float as it is; a dict of per-site floats or arrays as ``(n,)``, in the order of the ravelled ``z``."""
        if not isinstance(value, dict):
            return jnp.asarray(value, dtype)
        assert self._prepared is not None
        like = self._prepared.like
        check_names(what, value, like)
        full = {
            name: jnp.full(like[name].shape, x) if jnp.ndim(x) == 0 else x
            for name, x in value.items()
        }
        return ravel_pytree(check_sites(what, full, like))[0].astype(dtype)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        fields = ("z", "potential_energy", "grad_norm", "step_size", "diverging")
        own = ("kinetic_temperature", "thermostat", "accept_prob")
        fields += tuple(name for name in own if name in self.state_class._fields)
        return (*fields, "sampling") if hasattr(self._schedule, "sampling") else fields

    def get_diagnostics_str(self, state: Any) -> str:
        # A value of the state in here would wait for the device at every draw.
        return f"{self.steps_per_sample} steps per draw"

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        if self._prepared is None:
            return identity
        return self._prepared.postprocess_fn(*model_args, **(model_kwargs or {}))

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Sites | None,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = model_kwargs or {}
        single = is_prng_key(rng_key)
        split = partial(random.split, num=4)
        keys = split(rng_key) if single else jnp.swapaxes(jax.vmap(split)(rng_key), 0, 1)
        rng_key, key_model, key_plates, key_start = keys
        self._num_adapt = num_warmup * self.steps_per_sample
        self._prepared, z = prepare_model(
            key_model, self._model, self._init_strategy, model_args, kwargs
        )
        check_batches(self._prepared.plates, self._num_devices)
        check_positive("step_size at i = 0", self._schedule(jnp.zeros((), int)))
        check_nonnegative("temperature at i = 0", self._temperature(jnp.zeros((), int)))
        if init_params is not None:
            batch_shape = () if single else rng_key.shape[:1]
            z = check_sites("init_params", init_params, self._prepared.like, batch_shape)
        oracle = self._prepared.oracle(model_args, kwargs)
        self.setup(oracle)
        start = Chain(self, oracle).start
        state, idx, grad = (start if single else jax.vmap(start))(rng_key, key_plates, key_start, z)
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((state, grad)))
        if not traced:
            oracle.check_start(state.z, idx, state.potential_energy, grad, single)
        # Under a transform the model's closures may hold its tracers, which die with it.
        self._sample_fn = None if traced else self.sample
        return state

    def sample(
        self, state: Any, model_args: tuple = (), model_kwargs: dict[str, Any] | None = None
    ) -> Any:
        chain = Chain(self, self._oracle(model_args, model_kwargs))
        if is_prng_key(state.rng_key):
            return chain.draw(state.i, state)
        # All chains share i. Kept out of vmap, a lax.cond on it stays a branch instead of taking both.
        return jax.vmap(partial(chain.draw, state.i[0]))(state._replace(i=None))

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        oracle = self._oracle(model_args, model_kwargs)
        return state._replace(gradient=self.gradient.init(state.z, oracle))

    def wrap_model(self, wrapper: Callable[[Model], Model]) -> Self:
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._prepared = kernel._sample_fn = None
        return kernel

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prepared": None, "_sample_fn": None}

    def estimate_gradient(
        self,
        rng_key: Array,
        z: Sites,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Array, Sites]:
        """
        One draw of the gradient estimate at a fixed point: ``(potential, grad)``. It may be jitted and mapped.

        :param rng_key: random number generator key of the batch.
        :param dict z: unconstrained values of the latent sites.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        """
        kwargs = model_kwargs or {}
        prepared, _ = prepare_model(
            random.key(0), self._model, self._init_strategy, model_args, kwargs
        )
        z = check_sites("z", z, prepared.like)
        oracle = prepared.oracle(model_args, kwargs)
        key_batch, key_gradient = random.split(rng_key)
        idx = Chain(self, oracle).new_batch(key_batch)
        i = jnp.zeros((), int)
        potential, grad, _ = self.gradient.estimate(
            key_gradient, i, z, idx, oracle, self.gradient.init(z, oracle)
        )
        return potential, grad

    def _oracle(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Oracle:
        if self._prepared is None:
            raise ValueError("the kernel has no model arguments yet; call init before sample.")
        return self._prepared.oracle(model_args, model_kwargs or {})
