"""Simulation-based calibration: fits of data that were drawn from the model's own prior."""

from collections.abc import Collection
from concurrent.futures import Executor
import math
from typing import TYPE_CHECKING, Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints
from numpyro.handlers import condition, seed

from numpyro_ext._checks import InferenceWarning, check_count
from numpyro_ext._model.checks import check_observed
from numpyro_ext._model.exact import exact_draws
from numpyro_ext._model.handlers import every_row, unobserved, valid_plates
from numpyro_ext._model.read import (
    elementwise,
    is_data,
    latent_sites,
    sample_sites,
    shape_trace,
    trace_of,
)
from numpyro_ext._typing import Model, Sites, Trace
from numpyro_ext.diagnostics._fit_of import check_arguments, check_key
from numpyro_ext.diagnostics._workers import of_each
from numpyro_ext.diagnostics.simulation_fits import Fit
from numpyro_ext.diagnostics.table import in_table

if TYPE_CHECKING:
    import xarray as xr


_ROUNDED = 0.01
"""The share of simulations with a rounded draw of the prior from which their ranks are off."""
_CORRELATED = 0.2
"""The correlation of neighbours among the draws of a fit up to which nothing is said."""


class SBCResult(NamedTuple):
    """The result of :func:`simulation_based_calibration`; it prints as a table."""

    ranks: dict[str, np.ndarray]
    """``(I, *site)`` of each site, whole numbers between 0 and L."""
    pit: dict[str, np.ndarray]
    """``(I, *site)``: the ranks as numbers that are uniform between 0 and 1."""
    p_values: dict[str, np.ndarray]
    """``(*site)``: of the chi-square test that they are; NaN where nothing varies."""
    dataset: "xr.DataTree"
    """The group ``prior_sbc``, for ``az.plot_ecdf_pit(dataset, group="prior_sbc")``."""

    @property
    def p_value(self) -> float:
        """The p-value of all components together: the least one times their number (Bonferroni)."""
        each = np.concatenate([np.ravel(p) for p in self.p_values.values()])
        each = each[~np.isnan(each)]
        return float(min(1.0, np.min(each) * len(each))) if len(each) else math.nan

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self.dataset.attrs["notes"].splitlines())

    def __str__(self) -> str:
        attributes = self.dataset.attrs
        num_simulations, num_samples = attributes["num_simulations"], attributes["num_samples"]
        cells = [("site", "components", "least p-value", "ranks")]
        count = sum(int(np.sum(~np.isnan(p))) for p in self.p_values.values())
        for name, p in self.p_values.items():
            if np.all(np.isnan(p)):
                cells.append((name, f"{p.size}", "-", "nothing varies"))
                continue
            pit = self.pit[name].reshape(num_simulations, -1)[:, int(np.nanargmin(p))]
            shape = _shape(pit) if np.nanmin(p) * count < 0.01 else "uniform"
            cells.append((name, f"{p.size}", f"{np.nanmin(p):.2g}", shape))
        together = f"{self.p_value:.2g}"
        cells.append(("all", f"{count}", together, "(times their number: Bonferroni)"))
        title = f"{num_simulations} simulations, ranks among {num_samples} draws"
        return "\n".join([in_table(title, cells), *self.notes])


def simulation_based_calibration(
    rng_key: Any,
    model: Model,
    fit: Fit,
    *args: Any,
    observed_sites: Collection[str] | None = None,
    num_simulations: int = 100,
    num_samples: int = 100,
    executor: Executor | None = None,
    **kwargs: Any,
) -> SBCResult:
    r"""Test a method of inference on data that are drawn from the model's own prior.

    For :math:`i = 1, \dots, I`, with a fit q and L draws of it,

    .. math::
        \theta^*_i \sim p(\theta), \qquad y_i \sim p(y \mid \theta^*_i), \qquad
        \theta_{i1}, \dots, \theta_{iL} \sim q(\theta \mid y_i), \qquad
        r_i = \#\{l : \theta_{il} < \theta^*_i\},

    for each number among the latent sites. If q is the posterior, the ranks :math:`r_i` are uniform
    on 0, ..., L (ties are broken at random). ``pit`` is :math:`(r_i + U_i) / (L + 1)` with
    :math:`U_i` uniform, and ``p_values`` come from the chi-square test of ``pit`` in
    :math:`\min(20, I // 5)` equal bins.

    Ranks heaped at both ends say that q is too narrow, or that draws of a chain are correlated;
    heaped in the middle that it is too wide, and a slope that its mean is off. It tests fits of
    data sets that the *prior* makes, which may be unlike the one at hand.

    Simulated data take the place of what is observed; the arguments of the model stay as they are,
    also where it makes a prior or a covariate of the data. Plates that take minibatches are
    simulated in full, and fitted in minibatches. NaN in the data stays NaN. Discrete latent sites
    are left out, with a note.

    :param rng_key: a key, new-style or legacy.
    :param model: Python callable with NumPyro primitives.
    :param fit: what :func:`fit_svi`, :func:`fit_mcmc` or :func:`fit_engine` returns; or a function
        ``fit(rng_key, model, args, kwargs)`` of your own that returns at least L draws
        ``{site: (S, ...)}`` of every continuous latent site. Its ``model`` is observed at the
        simulated data: a dict of these is ``args[0]``, before the arguments that you give here.
    :param args: arguments of the model, on which the sizes of the simulated data depend.
    :param observed_sites: names of the sites that are data; None for those that are observed.
    :param int num_simulations: I, at least 20.
    :param int num_samples: L, at least 10. If a fit has more draws, equally spaced ones are taken.
    :param executor: any ``concurrent.futures.Executor``, of which each fit is a task. It sends
        ``model`` and ``fit`` to its workers: an executor of ``dask.distributed`` sends any, one of
        processes only functions with a name in a module.
    :param kwargs: keyword arguments of the model.
    :return: an :class:`SBCResult`.

    **References:**

    1. *Validating Bayesian inference algorithms with simulation-based calibration*, Sean Talts,
       Michael Betancourt, Daniel Simpson, Aki Vehtari, Andrew Gelman, arXiv:1804.06788, 2018
       (Theorem 1, Algorithm 1).
    2. *Yes, but did it work? Evaluating variational inference*, Yuling Yao, Aki Vehtari, Daniel
       Simpson, Andrew Gelman, ICML 2018 (Section 3).

    >>> from numpyro_ext.diagnostics import fit_engine, simulation_based_calibration
    >>> from numpyro_ext.ep import EP
    >>> from numpyro_ext.targets import normal_mean
    >>> x = jnp.array([0.5, -1.0, 2.0])  # its length alone matters
    >>> result = simulation_based_calibration(  # EP is exact here
    ...     jax.random.key(0), normal_mean, fit_engine(EP, 5), x, num_simulations=40)
    >>> result.ranks["z"].shape, result.p_value > 0.001
    ((40,), True)
    """
    num_simulations = check_count("num_simulations", num_simulations, 20)
    L = check_count("num_samples", num_samples, 10)
    key_prior, key_fits, key_ranks = random.split(check_key(rng_key), 3)
    args, kwargs = check_arguments(args, kwargs)
    simulator = _Simulator(model, args, kwargs, observed_sites)
    observed = simulator.model  # one object, so that compiled programs are kept
    names = [name for name in simulator.latents if name not in simulator.discrete]
    if not names:
        raise ValueError(f"the model has no continuous latent site, but {simulator.latents}.")
    simulated = jax.jit(jax.vmap(simulator.draw))(random.split(key_prior, num_simulations))
    for name, x in simulated[0].items():
        if not np.all(np.isfinite(jax.device_get(x))):
            raise ValueError(f"draws of the prior of latent site '{name}' are not finite.")
        ends = simulator.ends.get(name, ())
        rounded = float(np.mean([np.isin(each, ends).any() for each in np.asarray(x)]))
        if name in names and rounded > _ROUNDED:
            raise ValueError(
                f"draws of the prior of latent site '{name}' are rounded to an end of its support"
                f" in {rounded:.0%} of the simulations, where they have no density; simulate with"
                " numpyro.enable_x64(), take larger concentrations, or sample its logarithm."
            )
    # Of a new-style key or a legacy one.
    rng = np.random.default_rng(jax.device_get(random.bits(key_ranks, (4,))))
    fits: list[dict[str, tuple[np.ndarray, ...]]] = []
    each = [jax.tree.map(lambda x, i=i: x[i], simulated) for i in range(num_simulations)]
    keys = random.split(key_fits, num_simulations)
    asked = ((key, data) for key, (_, data) in zip(keys, each, strict=True))
    of_all = of_each(executor, _fit_of, (fit, observed, args, kwargs), asked)
    for (truth, _), draws in zip(each, of_all, strict=True):
        fits.append({name: _ranked(name, draws, truth[name], L, rng) for name in names})
    ranks = {name: np.stack([each[name][0] for each in fits]) for name in names}
    _warn_of_correlation({name: np.mean([each[name][2] for each in fits], 0) for name in names}, L)
    varies = {name: np.any([each[name][1] for each in fits], 0) for name in names}
    pit = {name: (x + rng.uniform(size=x.shape)) / (L + 1) for name, x in ranks.items()}
    p_values = {name: np.where(varies[name], _p_values(pit[name]), np.nan) for name in names}
    notes = [f"left out, because it is discrete: '{name}'" for name in simulator.discrete]

    import arviz_base

    tree = arviz_base.from_dict({"prior_sbc": {name: x[None] for name, x in pit.items()}})
    tree.attrs.update(notes="\n".join(notes), num_simulations=num_simulations, num_samples=L)
    return SBCResult(ranks, pit, p_values, tree)


def _fit_of(
    fit: Fit, observed: Model, args: tuple, kwargs: dict[str, Any], key: Any, data: Sites
) -> dict[str, Any]:
    return fit(key, observed, (data, *args), kwargs)


def _ranked(
    name: str, draws: Any, truth: Any, L: int, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """The ranks of true values among L draws, ties broken at random; whether these vary; and their
    correlation from one to the next, nearly unbiased for independent draws."""
    x, y = np.asarray(jax.device_get(draws[name])), np.asarray(truth)
    if x.shape[1:] != y.shape or x.ndim == 0 or len(x) < L:
        raise ValueError(
            f"fit returned draws of shape {x.shape} at site '{name}'; it must return at least"
            f" num_samples={L} of shape {y.shape}."
        )
    if not np.all(np.isfinite(x)):
        raise ValueError(
            f"fit has draws of site '{name}' that are not finite; take a smaller step."
        )
    x = x[(np.arange(1, L + 1) * len(x)) // L - 1]
    ties = np.sum(x == y, 0)
    z = x - np.mean(x, 0, dtype=np.float64)
    variance, rounding = np.sum(z**2, 0), L * (1e-6 * np.max(np.abs(x), 0)) ** 2
    moved = variance > rounding
    lag = np.sum(z[1:] * z[:-1], 0) / np.where(moved, variance, 1.0) + 1 / L
    return np.sum(x < y, 0) + rng.integers(0, ties + 1), ties < L, np.where(moved, lag, 0.0)


def _warn_of_correlation(sites: dict[str, np.ndarray], L: int) -> None:
    """A warning where the draws of the fits are not nearly independent."""
    worst = {name: float(np.max(x, initial=0)) for name, x in sites.items()}
    name = max(worst, key=lambda name: worst[name])
    if worst[name] > _CORRELATED:
        message = (
            f"the {L} draws of each fit are correlated ({worst[name]:.2f} from one to the next at"
            f" site '{name}'), so that their ranks are heaped at both ends as if q were too narrow;"
            " run longer chains, or take fewer num_samples."
        )
        warnings.warn(InferenceWarning(message), stacklevel=3)


def _p_values(pit: np.ndarray) -> np.ndarray:
    from scipy.stats import chisquare

    bins = min(20, len(pit) // 5)
    place = np.minimum((pit * bins).astype(int), bins - 1)
    return np.asarray(chisquare(np.stack([np.sum(place == b, 0) for b in range(bins)])).pvalue)


def _shape(pit: np.ndarray) -> str:
    size = len(pit)
    slope = (np.mean(pit) - 0.5) * math.sqrt(12 * size)
    spread = (np.mean((pit - 0.5) ** 2) - 1 / 12) * math.sqrt(180 * size)
    if max(abs(slope), abs(spread)) < 3:
        return "not uniform"
    if abs(slope) > abs(spread):
        return f"a slope: the draws are too {'low' if slope > 0 else 'high'}"
    if spread > 0:
        return "heaped at both ends: the draws are too narrow"
    return "heaped in the middle: the draws are too wide"


class _observed(condition):
    """Condition on data of all rows, of which a plate takes the rows of its minibatch."""

    def __init__(self, fn: Model, data: Sites) -> None:
        values: Any = data
        super().__init__(fn, data=values)
        self.rows: dict[str, tuple[int, Array]] = {}

    def process_message(self, msg: dict[str, Any]) -> None:
        super().process_message(msg)  # type: ignore[arg-type] - a message is a dict
        assert self.data is not None
        if msg["type"] != "sample" or msg["name"] not in self.data:
            return
        if msg.get("_control_flow_done", False):
            return
        value: Any = msg["value"]
        for frame in msg["cond_indep_stack"]:
            size, idx = self.rows.get(frame.name, (0, None))
            axis = frame.dim - msg["fn"].event_dim
            if idx is not None and jnp.ndim(value) >= -axis and jnp.shape(value)[axis] == size:
                value = jnp.take(value, idx, axis)
        msg["value"] = value

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            self.rows[msg["name"]] = msg["args"][0], msg["value"]


class _Simulator:
    """Draws of latent sites and data from the prior of a model, on all of its rows."""

    def __init__(
        self, model: Model, args: tuple, kwargs: dict[str, Any], observed: Collection[str] | None
    ) -> None:
        self._whole = every_row(valid_plates(model))
        self._args, self._kwargs = args, kwargs
        trace = shape_trace(seed(self._whole, 0), args, kwargs)
        check_observed(trace)
        _refuse(trace)
        self.data = _data_sites(trace, observed)
        latents = [site for site in latent_sites(trace) if site["name"] not in self.data]
        self.latents = [site["name"] for site in latents]
        self.discrete = [s["name"] for s in latents if s["fn"].support.is_discrete]
        self._given = {name for name in self.data if trace[name]["is_observed"]}
        self._model = model
        self.ends = {site["name"]: _ends(site["fn"].support) for site in latents}

    def model(self, data: Sites, *args: Any, **kwargs: Any) -> Any:
        return _observed(self._model, data)(*args, **kwargs)

    def draw(self, rng_key: Array) -> tuple[Sites, Sites]:
        """Latent sites and data, which may be traced; NaN stays where the data have it."""
        trace = trace_of(
            exact_draws(seed(unobserved(self._whole), rng_key)), self._args, self._kwargs
        )
        data = {name: trace[name]["value"] for name in self.data}
        for name in self._given:
            observed = jnp.asarray(trace[name]["infer"]["obs"])
            if observed.dtype.kind == data[name].dtype.kind == "f":
                data[name] = jnp.where(jnp.isnan(observed), jnp.nan, data[name])
        return {name: trace[name]["value"] for name in self.latents}, data


def _ends(support: Any) -> list[float]:
    """The ends of a support of numbers; none that is computed from other sites."""
    if support is constraints.simplex:
        return [0.0]
    ends = (getattr(elementwise(support), f"{end}_bound", None) for end in ("lower", "upper"))
    return [end for end in ends if isinstance(end, int | float)]


def _refuse(trace: Trace) -> None:
    """An error for what has no prior from which it could be drawn."""
    for name, site in trace.items():
        if site["type"] == "param" and jax.tree.leaves(site["value"]):
            raise ValueError(
                f"the param site '{name}' of the model has no prior; use numpyro.sample, or"
                " numpyro.handlers.substitute."
            )
        if site["type"] == "sample" and site["is_observed"] and not is_data(site):
            raise ValueError(
                f"draws from the prior do not follow the factor '{name}' of the model; write it as"
                " a distribution of numpyro.sample."
            )


def _data_sites(trace: Trace, given: Collection[str] | None) -> list[str]:
    sites = {site["name"]: site["is_observed"] for site in sample_sites(trace)}
    observed = [name for name, is_observed in sites.items() if is_observed]
    names = [name for name in sites if name in (observed if given is None else given)]
    if given is not None and (len(names) < len(given) or set(observed) - set(given)):
        raise ValueError(
            f"observed_sites is {list(given)}; it must hold sites of {list(sites)}, and"
            f" those that are observed, {observed}."
        )
    if not names:
        raise ValueError(
            "the model observes no site on these arguments; pass its data, or observed_sites=."
        )
    return names
