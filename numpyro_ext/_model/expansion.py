"""The expansion of the rows of a model at a center, which is searched or given."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.arrow import Arrow, ArrowPrecision
from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.circles import circles_of, circular_sites, cut_by_draws, with_circles
from numpyro_ext._model.handlers import on_first_rows, refuse_noise
from numpyro_ext._model.mode_search import place_cuts, search_modes
from numpyro_ext._model.modes import DENSE_UP_TO, Modes, check_sites
from numpyro_ext._model.normal import Normal
from numpyro_ext._model.operations import gradient, jit_on_data, linearized, pieces, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.problems import advice
from numpyro_ext._model.read import ModelInfo, check_all_rows, read_model, set_up, trace_of
from numpyro_ext._model.row_curvature import RowCurvature
from numpyro_ext._model.taylor import LARGEST_NOISE, TaylorProxy, noise_message, sd_over_minibatches
from numpyro_ext._numpyro import default_key
from numpyro_ext._typing import Model, Sites

_DRAWS_OF_GUIDE = 1000
_POINTS, _ROWS = 16, 10_000  # at which the noise over minibatches is measured


class TaylorExpansion:
    """The rows of a model in its one plate that takes a minibatch; an error for any other model."""

    def __init__(
        self, model: Model, args: tuple, kwargs: dict[str, Any], *, degree: int = 2
    ) -> None:
        self.model, self.arguments, self.degree = default_key(model), (args, kwargs), degree
        checked = valid_data(refuse_noise(model, "which the rows at the center would not share"))
        self.info = info = read_model(checked, args, kwargs)
        check_all_rows("a proxy", info.given, args, kwargs)
        if len(info.plates) != 1:
            raise ValueError(
                f"the plates that take a minibatch on these arguments are {sorted(info.plates)},"
                " but a proxy is one of the rows of one plate; give one of them a subsample_size."
            )
        ((self.plate, (self.size, self.batch)),) = info.plates.items()
        if self.plate not in info.data_plates:
            raise ValueError(
                f"no observed site lies in the plate '{self.plate}', which takes the minibatch."
            )
        for name, latent in info.latents.items():
            if self.plate in latent.plates:
                raise ValueError(
                    f"latent site '{name}' lies in the plate '{self.plate}', which takes the"
                    " minibatch; use NestedVRELBO or BBAlphaELBO, which are unbiased on minibatches"
                    " without a proxy."
                )
        for name in info.params + info.mutable:
            raise ValueError(
                f"the model has the param or mutable site '{name}', with which the rows at the"
                " center would move; give it a prior (numpyro.sample), or use BBAlphaELBO."
            )
        self.potential = Potential(self.model, info, {}, args, kwargs)

    def proxy(self, rng_key: Array, center: Any) -> TaylorProxy:
        """The proxy at a center, or at the mode if it is None."""
        modes = center if isinstance(center, Modes) else None
        if modes is not None:
            check_sites(modes, self.info, "center")
            self.cut(modes.circles)
        if center is None:
            self.cut(circles_of(place_cuts(self.model, self.info, {}, *self.arguments)))
            modes = search_modes(rng_key, self.model, self.potential, None, starts=1)
            if modes.problems:
                _warn(f"the center of the proxy: {' '.join(modes.problems)}")
        elif modes is None and circular_sites(self.info):
            self.cut(circles_of(self._cut_around(rng_key, center)))
        factor = None if modes is None else modes.heaviest.factor
        x = self._place(rng_key, center) if modes is None else modes.heaviest.center
        exact = self.potential.has_curvature
        if factor is None and not exact:  # differences need to know the size of a direction
            _, grad, hessian = self._sums(x, None)
            factor = None if hessian is None else self._normal(x, grad, hessian)[1]
        each, grad, hessian = self._sums(x, factor)
        nearest = x
        if hessian is not None:
            nearest, factor = self._normal(x, grad, hessian)
            hessian = jnp.asarray(hessian, x.dtype)
        elif self.degree == 2:
            hessian, factor = self._of_groups(np.asarray(x, float), factor)
        sites = self.potential.postprocess()(self.info.unravel(x))
        proxy = TaylorProxy(
            center={name: sites[name] for name in self.info.latents},
            normal=Normal(x, factor, circles_of(self.info)),
            value=np.asarray(each.sum(dtype=float)),
            rows=jnp.asarray(each),
            grad=jnp.asarray(grad, x.dtype),
            hessian=None if self.degree == 1 else hessian,
            noise=np.nan,
            plate=self.plate,
            size=self.size,
            batch=self.batch,
            shapes=self.info.shapes,
            forward=exact,
        )
        if factor is not None:
            proxy = replace(proxy, noise=self._noise(proxy, nearest, factor))
            if not proxy.noise <= LARGEST_NOISE:
                _warn(noise_message(proxy.noise, self.batch, self.size))
        if factor is None and hessian is not None:
            _warn(
                "the curvature at the center of the proxy is not that of a mode; pass"
                f" center=(guide, params) of a guide that was fitted, or {advice(self.info)}."
            )
        return proxy

    def cut(self, circles: Array | None) -> None:
        """Cut circles opposite of these angles."""
        if circles is not None:
            self.info = with_circles(self.info, circles)
            self.potential = Potential(self.model, self.info, {}, *self.arguments)

    def _cut_around(self, rng_key: Array, center: Any) -> ModelInfo:
        """The sites with circles cut opposite of a center, of constrained values or of a guide."""
        if isinstance(center, tuple):
            draws = self._draws(rng_key, center, lambda draw: draw)
            return cut_by_draws(self.info, draws)
        return cut_by_draws(self.info, self.info.check_constrained("center", center))

    def _place(self, rng_key: Array, center: Any) -> Array:
        """The flat vector of constrained values, or of the mean of a guide."""
        if not isinstance(center, dict | tuple):
            self.info.check_names("center", center)

        def ravel(values: Sites) -> Array:
            return self.info.ravel(self.potential.unconstrain("center", values))

        if isinstance(center, tuple):
            return jnp.mean(self._draws(rng_key, center, ravel), axis=0)
        # Traced, or NumPyro would refuse values outside the supports in words of its own.
        return jax.jit(ravel)(center)

    def _draws(self, rng_key: Array, fit: Any, of_draw: Callable[[Sites], Any]) -> Any:
        """A function of each of the draws of ``(guide, params)``, which are constrained."""
        guide, params = fit
        set_up(guide, *self.arguments)

        def draw(rng_key: Array) -> Any:
            trace = trace_of(
                substitute(on_first_rows(seed(guide, rng_key)), data=params), *self.arguments
            )
            return of_draw({name: trace[name]["value"] for name in self.info.latents})

        keys = random.split(rng_key, _DRAWS_OF_GUIDE)
        return jit_on_data(jax.vmap(draw))(keys)

    def _sums(
        self, x: Array, factor: Array | Arrow | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Each row's l, and G and H at a flat vector."""
        directions = 0.1 * jnp.eye(len(x), dtype=x.dtype) if len(x) <= DENSE_UP_TO else None
        if directions is not None and isinstance(factor, Array):
            # In float32 the least curvature would be lost beside the largest.
            regular = np.all(np.isfinite(factor)) and np.all(np.diagonal(factor))
            directions = factor if regular else directions

        @jit_on_data
        def sums(x: Array, idx: Array) -> tuple[Array, Array, Array | None]:
            here = self.potential.with_rows({self.plate: idx})

            def log_lik(x: Array) -> Array:
                return here.rows_log_lik(self.info.unravel(x), {self.plate: idx})

            def slope(x: Array) -> tuple[Array, None]:
                return gradient(lambda x: jnp.sum(log_lik(x)))(x), None

            if directions is None:
                return log_lik(x), slope(x)[0], None
            grad, _, along = linearized(slope, x, forward=self.potential.has_curvature)
            return log_lik(x), grad, lax.map(along, directions.T, batch_size=32)

        # Totals in double precision: float32 would round a sum of many rows to its own digits.
        # Of rows larger than memory, what is kept of each row is the most that there is: once.
        value, grad, hessian = np.empty(self.size, x.dtype), np.zeros(len(x)), np.zeros(())
        for idx in pieces(self.size, self.potential.piece_size, "expanding the rows"):
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
    ) -> tuple[Array, Array | None]:
        """Mean and factor of the normal approximation at x, no factor where it is not one."""
        prior, idx = self.potential.prior(), self.potential.first_rows()

        @jit_on_data
        def both(x: Array) -> tuple[Array, Array]:
            slope, along = prior.linearized_grad(x, idx, forward=self.potential.has_curvature)
            return slope, jax.vmap(along)(0.1 * jnp.eye(len(x), dtype=x.dtype)) / 0.1

        slope, curvature = (np.asarray(part, np.float64) for part in both(x))
        precision = (curvature - hessian + (curvature - hessian).T) / 2
        try:
            np.linalg.cholesky(precision)
            factor = np.linalg.cholesky(np.linalg.inv(precision))
        except np.linalg.LinAlgError:
            return x, None
        nearest = x + jnp.asarray(factor @ (factor.T @ (grad - slope)), x.dtype)
        return nearest, jnp.asarray(factor, x.dtype)

    def _of_groups(
        self, x: np.ndarray, factor: Any
    ) -> tuple[ArrowPrecision | None, Array | Arrow | None]:
        """H of a hierarchy with many groups, None of another model, and the factor."""
        options = quick_options(100 * self.size * len(x))
        curvature = RowCurvature(self.potential, x, options)
        if not curvature.arrow:
            return None, factor
        rows, prior = (curvature.precision((x[None], x[None]), [k]) for k in range(2))
        if factor is None:
            own, num_negative = rows.plus(prior).factor()
            factor = None if num_negative else own.astype(curvature.dtype)
        return rows.negative(curvature.dtype), factor

    def _noise(self, proxy: TaylorProxy, nearest: Array, factor: Array | Arrow) -> float:
        """The standard deviation over minibatches at draws of the normal approximation."""
        idx = jnp.asarray(np.linspace(0, self.size - 1, min(self.size, _ROWS)).astype(int))

        def rows_at(x: Array) -> Array:
            return self.potential.rows_log_lik(self.info.unravel(x), {self.plate: idx})

        def variance(xi: Array) -> Array:
            t = Normal(nearest, factor).to_z(xi)
            return jnp.var(proxy.change(t, rows_at(t), rows_at)[1], ddof=1)

        @jit_on_data
        def variances(rng_key: Array) -> Array:
            xi = random.normal(rng_key, (_POINTS, len(nearest)), nearest.dtype)
            return jax.vmap(variance)(xi)

        return sd_over_minibatches(variances(random.key(1)), self.size, self.batch)


def _warn(message: str) -> None:
    warnings.warn(InferenceWarning(message), stacklevel=3)
