"""The expansion of the rows of a model at a center, which is searched or given."""

from dataclasses import replace
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute
from numpyro.infer import init_to_uniform
from numpyro.infer.util import unconstrain_fn

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.checks import check_observed
from numpyro_ext._model.handlers import first_rows, refuse_noise, valid_plates
from numpyro_ext._model.mode_search import advice, budget_note, make_search, starts_of
from numpyro_ext._model.modes import DENSE_UP_TO, Mode, Modes, check_sites
from numpyro_ext._model.operations import jit_on_data, pieces
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import (
    ModelInfo,
    check_all_rows,
    frames,
    given_plates,
    model_info,
    sample_sites,
    set_up,
    shape_trace,
    trace_of,
)
from numpyro_ext._model.start import draw_start, start_near_median
from numpyro_ext._model.taylor import (
    LARGEST_NOISE,
    TaylorProxy,
    noise_message,
    sd_over_minibatches,
)
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model, Params, Trace

_OFF, _FAR = 0.5, 50.0  # sds between center and mode that are worth a warning; that are no normal
_DRAWS_OF_GUIDE = 1000
_POINTS, _ROWS = 16, 10_000  # at which the noise over minibatches is measured


class TaylorExpansion:
    """The rows of a model in its one plate that takes a minibatch; an error for any other model."""

    def __init__(
        self,
        model: Model,
        args: tuple,
        kwargs: dict[str, Any],
        *,
        degree: int = 2,
        block_size: int | None = None,
    ) -> None:
        self.model, self.arguments, self.degree = default_key(model), (args, kwargs), degree
        because = "which the rows at the center would not share"
        fn = first_rows(seed(valid_plates(refuse_noise(model, because)), random.key(0)))
        trace = shape_trace(substitute(fn, substitute_fn=init_to_uniform), args, kwargs)
        check_observed(trace)
        check_all_rows("a proxy", given_plates(model, args, kwargs, init_to_uniform), args, kwargs)
        self.info = model_info(trace)
        self.plate, self.size, self.batch = _plate_of(trace, self.info)
        if degree == 2 and self.info.size > DENSE_UP_TO:
            self.degree = 1
            _warn(
                f"the model has {self.info.size} latent dimensions, so the proxy is one of degree"
                f" 1, without Hessians; pass degree=1 for more than {DENSE_UP_TO}."
            )
        self.potential = Potential(self.model, self.info, {}, args, kwargs)
        self.block_size = self.potential.piece_size
        if block_size is not None:
            self.block_size = check_count("block_size", block_size)

    def proxy(self, rng_key: Array, center: Any) -> TaylorProxy:
        """The proxy at a center, or at the mode if it is None."""
        x, mode = self._find_center(rng_key, center)
        factor, off = None if mode is None else mode.factor, np.inf
        if mode is not None and not mode.variational:
            off = mode.decrement + (mode.num_negative > 0)
        self._check_forward_mode(x)
        each, grad, hessian = self._sums(x, factor)
        nearest = x
        if hessian is not None:
            nearest, factor, off = self._normal(x, grad, hessian)
        if mode is not None and not off < _FAR:
            factor = None  # a curvature far from any mode is that of no normal to start from
        sites = self.potential.postprocess()(self.info.unravel(x))
        proxy = TaylorProxy(
            center={name: sites[name] for name in self.info.latents},
            location=x,
            factor=factor,
            value=np.asarray(each.sum(dtype=float)),
            rows=jnp.asarray(each),
            grad=jnp.asarray(grad, x.dtype),
            hessian=None if self.degree == 1 else jnp.asarray(hessian, x.dtype),
            noise=np.nan,
            plate=self.plate,
            size=self.size,
            batch=self.batch,
            shapes=self.info.shapes,
        )
        if factor is not None:
            proxy = replace(proxy, noise=self._noise(proxy, nearest, factor))
            if not proxy.noise <= LARGEST_NOISE:
                _warn(noise_message(proxy.noise, self.batch, self.size))
        if mode is not None and not off < _OFF:
            _warn(
                f"the search for a mode did not end at one{budget_note(mode)}, so the center of the"
                f" proxy may be far from the posterior; {advice(self.info)}, or fit a guide with"
                " VRELBO(1.), and pass center=(guide, params)."
            )
        elif factor is None and hessian is not None:
            instead = "leave center out, or pass center=(guide, params)"
            if isinstance(center, tuple):
                instead = f"train the guide longer; or {advice(self.info)}"
            _warn(
                "the curvature at the center of the proxy is not that of a mode, so the center may"
                f" be far from the posterior; {instead}."
            )
        object.__setattr__(proxy, "origin", self)
        return proxy

    def _log_lik(self, x: Array, idx: Array) -> Array:
        """The log likelihood of the rows ``idx`` at a flat vector."""
        return self.potential.rows_log_lik(self.info.unravel(x), {self.plate: idx})

    def _find_center(self, rng_key: Array, center: Any) -> tuple[Array, Mode | None]:
        """The flat vector of the center, and what a search found if there was one."""
        mode = None
        if center is None:
            mode = self._search(rng_key)
            x = mode.center
        elif isinstance(center, Modes):
            check_sites(center, self.info, "center")
            mode = center.heaviest
            x = mode.center
        elif isinstance(center, dict):
            # Traced, or NumPyro would refuse values outside the supports in words of its own.
            x = jax.jit(lambda c: self.info.ravel(self.potential.unconstrain("center", c)))(center)
        elif isinstance(center, tuple) and len(center) == 2 and isinstance(center[1], dict):
            x = self._mean(rng_key, *center)
        else:
            raise TypeError(
                f"center is a {type(center).__name__}; it must be None for the mode, the result of"
                " find_modes, a dict of constrained values of all latent sites, or a pair (guide,"
                " params)."
            )
        for name, value in self.info.unravel(x).items():
            if not bool(jnp.all(jnp.isfinite(value))):
                raise ValueError(
                    f"center is not finite at site '{name}' in unconstrained space; give finite"
                    " values inside the supports, or no center for the mode."
                )
        return x, mode

    def _search(self, rng_key: Array) -> Mode:
        """The first of up to eight searches that ends at a mode, or the one that ends nearest."""
        key_start, key_modes = random.split(rng_key)
        potential, ends = self.potential, []
        search = make_search(key_modes, potential)
        start, energy, _ = draw_start(key_start, self.model, self.info, *self.arguments)
        for near_median in (False, True):
            if near_median:  # for likelihoods that overflow in most of what is drawn
                start, energy, grad = start_near_median(key_start, self.model, potential)
                if not ends:
                    potential.check_start(start, potential.first_rows(), energy, grad)
            starts = starts_of(key_start, self.info.ravel(start))
            for mode in search(starts) if np.isfinite(energy) else ():
                if mode.at_mode:
                    return mode
                ends.append(mode)
        return min(ends, key=lambda mode: np.nan_to_num(mode.decrement, nan=np.inf))

    def _mean(self, rng_key: Array, guide: Model, params: Params) -> Array:
        set_up(guide, *self.arguments)
        fn = seed(first_rows(self.model), random.key(0))

        def draw(rng_key: Array) -> Array:
            trace = trace_of(
                substitute(first_rows(seed(guide, rng_key)), data=params), *self.arguments
            )
            missing = [name for name in self.info.latents if name not in trace]
            if missing:
                raise ValueError(
                    f"the guide of center does not draw latent site '{missing[0]}' of the model;"
                    " give a guide of this model."
                )
            values = {name: trace[name]["value"] for name in self.info.latents}
            return self.info.ravel(unconstrain_fn(fn, *self.arguments, values))

        keys = random.split(rng_key, _DRAWS_OF_GUIDE)
        return jnp.mean(jit_on_data(jax.vmap(draw))(keys), axis=0)

    def _check_forward_mode(self, x: Array) -> None:
        """An error where a step could not take the derivatives of the rows along a line."""

        def slope(x: Array) -> Array:
            return jax.jvp(lambda x: self._log_lik(x, jnp.arange(self.batch)), (x,), (x,))[1]

        try:
            jax.eval_shape(lambda x: jax.jvp(slope, (x,), (x,)), x)
        except (TypeError, NotImplementedError) as error:
            if not any(words in str(error) for words in ("forward-mode", "custom_lin")):
                raise
            raise ValueError(
                "the likelihood has no derivatives in forward mode, because a part of it is a"
                " jax.custom_vjp (as odeint is); use all rows, or BBAlphaELBO."
            ) from error

    def _sums(
        self, x: Array, factor: Array | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Each row's l, and G and H at a flat vector; no H where the dimension is large, else along
        the columns of a factor near that of the posterior, because in float32 its least curvature
        would be lost beside the largest."""
        directions = jnp.eye(len(x), dtype=x.dtype) if len(x) <= DENSE_UP_TO else None
        if directions is not None and factor is not None:
            regular = np.all(np.isfinite(factor)) and np.all(np.diagonal(factor))
            directions = factor if regular else directions

        @jit_on_data
        def sums(x: Array, idx: Array) -> tuple[Array, Array, Array | None]:
            here = self.potential.with_rows({self.plate: idx})

            def log_lik(x: Array) -> Array:
                return here.rows_log_lik(self.info.unravel(x), {self.plate: idx})

            grad, hessian = jax.grad(lambda x: jnp.sum(log_lik(x))), None
            if directions is not None:
                along = lambda direction: jax.jvp(grad, (x,), (direction,))[1]  # noqa: E731
                hessian = lax.map(along, directions.T, batch_size=32)
            return log_lik(x), grad(x), hessian

        # Totals in double precision: float32 would round a sum of many rows to its own digits.
        # Of rows larger than memory, what is kept of each row is the most that there is: once.
        value, grad, hessian = np.empty(self.size, x.dtype), np.zeros(len(x)), np.zeros(())
        for idx in pieces(self.size, self.block_size, "expanding the rows"):
            with jax.default_matmul_precision("highest"):
                each, g, H = jax.device_get(sums(x, idx))
            grad = grad + g
            hessian = hessian + (0.0 if H is None else H)
            value[np.asarray(idx)] = each
        if not all(np.all(np.isfinite(part)) for part in (value, grad, hessian)):
            raise ValueError(
                "the log likelihood or its derivatives are not finite at the center; give another"
                " center, or check the data."
            )
        if directions is None:
            return value, grad, None
        return value, grad, np.linalg.solve(np.asarray(directions, np.float64).T, hessian)

    def _normal(
        self, x: Array, grad: np.ndarray, hessian: np.ndarray
    ) -> tuple[Array, Array | None, float]:
        """Mean and factor of the normal approximation at x, no factor where it is not one, and the
        length of the whitened gradient, which is the distance of the mean in sds."""
        prior, idx = self.potential.prior(), self.potential.first_rows()

        def slope_at(x: Array) -> Array:
            return prior.value_and_grad_flat(x, idx)[1]

        both = jit_on_data(lambda x: (slope_at(x), jax.jacfwd(slope_at)(x)))(x)
        slope, curvature = (np.asarray(part, np.float64) for part in both)
        precision = (curvature - hessian + (curvature - hessian).T) / 2
        try:
            np.linalg.cholesky(precision)
            factor = np.linalg.cholesky(np.linalg.inv(precision))
        except np.linalg.LinAlgError:
            return x, None, np.inf
        white = factor.T @ (grad - slope)
        nearest = x + jnp.asarray(factor @ white, x.dtype)
        return nearest, jnp.asarray(factor, x.dtype), float(np.linalg.norm(white))

    def _noise(self, proxy: TaylorProxy, nearest: Array, factor: Array) -> float:
        """The standard deviation over minibatches at draws of the normal approximation."""
        idx = jnp.asarray(np.linspace(0, self.size - 1, min(self.size, _ROWS)).astype(int))

        def rows_at(x: Array) -> Array:
            return self._log_lik(x, idx)

        def variance(xi: Array) -> Array:
            t = nearest + (factor @ xi if factor.ndim == 2 else factor * xi)
            return jnp.var(proxy.change(t, rows_at(t), rows_at)[1], ddof=1)

        @jit_on_data
        def variances(rng_key: Array) -> Array:
            xi = random.normal(rng_key, (_POINTS, len(nearest)), nearest.dtype)
            return jax.vmap(variance)(xi)

        return sd_over_minibatches(variances(random.key(1)), self.size, self.batch)


def _plate_of(trace: Trace, info: ModelInfo) -> tuple[str, int, int]:
    """The plate that takes a minibatch, N and M; an error if there is no proxy of this model."""
    if len(info.plates) != 1:
        what = (
            f"{len(info.plates)} plates that take a minibatch, {sorted(info.plates)}, but a proxy"
            " is one of the rows of one plate; give a subsample_size to one of them"
            if info.plates
            else "no plate that takes a minibatch on these arguments, so there is no noise to be"
            " removed; pass those of svi.run, and give the data plate a subsample_size"
        )
        raise ValueError(f"the model has {what}.")
    ((plate, (size, batch)),) = info.plates.items()
    if not any(site["is_observed"] and plate in frames(site) for site in sample_sites(trace)):
        raise ValueError(
            f"no observed site lies in the plate '{plate}', which takes the minibatch; put the data"
            " into it."
        )
    for name, latent in info.latents.items():
        if plate in latent.plates:
            raise ValueError(
                f"latent site '{name}' lies in the plate '{plate}', which takes the minibatch, and"
                " a proxy is for latent sites that all rows share; use NestedVRELBO or BBAlphaELBO,"
                " which are unbiased on minibatches without one."
            )
    for name in info.params + info.mutable:
        raise ValueError(
            f"the model has the param or mutable site '{name}', with which the rows at the center"
            " would move; give it a prior (numpyro.sample) or a fixed value"
            " (numpyro.handlers.substitute), or use BBAlphaELBO."
        )
    return plate, size, batch


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=3)
