"""Ratio of two densities that are known by their samples only, by logistic regression."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from numpyro_ext._checks import check_positive
from numpyro_ext._typing import Float
from numpyro_ext.scores._fields import add_ridge, as_queries, solve
from numpyro_ext.scores._points import as_point_pair, as_points, matmul
from numpyro_ext.scores._pytree import pytree

# A direction that the samples do not vary in keeps its scale.
_SMALLEST_SCALE = 1e-6
NEWTON_STEPS = 25


def logistic_loss(logits_num: ArrayLike, logits_den: ArrayLike) -> Float[Array, ""]:
    r"""Logistic loss of a classifier T that tells samples of two distributions apart.

    .. math:: \mathrm{mean}\,\mathrm{softplus}(-T(x_{num}))
              + \mathrm{mean}\,\mathrm{softplus}(T(x_{den})).

    Its minimiser over all T is :math:`T^* = \log(p_{num} / p_{den})`, whatever the two numbers of
    samples are. The minimum is :math:`2 \log 2 - 2\, \mathrm{JSD}`; at a loss near 0 T tells all
    samples apart and is not a reliable ratio.

    **Reference:** *Adversarial variational Bayes*, equation 3.3 and proposition 1, Mescheder,
    Nowozin and Geiger (ICML 2017)

    >>> print(f"{logistic_loss(jnp.zeros(3), jnp.zeros(5)):.4f}")
    1.3863
    """
    a, b = jnp.asarray(logits_num), jnp.asarray(logits_den)
    return jnp.mean(jax.nn.softplus(-a)) + jnp.mean(jax.nn.softplus(b))


def whiten(x: ArrayLike) -> tuple[Float[Array, "k d"], Float[Array, " d"], Float[Array, " d"]]:
    r"""Samples of q in the coordinates of their own moments: ``(u, loc, scale)``.

    :math:`u = (x - loc) / scale`, with the mean and the standard deviation (of 1/K) of each
    coordinate, which is at least 1e-6; no gradient flows through the two. For **adaptive
    contrast**, compare u with draws of :math:`r_a = N(0, I)` instead of comparing x with p:

    .. math::
        \log \frac{q(x)}{p(x)} = \log \frac{q_u(u)}{N(u; 0, I)}
        + \Bigl[\log N(x; loc, scale^2) - \log p(x)\Bigr],

    where the first term is learnt and small, and the second is exact.

    **Reference:** *Adversarial variational Bayes*, section 3.3, Mescheder et al. (ICML 2017)

    >>> u, loc, scale = whiten(jnp.array([[1.0], [5.0]]))
    >>> print(u.ravel(), loc, scale)
    [-1.  1.] [3.] [2.]
    """
    x = as_points("x", x)
    # Twice, because the mean of numbers far from 0 is rounded.
    loc = jnp.mean(x, axis=0)
    loc = lax.stop_gradient(loc + jnp.mean(x - loc, axis=0))
    scale = lax.stop_gradient(jnp.sqrt(jnp.mean((x - loc) ** 2, axis=0)))
    # NaN is not small: it stays NaN.
    scale = jnp.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    return (x - loc) / scale, loc, scale


@dataclass(frozen=True)
class LogisticRatio:
    r"""Log ratio of two densities as a polynomial, by logistic regression on samples.

    The polynomial :math:`T(z) = w^\top \Phi(u)` of all monomials up to ``degree``, of z whitened
    coordinate by coordinate with the moments of all samples together, minimises
    :func:`logistic_loss` plus :math:`\frac12` ``l2`` :math:`|w|^2` (the constant is not penalised).
    At the optimum it is :math:`\log(p_{num} / p_{den})` for two Gaussians at degree 2, and for two
    with the same covariance at degree 1. ``l2`` keeps it finite where samples are told apart.

    :param int degree: 1 or 2, of 1 + d (d + 3) / 2 monomials.
    :param l2: the ridge, positive.

    **Reference:** *Density ratio estimation in machine learning*, chapter 4, Sugiyama et al. (2012)

    >>> e = jax.random.normal(jax.random.key(0), (2000, 1))
    >>> ratio = LogisticRatio(degree=1).fit(0.5 + e, e)
    >>> bool(abs(ratio.log_ratio(jnp.ones((1, 1)))[0] - 0.375) < 0.25)  # the truth is 0.375
    True
    """

    degree: int = 2
    l2: float | Array = field(default=1e-3, kw_only=True)

    def __post_init__(self) -> None:
        if self.degree not in (1, 2):
            raise ValueError(f"degree is {self.degree!r}; it must be 1 or 2.")
        check_positive("l2", self.l2)

    def fit(self, x_num: ArrayLike, x_den: ArrayLike) -> "FittedLogisticRatio":
        """The ratio as a function of ``(n, d)`` points, from two sets of samples."""
        num, den = as_point_pair(x_num, x_den, ("x_num", "x_den"))
        num = num.astype(den.dtype)
        u, loc, scale = whiten(jnp.concatenate([num, den]))
        l2 = jnp.asarray(self.l2, den.dtype)
        w = _newton(_monomials(u, self.degree), len(num), l2)
        return FittedLogisticRatio(w, loc, scale)


def _monomials(u: Array, degree: int) -> Float[Array, "n f"]:
    """1, the coordinates, and at degree 2 the products of any two of them."""
    columns = [jnp.ones((len(u), 1), u.dtype), u]
    if degree == 2:
        i, j = np.triu_indices(u.shape[1])
        columns.append(u[:, i] * u[:, j])
    return jnp.concatenate(columns, axis=1)


@partial(jax.jit, static_argnums=1)
def _newton(phi: Array, num: int, l2: Array) -> Float[Array, " f"]:
    """Coefficients by Newton steps, each the best of a geometric sequence of lengths; the first
    ``num`` rows of ``phi`` belong to the numerator."""
    is_num = jnp.arange(len(phi)) < num
    sign = jnp.where(is_num, -1.0, 1.0).astype(phi.dtype)
    share = jnp.where(is_num, 1.0 / num, 1.0 / (len(phi) - num)).astype(phi.dtype)
    penalty = l2 * (jnp.arange(phi.shape[1]) > 0)
    lengths = jnp.concatenate([jnp.zeros(1), 2.0 ** -jnp.arange(10.0)]).astype(phi.dtype)

    def loss(logits: Array, w: Array) -> Array:
        return jnp.sum(share * jax.nn.softplus(sign * logits)) + jnp.sum(penalty * w**2) / 2

    def step(_: Any, w: Array) -> Array:
        logits = matmul(phi, w)
        wrong = jax.nn.sigmoid(sign * logits)
        gradient = matmul(phi.T, share * sign * wrong) + penalty * w
        curvature = matmul(phi.T * (share * wrong * (1.0 - wrong)), phi) + jnp.diag(penalty)
        # Where all is told apart, nothing but this holds the constant.
        rounding = jnp.finfo(phi.dtype).eps * (1.0 + jnp.trace(curvature))
        direction = -solve(jnp.linalg.cholesky(add_ridge(curvature, rounding)), gradient)
        slope = matmul(phi, direction)
        losses = jax.vmap(lambda t: loss(logits + t * slope, w + t * direction))(lengths)
        return w + lengths[jnp.argmin(losses)] * direction

    return lax.fori_loop(0, NEWTON_STEPS, step, jnp.zeros(phi.shape[1], phi.dtype))


@pytree
@dataclass(frozen=True, eq=False)
class FittedLogisticRatio:
    """The fitted ratio of :class:`LogisticRatio`: a coefficient for each monomial."""

    coefficients: Float[Array, " f"]
    loc: Float[Array, " d"]
    scale: Float[Array, " d"]

    def __call__(self, z: ArrayLike) -> Float[Array, " n"]:
        return jnp.exp(self.log_ratio(z))

    def log_ratio(self, z: ArrayLike) -> Float[Array, " n"]:
        """Log of the ratio: the polynomial."""
        z = as_queries(self.loc[None], z)
        degree = 1 if len(self.coefficients) == 1 + len(self.loc) else 2
        return matmul(_monomials((z - self.loc) / self.scale, degree), self.coefficients)
