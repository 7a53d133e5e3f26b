"""The modes of a posterior, the normal approximations there, and where a guide begins at them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from jax import Array, random
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro.distributions import biject_to

from numpyro_ext._model.bend import Bend
from numpyro_ext._model.circles import recut
from numpyro_ext._model.normal import Normal, Whitening
from numpyro_ext._model.read import ModelInfo, Shapes, latent_shapes, unravel
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._typing import Params, Sites

DENSE_UP_TO = 512
"""Latent dimensions up to which the curvature is a matrix."""
MATRIX_UP_TO = 2048
"""The same where a gradient costs more than a product with a matrix."""
_AT_MODE = 0.3
"""The decrement up to which the end of a search is a mode."""


class Problem(str):
    """A sentence on what did not hold, with its kind, see :class:`Modes`."""

    kind: str

    def __new__(cls, sentence: str, kind: str = "") -> Self:
        self = super().__new__(cls, sentence)
        self.kind = kind
        return self


def of_kind(problems: Iterable[Any], kind: str) -> list[Problem]:
    return [x for x in problems if isinstance(x, Problem) and x.kind == kind]


@dataclass(frozen=True)
class Mode(Normal):
    r"""
    A mode of a posterior with the normal approximation there, :math:`z = c + A \xi`,
    :math:`\xi \sim N(0, I)`; or the normal of greatest ELBO, where there is no mode or where the
    posterior is far from normal there.

    Other fields are described in :class:`Modes`.

    :param int num_negative: negative directions of the curvature, which were turned positive.
    :param float stiffness: the largest curvature in whitened coordinates, in all but a twentieth of
        the draws, and at least 1, as of a normal posterior.
    :param float worst_error: the largest mean of :math:`|A^\top \nabla U(z) - \xi|_i`, of the worst
        coordinate, number ``worst``, which among many others does not count in ``departure``.
    :param bend: of a hierarchy, the map after :math:`c + A \xi`, with which the normal was fitted.
    :param sides: of a hierarchy, location, scale and skew ``(n, 3)`` of each :math:`\xi_i`.
    """

    decrement: float = 0.0
    num_negative: int = 0
    row_gradients: int = 0
    log_evidence: float = np.nan
    departure: float = np.inf
    departure_error: float = 0.0
    worst: int = 0
    worst_error: float = np.inf
    stiffness: float = 1.0
    elbo: float = np.nan
    elbo_error: float = np.nan
    slope: float = np.nan
    slope_error: float = np.nan
    variational: bool = False
    share: float = 1.0
    copy_of: int | None = None
    place: str = ""
    bend: Bend | None = None
    sides: Array | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def whitening(self) -> Whitening:
        """The coordinates :math:`\\xi`."""
        return Whitening(self.center, self.factor, self.circles)

    @property
    def sure_departure(self) -> float:
        """The departure that is left if its error is two standard errors."""
        return self.departure - 2 * self.departure_error

    @property
    def at_mode(self) -> bool:
        """True if the center is a mode."""
        return not self.variational and self.num_negative == 0 and self.decrement <= _AT_MODE


@dataclass(frozen=True, eq=False, repr=False)
class Modes:
    r"""
    The distinct modes of a posterior that a search has found, and the mixture of normals there,

    .. math:: q(z) = \sum_k w_k\, N(z; c_k, A_k A_k^\top), \qquad w_k \propto e^{-U(c_k)} |A_k| .

    :func:`find_modes` makes it. It prints as a table, and pickles, and is an ``init_strategy`` of
    NumPyro's kernels and guides, which begin at the heaviest mode. The shares :math:`w_k` are those
    of Laplace's formula among the modes that were found, and as far off as that formula is where a
    posterior is not near normal at a mode. They say nothing of the mass elsewhere: ``beyond`` does.

    :param tuple modes: a record of each mode, the heaviest first, with the fields

        * ``center``, ``(n,)``, and ``factor``: c and A, which is lower triangular ``(n, n)``; above
          512 numbers an ``Arrow`` where the model has groups, and elsewhere the diagonal ``(n,)``
          where a gradient costs little beside a matrix, or above 2,048;
        * ``share``: its part of the mass of all modes that were found;
        * ``log_evidence``: logarithm of the integral of :math:`e^{-U}` around the mode by Laplace's
          formula, :math:`-U(c) + \tfrac n2 \log 2\pi + \log |A|`;
        * ``decrement``: :math:`\sqrt{g^\top H^{-1} g}`, the distance of c from the mode in
          posterior standard deviations;
        * ``elbo``, ``elbo_error``: the ELBO of the normal, from 64 draws, and its standard error;
        * ``slope``, ``slope_error``: the length of the ELBO's natural gradient, with which a step
          would gain :math:`\tfrac12 \text{slope}^2` nats: 0 at the normal of greatest ELBO;
        * ``departure``, ``departure_error``: median of :math:`|A^\top \nabla U(z) - \xi|^2 / n`
          over draws, 0 for a normal posterior and 1 where the gradients are off by as much as they
          are large, and its standard error;
        * ``variational``: True for the normal of greatest ELBO, which stands where there is no mode
          or the posterior is far from normal at it; its ``log_evidence`` is its ELBO, and its
          ``decrement`` nan;
        * ``copy_of``: the place of a heavier mode that is the same after a permutation or changes
          of sign of coordinates, or None;
        * ``place``: of several modes, the number in which they lie farthest apart, and its value;
        * ``circles``: the angles opposite of which circles are cut, as of :class:`Whitening`.
    :param tuple shapes: ``(site, unconstrained shape)`` of each latent site, in the flat order.
    :param int row_gradients: gradients of single rows that all searches spent.
    :param float beyond: the share of all mass where these normals have nearly none
        (:math:`|\xi|^2 > n + 4 \sqrt{2n}` at each), by importance sampling from them, of which
        some points are up to twenty standard deviations away; NaN where it is not known, as above
        10,000 rows.
    :param float beyond_error: its standard error.
    :param tuple problems: sentences on what did not hold; each has a ``kind``, which is ``"no
        mode"``, ``"far from normal"``, ``"not converged"``, ``"several modes"``,
        ``"mass beyond"``, ``"density jumps"``, ``"few rows"``, ``"single precision"``,
        ``"no rows"`` or ``"one factor twice"``.

    >>> from numpyro_ext.optim import find_modes
    >>> def model():
    ...     numpyro.sample("z", dist.Normal(300.0, 20.0))
    >>> modes = find_modes(model)
    >>> print(f"{modes.heaviest.center[0]:.0f} {modes.heaviest.factor[0, 0]:.0f}")
    300 20
    """

    modes: tuple[Mode, ...]
    shapes: Shapes
    row_gradients: int = 0
    problems: tuple[Problem, ...] = ()
    beyond: float = np.nan
    beyond_error: float = np.nan

    @property
    def heaviest(self) -> Mode:
        """The mode of greatest share."""
        return self.modes[0]

    @property
    def whitening(self) -> Whitening:
        """The coordinates of the heaviest mode, for the argument ``whitening`` of a kernel."""
        return self.heaviest.whitening

    @property
    def size(self) -> int:
        """The number of coordinates, n."""
        return len(self.heaviest.center)

    @property
    def circles(self) -> Array | None:
        """The angles opposite of which circles are cut, see :class:`Whitening`."""
        return self.heaviest.circles

    @property
    def log_evidence(self) -> float:
        """The logarithm of the model's evidence, by Laplace's formula at all modes."""
        return float(np.logaddexp.reduce([mode.log_evidence for mode in self.modes]))

    def sample(self, rng_key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of the mixture, ``(*sample_shape, n)`` unconstrained vectors in the flat order."""
        key_mode, key_xi = random.split(rng_key)
        log_shares = jnp.log(jnp.asarray([mode.share for mode in self.modes]))
        return self.sample_at(key_xi, random.categorical(key_mode, log_shares, shape=sample_shape))

    def sample_at(self, rng_key: Array, which: ArrayLike, scale: ArrayLike = 1.0) -> Array:
        """Draws ``(*batch, n)`` of the normals at given modes.

        :param which: ``(*batch,)``, the place of the mode of each draw, as by :meth:`apportion`.
        :param scale: what the standard deviations are multiplied by.
        """
        which = jnp.asarray(which)[..., None]
        xi = scale * random.normal(rng_key, (*which.shape[:-1], self.size))
        parts = [jnp.vectorize(mode.to_z, signature="(n)->(n)")(xi) for mode in self.modes]
        return jnp.select([which == k for k in range(len(parts))], parts)

    def apportion(self, num: int) -> np.ndarray:
        """The place of the mode at which each of ``num`` particles or chains begins, ``(num,)``:
        each mode has its share of them, up to a rounding by the largest remainders."""
        quota = num * np.array([mode.share for mode in self.modes])
        counts = np.floor(quota).astype(int)
        # Equal remainders go to the heavier mode.
        counts[np.argsort(counts - quota, kind="stable")[: num - counts.sum()]] += 1
        return np.repeat(np.arange(len(counts)), counts)

    def num_taken(self, num: int) -> int:
        """The number of modes at which one of ``num`` begins, the heaviest ones."""
        return int(np.max(self.apportion(num))) + 1

    def __call__(self, site: dict[str, Any] | None = None) -> Any:
        """The value of a latent site at the heaviest mode: modes are an ``init_strategy``, such as
        ``NUTS(model, init_strategy=find_modes(model, *args))``."""
        if site is None:
            return partial(self)  # as NumPyro's own strategies
        at_mode = self.unravel(self.heaviest.center)
        if site["type"] != "sample" or site["is_observed"] or site["name"] not in at_mode:
            return None
        return biject_to(site["fn"].support)(at_mode[site["name"]])

    def unravel(self, x: Array) -> Sites:
        """Vectors ``(*batch, n)`` as unconstrained sites, such as ``init_params`` takes: with
        circles cut at pi, as everywhere in NumPyro."""
        return unravel(recut(x, self.circles, None), self.shapes)

    def __repr__(self) -> str:
        shares = ", ".join(f"{mode.share:.2g}" for mode in self.modes)
        return f"Modes({self.size} coordinates, shares {shares})"

    def __str__(self) -> str:
        beyond = "an unknown part"
        if np.isfinite(self.beyond):
            beyond = f"{self.beyond:.2f} +- {self.beyond_error:.1g}"
        lines = [
            f"{self.size} coordinates, {self.row_gradients:,} gradients of a row; {beyond} of the"
            " mass lies beyond these, and the shares are of the rest"
        ]
        head = ("share", "log evidence", "ELBO", "decrement", "slope", "departure", "kind")
        lines.append("   " + "".join(f"  {cell:>15}" for cell in head))
        for k, mode in enumerate(self.modes):
            kind = "greatest ELBO" if mode.variational else "mode"
            kind += f" at {mode.place}" if mode.place else ""
            kind += "" if mode.copy_of is None else f", a copy of {mode.copy_of}"
            cells = (
                f"{mode.share:.3f}",
                "-" if mode.variational else f"{mode.log_evidence:.2f}",
                f"{mode.elbo:.2f} +- {mode.elbo_error:.1g}",
                "-" if mode.variational else f"{mode.decrement:.2g}",
                f"{mode.slope:.2g} +- {mode.slope_error:.1g}",
                f"{mode.departure:.2g}",
                kind,
            )
            lines.append(f"{k:>3}" + "".join(f"  {cell:>15}" for cell in cells))
        return "\n".join([*lines, *(f"  ! {problem}" for problem in self.problems)])


SEARCH = "search"
"""The default of ``init_from``."""
InitFrom = Modes | TaylorProxy | tuple[Any, Params] | str | None


def given_modes(init_from: InitFrom) -> Modes | None:
    """The ``Modes`` of an argument ``init_from``: None for None and for a search."""
    if init_from is None or isinstance(init_from, Modes):
        return init_from
    if isinstance(init_from, str) and init_from == SEARCH:
        return None
    if isinstance(init_from, TaylorProxy):
        if init_from.normal.factor is None:
            raise ValueError(
                "init_from is a taylor_proxy whose center is not near a mode; give a pair (guide,"
                " params) of a fitted AutoMultivariateNormal."
            )
        normal = init_from.normal
        mode = Mode(normal.center, normal.factor, circles=normal.circles)
        return Modes((mode,), init_from.shapes)
    if not (isinstance(init_from, tuple) and len(init_from) == 2):
        raise TypeError(
            f"init_from is {type(init_from).__name__}; it must be a pair (guide, params), a result"
            f" of find_modes, a taylor_proxy at a mode, None or {SEARCH!r}."
        )
    return Modes((Mode.from_guide(*init_from),), latent_shapes(init_from[0].prototype_trace))


def check_sites(modes: Modes, info: ModelInfo, what: str = "init_from") -> None:
    """An error unless the model has the latent sites for which the modes were found."""
    info.check_shapes(modes.shapes, what, "find or fit it on this model, with the same arguments")
