r"""The log likelihood of all rows from a minibatch, by a Taylor expansion of each row at a center.

.. math::
    \hat\ell_B(t) = L + G^\top v + \tfrac12 v^\top H v + \frac NM \sum_{n \in B} \Big[ \ell_n(t) -
    \ell_n(c) - g_n^\top v - \tfrac12 v^\top H_n v \Big], \qquad v = t - c,

with the value, gradient and Hessian of a row at c, and L, G and H their sums over all N rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import math
from typing import Any, ClassVar

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from numpyro_ext._model.density import log_prob, row_log_lik, scaled
from numpyro_ext._model.read import (
    frames,
    latent_sites,
    sample_sites,
    unconstrained_shape,
)
from numpyro_ext._model.units import Layout
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import Model, Params, Sites, Trace

__all__ = ["LARGEST_NOISE", "TaylorProxy", "sd_over_minibatches", "too_far"]

LARGEST_NOISE = 0.5
"""Nats of noise over minibatches up to which a proxy is near enough."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["center", "location", "factor", "value", "grad", "hessian", "noise"],
    meta_fields=["plate", "size", "batch", "shapes"],
)
@dataclass(frozen=True, eq=False, repr=False)
class TaylorProxy:
    """The expansion of the rows of one plate. It is a pytree of its arrays, and pickles.

    * ``center`` - c, constrained values of all latent sites.
    * ``location, factor`` - c as a ``(d,)`` vector of unconstrained sites, and a root of the
      posterior covariance there: lower triangular ``(d, d)``, its ``(d,)`` diagonal where d is
      large, or None where the curvature at the center is not that of a mode.
    * ``value, grad, hessian`` - L, G and H; H is None for degree 1.
    * ``noise`` - the standard deviation of the estimate over minibatches, in nats, at draws of the
      normal approximation; nan if there is none.
    * ``plate, size, batch`` - name of the plate, N and M.
    * ``shapes`` - ``(site, unconstrained shape)`` in the order of the vector.
    """

    center: Sites
    location: Array
    factor: Array | None
    value: Any
    grad: Array
    hessian: Array | None
    noise: Any
    plate: str
    size: int
    batch: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    origin: ClassVar[Any] = None
    """The rows that it was made of; only the object that :func:`taylor_proxy` returned has them."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "origin"}

    def __repr__(self) -> str:
        degree, dim = 1 if self.hessian is None else 2, self.location.shape[0]
        return f"TaylorProxy(degree={degree}, {self.size} rows of '{self.plate}', {dim} dimensions)"

    def at(self, guide: Model, params: Params) -> "TaylorProxy":
        """The same proxy at the mean of a guide: one pass over the data.

        :param guide: the guide.
        :param dict params: its parameters, such as ``svi.run(...).params``.
        """
        return self._origin("taylor_proxy(model, *args, center=(guide, params))").proxy(
            random.key(0), (guide, params)
        )

    def init_params(self, guide: Any) -> Params:
        """The parameters of a guide that begins at the center, with the covariance there:
        ``svi.run(..., init_params=proxy.init_params(guide))``.

        :param guide: an ``AutoMultivariateNormal``, ``AutoDiagonalNormal`` or ``AutoNormal`` of the
            model.
        """
        args, kwargs = self._origin("init_loc_fn=init_to_value(values=proxy.center)").arguments
        if self.factor is None:
            raise ValueError(
                "there is no normal approximation at the center of this proxy; move it to a guide"
                " that was fitted, proxy.at(guide, params)."
            )
        return Whitening(self.location, self.factor).init_params(guide, *args, **kwargs)

    def _origin(self, instead: str) -> Any:
        if self.origin is None:
            raise ValueError(
                "a proxy that was pickled, or has gone through a JAX transformation, has neither"
                f" its model nor its data; use {instead}."
            )
        return self.origin

    def unravel(self, x: Array) -> Sites:
        """A ``(d,)`` vector as unconstrained sites."""
        sites, start = {}, 0
        for name, shape in self.shapes:
            stop = start + math.prod(shape)
            sites[name] = x[start:stop].reshape(shape)
            start = stop
        return sites

    def log_joint(self, trace: Trace, run: Callable[[Sites], Trace]) -> tuple[Array, Array]:
        """``(log p - L, residuals)``: the log joint of all rows at the values of a model's trace,
        estimated on its M rows, less L; and the brackets of the formula, ``(M,)``.

        L is left out because float32 would round the rest to its digits.

        :param run: the trace of the model at other unconstrained sites, on the same rows.
        """
        others = jnp.zeros(())
        for site in sample_sites(trace):
            if self.plate not in frames(site):
                others = others + jnp.sum(scaled(site, log_prob(site)))
        change, residuals = self.log_lik(trace, run)
        return others + change, residuals

    def log_lik(self, trace: Trace, run: Callable[[Sites], Trace]) -> tuple[Array, Array]:
        """:meth:`log_joint` of the sites in the plate alone."""
        sites = (trace[name] for name, _ in self.shapes)
        t = [jnp.ravel(biject_to(site["fn"].support).inv(site["value"])) for site in sites]

        def rows_at(x: Array) -> Array:
            return row_log_lik(run(self.unravel(x)), self.plate)

        return self.change(jnp.concatenate(t), row_log_lik(trace, self.plate), rows_at)

    def change(
        self, t: Array, at_t: Array, rows_at: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """The log likelihood of all rows at a ``(d,)`` vector less L, and the residuals.

        :param at_t: the log likelihood of M rows there.
        :param rows_at: that of the same rows at any vector.
        """
        v = t - self.location

        # The derivatives are taken at c along v, so that particles share the rows' values there.
        def along_v(fn: Callable[[Array], Any], x: Array) -> Any:
            return jax.jvp(fn, (x,), (v,))

        known = jnp.sum(self.grad * v)
        if self.hessian is None:
            at_center, slope = along_v(rows_at, self.location)
        else:
            (at_center, slope), (_, bend) = along_v(partial(along_v, rows_at), self.location)
            slope = slope + bend / 2
            known = known + jnp.einsum("i,ij,j", v, self.hessian, v, precision="highest") / 2
        # Row by row, since the sums would lose the digits of their difference.
        residuals = (at_t - at_center) - slope
        return known + self.size * jnp.mean(residuals), residuals

    def check(
        self, name: str, layout: Layout, model_trace: Trace, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        """An error unless the proxy is one of this model's latent sites, rows and data.

        :param str name: the objective.
        """
        found = [(n, s["args"][0]) for n, s in model_trace.items() if s["type"] == "plate"]
        others = [plate for plate, _, _ in layout.subsampled if plate != self.plate]
        if others or (self.plate, self.size) not in found:
            rows = ", ".join(f"{size} rows of '{plate}'" for plate, size in found)
            raise ValueError(
                f"the model has {rows or 'no rows'}, but the proxy is one of {self.size} rows of"
                f" '{self.plate}', with a minibatch of no other plate; make it by"
                " taylor_proxy(model, *args) with the arguments of this run."
            )
        if not (self.origin is None or self.origin.are_of(args, kwargs)):
            raise ValueError(
                "the arguments of the model hold other data than those of which the proxy is one;"
                " make another one by taylor_proxy(model, *args) with the arguments of this run."
            )
        if layout.plates or layout.model_params:
            what = (
                f"the param site '{layout.model_params[0]}', with which the rows at the center move"
                if layout.model_params
                else f"a term for each row of '{layout.plates[0]}', which is unbiased without it"
            )
            raise ValueError(f"{name} with a proxy has {what}; leave proxy out.")
        latents = {
            site["name"]: unconstrained_shape(site["fn"].support, jnp.shape(site["value"]))
            for site in latent_sites(model_trace)
        }
        if latents != dict(self.shapes):
            raise ValueError(
                f"the model has the unconstrained latent sites {latents}, but the proxy"
                f" {dict(self.shapes)}; make it by taylor_proxy(model, *args) with this model."
            )


def sd_over_minibatches(variances: Any, size: int, batch: int) -> float:
    """The standard deviation of N/M times the sum of M residuals out of N, without replacement.

    :param variances: ``(S,)``, those of the residuals of rows at S points, which are averaged.
    """
    variance = np.mean(np.asarray(variances, np.float64))
    return float(np.sqrt(variance * size * (size - batch) / batch))


def too_far(noise: float, batch: int, size: int) -> str:
    """The sentence about a proxy whose noise is too large."""
    return (
        f"with the proxy the log likelihood has a standard deviation of {noise:.2g} nats over"
        f" minibatches of {batch} of {size} rows (up to {LARGEST_NOISE} is fine), so its center is"
        " too far from the posterior, or the minibatch too small, and guides of orders other than 1"
        " come out too wide; move the center (proxy.at(guide, params)), use degree=2, or more rows."
    )
