"""An order alpha that changes from step to step, and the counter that tells the loss the step."""

from collections.abc import Callable
from functools import update_wrapper
import inspect
import math
import numbers
from typing import Any

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from numpyro.primitives import mutable

from numpyro_ext._typing import Model
from numpyro_ext.objectives.base import STEP
from numpyro_ext.objectives.protocols import unwrap

Order = float | Array | Callable[[Array], Any]
"""An order: a number, a traced scalar, or a schedule ``step -> alpha``."""


def check_alpha(alpha: Any, *, finite: bool = False) -> Any:
    """``alpha`` as a float, unless it is traced or a schedule; an error if it is no order."""
    if callable(alpha) or isinstance(alpha, Tracer):
        return alpha
    try:
        if (
            isinstance(alpha, (bool, str, complex, type(None)))
            or jnp.ndim(alpha)
            or jnp.iscomplexobj(alpha)
        ):
            raise TypeError
        alpha = float(alpha)
    except (TypeError, ValueError):
        raise TypeError(
            f"alpha is {alpha!r}; it must be a real number, or a callable of the step."
        ) from None
    if math.isnan(alpha):
        raise ValueError("alpha is nan; it must be a number between -inf and inf.")
    if finite and math.isinf(alpha):
        raise ValueError(
            f"alpha is {alpha}; it must be finite here: only VRELBO and NestedVRELBO take an"
            " infinite order, and VRELBO not with gradient='dreg'."
        )
    return alpha


def refuse_count(objective: Any, order: Any, num_particles: int) -> None:
    """An error for ``VRELBO(10)``: the first argument of ``Trace_ELBO(10)`` is the number K."""
    if isinstance(order, numbers.Integral) and int(order) > 2:
        known = inspect.signature(type(objective)).parameters.get("num_particles")
        if known is not None and num_particles == known.default:
            name = type(objective).__name__
            raise ValueError(
                f"{name}({order}) is of order {order}, with the default number of particles; for"
                f" {order} particles write {name}(num_particles={order}), and for that order"
                f" {name}({order}.0)."
            )


def alpha_at(alpha: Any, step: Any, name: str = "alpha") -> Any:
    """The order of this update, from ``Draws.step``; ``name`` is that of the argument."""
    if not callable(alpha):
        return alpha
    if step is None:
        raise ValueError(
            f"{name} is a callable of the step, but the guide does not count steps; give SVI the"
            " guide count_steps(guide)."
        )
    return alpha(step)


def counts_steps(guide: Any) -> bool:
    """Return whether :func:`count_steps` wraps a guide, or what is under the handlers around it."""
    return unwrap(guide, _StepCounted) is not None


class _StepCounted:
    def __init__(self, guide: Model) -> None:
        self.fn = guide
        update_wrapper(self, guide, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        initial: Any = {"step": jnp.zeros((), jnp.int32)}
        mutable(STEP, initial)
        return self.fn(*args, **kwargs)


def count_steps(guide: Model) -> Model:
    r"""Wrap a guide so that the objectives of this package know the number of the update.

    The wrapped guide declares the mutable site ``"_objective_step"``, ``{"step": 0}`` at first;
    each ``svi.update`` with an objective of this package adds one, for any number of particles.
    An order that is a callable, ``VRELBO(lambda i: ...)``, reads it.

    ``svi.evaluate`` of NumPyro passes no mutable state, hence it sees step 0. Methods of the
    guide (``sample_posterior``, ``median``) stay on the guide that was wrapped.

    :param guide: Python callable with NumPyro primitives, an auto guide for example.
    :return: a guide with the same sites and the counter.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, optax, numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_ext.objectives import VRELBO, count_steps
        >>> def model():
        ...     numpyro.sample("z", dist.Normal(3., 2.))
        >>> guide = AutoNormal(model)
        >>> loss = VRELBO(lambda i: jnp.minimum(i / 200., 1.))  # from importance weighting to VI
        >>> svi = SVI(model, count_steps(guide), optax.adam(0.05), loss)
        >>> result = svi.run(jax.random.key(0), 300, progress_bar=False)
        >>> int(result.state.mutable_state["_objective_step"]["step"])
        300
    """
    if not callable(guide):
        raise TypeError(f"guide is {guide!r}; count_steps wraps a callable guide.")
    return _StepCounted(guide)
