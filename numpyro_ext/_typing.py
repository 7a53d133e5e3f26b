"""Aliases, and the Protocols for which more than one file asks.

Array annotations carry shapes in jaxtyping's notation. jaxtyping is an extra (``test``), which
checks them while the tests run; without it they are plain arrays.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _PlainArray:
            def __class_getitem__(cls, item: Any) -> type[Array]:
                return Array

        Bool = Float = Int = _PlainArray

type Shape = tuple[int, ...]
"""The shape of an array."""
type Model = Callable[..., Any]
"""A callable with NumPyro primitives, model or guide."""
type Kwargs = dict[str, Any]
"""Keyword arguments of a program."""
type Params = dict[str, Any]
"""Values of ``numpyro.param`` sites, constrained, by name."""
type Sites = dict[str, Array]
"""Values of sample sites by name."""
type Trace = dict[str, dict[str, Any]]
"""What ``numpyro.handlers.trace`` records."""


@runtime_checkable
class GradientEstimator(Protocol):
    """Where a stochastic-gradient kernel gets the gradient of its potential.

    ``potential`` is a :class:`numpyro_ext.mcmc.Potential`: ``potential.value_and_grad(z, idx)`` is
    one minibatch, ``potential.full_value_and_grad(z)`` all data.
    """

    def init(self, z: Any, potential: Any) -> Any:
        """The estimator's own state, a pytree."""
        ...

    def estimate(
        self,
        rng_key: jax.Array,
        i: Array,
        z: Any,
        idx: dict[str, Array],
        potential: Any,
        state: Any,
    ) -> tuple[Array, Any, Any]:
        """``(potential, grad, state)`` at ``z``."""
        ...


@runtime_checkable
class Diagnosable(Protocol):
    """A kernel for ``MCMC`` that tells a diagnosis what it has to know.

    NumPyro's own kernels do not satisfy the Protocol; their runs are judged as plain MCMC.
    """

    @property
    def inference_method(self) -> str:
        """``"sgmcmc"`` if the gradient is estimated and no draw is refused, ``"mcmc"`` if there is
        an accept step, ``"particles"`` if the chains are particles that move together, and
        ``"ensemble"`` if these are independent draws."""
        ...

    @property
    def model(self) -> Model:
        """The model, with its minibatches."""
        ...

    @property
    def steps_per_sample(self) -> int:
        """Transitions in one draw."""
        ...


@runtime_checkable
class DiagnosableChains(Diagnosable, Protocol):
    """A :class:`Diagnosable` kernel of Markov chains."""

    @property
    def settings(self) -> Any:
        """The settings that the kernel has found, None if they were given: ``step_size``,
        ``variance_ratio``, ``kinetic_temperature`` (the least and the largest that are predicted,
        over T), ``transitions`` per draw, and sentences of ``problems``."""
        ...

    @property
    def if_hot(self) -> str:
        """What to do about a chain that is too hot."""
        ...

    def temperature_at(self, i: Any) -> Array | None:
        """The temperature of transition ``i``, 0 while a cyclical schedule explores; None for a
        kernel without a temperature. It may be mapped over ``i``."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A method of inference that fits a guide to a model, as ``numpyro.infer.SVI`` is."""

    model: Model
    guide: Model

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Fit; the result has ``params``, the parameters of the guide."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An engine or a kernel that says what it has found in its runs, and takes that up in another
    process; see :mod:`numpyro_ext.saving`."""

    def saved(self) -> dict[str, Any]:
        """A dict of arrays, numbers and records of this package."""
        ...

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> None:
        """Take what :meth:`saved` gave, on these arguments of the model; an error where the latent
        sites differ."""
        ...
