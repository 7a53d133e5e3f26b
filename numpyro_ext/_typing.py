"""Aliases, and the Protocols through which rooms talk to each other and to a user's own code.

Array annotations carry shapes in jaxtyping's notation. jaxtyping is an extra (``test``), which
checks them while the tests run; without it they are plain arrays.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
from jax import Array
import numpyro.distributions as dist

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

__all__ = [
    "Bool",
    "Float",
    "GradientEstimator",
    "HasConjugate",
    "HasCritic",
    "HasReverse",
    "Int",
    "Mixture",
    "Model",
    "Params",
    "SamplesLatent",
    "ScoreEstimator",
    "SemiImplicit",
    "Sites",
    "Trace",
]

Model = Callable[..., Any]
"""A callable with NumPyro primitives, model or guide."""
Params = dict[str, Any]
"""Values of ``numpyro.param`` sites, constrained, by name."""
Sites = dict[str, Array]
"""Values of sample sites by name."""
Trace = dict[str, dict[str, Any]]
"""What ``numpyro.handlers.trace`` records."""


@runtime_checkable
class SamplesLatent(Protocol):
    """A guide whose latent vector can be drawn, whether or not it has a density."""

    def sample_latent(
        self, rng_key: jax.Array, params: Params, num_samples: int | None = None
    ) -> Array:
        """``(num_samples, latent_dim)`` unconstrained draws, differentiable in ``params``."""
        ...


@runtime_checkable
class SemiImplicit(Protocol):
    """A guide ``q(z) = E_psi q(z | psi)``, in unconstrained space."""

    def sample_mixing(self, rng_key: jax.Array, params: Params, num_samples: int) -> Any:
        """Draws of psi, a pytree of arrays ``(num_samples, ...)``."""
        ...

    def conditional(self, params: Params, psi: Any) -> dist.Distribution:
        """``q(z | psi)``, of batch shape ``(num_samples,)`` and event shape ``(latent_dim,)``."""
        ...


@runtime_checkable
class HasReverse(Protocol):
    """A guide with auxiliary variables a, and the density ``r(a | z)`` with which they are paid."""

    def reverse_log_prob(
        self, params: Params, aux: Sites, latents: Sites, *args: Any, **kwargs: Any
    ) -> Array:
        """``log r(aux | latents)``, a number."""
        ...


@runtime_checkable
class Mixture(Protocol):
    """A guide ``q(z) = sum_c w_c q_c(z)``, in unconstrained space."""

    def components(self, params: Params) -> tuple[Array, dist.Distribution]:
        """Weights ``(C,)``, and a distribution of batch ``(C,)`` and event ``(latent_dim,)``."""
        ...


@runtime_checkable
class HasCritic(Protocol):
    """A guide that carries the parameters of a critic, a network that its loss trains."""

    def critic(self, params: Params, z: Array) -> Array:
        """The critic at unconstrained points ``(..., latent_dim)``: ``(...)``, or ``(...,
        output_dim)`` if that is larger than 1."""
        ...


@runtime_checkable
class HasConjugate(Protocol):
    """A guide of a model whose global sites are conjugate to its local ones."""

    def sample_globals(self, rng_key: jax.Array, sites: Sites) -> Sites:
        """The global sites, drawn from the model given these values of the local ones."""
        ...


@runtime_checkable
class ScoreEstimator(Protocol):
    """Estimates ``grad log q`` from samples of q."""

    def __call__(self, x: Float[Array, "k d"]) -> Float[Array, "k d"]: ...
    def fit(self, x: Float[Array, "k d"]) -> Callable[[Array], Array]: ...


@runtime_checkable
class GradientEstimator(Protocol):
    """Where a stochastic-gradient kernel gets the gradient of its potential.

    ``potential`` is a :class:`numpyro_ext.mcmc.Potential`: ``potential.value_and_grad(z, idx)`` is
    one minibatch, ``potential.full_value_and_grad(z)`` all data. An estimator whose state depends
    on the data may have a third method, ``refresh(state, potential)``, which returns the state for
    other data.
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
