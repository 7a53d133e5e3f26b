r"""The log likelihood of all rows from a minibatch, by a Taylor expansion of each row at a center.

.. math::
    \hat\ell_B(t) = L + G^\top v + \tfrac12 v^\top H v + \frac NM \sum_{n \in B} \Big[ \ell_n(t) -
    \ell_n(c) - g_n^\top v - \tfrac12 v^\top H_n v \Big], \qquad v = t - c,

with the value, gradient and Hessian of a row at c, and L, G and H their sums over all N rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.handlers import block, seed

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.arrow import ArrowPrecision
from numpyro_ext._model.circles import circles_of, recut
from numpyro_ext._model.density import log_prob, row_log_lik, scaled
from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.normal import Normal
from numpyro_ext._model.operations import STEP, jit_on_data, on_numbers, pieces
from numpyro_ext._model.potential import Potential, Program
from numpyro_ext._model.read import (
    Shapes,
    frames,
    latent_shapes,
    sample_sites,
    shape_trace,
    unravel,
)
from numpyro_ext._model.same import SAME, agree, difference, mark_of
from numpyro_ext._model.units import Layout
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.data._rows import is_rows

_MAKE_ANOTHER = "make one by taylor_proxy(model, *args) with the arguments of this run"
LARGEST_NOISE = 0.5
"""Nats of noise over minibatches up to which a proxy is near enough."""
_VALUES = 0.5
"""The part of v by which values are compared, where there is no forward mode."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class TaylorProxy:
    """The expansion of the rows of one plate. It is a pytree of its arrays, and pickles.

    * ``center`` - c, constrained values of all latent sites.
    * ``normal`` - the normal approximation there: its ``center`` is c as a ``(d,)`` vector of
      unconstrained sites, and its ``factor`` a root of the posterior covariance, lower triangular
      ``(d, d)``; above 512 numbers an ``Arrow`` where the model has groups, and its ``(d,)``
      diagonal elsewhere; or None where the center is not near a mode.
    * ``value, grad, hessian`` - L, G and H; H is None for degree 1, and an ``ArrowPrecision``
      where the factor is an ``Arrow``.
    * ``rows`` - ``(N,)``, the log likelihood of each row at c, by which other data are known.
    * ``noise`` - the standard deviation of the estimate over minibatches, in nats, at draws of the
      normal approximation; nan if there is none.
    * ``plate, size, batch`` - name of the plate, N and M.
    * ``shapes`` - ``(site, unconstrained shape)`` in the order of the vector.
    * ``forward`` - whether a row has derivatives in forward mode; otherwise they are differences.
    """

    center: Sites
    normal: Normal
    value: Any
    rows: Array
    grad: Array
    hessian: Array | ArrowPrecision | None
    noise: Any
    plate: str = field(metadata={"static": True})
    size: int = field(metadata={"static": True})
    batch: int = field(metadata={"static": True})
    shapes: Shapes = field(metadata={"static": True})
    forward: bool = field(default=True, metadata={"static": True})

    def __repr__(self) -> str:
        degree, dim = 1 if self.hessian is None else 2, self.normal.center.shape[0]
        return f"TaylorProxy(degree={degree}, {self.size} rows of '{self.plate}', {dim} dimensions)"

    def init_params(self, guide: Any, *args: Any, **kwargs: Any) -> Params:
        """The parameters of a guide that begins at the center, with the covariance there:
        ``svi.run(..., init_params=proxy.init_params(guide, *args))``.

        :param guide: an ``AutoMultivariateNormal``, ``AutoDiagonalNormal`` or ``AutoNormal``.
        :param args: arguments of the guide's model, as for ``svi.run``, and so ``kwargs``.
        """
        if self.normal.factor is None:
            raise ValueError(
                "there is no normal approximation at the center of this proxy; make it with"
                " center=(guide, params) of a fitted guide."
            )
        return self.normal.init_params(guide, *args, **kwargs)

    def unravel(self, x: Array) -> Sites:
        """A ``(d,)`` vector as unconstrained sites."""
        return unravel(x, self.shapes)

    def log_lik(
        self, trace: Trace, run: Callable[[Sites], Trace], *, compare: bool = False
    ) -> tuple[Array, Array]:
        """The log likelihood of all rows at the values of a model's trace, estimated on its M rows,
        less L; and the brackets of the formula, ``(M,)``.

        :param run: the trace of the model at other unconstrained sites, on the same rows.
        :param compare: whether the result is NaN where the proxy was made from other rows.
        """
        sites = [trace[name] for name, _ in self.shapes]
        t = [jnp.ravel(biject_to(site["fn"].support).inv(site["value"])) for site in sites]
        t = recut(jnp.concatenate(t), None, self.normal.circles)

        def rows_at(x: Array) -> Array:
            return row_log_lik(run(self.unravel(recut(x, self.normal.circles, None))), self.plate)

        index = trace[self.plate]["value"] if compare else None
        return self.change(t, row_log_lik(trace, self.plate), rows_at, index)

    def change(
        self,
        t: Array,
        at_t: Array,
        rows_at: Callable[[Array], Array],
        index: Array | None = None,
    ) -> tuple[Array, Array]:
        """The log likelihood of all rows at a ``(d,)`` vector less L, and the residuals.

        :param at_t: the log likelihood of M rows there, and ``rows_at`` that at any vector.
        :param index: which rows they are, for a change that is NaN where these are others.
        """
        v = t - self.normal.center

        # The derivatives are taken at c along v, so that particles share the rows' values there.
        def along_v(fn: Callable[[Array], Any], x: Array) -> Any:
            return jax.jvp(fn, (x,), (v,))

        of_all_rows = jnp.sum(self.grad * v)
        if not self.forward:
            at_center, slope = self._by_differences(v, rows_at)
        elif self.hessian is None:
            at_center, slope = along_v(rows_at, self.normal.center)
        else:
            (at_center, slope), (_, bend) = along_v(partial(along_v, rows_at), self.normal.center)
            slope = slope + bend / 2
        if self.hessian is not None:
            if isinstance(self.hessian, ArrowPrecision):
                quadratic = self.hessian.quadratic(v)
            else:
                quadratic = jnp.einsum("i,ij,j", v, self.hessian, v, precision="highest")
            of_all_rows = of_all_rows + quadratic / 2
        # Row by row, since the sums would lose the digits of their difference.
        residuals = (at_t - at_center) - slope
        change = of_all_rows + self.size * jnp.mean(residuals)
        if index is not None:
            with jax.default_matmul_precision("highest"):  # as the rows that it has
                same = agree(rows_at(self.normal.center), self.rows[index])
            change = jnp.where(same, change, jnp.nan)
        return change, residuals

    def _by_differences(self, v: Array, rows_at: Callable[[Array], Array]) -> tuple[Array, Array]:
        """The log likelihood of rows at c, and their terms in v, without a forward mode: gradients
        of the sum give the mean, and differences of values the deviations from it, which have
        fewer digits and enter the variance alone."""
        c, h, v0 = self.normal.center, _VALUES, stop_gradient(v)
        grad = jax.grad(lambda x: jnp.sum(rows_at(x)))
        at_center, up, down = rows_at(c), rows_at(c + h * v), rows_at(c - h * v)
        each, total = (up - down) / (2 * h), jnp.vdot(grad(c), v)
        if self.hessian is not None:
            each = each + (up - 2 * at_center + down) / (2 * h**2)
            Hv = (grad(c + STEP * v0) - grad(c - STEP * v0)) / (2 * STEP)
            total = total + jnp.vdot(Hv, v) - jnp.vdot(Hv, v0) / 2  # its gradient is Hv
        return at_center, each + (total / len(each) - jnp.mean(each))

    def check(self, name: str, layout: Layout, model_trace: Trace) -> None:
        """An error unless the proxy is one of this model's latent sites and of as many rows."""
        others = [plate for plate, _, _ in layout.subsampled if plate != self.plate]
        self._check_size(model_trace, others)
        if layout.model_params:
            raise ValueError(_with_param(name, layout.model_params[0]))
        if layout.plates:
            raise ValueError(
                f"{name} has a term for each row of '{layout.plates[0]}', which is unbiased without"
                " a proxy; leave it out."
            )
        self.check_sites(latent_shapes(model_trace), {self.plate: self.size})

    def _check_size(self, model_trace: Trace, others: list[str]) -> None:
        plates = {n: s["args"][0] for n, s in model_trace.items() if s["type"] == "plate"}
        if others or plates.get(self.plate) != self.size:
            rows = ", ".join(f"{size} rows of '{plate}'" for plate, size in plates.items())
            raise ValueError(
                f"the model has {rows or 'no rows'}, but the proxy is one of {self.size} rows of"
                f" '{self.plate}', with a minibatch of no other plate; {_MAKE_ANOTHER}."
            )

    def check_sites(self, shapes: Shapes, sizes: dict[str, int]) -> None:
        """An error unless a model has these latent sites, and so many rows."""
        if dict(shapes) != dict(self.shapes) or sizes != {self.plate: self.size}:
            raise ValueError(
                f"the model has the unconstrained latent sites {dict(shapes)} and minibatches of"
                f" {sizes}, but the proxy has {dict(self.shapes)} and {self.size} rows of"
                f" '{self.plate}'; {_MAKE_ANOTHER}."
            )

    def check_data(
        self, model: Model, args: tuple, kwargs: dict[str, Any], *, once: bool = False
    ) -> bool:
        """An error unless all rows have at the center the log likelihood that they had.

        :param bool once: whether to leave out what was compared last, if it cannot have changed.
        :return: whether they were compared, which arguments that are traced cannot be.
        """
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_rows)
        if is_traced((leaves, self)):
            return False
        # Rows on the host, which a mark has not, are the same where their source is.
        rows, others = ([x for x in leaves if is_rows(x) is kind] for kind in (True, False))
        now = mark_of((), model, others), rows
        if once and now[0] is not None and _COMPARED.get(self) == now:
            return True
        fn = seed(on_first_rows(model), random.key(0))
        with block():
            self._check_size(shape_trace(fn, args, kwargs), [])
        plates = {self.plate: (self.size, self.batch)}
        program = Program(default_key(model), args, kwargs, plates=plates)
        # Evaluated now, also where a step is being traced.
        with on_numbers(), block(), jax.default_matmul_precision("highest"):
            z = self.unravel(recut(self.normal.center, self.normal.circles, None))
            each = jit_on_data(
                lambda i: program.with_rows({self.plate: i}).rows_log_lik(z, {self.plate: i})
            )
            before, squares, off = np.asarray(self.rows), 0.0, 0
            for i in pieces(self.size, program.piece_size, "comparing the rows"):
                then = before[np.asarray(i)]
                change = difference(np.asarray(each(i), float), then)
                squares, off = squares + np.sum(change**2), off + np.sum(~(np.abs(change) <= SAME))
        if not squares <= SAME**2 * self.size:
            raise ValueError(
                "the model and its arguments hold other data than those of which the proxy is one:"
                f" at its center the log likelihood of {off:,} of {self.size:,} rows is another;"
                f" {_MAKE_ANOTHER}."
            )
        _COMPARED[self] = now
        return True

    def of_potential(self, name: str, potential: Potential, *, compare: bool) -> "ProxyPotential":
        """The potential with this expansion of its rows, for ``name``, who asks."""
        info = potential.info
        if info.params:
            raise ValueError(_with_param(name, info.params[0]))
        self.check_sites(info.shapes, {n: N for n, (N, _) in info.plates.items()})
        return ProxyPotential(self, potential, compare)

    def of_run(
        self, model: Model, args: tuple, kwargs: dict[str, Any], power: Any, num: int, *, once: bool
    ) -> "ProxyOfRun":
        """The proxy in a loss, a power mean of ``num`` weights, on arguments that are checked."""
        return ProxyOfRun(self, not self.check_data(model, args, kwargs, once=once), power, num)


_COMPARED: WeakKeyDictionary[TaylorProxy, Any] = WeakKeyDictionary()
"""A mark of the model and the arguments that :meth:`TaylorProxy.check_data` has compared last."""


class ProxyOfRun(NamedTuple):
    """A proxy in a loss that is a power mean of order a of K weights."""

    proxy: TaylorProxy
    compare: bool
    """Whether each step compares its rows, because all of them could not be."""
    power: Any
    num: int

    def log_joint(self, trace: Trace, run: Callable[[Sites], Trace]) -> Array:
        """The log joint of all rows, by :meth:`TaylorProxy.log_lik` and :meth:`without_noise`."""
        proxy, others = self.proxy, jnp.zeros(())
        for site in sample_sites(trace):
            if proxy.plate not in frames(site):
                others = others + jnp.sum(scaled(site, log_prob(site)))
        change, residuals = proxy.log_lik(trace, run, compare=self.compare)
        return proxy.value + self.without_noise(others + change, residuals)

    def without_noise(self, log_p: Array, residuals: Array) -> Array:
        r"""A log joint less what its noise adds to the power mean, to second order: :math:`\tfrac12
        a (1 - 1/K)` times its variance, which the residuals tell.

        The noise grows with the distance from the center without bound, and counts as mass where
        a > 0: a guide would run away. Above 2, where the formula does not apply, a is capped at 2.
        """
        a, batch = self.power, len(residuals)
        if batch < 2 or (isinstance(a, float) and a <= 0):
            return log_p
        share = 0.5 * jnp.clip(a, 0.0, 2.0) * (1 - 1 / self.num)
        mass = share * total_variance(jnp.var(residuals, ddof=1), self.proxy.size, batch)
        return jnp.where(jnp.isfinite(mass), log_p - mass, -jnp.inf)


class ProxyPotential(Potential):
    """A potential of all rows: a minibatch of them, and the expansion of the others."""

    def __init__(self, proxy: TaylorProxy, potential: Potential, compare: bool) -> None:
        vars(self).update(vars(potential))
        self._proxy, self._compare, self._plain = proxy, compare, potential

    def with_rows(self, idx: dict[str, Array], rows: Any = None) -> "ProxyPotential":
        return ProxyPotential(self._proxy, self._plain.with_rows(idx, rows), self._compare)

    def __call__(self, z: Sites, idx: dict[str, Array]) -> Array:
        proxy, own = self._proxy, circles_of(self.info)

        def rows_at(x: Array) -> Array:
            return self.rows_log_lik(proxy.unravel(recut(x, proxy.normal.circles, own)), idx)

        t = recut(self.info.ravel(z), own, proxy.normal.circles)
        at_t = rows_at(t)
        change, _ = proxy.change(t, at_t, rows_at, idx[proxy.plate] if self._compare else None)
        return self._plain(z, idx) + proxy.size * jnp.mean(at_t) - proxy.value - change


def _with_param(name: str, param: str) -> str:
    return (
        f"{name} with a proxy has the param site '{param}', with which the rows at the center move;"
        " leave proxy out."
    )


def check_proxy(proxy: Any) -> TaylorProxy | None:
    if not (proxy is None or isinstance(proxy, TaylorProxy)):
        given = type(proxy).__name__
        raise TypeError(f"proxy is a {given}; it must be the result of taylor_proxy, or None.")
    return proxy


def total_variance(variance: Any, size: int, batch: int) -> Any:
    """The variance of N/M times the sum of M residuals out of N, drawn without replacement, of
    which this is the variance."""
    return variance * (size * (size - batch) / batch)


def sd_over_minibatches(variances: Any, size: int, batch: int) -> float:
    """The standard deviation of N/M times the sum of M residuals out of N, without replacement,
    from the mean of their variances at S points, ``(S,)``."""
    variance = np.mean(np.asarray(variances, np.float64))
    return float(np.sqrt(total_variance(variance, size, batch)))


def noise_message(noise: float, batch: int, size: int) -> str:
    """The sentence about a proxy with too much noise."""
    return (
        f"with the proxy the log likelihood has a standard deviation of {noise:.2g} nats over"
        f" minibatches of {batch} of {size} rows (up to {LARGEST_NOISE} is fine), so that guides of"
        " other orders than 1 are too wide; use center=(guide, params), or more rows."
    )
