"""Whether the draws of a guide come with their density, read off the kinds of its sites."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import Site, base_distribution, is_delta, latent_sites, sample_sites
from numpyro_ext._typing import Params, Sites, Trace

__all__ = ["density_of"]

Rerun = Callable[[Params, Sites], Trace]
"""Trace of a guide with these parameters, and these values of its auxiliary sites."""


def density_of(rerun: Rerun, params: Params, guide_trace: Trace, model_trace: Trace) -> str:
    r"""``"exact"``, ``"bound"`` or ``"none"``: what the log densities of a guide's sites add up to.

    It follows from the program alone, never from the numbers of a draw:

    - An ``Implicit`` site has no density: ``"none"``.
    - Every latent site of the model is drawn from a distribution: ``"exact"``, or ``"bound"`` if
      the guide has auxiliary sites besides, because the sum is then the density of both.
    - Some are a ``Delta``, a function of auxiliary sites. Its density is accounted for if its
      ``log_density`` depends on anything (so the guide states a Jacobian), or if the values are the
      auxiliary ones, moved to other places or shifted (so the Jacobian is 1). Then it is
      ``"exact"`` if there are as many auxiliary coordinates as coordinates of the ``Delta`` sites,
      and ``"bound"`` if there are more. Otherwise a ``factor`` of the guide has to account for it,
      ``"bound"``, and without one, or for a ``Delta`` of no auxiliary site, it is ``"none"``.
    """
    latents = list(latent_sites(guide_trace))
    if not all(has_density(site["fn"]) for site in latents):
        return "none"
    drawn = [site for site in latents if site["name"] not in model_trace and not is_delta(site)]
    points = [site for site in latents if site["name"] in model_trace and is_delta(site)]
    if not points:
        return "bound" if drawn else "exact"

    noise, discrete = _values(drawn, discrete=False), _values(drawn, discrete=True)
    names = [site["name"] for site in points]

    def deltas(params: Params, noise: Sites, discrete: Sites) -> dict[str, tuple[Any, Any]]:
        trace = rerun(params, {**noise, **discrete})
        fns = {name: base_distribution(trace[name]["fn"]) for name in names}
        return {name: (trace[name]["value"], fn.log_density) for name, fn in fns.items()}

    sources = eval_provenance(deltas, params=_shapes(params), noise=noise, discrete=discrete)
    if not all("noise" in value for value, _ in sources.values()):
        return "none"
    supports = {name: model_trace[name]["fn"].support for name in names}
    free = sum(_size(site["fn"].support, site) for site in drawn if site["name"] in noise)
    free -= sum(_size(supports[site["name"]], site) for site in points)
    if free < 0:
        return "none"
    silent = [name for name in names if not sources[name][1]]
    accounted = not silent or any(
        _moves(
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


def _values(sites: list[Site], *, discrete: bool) -> dict[str, Any]:
    return _shapes(
        {s["name"]: s["value"] for s in sites if s["fn"].support.is_discrete is discrete}
    )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _size(support: Any, site: Site) -> int:
    """Unconstrained coordinates of a value."""
    return math.prod(biject_to(support).inverse_shape(jnp.shape(site["value"])))


def _moves(fn: Callable[..., list[Array]], params: Any, noise: Any, discrete: Any) -> bool:
    """Whether the Jacobian of ``fn`` in the noise takes each coordinate from another one of it.

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
    sources = jax.tree.leaves(
        eval_provenance(pulled_back, **arguments), is_leaf=lambda x: isinstance(x, frozenset)
    )
    if not frozenset().union(*sources) <= {"probe"}:
        return False
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), {**arguments, "probe": ()})
    found = jax.jit(pulled_back)(**{**zeros, "probe": probe})
    found = np.concatenate([np.abs(np.ravel(x)) for x in jax.tree.leaves(found)])
    found = np.sort(found[found != 0])
    return len(found) == size and np.allclose(
        found, np.sort(np.concatenate([np.ravel(x) for x in probe])), rtol=0, atol=0.2 / size
    )
