"""Discrepancies between samples and a target, by its score (Stein) or by its samples (MMD).

They are public in ``numpyro_ext.diagnostics``, with their references; here is the arithmetic.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext._typing import Float
from numpyro_ext.scores._points import as_point_pair, as_points, check_finite
from numpyro_ext.scores._pytree import is_pytree
from numpyro_ext.scores.kernels import IMQ, RBF, BaseKernel, as_kernel


def stein_kernel_matrix(
    x: ArrayLike, score: ArrayLike | Callable[[Array], Array], kernel: Any
) -> Float[Array, "k k"]:
    r"""Stein kernel :math:`k_0(x_i, x_j)` of all pairs (Liu, Lee and Jordan, ICML 2016), of mean 0
    under the target.

    .. math::
        k_0(x, y) = k\, s(x)^\top s(y) + s(x)^\top \nabla_y k + s(y)^\top \nabla_x k
                    + \mathrm{tr}\, \partial_x \partial_y k, \qquad s = \nabla \log p.

    :param x: ``(K, d)`` samples.
    :param score: the target's score: its ``(K, d)`` values at ``x``, or a callable that gives them.
    :param kernel: a kernel of this package, or a function ``(n, d), (m, d) -> (n, m)``.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> print(f"{stein_kernel_matrix(x, lambda x: -x, RBF(1.0))[0, 1]:.4f}")
    -0.6065
    """
    x, s = _with_score(x, score)
    return as_kernel(kernel).resolve(x).stein(x, x, s, s)


def squared_ksd(
    x: ArrayLike,
    score: ArrayLike | Callable[[Array], Array],
    kernel: Any = None,
    *,
    statistic: str = "u",
    block_size: int | None = None,
) -> Float[Array, ""]:
    """The mean of :func:`stein_kernel_matrix` over all pairs (``"v"``) or over the pairs
    :math:`i \\ne j` (``"u"``); NaN where a traced input is not finite."""
    check_choice("statistic", statistic, ("u", "v"))
    x, s = _with_score(x, score)
    kernel = as_kernel(IMQ("median_distance") if kernel is None else kernel)
    return _compiled(_ksd, kernel)(kernel, x, s, statistic, block_size)


@partial(jax.jit, static_argnums=(3, 4))
def _ksd(
    kernel: BaseKernel, x: Array, s: Array, statistic: str, block_size: int | None
) -> Float[Array, ""]:
    kernel = kernel.resolve(x)
    value = _mean_over_pairs(
        lambda i: kernel.stein(x[i], x, s[i], s), len(x), len(x), statistic, block_size
    )
    return _nan_unless_finite(value, x, s)


def squared_mmd(
    x: ArrayLike,
    y: ArrayLike,
    kernel: Any = None,
    *,
    statistic: str = "u",
    block_size: int | None = None,
) -> Float[Array, ""]:
    """Squared maximum mean discrepancy between ``(K, d)`` and ``(n, d)`` samples."""
    check_choice("statistic", statistic, ("u", "v"))
    x, y = as_point_pair(x, y)
    kernel = as_kernel(RBF("median_distance") if kernel is None else kernel)
    return _compiled(_mmd, kernel)(kernel, x, y, statistic, block_size)


@partial(jax.jit, static_argnums=(3, 4))
def _mmd(
    kernel: BaseKernel, x: Array, y: Array, statistic: str, block_size: int | None
) -> Float[Array, ""]:
    kernel = kernel.resolve(jnp.concatenate([x, y]))

    def term(a: Array, b: Array, statistic: str) -> Array:
        return _mean_over_pairs(lambda i: kernel(a[i], b), len(a), len(b), statistic, block_size)

    value = term(x, x, statistic) + term(y, y, statistic) - 2.0 * term(x, y, "v")
    return _nan_unless_finite(value, x, y)


def _compiled(fn: Any, kernel: BaseKernel) -> Callable[..., Array]:
    """One program per shape for a kernel that is a pytree; a user's own kernel runs eagerly."""
    return fn if is_pytree(kernel) else fn.__wrapped__


def _with_score(x: Any, score: Any) -> tuple[Array, Array]:
    x = as_points("x", x)
    s = jnp.asarray(score(x) if callable(score) else score)
    if s.shape != x.shape:
        raise ValueError(
            f"score has shape {s.shape} and x has shape {x.shape}; it must give one row of the"
            " target's grad log p for each sample."
        )
    check_finite("score", s)
    return x, s.astype(x.dtype)


def _mean_over_pairs(
    rows: Callable[[Array], Array], n: int, m: int, statistic: str, block_size: int | None
) -> Array:
    """Mean of an (n, m) matrix, given by ``rows(i)``; the U-statistic leaves its diagonal out."""
    if statistic == "u" and n < 2:
        raise ValueError(f"statistic is 'u' with {n} sample; give at least 2 or use statistic='v'.")
    block_size = check_count("block_size", n if block_size is None else block_size)

    def sum_of_rows(i: Array) -> Array:
        keep = (i < n)[:, None]
        if statistic == "u":
            keep = keep & (i[:, None] != jnp.arange(m))
        return jnp.sum(jnp.where(keep, rows(jnp.minimum(i, n - 1)), 0.0))

    num_pieces = -(-n // block_size)
    if num_pieces == 1:
        total = sum_of_rows(jnp.arange(n))
    else:
        index = jnp.arange(num_pieces * block_size).reshape(num_pieces, block_size)
        total = jnp.sum(lax.map(sum_of_rows, index))
    return total / (n * (m - 1) if statistic == "u" else n * m)


def _nan_unless_finite(value: Array, *inputs: Array) -> Array:
    """An infinite sample is at kernel 0 of all others, which would look like a number."""
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in inputs]))
    return jnp.where(finite, value, jnp.nan)
