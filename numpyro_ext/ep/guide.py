r"""NumPyro's normal guides, with the local sites of the model.

.. math:: q(x, z) = q(x) \prod_n p(z_n \mid x, y_n)

where z_n are the latent sites inside the plate of the data, which an engine integrates out.
"""

import copy
from typing import Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
from numpyro.distributions.distribution import validation_enabled
from numpyro.handlers import block, seed, substitute
from numpyro.infer import init_to_median, init_to_uniform
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_ext._model.arguments import indexed, is_traced
from numpyro_ext._model.density import row_log_lik
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.implicit import Implicit, Stated
from numpyro_ext._model.operations import map_blocks, on_numbers
from numpyro_ext._model.potential import Program, supports_of
from numpyro_ext._model.read import (
    Site,
    call_and_trace,
    frames,
    latent_sites,
    plate_sizes,
    sample_sites,
    shape_trace,
)
from numpyro_ext._model.same import is_same
from numpyro_ext._numpyro import OnSupports, StartGiven, constrain_latent, site_of_log_det
from numpyro_ext._typing import Kwargs, Model, Params, Sites
from numpyro_ext.ep import integral
from numpyro_ext.ep.factors import marginal, num_points
from numpyro_ext.ep.projection import Projection

_DRAWS = 64  # draws of a posterior that are computed at a time
_POINTS = 2**14  # places of rows at which a row is evaluated at a time, for one draw


class _NormalOfEngine(OnSupports):
    """A guide of the sites outside the plate of the data, which draws the others by their row."""

    locs: Sites | None = None  # the start, in the order in which the model samples its sites
    factors: Factors | None = None  # of the last fit
    projection: Projection | None = None  # draws several local coordinates of a row
    arguments: tuple[tuple, dict[str, Any]] | None = None  # of the last fit, unless traced
    leading: tuple = ()  # arguments of the factors that come before the model's
    several: bool = False  # whether there were fits to other arguments before
    without_rows: bool = False  # whether the arguments were elsewhere

    def supports_at(self, z: Sites, args: tuple, kwargs: Kwargs) -> dict[str, Any]:
        return supports_of(self, args, kwargs, z)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        return None if self.locs is None else (random.key(0), self.locs)

    def take_fit(
        self,
        factors: Factors,
        projection: Projection | None,
        leading: tuple,
        args: tuple,
        kwargs: Kwargs,
    ) -> None:
        traced = is_traced((args, kwargs))
        if self.factors is not None:
            self.several |= traced or not is_same(self.arguments, (args, kwargs))
        self.factors, self.projection, self.leading = factors, projection, leading
        self.arguments = self.arguments if traced else (args, kwargs)

    def start_without_rows(self, locs: Sites, local: list[str], shapes: tuple) -> None:
        """Set up the guide on NaN in the shapes of rows; it then draws the sites outside alone."""

        def stand_in(x: Any) -> Any:
            if not isinstance(x, jax.ShapeDtypeStruct):
                return x
            value = jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0
            return np.broadcast_to(np.asarray(value, x.dtype), x.shape)

        with validation_enabled(False):
            start_guide(self, locs, local, jax.tree.map(stand_in, shapes), {})
        self.without_rows = True

    @property
    def integrated(self) -> list[str]:
        """The latent sites inside the plate of the rows, which have no parameters."""
        return [] if self.factors is None else list(self.factors.axes)

    @property
    def needs_rows(self) -> bool:
        """Whether draws depend on rows: in sites inside their plate, or deterministic ones."""
        trace = self.prototype_trace or {}
        kinds = {site["type"] for site in trace.values()}
        return "deterministic" in kinds or bool(self.integrated)

    def without_fit(self) -> Any:
        """The guide without the factors of the last fit, which hold closures."""
        other = copy.copy(self)
        for name in ("factors", "projection", "arguments", "leading", "several"):
            vars(other).pop(name, None)
        return other

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        if self.factors is None or not self.factors.axes:
            return super().__call__(*args, **kwargs)
        values, trace = call_and_trace(super().__call__, args, kwargs)
        rng_key = numpyro.prng_key()
        if rng_key is None:
            raise ValueError("the local sites are drawn at random; call seed(guide, rng_key).")
        latent = next(site["value"] for site in latent_sites(trace) if site["name"] not in values)
        sites, log_q = self._drawn(latent, rng_key, args, kwargs)
        if log_q is None:  # the model draws them from their prior
            return values
        stated = self.projection is None or self.projection.has_normaliser
        kind = Stated if stated else Implicit
        plate, local = self.factors.plate, [sites[name] for name in self.factors.axes]
        dim = frames(local[0])[plate]
        with numpyro.plate(plate, len(log_q), dim=dim):
            for site in local:
                fn = kind(site["value"], event_dim=site["fn"].event_dim, support=site["fn"].support)
                values[site["name"]] = numpyro.sample(site["name"], fn)
            if stated:
                numpyro.factor(f"_{self.prefix}_local", log_q.reshape(-1, *[1] * (-dim - 1)))
        return values

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draws of all latent sites, and of the deterministic ones that follow from them, for the
        rows of the model's arguments, or of the fit if there are none."""
        if not args and not kwargs:
            if self.factors is not None and self.factors.axes and self.several:
                raise ValueError(
                    "the engine was fitted to several data sets; pass the model's arguments, as in"
                    " sample_posterior(rng_key, params, *args), whose rows are drawn."
                )
            args, kwargs = self.arguments or ((), {})
        key_global, key_local = random.split(rng_key)
        latent = self.get_posterior(params).sample(key_global, sample_shape)
        if self.factors is None:
            return self._outside(constrain_latent(self, latent, params))
        flat = latent.reshape(-1, latent.shape[-1])

        def draw(xs: tuple[Array, Array]) -> Sites:
            return {name: site["value"] for name, site in self._drawn(*xs, args, kwargs)[0].items()}

        draws = lax.map(draw, (flat, random.split(key_local, len(flat))), batch_size=_DRAWS)
        return {name: x.reshape(sample_shape + x.shape[1:]) for name, x in draws.items()}

    def _drawn(
        self, x: Array, rng_key: Array, args: tuple, kwargs: Kwargs
    ) -> tuple[dict[str, Site], Array | None]:
        """Latent and deterministic sites given the global ones at ``x``, and the log density of the
        local ones of each row; None without observations, which leave their prior."""
        assert self.factors is not None
        factors, args = self.factors, (*self.leading, *args)
        with block():
            key_local, key_model = random.split(rng_key)
            local, log_z = {}, None
            there = _on_rows_of(factors, args, kwargs) if factors.axes else None
            if there is not None:
                local, log_z = _draw_rows(there, x, key_local, self.projection)
            z, states = factors.values_at(x, local)
            fn = seed(substitute(factors.program.model, data=states), key_model)
            trace = Program(fn, args, kwargs).trace(z)
        latent = {*factors.info.latents, *factors.axes}
        sites = {
            name: site
            for name, site in trace.items()
            if name in latent or site["type"] == "deterministic"
        }
        if log_z is None:
            return sites, None

        def counts(site: Site) -> bool:
            name = site["name"]
            if site["type"] != "sample":
                return True
            if not site["is_observed"]:
                return name in latent
            return site_of_log_det(name, factors.axes) == name

        of_values = {name: site for name, site in trace.items() if counts(site)}
        return sites, row_log_lik(of_values, factors.plate) - log_z

    def median(self, params: Params) -> dict[str, Array]:
        return self._outside(super().median(params))

    def quantiles(self, params: Params, quantiles: Any) -> dict[str, Array]:
        return self._outside(super().quantiles(params, quantiles))

    def _outside(self, values: dict[str, Array]) -> dict[str, Array]:
        """The values of sites outside the plate of the data, where there are local ones, and of
        latent sites alone where the guide has seen no rows."""
        if self.without_rows:
            return {name: values[name] for name in self.locs or {}}
        if self.factors is None or not self.factors.axes:
            return values
        return {name: values[name] for name in self.factors.info.latents}


class FullNormal(_NormalOfEngine, AutoMultivariateNormal, StartGiven):
    pass


class DiagonalNormal(_NormalOfEngine, AutoDiagonalNormal, StartGiven):
    pass


def guide_of(model: Model, family: str, prefix: str) -> Any:
    """A guide that has not seen its model."""
    cls = FullNormal if family == "full" else DiagonalNormal
    return cls(model, prefix=prefix, init_loc_fn=init_to_median)


def has_sites(guide: Any, locs: Sites) -> bool:
    """Whether a guide has not seen its model, or is set up on sites of these shapes."""
    before = guide.locs or locs
    return {n: x.shape for n, x in before.items()} == {n: x.shape for n, x in locs.items()}


def start_guide(guide: Any, locs: Sites, local: list[str], args: tuple, kwargs: Kwargs) -> None:
    if guide.prototype_trace is not None:
        return
    guide.locs = locs
    if local:
        guide.model = block(seed(guide.model, random.key(0)), hide=local)
    guide.set_up(*indexed(args), **indexed(kwargs))


def _on_rows_of(factors: Factors, args: tuple, kwargs: Kwargs) -> Factors | None:
    """The factors of other arguments, without predictions; None if nothing is observed in a row."""
    there = factors.on(args, kwargs)
    fn = seed(factors.program.model, random.key(0))
    trace = shape_trace(substitute(fn, substitute_fn=init_to_uniform), args, kwargs)
    inside = [site for site in sample_sites(trace) if factors.plate in frames(site)]
    if not any(site["is_observed"] for site in inside):
        return None
    fitted = {*factors.info.latents, *factors.axes}
    predicted = [site["name"] for site in latent_sites(trace) if site["name"] not in fitted]
    size = plate_sizes(trace)[factors.plate][0]
    if size == factors.size and not predicted:
        return there
    there.size = size
    if predicted:
        there.program.model = block(fn, hide=predicted)
    if not is_traced((args, kwargs)):
        # Of traced arguments a row is computed in the way of the fit.
        with on_numbers():
            there.rows_by = there.choose_rows_by()
    return there


def _draw_rows(
    factors: Factors, x: Array, rng_key: Array, projection: Projection | None
) -> tuple[Sites, Array]:
    """Unconstrained local sites of all rows, and the log likelihood of each row at x."""
    flat, unravel = ravel_pytree(factors.local)
    size = flat.size
    number = len(next(iter(factors.states.values()), [0]))

    def state(k: Array) -> Sites:
        return {name: values[k] for name, values in factors.states.items()}

    def draw_row(n: Array, rng_key: Array) -> tuple[Sites, Array]:
        key_state, key_z = random.split(rng_key)

        def in_state(k: Array) -> tuple[Array, Array]:
            """Values of the continuous sites, and the log probability of the state."""

            def log_p(z: Array) -> Array:
                return factors.row(x, n, {**state(k), **unravel(z.reshape(flat.shape))})

            if size == 1:
                return integral.draw(log_p, random.fold_in(key_z, k))
            return z, log_p(z)

        z, log_z = flat, None
        if size > 1:
            assert projection is not None
            z, log_z = projection.draw(lambda z: marginal(factors, x, n, z), size, key_z)
        each, logits = jax.vmap(in_state)(jnp.arange(number))
        k = random.categorical(key_state, logits)
        log_z = logsumexp(logits) if log_z is None else log_z
        lost = ~jnp.isfinite(logits[k])
        local = {**unravel(jnp.where(lost, jnp.nan, each[k]).reshape(flat.shape)), **state(k)}
        return local, log_z

    keys = random.split(rng_key, factors.size)
    points = 2048 if size > 1 else 4 * num_points(factors)  # for one draw of a row
    most = max(1, _POINTS // points)
    values, log_z = map_blocks(lambda n: draw_row(n, keys[n]), factors.size, most)
    return {name: _placed(v, factors.axes[name]) for name, v in values.items()}, log_z


def _placed(values: Array, axis: int) -> Array:
    """``(N, *row)`` values, in which ``axis`` of a row has length 1, with the rows there."""
    axis = axis % (values.ndim - 1)
    return jnp.moveaxis(jnp.squeeze(values, axis + 1), 0, axis)
