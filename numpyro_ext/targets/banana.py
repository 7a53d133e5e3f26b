"""The banana: a Gaussian bent along a parabola, with every moment known."""

from jax import Array
import numpyro
import numpyro.distributions as dist


def banana(*, bend: float = 0.03, variance: float = 100.0) -> None:
    r"""The model :math:`x_1 \sim N(0, v)`, :math:`x_2 \mid x_1 \sim N(b (x_1^2 - v), 1)`.

    Known: :math:`E x = 0`, :math:`\mathrm{Var}\, x_1 = v`,
    :math:`\mathrm{Var}\, x_2 = 1 + 2 b^2 v^2`, :math:`\mathrm{Cov}(x_1, x_2) = 0`,
    :math:`E\, x_1^2 x_2 = 2 b v^2`. The site ``z1`` is
    :math:`x_1 / \sqrt v`, so that both coordinates have scales of order one.

    :param float bend: :math:`b`.
    :param float variance: :math:`v`.

    .. doctest::

        >>> from jax import random
        >>> from numpyro.infer import Predictive
        >>> from numpyro_ext.targets import banana
        >>> draws = Predictive(banana, num_samples=20_000)(random.key(0))
        >>> bool(abs(draws["x2"].var() - 19.0) < 1.0)
        True
    """
    z1 = numpyro.sample("z1", dist.Normal(0.0, 1.0))
    numpyro.sample("x2", dist.Normal(bend * variance * (z1**2 - 1.0), 1.0))


def banana_potential(x: Array, *, bend: float = 0.03, variance: float = 100.0) -> Array:
    r"""Minus the log density of :func:`banana` in :math:`(x_1, x_2)`, up to a constant.

    :param x: a point, shape ``(2,)``, unscaled.
    :param float bend: :math:`b`.
    :param float variance: :math:`v`.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.targets import banana_potential
        >>> float(banana_potential(jnp.array([0.0, -3.0])))
        0.0
    """
    residual = x[1] - bend * (x[0] ** 2 - variance)
    return 0.5 * x[0] ** 2 / variance + 0.5 * residual**2
