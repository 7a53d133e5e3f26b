r"""Expectation propagation, with powers, and assumed density filtering, its first pass.

References: Minka, *Expectation propagation for approximate Bayesian inference* (UAI 2001); Minka,
*Power EP* (2004); Li, *Approximate inference: new visions* (2018), chapter 2.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._checks import (
    InferenceWarning,
    check_choice,
    check_nonnegative,
    check_positive,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factor_table import Plan
from numpyro_ext.ep.normal import (
    FAMILIES,
    Moments,
    Site,
    choose,
    distance,
    halved,
    is_finite,
    is_near,
    plus,
)
from numpyro_ext.ep.start import change_of, natural
from numpyro_ext.ep.state import EPState, Report, limit_of, next_state, prior_of
from numpyro_ext.ep.visit import Visit, keys_of, visit, visit_all

__all__ = ["ADF", "EP"]

_LEAST = 0.02
"""The least d of adaptive damping."""


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
    inference, whose loss is minus the ELBO. The factors of the prior always have power 1.

    The loss is minus the estimate of the log evidence,

    .. math::

        \log Z \approx \Phi(q) - \Phi(f_0) + \sum_n \tfrac1\alpha \left[ \log
        \mathrm E_{q^{\setminus n}} f_n^\alpha + \Phi(q^{\setminus n}) - \Phi(q) \right],

    which is exact if all factors are normal. A parallel sweep estimates it for the state with which
    the sweep begins, and a serial one collects it during the sweep.

    **When it fails.** EP has no objective that decreases at each step, and may not settle. With
    ``damping=None`` d is halved whenever the residual of a parallel sweep has grown. It is also
    halved until no mean moves by more than 3 standard deviations and no standard deviation changes
    by more than a factor of 5, because sites that are found far from the posterior say little about
    it. Serial sweeps settle more often. If EP has not converged at the end of ``run``, an
    ``InferenceWarning`` gives the residual. A fixed point is a saddle point of the evidence as a
    function of the sites. A posterior with several modes is covered by one normal distribution.
    With a power above 1, a factor that holds more than 1 / power of the precision of q has an
    improper cavity, and the loss is NaN.

    :param model: Python callable with NumPyro primitives, with continuous latent sites.
    :param float power: alpha, at least 0.
    :param str schedule: ``"serial"``, one factor after the other, the prior's last; or
        ``"parallel"``, all from one q, which is faster where there are many.
    :param damping: d in (0, 1], or None for 1, which is adapted if the schedule is parallel.
    :param float tol: the residual below which ``run`` stops, at least 3e-5 in float32, and at least
        what rounding leaves of a mean far from 0.

    References: Minka (2001), section 3; Minka (2004), section 4; Li (2018), equation 2.35.

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.ep import EP
        >>> def model(X, y):
        ...     w = numpyro.sample("w", dist.Normal(0, 2).expand([2]).to_event(1))
        ...     with numpyro.plate("rows", len(X)) as idx:
        ...         numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ w), obs=y[idx])
        >>> X = jnp.array([[1.0, 0.8], [0.5, -0.9], [1.2, 1.0], [-0.8, 0.6]])
        >>> y = jnp.array([1, 0, 1, 0])
        >>> ep = EP(model)
        >>> result = ep.run(jax.random.key(0), 30, X, y, progress_bar=False)
        >>> print(bool(result.state.report.converged), sorted(result.params))
        True ['auto_loc', 'auto_scale_tril']
        >>> draws = ep.guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))
        >>> draws["w"].shape
        (9, 2)
    """

    power: float = 1.0
    schedule: str = "serial"
    damping: float | None = None
    tol: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_nonnegative("power", self.power)
        check_choice("schedule", self.schedule, ("serial", "parallel"))
        check_positive("tol", self.tol)
        if self.damping is not None:
            check_positive("damping", self.damping)
            if self.damping > 1:
                raise ValueError(
                    f"damping is {self.damping!r}; it must be in (0, 1], where 1 replaces a site by"
                    " the new one, or None."
                )
        if self.power == 0 and self.projection is not None and not self.projection.exclusive:
            raise ValueError(
                f"power is 0, and {type(self.projection).__name__} has no expectations under the"
                " approximation itself; use a power above 0, or projection=Quadrature()."
            )
        if self.power > 1:
            warnings.warn(
                InferenceWarning(
                    f"power is {self.power}, above 1: a factor that holds more than"
                    f" 1/{self.power:g} of the precision has an improper cavity, and the"
                    " evidence does not exist there."
                ),
                stacklevel=2,
            )

    def start_damping(self) -> float:
        return 1.0 if self.damping is None else float(self.damping)

    def sweep(
        self, plan: Plan, state: EPState, arrays: list[Array], **options: Any
    ) -> tuple[EPState, Array]:
        one = _serial if self.schedule == "serial" else _parallel
        return one(plan, self._setting, state, arrays)

    @property
    def _setting(self) -> "Setting":
        adaptive = self.damping is None and self.schedule == "parallel"
        return Setting(self.family, float(self.tol), adaptive, False)

    def _warn(self, state: EPState) -> None:
        report = jax.device_get(state.report)
        serial = ", or with schedule='serial'" if self.schedule == "parallel" else ""
        plan = self._plan
        if plan is not None and any(kind.projection.needs_key for kind in plan.kinds):
            serial += ". Moments from draws jump as weights get uneven; take more of them, as in"
            serial += " projection=ImportanceSampling(num_samples=2000)"
        if not report.converged:
            warnings.warn(
                InferenceWarning(
                    f"EP has not converged in {int(state.i)} sweeps: the residual is"
                    f" {report.residual:.2g}, with a damping d of {float(state.damping):.2g} and"
                    f" {int(report.skipped)} factors skipped in the last sweep. Run it longer from"
                    f" init_state=result.state, or with a smaller damping{serial}."
                ),
                stacklevel=3,
            )


@dataclass(kw_only=True, eq=False, repr=False)
class ADF(EPEngine):
    r"""Assumed density filtering: each factor is included once, and never looked at again.

    .. math:: q \leftarrow \mathrm{proj}[q f_n], \qquad \log Z \approx \sum_n \log \mathrm E_q f_n

    in the order of the rows. One ``update`` is one pass, and its loss is minus the sum above. The
    answer depends on the order, and its mean is off by more than that of :class:`EP`. Each further
    pass counts the data **again**, so that the precision grows with every pass; the estimate of the
    evidence is that of the first pass. Factors of the prior are updated as in EP, after the data.

    References: Minka (2001), section 2.

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro_ext.ep import ADF
        >>> from numpyro_ext.targets import normal_mean
        >>> adf = ADF(normal_mean)
        >>> result = adf.run(jax.random.key(0), 1, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
        >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
        0.3750
    """

    forgets: ClassVar[bool] = True

    def sweep(
        self, plan: Plan, state: EPState, arrays: list[Array], **options: Any
    ) -> tuple[EPState, Array]:
        return _serial(plan, Setting(self.family, 0.0, False, True), state, arrays)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """The estimate of log p(y) that the first pass has collected; with arguments of the model,
        that of a first pass on these. It is no function that can be differentiated."""
        if not args and not kwargs:
            return state.log_evidence
        if is_traced((state, args, kwargs)):
            raise ValueError(
                "the estimate of ADF is collected in its first pass, so it is not a function of"
                " traced arguments of the model; differentiate EP(model).log_evidence."
            )
        fresh = self.init(state.rng_key, *args, **kwargs)
        return -self.update(fresh, *args, **kwargs)[1]


class Setting(NamedTuple):
    """What is static in a sweep, beside the plan."""

    family: str
    tol: float
    adaptive: bool
    forgets: bool
    """Whether sites of the data are included and forgotten."""


def _mix(d: Array, old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, b: (1 - d) * a + d * b, old, new)


@partial(jax.jit, static_argnums=(0, 1))
def _parallel(
    plan: Plan, setting: Setting, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """All factors from one q."""
    family, factors = FAMILIES[setting.family], plan.reading.on(arrays)
    prior, table = prior_of(state), state.table
    total = Site(state.shift, state.precision)
    q = family.moments(total)
    # The same draws in every sweep, so that there is a fixed point.
    keys = random.split(state.rng_key, len(plan.kinds))
    old = tuple(map(Site, state.site_shift, state.site_precision))
    visits = [
        visit_all(family, factors, kind, q, group, site, key)
        for kind, group, site, key in zip(plan.kinds, table.groups, old, keys, strict=True)
    ]
    log_z = table.constant + family.log_partition(total) + sum(jnp.sum(v.log_z) for v in visits)
    proposal = tuple(v.site for v in visits)
    change = change_of(family, table, proposal, old)
    residual = distance(q, family.moments(plus(total, change)), change)

    d = state.damping
    if setting.adaptive:
        grown = (residual > state.report.residual) | ~jnp.isfinite(residual)
        d = jnp.where(grown, jnp.maximum(d / 2, _LEAST), jnp.minimum(1.1 * d, 1.0))
        d = jnp.where(state.i == 0, state.damping, d)

    def at(d: Array) -> Site:
        return plus(total, change, d)

    used, halvings = halved(family, at, d)
    if setting.adaptive:
        used, shortened = halved(family, at, used, partial(is_near, q), 30)
        d = jnp.where(shortened > 0, state.damping, d)
    sites = _mix(used, old, proposal)
    new = natural(family, prior, table, sites)
    good = (used > 0) & is_finite(family.moments(new))
    sites, new = choose(good, sites, old), choose(good, new, total)
    report = _report(plan, setting, state, q, visits, residual, halvings, good)
    return next_state(state, new, sites, report, log_z, state.rng_key, d), -log_z


@partial(jax.jit, static_argnums=(0, 1))
def _serial(
    plan: Plan, setting: Setting, state: EPState, arrays: list[Array]
) -> tuple[EPState, Array]:
    """One factor after the other, each from the q that the last one has left."""
    family, factors = FAMILIES[setting.family], plan.reading.on(arrays)
    table, total = state.table, Site(state.shift, state.precision)
    start = q = family.moments(total)
    keys = random.split(state.rng_key, len(plan.kinds))
    old = tuple(map(Site, state.site_shift, state.site_precision))
    # What is not in the sites: the prior and, if they are forgotten, those of passes before.
    rest = prior_of(state)
    if setting.forgets:
        inside = natural(family, jax.tree.map(jnp.zeros_like, rest), table, old)
        rest = jax.tree.map(jnp.subtract, total, inside)
    visits, sites, proposal, halvings = [], [], [], jnp.array(0)
    for kind, group, site, key in zip(plan.kinds, table.groups, old, keys, strict=True):

        def one(q: Moments, xs: Any, kind: Any = kind) -> tuple[Moments, Any]:
            index, A, site, key = xs
            found = visit(family, factors, kind, q, index, A, site, key)
            change = jax.tree.map(jnp.subtract, found.site, site)
            new, d, halvings = family.include(q, A, change, state.damping)
            good = is_finite(new) & (d > 0)
            q = choose(good, new, q)
            return q, (found, choose(good, _mix(d, site, found.site), site), halvings)

        each = (group.index, group.basis, site, keys_of(kind, key, len(group.basis)))
        q, (found, new, count) = lax.scan(one, q, each)
        visits.append(found)
        proposal.append(found.site)
        halvings += jnp.sum(count)
        if setting.forgets and kind.names is None:
            added = family.total(group.basis, new)
            rest = plus(rest, added)
            new = site
        sites.append(new)

    new = natural(family, rest, table, sites)
    good = is_finite(family.moments(new))
    change = change_of(family, table, proposal, old)
    residual = distance(start, family.moments(plus(total, change)), change)
    parts = sum(jnp.sum(v.log_z) for v in visits)
    if setting.forgets:
        first = table.constant + family.log_partition(total) + parts
        log_z = jnp.where(state.i == 0, first, state.log_evidence)
        loss = -jnp.where(state.i == 0, first, parts)
    else:
        log_z = table.constant + family.log_partition(new) + parts
        loss = -log_z
    sites, new = choose(good, tuple(sites), old), choose(good, new, total)
    report = _report(plan, setting, state, start, visits, residual, halvings, good)
    return next_state(state, new, sites, report, log_z, state.rng_key), loss


def _report(
    plan: Plan,
    setting: Setting,
    state: EPState,
    q: Moments,
    visits: list[Visit],
    residual: Array,
    halvings: Array,
    good: Array,
) -> Report:
    before = state.report
    # The cavity of what makes q proper is flat until the other factors have spoken.
    early = (state.i == 0) | (before.skipped > 0)

    def count(name: str) -> Array:
        numbers = []
        for kind, found in zip(plan.kinds, visits, strict=True):
            number = jnp.sum(getattr(found, name), dtype=jnp.int32)
            of_prior = name == "improper" and kind.names is not None
            numbers.append(jnp.where(early, 0, number) if of_prior else number)
        return jnp.sum(jnp.stack(numbers))

    left = [jnp.sum(v.improper | v.skipped | v.low_ess, dtype=jnp.int32) for v in visits]
    left = jnp.sum(jnp.stack(left))
    tol = limit_of(setting.tol, q)
    return Report(
        residual,
        left,
        good & (residual < tol) & (left == 0),
        before.num_improper + count("improper"),
        before.num_skipped + count("skipped"),
        before.num_low_ess + count("low_ess"),
        before.num_inaccurate + count("inaccurate"),
        before.num_halvings + halvings.astype(jnp.int32),
        jnp.asarray(sum(len(v.log_z) for v in visits), jnp.int32),
        before.noise,
    )
