"""Pieces that more than one room needs, and the only place where NumPyro's private names enter."""

from collections.abc import Collection, Sequence
import copy
import math
from typing import Any

from jax import Array, jit, random
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import seed
from numpyro.infer import MCMC
from numpyro.infer.autoguide import (
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoSemiDAIS,
)

# Private names, as read from NumPyro 0.22.0.
from numpyro.infer.util import _without_rsample_stop_gradient as without_rsample_stop_gradient
from numpyro.primitives import Messenger
from numpyro.util import _validate_model as validate_model

from numpyro_ext._typing import Model, Params, Trace

__all__ = [
    "Implicit",
    "IntractableDensityError",
    "check_choice",
    "check_count",
    "check_nonnegative",
    "check_positive",
    "continuous_latents",
    "has_density",
    "every_row",
    "log_mean_exp",
    "mcmc_arguments",
    "normal_like",
    "refuse_mutable",
    "posterior_guide",
    "seed_plates",
    "subsampled_plates",
    "valid_plates",
    "validate_model",
    "without_rsample_stop_gradient",
]


class IntractableDensityError(ValueError):
    """A density was asked of a distribution that can only be sampled."""


class Implicit(dist.Distribution):
    r"""A draw without a density: the guide site of a generator network.

    Sampling returns ``value``, differentiable in whatever made it; ``log_prob`` raises
    :class:`IntractableDensityError`. So a loss that needs :math:`\log q` is an error, never the
    silent collapse that a ``Delta`` in the same place would be.

    It is one draw, so it cannot be drawn again: a ``sample_shape``, or a plate larger than the value,
    would repeat the same number where independent ones are meant, and raises. Inside a plate give
    ``value`` the plate's shape, from one noise vector per row.

    :param value: the draw; its last ``event_dim`` dimensions are the event.
    :param int event_dim: number of event dimensions, at least those of ``support``.
    :param support: the constraint that ``value`` satisfies.

    .. doctest::

        >>> import jax.numpy as jnp, numpyro
        >>> from numpyro import handlers
        >>> from numpyro_ext.guides import Implicit
        >>> def guide():
        ...     noise = numpyro.sample(
        ...         "noise", numpyro.distributions.Normal(), infer={"is_auxiliary": True})
        ...     numpyro.sample("w", Implicit(jnp.tanh(noise)))
        >>> trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
        >>> bool(trace["w"]["value"] == jnp.tanh(trace["noise"]["value"]))
        True
    """

    arg_constraints = {}  # noqa: RUF012 - NumPyro's own way to say that nothing is checked
    has_tractable_density = False
    pytree_data_fields = ("value", "_base_support")
    pytree_aux_fields = ("_event_dim",)

    def __init__(
        self,
        value: Array,
        *,
        event_dim: int = 0,
        support: constraints.Constraint = constraints.real,
    ) -> None:
        ndim = jnp.ndim(value)
        if not support.event_dim <= event_dim <= ndim:
            raise ValueError(
                f"event_dim is {event_dim}, value has {ndim} dimensions and the support is one of"
                f" {support.event_dim}-dimensional events; event_dim must be between"
                f" {support.event_dim} and {ndim}."
            )
        self.value = jnp.asarray(value)
        self._base_support: constraints.Constraint = support
        self._event_dim = event_dim
        shape = jnp.shape(value)
        super().__init__(shape[: ndim - event_dim], shape[ndim - event_dim :])

    @property
    def batch_shape(self) -> tuple[int, ...]:
        # Read off the value: under vmap and scan the shape noted at construction is not the present one.
        shape = jnp.shape(self.value)
        return shape[: len(shape) - self._event_dim]

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        base = self._base_support
        return constraints.independent(base, self._event_dim - base.event_dim)

    def expand(self, batch_shape: Sequence[int]) -> "Implicit":
        batch_shape = tuple(batch_shape)
        self._refuse_copies(math.prod(batch_shape) > math.prod(self.batch_shape), batch_shape)
        value = jnp.broadcast_to(self.value, batch_shape + self.event_shape)
        return Implicit(value, event_dim=self._event_dim, support=self._base_support)

    def sample(self, key: Array | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        self._refuse_copies(math.prod(sample_shape) > 1, (*sample_shape, *self.batch_shape))
        return jnp.broadcast_to(self.value, tuple(sample_shape) + jnp.shape(self.value))

    def rsample(self, key: Array | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample(key, sample_shape)

    def _refuse_copies(self, more: bool, batch_shape: tuple[int, ...]) -> None:
        if more:
            raise ValueError(
                f"an Implicit site of batch shape {self.batch_shape} is asked for batch shape"
                f" {batch_shape}, but it holds one draw and copies of it are not independent; make"
                " value of that shape, from noise of that shape (as in the plate around the site)."
            )

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        raise IntractableDensityError(
            "an Implicit site has no density, so log q cannot be computed; use an objective that only"
            " needs samples: numpyro_ext.particles.SVGD, on a guide with sample_latent."
        )


def has_density(fn: Any) -> bool:
    """Whether ``log_prob`` can be had: no :class:`Implicit`, bare or masked, expanded, ``to_event``."""
    while fn is not None:
        if not getattr(fn, "has_tractable_density", True):
            return False
        fn = getattr(fn, "base_dist", None)
    return True


class valid_plates(Messenger):
    """Refuse a plate whose ``subsample_size`` exceeds its size (NumPyro only warns, after the draw)."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        if subsample_size is not None and subsample_size > size:
            raise ValueError(
                f"plate '{msg['name']}' has subsample_size {subsample_size} but only {size} rows;"
                f" use a subsample_size between 1 and {size}."
            )


class refuse_mutable(Messenger):
    """Refuse a model with mutable state, which many particles at once would each want to update."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "mutable":
            raise ValueError(
                f"the model has the mutable site '{msg['name']}', which every particle would update in"
                " its own way; make it a numpyro.param or pass it as an argument of the model."
            )


class every_row(Messenger):
    """Give a subsampled plate all of its indices, and say so in its arguments.

    Rewriting the arguments too is what keeps NumPyro from warning that the index is longer than the
    ``subsample_size``, without a filter that would hide other warnings.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] != "plate":
            return
        size, subsample_size = msg["args"]
        if subsample_size is not None and subsample_size != size:
            msg["args"] = (size, size)
            msg["value"] = jnp.arange(size)


def subsampled_plates(trace: Trace) -> dict[str, tuple[int, int]]:
    """``{name: (size, subsample_size)}`` of the plates of a trace that take a minibatch."""
    plates = {}
    for name, site in trace.items():
        if site["type"] == "plate":
            size, subsample_size = site["args"]
            if subsample_size is not None and subsample_size < size:
                plates[name] = (size, subsample_size)
    return plates


def seed_plates(fn: Model, rng_key: Array) -> Model:
    """Seed only the minibatch draws of ``fn``, so that all particles share one minibatch."""
    return seed(fn, rng_key, hide_types=["sample", "prng_key", "control_flow"])


def continuous_latents(trace: Trace) -> dict[str, dict[str, Any]]:
    """The latent sites of a model's trace; an error if there is none or one is discrete."""
    latents = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    if not latents:
        raise ValueError(
            "the model has no latent sample site, so there is nothing to infer; give it at least one"
            " numpyro.sample without obs."
        )
    for name, site in latents.items():
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"latent site '{name}' is discrete; only continuous latents are supported here: sum it"
                " out of the model, or use numpyro.infer.DiscreteHMCGibbs."
            )
    return latents


def log_mean_exp(x: Array, axis: int = 0) -> Array:
    """``log(mean(exp(x)))`` along ``axis``."""
    return logsumexp(x, axis=axis) - jnp.log(x.shape[axis])


def normal_like(rng_key: Array, tree: Any) -> Any:
    """Standard normal noise in the shape of ``tree``, by one draw for the whole tree."""
    flat, unravel = ravel_pytree(tree)
    return unravel(random.normal(rng_key, flat.shape, flat.dtype))


def _is_concrete(value: Any) -> bool:
    return not isinstance(value, Tracer)


def check_count(name: str, value: Any, minimum: int = 1) -> None:
    """An integer of at least ``minimum``, or a ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {minimum}.")


def _check_scalar(name: str, value: Any, kind: str, low: float, strict: bool) -> None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; it must be a {kind} number.") from None
    if not (low < number if strict else low <= number) or number == float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a {kind}, finite number.")


def check_positive(name: str, value: Any) -> None:
    """A finite number above 0, or an error; a traced value passes."""
    if _is_concrete(value):
        _check_scalar(name, value, "positive", 0.0, strict=True)


def check_nonnegative(name: str, value: Any) -> None:
    """A finite number of at least 0, or an error; a traced value passes."""
    if _is_concrete(value):
        _check_scalar(name, value, "non-negative", 0.0, strict=False)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """One of ``allowed``, or a ``ValueError`` that lists them."""
    if value not in allowed:
        words = ", ".join(repr(word) for word in allowed)
        raise ValueError(f"{name} is {value!r}; it must be one of {words}.")


def mcmc_arguments(mcmc: MCMC) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments in the last ``run``."""
    state: Any = mcmc
    return state._args, state._kwargs


def posterior_guide(
    guide: Model, params: Sequence[Params], args: tuple, kwargs: dict[str, Any]
) -> tuple[Model, list[Params]]:
    """A guide whose call draws what ``sample_posterior`` draws, for all data, and its params.

    Nearly every guide is that already and comes back as it is. ``AutoLaplaceApproximation`` calls a
    point mass while it is fitted, and becomes a Normal; ``AutoSemiDAIS`` fixes the size of its
    minibatch, and gets the full one. The guide itself is not changed, except that a guide which was
    never called is set up.
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        seed(guide, 0)(*args, **kwargs)
    if isinstance(guide, AutoGuideList):
        whole: Any = copy.copy(guide)
        whole._guides, params = [], list(params)
        for part in guide:
            part, params = posterior_guide(part, params, args, kwargs)
            whole._guides.append(part)
        return whole, params
    if isinstance(guide, AutoLaplaceApproximation):
        normal: Any = copy.copy(guide)
        loc, scale_tril = f"{guide.prefix}_loc", f"{guide.prefix}_scale_tril"
        normal._get_posterior = lambda *args, **kwargs: dist.MultivariateNormal(
            numpyro.param(loc), scale_tril=numpyro.param(scale_tril), validate_args=False
        )
        factor = jit(lambda one: guide.get_transform(one).scale_tril)
        params = [{**one, scale_tril: factor(one)} for one in params]
        if any(bool(jnp.any(jnp.diag(one[scale_tril]) == 0)) for one in params):
            raise ValueError(
                "the Hessian that AutoLaplaceApproximation takes at its parameters is singular or not"
                " positive, so it has no Normal to draw from; fit it longer, or use AutoNormal."
            )
        return normal, params
    if isinstance(guide, AutoSemiDAIS):
        full: Any = copy.copy(guide)
        name, size, _ = full._local_plate
        full._local_plate = (name, size, size)
        full.local_model = every_row(full.local_model)
        return full, list(params)
    return guide, list(params)
