"""Leapfrog steps of Hamiltonian dynamics, as a bijection of positions and velocities."""

from collections.abc import Callable

from jax import Array, lax
import jax.numpy as jnp

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform, as_pytree


class LeapfrogTransform(VectorTransform):
    r"""Leapfrog steps on :math:`(z, v)` concatenated, a vector of length :math:`2d`.

    Each of ``num_steps`` steps of size :math:`\epsilon` is

    .. math::
        v \leftarrow v - \tfrac{\epsilon}{2} \nabla U(z), \qquad
        z \leftarrow z + \epsilon v, \qquad
        v \leftarrow v - \tfrac{\epsilon}{2} \nabla U(z), \qquad
        \log\left|\det \frac{\partial (z', v')}{\partial (z, v)}\right| = 0 .

    The map keeps volume exactly, and the Hamiltonian up to :math:`O(\epsilon^2)`; steps above
    :math:`2 / \sqrt{\lambda}` are unstable, :math:`\lambda` the largest eigenvalue of U''.

    :param grad_potential: :math:`\nabla U`, from ``(*batch, d)`` to ``(*batch, d)``.
    :param step_size: :math:`\epsilon`, a positive number, or ``(d,)`` of them.
    :param int num_steps: number of leapfrog steps.

    **Reference:** *Markov chain Monte Carlo and variational inference: bridging the gap*, algorithm
    3, Salimans, Kingma and Welling (ICML 2015)

    >>> flow = LeapfrogTransform(lambda z: z, 0.1, 3)  # U = z^2 / 2
    >>> zv = flow(jnp.array([1.0, 0.5]))
    >>> print(f"{zv[0]:.4f} {zv[1]:.4f}")
    1.1033 0.1824
    """

    arrays = ("grad_potential", "step_size")
    static = ("num_steps",)

    def __init__(
        self, grad_potential: Callable[[Array], Array], step_size: float | Array, num_steps: int
    ) -> None:
        if jnp.ndim(step_size) == 0:
            check_positive("step_size", step_size)
        self.grad_potential = as_pytree(grad_potential)
        self.step_size = step_size
        self.num_steps = check_count("num_steps", num_steps)

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        z, v = jnp.split(x, 2, axis=-1)
        eps = self.step_size
        # The half kicks of neighbouring steps are one whole kick.
        v = v - 0.5 * eps * self.grad_potential(z)

        def step(zv: tuple[Array, Array], last: Array) -> tuple[tuple[Array, Array], None]:
            z, v = zv
            z = z + eps * v
            v = v - jnp.where(last, 0.5, 1.0) * eps * self.grad_potential(z)
            return (z, v), None

        last = jnp.arange(self.num_steps) == self.num_steps - 1
        (z, v), _ = lax.scan(step, (z, v), last)
        return jnp.concatenate([z, v], axis=-1), jnp.zeros(x.shape[:-1], x.dtype)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        turn = jnp.repeat(jnp.array([1.0, -1.0], y.dtype), y.shape[-1] // 2)
        return turn * self(turn * y)
