"""Expectation propagation on data in parts."""

from dataclasses import dataclass, field
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.ep import EP
from numpyro_ext.ep.shared_sites import Parts, SharedConfig, SharedSitesEngine
from numpyro_ext.ep.stochastic import RandomRowsEngine


@dataclass(kw_only=True, eq=False, repr=False)
class _InParts:
    """The base of engines on parts of the data.

    :param partition: the number J of parts, contiguous and of nearly one size, or an integer vector
        with the label 0, ..., J - 1 of each row.
    """

    partition: Any = field(kw_only=False)

    def rows_of_parts(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of each of J parts, ``(J, M)`` filled up with -1, and their numbers ``(J,)``."""
        if np.ndim(self.partition) == 0:
            labels = np.sort(np.arange(size) % min(check_count("partition", self.partition), size))
        else:
            labels = np.asarray(self.partition)
        is_integer = labels.shape == (size,) and np.issubdtype(labels.dtype, np.integer)
        if not is_integer or labels.min() < 0 or not np.all(sizes := np.bincount(labels)):
            raise ValueError(
                f"partition is {self.partition!r}, and there are {size} rows; it must be the number"
                " J of parts, or a vector of integer labels 0, ..., J - 1, one for each row."
            )
        members = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
        most = int(sizes.max())
        rows = [np.pad(x, (0, most - len(x)), constant_values=-1) for x in members]
        return np.stack(rows), sizes


@dataclass(kw_only=True, eq=False, repr=False)
class DistributedEP(_InParts, EP):
    r"""Expectation propagation whose factors are parts of the data.

    .. math:: f_j(x) = \exp \sum_{n \in \text{part } j} l_n(x), \qquad q(x) = f_0(x) \prod_j
        \tilde f_j(x)

    and all else as in :class:`EP`, which it is with one row to a part. With a single part q has the
    moments of the posterior itself. Most parts depend on more directions than quadrature takes, and
    have ``ImportanceSampling()``, or ``projection=NUTSProjection()``, which has no evidence and
    leaves noise in the sites, so that the residual stays above ``tol``.

    :param str schedule: ``"parallel"``, all parts from one q, or ``"serial"``.

    **Reference:** Gelman et al., *Expectation propagation as a way of life* (JMLR 2020), algorithm
    1.

    >>> from numpyro_ext.ep import DistributedEP
    >>> ep = DistributedEP(normal_mean, 2)
    >>> result = ep.run(jax.random.key(0), 50, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    schedule: str = "parallel"

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(self.rows_of_parts(factors.size)[0])


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticDistributedEP(_InParts, SharedSitesEngine):
    r"""Stochastic expectation propagation on parts of the data: one site for all rows.

    .. math:: \lambda_q = \lambda_0 + N \lambda, \qquad \lambda \leftarrow (1 - N_j \epsilon)
        \lambda + \epsilon F_j

    with :math:`F_j = (\lambda_{\mathrm{proj}[q^{\setminus j} f_j^\alpha]} - \lambda_{q^{\setminus
    j}}) / \alpha` and the cavity :math:`\lambda_q - \alpha N_j \lambda`, for one part after the
    other (SDEP), or from one q for all parts (ADEP). One ``update`` is a pass over all parts.

    **Bias.** Where parts differ, q is further from the posterior than by :class:`DistributedEP`.
    With few parts and the default step SDEP leans towards the last part, whose share in the site
    is :math:`N_j \epsilon`; with small steps it moves around the fixed point of ADEP.

    :param str schedule: ``"serial"`` for SDEP, ``"parallel"`` for ADEP.
    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N.
    :param float tol: as of :class:`EP`.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 6.

    >>> from numpyro_ext.ep import StochasticDistributedEP
    >>> ep = StochasticDistributedEP(normal_mean, 2, schedule="parallel")
    >>> result = ep.run(jax.random.key(0), 5, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    schedule: str = "parallel"
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("schedule", self.schedule, ("serial", "parallel"))

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(self.rows_of_parts(factors.size)[0])

    def parts(self, size: int) -> Parts:
        """Each part is one factor."""
        sizes = self.rows_of_parts(size)[1]
        J = np.arange(len(sizes))
        return Parts(0 * J, sizes, np.ones(len(J), int), J[:, None])

    def config(self, size: int) -> SharedConfig:
        step = 1 / size if self.step is None else self.step
        return SharedConfig(self.schedule == "serial", float(self.tol), step=step)


class _SitePerPart(_InParts, SharedSitesEngine):
    """A site for the rows of each part."""

    def parts(self, size: int) -> Parts:
        rows, sizes = self.rows_of_parts(size)
        return Parts(np.arange(len(sizes)), np.ones(len(sizes)), sizes, rows)


@dataclass(kw_only=True, eq=False, repr=False)
class DSEP(_SitePerPart, RandomRowsEngine):
    r"""Stochastic expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow (1 -
        \epsilon_j) \lambda_j + \epsilon_j \lambda_n

    where n is a random row of part j, and :math:`\lambda_n = (\lambda_{\mathrm{proj}[q^{\setminus
    j} f_n^\alpha]} - \lambda_{q^{\setminus j}}) / \alpha` with the cavity :math:`\lambda_q - \alpha
    \lambda_j`. One ``update`` visits one row of every part, part after part. With a single part it
    is stochastic EP, with one row to a part :class:`EP`.

    **Bias.** A constant step leaves noise in the sites, with a variance in proportion to the step,
    and a bias where factors are not normal. ``run`` returns the mean over its last half.

    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N_j.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 7.

    >>> from numpyro_ext.ep import DSEP
    >>> ep = DSEP(normal_mean, jnp.array([0, 1, 2]))   # a part to each row: EP
    >>> result = ep.run(jax.random.key(0), 3, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    def config(self, size: int) -> SharedConfig:
        return SharedConfig(serial=True, step=self.step, batch_size=1)


@dataclass(kw_only=True, eq=False, repr=False)
class DAEP(_SitePerPart):
    r"""Averaged expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow \frac
        1{N_j} \sum_{n \in \text{part } j} \lambda_n

    from one q for all rows, with :math:`\lambda_n` as in :class:`DSEP`, whose limit for small steps
    it is. One ``update`` is a pass over all rows. With a single part it is averaged EP, with one
    row to a part :class:`EP`.

    **Distributed black-box alpha** is ``mean="moments"``: the new site of a part has the mean of
    the *moments* of its tilted distributions, in place of the mean of their sites. Its fixed points
    are the stationary points in all :math:`\lambda_j` of the energy

    .. math::

        L = \Phi(\lambda_q) - \Phi(\lambda_0) + \frac1\alpha \sum_j \sum_{n \in \text{part } j}
        \log \mathrm E_q \left[ \left( f_n / \tilde f_j \right)^\alpha \right], \qquad
        \mathrm E_q[t] = \frac1{N_j} \sum_{n \in \text{part } j} \mathrm E_{\hat p_n}[t] \quad
        \text{for all } j,

    with the site :math:`\tilde f_j`, the moments t of a normal, and :math:`\hat p_n \propto q\,
    (f_n / \tilde f_j)^\alpha`; minus L is the loss of an update. With a single part L is the
    energy of :class:`~numpyro_ext.objectives.BBAlphaELBO` for a normal guide, and with one row to a
    part of :class:`EP`. For several parts its stationary points are saddle points, which no
    optimiser finds. Whole steps may diverge.

    :param step: the share in (0, 1] of the new site, or a function of the number of the update;
        None for 1, and for 1/2 by moments.
    :param str mean: ``"sites"``, or ``"moments"`` for distributed black-box alpha.
    :param float tol: as of :class:`EP`.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 8, and appendix B (eq.
    B.8: L); Dehaene, Barthelme, *Expectation propagation in the large-data limit* (JRSS B 2018).

    >>> from numpyro_ext.ep import DAEP
    >>> ep = DAEP(normal_mean, 1)
    >>> result = ep.run(jax.random.key(0), 5, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    mean: str = "sites"
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mean", self.mean, ("sites", "moments"))

    def config(self, size: int) -> SharedConfig:
        moments = self.mean == "moments"
        step = 0.5 if self.step is None and moments else self.step
        return SharedConfig(tol=float(self.tol), moments=moments, step=step)
