"""A guide for hierarchies: effects whose means and scales depend on the globals."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform

from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.bend import Bend
from numpyro_ext._model.modes import Mode
from numpyro_ext.guides.base import AutoAtModes
from numpyro_ext.guides.flows import RowsOfFactor, SkewTransform
from numpyro_ext.transforms import VectorTransform

_MANY = 16
"""Numbers of a site outside of all plates, beyond which they are effects too."""


class Split(NamedTuple):
    """The places of the globals and of the effects in the latent vector."""

    globals: np.ndarray
    effects: np.ndarray


class StructuredTransform(VectorTransform):
    r"""The map :math:`g = m_g + L\, skew(e_g)` on k coordinates, and :math:`u = m_u + M g + \exp(a
    + C g) \odot e_u` on the others, at the places ``split``."""

    arrays = ("loc", "root", "skew", "slope", "log_scale", "log_slope")
    static = ("split",)

    def __init__(
        self,
        loc: Array,
        root: Array,
        skew: Array,
        slope: Array,
        log_scale: Array,
        log_slope: Array,
        split: Split,
    ) -> None:
        self.loc, self.root, self.skew = loc, root, skew
        self.slope, self.log_scale, self.log_slope = slope, log_scale, log_slope
        self.split = split

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        at_globals, at_effects = self.split
        bent, log_det = SkewTransform(self.skew).call_with_intermediates(x[..., at_globals])
        g = bent @ self.root.T
        log_scale = self.log_scale + g @ self.log_slope.T
        u = g @ self.slope.T + jnp.exp(log_scale) * x[..., at_effects]
        log_det = log_det + jnp.sum(jnp.log(jnp.diagonal(self.root))) + jnp.sum(log_scale, -1)
        return self.loc + self._together(g, u), log_det

    def _inverse(self, y: Array) -> Array:
        at_globals, at_effects = self.split
        g, u = (y - self.loc)[..., at_globals], (y - self.loc)[..., at_effects]
        bent = jnp.linalg.solve(self.root, g[..., None])[..., 0] if len(at_globals) else g
        e_u = (u - g @ self.slope.T) * jnp.exp(-self.log_scale - g @ self.log_slope.T)
        return self._together(SkewTransform(self.skew)._inverse(bent), e_u)

    def _together(self, g: Array, u: Array) -> Array:
        back = np.argsort(np.concatenate(self.split))
        return jnp.concatenate([g, u], axis=-1)[..., back]


class BendTransform(VectorTransform):
    """The map of a :class:`Bend` around its center."""

    arrays = ("center", "bend")

    def __init__(self, center: Array, bend: Bend) -> None:
        self.center, self.bend = center, bend

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        bent, log_det = self.bend(x - self.center)
        return self.center + bent, log_det

    def _inverse(self, y: Array) -> Array:
        return self.center + self.bend.inverse(y - self.center)


@dataclass(kw_only=True, eq=False, repr=False)
class AutoStructuredNormal(AutoAtModes):
    r"""Globals, and effects of groups that are independent given the globals.

    The effects are the sites in plates (and those of more than 16 numbers), the globals all others.
    In the coordinates x of the fixed map :math:`z = c + A x` of :class:`AutoAtModes`,

    .. math::
        g = m_g + L\, skew(e_g), \qquad
        u_j = m_j + M_j (g - m_g) + \exp(a_j + C_j (g - m_g))\, e_j, \qquad e \sim N(0, I),

    so that an effect's mean and the logarithm of its scale are affine in the globals, among them
    the logarithm of the scale from which it was drawn: a hierarchy that is centred, decentred or
    between, and the funnel of few rows, are one family. With k globals and n effects a draw costs
    :math:`O(n k)`, and the guide has 2 n k numbers and as many moments of an optimiser.

    It begins at the normal of greatest ELBO, for any number of effects. Above 256 latent numbers it
    knows the structure of the rows: crossed factors, and correlated effects of one group. Of the
    effects of the largest plate given all others the covariance has a block for each, and these
    others have a matrix, so that the smaller plates together may have some thousands. After
    :math:`c + A x` effects are scaled, and those of one group sheared, around c as their prior's
    scale and correlation move them: by as much as their rows leave open. The scales begin with
    their skew. So no step is needed in most cases, and steps at a usual rate add more noise to so
    many numbers than they mend: give the loss many particles, or a ``proxy``, and a rate that
    falls.

    *What it is biased by.* In those coordinates effects are independent given the globals, and so
    are those of crossed factors; what the fixed map does not know of their correlation is lost.
    Beside the skew the globals are normal. The scale of few groups with few rows, which may be 0,
    is too narrow.

    :param model: as of :class:`AutoJoint`.

    **References:**

    1. *Automatic structured variational inference*, Ambrogioni et al. (AISTATS 2021)
    2. *Cascading flows*, Ambrogioni, Silvestri and van Gerven (ICML 2021), on the same structure
       with flows in place of normals

    >>> def model(group, y):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 5))
    ...     s = numpyro.sample("s", dist.HalfNormal(1))
    ...     with numpyro.plate("groups", 3):
    ...         level = numpyro.sample("level", dist.Normal(mean, s))
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(level[group], 0.5), obs=y)
    >>> group, y = jnp.arange(30) % 3, jnp.arange(30) % 3 + 0.1 * jnp.sin(jnp.arange(30.0))
    >>> guide = AutoStructuredNormal(model)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> params = svi.run(jax.random.key(0), 50, group, y, progress_bar=False).params
    >>> guide.sample_posterior(jax.random.key(1), params, sample_shape=(100,))["level"].shape
    (100, 3)
    """

    most_searched = None

    def prepare(self, *args: Any, **kwargs: Any) -> Split:
        info, effects = self.read(*args, **kwargs), []
        for name, latent in info.latents.items():
            place = np.arange(info.size)[info.slices[name]]
            if latent.plates or len(place) > _MANY:
                effects.append(place)
        places = np.concatenate([np.zeros(0, int), *effects])
        return Split(np.setdiff1d(np.arange(info.size), places), places)

    def latent_distribution(self) -> dist.TransformedDistribution:
        split: Split = self.prepared
        loc, scale, fixed, mode = self.begin()
        k, n = len(split.globals), len(split.effects)
        root = jnp.diag(scale[split.globals])
        parts: dict[str, Any] = {"loc": numpyro.param(f"{self.prefix}_loc", loc)}
        if k:
            name, rows = f"{self.prefix}_scale_tril", RowsOfFactor()
            root = numpyro.param(name, root, constraint=rows)
        starts = {"skew": (k,), "slope": (n, k), "log_scale": (n,), "log_slope": (n, k)}
        for name, shape in starts.items():
            start = jnp.log(scale[split.effects]) if name == "log_scale" else jnp.zeros(shape)
            if name == "skew" and mode is not None and mode.sides is not None:
                start = mode.sides[split.globals, 2]
            value: Any = numpyro.param(f"{self.prefix}_{name}", start) if start.size else start
            # What moves one effect moves as one: k numbers with steps of Adam each would move it
            # by the root of k times the rate.
            parts[name] = value / k**0.5 if name.endswith("slope") and k else value
        inner = StructuredTransform(root=jnp.asarray(root), split=split, **parts)
        return dist.TransformedDistribution(self.get_base_dist(), [inner, *fixed])

    def begin(self) -> tuple[Array, Array, list[Transform], Mode | None]:
        """As of :class:`AutoAtModes`, with the bend of the mode after the fixed map."""
        names = [f"{self.prefix}_{name}" for name in ("bend", "bend_places", "center")]
        known = self.is_mapped and numpyro.param(names[-1]) is not None
        loc, scale, fixed, mode = super().begin()
        if mode is not None and mode.sides is not None:
            at = self.prepared.globals
            loc, scale = (x.at[at].set(mode.sides[at, k]) for k, x in enumerate((loc, scale)))
        if fixed:
            bend = mode.bend if mode is not None else None
            packed = Bend.straight(self.latent_dim).packed if bend is None else bend.packed
            start = (None, None) if known else (jnp.asarray(x, loc.dtype) for x in packed)
            numbers, places = map(numpyro.param, names, start)
            numbers, places = (lax.stop_gradient(jnp.asarray(x)) for x in (numbers, places))
            bend = Bend.unpacked(numbers, places, self.latent_dim)
            center = jnp.asarray(fixed[0](jnp.zeros_like(loc)))
            fixed = [*fixed, BendTransform(center, bend)]
        return loc, scale, fixed, mode

    def units(self, mode: Mode) -> Array | Arrow:
        return mode.factor

    def new_map(self, center: Array, root: Array | Arrow) -> tuple[Array, Array | Arrow]:
        if not isinstance(root, Arrow):
            return super().new_map(center, root)
        places = jnp.concatenate([root.core, jnp.ravel(root.leaves)]).astype(center.dtype)
        values = center, root.root, root.slope, root.block, places
        return _of_params(
            numpyro.param(f"{self.prefix}_{name}", value)
            for name, value in zip(_PARAMS, values, strict=True)
        )

    def known_map(self) -> tuple[Array, Array | Arrow] | None:
        root: Any = numpyro.param(f"{self.prefix}_root")
        if root is None or len(root) == self.latent_dim:
            return super().known_map()
        return _of_params(numpyro.param(f"{self.prefix}_{name}") for name in _PARAMS)


_PARAMS = "center", "root", "root_slope", "root_block", "root_places"
"""The parameters of a fixed map with an ``Arrow``."""


def _of_params(values: Iterable[Any]) -> tuple[Array, Arrow]:
    center, root, slope, block, places = (lax.stop_gradient(jnp.asarray(x)) for x in values)
    places, k = places.astype(int), len(root)
    return center, Arrow(places[:k], places[k:].reshape(slope.shape[:2]), root, slope, block)
