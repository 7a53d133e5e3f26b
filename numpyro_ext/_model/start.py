"""Starts of chains, particles and guides, and values of a model's ``param`` sites."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import biject_to
from numpyro.handlers import block, infer_config, seed, substitute
from numpyro.infer import init_to_median, init_to_uniform
from numpyro.infer.util import initialize_model

from numpyro_ext._model.arguments import indexed
from numpyro_ext._model.checks import check_rows
from numpyro_ext._model.circles import on_circles
from numpyro_ext._model.enumeration import parallel
from numpyro_ext._model.handlers import given_rows, on_first_rows
from numpyro_ext._model.operations import in_either_mode, run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, trace_of, values_of
from numpyro_ext._typing import Model, Params, Sites, Trace

_HALF_WIDTHS, _TRIES = 2.0 / 4.0 ** np.arange(8), 4
_PRIOR_DRAWS = 100


def draw_params(
    rng_key: Array,
    model: Model,
    info: ModelInfo,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    init_strategy: Callable[..., Any] = init_to_uniform,
) -> Params:
    """Initial values of the model's ``param`` and ``mutable`` sites, in one compiled call."""
    if not (info.params or info.mutable):
        return {}

    def draw(rng_key: Array) -> Params:
        fn = substitute(seed(on_first_rows(model), rng_key), substitute_fn=init_strategy)
        return values_of(trace_of(fn, args, kwargs), "param", "mutable")

    return run_once(draw, rng_key)


def params_in_scope(model: Model, args: tuple, kwargs: dict[str, Any]) -> Params:
    """The current values of the model's ``param`` sites, for a guide that runs its model. The
    handlers around the call see no other site of this run."""
    key: Any = numpyro.prng_key()
    with block(hide_fn=lambda site: site["type"] != "param"):
        fn = seed(on_first_rows(model), random.key(0) if key is None else key)
        trace = trace_of(fn, args, kwargs)
    return values_of(trace, "param")


def draw_start(
    rng_key: Array,
    model: Model,
    info: ModelInfo,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    init_strategy: Callable[..., Any] = init_to_uniform,
    forward_mode: bool = False,
    validate_grad: bool = False,
) -> tuple[Sites, Array, Params]:
    """
    Find the starts of chains or particles in one compiled call: ``(z, potential, params)``.

    :param rng_key: one key, or an array of keys for as many starts along a leading axis.
    :return: unconstrained sites in the flat order, their potentials (not finite where no start was
        found), and the values of ``param`` and ``mutable`` sites, all as by ``initialize_model``.
    """

    def draw(forward: bool, rng_key: Array) -> tuple[Sites, Array, Params]:
        fn = on_circles(on_first_rows(model), info)
        initialised = initialize_model(
            rng_key,
            infer_config(fn, parallel) if info.summed else fn,
            init_strategy=init_strategy,
            dynamic_args=True,
            model_args=indexed(args),
            model_kwargs=indexed(kwargs),
            forward_mode_differentiation=forward,
            validate_grad=validate_grad,
        )
        start = initialised.param_info
        z = {name: jnp.asarray(x, jnp.result_type(x, float)) for name, x in start.z.items()}
        potential = start.potential_energy
        for grad in start.z_grad.values() if validate_grad else ():
            finite = jnp.isfinite(grad).reshape(*potential.shape, -1).all(-1)
            potential = jnp.where(finite, potential, jnp.nan)
        return z, potential, values_of(initialised.model_trace, "param", "mutable")

    z, potential, params = in_either_mode(
        lambda forward: run_once(partial(draw, forward), rng_key), forward_mode
    )
    return info.in_order(z), potential, params


def start_near_median(
    rng_key: Array, model: Model, potential: Potential
) -> tuple[Sites, Array, Sites]:
    """Of 64 points within 2 to 0.0001 of the prior's median and of 0, the one of lowest potential
    on first rows, with the potential and its gradient, which may not be finite."""
    info, rows = potential.info, potential.first_rows()

    def find(rng_key: Array) -> tuple[Array, Array, Array]:
        key_median, key_moves = random.split(random.fold_in(rng_key, 0))
        median = _medians(key_median, model, potential)[0]
        moves = random.uniform(key_moves, (_TRIES, info.size), median.dtype, -1, 1)
        widths = jnp.asarray(_HALF_WIDTHS, median.dtype)
        around = (widths[:, None, None] * moves).reshape(-1, info.size)
        points = jnp.concatenate([median + around, around])

        values, grads = lax.map(lambda x: potential.value_and_grad_flat(x, rows), points)
        finite = jnp.isfinite(values) & jnp.all(jnp.isfinite(grads), 1)
        best = jnp.argmin(jnp.where(finite, values, jnp.inf))
        value = jnp.where(finite[best], values[best], jnp.nan)
        return points[best], value, grads[best]

    x, value, grad = run_once(find, rng_key)
    return info.unravel(x), value, info.unravel(grad)


def prior_center(rng_key: Array, model: Model, potential: Potential) -> tuple[Array, Array]:
    """The prior's median and standard deviations, ``(n,)``, of each site given the sites before."""

    def draws_of(site: dict[str, Any], key: Array) -> Array:
        try:
            return _draws(site["fn"], key)
        except NotImplementedError:  # an improper prior
            z = biject_to(site["fn"].support).inv(site["value"])
            return jnp.zeros((_PRIOR_DRAWS, *jnp.shape(z)))

    def find(rng_key: Array) -> tuple[Array, Array]:
        key_median, key_spread = random.split(random.fold_in(rng_key, 0))
        median, trace = _medians(key_median, model, potential)
        info = potential.info
        draws = {n: draws_of(trace[n], key_spread) for n in info.latents}
        low, _, high = _quartiles(jax.vmap(info.ravel)(draws))
        sds = (high - low) / 1.349  # of a normal, the standard deviation
        return median, jnp.where(jnp.isfinite(sds) & (sds > 0), sds, 1)

    return run_once(find, rng_key)


def _medians(rng_key: Array, model: Model, potential: Potential) -> tuple[Array, Trace]:
    """The flat median of the prior, and the trace there."""
    fn = on_circles(seed(on_first_rows(model), rng_key), potential.info)
    trace = trace_of(substitute(fn, substitute_fn=_to_median), *potential.arguments)
    latents = potential.info.latents
    z = {n: biject_to(trace[n]["fn"].support).inv(trace[n]["value"]) for n in latents}
    return potential.info.ravel(z), trace


def _to_median(site: dict[str, Any]) -> Array | None:
    """The median of draws of a latent site given the sites before it, or a mean near to it."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    if site["value"] is not None:  # by a ``substitute`` of the user, a start and without a key
        value: Any = site["value"]
        return value
    fn, shape = site["fn"], site["kwargs"].get("sample_shape", ())
    if fn.support.is_discrete:  # any of its draws, as it is summed out
        return None
    transform = biject_to(fn.support)
    try:
        low, median, high = _quartiles(_draws(fn, site["kwargs"]["rng_key"]))
        mean = transform.inv(jnp.broadcast_to(fn.mean, shape + fn.batch_shape + fn.event_shape))
        near = jnp.abs(mean - median) < (high - low) / 4
        return transform(jnp.where(near, mean, median))
    except NotImplementedError:  # an improper prior, or one without a mean
        value = init_to_median(site, num_samples=_PRIOR_DRAWS)
        return value


def _draws(fn: Any, rng_key: Array) -> Array:
    """``(100, ...)`` of a distribution, in unconstrained space."""
    return biject_to(fn.support).inv(fn(rng_key=rng_key, sample_shape=(_PRIOR_DRAWS,)))


def _quartiles(draws: Array) -> Array:
    """``(3, ...)``, as of ``jnp.quantile``, which is a much larger program."""
    ordered = jnp.sort(draws, axis=0)  # what is NaN comes last
    places = [divmod(share * (len(draws) - 1), 1) for share in (0.25, 0.5, 0.75)]
    values = [(1 - s) * ordered[int(k)] + s * ordered[int(k) + 1] for k, s in places]
    return jnp.where(jnp.isnan(ordered[-1]), jnp.nan, jnp.stack(values))


def guide_start(
    guide: Any, info: ModelInfo, args: tuple, kwargs: dict[str, Any]
) -> tuple[Array, Sites]:
    """The start that NumPyro would find for a ``ContinuousGuide``, with its key."""
    rng_key: Any = numpyro.prng_key()
    model, start = guide.model, guide.init_loc_fn
    # Without the block the model's own sites would be recorded in the guide's trace.
    with block():
        z, potential, _ = draw_start(
            rng_key, model, info, args, kwargs, init_strategy=start, validate_grad=True
        )
    if isinstance(potential, Tracer) or bool(np.isfinite(potential)):
        return rng_key, z
    check_rows(given_rows(model, info.given), args, kwargs, guide.init_loc_fn)
    by_modes = "init_from" if hasattr(guide, "init_from") else "init_loc_fn"
    raise ValueError(
        f"no point that init_loc_fn of the {type(guide).__name__} draws has a finite density and"
        f" gradient; give {by_modes}=find_modes(model, *args), of numpyro_ext.optim."
    )
