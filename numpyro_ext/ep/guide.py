r"""NumPyro's normal guides, set up at a start that is known, with the local sites of the model.

.. math:: q(x, z) = q(x) \prod_n p(z_n \mid x, y_n)

where z_n are the latent sites inside the plate of the data, which an engine integrates out.
"""

from typing import Any

import jax
from jax import Array, lax, random
import numpy as np
import numpyro
from numpyro.handlers import block, seed
from numpyro.infer import init_to_median
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_ext._model.arguments import indexed, is_traced
from numpyro_ext._model.factors import Factors
from numpyro_ext._model.implicit import Implicit, Stated
from numpyro_ext._model.operations import quick_options
from numpyro_ext._model.read import call_and_trace, frames, latent_sites
from numpyro_ext._numpyro import StartGiven
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.ep.local_sites import Drawn, draw_sites, points_of_row
from numpyro_ext.ep.projection import Projection

__all__ = ["guide_of"]

_DRAWS = 64
"""Draws of a posterior that are computed at a time."""
_FEW = 4 * 10**7
"""Evaluations of rows that take as long as the compiler does to optimise their program: about a
second when it has."""


class _Known(AutoContinuous):
    """A guide of the sites outside the plate of the data, which draws those inside it given these
    and the data of their row; a row that observes nothing has its prior."""

    locs: Sites | None = None
    """The start: unconstrained sites in the order in which the model samples them."""
    factors: Factors | None = None
    """The factors of the last fit."""
    projection: Projection | None = None
    """What draws the local sites of a row with several coordinates; None if no row has them."""
    arguments: tuple[tuple, dict[str, Any]] | None = None
    """Arguments of the last fit; None if they were traced."""
    given: tuple = ()
    """What the factors take before the arguments of the model."""
    several: bool = False
    """Whether there were fits to other arguments before."""

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        return None if self.locs is None else (random.key(0), self.locs)

    def of_fit(
        self,
        factors: Factors,
        projection: Projection | None,
        given: tuple,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """Take the factors and the arguments of a fit."""
        now, first = (args, kwargs), self.factors is None
        self.factors, self.projection, self.given = factors, projection, given
        traced = is_traced(now)
        self.several |= not first and (traced or not _same(self.arguments, now))
        self.arguments = self.arguments if traced else now

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Array]:
        if self.factors is None or not self.factors.axes:
            return super().__call__(*args, **kwargs)
        found, trace = call_and_trace(super().__call__, args, kwargs)
        rng_key = numpyro.prng_key()
        if rng_key is None:
            raise ValueError("the local sites are drawn at random; call seed(guide, rng_key).")
        latent = next(site["value"] for site in latent_sites(trace) if site["name"] not in found)
        drawn = self._drawn(latent, rng_key, args, kwargs)
        if drawn.log_q is None:  # the model draws them from their prior
            return found
        stated = self.projection is None or self.projection.has_normaliser
        kind = Stated if stated else Implicit
        plate, local = self.factors.plate, [drawn.sites[name] for name in self.factors.axes]
        dim = frames(local[0])[plate]
        with numpyro.plate(plate, len(drawn.log_q), dim=dim):
            for site in local:
                fn = kind(site["value"], event_dim=site["fn"].event_dim, support=site["fn"].support)
                found[site["name"]] = numpyro.sample(site["name"], fn)
            if stated:
                log_q = drawn.log_q.reshape(-1, *[1] * (-dim - 1))
                numpyro.factor(f"_{self.prefix}_local", log_q)
        return found

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Array]:
        """Draws of all latent sites, and of the deterministic ones that follow from them.

        :param args: arguments of the model, whose rows the local sites have; none for those of the
            fit.
        """
        if not args and not kwargs:
            if self.factors is not None and self.factors.axes and self.several:
                raise ValueError(
                    "the engine was fitted to several data sets; pass the model's arguments, as in"
                    " sample_posterior(rng_key, params, *args), whose rows are drawn."
                )
            args, kwargs = self.arguments or ((), {})
        if self.factors is None:
            return super().sample_posterior(rng_key, params, sample_shape=sample_shape)
        key_global, key_local = random.split(rng_key)
        latent = self.get_posterior(params).sample(key_global, sample_shape)
        flat = latent.reshape(-1, latent.shape[-1])

        def one(xs: tuple[Array, Array]) -> Sites:
            drawn = self._drawn(*xs, args, kwargs)
            return {name: site["value"] for name, site in drawn.sites.items()}

        def run(*xs: Array) -> Sites:
            return lax.map(one, xs, batch_size=_DRAWS)

        keys, count = random.split(key_local, len(flat)), len(flat)
        if not is_traced((flat, keys, args, kwargs)):
            points = count * self.factors.size * points_of_row(self.factors)
            run = jax.jit(run, compiler_options=quick_options(points, _FEW))
        found = run(flat, keys)
        return {n: v.reshape(sample_shape + v.shape[1:]) for n, v in found.items()}

    def _drawn(self, x: Array, rng_key: Array, args: tuple, kwargs: dict[str, Any]) -> Drawn:
        assert self.factors is not None
        with block():
            args = (*self.given, *args)
            return draw_sites(self.factors, x, rng_key, self.projection, args, kwargs)

    def median(self, params: Params) -> dict[str, Array]:
        """Medians of the sites outside the plate of the data."""
        return self._of_global(super().median(params))

    def quantiles(self, params: Params, quantiles: Any) -> dict[str, Array]:
        """Quantiles of the sites outside the plate of the data."""
        return self._of_global(super().quantiles(params, quantiles))

    def _of_global(self, found: dict[str, Array]) -> dict[str, Array]:
        """Without what follows from local sites, if there are any."""
        if self.factors is None or not self.factors.axes:
            return found
        return {name: found[name] for name in self.factors.info.latents}


class FullNormal(_Known, AutoMultivariateNormal, StartGiven):
    """``AutoMultivariateNormal`` whose latent vector is in the order of the model."""


class DiagonalNormal(_Known, AutoDiagonalNormal, StartGiven):
    """``AutoDiagonalNormal`` whose latent vector is in the order of the model."""


def guide_of(model: Model, family: str, prefix: str) -> Any:
    """A guide that has not seen its model."""
    cls = FullNormal if family == "full" else DiagonalNormal
    return cls(model, prefix=prefix, init_loc_fn=init_to_median)


def fits(guide: Any, locs: Sites) -> bool:
    """Whether a guide has not seen its model, or is set up on sites of these shapes."""
    known = guide.locs or locs
    return {n: x.shape for n, x in known.items()} == {n: x.shape for n, x in locs.items()}


def start_guide(
    guide: Any, locs: Sites, local: list[str], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Set a guide up on the global sites, at these values."""
    if guide.prototype_trace is not None:
        return
    guide.locs = locs
    if local:
        guide.model = block(seed(guide.model, random.key(0)), hide=local)
    guide.set_up(*indexed(args), **indexed(kwargs))


def _same(before: Any, now: Any) -> bool:
    """Whether the arguments of two fits are the same."""
    (xs, one), (ys, other) = jax.tree.flatten(before), jax.tree.flatten(now)

    return one == other and all(x is y or np.array_equal(x, y) for x, y in zip(xs, ys, strict=True))
