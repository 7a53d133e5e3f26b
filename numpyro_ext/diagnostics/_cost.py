"""What a draw of a chain costs, in gradients of the model and in passes over its data."""

from typing import Any

from numpyro.infer import HMC, MCMC, BarkerMH

from numpyro_ext._model.handlers import every_row, valid_plates
from numpyro_ext._model.read import is_data
from numpyro_ext._typing import Model
from numpyro_ext.diagnostics._evaluate import count_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._memo import remember
from numpyro_ext.diagnostics.full_data import shapes_of

__all__ = ["cost_of", "rows_of"]


def cost_of(mcmc: MCMC, fit: Fit) -> dict[str, float]:
    """Facts of a run: what is known of it before its extra fields are looked at.

    - ``transitions_per_draw``; ``gradients_per_draw`` where a transition takes a known number of
      gradients, on its minibatch where there is one;
    - ``takes_leapfrogs`` for ``HMC`` and ``NUTS``, whose number of gradients is their
      ``num_steps``;
    - ``batch_rows`` and ``rows``, log likelihood terms in a gradient and in the data, where the
      model has a minibatch.
    """
    kernel: Any = mcmc.sampler
    transitions = getattr(kernel, "steps_per_sample", 1) * mcmc.thinning
    facts: dict[str, float] = {"transitions_per_draw": transitions}
    if fit.plates:
        memo = {} if fit.memo is None else fit.memo
        model = kernel.model
        counts = remember(memo, "rows", lambda: rows_of(model, fit.args, fit.kwargs))
        facts["batch_rows"], facts["rows"] = counts
    rows = facts["rows"] / facts["batch_rows"] if facts.get("batch_rows") else 1.0
    cost: Any = getattr(kernel, "gradients_per_transition", lambda rows: None)
    each = cost(rows)
    if each is not None:
        facts["gradients_per_draw"] = transitions * each
    elif isinstance(kernel, BarkerMH):
        facts["gradients_per_draw"] = transitions
    elif isinstance(kernel, HMC):
        facts["takes_leapfrogs"] = 1
    return facts


def rows_of(model: Model, args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Log likelihood terms of a minibatch, and of all data."""
    traces = (shapes_of(reader(model), args, kwargs) for reader in (valid_plates, every_row))
    batch, rows = (sum(count_of(x) for x in trace.values() if is_data(x)) for trace in traces)
    return batch, rows
