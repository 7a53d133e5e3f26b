"""Stein variational gradient descent.

Reference: Liu and Wang, *Stein variational gradient descent: a general purpose Bayesian inference
algorithm* (NIPS 2016), algorithm 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

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
    dimension). With ``RBF("median")``, the rule of the paper, do not read the spread of the
    particles as the posterior's for d > m / 10; with the wider default, not for d > m / 2.
    :class:`RegularizedSVGD` has the same points of rest and takes a quarter of the steps.

    **Conventions.** Because of the 1/m, steps are 10 to 100 times larger than for fields of the
    Wasserstein geometry. The RBF is :math:`\exp(-|r|^2 / (2 h^2))`; Liu and Wang write
    :math:`\exp(-|r|^2 / h)`, whose h is :math:`2 h^2` here. The temperature T targets
    :math:`p^{1/T}`: gradients are divided by it.

    Cost of a step: m gradients of the model and O(m^2 d).

    :param kernel: a kernel of :mod:`numpyro_ext.scores`, or a function of ``(n, d)`` and ``(m, d)``
        points that gives an ``(n, m)`` matrix; defaults to ``RBF("median_distance")``.
    :param int num_particles: particles to ask of the guide; ``AutoParticles`` has its own number,
        and other guides draw 100 if None.
    :param float temperature: T, positive.
    :param annealing: a function of the step t with values in (0, 1] that multiplies the gradients,
        such as ``lambda t: jnp.tanh((1.3 * (t + 1) / 1000) ** 5)`` for 1000 steps; it must end at
        1. ``SVI`` needs ``AutoParticles(model, count_steps=True)`` for it.
    :param int block_size: rows of the kernel matrix at a time, memory O(m (block_size + d)); None
        means all of them up to m = 2048, and 512 above.
    :param str precondition: ``"covariance"`` for coordinates in which particles have unit spread
        (see :class:`ParticleField`), or None.
    :param blocks: pairs ``(coordinates, neighbourhood)`` of positions in the flat latent vector:
        the coordinates are moved with a kernel of the neighbourhood alone, which contains them and
        what they depend on directly, at its own bandwidth (message passing). Every coordinate is in
        one block. It restores the repulsion where d is large and the neighbourhoods are small.

    **References:**

    1. Liu and Wang, *Stein variational gradient descent: a general purpose Bayesian inference
       algorithm* (NIPS 2016), algorithm 1 and eq. 8.
    2. Zhuo, Liu, Shi, Zhu, Chen and Zhang, *Message passing Stein variational gradient descent*
       (ICML 2018), for ``blocks``.
    3. Ba, Erdogdu, Ghassemi, Sun, Suzuki, Wu and Zhang, *Understanding the variance collapse of
       SVGD in high dimensions* (ICLR 2022).

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
        blocks: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
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
        if blocks is not None and precondition is not None:
            raise ValueError(
                f"blocks are sets of coordinates, which precondition={precondition!r} mixes; give"
                " one of the two."
            )
        self.blocks = None if blocks is None else _checked(blocks)

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        if self.blocks is None:
            v = self.by_rows(lambda xi: kernel_sums(kernel, xi, x, grad_log_p)[1], x) / len(x)
            return kernel.to_velocity(v)
        if sum(len(own) for own, _ in self.blocks) != x.shape[1]:
            raise ValueError(
                f"blocks move {sum(len(own) for own, _ in self.blocks)} coordinates, but a particle"
                f" has {x.shape[1]}; every coordinate must be in one block."
            )
        v = jnp.zeros_like(x)
        for own, seen in self.blocks:
            y = x[:, seen]
            local = self.kernel.resolve(y)
            # Zeros for the coordinates that are seen but not moved.
            g = jnp.zeros_like(y).at[:, : len(own)].set(grad_log_p[:, own])
            sums = self.by_rows(lambda yi, k=local, y=y, g=g: kernel_sums(k, yi, y, g)[1], y)
            v = v.at[:, own].set(sums[:, : len(own)] / len(x))
        return v


def _checked(blocks: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Arrays of coordinates; those that a block moves come first among those that it sees."""
    checked, moved = [], []
    for own, seen in blocks:
        own, seen = [int(a) for a in own], [int(a) for a in seen]
        if not own or min([*own, *seen]) < 0 or not set(own) <= set(seen):
            raise ValueError(
                f"blocks has the pair ({own}, {seen}); it must be coordinates that the block moves,"
                " and its neighbourhood, which contains them."
            )
        checked.append((np.array(own), np.array(own + sorted(set(seen) - set(own)))))
        moved += own
    if len(set(moved)) < len(moved):
        raise ValueError(f"blocks move {sorted(moved)}; every coordinate must be in one block.")
    return checked
