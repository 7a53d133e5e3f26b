"""Expectation propagation, with powers, and assumed density filtering, its first pass."""

from dataclasses import dataclass
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._checks import InferenceWarning, check_choice, check_nonnegative, check_rate
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factors import EPPlan
from numpyro_ext.ep.normal import (
    Moments,
    Site,
    choose,
    distance,
    halved,
    include,
    is_finite,
    log_partition,
    moments_of,
    plus,
    product_of,
    within_trust_region,
)
from numpyro_ext.ep.state import (
    EPState,
    Update,
    change_of,
    from_one_q,
    keys_of,
    mix,
    next_state,
    outcome_of,
    site_update,
    total_of,
)

_LEAST = 0.02  # the least d of adaptive damping


@dataclass(kw_only=True, eq=False, repr=False)
class EP(EPEngine):
    r"""Expectation propagation with powers: each factor is matched in the context of the others.

    One ``update`` is a sweep. For each factor :math:`f_n = e^{l_n}` with site :math:`\tilde f_n`,

    .. math::

        q^{\setminus n} = q / \tilde f_n^{\alpha}, \qquad
        \hat p = q^{\setminus n} f_n^{\alpha}, \qquad
        \tilde f_n \leftarrow \tilde f_n^{1 - d} \left( \mathrm{proj}[\hat p] / q^{\setminus n}
        \right)^{d / \alpha},

    where proj is the normal distribution with the same mean and covariance, and powers act on
    natural parameters. ``power=1`` is EP, and ``power=0`` its limit, Gaussian variational
    inference, with minus the ELBO as the loss. The factors of the prior always have power 1.

    The loss is minus the estimate of the log evidence,

    .. math::

        \log Z \approx \Phi(q) - \Phi(f_0) + \sum_n \tfrac1\alpha \left[ \log
        \mathrm E_{q^{\setminus n}} f_n^\alpha + \Phi(q^{\setminus n}) - \Phi(q) \right],

    which is exact if all factors are normal, for the state with which a parallel sweep begins, or
    collected during a serial one.

    **When it fails.** EP has no objective that decreases at each step, and may not settle. With
    ``damping=None`` d is halved whenever the residual of a parallel sweep has grown, and until no
    mean moves by more than 3 standard deviations and no standard deviation changes by more than a
    factor of 5. Serial sweeps settle more often. A posterior with several modes is covered by one
    normal distribution. With a power above 1, a factor that holds more than 1 / power of the
    precision of q has an improper cavity, and the loss is NaN.

    **Memory.** The state has :math:`r D + r^2 + r + 1` numbers for each row, which depends on r
    directions of D coordinates; for too many rows there is :class:`StochasticEP`.

    :param float power: alpha, at least 0.
    :param str schedule: ``"serial"``, one factor after the other, the prior's last; or
        ``"parallel"``, all from one q, which is faster where there are many.
    :param damping: d in (0, 1], or None for 1, which is adapted if the schedule is parallel.
    :param float tol: the residual below which ``run`` stops, at least 3e-5 in float32, and at least
        what rounding leaves of a mean far from 0.

    References: Minka, *Expectation propagation for approximate Bayesian inference* (UAI 2001),
    section 3; Minka, *Power EP* (2004), section 4; Li, *Approximate inference: new visions* (2018),
    equation 2.35.

    >>> from numpyro_ext.ep import EP
    >>> ep = EP(normal_mean)
    >>> result = ep.run(jax.random.key(0), 30, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{-result.losses[-1]:.3f}")   # the log evidence, exact because the rows are normal
    -5.794
    """

    power: float = 1.0
    schedule: str = "serial"
    damping: float | None = None
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("power", self.power)
        check_choice("schedule", self.schedule, ("serial", "parallel"))
        if self.damping is not None:
            check_rate("damping", self.damping)
        if self.power > 1:
            words = (
                f"power is {self.power}, above 1: a factor that holds more than 1/{self.power:g} of"
                " the precision has an improper cavity, and the evidence does not exist there."
            )
            warnings.warn(InferenceWarning(words), stacklevel=2)

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        if self.schedule == "serial":
            return serial_sweep(plan, float(self.tol), state, arrays)
        adaptive = self.damping is None
        return parallel_sweep(plan, float(self.tol), adaptive, state, arrays)

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        super().warn(first, state, num_steps)
        report = state.report
        if report.converged:
            return
        words = (
            f"EP has not converged in {int(state.i)} sweeps: the residual is {report.residual:.2g},"
            f" with a damping d of {float(state.damping):.2g} and {int(report.skipped)} factors"
            " skipped in the last sweep; run it longer from init_state=result.state, with a smaller"
            " damping or schedule='serial', or with more draws in the projection."
        )
        warnings.warn(InferenceWarning(words), stacklevel=3)


@partial(jax.jit, static_argnums=(0, 1, 2))
def parallel_sweep(
    plan: EPPlan, tol: float, adaptive: bool, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """All factors from one q, where d follows the residual if ``adaptive``: state and loss."""
    return damped_step(tol, adaptive, state, *from_one_q(plan, state, arrays))


def damped_step(
    tol: float,
    adaptive: bool,
    state: EPState,
    updates: list[Update],
    change: Site,
    log_z: Array,
    residual: Array,
) -> tuple[EPState, Array]:
    """The next state, and the loss, by the updates of all factors from one q."""
    total, d = state.total, state.damping
    if adaptive:
        grown = (residual > state.report.residual) | ~jnp.isfinite(residual)
        d = jnp.where(grown, jnp.maximum(d / 2, _LEAST), jnp.minimum(1.1 * d, 1.0))
        d = jnp.where(state.i == 0, state.damping, d)
    used = halved(total, change, d)
    if adaptive:
        near = partial(within_trust_region, moments_of(total))
        shortened = halved(total, change, used, near, 30)
        d = jnp.where(shortened < used, state.damping, d)
        used = shortened
    sites = mix(used, state.sites, tuple(v.site for v in updates))
    state = state._replace(damping=d)
    return next_state(state, sites, updates, log_z, residual, tol, good=used > 0), -log_z


@partial(jax.jit, static_argnums=(0, 1))
def step_by_updates(
    tol: float, adaptive: bool, state: EPState, updates: list[Update]
) -> tuple[EPState, Array]:
    """The step of :func:`parallel_sweep` by updates that were computed elsewhere."""
    return damped_step(tol, adaptive, state, updates, *outcome_of(state, updates))


def _one_by_one(
    plan: EPPlan, state: EPState, arrays: list[Array]
) -> tuple[list[Update], list[Site], Array]:
    """Updates, damped sites and residual, each factor from the q that the last one has left."""
    factors, table = plan.reading.factors_of(arrays), state.table
    start = q = moments_of(state.total)
    keys = random.split(state.rng_key, len(plan.specs))
    updates, sites = [], []
    for spec, group, site, key in zip(plan.specs, table.groups, state.sites, keys, strict=True):

        def visit(q: Moments, xs: Any, spec: Any = spec) -> tuple[Moments, Any]:
            index, A, site, key = xs
            update = site_update(spec, q, factors, index, A, site, key)
            new, d = include(q, A, plus(update.site, site, -1.0), state.damping)
            good = is_finite(new) & (d > 0)
            mixed = choose(good, mix(d, site, update.site), site)
            return choose(good, new, q), (update, mixed)

        factor = group.index, group.basis, site, keys_of(spec, key, len(group.basis))
        q, (update, new) = lax.scan(visit, q, factor)
        updates.append(update)
        sites.append(new)
    change = change_of(table, [v.site for v in updates], state.sites)
    residual = distance(start, moments_of(plus(state.total, change)), change)
    return updates, sites, residual


@partial(jax.jit, static_argnums=(0, 1))
def serial_sweep(
    plan: EPPlan, tol: float, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """One factor after the other: the next state, and the loss."""
    updates, sites, residual = _one_by_one(plan, state, arrays)
    parts = sum(jnp.sum(v.log_z) for v in updates)
    total = total_of(state.prior, state.table, sites)
    log_z = state.table.constant + log_partition(total) + parts
    return next_state(state, sites, updates, log_z, residual, tol), -log_z


@dataclass(kw_only=True, eq=False, repr=False)
class ADF(EPEngine):
    r"""Assumed density filtering: each factor is included once, and never looked at again.

    .. math:: q \leftarrow \mathrm{proj}[q f_n], \qquad \log Z \approx \sum_n \log \mathrm E_q f_n

    in the order of the rows. One ``update`` is one pass, and its loss is minus the sum above. The
    answer depends on the order, and its mean is further off than with :class:`EP`. Each further
    pass counts the data **again**, so that the precision grows with every pass; the estimate of the
    evidence is from the first pass. Factors of the prior are updated as in EP, after the data.

    References: Minka, *Expectation propagation for approximate Bayesian inference* (UAI 2001),
    section 2.

    >>> from numpyro_ext.ep import ADF
    >>> adf = ADF(normal_mean)
    >>> result = adf.run(jax.random.key(0), 1, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        return filtering_pass(plan, state, arrays)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """The estimate of log p(y) that the first pass has collected; with arguments of the model,
        of a first pass on these."""
        if not args and not kwargs:
            return state.log_evidence
        fresh = self.init(state.rng_key, *args, **kwargs)
        return -self.update(fresh, *args, **kwargs)[1]


@partial(jax.jit, static_argnums=0)
def filtering_pass(plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
    """The same, after which the sites of the rows are part of q and forgotten."""
    table, total = state.table, state.total
    updates, sites, residual = _one_by_one(plan, state, arrays)
    inside = total_of(jax.tree.map(jnp.zeros_like, state.prior), table, state.sites)
    rest = plus(total, inside, -1.0)  # the prior, and the sites of earlier passes
    for k, (spec, group) in enumerate(zip(plan.specs, table.groups, strict=True)):
        if spec.names is None:
            rest = plus(rest, product_of(group.basis, sites[k]))
            sites[k] = state.sites[k]
    parts = sum(jnp.sum(v.log_z) for v in updates)
    first = table.constant + log_partition(total) + parts
    log_z = jnp.where(state.i == 0, first, state.log_evidence)
    state = next_state(state, sites, updates, log_z, residual, rest=rest)
    return state, -jnp.where(state.i == 0, first, parts)
