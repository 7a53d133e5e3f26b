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

from numpyro_ext._checks import InferenceWarning, check_choice, check_count, check_positive, summary
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.circles import sites_at_pi
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.operations import on_numbers
from numpyro_ext._model.posterior_as_prior import posterior_as_prior
from numpyro_ext._typing import Kwargs, Model, Params
from numpyro_ext.ep.factors import EPPlan, FactorTable, find_table
from numpyro_ext.ep.guide import guide_of, has_sites, start_guide
from numpyro_ext.ep.normal import Site, moments_of, plus, variances
from numpyro_ext.ep.projection import Projection
from numpyro_ext.ep.quadrature import Quadrature
from numpyro_ext.ep.reading import ModelReading, Prior, Reader, read_prior
from numpyro_ext.ep.state import (
    EPRunResult,
    EPState,
    Report,
    evidence,
    limit_of,
    on_arguments,
    start_state,
)

FAR = 0.3  # the residual of sites above which their estimate of the evidence is said to be off


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
        :param init_state: the state of a run on these data to continue; None for a new start.
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
        self, rng_key: Array, init_state: Any, args: tuple, kwargs: Kwargs
    ) -> tuple[Any, Any, list[Array]]:
        """The plan, the state with which a run begins, and the arrays among the arguments."""

    @abstractmethod
    def steps(
        self, plan: Any, state: Any, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[Any, Any, str]]:
        """The states of a run, each with the losses of the steps to it, and a note on it."""

    @abstractmethod
    def get_params(self, state: Any) -> Params: ...

    def restore(self, saved: Any, args: tuple, kwargs: Kwargs) -> None:
        """Set up guide and plan without a step, as for :func:`numpyro_ext.saving.load`."""
        self.begin(random.key(0), None, args, kwargs)

    def saved(self) -> dict[str, Any]:
        """What runs have found beside their results, for :func:`numpyro_ext.saving.save`."""
        return {}

    def warn(self, first: Any, state: Any, num_steps: int) -> None:  # noqa: B027
        """Warn of an unreliable result, after a run that began at the state ``first``."""


@jax.jit
def normal_of(total: Site) -> tuple[Array, Array, Array]:
    """The mean, the standard deviations, and these or the Cholesky factor of the covariance."""
    q = moments_of(total)
    sd = jnp.sqrt(variances(q))
    return q.mean, sd, sd if q.cov.ndim == 1 else jnp.linalg.cholesky(q.cov)


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
    the others and the data of their row. A fit to other data of the same shapes compiles nothing. A
    subclass writes :meth:`sweep`.

    :param model: Python callable with NumPyro primitives, with continuous latent sites.
    :param str family: ``"full"`` or ``"diagonal"``, the precision of q.
    :param projection: how the tilted moments are found; None for ``Quadrature()`` where a factor
        depends on at most ``max_rank`` directions, and ``ImportanceSampling()`` otherwise, with
        2,048 points for rows with several coordinates of local sites.
    :param int max_rank: the largest number of directions, at most 3; 0 takes every factor in all
        coordinates.
    :param str data_plate: the plate with the factors as its rows, if observed sites are in several.
    :param str prefix: prefix of the names of the guide's parameters.
    :param tuple prior: yesterday's fit, ``(engine, result)``, ``(svi, result)`` or ``(guide,
        params)`` of a normal guide; its posterior replaces the priors of its sites by
        :func:`~numpyro_ext.guides.posterior_as_prior`.
    :param float forgetting_factor: the power in (0, 1] of yesterday's posterior.
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
    damping: ClassVar[float | None] = None
    largest_share: ClassVar[float] = 0.05
    """The share of rows without a low rank above which all are treated in all coordinates."""

    def __post_init__(self) -> None:
        if self.prior is not None:
            self.model = posterior_as_prior(self.model, self.prior, self.forgetting_factor)
            # The model has the numbers; a day would otherwise hold all days before it.
            self.prior, self.forgetting_factor = None, 1.0
        check_choice("family", self.family, ("full", "diagonal"))
        if check_count("max_rank", self.max_rank, minimum=0) > Quadrature.max_rank:
            raise ValueError(
                f"max_rank is {self.max_rank}; quadrature takes at most {Quadrature.max_rank}"
                " directions. Use projection=ImportanceSampling() for factors of a larger rank."
            )
        check_positive("tol", getattr(self, "tol", 1.0))
        self._forget()

    def _forget(self) -> None:
        """Take a guide and a reader that have not seen the model."""
        self.guide: Any = guide_of(self.model, self.family, self.prefix)
        self._plan: Any = None
        self._shapes: Any = None
        self._times: Array | None = None
        self._seen: list[Any] = []
        self._is_restored = False
        self._reader = Reader(self.model, self.data_plate)

    def saved(self) -> dict[str, Any]:
        return {"needs_rows": self.guide.needs_rows, "locs": self.guide.locs}

    def restore(self, saved: dict[str, Any], args: tuple, kwargs: Kwargs) -> None:
        if saved["needs_rows"] or saved["locs"] is None:
            super().restore(saved, args, kwargs)
            return
        # What has to be read for a step is read once there is one.
        start_guide(self.guide, saved["locs"], [], args, kwargs)
        self._is_restored = True

    def __getstate__(self) -> dict[str, Any]:
        fresh = object.__new__(type(self))
        vars(fresh).update(vars(self))
        fresh._forget()  # what reads the model holds closures
        if self.guide.prototype_trace is not None and not self.guide.needs_rows:
            fresh.guide = self.guide.without_fit()
        return vars(fresh)

    @abstractmethod
    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        """The next state, and the loss; a compiled function of state and arrays."""

    def rows_of(self, factors: Factors) -> np.ndarray:
        """The rows of each factor of the data: ``(n,)``, or ``(n, m)`` filled up with -1."""
        return np.arange(factors.size)

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        how = float(self.power), self.projection, self.max_rank, self.largest_share
        return find_table(reading, arrays, prior, self.rows_of(reading.factors), *how)

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        """The state before the first step on these arguments of the model: q is the prior, or a
        normal one of its moments."""
        key_prior, key_state = random.split(rng_key)
        reading, arrays = self._reader.read(args, kwargs)
        prior = read_prior(reading, arrays, key_prior, self.family == "diagonal")
        self._plan, table = self.table_of(reading, arrays, prior)
        self._shapes, self._times = jax.tree.map(jnp.shape, table), table.times
        locs = reading.factors.info.unravel(prior.center.mean)
        if not has_sites(self.guide, locs):
            self.guide = guide_of(self.model, self.family, self.prefix)
        # Sites inside the plate are integrated out and have no parameters.
        local_sites = [*reading.factors.local, *reading.factors.states]
        start_guide(self.guide, locs, local_sites, args, kwargs)
        rows = self._plan.specs[0]
        projection = rows.projection if rows.local else None
        self.guide.take_fit(reading.factors, projection, self._reader.leading, args, kwargs)
        damping = 1.0 if self.damping is None else float(self.damping)
        state = start_state(self._plan, table, prior, damping, key_state)
        self._seen = _numbers_of(state, arrays)
        return state

    @property
    def plan(self) -> EPPlan:
        """What :meth:`init` has read."""
        if self._plan is None:
            raise ValueError(
                f"this {type(self).__name__} has not read its model; call init with the model's"
                " arguments first."
            )
        return self._plan

    def arrays_of(self, args: tuple, kwargs: Kwargs | None = None) -> list[Array]:
        """The arrays among arguments of the model, with which a step computes."""
        return self._reader.split(args, kwargs or {})[1]

    def update(self, state: EPState, *args: Any, **kwargs: Any) -> tuple[EPState, Array]:
        """One step: the next state, and the loss. A pure function, once ``init`` was called.

        A state of another number of rows, or of rows in other directions, is an error, and under
        ``jax.jit`` makes the loss NaN; the numbers of the prior may be others.
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
                    f"in step {int(state.i)} none of the {report.visited} factors could be updated;"
                    " check the data and the prior, or use projection=ImportanceSampling()."
                )
            yield state, loss, f", residual: {report.residual:.1e}"
            if report.converged:
                return

    def get_params(self, state: EPState) -> Params:
        """The parameters of the guide: ``{prefix}_loc``, and ``{prefix}_scale_tril`` or
        ``{prefix}_scale``."""
        mean, _, root = normal_of(state.total)
        kind = "scale" if self.family == "diagonal" else "scale_tril"
        return {f"{self.prefix}_loc": mean, f"{self.prefix}_{kind}": root}

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        r"""The estimate of log p(y) with the sites of a state, for these arguments of the model.

        At a fixed point EP's evidence is stationary in the sites, so that its derivative by the
        arguments is the one with the sites held fixed:

        .. math:: \nabla_\theta \log Z = \mathrm E_q \nabla_\theta \log f_0 + \sum_n
            \mathrm E_{\hat p_n} \nabla_\theta l_n

        Sites that are far from their fixed point for these arguments give a warning.
        """
        log_z, residual = evidence(*self._for_call(lax.stop_gradient(state), args, kwargs))
        if not is_traced((log_z, residual)) and jnp.isfinite(log_z) and not residual < FAR:
            words = (
                f"the sites belong to other arguments: a sweep would change q by {residual:.2g}"
                " standard deviations, so the evidence is off; run these arguments first."
            )
            warnings.warn(InferenceWarning(words), stacklevel=2)
        return log_z

    def evaluate(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """Minus :meth:`log_evidence`: the loss at a state."""
        return -self.log_evidence(state, *args, **kwargs)

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        """A warning of a posterior where the circle is cut, and what a subclass adds."""
        mean, sd, _ = jax.device_get(normal_of(state.total))
        for name in sites_at_pi(self.plan.angles, mean, sd):
            words = (
                f"the posterior of the angle '{name}' lies at pi, where {type(self).__name__} cuts"
                " the circle, and is in two pieces; sample an angle that is turned and turn it back"
                " in the model, as by jnp.pi, or take SGHMC(model) or a guide over all sites."
            )
            warnings.warn(InferenceWarning(words), stacklevel=4)

    def convergence(self, state: EPState) -> dict[str, float]:
        """For :func:`~numpyro_ext.diagnostics.diagnose`: parts of the report of a state."""
        report = jax.device_get(state.report)
        q = jax.jit(moments_of)(state.total)
        return {
            "residual": float(report.residual),
            "limit": float(limit_of(getattr(self, "tol", 0.0), q)),
            "skipped": int(report.skipped),
            "inaccurate": int(report.num_inaccurate),
        }

    def begin(
        self, rng_key: Array, init_state: EPState | None, args: tuple, kwargs: Kwargs
    ) -> tuple[EPPlan, EPState, list[Array]]:
        state = self.init(rng_key, *args, **kwargs)
        if init_state is not None:
            _, state, _ = self._for_call(init_state, args, kwargs)
        return self.plan, state, self.arrays_of(args, kwargs)

    def _for_call(
        self, state: EPState, args: tuple, kwargs: Kwargs
    ) -> tuple[EPPlan, EPState, list[Array]]:
        """The plan, the state with the prior of a call, and the arrays among its arguments."""
        if self._plan is None and self._is_restored:
            with on_numbers():  # a loop may be compiled around this
                self.init(random.key(0), *args, **kwargs)
        plan = self.plan
        arguments, arrays = self._reader.split(args, kwargs)
        if not self._reader.serves(plan.reading, arguments, arrays):
            raise ValueError(
                "the arguments of the model, or what it reads from outside, differ from init in"
                " more than the numbers of arrays; call init with them first."
            )
        numbers = _numbers_of(state, arrays)
        if numbers and len(numbers) == len(self._seen):
            if all(a is b for a, b in zip(numbers, self._seen, strict=True)):
                return plan, state, arrays
        fit: Any = self._shapes == jax.tree.map(jnp.shape, state.table)
        if fit:
            state, fit = on_arguments(plan, state, arrays)
            if self._times is not None:  # a state of shared sites has no other mark of its rows
                fit &= jnp.all(state.table.times == self._times)
        if is_traced(fit):
            lost = jnp.where(fit, 0.0, jnp.nan)
            state = state._replace(total=plus(state.total, state.total, lost))
        elif not fit:
            raise ValueError(
                "the state belongs to other data, of other rows or rows that depend on other"
                " directions; start anew, with prior=(engine, result) to keep what it knows."
            )
        else:
            self._seen = _numbers_of(state, arrays)
        return plan, state, arrays


def _numbers_of(state: EPState, arrays: list[Array]) -> list[Any]:
    """What a state has of its data, and these: arrays that cannot change, or none."""
    numbers = [*arrays, *jax.tree.leaves((state.prior, state.table))]
    fixed = all(isinstance(x, Array) and not is_traced(x) for x in numbers)
    return numbers if fixed else []
