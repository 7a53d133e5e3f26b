"""Sites on a sphere, and the map from all of space to them."""

import math
from typing import Any

from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import gammaln
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import Transform

from numpyro_ext._model.density import Around
from numpyro_ext._model.read import elementwise


class Sphere(type(constraints.sphere)):  # pyright: ignore[reportGeneralTypeIssues]
    """The unit sphere, which has all of space as its unconstrained one."""

    def __call__(self, x: Any) -> Any:
        return constraints.sphere(x)


class SphereOfRoots(Sphere):
    """One on which a density has poles, where a coordinate is 0."""


sphere, sphere_of_roots = Sphere(), SphereOfRoots()


class Normalise(Transform):
    r"""A vector over its length r. The volume is such that x is standard normal if its direction is
    uniform: :math:`r^2` is chi-squared, and independent of the direction."""

    @property
    def domain(self) -> Any:
        return constraints.real_vector

    @property
    def codomain(self) -> Any:
        return sphere

    def __call__(self, x: Array) -> Array:
        return normalised(x)

    def _inverse(self, y: Array) -> Array:
        return y

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        d = x.shape[-1]
        log_area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
        return -jnp.sum(x**2, -1) / 2 - d / 2 * math.log(2 * math.pi) + log_area

    def tree_flatten(self) -> Any:
        return (), ((), {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Normalise)

    def __hash__(self) -> int:
        return hash(Normalise)


@biject_to.register(SphereOfRoots)
@biject_to.register(Sphere)
def _normalise(_: Sphere) -> Transform:
    return Normalise()


def normalised(x: Array) -> Array:
    """A vector over its length, of 0 the first unit vector."""
    square = jnp.sum(x**2, -1, keepdims=True)
    first = jnp.zeros_like(x).at[..., 0].set(1)
    # Differentiable there too.
    return jnp.where(square > 0, x / jnp.sqrt(jnp.where(square > 0, square, 1)), first)


def is_sphere(support: Any) -> bool:
    """Return whether a support is a sphere on which a kernel can move, or several."""
    return isinstance(elementwise(support), Sphere)


def has_poles(support: Any) -> bool:
    """Return whether it is one of the roots of probabilities."""
    return isinstance(elementwise(support), SphereOfRoots)


def without_signs(values: dict[str, Any], supports: dict[str, Any]) -> dict[str, Any]:
    """Values with the roots of probabilities positive: chains at mirror images have one law."""
    return {
        name: abs(x) if name in supports and has_poles(supports[name]) else x
        for name, x in values.items()
    }


class OnSphere(Around):
    """A distribution on a sphere, with a map from all of space."""

    support = sphere

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        if not isinstance(self.base_dist, dist.ImproperUniform):
            return super().sample(key, sample_shape)
        return normalised(random.normal(key, self.shape(sample_shape)))


class RootsOfDirichlet(Around):
    r"""Roots s of Dirichlet probabilities :math:`s^2`, with all signs alike: a density on the whole
    sphere, :math:`\tfrac12 \mathrm{Dir}(s^2) \prod_k |s_k|`."""

    support = sphere_of_roots

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Array:
        return jnp.sqrt(super().sample(key, sample_shape))

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        a = self.base_dist.concentration
        # From the roots: their squares may be 0 in single precision.
        powers = jnp.where(a == 0.5, 0.0, (2 * a - 1) * jnp.log(jnp.abs(value)))
        log_beta = jnp.sum(gammaln(a), -1) - gammaln(jnp.sum(a, -1))
        return jnp.sum(powers, -1) - log_beta - math.log(2)
