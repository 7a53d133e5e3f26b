"""Binary variables on a cycle, seen through vectors that are warped into a swirl."""

from typing import NamedTuple

from jax import Array, random
import jax.numpy as jnp


class LatentCycle(NamedTuple):
    """Data of :func:`latent_cycle`: observed vectors y ``(N, K, 2)``, the vectors x before they are
    warped, binary variables z ``(N, K)``, and their probabilities pi ``(K,)`` of 1."""

    y: Array
    x: Array
    z: Array
    pi: Array


def crosshair() -> tuple[Array, Array]:
    r"""Means ``(2, 2, 2)`` and covariances ``(2, 2, 2, 2)`` of four clusters on the axes.

    The cluster of :math:`(z_i, z_{i+1})` is at (1, 0) for 00, (0, 1) for 01, (0, -1) for 10 and
    (-1, 0) for 11, with the standard deviations 0.335 along its axis and 0.087 across.

    >>> from numpyro_ext.targets import crosshair
    >>> loc, covariance = crosshair()
    >>> print(loc[0, 1], covariance[0, 1].diagonal())
    [0. 1.] [0.0075 0.1125]
    """
    loc = jnp.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [-1.0, 0.0]]])
    long, flat = jnp.diag(jnp.array([0.1125, 0.0075])), jnp.diag(jnp.array([0.0075, 0.1125]))
    return loc, jnp.stack([jnp.stack([long, flat]), jnp.stack([flat, long])])


def swirl(x: Array) -> Array:
    r"""Points of the plane, turned by an angle that grows with the radius.

    .. math::
        t = \tfrac{\pi}{4} |x| - \tfrac{\pi}{2}, \qquad
        (x_1 \cos t + x_2 \sin t,\; -x_1 \sin t + x_2 \cos t) .

    >>> from numpyro_ext.targets import swirl
    >>> print(swirl(jnp.array([1.0, 0.0])).round(3))
    [0.707 0.707]
    """
    t = jnp.pi / 4 * jnp.linalg.norm(x, axis=-1) - jnp.pi / 2
    cos, sin = jnp.cos(t), jnp.sin(t)
    a, b = x[..., 0], x[..., 1]
    return jnp.stack([a * cos + b * sin, -a * sin + b * cos], axis=-1)


def latent_cycle(rng_key: Array, *, num_data: int = 800) -> LatentCycle:
    r"""Binary variables on cycles of K = 3, of which neighbours make a point of the plane.

    .. math::
        \pi_i \sim Beta(20, 20), \quad z_i \sim Bernoulli(\pi_i), \quad
        x_i \sim N(\mu_{z_i z_{i+1}}, \Sigma_{z_i z_{i+1}}), \quad y_i = swirl(x_i), \quad
        i \bmod K,

    with the components of :func:`crosshair` and without noise in y.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.targets import latent_cycle
    >>> latent_cycle(random.key(0), num_data=4).y.shape
    (4, 3, 2)
    """
    key_pi, key_z, key_x = random.split(rng_key, 3)
    pi = random.beta(key_pi, 20.0, 20.0, (3,))
    z = random.bernoulli(key_z, pi, (num_data, 3)).astype(int)
    loc, covariance = crosshair()
    pair = z, jnp.roll(z, -1, axis=1)
    # The covariances are diagonal.
    scale = jnp.sqrt(jnp.diagonal(covariance, axis1=-2, axis2=-1))
    x = loc[pair] + scale[pair] * random.normal(key_x, (num_data, 3, 2))
    return LatentCycle(swirl(x), x, z, pi)
