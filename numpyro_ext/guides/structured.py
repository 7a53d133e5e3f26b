"""A guide for hierarchies: effects whose means and scales depend on the globals."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import Transform

from numpyro_ext._checks import check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.arrow import Arrow, in_order, take
from numpyro_ext._model.bend import Bend
from numpyro_ext._model.modes import Mode
from numpyro_ext.guides.base import AutoAtModes
from numpyro_ext.guides.fixed import fixed_param
from numpyro_ext.guides.flows import (
    RowsOfFactor,
    SkewTransform,
    other_halves,
    permute_between,
)
from numpyro_ext.guides.networks import check_widths, flat_module, mlp
from numpyro_ext.transforms import AffineCoupling, VectorTransform

_MANY = 16
"""Numbers of a site outside of all plates, beyond which they are effects too."""


class Split(NamedTuple):
    """The places of the globals and of the effects in the latent vector."""

    globals: np.ndarray
    effects: np.ndarray


class StructuredTransform(VectorTransform):
    r"""The map :math:`g = m_g + L\, skew(f(e_g))` on k coordinates, and :math:`u = m_u + M g +
    \exp(a + C g) \odot e_u` on the others, at the places ``split``."""

    arrays = ("loc", "root", "skew", "slope", "log_scale", "log_slope", "flow")
    static = ("split",)

    def __init__(
        self,
        loc: Array,
        root: Array,
        skew: Array,
        slope: Array,
        log_scale: Array,
        log_slope: Array,
        flow: Sequence[Transform],
        split: Split,
    ) -> None:
        self.loc, self.root, self.skew, self.flow = loc, root, skew, flow
        self.slope, self.log_scale, self.log_slope = slope, log_scale, log_slope
        self.split = split

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        e_g, e_u = (take(x, places) for places in self.split)
        log_det: Any = 0.0
        for f in [*self.flow, SkewTransform(self.skew)]:
            before, e_g = e_g, jnp.asarray(f(e_g))
            log_det += f.log_abs_det_jacobian(before, e_g)
        g = e_g @ self.root.T
        log_scale = self.log_scale + g @ self.log_slope.T
        u = g @ self.slope.T + jnp.exp(log_scale) * e_u
        log_det += jnp.sum(jnp.log(jnp.diagonal(self.root))) + jnp.sum(log_scale, -1)
        return self.loc + in_order((g, u), self.split), log_det

    def _inverse(self, y: Array) -> Array:
        g, u = (take(y - self.loc, places) for places in self.split)
        e_g = jnp.linalg.solve(self.root, g[..., None])[..., 0] if g.shape[-1] else g
        e_u = (u - g @ self.slope.T) * jnp.exp(-self.log_scale - g @ self.log_slope.T)
        for f in [SkewTransform(self.skew), *reversed(self.flow)]:
            e_g = jnp.asarray(f.inv(e_g))
        return in_order((e_g, e_u), self.split)


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

    so that an effect's mean and the logarithm of its scale are affine in the globals. With k
    globals and n effects a draw costs :math:`O(n k)`, and the guide has 2 n k numbers and as many
    moments of an optimiser.

    It begins at the normal of greatest ELBO, for any number of effects. From 17 effects of a site
    it knows the structure of the rows: crossed factors, and correlated effects of one group. Of the
    effects of the largest plate given all others the covariance has a block for each, and these
    others have a matrix, so that the smaller plates together may have some thousands. After
    :math:`c + A x` an effect moves and is scaled as its prior and its rows say where the globals
    are: a hierarchy that is centred, decentred or between, and the funnel of few rows, are one
    family. With up to 10,000 rows that is, for normal effects and rows, their law given the
    globals; with more, the change of the prior alone. The numbers of a random walk go as one
    effect, and of several numbers of a group, such as pairs, the scales and shears to first order.
    The scales begin with their skew. So no step is needed in most cases, and steps at a usual rate
    add more noise to so many numbers than they mend: give the loss many particles, or a ``proxy``,
    and a rate that falls.

    *What it is biased by.* In those coordinates effects are independent given the globals, and so
    are effects of crossed factors; what the fixed map does not know of their correlation is lost.
    Beside the skew the globals are normal, or what the couplings of ``num_flows`` make of them. Of
    few groups with few rows the scale has a tail to 0 that is left out in part, so that the spread
    of its logarithm is too small.

    :param model: as of :class:`AutoJoint`.
    :param int num_flows: couplings of :class:`AutoRealNVPNormal` on the globals alone, before their
        skew, which begin at the identity, for steps of ``SVI`` to train.
    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).

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

    num_flows: int = 0
    hidden_dims: Sequence[int] = (32, 32)

    most_searched, by_groups = None, True

    def __post_init__(self) -> None:
        self.num_flows = check_count("num_flows", self.num_flows, minimum=0)
        self.hidden_dims = check_widths(self.hidden_dims)
        super().__post_init__()

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
        flow = self.flow_of_globals(k)
        inner = StructuredTransform(root=jnp.asarray(root), flow=flow, split=split, **parts)
        return dist.TransformedDistribution(self.get_base_dist(), [inner, *fixed])

    def flow_of_globals(self, k: int) -> list[Transform]:
        """Couplings on k numbers, which begin at the identity; none of one number."""
        num, split = self.num_flows if k > 1 else 0, k // 2
        net = mlp(self.hidden_dims, 2 * (k - split))
        names = (f"{self.prefix}_net__{i}$params" for i in range(num))
        flows = [AffineCoupling(flat_module(name, net, (split,)), split) for name in names]
        return permute_between(flows, [other_halves(k, i) for i in range(num - 1)])

    def begin(self) -> tuple[Array, Array, list[Transform], Mode | None]:
        """As of :class:`AutoAtModes`, with the bend of the mode after the fixed map."""
        names = [f"{self.prefix}_{name}" for name in _OF_BEND]
        known = self.is_mapped and fixed_param(f"{self.prefix}_center") is not None
        loc, scale, fixed, mode = super().begin()
        if mode is not None and mode.sides is not None:
            at = self.prepared.globals
            loc, scale = (x.at[at].set(mode.sides[at, k]) for k, x in enumerate((loc, scale)))
        if fixed:
            bend = mode.bend if mode is not None else None
            packed = Bend.straight(self.latent_dim).packed if bend is None else bend.packed
            start = [None] * len(names) if known else [jnp.asarray(x, loc.dtype) for x in packed]
            of_globals, effects, turns, places = map(fixed_param, names, start)
            numbers = lax.stop_gradient((of_globals, effects, turns))
            bend = Bend.unpacked(*numbers, _integers(places))
            center = jnp.asarray(fixed[0](jnp.zeros_like(loc)))
            fixed = [*fixed, BendTransform(center, bend)]
        return loc, scale, fixed, mode

    def units(self, mode: Mode) -> Array | Arrow:
        return mode.factor

    def new_map(self, center: Array, root: Array | Arrow) -> tuple[Array, Array | Arrow]:
        if not isinstance(root, Arrow):
            return super().new_map(center, root)
        places = [root.core, jnp.ravel(root.leaves), root.common]
        places = jnp.concatenate(places).astype(center.dtype)
        columns = root.columns.astype(center.dtype)
        values = center, root.root, root.slope, root.block, places, columns
        return _of_params(
            fixed_param(f"{self.prefix}_{name}", value)
            for name, value in zip(_PARAMS, values, strict=True)
        )

    def known_map(self) -> tuple[Array, Array | Arrow] | None:
        root = fixed_param(f"{self.prefix}_root")
        if root is None or len(root) == self.latent_dim:
            return super().known_map()
        return _of_params(fixed_param(f"{self.prefix}_{name}") for name in _PARAMS)


_PARAMS = "center", "root", "root_slope", "root_block", "root_places", "root_columns"
"""The parameters of a fixed map with an ``Arrow``."""
_OF_BEND = "bend", "bend_effects", "bend_turns", "bend_places"
"""The parameters of its bend."""


def _of_params(values: Iterable[Any]) -> tuple[Array, Arrow]:
    *numbers, places, columns = values
    center, root, slope, block = lax.stop_gradient(numbers)
    (L, w, _), k = slope.shape, len(root)
    places = _integers(places)
    core, leaves, common = places[:k], places[k : k + L * w], places[k + L * w :]
    return center, Arrow(core, leaves.reshape(L, w), common, _integers(columns), root, slope, block)


def _integers(places: Any) -> Any:
    """Places as integers, which stay numbers where they are no argument of a program."""
    return (places if is_traced(places) else np.asarray(places)).astype(int)
