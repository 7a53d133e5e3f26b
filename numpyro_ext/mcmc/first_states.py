"""Where chains begin: at values that are given, drawn, or drawn at the modes."""

from functools import partial
from typing import Any

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
from numpyro.util import is_prng_key

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.operations import quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.start import draw_start
from numpyro_ext._typing import Sites
from numpyro_ext.mcmc.sharding import spread_arrays

__all__ = ["first_states"]


def first_states(
    kernel: Any,
    potential: Potential,
    rng_key: Array,
    init_params: Sites | None,
    near: Modes | None,
) -> tuple[Any, bool]:
    """
    The first state of one chain, or of several, and whether it is traced; an error names the site
    where the potential or its gradient is not finite.

    Starts that were drawn, and are not finite for some chain, are drawn again: nearer to a mode, or
    with the gradient looked at.

    :param kernel: a :class:`ModelKernel`; it makes a state by ``start``.
    :param init_params: unconstrained sites, with a leading axis if there are several chains.
    :param near: the modes to draw at. Each has its share of the chains that start together; a
        single one starts at the heaviest.
    """
    info, single = potential.info, is_prng_key(rng_key)
    spread, whole = spread_arrays(*potential.arguments)

    # Compiled for one run.
    options = None if isinstance(rng_key, Tracer) else quick_options()

    @partial(jax.jit, static_argnames="validate_grad", compiler_options=options)
    def begin(
        rng_key: Array, z: Sites | None, spread: dict[int, Array], scale: float, validate_grad: bool
    ) -> tuple[Any, Any, Array]:
        args, kwargs = whole(spread)
        split = partial(random.split, num=4)
        keys = split(rng_key) if single else jnp.swapaxes(jax.vmap(split)(rng_key), 0, 1)
        rng_key, key_model, key_plates, key_start = keys
        found = None
        if z is None and near is not None:
            # From the normal approximation, so that R-hat compares chains that began apart.
            def draw(key: Array, which: Array, modes: Modes = near) -> Sites:
                return info.unravel(modes.sample_at(key, which, scale))

            which = jnp.asarray(near.apportion(1 if single else len(rng_key)))
            z = draw(key_model, which[0]) if single else jax.vmap(draw)(key_model, which)
        elif z is None:
            z, found, _ = draw_start(
                key_model,
                kernel.model,
                info,
                args,
                kwargs,
                init_strategy=kernel.init_strategy,
                forward_mode=kernel.forward_mode_differentiation,
                validate_grad=validate_grad,
            )

        start = partial(kernel.start, kernel.potential(args, kwargs))
        mapped: Any = start if single else jax.vmap(start)
        state, idx, grad = mapped(rng_key, key_plates, key_start, z)
        values = jax.tree.leaves((found, state.potential_energy, grad))
        finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in values])
        return state, (found, idx, grad), jnp.all(finite)

    tries = [(1.0, False)]
    if near is not None:
        tries += [(0.5, False), (0.1, False)]
    elif init_params is None:
        tries += [(1.0, True)]
    refused: list[Any] = []
    for how in tries:
        state, (found, idx, grad), finite = begin(rng_key, init_params, spread, *how)
        traced = is_traced((state, finite))
        if traced or finite:
            break
        refused.append((state, found, idx, grad))
    else:
        _refuse(potential, *refused[0])
    if not traced:
        first = state, grad
        kernel.check_state(*(jax.tree.map(lambda x: x[None], first) if single else first))
    return state, traced


def _refuse(potential: Potential, state: Any, found: Array | None, idx: Any, grad: Any) -> None:
    if found is not None:  # the search looks at the first rows
        rows = {
            name: jnp.broadcast_to(jnp.arange(size), (*jnp.shape(found), size))
            for name, (_, size) in potential.plates.items()
        }
        potential.check_start(state.z, rows, found)
    potential.check_start(state.z, idx, state.potential_energy, grad)
