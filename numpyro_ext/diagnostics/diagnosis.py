"""One table that says whether a result can be trusted, and what to do if not."""

from collections.abc import Callable
from typing import Any

from numpyro_ext._checks import check_count
from numpyro_ext._model.operations import progress_bar
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.diagnostics._by_penalties import by_penalties
from numpyro_ext.diagnostics._by_proxy import by_proxy, proxy_of
from numpyro_ext.diagnostics._fit import check_key, fit_of
from numpyro_ext.diagnostics.context import DiagnosisContext, FitContext, TreeContext
from numpyro_ext.diagnostics.judges.chains import agreement, divergences
from numpyro_ext.diagnostics.judges.exact_moves import exact_moves
from numpyro_ext.diagnostics.judges.local_inference import local_inference
from numpyro_ext.diagnostics.judges.losses import losses
from numpyro_ext.diagnostics.judges.other_modes import other_modes
from numpyro_ext.diagnostics.judges.points import points
from numpyro_ext.diagnostics.judges.stein import discrepancy, particles, stein
from numpyro_ext.diagnostics.judges.stochastic_gradients import settings, stochastic_gradients
from numpyro_ext.diagnostics.judges.weights import weights
from numpyro_ext.diagnostics.plot_data import plot_data_of
from numpyro_ext.diagnostics.table import Diagnosis, Row

__all__ = ["CHECKS", "CHECKS_OF_FIT", "diagnose", "rows_of"]


# In the order of the lines; a new check is a function of a context, and an entry here.
CHECKS = {
    "chains": [stochastic_gradients, divergences, settings, agreement],
    "guide": [agreement, weights],
    "particles": [particles],
}
"""Checks that read draws and statistics, which a ``DataTree`` has too."""
CHECKS_OF_FIT = {
    "chains": [*CHECKS["chains"], exact_moves],
    "guide": [local_inference, agreement, points, weights, stein, exact_moves],
    "particles": [*CHECKS["particles"], exact_moves, discrepancy],
}


def rows_of(context: DiagnosisContext, answered: Callable[[], Any] = lambda: None) -> list[Row]:
    """The lines of all checks. Modes without draws are searched for where nothing else is wrong,
    and losses are for information where the draws are right."""
    rows: list[Row] = []
    checks = CHECKS_OF_FIT if isinstance(context, FitContext) else CHECKS
    for check in checks[context.kind]:
        rows += check(context)
        answered()
    if not isinstance(context, FitContext):
        return rows
    if context.kind != "particles":
        rows += other_modes(context, rows)
    if context.kind == "guide":
        rows = [*context.target_lines, *losses(context, rows), *rows]
    return rows


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
) -> Diagnosis:
    r"""Judge a fit of any kind: one table, a verdict on every line, and what to do about it.

    Each line compares a number with its limit: of **chains** R-hat, the effective sample size, and
    the temperature; of **guides** the loss, and mean, sd and shape of the draws by their importance
    weights; of **engines** whether their equations are solved; of **particles** what their
    gradients say. Draws of all of them are moved by short chains of Hamiltonian Monte Carlo, which
    change nothing if the draws are right, and modes without draws are searched for where nothing
    else is wrong. :doc:`How diagnose judges </diagnose>` has every line.

    A line that has a limit but no verdict was **not judged**, and has a "?". A value is wrong if it
    is beyond its limit by more than its Monte Carlo error. ``diagnosis.ok`` is False if a line is
    wrong, if the lines that should judge the draws could not and no other did, and if nothing was
    judged. A good line is necessary and not sufficient: modes that neither the draws nor the search
    has found, and a wrong model, are not seen. The weights of a network are not identified: judge
    its predictions, by :func:`predictive_scores`.

    :param obj: what :func:`to_arviz` takes; or a ``DataTree`` that it gave, of which the lines come
        that need nothing else (no losses, no gradients).
    :param result: for an ``SVI`` or an engine: what ``run`` returned, a params dict, or a list of
        these. A params dict has no losses.
    :param tuple model_args: the model's arguments; default for an ``MCMC``: those of its run.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from a guide, per restart.
    :param int num_moves: trajectories of the Markov chain from each particle or draw; 0 leaves the
        lines out. By default there are 40, unless these would take more than some seconds of a
        core: more than 10^9 log densities for particles, or 2 10^10 operations for draws. Then the
        line says so and is not judged; give a number to run them nevertheless.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: the result of :func:`numpyro_ext.objectives.taylor_proxy` on the same data; that
        of the loss if None. Of more than 10,000 rows, 2,000 random ones and the proxy stand in for
        all in the lines on weights and moves, unless the noise of that is above 0.1 nats.
    :return: a :class:`Diagnosis`; :func:`plot_diagnosis` makes a picture of it. ``mcmc.run`` may
        return before its chains have ended, and then the first call waits for them.

    **References**

    1. *Rank-normalization, folding, and localization: an improved R-hat*, A. Vehtari et al.
       (Bayesian Analysis 2021).
    2. *Yes, but Did It Work?*, Y. Yao et al. (ICML 2018).

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> from numpyro_ext.diagnostics import diagnose
        >>> def model(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0, 10))
        ...     numpyro.sample("x", dist.Normal(loc).expand([3]).to_event(1), obs=x)
        >>> x = jnp.array([0.5, -1.0, 2.0])
        >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.001), Trace_ELBO())
        >>> early = svi.run(jax.random.key(0), 200, x, progress_bar=False)
        >>> diagnosis = diagnose(svi, result=early, model_args=(x,))
        >>> diagnosis.ok
        False
        >>> diagnosis.to_frame().loc["sd against exact moves, worst", "ok"]
        False
    """
    num_samples = check_count("num_samples", num_samples)
    if num_moves is not None:
        num_moves = check_count("num_moves", num_moves, 0)
    rng_key = check_key(rng_key)

    from xarray import DataTree

    if isinstance(obj, DataTree):
        context: DiagnosisContext = TreeContext(obj)
    else:
        fit = fit_of(obj, result, model_args, model_kwargs)
        judged_fit, target_lines = by_penalties(fit, obj, proxy, rng_key)
        if not target_lines:
            judged_fit, target_lines = by_proxy(fit, obj, proxy_of(obj, proxy), rng_key)
        numbers = num_samples, num_moves
        context = FitContext(obj, judged_fit, result, rng_key, *numbers, target_lines)
    with progress_bar(len(CHECKS_OF_FIT[context.kind]), "diagnosing") as answered:
        rows = tuple(rows_of(context, answered))
    return Diagnosis(context.title, rows, plot_data_of(context))
