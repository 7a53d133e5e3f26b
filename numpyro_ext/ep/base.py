"""The base of engines of expectation propagation: reading the model, running, the answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from numpyro_ext._checks import InferenceWarning, check_choice, check_count, summary
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.posterior_as_prior import posterior_as_prior
from numpyro_ext._typing import Model, Params
from numpyro_ext.ep.factors import EPPlan, FactorTable, find_table, placed
from numpyro_ext.ep.guide import fits, guide_of, start_guide
from numpyro_ext.ep.normal import FAMILIES, Family, Site
from numpyro_ext.ep.prior import Prior, read_prior
from numpyro_ext.ep.projection import Projection
from numpyro_ext.ep.reader import ModelReading, Reader
from numpyro_ext.ep.sites import (
    EPRunResult,
    EPState,
    Report,
    carried,
    is_positive,
    limit_of,
    on_arguments,
    on_arguments_once,
    start_sites,
    total_of,
    with_forgotten,
    zeros_of,
)
from numpyro_ext.ep.sweep import evidence

FAR = 0.3
"""The residual of sites above which their estimate of the evidence is said to be off."""


def follow(
    steps: Iterable[tuple[Any, Any, str]], num_steps: int, progress_bar: bool
) -> tuple[Any, Array]:
    """The last state of a run and its losses, with a progress bar.

    :param steps: a state, the losses of the steps that led to it, and what else the bar shows.
    """
    last, losses = None, []
    with tqdm(total=num_steps, disable=not progress_bar) as bar:
        for state, some, note in steps:
            last, some = state, np.atleast_1d(some)
            losses.append(some)
            bar.update(len(some))
            bar.set_postfix_str(f"loss: {some.mean():.4f}{note}")
    return last, jnp.asarray(np.concatenate(losses))


@dataclass(kw_only=True, eq=False, repr=False)
class EPEngine(ABC):
    r"""The base of the engines, with the arguments that all of them share.

    .. math:: p(x, y) \propto f_0(x) \prod_n f_n(x) \approx q(x) = f_0(x) \prod_n \tilde f_n(x)

    with normal sites :math:`\tilde f_n` in unconstrained space. An engine is used in place of an
    ``SVI``: ``run(rng_key, num_steps, *args)`` gives the parameters of ``engine.guide``, an
    ``AutoMultivariateNormal`` or ``AutoDiagonalNormal``. The factors are the rows of the one plate
    that holds the observed sites, and the terms of the prior. Terms with a constant Hessian form an
    exact normal prior; every other batch element of a latent site is a factor. Latent sites inside
    the plate are integrated out of their row: discrete ones by a sum, one continuous coordinate by
    quadrature, and several by importance sampling or NUTS, at power 1. The guide draws them given
    the others and the data of their row: ``engine.guide.sample_posterior(rng_key, params, *args)``.

    A fit to other data of the same shapes, also by another engine of the same model, compiles
    nothing. What a model reads from globals, closures and attributes is compared at every call, and
    compiled anew if it has changed.

    A subclass writes :meth:`sweep`.

    :param model: Python callable with NumPyro primitives, with continuous latent sites.
    :param str family: ``"full"`` or ``"diagonal"``, the precision of q.
    :param projection: how the tilted moments are found; None for ``Quadrature()`` where a factor
        depends on at most ``max_rank`` directions, and ``ImportanceSampling()`` otherwise, with
        2,048 points for rows with several coordinates of local sites.
    :param int max_rank: the largest rank that is looked for, at most 3; 0 takes each factor as one
        of all coordinates.
    :param str data_plate: the plate whose rows are the factors, if observed sites are in several.
    :param str prefix: prefix of the names of the guide's parameters.
    :param tuple prior: yesterday's fit, ``(engine, result)``, ``(svi, result)`` or ``(guide,
        params)`` of a normal guide, whose posterior replaces the priors of its sites: ``model``
        becomes that of :func:`~numpyro_ext.guides.posterior_as_prior`. None for those of the model.
    :param float forgetting_factor: the power in (0, 1] of that posterior; 1 forgets nothing. On a
        first day, without a prior, there is nothing to forget.
    """

    model: Model = field(kw_only=False)
    family: str = "full"
    projection: Projection | None = None
    max_rank: int = 3
    data_plate: str | None = None
    prefix: str = "auto"
    prior: tuple[Any, Any] | None = None
    forgetting_factor: float = 1.0

    power: ClassVar[float] = 1.0
    """The power alpha of the factors of the data."""
    largest_share: ClassVar[float] = 0.05
    """The share of factors of the data without a low rank, above which all are taken whole."""
    forgets: ClassVar[bool] = False
    """Whether the sites of the data are forgotten, so that q holds more than prior and sites."""

    def __post_init__(self) -> None:
        if self.prior is not None:
            self.model = posterior_as_prior(self.model, self.prior, self.forgetting_factor)
            # The model has the numbers; a day would otherwise hold all days before it.
            self.prior, self.forgetting_factor = None, 1.0
        check_choice("family", self.family, tuple(FAMILIES))
        if check_count("max_rank", self.max_rank, minimum=0) > 3:
            raise ValueError(
                f"max_rank is {self.max_rank}; quadrature takes at most 3 directions. Use"
                " projection=ImportanceSampling() for factors of a larger rank."
            )
        self.guide: Any = guide_of(self.model, self.family, self.prefix)
        self._plan: EPPlan | None = None
        self._reader = Reader(self.model, self.data_plate)

    def __repr__(self) -> str:
        return summary(self)

    @property
    def normals(self) -> Family:
        """The arithmetic of normal distributions of the family."""
        return FAMILIES[self.family]

    def __getstate__(self) -> dict[str, Any]:
        # What reads the model holds closures; it is made again by the next init.
        fresh = guide_of(self.model, self.family, self.prefix)
        reader = Reader(self.model, self.data_plate)
        return {**vars(self), "guide": fresh, "_plan": None, "_reader": reader}

    @abstractmethod
    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        """The next state, and the loss; a compiled function of state and arrays."""

    def rows_of(self, factors: Factors) -> Array:
        """The rows of each factor of the data: ``(n,)``, or ``(n, m)`` filled up with -1."""
        return jnp.arange(factors.size)

    def start_damping(self) -> float:
        """The d of the first step."""
        return 1.0

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        """The state before the first step on these arguments of the model: q is the prior, or a
        normal one of its moments."""
        key_prior, key_state = random.split(rng_key)
        reading, arrays = self._reader.read(args, kwargs)
        prior = read_prior(reading, arrays, key_prior, self.family == "diagonal")
        self._plan, table = self.table_of(reading, arrays, prior)
        info = reading.factors.info
        locs = info.unravel(prior.center.mean)
        if not fits(self.guide, locs):
            self.guide = guide_of(self.model, self.family, self.prefix)
        start_guide(self.guide, locs, list(self.local_sites), args, kwargs)
        spec = self._plan.specs[0]
        projection = spec.projection if spec.local else None
        self.guide.of_fit(reading.factors, projection, self._reader.given, args, kwargs)
        family, normal = self.normals, prior.normal
        if self.family == "diagonal":
            normal = Site(normal.shift, jnp.diagonal(normal.precision))
        sites = zeros_of(family, table)
        if not is_positive(normal):
            sites = start_sites(self.family, self._plan, table, prior, sites)
            if not is_positive(total_of(family, normal, table, sites)):
                raise ValueError(
                    "some direction of the latent sites has no proper prior; give each latent site"
                    " a proper prior."
                )
        zero = jnp.zeros((), jnp.int32)
        # Types are given: a weak one would have the next step compiled anew.
        of_run = jnp.asarray(jnp.inf, float), zero, jnp.zeros((), bool)
        state = EPState(
            i=zero,
            shift=normal.shift,
            precision=normal.precision,
            site_shift=(),
            site_precision=(),
            prior_shift=normal.shift,
            prior_precision=normal.precision,
            report=Report(*of_run, *[zero] * 6, noise=jnp.asarray(jnp.nan, float)),
            log_evidence=jnp.asarray(jnp.nan, float),
            damping=jnp.asarray(self.start_damping(), float),
            table=table,
            rng_key=key_state,
        ).holding(total_of(family, normal, table, sites), sites)
        # A site where the rows of its factor are.
        in_blocks = self._plan.specs[0].blocks
        size = len(table.groups[0].index) if in_blocks else -1
        return placed(state, size, reading.factors.sharding)

    def update(self, state: EPState, *args: Any, **kwargs: Any) -> tuple[EPState, Array]:
        """One step: the next state, and the loss. A pure function, once ``init`` was called.

        A state of other data is a start, as in :meth:`run`. Under ``jax.jit`` it cannot be made one
        where rows depend on other directions: the loss is NaN then, and no factor is updated.
        """
        plan, state, arrays = self._on(state, args, kwargs)
        return self.sweep(plan, state, arrays)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: EPState | None = None,
        **kwargs: Any,
    ) -> Any:
        """At most ``num_steps`` steps, fewer if the fit converges.

        :param args: arguments of the model.
        :param bool progress_bar: whether to show the loss, and the residual, as the fit goes.
        :param init_state: the state to go on from; None for a new start. The prior and the
            factors are read again. Sites are kept as a start where there are as many factors.
        :return: an :data:`EPRunResult` with ``params``, ``state`` and ``losses``.
        """
        check_count("num_steps", num_steps)
        plan, state, arrays = self._begin(rng_key, init_state, args, kwargs)
        before, steps = state.report, self.steps(plan, state, arrays, num_steps)
        state, losses = follow(steps, num_steps, progress_bar)
        self._warn(before, state, num_steps)
        return EPRunResult(self.get_params(state), state, losses)

    def steps(
        self, plan: EPPlan, state: EPState, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[EPState, Any, str]]:
        """The states of a run, each with the losses of the steps to it, and a note on it."""
        for _ in range(num_steps):
            state, loss = self.sweep(plan, state, arrays)
            report = jax.device_get(state.report)
            self._check(state, report)
            yield state, loss, f", residual: {report.residual:.1e}"
            if report.converged:
                return

    def get_params(self, state: EPState) -> Params:
        """The parameters of the guide: ``{prefix}_loc``, and ``{prefix}_scale_tril`` or
        ``{prefix}_scale``."""
        q = self.normals.moments(state.total)
        if self.family == "diagonal":
            return {f"{self.prefix}_loc": q.mean, f"{self.prefix}_scale": jnp.sqrt(q.cov)}
        root = jnp.linalg.cholesky(q.cov)
        return {f"{self.prefix}_loc": q.mean, f"{self.prefix}_scale_tril": root}

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        r"""The estimate of log p(y) with the sites of a state, for these arguments of the model.

        It is differentiable in every array and float among them, with the sites held fixed. At a
        fixed point this is the derivative of EP's evidence, which is stationary in the sites:

        .. math:: \nabla_\theta \log Z = \mathrm E_q \nabla_\theta \log f_0 + \sum_n
            \mathrm E_{\hat p_n} \nabla_\theta l_n

        so that scales of a prior, lengths or noise can be chosen by type-II maximum likelihood.
        Sites that are far from their fixed point for these arguments give a warning. NaN under
        ``jax.jit`` means that rows depend on other directions than the state knows.
        """
        plan, state, arrays = self._on(lax.stop_gradient(state), args, kwargs)
        log_z, residual = self.evidence_of(plan, state, arrays)
        if not is_traced((log_z, residual)) and jnp.isfinite(log_z) and not residual < FAR:
            words = (
                f"the sites are not those of these arguments: a sweep would change q by"
                f" {float(residual):.2g} (standard deviations of a mean, or relative of a"
                " variance), so the estimate of the evidence is off; call"
                " run(..., init_state=state) with them first."
            )
            warnings.warn(InferenceWarning(words), stacklevel=2)
        return log_z

    def evidence_of(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
        """The estimate, and the residual of its sites."""
        return evidence(plan, self.normals, state, arrays)

    def evaluate(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """The loss at a state: minus :meth:`log_evidence`."""
        return -self.log_evidence(state, *args, **kwargs)

    @property
    def local_sites(self) -> tuple[str, ...]:
        """The latent sites inside the plate, which are integrated out and have no parameters."""
        if self._plan is None:
            return ()
        factors = self._plan.reading.factors
        return (*factors.local, *factors.states)

    def convergence(self, state: EPState) -> dict[str, float]:
        """What :func:`~numpyro_ext.diagnostics.diagnose` shows of the report of a state."""
        report = jax.device_get(state.report)
        q = self.normals.moments(state.total)
        return {
            "residual": float(report.residual),
            "limit": float(limit_of(getattr(self, "tol", 0.0), q)),
            "skipped": int(report.skipped),
            "inaccurate": int(report.num_inaccurate),
        }

    def _begin(
        self, rng_key: Array, init_state: EPState | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[EPPlan, EPState, list[Array]]:
        """The plan, the state that a run goes on from, and the arrays among the arguments."""
        state = self.init(rng_key, *args, **kwargs)
        assert self._plan is not None
        if init_state is not None:
            state = self._resumed(init_state, state)
        return self._plan, state, self._reader.split(args, kwargs)[1]

    def _resumed(self, old: EPState, new: EPState) -> EPState:
        """An old state on the data of a new one."""
        sites = carried(old, new)
        total = total_of(self.normals, new.prior, new.table, sites)
        if self.forgets:
            total = with_forgotten(self.normals, old, total)
        if not is_positive(total):
            return new
        return old.holding(total, sites, new.prior, table=new.table)

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        """The factors of the model."""
        return find_table(
            reading,
            arrays,
            prior,
            self.rows_of(reading.factors),
            power=float(self.power),
            projection=self.projection,
            max_rank=self.max_rank,
            largest_share=self.largest_share,
        )

    def _on(
        self, state: EPState, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[EPPlan, EPState, list[Array]]:
        """The plan, the state on the data of a call, and the arrays among its arguments."""
        if self._plan is None:
            raise ValueError(
                f"this {type(self).__name__} has not read its model; call init with the model's"
                " arguments first."
            )
        arguments, arrays = self._reader.split(args, kwargs)
        plan, given = self._plan, (self._plan, self.normals, self.forgets, state, arrays)
        same = len(state.table.groups) == len(plan.specs)
        same = same and self._reader.serves(plan.reading, arguments, arrays)
        if is_traced((state, args, kwargs)):
            if not same:
                raise ValueError(
                    "the arguments of the model, or what it reads from outside, differ from those"
                    " of init in more than the numbers of arrays; call init with them first."
                )
            state, fit = on_arguments(*given)
            lost = jnp.where(fit, 0.0, jnp.nan)
            return plan, state._replace(shift=state.shift + lost), arrays
        if same:
            new, fit = on_arguments_once(*given)
            if fit:
                return plan, new, arrays
        return self._begin(state.rng_key, state, args, kwargs)

    def _check(self, state: EPState, report: Report) -> None:
        total = int(report.visited)
        if report.skipped == total:
            raise RuntimeError(
                f"in step {int(state.i)} none of the {total} factors could be updated"
                f" ({int(report.num_improper)} improper cavities, {int(report.num_skipped)} without"
                " tilted moments); check the data and the prior, or use"
                " projection=ImportanceSampling()."
            )

    def _warn(self, before: Report, state: EPState, num_steps: int) -> None:  # noqa: B027
        """Say that the fit has not converged, if the engine can tell."""
