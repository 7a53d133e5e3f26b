"""What a guide with local inference says of itself: did it converge, did the mixture collapse."""

from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._typing import Params
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._rules import Row, equally_spaced

__all__ = ["local_rows"]

UNCONVERGED = 0.01
"""Share of the data whose local inference may stop early."""
COLLAPSED = 0.99
"""Share of the data in one state above which there is no mixture left."""
DRAWS = 50


def local_rows(fit: Fit, tree: Any) -> list[Row]:
    """Rows of a guide with a deterministic site ``..._converged``; none of other guides."""
    assert fit.guide is not None
    seeded: Any = seed(fit.guide, random.key(0))
    programs = shape_trace(substitute(seeded, data=fit.params[0]), fit.args, fit.kwargs)
    reports = [
        name
        for name, site in programs.items()
        if site["type"] == "deterministic" and name.endswith("_converged")
    ]
    if not reports:
        return []

    @jax.jit
    def share(params: Params) -> Array:
        trace = trace_of(substitute(seeded, data=params), fit.args, fit.kwargs)
        return 1 - jnp.mean(jnp.stack([jnp.mean(trace[name]["value"]) for name in reports]))

    worst = max(float(share(params)) for params in fit.params)
    ok = worst <= UNCONVERGED
    verdict = "message passing came to rest for every datum."
    if worst:
        verdict = "message passing came to rest for nearly every datum."
    if not ok:
        verdict = "message passing was cut; raise max_iter of the rule, or take one in closed form."
    rows = [Row("local inference not converged", worst, None, f"{UNCONVERGED}", ok, verdict)]
    discrete = [s["name"] for s in latent_sites(programs) if _has_choice(s["fn"])]
    return rows + [_collapse_row(name, np.asarray(tree["posterior"][name])) for name in discrete]


def _has_choice(fn: Any) -> bool:
    """Whether it is discrete and has more than one state."""
    support: Any = fn.support
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    return support.is_discrete and getattr(support, "upper_bound", 1) != 0


def _collapse_row(name: str, z: np.ndarray) -> Row:
    """The largest share of one state, in the restart where it is largest."""
    shares = []
    for chain in z:
        some = chain[equally_spaced(len(chain), DRAWS)]
        states = some.reshape(some.shape[0] * some.shape[1], -1)
        _, counts = np.unique(states, axis=0, return_counts=True)
        shares.append(float(counts.max() / counts.sum()))
    value = max(shares)
    ok = value <= COLLAPSED
    verdict = "the data are in several states."
    if not ok:
        verdict = (
            "all data are in one state, so the mixture has collapsed; start from another"
            " init_natural or key, or take a plain normal latent."
        )
    return Row(f"largest share of '{name}'", value, None, f"{COLLAPSED}", ok, verdict)
