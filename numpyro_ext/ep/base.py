"""The base of engines of expectation propagation: reading the model, running, the answer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
from numpyro_ext.ep.factors import EPPlan, FactorTable, find_table
from numpyro_ext.ep.guide import guide_of, has_sites, start_guide
from numpyro_ext.ep.normal import FAMILIES, Family
from numpyro_ext.ep.projection import Projection
from numpyro_ext.ep.reading import ModelReading, Prior, Reader, read_prior
from numpyro_ext.ep.state import (
    EPRunResult,
    EPState,
    Report,
    is_positive,
    limit_of,
    on_arguments,
    on_arguments_once,
    start_state,
    total_of,
    transfer_sites,
    with_forgotten,
)
from numpyro_ext.ep.sweep import evidence

FAR = 0.3
"""The residual of sites above which their estimate of the evidence is said to be off."""


class Engine(ABC):
    """The base of what stands in place of an ``SVI``: it runs steps, and has a guide."""

    def __repr__(self) -> str:
        return summary(self)

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: Any = None,
        **kwargs: Any,
    ) -> Any:
        """At most ``num_steps`` steps, fewer if the fit converges.

        :param args: arguments of the model.
        :param bool progress_bar: whether to show the loss and the residual.
        :param init_state: the state to continue; None for a new start. The prior and the factors
            are read again, and the sites are kept where there are as many factors.
        :return: an :data:`EPRunResult` with ``params``, ``state`` and ``losses``.
        """
        check_count("num_steps", num_steps)
        plan, state, arrays = self.begin(rng_key, init_state, args, kwargs)
        first, losses = state, []
        with tqdm(total=num_steps, disable=not progress_bar) as bar:
            for last, some, note in self.steps(plan, state, arrays, num_steps):
                state, some = last, np.atleast_1d(some)
                losses.append(some)
                bar.update(len(some))
                bar.set_postfix_str(f"loss: {some.mean():.4f}{note}")
        self.warn(first, state, num_steps)
        return EPRunResult(self.get_params(state), state, jnp.asarray(np.concatenate(losses)))

    @abstractmethod
    def begin(
        self, rng_key: Array, init_state: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, list[Array]]:
        """The plan, the state with which a run begins, and the arrays among the arguments."""

    @abstractmethod
    def steps(
        self, plan: Any, state: Any, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[Any, Any, str]]:
        """The states of a run, each with the losses of the steps to it, and a note on it."""

    @abstractmethod
    def get_params(self, state: Any) -> Params:
        """The parameters of the guide."""

    def warn(self, first: Any, state: Any, num_steps: int) -> None:  # noqa: B027
        """Warn of a result that is not reliable, after a run that began at the state ``first``."""


@dataclass(kw_only=True, eq=False, repr=False)
class EPEngine(Engine):
    r"""The base of the engines, with the arguments that all of them share.

    .. math:: p(x, y) \propto f_0(x) \prod_n f_n(x) \approx q(x) = f_0(x) \prod_n \tilde f_n(x)

    with normal sites :math:`\tilde f_n` in unconstrained space. An engine stands in place of an
    ``SVI``: ``run(rng_key, num_steps, *args)`` gives the parameters of ``engine.guide``, an
    ``AutoMultivariateNormal`` or ``AutoDiagonalNormal``. The factors are the rows of the plate that
    holds the observed sites, and the terms of the prior. Terms with a constant Hessian form an
    exact normal prior; every other batch element of a latent site is a factor. Latent sites inside
    the plate are integrated out of their row: discrete ones by a sum, one continuous coordinate by
    quadrature, and several by importance sampling or NUTS, at power 1. The guide draws them given
    the others and the data of their row: ``engine.guide.sample_posterior(rng_key, params, *args)``.

    A fit to other data of the same shapes, also by another engine of the same model, compiles
    nothing. If the model reads other values from globals, closures or attributes, it is compiled
    anew. A subclass writes :meth:`sweep`.

    :param model: Python callable with NumPyro primitives, with continuous latent sites.
    :param str family: ``"full"`` or ``"diagonal"``, the precision of q.
    :param projection: how the tilted moments are found; None for ``Quadrature()`` where a factor
        depends on at most ``max_rank`` directions, and ``ImportanceSampling()`` otherwise, with
        2,048 points for rows with several coordinates of local sites.
    :param int max_rank: the largest number of directions, at most 3; 0 takes every factor in all
        coordinates.
    :param str data_plate: the plate whose rows are the factors, if observed sites are in several.
    :param str prefix: prefix of the names of the guide's parameters.
    :param tuple prior: yesterday's fit, ``(engine, result)``, ``(svi, result)`` or ``(guide,
        params)`` of a normal guide, whose posterior replaces the priors of its sites: ``model``
        becomes :func:`~numpyro_ext.guides.posterior_as_prior`. None for the priors of the model.
    :param float forgetting_factor: the power in (0, 1] of yesterday's posterior, if there is one;
        1 forgets nothing.
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
    damping: ClassVar[float | None] = None
    """The d of the first step; None for 1."""
    largest_share: ClassVar[float] = 0.05
    """The share of rows without a low rank above which all are treated in all coordinates."""
    forgets: ClassVar[bool] = False
    """Whether the sites of the data are forgotten, so that q is more than prior times sites."""

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
        self._forget()

    def _forget(self) -> None:
        """Take a guide and a reader that have not seen the model."""
        self.guide: Any = guide_of(self.model, self.family, self.prefix)
        self._plan: EPPlan | None = None
        self._reader = Reader(self.model, self.data_plate)

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        vars(fresh).update(vars(self))
        fresh._forget()  # what reads the model holds closures
        return vars(fresh)

    @property
    def normals(self) -> Family:
        """The arithmetic of normal distributions of the family."""
        return FAMILIES[self.family]

    @abstractmethod
    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        """The next state, and the loss; a compiled function of state and arrays."""

    def rows_of(self, factors: Factors) -> Array:
        """The rows of each factor of the data: ``(n,)``, or ``(n, m)`` filled up with -1."""
        return jnp.arange(factors.size)

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        """The factors of the model."""
        rows, power = self.rows_of(reading.factors), float(self.power)
        how = power, self.projection, self.max_rank, self.largest_share
        return find_table(reading, arrays, prior, rows, *how)

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        """The state before the first step on these arguments of the model: q is the prior, or a
        normal one of its moments."""
        key_prior, key_state = random.split(rng_key)
        reading, arrays = self._reader.read(args, kwargs)
        prior = read_prior(reading, arrays, key_prior, self.family == "diagonal")
        self._plan, table = self.table_of(reading, arrays, prior)
        locs = reading.factors.info.unravel(prior.center.mean)
        if not has_sites(self.guide, locs):
            self.guide = guide_of(self.model, self.family, self.prefix)
        start_guide(self.guide, locs, list(self.local_sites), args, kwargs)
        rows = self._plan.specs[0]
        projection = rows.projection if rows.local else None
        self.guide.take_fit(reading.factors, projection, self._reader.leading, args, kwargs)
        damping = 1.0 if self.damping is None else float(self.damping)
        return start_state(self.normals, self._plan, table, prior, damping, key_state)

    def update(self, state: EPState, *args: Any, **kwargs: Any) -> tuple[EPState, Array]:
        """One step: the next state, and the loss. A pure function, once ``init`` was called.

        A state of other data is a start, as in :meth:`run`. Under ``jax.jit`` it cannot be made one
        where rows depend on other directions: the loss is NaN then, and no factor is updated.
        """
        return self.sweep(*self._for_call(state, args, kwargs))

    def steps(
        self, plan: EPPlan, state: EPState, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[EPState, Any, str]]:
        for _ in range(num_steps):
            state, loss = self.sweep(plan, state, arrays)
            report: Report = jax.device_get(state.report)
            if report.skipped == report.visited:
                raise RuntimeError(
                    f"in step {int(state.i)} none of the {report.visited} factors could be updated"
                    f" ({report.num_improper} improper cavities, {report.num_skipped} without"
                    " tilted moments); check the data and the prior, or use"
                    " projection=ImportanceSampling()."
                )
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
        log_z, residual = self.evidence_of(*self._for_call(lax.stop_gradient(state), args, kwargs))
        if not is_traced((log_z, residual)) and jnp.isfinite(log_z) and not residual < FAR:
            words = (
                "the sites belong to other arguments: a sweep would change q by"
                f" {float(residual):.2g} (standard deviations of a mean, or relative of a"
                " variance), so the estimate of the evidence is off; call"
                " run(..., init_state=state) with these arguments first."
            )
            warnings.warn(InferenceWarning(words), stacklevel=2)
        return log_z

    def evidence_of(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[Array, Array]:
        """The estimate, and the residual of its sites."""
        return evidence(plan, self.normals, state, arrays)

    def evaluate(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """Minus :meth:`log_evidence`: the loss at a state."""
        return -self.log_evidence(state, *args, **kwargs)

    @property
    def local_sites(self) -> tuple[str, ...]:
        """The latent sites inside the plate, which are integrated out and have no parameters."""
        if self._plan is None:
            return ()
        factors = self._plan.reading.factors
        return (*factors.local, *factors.states)

    def convergence(self, state: EPState) -> dict[str, float]:
        """For :func:`~numpyro_ext.diagnostics.diagnose`: parts of the report of a state."""
        report = jax.device_get(state.report)
        q = self.normals.moments(state.total)
        return {
            "residual": float(report.residual),
            "limit": float(limit_of(getattr(self, "tol", 0.0), q)),
            "skipped": int(report.skipped),
            "inaccurate": int(report.num_inaccurate),
        }

    def begin(
        self, rng_key: Array, init_state: EPState | None, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[EPPlan, EPState, list[Array]]:
        state = self.init(rng_key, *args, **kwargs)
        assert self._plan is not None
        if init_state is not None:
            sites = transfer_sites(init_state, state)
            total = total_of(self.normals, state.prior, state.table, sites)
            if self.forgets:
                total = with_forgotten(self.normals, init_state, total)
            if is_positive(total):
                state = init_state.with_sites(total, sites, state.prior, table=state.table)
        return self._plan, state, self._reader.split(args, kwargs)[1]

    def _for_call(
        self, state: EPState, args: tuple, kwargs: dict[str, Any], indices: Any = None
    ) -> tuple[EPPlan, EPState, list[Array]]:
        """The plan, the state on the data of a call, and the arrays among its arguments; under a
        trace of any of these, also of the indices of rows alone."""
        plan = self._plan
        if plan is None:
            raise ValueError(
                f"this {type(self).__name__} has not read its model; call init with the model's"
                " arguments first."
            )
        arguments, arrays = self._reader.split(args, kwargs)
        traced = is_traced((state, args, kwargs, indices))
        same_groups = len(state.table.groups) == len(plan.specs)
        if same_groups and self._reader.serves(plan.reading, arguments, arrays):
            move = on_arguments if traced else on_arguments_once
            new, fit = move(plan, self.normals, self.forgets, state, arrays)
            if traced:
                new = new._replace(shift=new.shift + jnp.where(fit, 0.0, jnp.nan))
            if traced or fit:
                return plan, new, arrays
        if traced:
            raise ValueError(
                "the arguments of the model, or what it reads from outside, differ from init"
                " in more than the numbers of arrays; call init with them first."
            )
        return self.begin(state.rng_key, state, args, kwargs)
