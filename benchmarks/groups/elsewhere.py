"""The models by the packages that others take for them, each optional: GPBoost, statsmodels and the
Laplace approximation of pymc-extras, with their own defaults.

- GPBoost estimates points. It has no random walk: its weeks are independent.
- statsmodels has no gamma distributed rows, no grades, and no exposure of counts, the logarithm of
  which is therefore a column. Its posterior is of independent normals, and its priors are LogNormal
  (0, 1) for scales and Normal (0, 2) for coefficients.
- pymc-extras has the models as they are, with 2,000 draws of its normal.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Data = dict[str, Any]
Draws = dict[str, np.ndarray]
NUM_DRAWS = 2000


class Missing(Exception):
    """A model that a package does not have."""


def by_gpboost(name: str, data: Data) -> Draws:
    import gpboost  # pyright: ignore[reportMissingImports]

    if name == "panel":
        raise Missing("no ordered categories with effects that go together")
    y, columns = data["y"], np.ones((len(data["y"]), 1))
    options: Data = {}
    if name == "claims":
        names, likelihood = ("brand", "region", "vehicle"), "gamma"
        columns = np.column_stack([columns, data["x"]])
    elif name == "answers":
        names, likelihood = ("region", "customer"), "bernoulli_logit"
        columns = np.column_stack([columns, data["x"]])
    else:
        names, likelihood = ("shop", "product", "week"), "poisson"
        options["offset"] = np.log(data["exposure"])
    groups = np.stack([_levels(name, k, data)[0] for k in names], axis=1)
    model = gpboost.GPModel(group_data=groups, likelihood=likelihood)
    model.fit(y=y, X=columns, **options)
    found = model.get_cov_pars().iloc[0].items()
    return {k: np.array(v) for k, v in found}


def _levels(name: str, factor: str, data: Data) -> tuple[np.ndarray, int]:
    """The level of each row, and their number."""
    if name == "answers":
        customer = np.asarray(data["customer"])
        number = int(customer.max()) + 1
        regions = 100 if number > 10_000 else 20
        return (customer, number) if factor == "customer" else (customer % regions, regions)
    level = np.asarray(data[factor])
    return level, int(level.max()) + 1


def by_statsmodels(name: str, data: Data) -> Draws:
    from scipy import sparse
    from statsmodels.genmod import bayes_mixed_glm

    if name == "claims":
        raise Missing("no gamma distributed rows")
    if name == "panel":
        raise Missing("no ordered categories")
    N, rng = len(data["y"]), np.random.default_rng(2)
    names = ("region", "customer") if name == "answers" else ("shop", "product", "week")
    column = data["x"] if name == "answers" else np.log(data["exposure"])
    parts, ident = [], []
    for k, factor in enumerate(names):
        level, size = _levels(name, factor, data)
        part = sparse.csr_array((np.ones(N), (np.arange(N), level)), shape=(N, size))
        if factor == "week":  # the sums of steps
            part = sparse.csr_array(part @ np.tril(np.ones((size, size))))
        parts.append(part)
        ident += [k] * size
    exog, design = np.column_stack([np.ones(N), column]), sparse.hstack(parts, "csr")
    kind = "Binomial" if name == "answers" else "Poisson"
    model_class = getattr(bayes_mixed_glm, f"{kind}BayesMixedGLM")
    found = model_class(data["y"], exog, design, np.array(ident)).fit_vb()
    means = np.concatenate([found.fe_mean, found.vcp_mean, found.vc_mean])
    sds = np.concatenate([found.fe_sd, found.vcp_sd, found.vc_sd])
    draws = means + sds * rng.normal(size=(NUM_DRAWS, len(means)))
    sizes = [2, len(names), *(part.shape[1] for part in parts)]
    fixed, scales, *effects = np.split(draws, np.cumsum(sizes)[:-1], axis=1)
    result = {f"s_{k}": np.exp(scales[:, i]) for i, k in enumerate(names)}
    result |= {"mean": fixed[:, 0], **dict(zip(names, effects, strict=True))}
    if name == "answers":
        of_customer = np.arange(sizes[3]) % sizes[2]
        result["region"] = result["region"] + fixed[:, :1]
        result["customer"] = result["customer"] + result["region"][:, of_customer]
        return result | {"slope": fixed[:, 1]}
    return result | {"walk": np.cumsum(result.pop("week"), axis=1)}


def by_pymc(name: str, data: Data) -> Draws:
    import pymc as pm  # pyright: ignore[reportMissingImports]
    from pymc_extras import fit_laplace  # pyright: ignore[reportMissingImports]

    with pm.Model() as model:
        _PYMC[name](pm, data)
    found = fit_laplace(model=model, draws=NUM_DRAWS, random_seed=1, progressbar=False)
    return {
        str(k): np.asarray(x).reshape(NUM_DRAWS, *x.shape[2:])
        for k, x in found.posterior.data_vars.items()
    }


def _pymc_claims(pm: Any, data: Data) -> None:
    mean, slope = pm.Normal("mean", 5, 3), pm.Normal("slope", 0, 1, shape=2)
    shape = pm.LogNormal("shape", 0, 1)
    eta = mean + pm.math.dot(data["x"], slope)
    for name in ("brand", "region", "vehicle"):
        level, size = _levels("claims", name, data)
        own = pm.Normal(name, 0, pm.HalfNormal(f"s_{name}", 1), shape=size)
        eta = eta + own[level]
    pm.Gamma("y", alpha=shape, beta=shape * pm.math.exp(-eta), observed=data["y"])


def _pymc_answers(pm: Any, data: Data) -> None:
    mean, slope = pm.Normal("mean", 0, 2), pm.Normal("slope", 0, 1)
    s_region, s_customer = pm.HalfNormal("s_region", 1), pm.HalfNormal("s_customer", 1)
    (customer, number), (_, regions) = (_levels("answers", k, data) for k in ("customer", "region"))
    of_region = pm.Normal("region", mean, s_region, shape=regions)
    of_customer = of_region[np.arange(number) % regions]
    own = pm.Normal("customer", of_customer, s_customer, shape=number)
    pm.Bernoulli("y", logit_p=own[customer] + slope * data["x"], observed=data["y"])


def _pymc_panel(pm: Any, data: Data) -> None:
    slope, tau = pm.Normal("slope", 0, 1), pm.HalfNormal("tau", 2, shape=2)
    correlation = pm.Uniform("correlation", -1, 1)
    pm.Potential("lkj", pm.math.log(1 - correlation**2))  # LKJ with 2 for a pair
    base = pm.Normal("base", 0, 2, shape=4)
    steps = pm.math.concatenate([base[:1], pm.math.exp(base[1:])])
    cut = pm.Deterministic("cut", pm.math.cumsum(steps))
    first = pm.Normal("first", 0, tau[0], shape=400)
    slope_of_first = correlation * tau[1] / tau[0]
    left = tau[1] * pm.math.sqrt(1 - correlation**2)
    second = pm.Normal("second", slope_of_first * first, left, shape=400)
    pm.Deterministic("own", pm.math.stack([first, second], axis=1))
    patient = data["patient"]
    eta = first[patient] + (slope + second[patient]) * data["time"]
    pm.OrderedLogistic("y", eta, cut, observed=data["y"], compute_p=False)


def _pymc_counts(pm: Any, data: Data) -> None:
    eta = pm.Normal("mean", 0, 2)
    for name in ("shop", "product"):
        level, size = _levels("counts", name, data)
        own = pm.Normal(name, 0, pm.HalfNormal(f"s_{name}", 1), shape=size)
        eta = eta + own[level]
    s_week, week = pm.HalfNormal("s_week", 0.5), np.asarray(data["week"])
    first = pm.Normal.dist(0, s_week)
    walk = pm.GaussianRandomWalk("walk", 0, s_week, init_dist=first, shape=104)
    rate = data["exposure"] * pm.math.exp(eta + walk[week])
    pm.Poisson("y", rate, observed=data["y"])


_PYMC: dict[str, Callable[[Any, Data], None]] = {
    "claims": _pymc_claims,
    "answers": _pymc_answers,
    "panel": _pymc_panel,
    "counts": _pymc_counts,
}

ELSEWHERE: dict[str, Callable[[str, Data], Draws]] = {
    "GPBoost": by_gpboost,
    "statsmodels": by_statsmodels,
    "pymc-extras": by_pymc,
}
