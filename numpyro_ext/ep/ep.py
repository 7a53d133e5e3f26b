"""Expectation propagation, with powers, and assumed density filtering, its first pass."""

from dataclasses import dataclass
from typing import Any, ClassVar
import warnings

from jax import Array

from numpyro_ext._checks import (
    InferenceWarning,
    check_choice,
    check_nonnegative,
    check_positive,
    check_rate,
)
from numpyro_ext._model.arguments import is_traced
from numpyro_ext.ep.base import EPEngine
from numpyro_ext.ep.factors import EPPlan
from numpyro_ext.ep.sites import EPState
from numpyro_ext.ep.sweep import SweepConfig, sweep


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
    ``damping=None`` d is halved whenever the residual of a parallel sweep has grown, and until no
    mean moves by more than 3 standard deviations and no standard deviation changes by more than a
    factor of 5. Serial sweeps settle more often. If EP has not converged at the end of ``run``, an
    ``InferenceWarning`` gives the residual. A posterior with several modes is covered by one normal
    distribution. With a power above 1, a factor that holds more than 1 / power of the precision of
    q has an improper cavity, and the loss is NaN.

    **Memory.** The state has :math:`r D + r^2 + r + 1` numbers for each row, which depends on r
    directions of D coordinates: half a gigabyte for :math:`10^7` rows of a linear predictor of ten
    coefficients, in single precision. For more rows there is :class:`StochasticEP`.

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
            check_rate("damping", self.damping)
        if self.power > 1:
            words = (
                f"power is {self.power}, above 1: a factor that holds more than 1/{self.power:g} of"
                " the precision has an improper cavity, and the evidence does not exist there."
            )
            warnings.warn(InferenceWarning(words), stacklevel=2)

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        serial = self.schedule == "serial"
        adaptive = self.damping is None and not serial
        config = SweepConfig(self.normals, serial, float(self.tol), adaptive)
        return sweep(plan, config, state, arrays)

    def warn(self, first: EPState, state: EPState, num_steps: int) -> None:
        report = state.report
        if report.converged:
            return
        words = (
            f"EP has not converged in {int(state.i)} sweeps: the residual is {report.residual:.2g},"
            f" with a damping d of {float(state.damping):.2g} and {int(report.skipped)} factors"
            " skipped in the last sweep. Run it longer from init_state=result.state, with a smaller"
            " damping, or with schedule='serial'; and take more draws where moments are from draws,"
            " as in projection=ImportanceSampling(num_samples=2000)."
        )
        warnings.warn(InferenceWarning(words), stacklevel=3)


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
    >>> from numpyro_ext.targets import normal_mean
    >>> adf = ADF(normal_mean)
    >>> result = adf.run(jax.random.key(0), 1, jnp.array([0.5, -1.0, 2.0]), progress_bar=False)
    >>> print(f"{result.params['auto_loc'][0]:.4f}")   # exact, because the rows are normal
    0.3750
    """

    forgets: ClassVar[bool] = True

    def sweep(self, plan: EPPlan, state: EPState, arrays: list[Array]) -> tuple[EPState, Array]:
        return sweep(plan, SweepConfig(self.normals, serial=True, forgets=True), state, arrays)

    def log_evidence(self, state: EPState, *args: Any, **kwargs: Any) -> Array:
        """The estimate of log p(y) that the first pass has collected; with arguments of the model,
        of a first pass on these. It cannot be differentiated."""
        if not args and not kwargs:
            return state.log_evidence
        if is_traced((state, args, kwargs)):
            raise ValueError(
                "the estimate of ADF is collected in its first pass, so it is not a function of"
                " traced arguments of the model; differentiate EP(model).log_evidence."
            )
        fresh = self.init(state.rng_key, *args, **kwargs)
        return -self.update(fresh, *args, **kwargs)[1]
