"""Stochastic expectation propagation: one site for all rows, learned from minibatches."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
import math
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.taylor import TaylorProxy, check_proxy
from numpyro_ext._typing import Kwargs
from numpyro_ext.ep.base import normal_of
from numpyro_ext.ep.factors import EPPlan, FactorGroup, FactorTable
from numpyro_ext.ep.normal import Site, choose, moments_of, plus, variances
from numpyro_ext.ep.reading import ModelReading, Prior
from numpyro_ext.ep.shared_sites import (
    Parts,
    SharedConfig,
    SharedSitesEngine,
    shared_step,
    sites_of_proxy,
)
from numpyro_ext.ep.state import EPState, is_positive

_LOOKED_AT = 256  # rows from which the rank of all is read
_CHUNK = 256  # steps of one compiled call
_PARTS = 16  # parts of the averaged steps; the scatter of their means tells the noise
_NOISY = 0.1  # the standard error above which a result is said to be noisy
_STEP = 0.1  # the rate of a step with a proxy


@dataclass(kw_only=True, eq=False, repr=False)
class RandomRowsEngine(SharedSitesEngine):
    """The base of engines that draw rows at each step; ``run`` gives the mean over its last half,
    and warns if the ``noise`` of this in ``state.report`` is above 0.1 standard deviations."""

    def update(
        self, state: EPState, *args: Any, indices: Any = None, **kwargs: Any
    ) -> tuple[EPState, Array]:
        """One step: the next state, and the loss.

        :param indices: the rows to take in place of random ones: a batch of any size or, of an
            engine on parts, the row of each part.
        """
        plan, state, arrays = self._for_call(state, args, kwargs)
        if not is_traced(indices) and indices is not None:
            _check_rows(indices, self.parts(plan.size))
        return self.sweep(plan, state, arrays, indices)

    def sweep(
        self, plan: EPPlan, state: EPState, arrays: list[Array], indices: Any = None
    ) -> tuple[EPState, Array]:
        if indices is not None:
            return super().sweep(plan, state, arrays, indices)
        # By the program of :meth:`steps`, which takes seconds to compile, with nothing averaged.
        counted = _sums_of(state), state.i + 1, 1, 1
        state, _, losses = self._several(plan, state, arrays, *counted)
        return state, losses[0]

    def steps(
        self, plan: EPPlan, state: EPState, arrays: list[Array], num_steps: int
    ) -> Iterator[tuple[EPState, Any, str]]:
        averaged = max(1, round(num_steps / 2))
        sums, first = _sums_of(state), state.i + (num_steps - averaged)
        for done in range(0, num_steps, _CHUNK):
            n = min(_CHUNK, num_steps - done)
            counted = sums, first, averaged, n
            state, sums, losses = self._several(plan, state, arrays, *counted)
            if done + n == num_steps and self._is_random(plan):
                sums = jax.device_get(sums)
                mean = jax.tree.map(jnp.asarray, plus(sums.first, sums.total, 1 / averaged))
                state = state._replace(total=mean[0], sites=mean[1])
                noise = jnp.asarray(self._noise(state, sums, averaged))
                state = state._replace(report=state.report._replace(noise=noise))
            yield state, losses[:n], ""

    def _several(
        self, plan: Any, state: EPState, arrays: list[Array], *counted: Any
    ) -> tuple[EPState, "_Sums", Array]:
        """Some steps, as :func:`_many`."""
        config, parts = self.config(plan.size), self.parts(plan.size)
        return _many(plan, config, state, arrays, parts, *counted)

    def _is_random(self, plan: EPPlan) -> bool:
        draws = self.parts(plan.size).number > self.config(plan.size).batch_size
        return bool(np.any(draws)) or any(plan.needs_key)

    def convergence(self, state: EPState) -> dict[str, float]:
        return {**super().convergence(state), "noise": float(state.report.noise)}

    def _noise(self, state: EPState, sums: "_Sums", steps: int) -> np.ndarray:
        """The largest standard error of a result, in standard deviations."""
        sd = jax.device_get(normal_of(state.total)[1])
        if steps < _PARTS:
            return np.asarray(np.inf, sd.dtype)
        means = sums.moments / sums.count[:, None, None]
        scatter = np.max(np.std(means, 0, ddof=1) / np.stack([sd, np.full_like(sd, 2)]))
        scale = scale_of_error(float(sums.rate / steps), steps, _PARTS)
        return np.asarray(scatter * scale, sd.dtype)

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        super().warn(first, state, num_steps)
        assert self._plan is not None
        before, report, noise = first.report, state.report, float(state.report.noise)
        if self._is_random(self._plan) and not noise <= _NOISY:
            more = math.ceil((noise / _NOISY) ** 2) if noise < 10 else None
            times = f"{more} times the steps" if more else "more steps"
            words = (
                f"the result of {num_steps} steps is noisy: its standard error is {noise:.2g}"
                f" standard deviations of the posterior; run it for {times}, or with a step that"
                " decreases or a proxy."
            )
            warnings.warn(InferenceWarning(words), stacklevel=3)
        left = int(report.num_skipped) - int(before.num_skipped)
        visits = num_steps * int(report.visited)
        if left > 0.01 * visits:
            words = (
                f"{left} of {visits} visits to factors were left out, because a cavity was improper"
                " or the moments were not found; use a smaller step or a larger batch_size."
            )
            warnings.warn(InferenceWarning(words), stacklevel=3)


def _check_rows(indices: Any, parts: Parts) -> None:
    """An error unless a step can take these rows in place of random ones."""
    chosen = np.ravel(indices)
    if parts.rows is None:
        size = int(parts.number[0])
        if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= size:
            raise ValueError(f"indices is {indices}; the rows are 0 to {size - 1}.")
        return
    J, column = len(parts.rows), chosen[:, None]
    if len(chosen) != J or not np.all(np.any((parts.rows == column) & (column >= 0), 1)):
        raise ValueError(
            f"indices is {indices}; it must be a row of each of the {J} parts, in their order."
        )


def scale_of_error(rate: float, steps: int, parts: int) -> float:
    """The standard error of the mean of all steps in units of the standard deviation of the means
    of their parts, for an autoregression of coefficient 1 - rate."""
    f = 1 - min(rate, 1.0)

    def v(n: float) -> float:  # the variance of the mean of n steps of variance 1
        return ((1 + f) / (1 - f) - 2 * f * (1 - f**n) / (n * (1 - f) ** 2)) / n

    if f == 1:
        return np.inf
    of_part, of_all = v(steps / parts), v(steps)
    return float(np.sqrt(of_all * (parts - 1) / parts / max(of_part - of_all, 1e-12)))


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticEP(RandomRowsEngine):
    r"""Stochastic expectation propagation: every row has the same site f, a mean of all.

    With :math:`\lambda_q = \lambda_0 + N \lambda`, a step draws M rows (uniformly, with
    replacement), takes the cavity :math:`\lambda_q - \alpha \lambda` for each of them, and moves

    .. math::

        \lambda \leftarrow (1 - \epsilon) \lambda + \frac\epsilon M \sum_m \lambda_m, \qquad
        \lambda_m = \tfrac1\alpha \left( \lambda_{\mathrm{proj}[q^{\setminus 1} f_m^\alpha]} -
        \lambda_{q^{\setminus 1}} \right), \qquad \epsilon = M / N.

    The state has two vectors and two matrices of the size of x, whatever N is. ``batch_size=N``
    takes all rows without drawing them, which is averaged EP. At ``power=0`` it is stochastic
    variational inference by natural gradients of rate :math:`\epsilon`.

    **Bias.** The fixed point is the one of averaged EP, near the one of :class:`EP` where rows are
    alike and many. A constant :math:`\epsilon` leaves noise of order :math:`\epsilon` in
    :math:`\lambda`, so that ``run`` returns the mean over its last half. A ``step`` that decreases,
    such as ``lambda i: 20 / (i + 200)``, takes the noise away.

    **Many rows.** In standard deviations of the posterior, the noise of a step is
    :math:`\sqrt{N / M}` times :math:`\sqrt{\epsilon / 2}`: without a proxy, a mean within 0.1 of
    them takes a hundred passes over the rows, whatever M is. A proxy has the sites :math:`\tau_n =
    (g_n - H_n c, -H_n)` of the Taylor expansion of all rows at their mode c, and a step takes

    .. math::

        \lambda \leftarrow (1 - \epsilon) \lambda + \epsilon \Big[ \frac1N \sum_n \tau_n
        + \frac1M \sum_m (\lambda_m - \tau_m) \Big],

    which has the same mean over minibatches, and so the same fixed point. Its noise falls as
    :math:`1 / N` in units of the plain one. A run begins at the Laplace approximation, with
    :math:`\epsilon = 0.1`; a few hundred steps do for any number of rows.

    :param int batch_size: M, from 1 to N.
    :param step: :math:`\epsilon` in (0, 1], or a function of the number of the step; None for M/N,
        and for 0.1 with a proxy.
    :param proxy: ``taylor_proxy(model, *args)``, of this model with a ``subsample_size`` and of the
        arguments of the run, which are compared with it; None for plain minibatches.

    **References:** Li, Hernandez-Lobato, Turner, *Stochastic expectation propagation* (NeurIPS
    2015), algorithm 1 and section 4; Dehaene, Barthelme, *Expectation propagation in the large-data
    limit* (JRSS B 2018), for averaged EP.

    >>> from numpyro_ext.ep import StochasticEP
    >>> from numpyro_ext.objectives import taylor_proxy
    >>> def model(y):
    ...     logit = numpyro.sample("logit", dist.Normal(0.0, 2.0))
    ...     with numpyro.plate("rows", len(y), subsample_size=100) as i:
    ...         numpyro.sample("y", dist.Bernoulli(logits=logit), obs=y[i])
    >>> y = jax.random.bernoulli(jax.random.key(1), 0.3, (1_000_000,)).astype(int)
    >>> sep = StochasticEP(model, batch_size=100, proxy=taylor_proxy(model, y))
    >>> result = sep.run(jax.random.key(0), 100, y, progress_bar=False)
    >>> p, logit = y.mean(), result.params["auto_loc"][0]
    >>> sd = (p * (1 - p) * len(y)) ** -0.5
    >>> bool(abs(logit - jnp.log(p / (1 - p))) < 0.05 * sd)
    True
    >>> print(f"{result.params['auto_scale_tril'][0, 0] / sd:.2f}")
    1.00
    """

    batch_size: int = 1
    proxy: TaylorProxy | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch_size", self.batch_size)
        proxy = check_proxy(self.proxy)
        if proxy is not None and not isinstance(proxy.hessian, Array):
            raise ValueError(
                "the proxy has no Hessian as a matrix; make it by taylor_proxy(model, *args,"
                " degree=2), of at most 512 latent numbers."
            )

    def init(self, rng_key: Array, *args: Any, **kwargs: Any) -> EPState:
        self._check_data(args, kwargs)
        state = super().init(rng_key, *args, **kwargs)
        if self.proxy is not None and not is_traced(state) and not is_positive(state.total):
            raise ValueError(
                "the proxy and the prior make no normal distribution, so its center is far from a"
                " mode; leave proxy out, or make it with center=(guide, params) of a fitted guide."
            )
        return state

    def update(
        self, state: EPState, *args: Any, indices: Any = None, **kwargs: Any
    ) -> tuple[EPState, Array]:
        self._check_data(args, kwargs)
        return super().update(state, *args, indices=indices, **kwargs)

    def _check_data(self, args: tuple, kwargs: Kwargs) -> None:
        if self.proxy is not None and not self.proxy.check_data(
            self.model, args, kwargs, once=True
        ):
            raise ValueError(
                "the arguments of the model are traced, and cannot be compared with those of the"
                " proxy; close over them, as in jax.jit(lambda state: engine.update(state, *args))."
            )

    def rows_of(self, factors: Factors) -> np.ndarray:
        if self.batch_size > factors.size:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at most the number of rows, which is"
                f" {factors.size}."
            )
        return np.unique(np.linspace(0, factors.size - 1, _LOOKED_AT).astype(int))

    def table_of(
        self, reading: ModelReading, arrays: list[Array], prior: Prior
    ) -> tuple[EPPlan, FactorTable]:
        plan, table = super().table_of(reading, arrays, prior)
        index, basis = table.groups[0]
        specs = (replace(plan.specs[0], rank=basis.shape[1]), *plan.specs[1:])
        groups = (FactorGroup(index[:0], basis[:0]), *table.groups[1:])
        taylor = None
        if self.proxy is not None:
            taylor = sites_of_proxy(self.proxy, reading.factors, self.family == "diagonal")
        return replace(plan, specs=specs), table._replace(groups=groups, taylor=taylor)

    def parts(self, size: int) -> Parts:
        return Parts(np.zeros(1, int), np.ones(1), np.full(1, size), None)

    def config(self, size: int) -> SharedConfig:
        step = _STEP if self.step is None and self.proxy is not None else self.step
        return SharedConfig(step=step, batch_size=self.batch_size)


class _Sums(NamedTuple):
    """The parameters after the first of the averaged steps, and sums over these steps."""

    first: tuple[Site, tuple[Site, ...]]
    total: tuple[Site, tuple[Site, ...]]  # of the parameters, less the first ones
    moments: Array  # (parts, 2, D): of mean and log variance of q in each part
    count: Array  # of steps in each part
    rate: Array  # of the share by which a step forgets


def _sums_of(state: EPState) -> _Sums:
    """Sums over no steps."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (state.total, state.sites))
    number = state.total.shift.dtype
    sizes: Any = (_PARTS, 2, *state.total.shift.shape), _PARTS, ()
    numbers: Any = [np.zeros(size, number) for size in sizes]
    return _Sums(zeros, zeros, *numbers)


@partial(jax.jit, static_argnums=(0, 1))
def _many(
    plan: EPPlan,
    config: SharedConfig,
    state: EPState,
    arrays: list[Array],
    parts: Parts,
    sums: _Sums,
    first: Array,
    averaged: Array,
    n: Array,
) -> tuple[EPState, _Sums, Array]:
    """``n`` steps, their losses, and the sums over the ``averaged`` steps after ``first``."""

    def body(k: Array, carry: Any) -> Any:
        state, sums, losses = carry
        state, loss, epsilon = shared_step(plan, config, state, arrays, parts)
        return state, added(state, epsilon, sums, first, averaged), losses.at[k].set(loss)

    return lax.fori_loop(0, n, body, (state, sums, jnp.zeros(_CHUNK)))


@jax.jit
def added(state: EPState, epsilon: Array, sums: _Sums, first: Array, averaged: Array) -> _Sums:
    """The sums with a state that a step of share ``epsilon`` has left."""
    counts, parameters = state.i > first, (state.total, state.sites)
    start = choose(state.i == first + 1, parameters, sums.first)
    part = jnp.clip((state.i - first - 1) * _PARTS // averaged, 0, _PARTS - 1)
    q = moments_of(state.total)
    moments = jnp.stack([q.mean, jnp.log(variances(q))])
    return _Sums(
        start,
        plus(sums.total, plus(parameters, start, -1.0), jnp.where(counts, 1.0, 0.0)),
        sums.moments.at[part].add(jnp.where(counts, moments, 0.0)),
        sums.count.at[part].add(jnp.where(counts, 1.0, 0.0)),
        sums.rate + jnp.where(counts, epsilon, 0.0),
    )
