"""Coordinates in which a posterior is near a standard normal."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.arrow import Arrow
from numpyro_ext._model.circles import recut
from numpyro_ext._model.read import Shapes, latent_sites, set_up, unconstrained_shape
from numpyro_ext._numpyro import normal_of_guide, params_of_normal, triangular_root
from numpyro_ext._typing import Params


@partial(
    jax.tree_util.register_dataclass, data_fields=["center", "factor", "circles"], meta_fields=[]
)
@dataclass(frozen=True, eq=False)
class Whitening:
    r"""
    The coordinates :math:`\xi` of :math:`z = c + A \xi`, an argument of every kernel.

    A kernel with ``whitening=`` moves :math:`\xi` instead of the flat vector z; its potential is
    :math:`U(c + A\xi)` (the constant Jacobian drops out) and its gradient :math:`A^\top g`. With
    :math:`A A^\top` near the posterior's covariance all directions have unit scale, so that one
    step size fits all, and step sizes have no units: 0.1 to 0.5 is usual for kernels with momentum.
    State, samples, ``init_params`` and extra fields remain those of z; momenta, masses, metrics and
    preconditioners are those of :math:`\xi`.

    It changes no law: whatever c and A are, the draws are those of the same posterior as the step
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

    center: Array
    factor: Array | Arrow
    circles: Array | None = None

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

    @classmethod
    def from_guide(cls, guide: Any, params: Params) -> "Whitening":
        """Center and factor of a fitted normal guide, such as ``AutoMultivariateNormal``.

        :param dict params: what ``svi.get_params`` gives for it.
        """
        return cls(*normal_of_guide(guide, params))

    def init_params(self, guide: Any, *args: Any, **kwargs: Any) -> Params:
        """
        The parameters of a guide that begins at this normal, for ``svi.run(..., init_params=)``.

        :param guide: an ``AutoMultivariateNormal``, or an ``AutoDiagonalNormal`` or ``AutoNormal``,
            whose variances are then those of each coordinate given the others.
        :param args: arguments of the guide's model, as for ``svi.run``, and so ``kwargs``.
        """
        try:
            set_up(guide, args, kwargs)
        except RuntimeError as error:  # it looks for a start of its own
            raise ValueError(
                "the guide finds no start at which the density is finite; make it with"
                " init_loc_fn=find_modes(model, *args), of numpyro_ext.optim."
            ) from error
        center, factor = self.center, self.factor
        if isinstance(factor, Arrow):
            diagonal = not isinstance(guide, AutoMultivariateNormal)
            factor = factor.conditional_sds() if diagonal else self.matrix
        if self.circles is not None:  # the guide has them cut at pi
            ones = jnp.ones_like(center)
            center, slopes = jax.jvp(lambda x: recut(x, self.circles, None), (center,), (ones,))
            factor = slopes[:, None] * factor if factor.ndim == 2 else slopes * factor
        return params_of_normal(guide, center, factor)

    def __repr__(self) -> str:
        if isinstance(self.factor, Arrow):
            L, w = self.factor.leaves.shape
            kind = f"of {L} effects of {w} given {self.factor.core.size}"
        else:
            kind = "dense" if self.factor.ndim == 2 else "diagonal"
        return f"Whitening({self.size} coordinates, {kind})"

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
        if isinstance(self.factor, Arrow):
            return triangular_root(self.factor.dense())
        return self.factor if self.factor.ndim == 2 else jnp.diag(self.factor)

    @property
    def log_volume(self) -> Array:
        """The logarithm of the determinant of A."""
        if isinstance(self.factor, Arrow):
            return jnp.sum(self.factor.log_diagonal())
        factor = self.factor
        return jnp.sum(jnp.log(jnp.abs(factor if factor.ndim == 1 else jnp.diag(factor))))

    def to_z(self, xi: Array) -> Array:
        """:math:`c + A \\xi`."""
        return self.center.astype(xi.dtype) + self.push(xi)

    def to_xi(self, z: Array) -> Array:
        """:math:`A^{-1} (z - c)`."""
        moved = z - self.center.astype(z.dtype)
        factor = self.factor.astype(z.dtype)
        if isinstance(factor, Arrow):
            return factor.solve(moved)
        return solve_triangular(factor, moved, lower=True) if factor.ndim == 2 else moved / factor

    def pull(self, grad: Array) -> Array:
        """:math:`A^\\top g`, the gradient in the new coordinates."""
        factor = self.factor.astype(grad.dtype)
        if isinstance(factor, Arrow):
            return factor.pull(grad)
        return factor.T @ grad if factor.ndim == 2 else factor * grad

    def push(self, xi: Array) -> Array:
        """:math:`A \\xi`, a step in the old coordinates."""
        factor = self.factor.astype(xi.dtype)
        if isinstance(factor, Arrow):
            return factor.push(xi)
        return factor @ xi if factor.ndim == 2 else factor * xi


def fitted_normal(guide: Any, params: Params) -> tuple[Array, Array, Shapes]:
    """Mean and factor of a fitted normal guide, and the unconstrained shapes of its sites."""
    loc, factor = normal_of_guide(guide, params)
    if not is_traced((loc, factor)) and not np.all(np.isfinite(loc)) & np.all(np.isfinite(factor)):
        raise ValueError(
            f"the mean or the scale of the {type(guide).__name__} is not finite; fit it at a"
            " smaller learning rate."
        )
    shapes = tuple(
        (site["name"], unconstrained_shape(site["fn"].support, jnp.shape(site["value"])))
        for site in latent_sites(guide.prototype_trace)
    )
    return loc, factor, shapes
