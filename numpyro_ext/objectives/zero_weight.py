r"""Draws of weight zero have no gradient, also where their log density has an infinite one.

A particle far out can have a finite value and an infinite derivative: a probability that rounds to
1, a rate that overflows. Where its weight in the bound is exactly zero, its gradient is
:math:`0 \cdot \infty`, which the chain rule makes NaN in all parameters of the guide.

:func:`drop_weightless` is the identity on a value that a density is computed from. Beside it there
are zeros to be added to what is computed: their cotangent is the weight, so that the backward pass
knows it when it comes to the value. It replaces by zero what is not finite, and only that, and only
where the weight is exactly zero. All other gradients are untouched: that of a particle which has a
weight, however small, stays infinite, and so does that of parameters of the model, which particles
share, and of latents that several data share where only one of these data has no weight.
"""

from collections.abc import Callable
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext._model.losses import change_cotangents
from numpyro_ext._model.read import latent_sites
from numpyro_ext._model.units import Layout
from numpyro_ext._typing import Trace


def drop_weightless(
    value: Array, num_zeros: int, is_weightless: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """``value``, and ``num_zeros`` zeros to be added to all that is computed from it.

    :param is_weightless: from the cotangents of these zeros to where the value has no weight, with
        a shape that broadcasts against the value's.
    """

    def drop(cts: tuple[Array, Array]) -> tuple[Array, Array]:
        ct, weights = cts
        return jnp.where(is_weightless(weights) & ~jnp.isfinite(ct), 0.0, ct), weights

    return change_cotangents((value, jnp.zeros(num_zeros, value.dtype)), drop)


def weightless_dropped(trace: Trace, layout: Layout) -> tuple[Trace, Array, Array]:
    """A guide's trace for the model to see, and the zeros that belong to it: ``()`` for the log
    density outside the unit plates, ``(*units)`` for the one of each unit.

    The value of a local site has no weight where its unit has none; the value of another site where
    none of the units has one, nor what is outside them.
    """
    seen, shared, local = dict(trace), jnp.zeros(()), jnp.zeros(layout.shape)
    num_units = local.size
    for site in latent_sites(trace):
        value = jnp.asarray(site["value"])
        if not (value.size and jnp.issubdtype(value.dtype, jnp.floating)):
            continue
        if value.shape != site["fn"].shape():  # a value that was substituted, not drawn
            continue
        if layout.is_local(site):

            def is_weightless(ct: Array, site: Any = site) -> Array:
                return layout.along(site, ct.reshape(layout.shape) == 0)

            value, zeros = drop_weightless(value, num_units, is_weightless)
        else:
            value, zeros = drop_weightless(value, num_units + 1, lambda ct: jnp.all(ct == 0))
            shared, zeros = shared + zeros[0], zeros[1:]
        local = local + zeros.reshape(layout.shape)
        seen[site["name"]] = {**site, "value": value}
    return seen, shared, local
