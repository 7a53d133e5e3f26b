"""The Stein variational Newton method."""

from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Float
from numpyro_ext.particles.base import ParticleField
from numpyro_ext.scores import RBF
from numpyro_ext.scores._points import matmul, weighted_differences


@dataclass(kw_only=True, eq=False, repr=False)
class SteinNewton(ParticleField):
    r"""Newton's method for :class:`SVGD`, with one linear system for each particle.

    With :math:`N_j = -\nabla^2 \log p(x_j)`, their eigenvalues raised to ``damping``, the mean A
    of these and :math:`r_{ij} = x_i - x_j`,

    .. math::
        k_{ij} = \exp(-r_{ij}^\top A\, r_{ij} / (2 d)), \qquad
        \nabla_{x_j} k_{ij} = k_{ij}\, A\, r_{ij} / d, \\
        V_i = H_i^{-1} v_i, \qquad
        v_i = \frac1m \sum_j [k_{ij}\, g_j + \nabla_{x_j} k_{ij}], \qquad
        H_i = \frac1m \sum_j [k_{ij}^2 N_j + \nabla_{x_j} k_{ij} \nabla_{x_j} k_{ij}^\top],

    in unconstrained space, Jacobian included. A step of length 1, ``optax.sgd(1.0)``, is natural;
    with one particle it is Newton's. The velocity is equivariant to affine maps where no eigenvalue
    is below ``damping``.

    **Bias.** As for :class:`SVGD`. Where the density is not log concave a step of length 1 may be
    too long.

    As a loss for ``SVI`` it computes the Hessian of each particle; :class:`ParVI` does not, and
    refuses it. Cost of a step: m Hessians of the model and O(m^2 d^2 + m d^3).

    :param kernel: a :class:`~numpyro_ext.scores.RadialKernel` of the distances in the metric A;
        defaults to the one above.
    :param float damping: the least eigenvalue of a :math:`N_j`, positive.

    **Reference:** Detommaso, Cui, Spantini, Marzouk and Scheichl, *A Stein variational Newton
    method* (NeurIPS 2018), algorithm 1 with the block-diagonal approximation of section 3.

    >>> x = jnp.array([[4.0, 1.0]])
    >>> precision = jnp.array([[2.0, 0.0], [0.0, 50.0]])  # of a normal at the origin
    >>> x = x + SteinNewton().velocity(x, -x @ precision, -precision[None])
    >>> bool(abs(x).max() < 1e-5)  # where the density is highest, in one step
    True
    """

    takes_every_kernel = False
    needs_hessian = True

    damping: float = 1e-4
    # The metric A preconditions, and the Hessians of all particles are in memory together.
    block_size: None = field(default=None, init=False)
    precondition: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.kernel = RBF(_root_of_dimension) if self.kernel is None else self.kernel
        super().__post_init__()
        check_positive("damping", self.damping)

    def velocity(
        self, x: ArrayLike, grad_log_p: ArrayLike, hessian: ArrayLike | None = None
    ) -> Float[Array, "m d"]:
        """The field itself.

        :param hessian: ``(m, d, d)`` Hessians of the log density there.
        """
        x, g = self.check_arrays(x, grad_log_p)
        m, d = x.shape
        h = None if hessian is None else jnp.asarray(hessian)
        if h is None or h.shape != (m, d, d):
            raise ValueError(
                f"hessian has shape {None if h is None else h.shape}; SteinNewton needs the"
                f" ({m}, {d}, {d}) Hessians of the log density, which it computes as a loss of SVI."
            )
        values, vectors = jnp.linalg.eigh(-h)
        n = jnp.einsum("jab,jb,jcb->jac", vectors, jnp.maximum(values, self.damping), vectors)
        root = jnp.linalg.cholesky(jnp.mean(n, axis=0))
        # In the coordinates y = x L of A = L L^T, where the kernel is radial.
        y = matmul(x - jnp.mean(x, axis=0), root)
        kernel: Any = self.kernel.resolve(y)
        k, w = kernel.value_and_weight(y, y)
        # Gradients of k_ij in x_j are w_ij L (y_i - y_j).
        v = matmul(k, g) + matmul(weighted_differences(w, y, y), root.T)
        slopes = matmul(y, root.T)

        def solve(row: tuple[Array, ...]) -> Array:
            k_i, w_i, slope_i, v_i = row
            repulsion = w_i[:, None] * (slope_i - slopes)
            h_i = jnp.einsum("j,jab->ab", k_i**2, n) + matmul(repulsion.T, repulsion)
            return jax.scipy.linalg.solve(h_i, v_i, assume_a="pos")

        return lax.map(solve, (k, w, slopes, v), batch_size=min(m, 32))

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        return self.velocity(x, grad_log_p)  # which says that the Hessians are missing


def _root_of_dimension(y: Array) -> float:
    return y.shape[1] ** 0.5
