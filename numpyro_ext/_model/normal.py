"""A normal in flat coordinates: a center, and a root of the covariance of one of several kinds."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal
import scipy.linalg

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.circles import recut
from numpyro_ext._model.read import set_up
from numpyro_ext._numpyro import normal_of_guide, params_of_normal, triangular_root
from numpyro_ext._typing import Params


class Plain(NamedTuple):
    """A factor A that is a lower triangular matrix ``(n, n)``, or its diagonal ``(n,)``, with the
    methods of an :class:`Arrow`; one of NumPy arrays is computed on the host."""

    root: Any

    @property
    def is_matrix(self) -> bool:
        return self.root.ndim == 2

    def push(self, xi: Any) -> Any:
        return _times(self.root, xi) if self.is_matrix else self.root * xi

    def pull(self, grad: Any) -> Any:
        return _times(self.root.T, grad) if self.is_matrix else self.root * grad

    def solve(self, moved: Any) -> Any:
        if not self.is_matrix:
            return moved / self.root
        on_host = isinstance(self.root, np.ndarray)
        solve = scipy.linalg.solve_triangular if on_host else solve_triangular
        return solve(self.root, moved, lower=True)

    def log_diagonal(self) -> Any:
        diagonal = abs(self.root.diagonal() if self.is_matrix else self.root)
        return np.log(diagonal) if isinstance(diagonal, np.ndarray) else jnp.log(diagonal)

    def sds(self) -> Any:
        return (self.root**2).sum(1) ** 0.5 if self.is_matrix else abs(self.root)

    def conditional_sds(self) -> Any:
        if not self.is_matrix:
            return abs(self.root)
        inverse = self.solve(np.eye(len(self.root), dtype=self.root.dtype))
        return 1 / (inverse**2).sum(0) ** 0.5

    def dense(self) -> Any:
        return self.root if self.is_matrix else jnp.diag(self.root)


def _times(a: Any, b: Any) -> Any:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a @ b
    return jnp.matmul(a, b, precision="highest")


def mean_and_sd(x: Any, where: Any = None) -> tuple[Any, Any]:
    """Mean and standard deviation over axis 0, or its rows ``where``; 0 for equal numbers."""
    # From one of them, because the mean of equal numbers is not quite this number.
    first = x[0] if where is None else x[where.argmax()]
    away, some = x - first, {} if where is None else {"where": where[:, None]}
    return first + away.mean(0, **some), away.std(0, **some)


def correlation_root(u: Array, m: Any) -> Array:
    """The lower root of the correlations of m points in units of their standard deviations, shrunk
    by m / (m + d)."""
    shrunk = jnp.matmul(u.T, u, precision="highest") / (m + u.shape[1])
    return jnp.linalg.cholesky(jnp.fill_diagonal(shrunk, 1.0, inplace=False))


def as_factor(factor: Any) -> Any:
    """The factor with its methods."""
    return Plain(factor) if isinstance(factor, np.ndarray | Array) else factor


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Normal:
    r"""The normal :math:`z = c + A \xi` with :math:`\xi \sim N(0, I)`; see :class:`Whitening`."""

    center: Array
    factor: Any
    circles: Array | None = None

    @classmethod
    def from_guide(cls, guide: Any, params: Params) -> Self:
        """Center and factor of a fitted normal guide, such as ``AutoMultivariateNormal``.

        :param dict params: what ``svi.get_params`` gives for it.
        """
        numbers = normal_of_guide(guide, params)
        if not is_traced(numbers) and not all(np.all(np.isfinite(x)) for x in numbers):
            raise ValueError(
                f"the mean or the scale of the {type(guide).__name__} is not finite; fit it at a"
                " smaller learning rate."
            )
        return cls(*numbers)

    def init_params(self, guide: Any, *args: Any, **kwargs: Any) -> Params:
        """
        The parameters of a guide that begins at this normal, for ``svi.run(..., init_params=)``.

        :param guide: an ``AutoMultivariateNormal``, or an ``AutoDiagonalNormal`` or ``AutoNormal``,
            which takes the variance of each coordinate given the others.
        :param args: arguments of the guide's model, as for ``svi.run``, and so ``kwargs``.
        """
        try:
            set_up(guide, args, kwargs)
        except RuntimeError as error:  # it looks for a start of its own
            raise ValueError(
                "the guide finds no start at which the density is finite; make it with"
                " init_loc_fn=find_modes(model, *args), of numpyro_ext.optim."
            ) from error
        center, is_dense = self.center, isinstance(guide, AutoMultivariateNormal)
        factor = self.matrix if is_dense else as_factor(self.factor).conditional_sds()
        if self.circles is not None:  # the guide has them cut at pi
            ones = jnp.ones_like(center)
            center, slopes = jax.jvp(lambda x: recut(x, self.circles, None), (center,), (ones,))
            factor = slopes[:, None] * factor if is_dense else slopes * factor
        return params_of_normal(guide, center, factor)

    def __repr__(self) -> str:
        if isinstance(self.factor, Arrow):
            L, w = self.factor.leaves.shape
            kind = f"of {L} effects of {w} given {self.factor.core.size}"
        else:
            kind = "dense" if self.factor.ndim == 2 else "diagonal"
        return f"{type(self).__name__}({self.size} coordinates, {kind})"

    @property
    def size(self) -> int:
        """The number of coordinates, n."""
        return self.center.shape[0]

    @property
    def is_matrix(self) -> bool:
        """Whether A is a matrix, and no diagonal or :class:`Arrow`."""
        return not isinstance(self.factor, Arrow) and self.factor.ndim == 2

    @property
    def matrix(self) -> Array:
        """A lower triangular A of the same covariance, ``(n, n)``."""
        dense = as_factor(self.factor).dense()
        return triangular_root(dense) if isinstance(self.factor, Arrow) else dense

    @property
    def log_volume(self) -> Array:
        """The logarithm of the determinant of A."""
        return jnp.sum(as_factor(self.factor).log_diagonal())

    def to_z(self, xi: Array) -> Array:
        """:math:`c + A \\xi`."""
        return self.center.astype(xi.dtype) + self.push(xi)

    def to_xi(self, z: Array) -> Array:
        """:math:`A^{-1} (z - c)`."""
        return as_factor(self.factor.astype(z.dtype)).solve(z - self.center.astype(z.dtype))

    def pull(self, grad: Array) -> Array:
        """:math:`A^\\top g`, the gradient in the new coordinates."""
        return as_factor(self.factor.astype(grad.dtype)).pull(grad)

    def push(self, xi: Array) -> Array:
        """:math:`A \\xi`, a step in the old coordinates."""
        return as_factor(self.factor.astype(xi.dtype)).push(xi)

    # On the host, in double precision:

    @property
    def on_host(self) -> Any:
        """The factor with methods that are computed on the host, except for an :class:`Arrow`."""
        is_arrow = isinstance(self.factor, Arrow)
        return as_factor(self.factor if is_arrow else np.asarray(self.factor, float))

    @property
    def sds(self) -> np.ndarray:
        """The standard deviation of each coordinate, ``(n,)``."""
        return np.asarray(self.on_host.sds(), float)

    @property
    def conditional_sds(self) -> np.ndarray:
        """The standard deviation of each coordinate given the others, ``(n,)``."""
        return np.asarray(self.on_host.conditional_sds(), float)

    def distance(self, x: ArrayLike) -> float:
        """The distance of a point from the center, in standard deviations."""
        away = np.asarray(x, float) - np.asarray(self.center, float)
        if isinstance(self.factor, Arrow):
            away = jnp.asarray(away, self.center.dtype)
        return float(np.linalg.norm(self.on_host.solve(away)))

    def laplace(self, value: float) -> float:
        r"""Laplace's formula :math:`-U(c) + \tfrac n2 \log 2\pi + \log |A|`, with U(c) given."""
        with np.errstate(divide="ignore"):
            each = np.asarray(self.on_host.log_diagonal(), float)
        return float(np.sum(each + np.log(2 * np.pi) / 2) - value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Whitening(Normal):
    r"""
    The coordinates :math:`\xi` of :math:`z = c + A \xi`, an argument of every kernel.

    A kernel with ``whitening=`` moves :math:`\xi` instead of the flat vector z; its potential is
    :math:`U(c + A\xi)` (the constant Jacobian drops out) and its gradient :math:`A^\top g`. With
    :math:`A A^\top` near the posterior's covariance all directions have unit scale, so that one
    step size fits all, and step sizes have no units: 0.1 to 0.5 is usual for kernels with momentum.
    State, samples, ``init_params`` and extra fields remain in terms of z; momenta, masses, metrics
    and preconditioners are in terms of :math:`\xi`.

    It changes no law: whatever c and A are, the draws come from the same posterior as the step
    vanishes. A wrong A only costs speed.

    :param center: c, ``(n,)`` in the flat order.
    :param factor: A, lower triangular ``(n, n)`` with a positive diagonal, or its diagonal
        ``(n,)``, or the ``Arrow`` that ``find_modes`` gives of many groups.
    :param circles: for latent sites on circles, ``(n,)``, the angle opposite of which each is cut
        to become a line, and inf for other coordinates; None where all are cut at pi.

    >>> from numpyro_ext.mcmc import SGHMC
    >>> def model():
    ...     numpyro.sample("far", dist.Normal(300.0, 20.0))
    ...     numpyro.sample("near", dist.Normal(0.0, 0.01))
    >>> whitening = Whitening(jnp.array([300.0, 0.0]), jnp.array([20.0, 0.01]))
    >>> kernel = SGHMC(model, 0.3, whitening=whitening)
    >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=20_000, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> samples = mcmc.get_samples()
    >>> print(f"{samples['far'].std():.0f} {samples['near'].std():.2f}")
    20 0.01
    """

    def __post_init__(self) -> None:
        if isinstance(self.factor, Arrow):
            return
        center, factor = jnp.asarray(self.center), jnp.asarray(self.factor)
        if center.ndim != 1 or factor.shape not in (center.shape, center.shape * 2):
            raise ValueError(
                f"center and factor have the shapes {center.shape} and {factor.shape}; they must be"
                " (n,) and (n,) or (n, n)."
            )
        object.__setattr__(self, "center", center)
        object.__setattr__(self, "factor", factor)
        if not isinstance(factor, Tracer):
            values = np.asarray(factor)
            diagonal = values if values.ndim == 1 else np.diagonal(values)
            if not (np.all(np.isfinite(values)) and np.all(diagonal > 0)):
                raise ValueError("factor must be finite, and positive on its diagonal.")
            if values.ndim == 2 and np.any(np.triu(values, 1)):
                raise ValueError("factor must be lower triangular, as of jnp.linalg.cholesky.")
