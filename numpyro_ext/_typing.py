"""Aliases, and the Protocols through which rooms talk to each other and to a user's own code.

Array annotations carry shapes in jaxtyping's notation. jaxtyping is an extra (``test``), which
checks them while the tests run; without it they are plain arrays.
"""

from collections.abc import Callable, Sequence
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
    "BecomesNormal",
    "Bool",
    "Converges",
    "Diagnosable",
    "DiagnosableParticles",
    "Engine",
    "Float",
    "GradientEstimator",
    "HasConjugate",
    "HasCritic",
    "HasModelParams",
    "HasParticles",
    "HasReverse",
    "Int",
    "Mixture",
    "Model",
    "Params",
    "ReadsMinibatches",
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
class BecomesNormal(Protocol):
    """A guide that is a point while it is trained, and a normal afterwards."""

    def as_normal(self, params: Sequence[Params]) -> tuple[Model, list[Params]]:
        """A guide whose every call draws from the normal, and its parameters."""
        ...

    def linearised_site(
        self, rng_key: jax.Array, params: Params, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """An observed site under one draw, with a linear predictor that is linear in the draw."""
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
class HasParticles(Protocol):
    """A guide whose parameters are particles, which are its draws."""

    def particles(self, params: Params) -> Sites:
        """The particles: constrained values of the latent sites, with a leading axis of length
        m."""
        ...


@runtime_checkable
class HasConjugate(Protocol):
    """A guide of a model whose global sites are conjugate to its local ones."""

    def sample_globals(self, rng_key: jax.Array, sites: Sites) -> Sites:
        """The global sites, drawn from the model given these values of the local ones."""
        ...


@runtime_checkable
class ReadsMinibatches(Protocol):
    """A loss that says of itself how it takes the rows of a minibatch."""

    linear: bool
    """True if it is linear in the log joint, so that its mean over minibatches is that of all
    rows."""
    per_datum: bool
    """True if each row has a term of its own, and latent sites may be shared by all rows."""


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


@runtime_checkable
class Diagnosable(Protocol):
    """A kernel for ``MCMC`` that says of itself what a diagnosis has to know.

    :func:`numpyro_ext.diagnostics.diagnose` and :func:`numpyro_ext.diagnostics.to_arviz` read
    nothing else of a kernel. NumPyro's own kernels do not satisfy the Protocol; their runs are
    judged as plain MCMC.
    """

    @property
    def inference_method(self) -> str:
        """``"sgmcmc"`` if the gradient is estimated and no draw is refused, ``"mcmc"`` if there is
        an accept step, ``"particles"`` if the chains are particles that move together."""
        ...

    @property
    def model(self) -> Model:
        """The model, with its minibatches."""
        ...

    @property
    def steps_per_sample(self) -> int:
        """Transitions in one draw."""
        ...

    @property
    def settings(self) -> Any:
        """The settings that the kernel has found: ``step_size``, ``variance_ratio``,
        ``kinetic_temperature`` (the least and the largest that are predicted, over T),
        ``transitions`` per independent draw and ``problems``, a sequence of sentences. None if
        they were given."""
        ...

    def gradients_per_transition(self, rows: float) -> float | None:
        """The number of minibatch gradients in a transition, where the gradient of all data counts
        as ``rows`` of them; None if the number is not known."""
        ...

    def temperature_at(self, i: Any) -> Array | None:
        """The temperature of transition ``i``, 0 while a cyclical schedule explores; None for a
        kernel without a temperature. It may be mapped over ``i``."""
        ...

    def noise_share(self, state: Any) -> float | None:
        """The largest share of the injected noise that a correction for the noise of the gradients
        takes off, at ``mcmc.last_state``; None if there is no correction."""
        ...


@runtime_checkable
class DiagnosableParticles(Diagnosable, Protocol):
    """A :class:`Diagnosable` kernel whose chains are particles that move together."""

    params: Params
    """Values of the ``numpyro.param`` sites of the model in the run."""
    forward_mode_differentiation: bool
    """True if the model is differentiated in forward mode."""


@runtime_checkable
class HasModelParams(Protocol):
    """A kernel that knows the parameters of its model, as ``param`` sites with a random start."""

    @property
    def params(self) -> Params:
        """Values of the ``param`` and ``mutable`` sites of the model in the last run."""
        ...


@runtime_checkable
class Engine(Protocol):
    """A method of inference that fits a guide to a model, as ``numpyro.infer.SVI`` is."""

    model: Model
    guide: Model

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Fit; the result has ``params``, those of the guide."""
        ...


@runtime_checkable
class Converges(Protocol):
    """An :class:`Engine` that solves equations, so that its losses say nothing about its end."""

    def convergence(self, state: Any) -> dict[str, float]:
        """``residual``, ``limit`` (0 if the residual is not compared), ``skipped`` (factors left
        out in the last step) and ``inaccurate`` (factors whose moments were not resolved); where
        rows are random, ``noise`` (the result's standard error in standard deviations)."""
        ...
