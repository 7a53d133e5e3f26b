"""Stein variational gradient descent.

Reference: Liu and Wang, *Stein variational gradient descent: a general purpose Bayesian inference
algorithm* (NIPS 2016), algorithm 1.
"""

from collections.abc import Callable
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from numpyro_ext.particles.base import ParticleField
from numpyro_ext.particles.pairs import kernel_sums

__all__ = ["SVGD"]


class SVGD(ParticleField):
    r"""Stein variational gradient descent: the field of steepest descent of KL(q || p) in an RKHS.

    .. math::

        V_i = \frac1m \sum_j \left[ k(x_i, x_j)\, g_j + \nabla_{x_j} k(x_i, x_j) \right],
        \qquad g_j = \nabla \log p(x_j),

    in unconstrained space, Jacobian included, with m particles :math:`x_i \in R^d`. The first term
    drives the particles to high density, the second keeps them apart. One particle (m = 1) climbs
    to the mode of the unconstrained density.

    As a loss for ``SVI`` it moves the particles of an
    :class:`~numpyro_ext.particles.guide.AutoParticles` guide; with any other guide that has
    ``sample_latent(rng_key, params, num_samples)`` it is amortised SVGD, which draws fresh
    particles at every step and trains the guide's parameters along the field. One minibatch is
    shared by all particles, one gradient of the model is taken for each; the loss that is reported
    is the mean negative log joint density, not a bound.

    **Bias.** At finite m and with a bandwidth from the particles, SVGD underestimates the marginal
    variances when d is not small against m (variance collapse: the driving term contains the
    particle's own gradient, :math:`k(x_i, x_i) g_i`, while the repulsion of an RBF fades with the
    dimension). Do not read the spread of the particles as the posterior's for d > m / 10.

    **Conventions.** Because of the 1/m, steps are 10 to 100 times larger than for fields of the
    Wasserstein geometry. The RBF is :math:`\exp(-|r|^2 / (2 h^2))`; Liu and Wang write
    :math:`\exp(-|r|^2 / h)`, whose h is :math:`2 h^2` here. The temperature T targets
    :math:`p^{1/T}`: gradients are divided by it.

    Cost of a step: m gradients of the model and O(m^2 d).

    :param kernel: a kernel of :mod:`numpyro_ext.scores`, or a function of ``(n, d)`` and ``(m, d)``
        points that gives an ``(n, m)`` matrix; defaults to ``RBF("median")``.
    :param int num_particles: particles to ask of the guide; ``AutoParticles`` has its own number,
        and other guides draw 100 if None.
    :param float temperature: T, positive.
    :param annealing: a function of the step t with values in (0, 1] that multiplies the gradients,
        such as ``lambda t: jnp.tanh((1.3 * (t + 1) / 1000) ** 5)`` for 1000 steps; it must end at
        1. ``SVI`` needs ``AutoParticles(model, count_steps=True)`` for it.
    :param int block_size: rows of the kernel matrix at a time, memory O(m (block_size + d)); None
        means all of them up to m = 2048, and 512 above.

    **Reference:** Liu and Wang, *Stein variational gradient descent: a general purpose Bayesian
    inference algorithm* (NIPS 2016), algorithm 1 and eq. 8.

    .. doctest::

        >>> import jax, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro_ext.particles import SVGD, AutoParticles
        >>> def model():
        ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
        >>> guide = AutoParticles(model, 50)
        >>> svi = SVI(model, guide, optax.adagrad(0.5), loss=SVGD())
        >>> result = svi.run(jax.random.key(0), 500, progress_bar=False)
        >>> w = guide.particles(result.params)["w"]
        >>> print(f"{w.mean():.1f} {w.std():.1f}")
        3.0 1.9
    """

    def __init__(
        self,
        kernel: Any = None,
        *,
        num_particles: int | None = None,
        temperature: float | Array = 1.0,
        annealing: Callable[[Array], ArrayLike] | None = None,
        block_size: int | None = None,
        precondition: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            kernel,
            num_particles=num_particles,
            temperature=temperature,
            annealing=annealing,
            block_size=block_size,
            precondition=precondition,
            **options,
        )

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        v = self.by_rows(lambda xi: kernel_sums(kernel, xi, x, grad_log_p)[1], x) / len(x)
        return kernel.to_velocity(v)
