"""What a fit of expectation propagation holds: its state, how it goes, the result of a run."""

from collections import namedtuple
from collections.abc import Sequence
from typing import NamedTuple

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext.ep.normal import Moments, Site, variances

__all__ = ["EPRunResult", "EPState", "Report", "limit_of", "next_state", "prior_of", "with_q"]

EPRunResult = namedtuple("EPRunResult", ["params", "state", "losses"])
"""
A :func:`~collections.namedtuple` with these entries, those of ``SVIRunResult``:

 - **params** - the parameters of the engine's guide.
 - **state** - the last :data:`EPState`.
 - **losses** - the loss of each step that was taken.
"""


class Report(NamedTuple):
    """How a fit goes. Counts are over all steps, those of the last one come first.

    - **residual** - the change of q by one full undamped sweep: the largest over the coordinates of
      the change of the mean in standard deviations and of the relative change of the variance; inf
      before the first sweep and where the undamped q is improper.
    - **skipped** - factors that were left as they were in the last step.
    - **converged** - whether the residual is below ``tol``, or what rounding leaves of it, and no
      factor was skipped.
    - **num_improper** - factors left out because their cavity was improper; those of the prior are
      counted once there was a step without, because what makes q proper has a flat cavity until the
      other factors have spoken.
    - **num_skipped** - factors left out because the moments were not finite, not positive definite,
      or not reached by the nodes.
    - **num_low_ess** - factors left out because the importance weights were uneven.
    - **num_inaccurate** - factors that the nodes of the quadrature do not resolve.
    - **num_halvings** - how many times a step was halved so that q stays a distribution.
    - **visited** - factors visited in the last step.
    - **noise** - of the last run of an engine with random rows: the largest standard error of the
      result, in standard deviations for the mean and relative for a standard deviation; NaN
      elsewhere.
    """

    residual: Array
    skipped: Array
    converged: Array
    num_improper: Array
    num_skipped: Array
    num_low_ess: Array
    num_inaccurate: Array
    num_halvings: Array
    visited: Array
    noise: Array


EPState = namedtuple(
    "EPState",
    [
        "i",
        "shift",
        "precision",
        "site_shift",
        "site_precision",
        "prior_shift",
        "prior_precision",
        "report",
        "log_evidence",
        "damping",
        "table",
        "rng_key",
    ],
)
"""
A :func:`~collections.namedtuple` with these entries:

 - **i** - number of steps so far.
 - **shift, precision** - natural parameters of q in the flat order: ``(D,)`` and ``(D, D)``, or
   ``(D,)`` for the diagonal family; ``shift = precision @ mean``.
 - **site_shift, site_precision** - those of the sites, a tuple with an entry for each group of
   factors, the rows of the data first: ``(n, r)`` and ``(n, r, r)`` in the r coordinates
   ``basis @ x`` of each factor, or ``(n, D)`` for the diagonal family.
 - **prior_shift, prior_precision** - those of the terms of the prior that are normal, for the
   arguments of the last call.
 - **report** - a :class:`Report`.
 - **log_evidence** - the estimate that went with the last step.
 - **damping** - the d of the next step.
 - **table** - the factors: ``groups``, each with the ``index`` of its factors and their ``basis``
   ``(n, r, D)``, and the constant of the prior.
 - **rng_key** - random number generator seed of the next steps.
"""


def prior_of(state: EPState) -> Site:
    return Site(state.prior_shift, state.prior_precision)


def with_q(state: EPState, total: Site, sites: Sequence[Site]) -> EPState:
    """The state with another q and the sites that it is made of."""
    return state._replace(
        shift=total.shift,
        precision=total.precision,
        site_shift=tuple(site.shift for site in sites),
        site_precision=tuple(site.precision for site in sites),
    )


def next_state(
    state: EPState,
    total: Site,
    sites: Sequence[Site],
    report: Report,
    log_z: Array,
    rng_key: Array,
    d: Array | None = None,
) -> EPState:
    """The state after a step; ``d`` is its damping, None for that of the last."""
    return with_q(state, total, sites)._replace(
        i=state.i + 1,
        report=report,
        log_evidence=log_z,
        damping=state.damping if d is None else jnp.asarray(d, state.damping.dtype),
        rng_key=rng_key,
    )


def limit_of(tol: float, q: Moments) -> Array:
    """The residual below which a fit has converged: what rounding leaves of it is more.

    A mean of M standard deviations from 0 is a number to half of eps M of them.
    """
    if tol == 0:
        return jnp.zeros(())
    sds = jnp.max(jnp.abs(q.mean) / jnp.sqrt(variances(q)))
    least = 0.0 if q.mean.dtype == np.float64 else 3e-5
    return jnp.maximum(jnp.maximum(tol, least), 0.5 * jnp.finfo(q.mean.dtype).eps * sds)
