"""One table that says whether a result can be trusted, and what to do if not."""

from typing import Any

from numpyro_ext._checks import check_count
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
from numpyro_ext.diagnostics.subject import Judge, OfFit, OfTree, Subject
from numpyro_ext.diagnostics.table import Diagnosis

__all__ = ["JUDGES", "diagnose"]


# In the order of the lines. A judge is asked when its lines are, and may ask for those of others:
# losses are for information where the draws are right, and other modes are searched for where
# nothing is wrong. A new check is a function and an entry here.
JUDGES = {
    "proxy": Judge(lambda subject: subject.proxy_lines, ("guide",), ("is_fit",)),
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

    **Chains** of ``MCMC`` with any kernel. The first five lines and the last three are for kernels
    of stochastic gradients, whose draws have a bias. *Divergences* is for ``HMC`` and ``NUTS``, and
    *problems of the settings* for settings that a kernel has found:

    ==================================  ===============================  ===========  ==============
    quantity                            meaning                          limit        what to do
    ==================================  ===============================  ===========  ==============
    kinetic temperature                 that of the momentum, near T     10 %         smaller step
    gradient noise over injected noise  noise that is not corrected for  1            more friction
    implied variance ratio              variance over the right one      1.1          smaller step
    share of diverging draws            transitions that were refused    .01          smaller step
    step scale after warmup             the step was halved in warmup    1            smaller step
    divergences                         trajectories that diverged       0            reparametrise
    problems of the settings            assumptions that did not hold    0            see the line
    share of draws not finite           draws outside of the support     0            smaller step
    sites that never move               sites stuck at their start       0            another start
    largest R-hat                       disagreement of the chains       1.01         run longer
    shares of the modes, off in sds     those of the draws, by evidence  .2           more chains
    smallest ESS                        number of independent draws      100 a chain  run longer
    ESS per gradient, per pass          price of an independent draw                  compare
    transitions per independent draw    compared with the kernel's law   20 times     reparametrise
    sd ratio after moves, worst         sd over that of moved draws      .85 to 1.15  smaller step
    shift after moves, worst            mean of moved draws, in sds      .2           smaller step
    shape after moves, worst            ranges over those of moved ones  .8 to 1.25   smaller step
    ==================================  ===============================  ===========  ==============

    **Guides** of ``SVI`` and of engines. With several restarts their largest R-hat is added. The
    last four lines are for local inference, as in an ``SVAEGuide``:

    ==================================  ===============================  ===========  ==============
    quantity                            meaning                          limit        what to do
    ==================================  ===============================  ===========  ==============
    change of the loss                  in the last fifth of the steps   .1, 3 s.e.   train longer
    sites that do not vary              sites of which draws are equal   0            no Delta
    proxy of the loss                   shown if not of these data       these data   another one
    noise of the proxy in nats          of rows that stand in for all    .1           move it
    k-hat                               may the weights be used?         .7 or less   other lines
    share of units with k-hat > .67     the same, of independent units   .05          other lines
    ELBO, bound of order 0              bounds of the log evidence                    compare
    shift by reweighting, worst         mean by the weights, in sds      .2           richer guide
    sd ratio to reweighted, worst       sd over that by the weights      .85 to 1.2   richer guide
    shape by reweighting, worst         ranges over those by weights     .8 to 1.25   richer guide
    gap of the ELBO in nats             below the bound of order 0       .5 + .05 n   richer guide
    sd ratio after moves, worst         sd over that of moved draws      .85 to 1.15  richer guide
    shift after moves, worst            mean of moved draws, in sds      .2           richer guide
    shape after moves, worst            ranges over those of moved ones  .8 to 1.25   richer guide
    chains that change sides, least     exchange between two modes       .6           see the line
    mass of a mode without draws        found by a search                .02          see the line
    local inference not converged       share of the data                .01          raise max_iter
    largest share of a site             share of the data in one state   .99          another start
    states of a site in use             number of states with data       prior's 5 %  another start
    sd ratio of a site to a Gibbs step  sd over that after the step      .86          Gibbs, or NUTS
    ==================================  ===============================  ===========  ==============

    **Particles.** The second, third and last line are also there for draws without a density:

    ==================================  ===============================  ===========  ==============
    quantity                            meaning                          limit        what to do
    ==================================  ===============================  ===========  ==============
    number of particles                 number against the dimension d   2 d          more particles
    implied sd ratio, worst             sd over that of the gradients    .85 to 1.2   run longer
    shift in sds                        mean of the gradients            .1, 1/m^.5   run longer
    noise of a minibatch in sds         the same, of one minibatch                    larger batch
    sd ratio after moves, worst         sd over that of moved particles  .8 to 1.2    twice as many
    shift after moves, worst            mean of moved ones, in sds       .3           twice as many
    shape after moves, worst            ranges over those of moved ones  .8 to 1.25   twice as many
    chains that change sides, least     exchange between two modes       .6           see the line
    shares of the modes, off in sds     those of particles, by evidence  .2           more of them
    squared KSD                         kernel Stein discrepancy                      compare
    ==================================  ===============================  ===========  ==============

    A line that has a limit but no verdict was **not judged**, and has a "?" in the table: the moves
    may cost too much, for example, or the weights may not be used. A verdict takes evidence: a
    value whose Monte Carlo error is 0, not a number or large, moves of which all are accepted, and
    draws that differ by rounding alone judge nothing. ``diagnosis.ok`` is False if a line is wrong,
    if the lines that should judge the draws could not and no other did, and if nothing was judged.

    **Weights.** k-hat says whether the importance weights of a guide may be used, and nothing else;
    large values are common for good guides in many dimensions. If the weights may be used, the
    means and standard deviations of all numbers with and without them are compared, which finds
    modes that have the wrong share. The worst of these numbers is shown. A ratio or a shift is
    wrong if it is outside the limits by more than its Monte Carlo error, and larger than the error
    of the largest of so many. The *shape* is that of the intervals with the middle half and the
    middle nine tenths of the draws: a share of moved or weighted draws there is turned into the
    ratio of standard deviations that two normals have. One wide normal for two narrow modes has the
    right mean and the right sd, and is seen here. The *gap of the ELBO* sees the whole guide of n
    numbers, with the dependence between them. If these lines find the draws right, the loss is for
    information. Of a number whose tail is so heavy that the error of its sd is not known (a Cauchy,
    a Student t with 2.5 degrees of freedom), the middle half takes the place of the sd, and the
    median that of the mean.

    A temperature or a variance ratio is wrong only if it is also off by three Monte Carlo errors.
    With settings that were found, the temperature is between those that the law of the kernel
    predicts for coordinates without gradient noise and with most of it. The implied variance ratio,
    for kernels without momentum, is :math:`1 + \epsilon\, E[g^\top A g] / (2 n T)` with the
    preconditioner A: on a Gaussian it is the mean over the n coordinates of variance over right
    variance, whatever the curvature and the noise. R-hat of a single chain is that of its halves;
    the limit of the effective sample size (ESS) is at most 400. A gradient is one of the model, on
    its minibatch where there is one: a ``ControlVariate`` takes two, ``SVRG`` its passes as well;
    run ``NUTS`` with ``extra_fields=("num_steps",)``.

    The implied sd ratio is :math:`\mathrm{sd}(x_a) / \sqrt{(M^{-1} C)_{aa}}` with :math:`M =
    -\tfrac1m \sum_i (x_i - \bar x) g_i^\top` and C the covariance of the points x; the shift is
    :math:`\mathrm{rms}(L^\top \bar g)` with :math:`C = L L^\top`, where g are gradients on all
    data. Particles share their minibatch, so their mean follows its noise; the verdict says whether
    that noise may explain the shift. **Moves.** Each particle, or up to 1,000 of 10,000 draws (of
    the first restart, or equally spaced ones of the chains, at their temperature), starts a Markov
    chain of 40 trajectories of Hamiltonian Monte Carlo, of 4 gradients on all data each. The lines
    show the numbers of the latent sites, and of deterministic sites of at most 100 numbers, whose
    standard deviation and mean differ most from those in the second half of the chains, or the
    linear combination of up to 300 coordinates of which they do. This finds what the weights and
    the gradients do not show: a guide that is a little too narrow, a single particle far out in a
    tail, a funnel that is not filled. Where the posterior is far wider than the points are, the
    chains show that it is wider, but not by how much. Where the draws lie in two modes and (nearly)
    no chain goes from one to the other, the chains keep the share of each; if no weights may be
    used, nothing has judged it, and a line says so. Chains that differ, and particles, that began
    at several modes are compared, and moved, at each mode by itself; the *shares of the modes* are
    then those of the draws there, wherever they began, against Laplace's evidence. With shares q in
    place of p no mean is farther off than the root of the sum of :math:`(q - p)^2 / p`, in sds. The
    line is not judged, and nor is a mode by itself, where the posterior is far from normal at a
    mode. **Modes** without draws are searched for in up
    to 100 coordinates, from 32 points, where no line has found the draws wrong; of chains where the
    settings say that there are several, which is for information if none is found without draws and
    the chains agree. A mode of the same height may be a copy with other labels or signs, so it is
    named and not judged. A step of **Gibbs** sampling adds a share R to the variance of global
    sites that the guide draws independently of the local ones; the variance of the posterior is
    then 1 / (1 - R) times that of the guide.

    **Weights of a network** are not identified, so the lines on them do not say whether its
    predictions are right. A last line, for information, names :func:`predictive_scores` where 30
    or more latent numbers are in matrices outside of plates.

    **What it misses** are modes that neither the draws nor the search has found, and a wrong model.
    A good line is necessary and not sufficient: chains that all share a bias agree with each other.
    Nor do the lines see dependence that no linear combination shows, where no weights may be used.
    At most 1,000 coordinates, or units, are examined, equally spaced.

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
    :return: a :class:`Diagnosis`. ``mcmc.run`` may return before its chains have ended, and then
        the first call waits for them.

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
        >>> "sd ratio after moves, worst" in [row.quantity for row in diagnosis.rows if not row.ok]
        True
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
    return Diagnosis(subject.title, tuple(subject.lines(*subject.judges)))
