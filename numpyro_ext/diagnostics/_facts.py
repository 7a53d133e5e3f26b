"""Facts about a run: its draws and statistics, its kernel, and the price of a draw."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import HMC, MCMC, BarkerMH

from numpyro_ext._model.handlers import every_row, valid_plates
from numpyro_ext._model.modes import of_kind
from numpyro_ext._model.read import sample_sites
from numpyro_ext._numpyro import max_tree_depth, mcmc_arguments
from numpyro_ext._typing import Diagnosable, DiagnosableChains
from numpyro_ext.diagnostics._evaluate import count_of
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics.full_data import shapes_of

__all__ = ["Facts", "Numbers", "chains_of", "cost_of", "facts_of", "mcmc_stats", "several_modes"]

Numbers = dict[str, np.ndarray]
"""Arrays ``(chain, draw, *site)`` by name."""


_NOT_KNOWN: Any = None


@dataclass
class Facts:
    """What is known of a fit beside its draws, as far as it is known and otherwise None. The
    attributes of :func:`to_arviz` are these."""

    inference_method: str = _NOT_KNOWN
    kernel: str = _NOT_KNOWN
    guide: str = _NOT_KNOWN
    loss: str = _NOT_KNOWN
    engine: str = _NOT_KNOWN
    density: str = _NOT_KNOWN
    num_restarts: int = _NOT_KNOWN
    distinct_restarts: int = _NOT_KNOWN
    """Of restarts some of which have the same parameters."""
    num_latents: int = _NOT_KNOWN

    temperature: float = _NOT_KNOWN
    """That of all transitions that were drawn."""
    noise_share: float = _NOT_KNOWN
    """Of the gradients' noise in the injected one."""
    step_scale: float = _NOT_KNOWN
    found_step_size: float = _NOT_KNOWN
    """Of settings that a kernel has found, as are the next ones."""
    predicted_variance_ratio: float = _NOT_KNOWN
    coldest_predicted: float = _NOT_KNOWN
    hottest_predicted: float = _NOT_KNOWN
    predicted_transitions: float = _NOT_KNOWN
    if_hot: str = _NOT_KNOWN
    settings_problems: list[str] = _NOT_KNOWN

    transitions_per_draw: float = _NOT_KNOWN
    gradients_per_draw: float = _NOT_KNOWN
    """On the minibatch, where there is one."""
    takes_leapfrogs: int = _NOT_KNOWN
    """1 for ``HMC`` and ``NUTS``, whose number of gradients is their ``num_steps``."""
    batch_rows: float = _NOT_KNOWN
    """Log likelihood terms in a gradient of a minibatch, and ``rows`` those of all data."""
    rows: float = _NOT_KNOWN

    implied_sd_ratio: float = _NOT_KNOWN
    implied_sd_ratio_of: str = _NOT_KNOWN
    shift: float = _NOT_KNOWN
    shift_error: float = _NOT_KNOWN
    minibatch_noise: float = _NOT_KNOWN

    @classmethod
    def of(cls, *attributes: Mapping[str, Any]) -> Self:
        """The facts among attributes, of which there may be others."""
        names = {field.name for field in fields(cls)}
        return cls(**{n: x for one in attributes for n, x in one.items() if n in names})

    def known(self) -> dict[str, Any]:
        """The facts that are known, as attributes."""
        each = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in each.items() if value is not None}


STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}
"""NumPyro's names of sampler statistics, and ArviZ's."""


def chains_of(fit: Fit) -> Numbers:
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


def facts_of(mcmc: MCMC, fit: Fit) -> Facts:
    """The numbers with which a run has to be compared, as attributes."""
    kernel, state = mcmc.sampler, mcmc.last_state
    facts = cost_of(mcmc, fit)
    z = getattr(state, "z", ())
    facts.num_latents = sum(np.size(x) for x in jax.tree.leaves(z)) // mcmc.num_chains
    if (scale := getattr(state, "step_scale", None)) is not None:
        facts.step_scale = float(np.min(jax.device_get(scale)))
    if not isinstance(kernel, DiagnosableChains):
        return facts
    temperature = _temperature(kernel, state, mcmc.num_samples * kernel.steps_per_sample)
    if temperature is not None:
        facts.temperature = temperature
    if (share := kernel.noise_share(state)) is not None:
        facts.noise_share = float(share)
    if (settings := kernel.settings) is not None:
        facts.found_step_size = float(settings.step_size)
        facts.predicted_variance_ratio = float(settings.variance_ratio)
        low, high = settings.kinetic_temperature
        facts.coldest_predicted, facts.hottest_predicted = float(low), float(high)
        facts.predicted_transitions = float(settings.transitions)
        facts.if_hot = settings.if_hot
        if problems := list(settings.problems):
            facts.settings_problems = problems
    return facts


def _temperature(kernel: DiagnosableChains, state: Any, num_transitions: int) -> float | None:
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


def cost_of(mcmc: MCMC, fit: Fit) -> Facts:
    """The price of a draw, as far as it is known before the extra fields are looked at."""
    kernel: Any = mcmc.sampler
    known = isinstance(kernel, Diagnosable)
    transitions = mcmc.thinning * (kernel.steps_per_sample if known else 1)
    facts = Facts(transitions_per_draw=transitions)
    if fit.plates:
        facts.batch_rows, facts.rows = _rows_of(mcmc, fit)
    if isinstance(kernel, DiagnosableChains):
        rows = facts.rows / facts.batch_rows if facts.batch_rows else 1.0
        if (each := kernel.gradients_per_transition(rows)) is not None:
            facts.gradients_per_draw = transitions * each
    elif isinstance(kernel, BarkerMH):
        facts.gradients_per_draw = transitions
    elif isinstance(kernel, HMC):
        facts.takes_leapfrogs = 1
    return facts


def several_modes(facts: Facts) -> list[str]:
    """The sentences of the settings that say that the posterior has several modes."""
    return list(of_kind(facts.settings_problems or [], "several modes"))


def _rows_of(mcmc: MCMC, fit: Fit) -> tuple[int, int]:
    """Log likelihood terms of a minibatch, and of all data; a ``numpyro.factor`` is one too."""
    model, given = mcmc.sampler.model, getattr(mcmc.sampler, "given_plates", {})
    arguments = (fit.args, fit.kwargs) if given else mcmc_arguments(mcmc)
    traces = (shapes_of(reader(model), *arguments) for reader in (valid_plates, every_row))
    batch, rows = (
        sum(count_of(x) for x in sample_sites(trace) if x["is_observed"]) for trace in traces
    )
    share = math.prod(B / N for N, B in given.values())
    return round(share * batch), rows
