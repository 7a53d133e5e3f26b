"""Facts about a run of MCMC: its draws and statistics, its kernel, and the price of a draw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import HMC, MCMC, BarkerMH

from numpyro_ext._model.handlers import every_row, valid_plates
from numpyro_ext._numpyro import max_tree_depth, mcmc_arguments
from numpyro_ext._typing import Diagnosable, Model
from numpyro_ext.diagnostics._evaluate import count_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.full_data import shapes_of

__all__ = ["chains_of", "cost_of", "facts_of", "mcmc_stats", "rows_of"]

STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}
"""NumPyro's names of sampler statistics, and ArviZ's."""


def chains_of(fit: Fit) -> dict[str, np.ndarray]:
    """Draws that exist already, by chain: host arrays ``(chain, draw, *site)``."""
    draws = jax.device_get(fit.draws[0])
    length = len(next(iter(draws.values()))) // fit.num_chains
    shape = (fit.num_chains, length)
    return {name: np.reshape(x, (*shape, *x.shape[1:])) for name, x in draws.items()}


def mcmc_stats(mcmc: MCMC, fit: Fit) -> dict[str, Any]:
    """The extra fields that are arrays, under ArviZ's names."""
    stats = {}
    for field, value in jax.device_get(mcmc.get_extra_fields(group_by_chain=True)).items():
        if not isinstance(value, np.ndarray):
            continue
        name = STATS.get(field, field)
        if field == "potential_energy":
            value = -value
            if fit.plates:
                name = "lp_minibatch"
        stats[name] = value
        if field == "num_steps":
            stats["tree_depth"] = np.log2(value).astype(int) + 1
            limit = max_tree_depth(mcmc.sampler)
            if limit is not None:
                stats["reached_max_tree_depth"] = stats["tree_depth"] >= limit
    return stats


def facts_of(mcmc: MCMC, fit: Fit) -> dict[str, Any]:
    """The numbers with which a run has to be compared, as attributes."""
    kernel, state = mcmc.sampler, mcmc.last_state
    facts: dict[str, Any] = {**cost_of(mcmc, fit)}
    z = getattr(state, "z", ())
    facts["num_latents"] = sum(np.size(x) for x in jax.tree.leaves(z)) // mcmc.num_chains
    if (scale := getattr(state, "step_scale", None)) is not None:
        facts["step_scale"] = float(np.min(jax.device_get(scale)))
    if not isinstance(kernel, Diagnosable):
        return facts
    temperature = _temperature(kernel, state, mcmc.num_samples * kernel.steps_per_sample)
    if temperature is not None:
        facts["temperature"] = temperature
    if (share := kernel.noise_share(state)) is not None:
        facts["noise_share"] = float(share)
    if (settings := kernel.settings) is not None:
        facts["found_step_size"] = float(settings.step_size)
        facts["predicted_variance_ratio"] = float(settings.variance_ratio)
        low, high = settings.kinetic_temperature
        facts |= {"coldest_predicted": float(low), "hottest_predicted": float(high)}
        facts["predicted_transitions"] = float(settings.transitions)
        if problems := list(settings.problems):
            facts["settings_problems"] = problems
    return facts


def _temperature(kernel: Diagnosable, state: Any, num_transitions: int) -> float | None:
    """T of the transitions that were drawn; None where it changes, or where there is none."""
    if (i := getattr(state, "i", None)) is None:
        return None
    last = int(np.max(jax.device_get(i)))
    seen = jnp.linspace(max(0, last - num_transitions), last - 1, 100).astype(int)
    # Not jitted, which would compile anew at each look at the run.
    values = jax.device_get(jax.vmap(kernel.temperature_at)(seen))
    if values is None:
        return None
    # It is 0 while a cyclical schedule explores.
    found = {float(T) for T in values.tolist() if T > 0}
    return found.pop() if len(found) == 1 else None


def cost_of(mcmc: MCMC, fit: Fit) -> dict[str, float]:
    """The price of a draw, as far as it is known before the extra fields are looked at.

    - ``transitions_per_draw``; ``gradients_per_draw`` where a transition takes a known number of
      gradients, on its minibatch where there is one;
    - ``takes_leapfrogs`` for ``HMC`` and ``NUTS``, whose number of gradients is their
      ``num_steps``;
    - ``batch_rows`` and ``rows``, log likelihood terms in a gradient and in the data, where the
      model has a minibatch.
    """
    kernel: Any = mcmc.sampler
    known = isinstance(kernel, Diagnosable)
    transitions = mcmc.thinning * (kernel.steps_per_sample if known else 1)
    facts: dict[str, float] = {"transitions_per_draw": transitions}
    if fit.plates:
        facts["batch_rows"], facts["rows"] = rows_of(kernel.model, *mcmc_arguments(mcmc))
    if known:
        rows = facts["rows"] / facts["batch_rows"] if facts.get("batch_rows") else 1.0
        if (each := kernel.gradients_per_transition(rows)) is not None:
            facts["gradients_per_draw"] = transitions * each
    elif isinstance(kernel, BarkerMH):
        facts["gradients_per_draw"] = transitions
    elif isinstance(kernel, HMC):
        facts["takes_leapfrogs"] = 1
    return facts


def rows_of(model: Model, args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Log likelihood terms of a minibatch, and of all data; a ``numpyro.factor`` is one too."""
    traces = (shapes_of(reader(model), args, kwargs) for reader in (valid_plates, every_row))
    batch, rows = (
        sum(count_of(x) for x in trace.values() if x["type"] == "sample" and x["is_observed"])
        for trace in traces
    )
    return batch, rows
