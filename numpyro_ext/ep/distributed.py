"""Expectation propagation on data in parts."""

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_positive, if_given
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.elsewhere import Elsewhere
from numpyro_ext.ep.ep import EP, step_by_updates
from numpyro_ext.ep.shared_sites import Parts, SharedConfig, SharedSitesEngine
from numpyro_ext.ep.state import EPState, outcome_of
from numpyro_ext.ep.stochastic import RandomRowsEngine


@dataclass(kw_only=True, eq=False, repr=False)
class _InParts:
    """The base of engines on parts of the data.

    :param partition: the number J of parts, contiguous and of nearly one size, or an integer vector
        with the label 0, ..., J - 1 of each row.
    """

    partition: Any = field(kw_only=False)

    def rows_of_parts(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of each of J parts, ``(J, M)`` filled up with -1, and their numbers ``(J,)``."""
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
    r"""Expectation propagation whose factors are parts of the data.

    .. math:: f_j(x) = \exp \sum_{n \in \text{part } j} l_n(x), \qquad q(x) = f_0(x) \prod_j
        \tilde f_j(x)

    and all else as in :class:`EP`, which it is with one row to a part. With a single part q has the
    moments of the posterior itself. Most parts depend on more directions than quadrature takes, and
    have ``ImportanceSampling()``, or ``projection=NUTSProjection()``, which has no evidence and
    leaves noise in the sites, so that the residual stays above ``tol``.

    **Parts that others hold.** With an ``executor`` each part is opened by a worker, which keeps it
    and is sent q and the part's site, in natural parameters; it answers with the new site, of as
    many numbers. A run is then given no arguments, and its answer is the same up to rounding. The
    guide draws the sites outside the plate of the data.

    :param partition: the number J of parts, contiguous and of nearly one size, or an integer vector
        with the label 0, ..., J - 1 of each row. With an ``executor`` a list of functions without
        arguments, one for each part, that return the model's arguments there.
    :param str schedule: ``"parallel"``, all parts from one q, or ``"serial"``.
    :param executor: any ``concurrent.futures.Executor``, as a ``ProcessPoolExecutor``,
        ``Client.get_executor()`` of ``dask.distributed``, or those of MPI and Ray; a list of them
        has the parts in turn, so that each part stays with the workers of one.
    :param float patience: seconds after which a step goes on with the parts that have answered; the
        site of a part that is late changes in the step in which it answers. None waits for all.
    :param str lost: ``"raise"``, by which a part that fails ends the run, with its number, or
        ``"keep"``, by which its last site stays and the run warns.

    **Reference:** Gelman et al., *Expectation propagation as a way of life* (JMLR 2020), algorithm
    1.

    >>> from numpyro_ext.ep import DistributedEP
    >>> ep = DistributedEP(normal_mean, 2)
    >>> result = ep.run(jax.random.key(0), 50, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    schedule: str = "parallel"
    executor: Executor | Sequence[Executor] | None = None
    patience: float | None = None
    lost: str = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._elsewhere: Elsewhere | None = None
        check_choice("lost", self.lost, ("raise", "keep"))
        if_given(check_positive, "patience", self.patience)
        if self.executor is None:
            return
        if self.schedule != "parallel":
            raise ValueError(
                f"schedule is {self.schedule!r}; with an executor all parts are computed from one"
                " q, which is schedule='parallel'."
            )
        if not isinstance(self.partition, list | tuple) or not self.partition:
            raise TypeError(
                f"partition is {type(self.partition).__name__}; with an executor it must be a list"
                " with a function for each part, which returns the model's arguments there."
            )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_elsewhere": None}

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(self.rows_of_parts(factors.size)[0])

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        if self.executor is None:
            return super().init(rng_key, *args, **kwargs)
        if args or kwargs:
            raise TypeError(
                "the workers have the rows; call run(rng_key, num_steps) without arguments of the"
                " model."
            )
        of_part = replace(self, partition=1, executor=None)
        executors = self.executor if isinstance(self.executor, Sequence) else [self.executor]
        parts = Elsewhere(
            *(of_part, self.partition, executors, rng_key, self.patience, self.lost == "keep")
        )
        first, state = parts.begin(random.split(rng_key)[1])
        self._elsewhere = parts
        self.guide.start_without_rows(first.locs, first.local, first.arguments)
        return state

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: dict[str, Any]) -> None:
        if self.executor is None:
            super().restore(saved, args, kwargs)
        else:
            self.begin(random.key(0), None, args, kwargs)

    def begin(
        self, rng_key: Array, init_state: EPState | None, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if self.executor is None:
            return super().begin(rng_key, init_state, args, kwargs)
        state = self.init(rng_key, *args, **kwargs)
        return self._for_call(state if init_state is None else init_state, (), {})

    def _for_call(self, state: EPState, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.executor is None:
            return super()._for_call(state, args, kwargs)
        parts = self._elsewhere
        if parts is None:
            raise ValueError("this DistributedEP has not opened its parts; call init first.")
        if (n := len(state.table.groups[0].index)) != len(parts.sources):
            raise ValueError(f"the state has {n} parts, and this engine {len(parts.sources)}.")
        return parts, state, []

    def sweep(self, plan: Any, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        if self.executor is None:
            return super().sweep(plan, state, arrays)
        return step_by_updates(float(self.tol), self.damping is None, state, plan.updates(state))

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        if self.executor is None:
            return super().log_evidence(state, *args, **kwargs)
        parts, state, _ = self._for_call(state, args, kwargs)
        return outcome_of(state, parts.updates(state))[1]

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        if self._elsewhere is not None:
            self._elsewhere.warn()
        super().warn(first, state, num_steps)


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticDistributedEP(_InParts, SharedSitesEngine):
    r"""Stochastic expectation propagation on parts of the data: one site for all rows.

    .. math:: \lambda_q = \lambda_0 + N \lambda, \qquad \lambda \leftarrow (1 - N_j \epsilon)
        \lambda + \epsilon F_j

    with :math:`F_j = (\lambda_{\mathrm{proj}[q^{\setminus j} f_j^\alpha]} - \lambda_{q^{\setminus
    j}}) / \alpha` and the cavity :math:`\lambda_q - \alpha N_j \lambda`, for one part after the
    other (SDEP), or from one q for all parts (ADEP). One ``update`` is a pass over all parts.

    **Bias.** Where parts differ, q is further from the posterior than by :class:`DistributedEP`.
    With few parts and the default step SDEP leans towards the last part, whose share in the site
    is :math:`N_j \epsilon`; with small steps it moves around the fixed point of ADEP.

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

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(self.rows_of_parts(factors.size)[0])

    def parts(self, size: int) -> Parts:
        """Each part is one factor."""
        sizes = self.rows_of_parts(size)[1]
        J = np.arange(len(sizes))
        return Parts(0 * J, sizes, np.ones(len(J), int), J[:, None])

    def config(self, size: int) -> SharedConfig:
        step = 1 / size if self.step is None else self.step
        return SharedConfig(self.schedule == "serial", float(self.tol), step=step)


class _SitePerPart(_InParts, SharedSitesEngine):
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


@dataclass(kw_only=True, eq=False, repr=False)
class DAEP(_SitePerPart):
    r"""Averaged expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow \frac
        1{N_j} \sum_{n \in \text{part } j} \lambda_n

    from one q for all rows, with :math:`\lambda_n` as in :class:`DSEP`, whose limit for small steps
    it is. One ``update`` is a pass over all rows. With a single part it is averaged EP, with one
    row to a part :class:`EP`.

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
