"""Linear systems with the regularised kernel matrix of the particles."""

from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._typing import Float
from numpyro_ext.scores._conjugate_gradients import solve_by_cg, takes_conjugate_gradients

DIRECT_UP_TO = 4096
"""Up to this many particles a kernel matrix is factorised in one piece."""
_RESIDUAL = 1e-3


def ridge_solve(
    kernel: Any, x: Float[Array, "m d"], k: Array | None, eta: Any, b: Float[Array, "m d"]
) -> Float[Array, "m d"]:
    r""":math:`(K + \eta\, k(0) I)^{-1} b`, by Cholesky for few particles.

    Above ``DIRECT_UP_TO`` particles a radial kernel has it by the conjugate gradients of
    :class:`~numpyro_ext.scores.SteinScore`, in memory of O(m d), with a warning where their
    relative residual is above 1e-3. The diagonal also gets m times the machine epsilon, because
    rounding may make K indefinite.

    :param k: the matrix, if it is at hand.
    """
    m = x.shape[0]
    eta = jnp.asarray(eta, x.dtype) + m * jnp.finfo(x.dtype).eps
    if m > DIRECT_UP_TO and takes_conjugate_gradients(kernel):
        ridge = eta * kernel.phi(jnp.zeros((), x.dtype))
        solution, residual = solve_by_cg(kernel, x, ridge, b)
        _warn_of_residual(residual)
        return solution
    if k is None:
        k = jnp.asarray(kernel(x, x))
    ridge = eta * jnp.mean(jnp.diagonal(k))
    lower = jnp.linalg.cholesky(k + ridge * jnp.eye(m, dtype=x.dtype), symmetrize_input=False)
    return cho_solve((lower, True), b)


def _warn_of_residual(residual: Array) -> None:
    def warn(residual: Any) -> None:
        warnings.warn(
            f"the linear system of the kernel matrix was solved to a relative residual of"
            f" {float(residual):.1e} only; give a larger eta, or fewer particles.",
            InferenceWarning,
            stacklevel=2,
        )

    lax.cond(residual <= _RESIDUAL, lambda _: None, partial(jax.debug.callback, warn), residual)
