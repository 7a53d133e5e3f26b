"""Steps of natural gradients that stay among the natural parameters of densities."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from numpyro_ext._checks import check_rate

_MOST_HALVINGS = 20


class NaturalGradientState(NamedTuple):
    """State of :func:`natural_gradient`."""

    count: Array
    """Number of steps so far."""
    num_halvings: Array
    """Number of times that a step was halved, over all steps."""
    num_rejected: Array
    """Number of steps left out: the gradient was not finite, or no halving was in the domain."""


def natural_gradient(
    step_size: optax.ScalarOrSchedule, domain: Callable[[Any], Any] | None = None
) -> optax.GradientTransformation:
    r"""Natural-gradient descent on natural parameters, with a guard of their domain.

    The update that optax passes in is the natural gradient already, as
    :func:`numpyro_ext.expfam.straight_through_mean` makes it, and a step is

    .. math:: n \leftarrow n - \rho\, \nabla, \qquad \rho \in (0, 1].

    For a conjugate term :math:`\rho = 1` is the exact update of coordinate ascent, and a smaller
    :math:`\rho` the average of stochastic variational inference. A step to parameters outside the
    domain is halved; after 20 halvings, or along a gradient that is not finite, it is left out.

    **When it fails.** Use it without momentum, clipping or Adam, and on natural parameters only:
    :func:`optax.multi_transform` gives the other parameters to another optimiser. If
    ``num_rejected`` of the state grows, use a smaller ``step_size``.

    :param step_size: :math:`\rho`, in (0, 1], or a schedule of the number of steps.
    :param domain: ``params -> bool``, or to a tree of booleans that must all be true; in
        :func:`optax.multi_transform` the others' parameters are masked. None for no guard.

    References: Hoffman et al., *Stochastic variational inference* (JMLR 2013), equation 22.

    >>> from numpyro_ext.expfam import (
    ...     Beta, BetaNatural, straight_through_kl, straight_through_mean)
    >>> from numpyro_ext.optim import natural_gradient
    >>> prior, data = BetaNatural(9.0, 9.0), BetaNatural(6.0, 4.0)
    >>> def loss(q):
    ...     mean = straight_through_mean(Beta, q)
    ...     return straight_through_kl(Beta, q, prior, mean) - Beta.inner(data, mean)
    >>> optim = natural_gradient(1.0, Beta.in_domain)
    >>> q = BetaNatural(1.0, 1.0)
    >>> updates, state = optim.update(jax.grad(loss)(q), optim.init(q), q)
    >>> posterior = optax.apply_updates(q, updates)
    >>> print(f"{posterior.a:.1f} {posterior.b:.1f} {loss(posterior):.3f}")
    15.0 13.0 7.069
    """
    if not callable(step_size):
        check_rate("step_size", step_size)

    def init(params: Any) -> NaturalGradientState:
        zero = jnp.zeros((), jnp.int32)
        return NaturalGradientState(zero, zero, zero)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NaturalGradientState]:
        rho = jnp.asarray(step_size(state.count) if callable(step_size) else step_size, float)

        def inside(scale: Array) -> Array:
            if domain is None:
                return jnp.ones((), bool)
            new = jax.tree.map(
                lambda p, g: p - (scale * g).astype(jnp.asarray(p).dtype), params, updates
            )
            return _all_true(domain(new))

        def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            halvings, scale, _ = carry
            return halvings + 1, scale / 2, inside(scale / 2)

        finite = _all_true(jax.tree.map(jnp.isfinite, updates))
        halvings, scale, good = lax.while_loop(
            lambda carry: finite & ~carry[2] & (carry[0] < _MOST_HALVINGS),
            halve,
            (jnp.zeros((), jnp.int32), rho, inside(rho)),
        )
        good &= finite
        # Not scale times the gradient alone, which is NaN where that is not finite.
        updates = jax.tree.map(
            lambda g: jnp.where(good, -scale * g, 0).astype(jnp.asarray(g).dtype), updates
        )
        return updates, NaturalGradientState(
            state.count + 1, state.num_halvings + halvings, state.num_rejected + ~good
        )

    return optax.GradientTransformation(init, update)


def _all_true(tree: Any) -> Array:
    return jnp.all(jnp.array([jnp.all(leaf) for leaf in jax.tree.leaves(tree)]))
