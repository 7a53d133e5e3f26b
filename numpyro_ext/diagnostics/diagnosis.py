"""One table that says whether a result can be trusted, and what to do if not."""

from typing import Any

from numpyro_ext._checks import check_count
from numpyro_ext._model.operations import progress_bar
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext.diagnostics._fit import check_key, fit_of
from numpyro_ext.diagnostics.judges.chains import agreement, divergences
from numpyro_ext.diagnostics.judges.exact_moves import exact_moves
from numpyro_ext.diagnostics.judges.local_inference import local_inference
from numpyro_ext.diagnostics.judges.losses import losses
from numpyro_ext.diagnostics.judges.networks import networks
from numpyro_ext.diagnostics.judges.other_modes import other_modes
from numpyro_ext.diagnostics.judges.points import points
from numpyro_ext.diagnostics.judges.stein import discrepancy, particles, stein
from numpyro_ext.diagnostics.judges.stochastic_gradients import settings, stochastic_gradients
from numpyro_ext.diagnostics.judges.weights import weights
from numpyro_ext.diagnostics.seen import seen_of
from numpyro_ext.diagnostics.subject import Judge, OfFit, OfTree, Subject
from numpyro_ext.diagnostics.table import Diagnosis

__all__ = ["JUDGES", "diagnose"]


# In the order of the lines. A judge is asked when its lines are, and may ask for those of others:
# losses are for information where the draws are right, and other modes are searched for where
# nothing is wrong. A new check is a function and an entry here.
JUDGES = {
    "target": Judge(lambda subject: subject.target_lines, ("guide",), ("is_fit",)),
    "losses": Judge(losses, ("guide",), ("is_fit",)),
    "local inference": Judge(local_inference, ("guide",), ("is_fit",)),
    "stochastic gradients": Judge(stochastic_gradients, ("chains",), ("is_biased",)),
    "divergences": Judge(divergences, ("chains",), ("is_exact",)),
    "settings": Judge(settings, ("chains",)),
    "agreement": Judge(agreement, ("chains", "guide"), ("has_chains",)),
    "points": Judge(points, ("guide",), ("is_fit",)),
    "weights": Judge(weights, ("guide",)),
    "stein": Judge(stein, ("guide",), ("is_fit", "is_implicit", "has_moves")),
    "particles": Judge(particles, ("particles",)),
    "exact moves": Judge(exact_moves, ("chains", "guide", "particles"), ("is_fit",)),
    "other modes": Judge(other_modes, ("chains", "guide"), ("is_fit", "nothing_wrong")),
    "discrepancy": Judge(discrepancy, ("particles",), ("is_fit", "has_gradient")),
    "networks": Judge(networks, ("chains", "guide", "particles"), ("is_fit",)),
}


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
    for kernels of stochastic gradients what their noise adds; of **guides** the loss, and mean, sd
    and shape of the draws by their importance weights, where these may be used; of **engines**
    whether their equations are solved; of **particles** what their gradients say. Draws of all of
    them are moved by short chains of Hamiltonian Monte Carlo, which change nothing if the draws are
    right, and modes without draws are searched for where nothing else is wrong. :doc:`How diagnose
    judges </diagnose>` has every line with its meaning, its limit and what to do.

    A line that has a limit but no verdict was **not judged**, and has a "?" in the table. A value
    is wrong if it is beyond its limit by more than its Monte Carlo error. ``diagnosis.ok`` is False
    if a line is wrong, if the lines that should judge the draws could not and no other did, and if
    nothing was judged. A good line is necessary and not sufficient: modes that neither the draws
    nor the search has found, and a wrong model, are not seen.

    :param obj: what :func:`to_arviz` takes; or a ``DataTree`` that it gave, of which the lines come
        that need nothing else (no losses, no gradients).
    :param result: for an ``SVI`` or an engine: what ``run`` returned, a params dict, or a list of
        these. A params dict has no losses.
    :param tuple model_args: the model's arguments; default for an ``MCMC``: those of its run.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from a guide, per restart.
    :param int num_moves: trajectories of the Markov chain from each particle or draw; 0 leaves the
        lines out. By default there are 40, unless these would take more than some seconds of a
        core: more than 10^9 log densities for particles, or 2 10^10 operations for 128 draws of a
        guide or of chains. Then the line says so and is not judged; give a number to run them
        nevertheless. The more trajectories, the more surely a single particle far out is found.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param proxy: the result of :func:`numpyro_ext.objectives.taylor_proxy` on the same data; that
        of the loss if None. Of more than 10,000 rows, 2,000 random ones and the proxy then
        stand in for all, in the lines on weights and moves. A line has the noise that this leaves;
        above 0.1 nats these lines are those of all rows.
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
        subject: Subject = OfTree(obj)
    else:
        fit, numbers = fit_of(obj, result, model_args, model_kwargs), (num_samples, num_moves)
        subject = OfFit(obj, fit, result, rng_key, *numbers, proxy)
    subject.judges = {n: judge for n, judge in JUDGES.items() if subject.kind in judge.of}
    with progress_bar(len(subject.judges), "diagnosing") as subject.answered:
        rows = tuple(subject.lines(*subject.judges))
    return Diagnosis(subject.title, rows, seen_of(subject))
