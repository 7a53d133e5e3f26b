"""One table that says whether a result can be trusted, and what to do if not."""

import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_ext._checks import check_count
from numpyro_ext.diagnostics._convergence import convergence_rows, loss_rows, restart_rows
from numpyro_ext.diagnostics._fit import Fit, check_key, fit_of, restarts_of
from numpyro_ext.diagnostics._local import local_rows
from numpyro_ext.diagnostics._moves import guide_moves_row, moves_row
from numpyro_ext.diagnostics._particles import (
    draw_rows,
    has_score,
    ksd_row,
    particle_facts,
    particle_rows,
    particles_of,
    score_of,
    scored,
)
from numpyro_ext.diagnostics._rules import (
    Row,
    equally_spaced,
    facts_of,
    settings_rows,
    sgmcmc_rows,
)
from numpyro_ext.diagnostics.arviz import mcmc_stats, to_arviz
from numpyro_ext.diagnostics.discrepancy import draws_of
from numpyro_ext.diagnostics.evidence import evidence_bounds
from numpyro_ext.diagnostics.psis import pareto_khat

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Diagnosis", "diagnose"]

UNITS = 1000
"""At most so many units get a k-hat of their own, equally spaced."""
BAD_UNITS = 0.05
_WIDTH = 100

Numbers = dict[str, np.ndarray]


class Diagnosis(NamedTuple):
    """What :func:`diagnose` returns; it prints as a table."""

    title: str
    """What was judged."""
    rows: tuple[Row, ...]
    """The lines of the table: ``quantity, value, error, limit, ok, verdict``."""

    @property
    def ok(self) -> bool:
        """Whether no line says that something is wrong."""
        return all(row.ok is not False for row in self.rows)

    def to_frame(self) -> "pd.DataFrame":
        """The table as a pandas frame, one line per quantity."""
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(Row._fields)).set_index("quantity")

    def __str__(self) -> str:
        wrong = sum(row.ok is False for row in self.rows)
        judged = sum(row.ok is not None for row in self.rows)
        found = f"{wrong} of {len(self.rows)} are wrong" if wrong else "nothing was found wrong"
        found = found if judged else "nothing could be judged"
        head = f"{self.title}: {found}"
        cells = [(r.quantity, r.shown, r.limit, _MARKS[r.ok]) for r in self.rows]
        cells = [("quantity", "value", "limit", ""), *cells]
        widths = [max(len(row[k]) for row in cells) for k in range(4)]
        texts = ["verdict", *(row.verdict for row in self.rows)]
        indent = sum(widths) + 10
        lines = [head]
        for row, text in zip(cells, texts, strict=True):
            left = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            wrapped = textwrap.wrap(text, max(30, _WIDTH - indent))
            lines += [f"  {left}  {wrapped[0]}", *(" " * indent + line for line in wrapped[1:])]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return str(self)


_MARKS = {True: "ok", False: "!!", None: ""}


def diagnose(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    num_moves: int | None = None,
    rng_key: Any = None,
) -> Diagnosis:
    r"""Judge a fit of any kind: one table, a verdict on every line, and what to do about it.

    - **Stochastic-gradient MCMC.** ``kinetic temperature`` against T, off by more than 10 % and
      three standard errors; with settings that were found, against :math:`T / (1 -
      \epsilon^2/4)`, times up to the predicted variance ratio. For ``SGLD``, ``PSGLD`` and
      ``SGRLD``, which have no momentum, the ``implied variance ratio`` :math:`1 + \epsilon\,
      E[g^\top A g] / (2 n T)` with the preconditioner A: on a Gaussian the mean over n coordinates
      of variance over right variance, whatever the curvature and the noise. Whether the estimate
      of the gradients' noise of ``SGHMC`` was cut. Share of diverging draws (1 %), and whether the
      step was halved in warmup.
    - **All MCMC.** Largest R-hat (1.01; of the halves of a single chain), smallest effective sample
      size (100 for a chain, at most 400), and its price after warmup, by which kernels and settings
      are compared: effective draws per gradient, and with minibatches per pass over the data. For
      ``NUTS`` run with ``extra_fields=("num_steps",)``. A ``ControlVariate`` takes two gradients,
      ``SVRG`` its passes as well. Where the kernel found its settings, what did not hold there, and
      measured against predicted transitions per independent draw. Divergences of ``HMC`` and
      ``NUTS``.
    - **SVI.** Change of the loss from the last fifth but one to the last fifth of the steps; k-hat,
      or with independent units the share of them above the threshold; the bounds of order 1 (the
      ELBO) and 0; with a list of restarts their R-hat. A guide that is a little too narrow has
      good weights, so its draws are moved as particles are (``sd ratio after moves``): of 10,000
      draws of the first restart up to 1,000 start a chain, and the standard deviation of every
      number of the latent sites over that in the chains has to be in [.85, 1.2], or as near to 1 as
      its Monte Carlo error. For models whose latent sites are continuous. Draws of a guide without
      a density get the lines of the implied sd ratio and the shift as well. A guide with local
      inference (``SVAEGuide``): the share of the data for which that did not converge (1 %), the
      share of the data in one state, which is near 1 where the mixture has collapsed, the number
      of states that hold data against the 5 % quantile of the prior's, and the standard deviations
      of global sites over those after one step of Gibbs sampling, at least .86. That step adds a
      share R to the variance of a guide whose local sites are independent of the global ones; the
      variance of the posterior is 1 / (1 - R) times that of the guide.
    - **Particles.** Number of particles against the dimension d (at least 2 d, below that every
      field gives too narrow a cloud); from the gradients on all data the sd ratio that the linear
      Stein identity implies, :math:`\mathrm{sd}(x_a) / \sqrt{(M^{-1} C)_{aa}}` with :math:`M =
      -\tfrac1m \sum_i (x_i - \bar x) g_i^\top` and C the covariance, in [.85, 1.2]; the shift
      :math:`\mathrm{rms}(L^\top \bar g)` with :math:`C = L L^\top`, up to .05. Then each particle
      starts a Markov chain of 40 trajectories of Hamiltonian Monte Carlo, of 4 gradients on all
      data each, in units of the covariance of the particles: the standard deviation of every number
      of the latent sites over that in the second half of the chains has to be in [.8, 1.2]. This
      finds a single particle far out in a tail and a funnel that is not filled, which the gradients
      do not show. Chains so short cross to no other mode, and where the posterior is far wider in
      some direction than the points are, they show that it is wider, but not by how much. Last the
      squared kernel Stein discrepancy.

    **It fails** to see modes that no chain, guide or particle has found, and it does not know the
    right model. A good line is necessary, not sufficient: chains with a bias that all of them
    share agree. At most 1,000 coordinates, or units, are looked at, equally spaced.

    :param obj: what :func:`to_arviz` takes; or a ``DataTree`` that it gave, of which the lines come
        that need nothing else (no losses, no gradients).
    :param result: for an ``SVI`` or an engine: what ``run`` returned, a params dict, or a list of
        these. A params dict has no losses.
    :param tuple model_args: the model's arguments; default for an ``MCMC``: those of its run.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: draws from a guide, per restart.
    :param int num_moves: trajectories of the Markov chain from each particle or draw, of 4
        gradients on all data each; 0 leaves the line out. None means 40 if that is not too much,
        and a line that says so otherwise: at most 10^9 log densities (those of the model times
        particles times gradients), for a guide at most 2 10^10 operations (those of a gradient
        times 160 gradients times 128 chains, or up to 1,000 where all take less than 10^9), which
        are some seconds of a core. More of them find a single particle far out with more certainty.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :return: a :class:`Diagnosis`.

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
        >>> [row.quantity for row in diagnosis.rows if row.ok is False]
        ['k-hat', 'sd ratio after moves, worst']
    """
    num_samples = check_count("num_samples", num_samples)
    if num_moves is not None:
        num_moves = check_count("num_moves", num_moves, 0)
    rng_key = check_key(rng_key)

    from xarray import DataTree

    if isinstance(obj, DataTree):
        return _of_tree(obj)
    fit = fit_of(obj, result, model_args, model_kwargs)
    method = fit.attributes["inference_method"]
    if method == "particles":
        return _of_particles(obj, fit, num_moves, rng_key)
    if isinstance(obj, MCMC):
        draws = {
            name: np.reshape(x, (fit.num_chains, -1, *x.shape[1:]))
            for name, x in jax.device_get(fit.draws[0]).items()
        }
        facts = {**fit.attributes, **facts_of(obj, fit)}
        moved: Any = getattr(obj.last_state, "z", None)
        latents = set(moved) if isinstance(moved, dict) else set(draws)
        return _of_mcmc(method, draws, mcmc_stats(obj, fit), facts, latents)
    tree = to_arviz(
        obj,
        result=result,
        model_args=model_args,
        model_kwargs=model_kwargs,
        num_samples=num_samples,
        rng_key=rng_key,
        log_likelihood=False,
    )
    found = [getattr(one, "losses", None) for one in restarts_of(result)]
    losses = [np.asarray(one) for one in found if one is not None]
    by_gradients = _of_gradients(fit, tree, num_moves, rng_key)
    local = local_rows(obj.guide, fit, tree, jax.random.fold_in(rng_key, 1))
    return _of_guide(tree, [one for one in losses if one.ndim == 1], by_gradients, local)


def _of_tree(tree: Any) -> Diagnosis:
    facts = dict(tree.attrs)
    method = facts.get("inference_method")
    if method is None or "posterior" not in tree:
        raise ValueError(
            "the DataTree does not say which method made it, as those of arviz.from_numpyro do not;"
            " pass one that to_arviz made, or the fit itself."
        )
    if method in ("mcmc", "sgmcmc"):
        stats = _numbers(tree, "sample_stats")
        return _of_mcmc(method, _numbers(tree, "posterior"), stats, facts, set())
    if method == "particles":
        posterior = tree["posterior"]
        m = posterior.sizes["chain" if "kernel" in facts else "draw"]
        return Diagnosis(_title(facts, f"{m} particles"), tuple(particle_rows(m, facts)))
    return _of_guide(tree, [], [], [])


def _numbers(tree: Any, group: str) -> Numbers:
    if group not in tree:
        return {}
    variables = tree[group].data_vars.items()
    return {str(n): x.transpose("chain", "draw", ...).to_numpy() for n, x in variables}


def _title(facts: dict[str, Any], size: str) -> str:
    what = facts.get("kernel") or f"{facts.get('guide')} by {facts.get('loss', 'an engine')}"
    return f"{what}, {size}"


def _of_mcmc(
    method: str, draws: Numbers, stats: Numbers, facts: dict[str, Any], latents: set[str]
) -> Diagnosis:
    chains, length = next(iter(draws.values())).shape[:2]
    rows = []
    if method == "sgmcmc":
        rows += sgmcmc_rows(stats, facts)
    elif "diverging" in stats:
        rows.append(_hmc_divergences(stats["diverging"]))
    rows += [*settings_rows(facts), *convergence_rows(draws, stats, facts, latents)]
    return Diagnosis(_title(facts, f"{chains} x {length:,} draws"), tuple(rows))


def _hmc_divergences(diverging: np.ndarray) -> Row:
    value = float(np.sum(diverging))
    verdict = "no trajectory diverged."
    if value:
        verdict = (
            "trajectories left the region that they should explore; raise target_accept_prob, or"
            " reparametrise the model."
        )
    return Row("divergences", value, None, "0", value == 0, verdict)


def _of_guide(
    tree: Any, losses: list[np.ndarray], by_gradients: list[Row], local: list[Row]
) -> Diagnosis:
    facts = tree.attrs
    sizes = tree["posterior"].sizes
    rows = [*loss_rows(losses), *local]
    if sizes["chain"] > 1:
        rows += restart_rows(_numbers(tree, "posterior"))
    weights = _numbers(tree, "sample_stats").get("log_weight")
    if weights is None:
        verdict = (
            "the guide has no density, so neither k-hat nor bounds of the evidence can be computed"
        )
        more = "the next lines look at its draws" if by_gradients else "compare it with MCMC"
        rows.append(Row("k-hat", np.nan, None, "", None, f"{verdict}; {more}."))
    else:
        log_w = weights.reshape(-1, *weights.shape[2:])
        rows += _weight_rows(log_w, auxiliary=facts.get("density") == "bound")
    rows += by_gradients
    title = _title(facts, f"{sizes['chain']} x {sizes['draw']:,} draws")
    return Diagnosis(title, tuple(rows))


def _of_gradients(fit: Fit, tree: Any, num_moves: int | None, rng_key: Any) -> list[Row]:
    """What the model's gradients say of the first restart; nothing of a point."""
    draws = draws_of("the posterior", tree["posterior"].isel(chain=[0])) or {}
    if not has_score(fit) or all(np.all(x == x[:1]) for x in draws.values()):
        return []
    rows = draw_rows(scored(draws, fit)) if tree.attrs["density"] == "none" else []
    return [*rows, *guide_moves_row(fit, draws, num_moves, rng_key)]


def _weight_rows(log_w: np.ndarray, *, auxiliary: bool) -> list[Row]:
    units = log_w.reshape(len(log_w), -1)
    chosen = equally_spaced(units.shape[1], UNITS)
    if not np.all(np.isfinite(units) | (units == -np.inf)) or len(log_w) < 25:
        verdict = (
            "there are too few weights or some are not numbers, because the guide leaves the"
            " support of the model; pass more num_samples, or fit again with another guide."
        )
        return [Row("k-hat", np.nan, None, "", False, verdict)]
    found = pareto_khat(units[:, chosen] if log_w.ndim > 1 else units[:, 0])
    wrong = "the guide is far from the posterior; take a richer guide, or reparametrise the model."
    if auxiliary:
        wrong = (
            "the guide is far from the posterior, or its reverse model from its auxiliary variables"
            " (these weights are of both); train longer, or take a richer network for either."
        )
    right = "the importance weights can be used, so the guide is near the posterior."
    if log_w.ndim == 1:
        ok = bool(found.khat <= found.threshold)
        verdict = right if ok else wrong
        rows = [Row("k-hat", found.khat, None, f"{found.threshold:.2f}", ok, verdict)]
    else:
        share = float(np.mean(found.khat > found.threshold))
        ok = share <= BAD_UNITS
        what, limit = f"share of units with k-hat > {found.threshold:.2f}", f"{BAD_UNITS}"
        verdict = right if ok else f"in these units {wrong}"
        rows = [Row(what, share, None, limit, ok, verdict)]
    bounds = evidence_bounds(log_w, alphas=(1.0, 0.0))
    (elbo, log_evidence), (se, se0) = bounds.values.tolist(), bounds.standard_errors.tolist()
    gap = f"the bound of order 0 is {log_evidence - elbo:.3g} nats above it."
    rows.append(Row("ELBO (order 1)", elbo, se, "", None, gap))
    verdict = "the estimate of the log evidence."
    if np.min(bounds.effective_sample_size) < 50:
        verdict = "a few draws carry it, so it says little about the log evidence."
    rows.append(Row("bound of order 0", log_evidence, se0, "", None, verdict))
    return rows


def _of_particles(obj: Any, fit: Fit, num_moves: int | None, rng_key: Any) -> Diagnosis:
    found = score_of(obj, fit)
    if found is None:
        last = particles_of(obj, fit)
        m = len(next(iter(last.values())))
        facts = {"num_latents": sum(int(np.prod(x.shape[1:])) for x in last.values())}
        return Diagnosis(_title(fit.attributes, f"{m} particles"), tuple(particle_rows(m, facts)))
    m = len(found.x)
    rows = particle_rows(m, particle_facts(found))
    rows += [*moves_row(obj, fit, found, num_moves, rng_key), ksd_row(found)]
    return Diagnosis(_title(fit.attributes, f"{m} particles"), tuple(rows))
