"""Whether the local inference of a structured guide is right, as the guide itself judges it."""

from jax import random

from numpyro_ext.diagnostics.comparison import SD
from numpyro_ext.diagnostics.context import FitContext
from numpyro_ext.diagnostics.limits import NARROW
from numpyro_ext.diagnostics.table import Row


def local_inference(context: FitContext) -> list[Row]:
    """The lines of a guide with ``judge_local`` and ``narrowest_global``; none of other guides. A
    global site that is narrower than after a step of Gibbs sampling is too narrow."""
    fit, guide, draws = context.fit, context.obj.guide, context.draws
    if not hasattr(guide, "judge_local"):
        return []
    key_prior, key_step = random.split(random.fold_in(context.rng_key, 1))
    fitted = fit.model, fit.params, draws, fit.args, fit.kwargs
    judgements = guide.judge_local(key_prior, *fitted)
    rows = [Row(x.quantity, x.value, None, x.limit, x.ok, x.verdict) for x in judgements]
    if (narrowest := guide.narrowest_global(key_step, draws)) is None:
        return rows
    ratio, name = narrowest
    if ratio >= NARROW:
        return rows
    verdict = (
        f"the guide draws '{name}' independently of local sites, so it is narrower than after a"
        " step of Gibbs sampling, and the posterior is wider still; take"
        " guide.sample_globals of its local draws, which is nearer, or NUTS."
    )
    return [*rows, Row(SD, ratio, None, f"> {NARROW}", False, verdict, of_draws=True)]
