"""A pinwheel: clusters that are warped normals, in the plane."""

from jax import Array, random
import jax.numpy as jnp


def pinwheel(
    rng_key: Array,
    *,
    num_per_class: int = 100,
    radial_std: float = 0.3,
    tangential_std: float = 0.05,
) -> tuple[Array, Array]:
    r"""Points ``(N, 2)`` on the arms of a pinwheel, and the number ``(N,)`` of the arm of each.

    .. math::
        F_0 &\sim N(1, s_r^2), \quad F_1 \sim N(0, s_t^2), \quad
        a = 2\pi\, label / 5 + e^{F_0} / 4, \\
        y &= 10\, (F_0 \cos a + F_1 \sin a,\; -F_0 \sin a + F_1 \cos a),

    in a random order. A mixture of normals needs several components for an arm.

    :param int num_per_class: points on each of the five arms.
    :param float radial_std: :math:`s_r`, along an arm; ``tangential_std`` is :math:`s_t`, across.

    References: Johnson et al., *Composing graphical models with neural networks for structured
    representations and fast inference* (NIPS 2016), figure 1.

    >>> from numpyro_ext.targets import pinwheel
    >>> y, labels = pinwheel(random.key(0))
    >>> y.shape, labels.shape
    ((500, 2), (500,))
    """
    key_noise, key_order = random.split(rng_key)
    labels = jnp.repeat(jnp.arange(5), num_per_class)
    F = random.normal(key_noise, (labels.size, 2)) * jnp.array([radial_std, tangential_std])
    F = F + jnp.array([1.0, 0.0])
    angle = 2 * jnp.pi * labels / 5 + jnp.exp(F[:, 0]) / 4
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    y = 10 * jnp.stack([F[:, 0] * cos + F[:, 1] * sin, -F[:, 0] * sin + F[:, 1] * cos], axis=-1)
    order = random.permutation(key_order, labels.size)
    return y[order], labels[order]
