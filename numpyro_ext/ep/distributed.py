"""Expectation propagation on data in parts."""

from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_positive, if_given
from numpyro_ext._model.factors import Factors
from numpyro_ext._typing import Kwargs
from numpyro_ext.ep.elsewhere import Description, Elsewhere, update_part
from numpyro_ext.ep.ep import EP, step_by_updates
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorTable
from numpyro_ext.ep.normal import Site, zero_sites
from numpyro_ext.ep.shared_sites import (
    Items,
    Parts,
    SharedConfig,
    SharedSitesEngine,
    after_visits,
    moved,
    rates_of,
    visit_item,
)
from numpyro_ext.ep.state import EPState, Update, outcome_of, zeros_of
from numpyro_ext.ep.stochastic import RandomRowsEngine, added

_EPEngine: Any = object  # it stands beside one, and the fields are not to come twice


@dataclass(kw_only=True, eq=False, repr=False)
class _InParts(_EPEngine):
    """The base of engines on parts of the data.

    **Parts that others hold.** With an ``executor`` each part is opened by a worker, which keeps it
    and is sent q and the part's site, in natural parameters; it answers with as many numbers. A run
    is then given no arguments, and its answer is the same up to rounding. The guide draws the sites
    outside the plate of the data.

    :param partition: the number J of parts, contiguous and of nearly one size, or an integer vector
        with the label 0, ..., J - 1 of each row. With an ``executor`` a list of functions without
        arguments, one for each part, that return the model's arguments there.
    :param executor: any ``concurrent.futures.Executor``, as a ``ProcessPoolExecutor``,
        ``Client.get_executor()`` of ``dask.distributed``, or one of MPI or Ray; a list of them has
        the parts in turn, so that each part stays with the workers of one.
    :param float patience: seconds after which a step goes on with the parts that have answered; the
        site of a part that is late changes in the step in which it answers. None waits for all.
    :param str lost: ``"raise"``, by which a part that fails ends the run, with its number, or
        ``"keep"``, by which its last site stays and the run warns.
    """

    partition: Any = field(kw_only=False)
    executor: Executor | Sequence[Executor] | None = None
    patience: float | None = None
    lost: str = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("lost", self.lost, ("raise", "keep"))
        if_given(check_positive, "patience", self.patience)
        is_list = isinstance(self.partition, list | tuple) and len(self.partition) > 0
        if self.executor is not None and not is_list:
            raise TypeError(
                f"partition is {type(self.partition).__name__}; with an executor it must be a list"
                " with a function for each part, which returns the model's arguments there."
            )

    def of_part(self) -> Any:
        """The engine of one part, which a worker is given."""
        return replace(self, partition=1, executor=None)

    @abstractmethod
    def start(self, told: list[Description], sizes: np.ndarray) -> EPState:
        """The first state, by what the parts tell of themselves; its key is not used."""

    @abstractmethod
    def visit(
        self, plan: EPPlan, arrays: list[Array], table: FactorTable, total: Site, *asked: Any
    ) -> Any:
        """A worker's answer, on the part of :meth:`of_part`; the last argument is its key."""

    @abstractmethod
    def sweep_elsewhere(self, parts: Elsewhere, state: EPState) -> tuple[EPState, Array]: ...

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        if self.executor is None:
            return super().init(rng_key, *args, **kwargs)
        if args or kwargs:
            raise TypeError(
                "the workers have the rows; call run(rng_key, num_steps) without arguments of the"
                " model."
            )
        executors = self.executor if isinstance(self.executor, Sequence) else [self.executor]
        parts = Elsewhere(
            *(self.of_part(), self.partition, executors, rng_key),
            *(self.patience, self.lost == "keep"),
        )
        told = parts.open()
        self._plan = parts
        state = jax.tree.map(jnp.asarray, self.start(told, parts.sizes))
        first = told[0]
        self.guide.start_without_rows(first.locs, first.local, first.arguments)
        return state._replace(rng_key=random.split(rng_key)[1])

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: Kwargs) -> None:
        if self.executor is None:
            super().restore(saved, args, kwargs)
        else:
            self.begin(random.key(0), None, args, kwargs)

    def begin(self, rng_key: Array, init_state: EPState | None, args: tuple, kwargs: Kwargs) -> Any:
        if self.executor is None:
            return super().begin(rng_key, init_state, args, kwargs)
        state = self.init(rng_key, *args, **kwargs)
        return self._for_call(state if init_state is None else init_state, (), {})

    def _for_call(self, state: EPState, args: tuple, kwargs: Kwargs) -> Any:
        if self.executor is None:
            return super()._for_call(state, args, kwargs)
        parts: Any = self.plan
        if (n := len(state.table.groups[0].index)) != len(parts.sources):
            raise ValueError(f"the state has {n} parts, and this engine {len(parts.sources)}.")
        return parts, state, []

    def sweep(self, plan: Any, state: EPState, arrays: list[Array], *rest: Any) -> Any:
        if self.executor is None:
            return super().sweep(plan, state, arrays, *rest)
        return self.sweep_elsewhere(plan, state)

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        if isinstance(self._plan, Elsewhere):
            self._plan.warn()
        super().warn(first, state, num_steps)

    def rows_of_parts(self, size: int) -> tuple[Any, np.ndarray]:
        """The rows of each of J parts, ``(J, M)`` filled up with -1, or None where workers have
        them; and their numbers ``(J,)``."""
        if isinstance(self._plan, Elsewhere):
            return None, self._plan.sizes
        if np.ndim(self.partition) == 0:
            labels = np.sort(np.arange(size) % min(check_count("partition", self.partition), size))
        else:
            labels = np.asarray(self.partition)
        is_integer = labels.shape == (size,) and np.issubdtype(labels.dtype, np.integer)
        if not is_integer or labels.min() < 0 or not np.all(sizes := np.bincount(labels)):
            raise ValueError(
                f"partition is {self.partition!r}, and there are {size} rows; it must be the number"
                " J of parts, or a vector of integer labels 0, ..., J - 1, one for each row."
            )
        members = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
        most = int(sizes.max())
        rows = [np.pad(x, (0, most - len(x)), constant_values=-1) for x in members]
        return np.stack(rows), sizes


@dataclass(kw_only=True, eq=False, repr=False)
class DistributedEP(_InParts, EP):
    r"""Expectation propagation by factors that are parts of the data.

    .. math:: f_j(x) = \exp \sum_{n \in \text{part } j} l_n(x), \qquad q(x) = f_0(x) \prod_j
        \tilde f_j(x)

    and all else as in :class:`EP`, which it is with one row to a part. With a single part q has the
    moments of the posterior itself. Most parts depend on more directions than quadrature takes, and
    have ``ImportanceSampling()``, or ``projection=NUTSProjection()``, which has no evidence and
    leaves noise in the sites, so that the residual stays above ``tol``.

    :param str schedule: ``"parallel"``, all parts from one q, or ``"serial"``, which takes no
        executor.

    **Reference:** Gelman et al., *Expectation propagation as a way of life* (JMLR 2020), algorithm
    1.

    >>> from numpyro_ext.ep import DistributedEP
    >>> ep = DistributedEP(normal_mean, 2)
    >>> result = ep.run(jax.random.key(0), 50, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    schedule: str = "parallel"

    def __post_init__(self) -> None:
        if self.executor is not None and self.schedule != "parallel":
            raise ValueError(
                f"schedule is {self.schedule!r}; with an executor all parts are computed from one"
                " q, which is schedule='parallel'."
            )
        super().__post_init__()

    def rows_of(self, factors: Factors) -> np.ndarray:
        return self.rows_of_parts(factors.size)[0]

    def start(self, told: list[Description], sizes: np.ndarray) -> EPState:
        state, bases = told[0].state, [x.state.table.groups[0].basis for x in told]
        most = max(basis.shape[1] for basis in bases)
        wide = [np.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0))) for x in bases]
        rows = FactorGroup(jnp.arange(len(told))[:, None], jnp.asarray(np.concatenate(wide)))
        table = state.table._replace(groups=(rows, *state.table.groups[1:]))
        site = zero_sites(rows.basis, state.prior.precision.ndim == 1)
        return state._replace(sites=(site, *state.sites[1:]), table=table)

    def visit(self, *asked: Any) -> Update:
        return update_part(*asked)

    def sweep_elsewhere(self, parts: Elsewhere, state: EPState) -> tuple[EPState, Array]:
        updates = _updates(parts, state)
        return step_by_updates(float(self.tol), self.damping is None, state, updates)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        if self.executor is None:
            return super().log_evidence(state, *args, **kwargs)
        parts, state, _ = self._for_call(state, args, kwargs)
        return outcome_of(state, _updates(parts, state))[1]


def _updates(parts: Elsewhere, state: EPState) -> list[Update]:
    """The updates of all factors from one q, in the groups of the state."""
    rows, *prior = jax.device_get(state.sites)
    key_rows, *keys = random.split(state.rng_key, len(parts.needs_key))
    of_prior = parts.ask_prior(state.total, prior, keys)
    sites = [jax.tree.map(lambda x, j=j: x[j : j + 1], rows) for j in range(len(parts.sources))]
    # A part has its own directions; the others of the widest part are 0.
    bases = np.asarray(state.table.groups[0].basis)
    ranks = np.any(bases != 0, 2).sum(1)
    asked = {j: (state.total, _cut(site, ranks[j])) for j, site in enumerate(sites)}
    answers = parts.visit(asked, random.split(key_rows, len(sites)))
    new: list[Update] = []
    for j, site in enumerate(sites):
        if (update := answers[j]) is None:  # the site stays
            kept: Any = parts.log_z[j : j + 1], np.ones(1, bool), np.zeros(1, bool)
            new.append(Update(site, *kept))
        else:
            parts.log_z[j] = update.log_z[0]
            new.append(update._replace(site=_padded(update.site, bases.shape[1])))
    together = jax.tree.map(lambda *x: jnp.concatenate(list(map(jnp.asarray, x))), *new)
    return [together, *of_prior()]


def _padded(site: Site, rank: int) -> Site:
    """A site of one factor, in more coordinates, on which it does not depend."""
    if site.precision.ndim == 2:  # a diagonal one, in all coordinates
        return site
    more = (0, rank - site.shift.shape[1])
    pad: Any = np.pad
    return Site(pad(site.shift, ((0, 0), more)), pad(site.precision, ((0, 0), more, more)))


def _cut(site: Site, rank: int) -> Site:
    """A site of one factor, in its first coordinates."""
    if site.precision.ndim == 2:
        return site
    return Site(site.shift[:, :rank], site.precision[:, :rank, :rank])


@dataclass(kw_only=True, eq=False, repr=False)
class _SharedInParts(_InParts, SharedSitesEngine):
    """The base of engines in which parts, or the rows of each, share a site."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience is not None and self.config(1).serial:
            raise ValueError(
                f"patience is {self.patience}; parts that are visited one after the other are"
                " waited for. Leave it out, or take an engine that computes all parts from one q:"
                " DAEP, or StochasticDistributedEP(schedule='parallel')."
            )

    def of_part(self) -> Any:
        return replace(self, partition=1, executor=None, patience=None, step=None)

    def start(self, told: list[Description], sizes: np.ndarray) -> EPState:
        state, D = told[0].state, len(told[0].state.total.shift)
        none = jnp.zeros((len(told), 0, D), state.total.shift.dtype)
        rows = FactorGroup(jnp.arange(len(told))[:, None], none)
        table = state.table._replace(groups=(rows, *state.table.groups[1:]))
        table = table._replace(times=self.times(int(sizes.sum())))
        shared = zeros_of(table, state.prior.precision.ndim == 1)[0]
        return state._replace(sites=(shared, *state.sites[1:]), table=table)

    def visit(
        self,
        plan: EPPlan,
        arrays: list[Array],
        table: FactorTable,
        total: Site,
        site: Site,
        item: Items,
        key: Array | None,
    ) -> Update:
        whole: Any = self.parts(plan.size).rows
        index = whole[0] if item.index is None else item.index
        item = item._replace(index=index, mask=np.ones(len(index), bool))
        rest: Any = table, total, site, item, key
        return visit_item(plan, self.config(plan.size), arrays, *rest)

    def sweep_elsewhere(self, parts: Elsewhere, state: EPState) -> tuple[EPState, Array]:
        return self.step_elsewhere(parts, state)[:2]

    def step_elsewhere(self, parts: Elsewhere, state: EPState) -> tuple[EPState, Array, Array]:
        """The step of :func:`shared_step`, of which workers make the visits."""
        config, layout, J = self.config(parts.size), self.parts(parts.size), len(parts.sources)
        key_rows, rng_key = None, state.rng_key
        index, count = [None] * J, layout.number
        if config.batch_size is not None:
            key_rows, rng_key = random.split(rng_key)
            top = jnp.asarray(layout.number)[:, None]
            index = np.asarray(random.randint(key_rows, (J, config.batch_size), 0, top))
            count = np.full(J, config.batch_size)
        rate, weight = rates_of(config, layout, state.i, count)
        rng_key, key_items, *keys = random.split(rng_key, len(parts.needs_key) + 1)
        keys_of_parts, rates = random.split(key_items, J), np.asarray(rate)
        base = after = state.total
        shared, *prior = state.sites
        of_prior = None if config.serial else parts.ask_prior(base, prior, keys)
        visits: list[Update] = []
        for some in [[j] for j in range(J)] if config.serial else [range(J)]:
            sites = jax.device_get(shared)
            asked = {}
            for j in some:
                site = jax.tree.map(lambda x, j=j: x[layout.slot[j]], sites)
                item = Items(0, layout.amount[j], rates[j], weight[j], index[j], None)
                asked[j] = after, site, item
            answers = parts.visit(asked, keys_of_parts)
            for j in some:
                if (answer := answers[j]) is None:  # the site stays
                    none = jax.tree.map(lambda x: np.zeros_like(x[0]), sites)
                    kept: Any = parts.log_z[j], np.int32(count[j]), np.int32(0)
                    answer = Update(none, *kept)
                parts.log_z[j] = answer.log_z
                visits.append(answer)
            change = jax.tree.map(lambda *x: np.stack(x), *(x.site for x in visits[-len(some) :]))
            shared, after = moved(state.table.times, shared, after, layout.slot[list(some)], change)
        if of_prior is None:
            base = after
            of_prior = parts.ask_prior(base, prior, keys)
        of_all = jax.tree.map(lambda *x: np.stack(x), *visits)
        rows = shared, base, after, of_all, weight, jnp.asarray(count.sum(), jnp.int32)
        state, loss = after_visits(config.tol, state, *rows, of_prior())
        return state._replace(rng_key=rng_key), loss, jnp.min(rate * count)


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticDistributedEP(_SharedInParts):
    r"""Stochastic expectation propagation on parts of the data: one site for all rows.

    .. math:: \lambda_q = \lambda_0 + N \lambda, \qquad \lambda \leftarrow (1 - N_j \epsilon)
        \lambda + \epsilon F_j

    with :math:`F_j = (\lambda_{\mathrm{proj}[q^{\setminus j} f_j^\alpha]} - \lambda_{q^{\setminus
    j}}) / \alpha` and the cavity :math:`\lambda_q - \alpha N_j \lambda`, for one part after the
    other (SDEP), or from one q for all parts (ADEP). One ``update`` is a pass over all parts.

    **Bias.** Where parts differ, q is further from the posterior than by :class:`DistributedEP`.
    With few parts and the default step SDEP leans towards the last part, which has the share
    :math:`N_j \epsilon` in the site; with small steps it moves around the fixed point of ADEP.

    :param str schedule: ``"serial"`` for SDEP, ``"parallel"`` for ADEP.
    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N.
    :param float tol: as of :class:`EP`.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 6.

    >>> from numpyro_ext.ep import StochasticDistributedEP
    >>> ep = StochasticDistributedEP(normal_mean, 2, schedule="parallel")
    >>> result = ep.run(jax.random.key(0), 5, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    schedule: str = "parallel"
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("schedule", self.schedule, ("serial", "parallel"))

    def rows_of(self, factors: Factors) -> np.ndarray:
        return self.rows_of_parts(factors.size)[0]

    def parts(self, size: int) -> Parts:
        """Each part is one factor."""
        sizes = self.rows_of_parts(size)[1]
        J = np.arange(len(sizes))
        return Parts(0 * J, sizes, np.ones(len(J), int), J[:, None])

    def config(self, size: int) -> SharedConfig:
        step = 1 / size if self.step is None else self.step
        return SharedConfig(self.schedule == "serial", float(self.tol), step=step)


class _SitePerPart(_SharedInParts):
    """A site for the rows of each part."""

    def parts(self, size: int) -> Parts:
        rows, sizes = self.rows_of_parts(size)
        return Parts(np.arange(len(sizes)), np.ones(len(sizes)), sizes, rows)


@dataclass(kw_only=True, eq=False, repr=False)
class DSEP(_SitePerPart, RandomRowsEngine):
    r"""Stochastic expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow (1 -
        \epsilon_j) \lambda_j + \epsilon_j \lambda_n

    where n is a random row of part j, and :math:`\lambda_n = (\lambda_{\mathrm{proj}[q^{\setminus
    j} f_n^\alpha]} - \lambda_{q^{\setminus j}}) / \alpha` with the cavity :math:`\lambda_q - \alpha
    \lambda_j`. One ``update`` visits one row of every part, part after part. With a single part it
    is stochastic EP, with one row to a part :class:`EP`.

    **Bias.** A constant step leaves noise in the sites, with a variance in proportion to the step,
    and a bias where factors are not normal. ``run`` returns the mean over its last half.

    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N_j.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 7.

    >>> from numpyro_ext.ep import DSEP
    >>> ep = DSEP(normal_mean, jnp.array([0, 1, 2]))   # a part to each row: EP
    >>> result = ep.run(jax.random.key(0), 3, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    def config(self, size: int) -> SharedConfig:
        return SharedConfig(serial=True, step=self.step, batch_size=1)

    def update(
        self, state: EPState, *args: Any, indices: Any = None, **kwargs: Any
    ) -> tuple[EPState, Array]:
        if indices is not None and self.executor is not None:
            raise TypeError("indices are rows of all parts; with an executor leave them out.")
        return super().update(state, *args, indices=indices, **kwargs)

    def _several(
        self, plan: Any, state: EPState, arrays: list[Array], *counted: Any
    ) -> tuple[EPState, Any, Array]:
        if self.executor is None:
            return super()._several(plan, state, arrays, *counted)
        sums, first, averaged, n = counted
        losses = []
        for _ in range(n):
            state, loss, epsilon = self.step_elsewhere(plan, state)
            sums = added(state, epsilon, sums, first, averaged)
            losses.append(loss)
        return state, sums, jnp.stack(losses)


@dataclass(kw_only=True, eq=False, repr=False)
class DAEP(_SitePerPart):
    r"""Averaged expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow \frac
        1{N_j} \sum_{n \in \text{part } j} \lambda_n

    from one q for all rows, with :math:`\lambda_n` as in :class:`DSEP`; it is the limit of this
    for small steps. One ``update`` is a pass over all rows. With a single part it is averaged EP,
    with one row to a part :class:`EP`.

    **Distributed black-box alpha** is ``mean="moments"``: the new site of a part has the mean of
    the *moments* of its tilted distributions, in place of the mean of their sites. Its fixed points
    are the stationary points in all :math:`\lambda_j` of the energy

    .. math::

        L = \Phi(\lambda_q) - \Phi(\lambda_0) + \frac1\alpha \sum_j \sum_{n \in \text{part } j}
        \log \mathrm E_q \left[ \left( f_n / \tilde f_j \right)^\alpha \right], \qquad
        \mathrm E_q[t] = \frac1{N_j} \sum_{n \in \text{part } j} \mathrm E_{\hat p_n}[t] \quad
        \text{for all } j,

    with the site :math:`\tilde f_j`, the moments t of a normal, and :math:`\hat p_n \propto q\,
    (f_n / \tilde f_j)^\alpha`; minus L is the loss of an update. With a single part L is the
    energy of :class:`~numpyro_ext.objectives.BBAlphaELBO` for a normal guide, and with one row to a
    part of :class:`EP`. For several parts its stationary points are saddle points, which no
    optimiser finds. Whole steps may diverge.

    :param step: the share in (0, 1] of the new site, or a function of the number of the update;
        None for 1, and for 1/2 by moments.
    :param str mean: ``"sites"``, or ``"moments"`` for distributed black-box alpha.
    :param float tol: as of :class:`EP`.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 8, and appendix B (eq.
    B.8: L); Dehaene, Barthelme, *Expectation propagation in the large-data limit* (JRSS B 2018).

    >>> from numpyro_ext.ep import DAEP
    >>> ep = DAEP(normal_mean, 1)
    >>> result = ep.run(jax.random.key(0), 5, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    mean: str = "sites"
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mean", self.mean, ("sites", "moments"))

    def config(self, size: int) -> SharedConfig:
        moments = self.mean == "moments"
        step = 0.5 if self.step is None and moments else self.step
        return SharedConfig(tol=float(self.tol), moments=moments, step=step)
