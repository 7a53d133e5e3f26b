"""The latent sites inside the plate of the data: integrated out, and drawn given those outside."""

import copy
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_uniform

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.density import row_log_lik
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import map_blocks
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import (
    Site,
    frames,
    latent_sites,
    plate_sizes,
    sample_sites,
    shape_trace,
)
from numpyro_ext._numpyro import site_of_log_det
from numpyro_ext._typing import Sites
from numpyro_ext.ep import integral
from numpyro_ext.ep.projection import Projection

_POINTS = 2**14
"""Places of rows at which a row is evaluated at a time, for one draw."""


def marginal(factors: Factors, x: Array, n: Array, z: Array | None = None) -> Array:
    """The log likelihood of row ``n`` at ``x`` without the local sites: discrete ones are summed
    out, and a continuous one of a single coordinate is integrated by quadrature.

    :param z: ``(local_size,)``, values of the continuous local sites, unconstrained and flat,
        of which the result is then a function too; None to integrate.
    """
    if not factors.states:
        return _in_state(factors, x, n, {}, z)
    each = jax.vmap(lambda state: _in_state(factors, x, n, state, z))(factors.states)
    return logsumexp(each)


def _in_state(factors: Factors, x: Array, n: Array, state: Sites, z: Array | None) -> Array:
    flat, unravel = ravel_pytree(factors.local)

    def at(z: Array, x: Array) -> Array:
        return factors.row(x, n, {**state, **unravel(z.reshape(flat.shape))})

    if factors.local and z is None:
        return integral.log_integral(at, x)
    return at(flat if z is None else z, x)


def num_points(factors: Factors) -> int:
    """The number of places at which :func:`marginal` evaluates a row."""
    states = len(next(iter(factors.states.values()), [0]))
    return states * (integral.NUM_NODES if factors.local_size == 1 else 1)


def points_of_row(factors: Factors) -> int:
    """About how often a row is evaluated for one draw of its local sites."""
    return 2048 if factors.local_size > 1 else 4 * num_points(factors)


class Drawn(NamedTuple):
    """A draw of all sites.

    - **sites** - the latent sites and the deterministic ones, as in a trace.
    - **log_q** - ``(N,)``, log density of the local sites of each row, given the others; None if
      there is nothing to observe, so that they are draws of their prior.
    """

    sites: dict[str, Site]
    log_q: Array | None


def on_rows_of(factors: Factors, args: tuple, kwargs: dict[str, Any]) -> Factors | None:
    """The factors of other arguments, with other rows; None if nothing is observed in a row.

    A site that was observed in the fit and is not here is a prediction, and left out.
    """
    found = factors.on(args, kwargs)
    fn = seed(factors.program.model, random.key(0))
    trace = shape_trace(substitute(fn, substitute_fn=init_to_uniform), args, kwargs)
    inside = [site for site in sample_sites(trace) if factors.plate in frames(site)]
    if not any(site["is_observed"] for site in inside):
        return None
    known = {*factors.info.latents, *factors.axes}
    predicted = [site["name"] for site in latent_sites(trace) if site["name"] not in known]
    size = plate_sizes(trace)[factors.plate][0]
    if size == factors.size and not predicted:
        return found
    found = copy.copy(found)
    found.size = size
    if predicted:
        found.program.model = block(fn, hide=predicted)
    if not is_traced((args, kwargs)):
        # Of traced arguments a row is computed in the way of the fit.
        with jax.ensure_compile_time_eval():
            found.rows_by = found.choose_rows_by()
    return found


def draw_sites(
    factors: Factors,
    x: Array,
    rng_key: Array,
    projection: Projection | None,
    args: tuple,
    kwargs: dict[str, Any],
) -> Drawn:
    """The local sites of all rows, drawn given the global ones at ``x``, and what follows.

    :param projection: what draws several continuous coordinates of a row.
    """
    key_local, key_model = random.split(rng_key)
    local, log_z = {}, None
    there = on_rows_of(factors, args, kwargs) if factors.axes else None
    if there is not None:
        local, log_z = _draw_rows(there, x, key_local, projection)
    z, states = factors.values_at(x, local)
    fn = seed(substitute(factors.program.model, data=states), key_model)
    trace = Program(fn, args, kwargs).trace(z)
    known = {*factors.info.latents, *factors.axes}
    sites = {
        name: site
        for name, site in trace.items()
        if name in known or site["type"] == "deterministic"
    }
    if log_z is None:
        return Drawn(sites, None)

    def counts(site: Site) -> bool:
        name = site["name"]
        if site["type"] != "sample":
            return True
        if not site["is_observed"]:
            return name in known
        return site_of_log_det(name, factors.axes) == name

    of_values = {name: site for name, site in trace.items() if counts(site)}
    return Drawn(sites, row_log_lik(of_values, factors.plate) - log_z)


def _draw_rows(
    factors: Factors, x: Array, rng_key: Array, projection: Projection | None
) -> tuple[Sites, Array]:
    """Unconstrained local sites of all rows, and the log likelihood of each row at x."""
    flat, unravel = ravel_pytree(factors.local)
    size = flat.size
    number = len(next(iter(factors.states.values()), [0]))

    def state(k: Array) -> Sites:
        return {name: values[k] for name, values in factors.states.items()}

    def of_row(n: Array, rng_key: Array) -> tuple[Sites, Array]:
        key_state, key_z = random.split(rng_key)

        def log_p(k: Array, z: Array) -> Array:
            return factors.row(x, n, {**state(k), **unravel(z.reshape(flat.shape))})

        def one(k: Array) -> tuple[Array, Array]:
            """Values of the continuous sites, and the log of what the state has together."""
            if size == 1:
                return integral.draw(lambda z: log_p(k, z), random.fold_in(key_z, k))
            return z, log_p(k, z)

        if size > 1:
            assert projection is not None
            z, log_z = projection.draw(lambda z: marginal(factors, x, n, z), size, key_z)
        else:
            z = flat
        each, logits = jax.vmap(one)(jnp.arange(number))
        k = random.categorical(key_state, logits)
        if size <= 1:
            log_z = logsumexp(logits)
        lost = ~jnp.isfinite(logits[k])
        local = {**unravel(jnp.where(lost, jnp.nan, each[k]).reshape(flat.shape)), **state(k)}
        return local, log_z

    keys, most = random.split(rng_key, factors.size), max(1, _POINTS // points_of_row(factors))
    values, log_z = map_blocks(lambda n: of_row(n, keys[n]), factors.size, most)
    return {name: _placed(v, factors.axes[name]) for name, v in values.items()}, log_z


def _placed(values: Array, axis: int) -> Array:
    """``(N, *row)`` values, in which ``axis`` of a row has length 1, with the rows there."""
    axis = axis % (values.ndim - 1)
    return jnp.moveaxis(jnp.squeeze(values, axis + 1), 0, axis)
