"""A matrix-normal guide: weights with correlated rows and correlated columns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
import itertools
import math
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.util import vec_to_tril_matrix
import optax

from numpyro_ext._checks import check_rate
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.normal import Normal
from numpyro_ext._typing import Params
from numpyro_ext.guides.base import AutoAtModes, FixedMap

_SWEEPS = 200
"""The most alternating updates of the nearest matrix normal."""
_of_triangle: Any = biject_to(constraints.lower_cholesky)


class Layout(NamedTuple):
    """Where the matrices are in the latent vector: the first place and the shape of each."""

    matrices: tuple[tuple[int, tuple[int, ...]], ...]
    size: int

    @property
    def slices(self) -> list[slice]:
        return [slice(start, start + math.prod(shape)) for start, shape in self.matrices]

    @property
    def others(self) -> np.ndarray:
        """The places of all other numbers."""
        places = np.arange(self.size)
        return np.setdiff1d(places, np.concatenate([places[where] for where in self.slices]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Kronecker:
    """A factor of a covariance that maps each matrix X to R X C^T, with lower triangular R of
    ``rows`` and C of ``columns``, and multiplies the other numbers by ``scale``."""

    rows: list[Array]
    columns: list[Array]
    scale: Array
    layout: Layout = field(metadata={"static": True})

    def astype(self, dtype: Any) -> "Kronecker":
        return jax.tree.map(lambda x: jnp.asarray(x, dtype), self)

    def push(self, xi: Array) -> Array:
        return self._each(xi, partial(_product, "...ab,...bc,...dc->...ad"), self.scale)

    def pull(self, grad: Array) -> Array:
        return self._each(grad, partial(_product, "...ba,...bc,...cd->...ad"), self.scale)

    def solve(self, moved: Array) -> Array:
        def both(row: Array, X: Array, column: Array) -> Array:
            X = solve_triangular(row, X, lower=True)
            return solve_triangular(column, X.mT, lower=True).mT

        return self._each(moved, both, 1 / self.scale)

    def log_diagonal(self) -> Array:
        def logs(row: Array, X: Array, column: Array) -> Array:
            return _logs(row)[..., None] + _logs(column)[..., None, :]

        of_others = jnp.zeros(self.layout.size, self.scale.dtype)
        return self._each(of_others.at[self.layout.others].set(jnp.log(self.scale)), logs, 1.0)

    def _each(self, x: Array, of_matrix: Any, scale: Any) -> Array:
        others = self.layout.others
        out = x.at[others].set(x[others] * scale)
        parts = zip(self.layout.matrices, self.layout.slices, self.rows, self.columns, strict=True)
        for (_, shape), where, row, column in parts:
            new = of_matrix(row, x[where].reshape(shape), column)
            out = out.at[where].set(jnp.ravel(new))
        return out

    @property
    def packed(self) -> Array:
        """All numbers as one vector."""
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(self)])

    def unpacked(self, vector: Array) -> "Kronecker":
        """The factor of this layout with these numbers."""
        leaves, tree = jax.tree.flatten(self)
        stops = np.cumsum([x.size for x in leaves])[:-1]
        parts = zip(jnp.split(vector, stops), leaves, strict=True)
        return jax.tree.unflatten(tree, [part.reshape(x.shape) for part, x in parts])


_product = partial(jnp.einsum, precision="highest")
_product_of = partial(jnp.matmul, precision="highest")


def _logs(root: Array) -> Array:
    """The logarithms of the diagonal."""
    return jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1))


@dataclass(kw_only=True, eq=False, repr=False)
class AutoMatrixNormal(AutoAtModes):
    r"""Matrix normals for sites that are matrices, and independent normals for all other numbers.

    A site W of unconstrained shape (p, q), such as the weights of a layer or the coefficients of a
    regression with q outputs, has

    .. math::
        q(W) = MN(M, U, V), \qquad W = M + R\, E\, C^\top, \quad E_{ab} \sim N(0, 1), \qquad
        \mathrm{Cov}(W_{ac}, W_{bd}) = U_{ab} V_{cd} ,

        H(q) = \tfrac{pq}2 (1 + \log 2\pi) + q \log |R| + p \log |C|

    in nats, with :math:`U = R R^\top` between rows and :math:`V = C C^\top` between columns, R and
    C lower triangular. Only the product of the scales of U and V matters: :math:`|V| = 1`. Further
    axes in front of the two are matrices that are independent of each other. There are
    :math:`p^2 + q^2` numbers in place of :math:`p^2 q^2`, and a draw costs :math:`O(pq(p + q))`.

    It begins at the matrix normal nearest to the normal at the mode: the alternating updates of
    :meth:`natural_gradient`, to their end. A linear regression with q outputs, a normal prior on
    its coefficients of the form :math:`MN(M_0, I, V)` and noise of covariance V between outputs has
    an exact posterior of this form, which needs no step.

    *What it is biased by.* Different sites are independent, and so are the numbers outside of
    matrices. The covariance of two numbers in different rows and columns follows from U and V; what
    is more correlated is too narrow, as with all of KL(q || p). Outputs with noise of different
    scale under priors of one scale have posteriors that are not of this form.

    :param model: as of :class:`AutoJoint`.
    :param sites: the names of the sites that have matrix normals. The default is every site of at
        least two axes in unconstrained space, its plates included.

    **References:**

    1. *Structured and efficient variational deep learning with matrix Gaussian posteriors*,
       Louizos and Welling (ICML 2016)
    2. *Noisy natural gradient as variational inference*, Zhang et al. (ICML 2018)
    3. *Fast and simple natural-gradient variational inference with mixture of exponential-family
       approximations*, Lin, Khan and Schmidt (ICML 2019), on the blocks of a matrix Gaussian

    >>> def model(x, y):
    ...     w = numpyro.sample("w", dist.Normal().expand([2, 3]).to_event(2))
    ...     numpyro.sample("y", dist.Normal(x @ w, 0.5).to_event(2), obs=y)
    >>> x = jnp.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> y = x @ jnp.array([[1.0, 2.0, 3.0], [0.0, -1.0, 1.0]])
    >>> guide = AutoMatrixNormal(model)
    >>> svi = SVI(model, guide, guide.natural_gradient(0.1), Trace_ELBO(num_particles=8))
    >>> params = svi.get_params(svi.init(jax.random.key(0), x, y))
    >>> q = guide.matrix_normal(params, "w")
    >>> U = q.scale_tril_row @ q.scale_tril_row.T
    >>> bool(jnp.allclose(U, jnp.linalg.inv(x.T @ x / 0.25 + jnp.eye(2)), rtol=1e-3))
    True
    """

    sites: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sites, str):
            raise TypeError(f"sites is {self.sites!r}; it must be a list of names of sites.")
        super().__post_init__()

    def prepare(self, *args: Any, **kwargs: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
        info = self.read(*args, **kwargs)
        shapes = {name: latent.unconstrained.shape for name, latent in info.latents.items()}
        able = [name for name, shape in shapes.items() if len(shape) >= 2]
        chosen = able if self.sites is None else list(self.sites)
        if self.sites is not None and not chosen:
            raise ValueError(f"sites is empty; name some of {able}, or leave it out for all.")
        if not chosen:
            raise ValueError(
                "the model has no latent site of two axes for a matrix normal; use AutoNormal or"
                " AutoMultivariateNormal of NumPyro."
            )
        for name in chosen:
            if name not in able:
                raise ValueError(
                    f"sites has '{name}', which is no latent site of at least two axes in"
                    f" unconstrained space; these are {able}."
                )
        places = {name: np.arange(info.size)[info.slices[name]] for name in chosen}
        return {name: (int(place[0]), shapes[name]) for name, place in places.items()}

    @property
    def layout(self) -> Layout:
        return Layout(tuple(self.prepared.values()), self.latent_dim)

    def latent_distribution(self) -> dist.TransformedDistribution:
        loc, scale, fixed, _ = self.begin()
        loc: Any = numpyro.param(f"{self.prefix}_loc", loc)
        start = self._identity(scale[0])  # all are equal
        rows, columns = (
            [
                numpyro.param(name, root, constraint=constraints.lower_cholesky)
                for name, root in zip(self._names(kind), roots, strict=True)
            ]
            for kind, roots in (("row", start.rows), ("column", start.columns))
        )
        others: Any = start.scale
        if others.size:
            name, positive = f"{self.prefix}_scale", constraints.positive
            others = numpyro.param(name, others, constraint=positive)
        inner = self._factor(rows, columns, others)
        return dist.TransformedDistribution(
            self.get_base_dist(), [FixedMap(Normal(loc, inner)), *fixed]
        )

    def _names(self, kind: str) -> list[str]:
        return [f"{self.prefix}_{name}_{kind}" for name in self.prepared]

    def _identity(self, scale: Any = 1.0) -> Kronecker:
        rows, columns = (
            [
                jnp.broadcast_to(jnp.eye(s[k]), (*s[:-2], s[k], s[k]))
                for _, s in self.layout.matrices
            ]
            for k in (-2, -1)
        )
        others = jnp.full(len(self.layout.others), scale, float)
        return Kronecker([scale * row for row in rows], columns, others, self.layout)

    def _factor(self, rows: list[Any], columns: list[Any], scale: Any) -> Kronecker:
        """The factor of which the determinants of the columns are 1."""
        unit = [C * jnp.exp(-jnp.mean(_logs(C), -1))[..., None, None] for C in columns]
        return Kronecker(rows, unit, jnp.asarray(scale), self.layout)

    def units(self, mode: Mode) -> Kronecker:
        """The nearest in KL(q || p) to the normal at the mode."""
        precision, dense = 1 / mode.conditional_sds**2, mode.is_matrix
        if dense:
            inverse = mode.on_host.solve(np.eye(mode.size))
            precision = inverse.T @ inverse
        rows, columns = [], []
        for where, (_, shape) in zip(self.layout.slices, self.layout.matrices, strict=True):
            pairs = []
            for place in np.arange(self.layout.size)[where].reshape(-1, *shape[-2:]):
                at = (place[:, :, None, None], place) if dense else place
                pairs.append(nearest(precision[at]))
            for roots, new in zip((rows, columns), zip(*pairs, strict=True), strict=True):
                roots.append(jnp.asarray(np.reshape(new, (*shape[:-2], *new[0].shape)), float))
        return self._factor(rows, columns, mode.conditional_sds[self.layout.others])

    def new_map(self, center: Array, root: Any) -> tuple[Array, Kronecker]:
        root = root if isinstance(root, Kronecker) else self._identity()
        center, packed = super().new_map(center, root.packed)
        return center, root.unpacked(packed)

    def known_map(self) -> tuple[Array, Kronecker] | None:
        known = super().known_map()
        return known and (known[0], self._identity().unpacked(known[1]))

    def matrix_normal(self, params: Params, site: str) -> dist.MatrixNormal:
        """The distribution of a site in unconstrained space, with a column factor of determinant 1.

        :param dict params: what ``svi.get_params`` gives.
        :param str site: the name of a site that has a matrix normal.
        """
        transform: Any = self.get_transform(params)
        if site not in self.prepared:
            raise ValueError(f"site is {site!r}; it must be one of {list(self.prepared)}.")
        start, shape = self.prepared[site]
        loc = transform(jnp.zeros(self.latent_dim))[start : start + math.prod(shape)]
        k, factors = list(self.prepared).index(site), [x.normal.factor for x in transform.parts]
        row, column = factors[0].rows[k], factors[0].columns[k]
        for fixed in factors[1:]:
            row, column = _product_of(fixed.rows[k], row), _product_of(fixed.columns[k], column)
        return dist.MatrixNormal(loc.reshape(shape), row, column)

    def natural_gradient(
        self, step_size: optax.ScalarOrSchedule, other: optax.GradientTransformation | None = None
    ) -> optax.GradientTransformation:
        r"""An optimiser for ``SVI`` that moves M, U, V and the other scales by natural gradients.

        With G the gradient of the loss by a draw W, :math:`\rho` the step size, and
        :math:`r(H) = I + H + H^2 / 2`, which is positive definite for every symmetric H,

        .. math::
            M' = M - \rho\, U\, E[G]\, V, \qquad
            U'^{-1} = R^{-\top} r\big(\rho (S - I)\big) R^{-1}, \qquad
            S = \tfrac1q R^\top E[G\, C E^\top] ,

        and V likewise, with its determinant kept. Each is the minimum of KL(q || p) in that block
        on a normal target at :math:`\rho = 1` and without the term of second order, with which a
        few steps more are needed. Where S is estimated from draws it is noisy: take a rate of 0.1
        or less with 8 particles, and let it fall. Far from the mode, as at ``init_from=None``, it
        is too noisy, because of the slope there, and U and V collapse; start with Adam there.

        :param step_size: :math:`\rho`, in (0, 1], or a schedule of the number of steps.
        :param other: optimiser of the model's own parameters; None for ``optax.adam(1e-3)``.
        """
        if not callable(step_size):
            check_rate("step_size", step_size)
        rest = optax.adam(1e-3) if other is None else other
        loc, scale = f"{self.prefix}_loc", f"{self.prefix}_scale"

        def triangles() -> tuple[list[str], list[str]]:
            return self._names("row"), self._names("column")

        def others(params: Any) -> Any:
            mine = {loc, scale, *itertools.chain(*triangles())}
            return {name: leaf for name, leaf in params.items() if name not in mine}

        def init(params: Any) -> tuple[Array, Any]:
            return jnp.zeros((), jnp.int32), rest.init(others(params))

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, tuple[Array, Any]]:
            count, rest_state = state
            rho: Any = step_size(count) if callable(step_size) else step_size
            steps: Any
            steps, rest_state = rest.update(others(updates), rest_state, others(params))
            (rows, columns), sds = triangles(), jnp.exp(params.get(scale, jnp.zeros(0)))
            R, C = ([_of_triangle(params[name]) for name in names] for names in (rows, columns))
            factor = self._factor(R, C, sds)
            steps[loc] = -rho * factor.push(factor.pull(updates[loc]))
            for row, column, (_, shape) in zip(rows, columns, self.layout.matrices, strict=True):
                for name, copies in ((row, shape[-1]), (column, shape[-2])):
                    steps[name] = _triangle_step(params[name], updates[name], rho / copies)
            if sds.size:
                H = rho * updates[scale]
                steps[scale] = -jnp.log(1 + H + H**2 / 2) / 2
            return {name: steps[name] for name in params}, (count + 1, rest_state)

        return optax.GradientTransformation(init, update)


def _triangle_step(leaf: Array, gradient: Array, rate: Any) -> Array:
    """The step of the numbers of a lower triangular root R of U, from their gradient: of the matrix
    of derivatives D by R, the lower triangle of R^T D needs the lower triangle of D alone."""
    root: Any = _of_triangle(leaf)
    n = root.shape[-1]
    diagonal = jnp.diagonal(root, axis1=-2, axis2=-1)
    # The last n numbers are logarithms of the diagonal.
    eye = jnp.eye(n, dtype=root.dtype)
    on_diagonal = (gradient[..., -n:] / diagonal)[..., None] * eye
    D = vec_to_tril_matrix(gradient[..., :-n], -1) + on_diagonal
    below = jnp.tril(_product_of(root.mT, D))
    H = rate * (below + jnp.tril(below, -1).mT)
    r = eye + H + _product_of(H, H) / 2
    new = _product_of(root, jnp.linalg.cholesky(jnp.linalg.inv(r)))
    return _of_triangle.inv(new) - leaf


def nearest(precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    r"""Roots R, C of the matrix normal nearest in KL(q || p) to a normal of this precision.

    :math:`U^{-1}_{ab} = \tfrac1q \sum_{cd} P_{ac,bd} V_{cd}` and V the same of U, in turn.

    :param precision: P, ``(p, q, p, q)``, or ``(p, q)`` of independent numbers.
    """
    p, q = precision.shape[:2]
    V, before = np.eye(q), np.inf
    across, down = (
        ("ac,cc->a", "ac,aa->c") if precision.ndim == 2 else ("acbd,cd->ab", "acbd,ab->cd")
    )
    for _ in range(_SWEEPS):
        U = _inverse(np.einsum(across, precision, V) / q)
        V = _inverse(np.einsum(down, precision, U) / p)
        # The log determinant of the covariance rises with every turn.
        size = q * np.linalg.slogdet(U)[1] + p * np.linalg.slogdet(V)[1]
        if abs(size - before) < 1e-10 * p * q:
            break
        before = size
    C = np.linalg.cholesky(V)
    unit = np.exp(np.mean(np.log(np.diagonal(C))))
    return np.linalg.cholesky(U) * unit, C / unit


def _inverse(x: np.ndarray) -> np.ndarray:
    return np.diag(1 / x) if x.ndim == 1 else np.linalg.inv(x)
