"""One table that says whether a result can be trusted, and what to do if not."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from numpyro_ext._checks import check_count
from numpyro_ext._model.labels import Coords, Labels, Names
from numpyro_ext._model.operations import progress_bar
from numpyro_ext._model.read import refuse_scaled, scaled_latents
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.diagnostics._fit import Fit
from numpyro_ext.diagnostics._fit_of import fit_of
from numpyro_ext.diagnostics._target import judged_by
from numpyro_ext.diagnostics.checks.chains import (
    agreement,
    agreement_of_ensemble,
    agreement_of_restarts,
    are_at_modes,
    divergences,
    problems_of_chains,
    problems_of_ensemble,
    temperature,
)
from numpyro_ext.diagnostics.checks.draws import (
    enough_particles,
    finite,
    has_moves,
    imprecise_sites,
    varying,
)
from numpyro_ext.diagnostics.checks.losses import local_inference, losses
from numpyro_ext.diagnostics.checks.modes import draws_at_modes, searched
from numpyro_ext.diagnostics.checks.moves import moves
from numpyro_ext.diagnostics.checks.weights import KHAT, weights
from numpyro_ext.diagnostics.comparison import OF_DRAWS
from numpyro_ext.diagnostics.plots import plot_data_of
from numpyro_ext.diagnostics.table import Diagnosis, Row, merge_rows, shorten


def problems(fit: Fit) -> list[Row]:
    """The line of what did not hold of a kernel's settings and of the density; none if all did."""
    sentences = [*fit.problems]
    if fit.kind == "chains":
        sentences += problems_of_chains(fit)
    if fit.kind == "ensemble":
        sentences += problems_of_ensemble(fit)
    if not any("single precision" in sentence for sentence in sentences):
        sentences += imprecise_sites(fit)
    if not sentences:
        return []
    return [Row("problems", len(sentences), None, "0", False, " ".join(sentences))]


CHECKS = {
    "chains": [finite, varying, problems, divergences, temperature, agreement, moves],
    "guide": [finite, varying, problems, local_inference, agreement_of_restarts, weights, moves],
    "particles": [finite, problems, enough_particles, moves],
    "ensemble": [finite, problems, agreement_of_ensemble, moves],
}
"""Each check is a function of a fit that gives lines, in the order of the table. A new one is
such a function, and an entry here."""


def missing_modes(fit: Fit, others: Sequence[Row]) -> list[Row]:
    """The line of the shares of the modes that the start, or else a search here, has found."""
    by_mode = draws_at_modes(fit)
    if by_mode is not None and fit.kind == "chains" and not are_at_modes(fit):
        # Chains that agree have the right shares of the modes that they have visited.
        is_settled = by_mode.row.ok or (by_mode.row.ok is False and by_mode.all_visited)
        by_mode = None if is_settled else by_mode
    elif by_mode is None and fit.kind == "guide" and fit.num_moves != 0:
        fine = all(row.ok is not False for row in others)
        by_mode = searched(fit) if fine and has_moves(fit) else None
    return [] if by_mode is None else [by_mode.row]


def rows_of(fit: Fit, answered: Callable[[], Any]) -> list[Row]:
    """The lines of all checks."""
    rows: list[Row] = []
    for check in CHECKS[fit.kind]:
        rows += check(fit)
        answered()
    rows += missing_modes(fit, rows)
    if fit.kind == "guide":
        rows = [*losses(fit, rows), *rows]
    rows = merge_rows(rows)
    # That the weights may not be used matters only where nothing else compares the draws, or where
    # a declaration would give them.
    compared = any(row.quantity in OF_DRAWS and row.ok is not None for row in rows)
    if not compared or (fit.kind == "guide" and fit.proto.undeclared):
        return rows
    return [row for row in rows if row.quantity != KHAT or row.ok is not None]


def diagnose(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    num_moves: int | None = None,
    rng_key: Any = None,
    proxy: TaylorProxy | None = None,
    coords: Coords | None = None,
    dims: Names | None = None,
) -> Diagnosis:
    r"""Judge a fit of any kind: a table of at most eight lines, each with a verdict and what to do.

    :doc:`How diagnose judges </diagnose>` has all lines. Draws are compared with themselves after
    short chains of Hamiltonian Monte Carlo on all data, which change nothing if the draws are
    right; draws of a guide also with their importance weights.

    A value is wrong (``!!``) if it is beyond its limit by more than its Monte Carlo error; a line
    with ``?`` could not be judged, and says why. It cannot see modes that neither the draws nor a
    search have found, nor a wrong model. The weights of a network are not identified: judge its
    predictions, by :func:`predictive_scores`.

    :param obj: an ``SVI``, an ``MCMC`` that has run, or an engine, as :func:`to_arviz` takes it.
    :param result: for an ``SVI`` or an engine: what ``run`` returned, a params dict, or a list of
        these. A params dict has no losses.
    :param tuple model_args: the model's arguments; an ``MCMC`` has the arguments of its run.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from a guide, per restart.
    :param int num_moves: trajectories of the Markov chain from each particle or draw; 0 leaves the
        moves out. By default there are 40, unless they would take more than about 40 seconds of a
        core: give a number to run them nevertheless.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: the result of :func:`numpyro_ext.objectives.taylor_proxy` on the same data; if
        None the one of the loss, or for rows of a ``HostArray`` one at the mean of the draws. Of
        more than 10,000 rows, 2,000 random ones and the proxy stand in for all, unless this has a
        noise above 0.1 nats.
    :param coords: labels by dimension, as :func:`to_arviz` takes them, by which the table calls
        numbers: ``effect[Leeds]`` in place of ``effect[3]``.
    :param dims: dimensions by site, where they are not the model's plates or ``event_dims``.
    :return: a :class:`Diagnosis`; :func:`plot_diagnosis` makes a picture of it.

    **References**

    1. *Rank-normalization, folding, and localization: an improved R-hat*, A. Vehtari et al.
       (Bayesian Analysis 2021).
    2. *Yes, but Did It Work?*, Y. Yao et al. (ICML 2018).

    >>> from numpyro_ext.diagnostics import diagnose
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.001), Trace_ELBO())
    >>> early = svi.run(jax.random.key(0), 200, progress_bar=False)
    >>> diagnosis = diagnose(svi, result=early)
    >>> diagnosis.ok
    False
    >>> diagnosis.to_frame().loc["sd ratio, worst", "ok"]
    False
    """
    fit = fit_of(obj, result, model_args, model_kwargs, num_samples, rng_key)
    if num_moves is not None:
        fit = replace(fit, num_moves=check_count("num_moves", num_moves, 0))
    labels = Labels.of_trace(fit.proto.trace)
    labels = labels.named(coords, dims) if coords or dims else labels
    fit = judged_by(fit, proxy)
    refuse_scaled(set(scaled_latents(fit.proto.trace)) & set(fit.proto.latents), "diagnose")
    with progress_bar(len(CHECKS[fit.kind]), "diagnosing") as answered:
        rows = rows_of(fit, answered)
    rows = [row._replace(verdict=labels(row.verdict)) for row in rows]
    return Diagnosis(fit.title, shorten(rows), plot_data_of(fit, labels))
