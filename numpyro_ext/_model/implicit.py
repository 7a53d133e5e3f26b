"""A distribution that can be sampled but has no density, and the error that it raises."""

from collections.abc import Sequence
import math
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_ext._model.read import layers


class IntractableDensityError(ValueError):
    """The density of a distribution is required that can only be sampled."""


class Implicit(dist.Distribution):
    r"""A draw without a density: the guide site of a generator network.

    Sampling returns ``value``, differentiable in whatever made it; ``log_prob`` raises
    :class:`IntractableDensityError`, where a ``Delta`` would collapse silently. It is one draw:
    a ``sample_shape``, or a plate larger than the value, raises. Inside a plate give ``value`` the
    plate's shape, from one noise vector per row.

    :param value: the draw; its last ``event_dim`` dimensions are the event.
    :param int event_dim: number of event dimensions, at least as many as ``support`` has.
    :param support: the constraint that ``value`` satisfies.
    :param trajectory: states on the way to ``value``, which is the last of them, with a leading
        axis; ``ImplicitELBO`` takes the mean of its loss over them.

    >>> from numpyro import handlers
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
    pytree_data_fields = ("value", "trajectory", "_base_support")
    pytree_aux_fields = ("_event_dim",)

    def __init__(
        self,
        value: Array,
        *,
        event_dim: int = 0,
        support: constraints.Constraint = constraints.real,
        trajectory: Array | None = None,
    ) -> None:
        ndim = jnp.ndim(value)
        if not support.event_dim <= event_dim <= ndim:
            raise ValueError(
                f"event_dim is {event_dim}; it must be between {support.event_dim} and {ndim}."
            )
        self.value = jnp.asarray(value)
        self.trajectory = trajectory
        self._base_support: constraints.Constraint = support
        self._event_dim = event_dim
        super().__init__(self.value.shape[: ndim - event_dim], self.value.shape[ndim - event_dim :])

    @property
    def batch_shape(self) -> tuple[int, ...]:
        # Read off the value: under vmap and scan its shape is another.
        shape = jnp.shape(self.value)
        return shape[: len(shape) - self._event_dim]

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        base = self._base_support
        return constraints.independent(base, self._event_dim - base.event_dim)

    def expand(self, batch_shape: Sequence[int]) -> "Implicit":
        batch_shape = tuple(batch_shape)
        self._refuse_copies(batch_shape)
        value = jnp.broadcast_to(self.value, batch_shape + self.event_shape)
        path = self.trajectory
        if path is not None:
            missing = (1,) * (value.ndim - self.value.ndim)
            path = path.reshape(path.shape[:1] + missing + path.shape[1:])
            path = jnp.broadcast_to(path, path.shape[:1] + value.shape)
        return type(self)(
            value, event_dim=self._event_dim, support=self._base_support, trajectory=path
        )

    def sample(self, key: Array | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        self._refuse_copies((*sample_shape, *self.batch_shape))
        return jnp.broadcast_to(self.value, tuple(sample_shape) + jnp.shape(self.value))

    rsample = sample

    def _refuse_copies(self, batch_shape: tuple[int, ...]) -> None:
        if math.prod(batch_shape) > math.prod(self.batch_shape):
            raise ValueError(
                f"an Implicit site of batch shape {self.batch_shape} is asked for batch shape"
                f" {batch_shape}, but it holds one draw; make value, and its noise, of that shape."
            )

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        raise IntractableDensityError(
            "an Implicit site has no density, so log q cannot be computed; use a loss of samples,"
            " such as ImplicitELBO, or SVGD on a guide with sample_latent."
        )


class Stated(Implicit):
    """A draw with a log density that a factor beside it states, for several sites."""

    has_tractable_density = True

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return jnp.zeros(self.batch_shape)


def has_density(fn: Any) -> bool:
    """Return whether no layer of a distribution is :class:`Implicit`, so that it has a density."""
    return all(getattr(layer, "has_tractable_density", True) for layer in layers(fn))
