"""Sites on a circle, and where the circle is cut to become a line.

NumPyro cuts every circle at pi, so that a posterior there is in two pieces. Here the cut can be
anywhere: the support of a site in unconstrained space becomes the interval around a ``middle``,
opposite of the cut, and the values of the site remain angles between -pi and pi.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ComposeTransform, Transform
from numpyro.primitives import Messenger
from scipy.special import ndtr

from numpyro_ext._model.density import Around
from numpyro_ext._model.read import ModelInfo, elementwise
from numpyro_ext._typing import Model

_ON_LINE = "_unwrapped"  # the end of the name of such a site
_AT_PI = 2.99  # in unconstrained space, 0.3 from pi
_SHARPNESS, _PLACES = 4.0, 64
"""Of the kernel by which :func:`quietest` smooths draws, and the number of places it looks at."""


def wrapped(angle: Any, middle: Any = 0.0) -> Any:
    """The same angles ``(*batch, *site)`` within pi of a middle, so that what is near on the circle
    is near as a number."""
    turn = jnp if isinstance(angle, Array) else np
    middle = turn.asarray(middle, angle.dtype)
    return middle + turn.remainder(angle - middle + np.pi, 2 * np.pi) - np.pi


class Rotation(Transform):
    """The sum with an angle, wrapped to the circle."""

    def __init__(self, angle: Any, domain: constraints.Constraint = constraints.circular) -> None:
        self.angle, self.of = angle, domain

    @property
    def domain(self) -> Any:
        return self.of

    @property
    def codomain(self) -> Any:
        return constraints.circular

    def __call__(self, x: Array) -> Array:
        return wrapped(x + self.angle)

    def _inverse(self, y: Array) -> Array:
        return wrapped(y - self.angle)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        return jnp.zeros_like(x)

    def tree_flatten(self) -> Any:
        return (self.angle,), (("angle",), {"of": self.of})


class CutCircle(constraints.Constraint):
    """The circle, cut opposite of ``middle``."""

    kind = "Circular"  # wherever it is cut

    def __init__(self, middle: Any) -> None:
        self.middle = middle

    def __call__(self, x: Any) -> Any:
        return constraints.circular(x)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.middle})"

    def feasible_like(self, prototype: Any) -> Any:
        return jnp.broadcast_to(self.middle, jnp.shape(prototype))

    def tree_flatten(self) -> Any:
        return (self.middle,), (("middle",), {})


class Turns(CutCircle):
    """The circle under the whole line, which goes around it again and again: a search can follow
    an angle on it, but a density has no integral."""


@biject_to.register(CutCircle)
def _cut(constraint: CutCircle) -> Transform:
    return ComposeTransform([biject_to(constraints.circular), Rotation(constraint.middle)])


@biject_to.register(Turns)
def _turns(constraint: Turns) -> Transform:
    return Rotation(constraint.middle, constraints.real)


def is_circle(support: Any) -> bool:
    """Return whether a support is a circle, or several, wherever they are cut."""
    return isinstance(elementwise(support), CutCircle | type(constraints.circular))


def cut_at(support: Any, middle: Any, kind: type[CutCircle] = CutCircle) -> Any:
    """The support of circles with their cuts opposite of ``middle``, in the shape of the site."""
    if isinstance(support, constraints.independent):
        inner = cut_at(support.base_constraint, middle, kind)
        return constraints.independent(inner, support.reinterpreted_batch_ndims)
    return kind(middle)


def circular_sites(info: ModelInfo) -> list[str]:
    """Names of the latent sites on circles."""
    return [name for name, latent in info.latents.items() if is_circle(latent.support)]


def _on_line(name: str, info: ModelInfo) -> bool:
    """Whether a site is an angle that NumPyro's ``CircularReparam`` has put on a line."""
    latent = info.latents[name]
    return name.endswith(_ON_LINE) and elementwise(latent.support) is constraints.real


def rolled_out_of(info: ModelInfo) -> np.ndarray:
    """True for the coordinates of angles on a line, where one mode comes back with each turn."""
    found = np.zeros(info.size, bool)
    for name in info.latents:
        found[info.slices[name]] = _on_line(name, info)
    return found


def with_circles(
    info: ModelInfo,
    middles: Any,
    kind: type[CutCircle] = CutCircle,
    names: Collection[str] | None = None,
) -> ModelInfo:
    """The same, its circles cut opposite of ``middles``, ``(n,)`` in the flat order; None stands
    for NumPyro's cuts. Only the places of circles are read. ``names`` are the sites, by default all
    on circles."""
    names = circular_sites(info) if names is None else names
    if not names or (middles is None and circles_of(info) is None):
        return info
    supports = {}
    for name in names:
        latent = info.latents[name]
        shape, dtype = latent.constrained.shape, latent.constrained.dtype
        own = jnp.zeros(shape) if middles is None else middles[info.slices[name]].reshape(shape)
        supports[name] = cut_at(latent.support, jnp.asarray(own, dtype), kind)
    return with_supports(info, supports)


def with_supports(info: ModelInfo, supports: dict[str, Any]) -> ModelInfo:
    """The same with other supports of some sites."""
    latents = {
        name: latent._replace(support=supports.get(name, latent.support))
        for name, latent in info.latents.items()
    }
    return replace(info, latents=latents) if supports else info


def circles_of(info: ModelInfo) -> Array | None:
    """The middles of circles, ``(n,)`` in the flat order and inf elsewhere; None for NumPyro's."""
    supports = {name: elementwise(latent.support) for name, latent in info.latents.items()}
    if not any(isinstance(x, CutCircle) for x in supports.values()):
        return None
    middles = {n: getattr(x, "middle", jnp.inf) for n, x in supports.items()}
    shapes = dict(info.shapes)
    return info.ravel({n: jnp.broadcast_to(x, shapes[n]) for n, x in middles.items()})


def finite(middles: Any) -> Array:
    """Middles of circles, and 0 for other coordinates."""
    return jnp.where(jnp.isfinite(middles), middles, 0)


def recut(x: Array, before: Any, after: Any) -> Array:
    """Coordinates ``(*batch, *shape)`` for other cuts, each ``(*shape)`` by :func:`circles_of`."""
    if before is None and after is None:
        return x
    a, b = (0.0 if m is None else jnp.asarray(m, x.dtype) for m in (before, after))
    on_circle = jnp.isfinite(a) & jnp.isfinite(b)
    a, b = finite(a), finite(b)
    inside = jnp.where(on_circle, x, 0)
    return jnp.where(on_circle, _cut(CutCircle(b)).inv(_cut(CutCircle(a))(inside)), x)


def reflected(x: Array, middles: Any) -> Array | None:
    """Coordinates ``(n,)`` with the angles reflected at their mean, by which two of them change
    places, as the directions of a mixture may; None with fewer than two circles. ``middles`` are
    as by :func:`circles_of`."""
    if middles is None or np.sum(on_circle := np.isfinite(middles)) < 2:
        return None
    angles = _cut(CutCircle(finite(middles)))(jnp.where(on_circle, x, 0))
    mean = jnp.angle(jnp.sum(jnp.where(on_circle, jnp.exp(1j * angles), 0)))
    common = jnp.where(on_circle, mean, jnp.inf)
    mirrored = recut(-recut(x, middles, common), common, middles)
    return jnp.where(on_circle, mirrored, x)


class OnCircle(Around):
    """A distribution with another cut of its circles."""

    pytree_data_fields = ("cut",)

    def __init__(self, base_dist: Any, cut: Any) -> None:
        super().__init__(base_dist)
        self.cut = cut

    @property
    def support(self) -> constraints.Constraint:
        return self.cut

    @property
    def mean(self) -> Array:
        return self.base_dist.mean


def on_circle(fn: Any, support: Any) -> OnCircle:
    """The distribution with this support."""
    return OnCircle(fn.base_dist if isinstance(fn, OnCircle) else fn, support)


class on_supports(Messenger):
    """The model with these supports of its latent sites on circles."""

    def __init__(self, fn: Model, supports: dict[str, Any]) -> None:
        super().__init__(fn)
        self.supports = supports

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and not msg["is_observed"] and msg["name"] in self.supports:
            msg["fn"] = on_circle(msg["fn"], self.supports[msg["name"]])


def on_circles(model: Model, info: ModelInfo) -> Model:
    """The model with the cuts of ``info``."""
    supports = {
        name: latent.support
        for name, latent in info.latents.items()
        if isinstance(elementwise(latent.support), CutCircle)
    }
    return on_supports(model, supports) if supports else model


def unrolled(values: dict[str, Any], info: ModelInfo) -> dict[str, Any]:
    """Values with the angles of circles within pi of their middles, and those that NumPyro has
    put on a line as they are there."""
    near = dict(values)
    for name, latent in info.latents.items():
        if name in values and isinstance(support := elementwise(latent.support), CutCircle):
            near[name] = wrapped(values[name], support.middle)
        angle = name.removesuffix(_ON_LINE)
        if angle in values and name in values and _on_line(name, info):
            near[angle] = values[name]
    return near


def sites_at_pi(angles: dict[str, slice], mean: Any, sd: Any) -> list[str]:
    """The sites on circles cut at pi for which a normal in unconstrained space, ``(n,)`` each, has
    more than a quarter of its mass within 0.3 of the cut. A uniform angle has a tenth there.

    :param angles: the places of sites on circles in the flat order.
    """
    beyond = ndtr((-_AT_PI - mean) / sd) + ndtr((mean - _AT_PI) / sd)
    return [name for name, at in angles.items() if np.any(np.asarray(beyond)[at] > 0.25)]


def middle_of(draws: Any) -> np.ndarray:
    """The angles opposite of the places with the fewest of the draws ``(m, *site)``."""
    places = np.linspace(-np.pi, np.pi, _PLACES, endpoint=False)
    x = np.asarray(draws, np.float64)
    x = np.where(np.isfinite(x), x, 0.0)
    # By the kernel exp(s cos(place - x)), which has tails that tell even where there are no draws.
    here = [np.exp(_SHARPNESS * np.cos(x - place)).mean(0) for place in places]
    return wrapped(places[np.argmin(here, 0)] + np.pi)


def cut_by_draws(info: ModelInfo, draws: dict[str, Any]) -> ModelInfo:
    """The same with each circle cut where the fewest of the draws ``{site: (*batch, *site)}``
    are, and at pi where there are no draws."""
    middles = np.zeros(info.size)
    for name in (name for name in circular_sites(info) if name in draws):
        shape = info.latents[name].constrained.shape
        x = np.asarray(draws[name]).reshape(-1, *shape)
        middles[info.slices[name]] = np.ravel(middle_of(x))
    return with_circles(info, jnp.asarray(middles, float))
