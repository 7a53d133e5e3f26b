"""The density of a guide: what those of its sites add up to, and its log weights."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.density import log_prob, row_log_prob, scaled
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import (
    Site,
    base_distribution,
    is_delta,
    latent_sites,
    sample_sites,
)
from numpyro_ext._model.units import Layout
from numpyro_ext._typing import Params, Sites, Trace

__all__ = ["coordinates", "density_of", "log_weight", "reference_of", "total_of", "total_parts"]
__all__ += ["union"]

Reference = tuple[dict[str, Array], dict[str, Array]]
"""Log probabilities of the sites of the model and of the guide at one draw, row by row."""

Rerun = Callable[[Params, Sites], Trace]
"""Trace of a guide with these parameters, and these values of its auxiliary sites."""


def density_of(rerun: Rerun, params: Params, guide_trace: Trace, model_trace: Trace) -> str:
    r"""``"exact"``, ``"bound"`` or ``"none"``: the sum of the log densities of a guide's sites is
    the density of its draws, that of the draws and of auxiliary variables, or neither.

    It follows from the program alone, never from the numbers of a draw:

    - An ``Implicit`` site has no density: ``"none"``.
    - Every latent site of the model is drawn from a distribution: ``"exact"``, or ``"bound"`` if
      the guide has auxiliary sites besides, because the sum is then the density of both.
    - Some are a ``Delta``, a function of auxiliary sites. Its density is accounted for if its
      ``log_density`` depends on anything or is not 0 (so the guide states a Jacobian), or if the
      values are the auxiliary ones, moved to other places or shifted (so the Jacobian is 1). Then
      it is ``"exact"`` if there are as many auxiliary coordinates as coordinates of the ``Delta``
      sites, and ``"bound"`` if there are more. Otherwise a ``factor`` of the guide has to account
      for it, ``"bound"``, and without one, or for a ``Delta`` of no auxiliary site, it is
      ``"none"``.
    """
    latents = list(latent_sites(guide_trace))
    if not all(has_density(site["fn"]) for site in latents):
        return "none"
    drawn = [site for site in latents if site["name"] not in model_trace and not is_delta(site)]
    points = [site for site in latents if site["name"] in model_trace and is_delta(site)]
    if not points:
        return "bound" if drawn else "exact"

    noise, discrete = _values_of(drawn, discrete=False), _values_of(drawn, discrete=True)
    names = [site["name"] for site in points]

    def deltas(params: Params, noise: Sites, discrete: Sites) -> dict[str, tuple[Any, Any]]:
        trace = rerun(params, {**noise, **discrete})
        fns = {name: base_distribution(trace[name]["fn"]) for name in names}
        return {name: (trace[name]["value"], fn.log_density) for name, fn in fns.items()}

    sources = eval_provenance(deltas, params=_shapes(params), noise=noise, discrete=discrete)
    if not all("noise" in value for value, _ in sources.values()):
        return "none"
    supports = {name: model_trace[name]["fn"].support for name in names}
    free = sum(coordinates(site["fn"].support, site) for site in drawn if site["name"] in noise)
    free -= sum(coordinates(supports[site["name"]], site) for site in points)
    if free < 0:
        return "none"
    silent = [name for name in names if not sources[name][1]]
    if silent:  # a Jacobian that is the same everywhere is a number in the program
        stated = jax.jit(lambda *args: {name: deltas(*args)[name][1] for name in silent})
        found = stated(*_zeros((_shapes(params), noise, discrete)))
        silent = [name for name in silent if not np.any(found[name])]
    accounted = not silent or any(
        _only_moves(
            lambda *args, inverse=inverse: [
                inverse(biject_to(supports[name]), deltas(*args)[name][0]) for name in silent
            ],
            params,
            noise,
            discrete,
        )
        for inverse in (
            lambda transform, value: value,
            lambda transform, value: transform.inv(value),
        )
    )
    if accounted:
        return "bound" if free else "exact"
    has_factor = any(site["is_observed"] for site in sample_sites(guide_trace))
    return "bound" if has_factor else "none"


def _values_of(sites: list[Site], *, discrete: bool) -> dict[str, Any]:
    return _shapes(
        {s["name"]: s["value"] for s in sites if s["fn"].support.is_discrete is discrete}
    )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def coordinates(support: Any, site: Site) -> int:
    """Unconstrained coordinates of a value."""
    return math.prod(biject_to(support).inverse_shape(jnp.shape(site["value"])))


def _only_moves(fn: Callable[..., list[Array]], params: Any, noise: Any, discrete: Any) -> bool:
    """True if the Jacobian of ``fn`` in the noise takes each coordinate from another one of it.

    The product of a vector of different numbers with the Jacobian then has just these numbers, and
    depends on nothing else.
    """
    outputs = jax.eval_shape(fn, _shapes(params), noise, discrete)
    sizes = [math.prod(x.shape) for x in outputs]
    size = sum(sizes)
    # Exact in float32 up to 2^23 coordinates.
    probe = np.split(1.0 + np.arange(size) / size, np.cumsum(sizes)[:-1])
    probe = [jnp.asarray(x.reshape(y.shape), y.dtype) for x, y in zip(probe, outputs, strict=True)]

    def pulled_back(params: Any, noise: Any, discrete: Any, probe: list[Array]) -> Any:
        return jax.vjp(lambda noise: fn(params, noise, discrete), noise)[1](probe)[0]

    arguments = {"params": _shapes(params), "noise": noise, "discrete": discrete, "probe": probe}
    if not union(eval_provenance(pulled_back, **arguments)) <= {"probe"}:
        return False
    found = jax.jit(pulled_back)(**{**_zeros({**arguments, "probe": ()}), "probe": probe})
    found = np.concatenate([np.abs(np.ravel(x)) for x in jax.tree.leaves(found)])
    found = np.sort(found[found != 0])
    return len(found) == size and np.allclose(
        found, np.sort(np.concatenate([np.ravel(x) for x in probe])), rtol=0, atol=0.2 / size
    )


def _sum(x: Array) -> Array:
    """The sum in blocks, whose rounding error does not grow with the number of terms."""
    size = math.isqrt(x.size)
    if size < 100:
        return jnp.sum(x)
    blocks = jnp.pad(jnp.ravel(x), (0, -x.size % size)).reshape(-1, size)
    # Without the barrier both sums may be compiled to one.
    return jnp.sum(lax.optimization_barrier(jnp.sum(blocks, 1)))


def reference_of(model_trace: Trace, guide_trace: Trace, units: Layout | None) -> Reference:
    """What :func:`log_weight` takes off every row, and :func:`total_of` adds again."""

    def at(trace: Trace) -> dict[str, Array]:
        found = {}
        for site in sample_sites(trace):
            x = log_prob(site) if units else scaled(site, row_log_prob(site))
            found[site["name"]] = jnp.where(jnp.isfinite(x), x, 0.0)
        return found

    return at(model_trace), at(guide_trace)


def log_weight(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Array:
    r"""``(*units)`` values of :math:`\log p - \log q` minus that of the reference.

    The rows are compared before they are added up. Of the sum over half a million of them single
    precision knows no more than 0.06, and rounding on the way there makes it worse.
    """

    def part(trace: Trace, at: dict[str, Array]) -> Array:
        sites = list(sample_sites(trace))
        if units is not None:
            return units.sum_sites(
                sites, local=True, log_prob=lambda site: log_prob(site) - at[site["name"]]
            )
        rows = (scaled(site, row_log_prob(site)) - at[site["name"]] for site in sites)
        return sum(map(_sum, rows), jnp.zeros(()))

    of_model, of_guide = reference
    return part(model_trace, of_model) - part(guide_trace, of_guide)


def total_parts(
    model_trace: Trace, guide_trace: Trace, units: Layout | None, reference: Reference
) -> Reference:
    """The terms of the log weight of a reference, for :func:`total_of`."""
    if units is None:
        return reference

    def part(trace: Trace, at: dict[str, Array]) -> dict[str, Array]:
        sites = sample_sites(trace)
        return {"": units.sum_sites(sites, local=True, log_prob=lambda site: at[site["name"]])}

    return part(model_trace, reference[0]), part(guide_trace, reference[1])


def total_of(parts: Any, units: Layout | None) -> np.ndarray:
    """``(*units)`` log weights of the reference, in double precision."""

    def add(terms: dict[str, np.ndarray]) -> Any:
        wide = (np.asarray(x, np.float64) for x in terms.values())
        return sum(wide if units else map(np.sum, wide))

    return add(parts[0]) - add(parts[1])


def union(sources: Any) -> frozenset[str]:
    """All that any array of a tree depends on, by ``eval_provenance``."""
    leaves = jax.tree.leaves(sources, is_leaf=lambda x: isinstance(x, frozenset))
    return frozenset[str]().union(*leaves)
