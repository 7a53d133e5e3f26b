"""Expectation propagation on data in parts."""

from dataclasses import dataclass, field
from typing import Any

from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import check_choice, check_count, check_positive
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.ep import EP
from numpyro_ext.ep.factors import EPPlan
from numpyro_ext.ep.shared_sites import Items, SharedSitesEngine, rate_of, shared_sweep
from numpyro_ext.ep.sites import EPState
from numpyro_ext.ep.stochastic import DrawnRows, RandomRowsEngine
from numpyro_ext.ep.sweep import SweepConfig

__all__ = ["DAEP", "DSEP", "DistributedEP", "StochasticDistributedEP"]


@dataclass(kw_only=True, eq=False, repr=False)
class _InParts:
    """What engines on parts of the data share.

    :param partition: the number J of parts, contiguous and of nearly one size, or an integer vector
        of labels 0, ..., J - 1, one for each row.
    """

    partition: Any = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()  # pyright: ignore[reportAttributeAccessIssue]
        self.partition = check_partition(self.partition)


@dataclass(kw_only=True, eq=False, repr=False)
class DistributedEP(_InParts, EP):
    r"""Expectation propagation whose factors are parts of the data.

    .. math:: f_j(x) = \exp \sum_{n \in \text{part } j} l_n(x), \qquad q(x) = f_0(x) \prod_j
        \tilde f_j(x)

    and all else as in :class:`EP`. With one row to a part it is :class:`EP`, and with a single part
    the moments of the posterior itself. Parts mostly depend on more directions than quadrature
    takes. Then their moments are found by ``ImportanceSampling()``, or by
    ``projection=NUTSProjection()``, which has no evidence and leaves noise in the sites, so that
    the residual stays above ``tol``.

    :param str schedule: ``"parallel"``, all parts from one q, or ``"serial"``.

    **Reference:** Gelman et al., *Expectation propagation as a way of life* (JMLR 2020), algorithm
    1.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import DistributedEP
        >>> from numpyro_ext.targets import normal_mean
        >>> ep = DistributedEP(normal_mean, 2)
        >>> result = ep.run(jax.random.key(0), 50, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
        >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
        0.3750
    """

    schedule: str = "parallel"

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(split_rows(self.partition, factors.size))


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticDistributedEP(_InParts, SharedSitesEngine):
    r"""Stochastic expectation propagation on parts of the data: one site for all rows.

    .. math:: \lambda_q = \lambda_0 + N \lambda, \qquad \lambda \leftarrow (1 - N_j \epsilon)
        \lambda + \epsilon F_j

    with :math:`F_j = (\lambda_{\mathrm{proj}[q^{\setminus j} f_j^\alpha]} - \lambda_{q^{\setminus
    j}}) / \alpha` and the cavity :math:`\lambda_q - \alpha N_j \lambda`, for one part after the
    other (SDEP), or from one q for all of them together (ADEP). One ``update`` is a pass over all
    parts. Where parts differ, q is further from the posterior than that of :class:`DistributedEP`.
    With few parts and the default step SDEP leans towards the last part, whose share in the site
    is :math:`N_j \epsilon`; with small steps it goes around the fixed point of ADEP.

    :param str schedule: ``"serial"`` for SDEP, ``"parallel"`` for ADEP.
    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N.
    :param float tol: the change of q by an update below which ``run`` stops; at least 3e-5 in
        float32.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 6.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import StochasticDistributedEP
        >>> from numpyro_ext.targets import normal_mean
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
        check_positive("tol", self.tol)

    def rows_of(self, factors: Factors) -> Array:
        return jnp.asarray(split_rows(self.partition, factors.size))

    def times(self, size: int) -> Array:
        return jnp.full(1, size, float)

    def all_rows(self, size: int) -> Items:
        """All parts, with a rate of 1."""
        sizes, J = _sizes(split_rows(self.partition, size))
        return Items(
            slot=jnp.zeros(J, int),
            amount=sizes,
            rate=jnp.ones(J),
            weight=jnp.ones(J),
            index=np.arange(J)[:, None],
            mask=np.ones((J, 1), bool),
        )

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        N = plan.reading.factors.size
        items = self.all_rows(N)
        items = items._replace(rate=rate_of(self.step, state.i, 1 / N) * items.rate)
        config = SweepConfig(self.normals, self.schedule == "serial", float(self.tol))
        return shared_sweep(plan, config, state, arrays, items)


def _sizes(rows: np.ndarray) -> tuple[Array, int]:
    """The number of rows of each part, and of parts."""
    return jnp.asarray((rows >= 0).sum(-1), float), len(rows)


class _SitePerPart(_InParts, SharedSitesEngine):
    """A site for the rows of each part."""

    def times(self, size: int) -> Array:
        return _sizes(split_rows(self.partition, size))[0]

    def all_rows(self, size: int) -> Items:
        """All rows of each part from one q, with a rate of 1."""
        rows = split_rows(self.partition, size)
        sizes, J = _sizes(rows)
        return Items(
            slot=jnp.arange(J),
            amount=jnp.ones(J),
            rate=1 / sizes,
            weight=jnp.ones(J),
            index=np.maximum(rows, 0),
            mask=rows >= 0,
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DSEP(_SitePerPart, RandomRowsEngine):
    r"""Stochastic expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow (1 -
        \epsilon_j) \lambda_j + \epsilon_j \lambda_n

    where n is a random row of part j, and :math:`\lambda_n = (\lambda_{\mathrm{proj}[q^{\setminus
    j} f_n^\alpha]} - \lambda_{q^{\setminus j}}) / \alpha` with the cavity :math:`\lambda_q - \alpha
    \lambda_j`. One ``update`` visits one row of every part, part after part. With a single part it
    is stochastic EP, with one row to a part :class:`EP`. A constant step leaves noise in the sites,
    with a variance in proportion to the step, and a bias where factors are not normal. ``run``
    returns the mean of the states of its last half.

    :param step: epsilon in (0, 1], or a function of the number of the update; None for 1 / N_j.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 7.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import DSEP
        >>> from numpyro_ext.targets import normal_mean
        >>> ep = DSEP(normal_mean, jnp.array([0, 1, 2]))   # a part to each row: EP
        >>> result = ep.run(jax.random.key(0), 3, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
        >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
        0.3750
    """

    @property
    def draws(self) -> DrawnRows:
        return DrawnRows(SweepConfig(self.normals, serial=True), self.step)

    def draws_all(self, size: int) -> bool:
        return len(self.times(size)) == size

    def checked_rows(self, indices: Any, size: int) -> Any:
        rows = split_rows(self.partition, size)
        if jnp.shape(indices) != (len(rows),):
            raise ValueError(
                f"indices has shape {jnp.shape(indices)}; it must be ({len(rows)},), a row of each"
                " part."
            )
        for j, n in enumerate(indices):
            if n not in (members := rows[j][rows[j] >= 0].tolist()):
                raise ValueError(f"indices has row {n} for part {j}, whose rows are {members}.")
        return indices

    def parts(self, size: int) -> Any:
        rows = split_rows(self.partition, size)
        return jnp.asarray(rows), _sizes(rows)[0]


@dataclass(kw_only=True, eq=False, repr=False)
class DAEP(_SitePerPart):
    r"""Averaged expectation propagation with a site for the rows of each part.

    .. math:: \lambda_q = \lambda_0 + \sum_j N_j \lambda_j, \qquad \lambda_j \leftarrow \frac
        1{N_j} \sum_{n \in \text{part } j} \lambda_n

    from one q for all rows, where :math:`\lambda_n` is that of :class:`DSEP`. It is the limit of
    :class:`DSEP` for small steps, without its noise. One ``update`` is a pass over all the data.
    With a single part it is averaged EP, with one row to a part :class:`EP`.

    **Distributed black-box alpha** is ``mean="moments"``: the new site of a part has the mean of
    the *moments* of its tilted distributions, in place of the mean of their sites. Its fixed points
    are the stationary points in all :math:`\lambda_j` of the energy

    .. math::

        L = \Phi(\lambda_q) - \Phi(\lambda_0) + \frac1\alpha \sum_j \sum_{n \in \text{part } j}
        \log \mathrm E_q \left[ \left( f_n / \tilde f_j \right)^\alpha \right], \qquad
        \mathrm E_q[t] = \frac1{N_j} \sum_{n \in \text{part } j} \mathrm E_{\hat p_n}[t] \quad
        \text{for all } j,

    with the site :math:`\tilde f_j`, the moments t of a normal, and :math:`\hat p_n \propto q\,
    (f_n / \tilde f_j)^\alpha`; minus L is the loss of an update. With a single part L is that of
    :class:`~numpyro_ext.objectives.BBAlphaELBO` for a normal guide, and with one row to a part that
    of :class:`EP`. For several parts its stationary points are saddle points, which no optimiser
    finds. At power 0 both means are Gaussian variational inference. Whole steps may diverge, and
    ``step=None`` is 1/2.

    :param step: the share in (0, 1] of the new site, or a function of the number of the update;
        None for 1, and for 1/2 by moments.
    :param str mean: ``"sites"``, or ``"moments"`` for distributed black-box alpha.
    :param float tol: the change of q by an update below which ``run`` stops; at least 3e-5 in
        float32.

    **Reference:** Li, *Approximate inference: new visions* (2018), algorithm 8, and appendix B (eq.
    B.8: L); Dehaene, Barthelme, *Expectation propagation in the large-data limit* (JRSS B 2018).

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import DAEP
        >>> from numpyro_ext.targets import normal_mean
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
        check_positive("tol", self.tol)

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        items = self.all_rows(plan.reading.factors.size)
        moments = self.mean == "moments"
        rate = rate_of(self.step, state.i, 0.5 if moments else 1.0)
        items = items._replace(rate=rate * items.rate)
        config = SweepConfig(self.normals, tol=float(self.tol), moments=moments)
        return shared_sweep(plan, config, state, arrays, items)


def check_partition(partition: Any) -> Any:
    """An int, or labels as a NumPy array; or an error."""
    if np.ndim(partition) == 0:
        return check_count("partition", partition)
    labels = np.asarray(partition)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"partition is {partition!r}; it must be the number of parts, or a vector of integer"
            " labels, one for each row."
        )
    missing = np.setdiff1d(np.arange(labels.max(initial=0) + 1), labels)
    if len(missing) or labels.min(initial=0) < 0:
        raise ValueError(
            f"partition has labels from {labels.min()} to {labels.max()}, without"
            f" {missing.tolist()}; they must be 0, 1, ... up to the number of parts less one."
        )
    return labels


def split_rows(partition: Any, size: int) -> np.ndarray:
    """The rows of each of J parts of ``size`` rows: ``(J, M)``, filled up with -1.

    :param partition: number of parts, contiguous and of nearly one size; or a label for each row.
    """
    if isinstance(partition, int):
        if partition > size:
            raise ValueError(f"partition is {partition}, and there are only {size} rows.")
        labels = np.repeat(
            np.arange(partition), [len(x) for x in np.array_split(np.arange(size), partition)]
        )
    else:
        labels = partition
        if len(labels) != size:
            raise ValueError(
                f"partition has {len(labels)} labels, and there are {size} rows; give one for each."
            )
    members = [np.flatnonzero(labels == j) for j in range(labels.max() + 1)]
    M = max(map(len, members))
    return np.stack([np.pad(x, (0, M - len(x)), constant_values=-1) for x in members])
