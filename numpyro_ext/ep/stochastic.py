r"""Stochastic expectation propagation: one site for all rows, learned from minibatches.

References: Li, Hernandez-Lobato, Turner, *Stochastic expectation propagation* (NeurIPS 2015);
Dehaene, Barthelme, *Expectation propagation in the large-data limit* (JRSS B 2018), for averaged
EP.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.factors import Factors
from numpyro_ext.ep.factor_table import Group, Plan, Prior, Reading, Table
from numpyro_ext.ep.state import EPRunResult, EPState
from numpyro_ext.ep.tied import Items, TiedEngine, TiedSetting, rate_of, tied_sweep

__all__ = ["StochasticEP"]

_LOOKED_AT = 256
"""Rows from which the rank of all is read."""
_CHUNK = 256
"""Steps of one compiled call."""


@dataclass(kw_only=True, eq=False, repr=False)
class StochasticEP(TiedEngine):
    r"""Stochastic expectation propagation: every row has the same site f, a mean of all.

    With :math:`\lambda_q = \lambda_0 + N \lambda`, a step draws M rows (uniformly, with
    replacement), takes the cavity :math:`\lambda_q - \alpha \lambda` for each of them, and moves

    .. math::

        \lambda \leftarrow (1 - \epsilon) \lambda + \frac\epsilon M \sum_m \lambda_m, \qquad
        \lambda_m = \tfrac1\alpha \left( \lambda_{\mathrm{proj}[q^{\setminus 1} f_m^\alpha]} -
        \lambda_{q^{\setminus 1}} \right), \qquad \epsilon = M / N.

    The state has two vectors and two matrices of the size of x, whatever N is. ``batch_size=N``
    takes all rows without drawing them, which is averaged EP. At ``power=0`` it is stochastic
    variational inference by natural gradients of rate :math:`\epsilon`.

    **Bias.** The fixed point is that of averaged EP, near that of :class:`EP` where rows are alike
    and many. A constant :math:`\epsilon` leaves noise of order :math:`\epsilon` in
    :math:`\lambda`, by which a single state is visibly worse than the mean over the last half of
    the run (``average=.5``); a ``step`` that decreases, such as ``lambda i: 20 / (i + 200)``, takes
    it away. The loss is minus the evidence estimate of EP with the shared site, from the minibatch:
    a monitor, which has no extremum at the fixed point.

    :param model: Python callable with NumPyro primitives, with continuous latent sites.
    :param float power: alpha, at least 0.
    :param int batch_size: M, from 1 to N.
    :param step: :math:`\epsilon` in (0, 1], or a function of the number of the step; None for M/N.
    :param float average: the share of the run, its last part, over which ``run`` averages
        :math:`\lambda`; 0 for the last state.

    **References:** Li et al. (2015), algorithm 1 and section 4.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import StochasticEP
        >>> from numpyro_ext.targets import normal_mean
        >>> sep = StochasticEP(normal_mean, average=0.5)
        >>> x = jnp.array([0.5, -1.0, 2.0])
        >>> result = sep.run(jax.random.key(0), 4000, x, progress_bar=False)
        >>> bool(abs(result.params["auto_loc"][0] - 0.375) < 0.1)     # the posterior mean
        True
    """

    batch_size: int = 1
    average: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("batch_size", self.batch_size)
        if not 0 <= self.average <= 1:
            raise ValueError(
                f"average is {self.average!r}; it must be in [0, 1], the share of the run over"
                " which the site is averaged."
            )

    def rows_of(self, factors: Factors) -> Array:
        if self.batch_size > factors.size:
            raise ValueError(
                f"batch_size is {self.batch_size}; it must be at most the number of rows, which is"
                f" {factors.size}, with which it is averaged EP."
            )
        return jnp.asarray(np.unique(np.linspace(0, factors.size - 1, _LOOKED_AT).astype(int)))

    def _table(self, reading: Reading, arrays: list[Array], prior: Prior) -> tuple[Plan, Table]:
        """As of the rows that are looked at, without what belongs to each of them."""
        plan, table = super()._table(reading, arrays, prior)
        index, basis = table.groups[0]
        kinds = (replace(plan.kinds[0], rank=basis.shape[1]), *plan.kinds[1:])
        groups = (Group(index[:0], basis[:0]), *table.groups[1:])
        return replace(plan, kinds=kinds), table._replace(groups=groups)

    @property
    def _setting(self) -> "Setting":
        return Setting(TiedSetting(self.family, False, 0.0), self.batch_size, self.step)

    def sweep(
        self, plan: Plan, state: EPState, arrays: list[Array], **options: Any
    ) -> tuple[EPState, Array]:
        return _one(plan, self._setting, state, arrays, options.get("indices"))

    def update(
        self, state: EPState, *args: Any, indices: Any = None, **kwargs: Any
    ) -> tuple[EPState, Array]:
        """One step.

        :param args: arguments of the model.
        :param indices: the rows to take in place of random ones, which are then M.
        :param kwargs: keyword arguments of the model.
        """
        plan, arrays = self._on(*args, **kwargs)
        if indices is not None:
            indices = _checked(indices, plan.reading.factors.size)
        return self.sweep(plan, state, arrays, indices=indices)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """The estimate of log p(y) at a state, from all rows."""
        plan, arrays = self._on(*args, **kwargs)
        rows = jnp.arange(plan.reading.factors.size)
        return -self.sweep(plan, state, arrays, indices=rows)[1]

    def run(
        self,
        rng_key: Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_state: EPState | None = None,
        **kwargs: Any,
    ) -> Any:
        """``num_steps`` steps.

        :param args: arguments of the model.
        :param bool progress_bar: whether to show the loss as the fit goes.
        :param init_state: the state to go on from; None for a new start.
        :param kwargs: keyword arguments of the model.
        :return: an :data:`EPRunResult`, whose state is the average if ``average`` is above 0.
        """
        check_count("num_steps", num_steps)
        state = self._begin(rng_key, init_state, args, kwargs)
        before = state.report
        plan, arrays = self._on(*args, **kwargs)
        total = jax.tree.map(jnp.zeros_like, _parameters(state))
        first = state.i + num_steps - max(1, round(self.average * num_steps))
        losses = []
        with tqdm(total=num_steps, disable=not progress_bar) as bar:
            for done in range(0, num_steps, _CHUNK):
                n = min(_CHUNK, num_steps - done)
                state, total, some = _many(plan, self._setting, state, arrays, total, first, n)
                losses.append(some[:n])
                bar.update(n)
                bar.set_postfix_str(f"loss: {float(jnp.mean(some[:n])):.4f}")
        if self.average > 0:
            count = state.i - first
            state = state._replace(**jax.tree.map(lambda x: x / count, total))
        self._warn_of_skipped(before, state, num_steps)
        return EPRunResult(self.get_params(state), state, jnp.concatenate(losses))

    def _warn_of_skipped(self, before: Any, state: EPState, num_steps: int) -> None:
        names = ("num_improper", "num_skipped", "num_low_ess")
        left = sum(int(getattr(state.report, x)) - int(getattr(before, x)) for x in names)
        visits = num_steps * int(state.report.visited)
        if left > 0.01 * visits:
            warnings.warn(
                InferenceWarning(
                    f"{left} of {visits} visits to factors were left out, because a cavity was"
                    " improper or the moments were not found; use a smaller step, a larger"
                    " batch_size, or projection=ImportanceSampling()."
                ),
                stacklevel=3,
            )


class Setting(NamedTuple):
    """What is static in a step, beside the plan."""

    tied: TiedSetting
    batch_size: int
    step: float | Callable[[Array], Array] | None


def _checked(indices: Any, size: int) -> Array:
    if isinstance(indices, Tracer):
        return indices
    found = np.asarray(indices)
    if found.ndim != 1 or found.size == 0 or not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"indices is {indices!r}; it must be a vector of integers.")
    if found.min() < 0 or found.max() >= size:
        raise ValueError(
            f"indices has {int(found.min())} to {int(found.max())}; the rows are 0 to {size - 1}."
        )
    return jnp.asarray(found)


def _parameters(state: EPState) -> dict[str, Any]:
    names = ("shift", "precision", "site_shift", "site_precision")
    return {name: getattr(state, name) for name in names}


@partial(jax.jit, static_argnums=(0, 1))
def _one(
    plan: Plan, setting: Setting, state: EPState, arrays: list[Array], indices: Array | None
) -> tuple[EPState, Array]:
    """A step on these rows, or on random ones."""
    N = plan.reading.factors.size
    key_rows, rng_key = random.split(state.rng_key)
    if indices is None and setting.batch_size == N:
        indices = jnp.arange(N)
    if indices is None:
        indices = random.randint(key_rows, (setting.batch_size,), 0, N)
    M = len(indices)
    eps = rate_of(setting.step, state.i, M / N)
    items = Items(
        slot=jnp.zeros(1, int),
        amount=jnp.ones(1),
        rate=jnp.full(1, eps, float) / M,
        weight=jnp.full(1, N / M),
        index=indices[None],
        mask=jnp.ones((1, M), bool),
        multiplicity=jnp.full(1, N, float),
    )
    return tied_sweep(plan, setting.tied, state._replace(rng_key=rng_key), arrays, items)


@partial(jax.jit, static_argnums=(0, 1))
def _many(
    plan: Plan,
    setting: Setting,
    state: EPState,
    arrays: list[Array],
    total: dict[str, Any],
    first: Array,
    n: Array,
) -> tuple[EPState, dict[str, Any], Array]:
    """``n`` steps, their losses, and the sum of the parameters after step ``first``."""

    def body(k: Array, carry: Any) -> Any:
        state, total, losses = carry
        state, loss = _one(plan, setting, state, arrays, None)
        counts = state.i > first
        total = jax.tree.map(lambda a, b: a + jnp.where(counts, b, 0), total, _parameters(state))
        return state, total, losses.at[k].set(loss)

    return lax.fori_loop(0, n, body, (state, total, jnp.zeros(_CHUNK)))
