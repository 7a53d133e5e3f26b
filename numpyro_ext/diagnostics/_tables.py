"""Tables of what draws, statistics and weights say, without the fit that they came from."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numpyro_ext.diagnostics._chains import (
    AGREEMENT,
    chain_rows,
    hmc_rows,
    restart_rows,
    settings_rows,
    sgmcmc_rows,
)
from numpyro_ext.diagnostics._points import particle_rows
from numpyro_ext.diagnostics._weights import Usable, khat_rows, reweighted_rows, units_of_dims
from numpyro_ext.diagnostics.table import Diagnosis, Row

__all__ = ["of_tree", "restarts_rows", "size_of", "table_of_chains", "title", "weighed"]

Numbers = dict[str, np.ndarray]
"""Arrays ``(chain, draw, *site)`` by name."""


def of_tree(tree: Any) -> Diagnosis:
    """The lines for which a ``DataTree`` of :func:`to_arviz` is enough."""
    facts = dict(tree.attrs)
    method = facts.get("inference_method")
    if method is None or "posterior" not in tree:
        raise ValueError(
            "the DataTree does not say which method made it, as those of arviz.from_numpyro do not;"
            " pass one that to_arviz made, or the fit itself."
        )
    draws, stats = _numbers(tree, "posterior"), _numbers(tree, "sample_stats")
    if method in ("mcmc", "sgmcmc"):
        return table_of_chains(draws, stats, facts, set())
    if method == "particles":
        m = tree["posterior"].sizes["chain" if "kernel" in facts else "draw"]
        return Diagnosis(title(facts, f"{m} particles"), tuple(particle_rows(m, facts)))
    weight = stats.get("log_weight")
    rows, usable = weighed(weight, facts.get("density", ""), False, None)
    if weight is not None and usable is not None:
        sizes = {str(n): _sizes(x) for n, x in tree["posterior"].data_vars.items()}
        unit_of = units_of_dims(_sizes(tree["sample_stats"]["log_weight"]), sizes)
        every = {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}
        rows += reweighted_rows(every, usable, unit_of)
    return Diagnosis(title(facts, size_of(draws)), tuple([*restarts_rows(draws, facts), *rows]))


def _sizes(x: Any) -> dict[str, int]:
    """The dimensions of a variable without chain and draw."""
    return {str(d): int(n) for d, n in x.sizes.items() if d not in ("chain", "draw")}


def _numbers(tree: Any, group: str) -> Numbers:
    if group not in tree:
        return {}
    variables = tree[group].data_vars.items()
    return {str(n): x.transpose("chain", "draw", ...).to_numpy() for n, x in variables}


def title(facts: dict[str, Any], size: str) -> str:
    """Its class and how many draws: of a kernel, an engine, or a guide by a loss."""
    alone = facts.get("kernel") or facts.get("engine")
    return f"{alone or f'{facts.get("guide")} by {facts.get("loss")}'}, {size}"


def table_of_chains(
    draws: Numbers,
    stats: Numbers,
    facts: dict[str, Any],
    latents: set[str],
    moved: Sequence[Row] = (),
    *,
    no_other_modes: bool = False,
) -> Diagnosis:
    """The table of a run of MCMC; ``latents`` are the sites that have to move, and a search may
    have found that there are ``no_other_modes`` than those with draws."""
    chains, length = next(iter(draws.values())).shape[:2]
    is_sgmcmc = facts["inference_method"] == "sgmcmc"
    rows = sgmcmc_rows(stats, facts) if is_sgmcmc else hmc_rows(stats)
    of_chains = chain_rows(draws, stats, facts, latents)
    agree = any(row.ok for row in of_chains if row.quantity == AGREEMENT)
    rows += [*settings_rows(facts, visits_modes=no_other_modes and agree), *of_chains, *moved]
    return Diagnosis(title(facts, f"{chains} x {length:,} draws"), tuple(rows))


def size_of(draws: Numbers) -> str:
    restarts, length = next(iter(draws.values())).shape[:2]
    return f"{restarts} x {length:,} draws"


def restarts_rows(draws: Numbers, facts: dict[str, Any]) -> list[Row]:
    return restart_rows(draws, facts) if len(next(iter(draws.values()))) > 1 else []


def weighed(
    log_weight: np.ndarray | None, density: str, has_more: bool, cause: str | None
) -> tuple[list[Row], Usable | None]:
    """The lines of the weights ``(chain, draw, *units)`` of a guide, if it has a density."""
    if log_weight is None:
        more = "the next lines look at its draws" if has_more else "compare it with MCMC"
        verdict = (
            "the guide has no density, so neither k-hat nor bounds of the evidence can be"
            f" computed; {more}."
        )
        return [Row("k-hat", np.nan, None, "0.7", None, verdict, of_draws=True)], None
    log_w = log_weight.reshape(-1, *log_weight.shape[2:])
    return khat_rows(log_w, auxiliary=density == "bound", cause=cause)
