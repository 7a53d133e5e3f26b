"""Regressions with effects of categories, at a size that NUTS can do and at full size.

Sizes, scales and seeds were written down before anything was run.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

Data = dict[str, np.ndarray]


class Groups(NamedTuple):
    """A model of ``**data`` and of ``batch``, the rows of a minibatch or None for all."""

    model: Callable[..., None]
    data: Data
    truth: dict[str, Any]
    """What the data were drawn from: scales as they are, effects each."""
    dense: Sequence[tuple[str, ...]] = ()
    """Sites with a common mass matrix for NUTS."""
    decentred: bool = False
    """Whether NUTS has the model with its argument ``decentred``."""


def effects(name: str, loc: Any, scale: Any, size: int) -> Any:
    with numpyro.plate(f"levels of {name}", size):
        return numpyro.sample(name, dist.Normal(loc, scale))


def claims(full: bool) -> Groups:
    """Gamma claims by brand, region and vehicle, crossed, with two columns."""
    sizes = (50, 300, 2000) if full else (20, 80, 400)
    N, rng = 500_000 if full else 30_000, np.random.default_rng(1)
    names, scales = ("brand", "region", "vehicle"), (0.25, 0.2, 0.4)
    data: Data = {n: rng.integers(0, J, N) for n, J in zip(names, sizes, strict=True)}
    truth: dict[str, Any] = {"shape": 1.7}
    eta = np.full(N, 7.0)
    for name, size, scale in zip(names, sizes, scales, strict=True):
        truth[name], truth[f"s_{name}"] = scale * rng.normal(size=size), scale
        eta += truth[name][data[name]]
    x = rng.normal(size=(N, 2))
    data |= {"x": x, "y": rng.gamma(1.7, np.exp(eta + x @ [0.1, -0.2]) / 1.7)}

    def model(brand: Any, region: Any, vehicle: Any, x: Any, y: Any, batch: Any = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(5, 3))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 1))
        own = {}
        for name, size in zip(names, sizes, strict=True):
            s = numpyro.sample(f"s_{name}", dist.HalfNormal(1))
            own[name] = effects(name, 0, s, size)
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            level = own["brand"][brand[i]] + own["region"][region[i]] + own["vehicle"][vehicle[i]]
            rate = shape * jnp.exp(-(mean + x[i] @ slope + level))
            numpyro.sample("y", dist.Gamma(shape, rate), obs=y[i])

    return Groups(model, data, truth, [("mean", "brand", "region")])


def answers(full: bool) -> Groups:
    """Ten answers of yes and no of each customer, nested in regions."""
    customers, regions = (100_000, 100) if full else (500, 20)
    rng = np.random.default_rng(2)
    region, customer = np.arange(customers) % regions, np.repeat(np.arange(customers), 10)
    of_region = -0.5 + 0.4 * rng.normal(size=regions)
    own = of_region[region] + 0.8 * rng.normal(size=customers)
    x = rng.normal(size=len(customer))
    y = rng.uniform(size=len(x)) < 1 / (1 + np.exp(-own[customer] - 0.3 * x))
    data = {"customer": customer, "x": x, "y": y.astype(int)}
    truth = {"s_region": 0.4, "s_customer": 0.8, "region": of_region, "customer": own, "slope": 0.3}

    def model(customer: Any, x: Any, y: Any, batch: Any = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        s_region = numpyro.sample("s_region", dist.HalfNormal(1))
        s_customer = numpyro.sample("s_customer", dist.HalfNormal(1))
        of_region = effects("region", mean, s_region, regions)
        own = effects("customer", of_region[jnp.asarray(region)], s_customer, customers)
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            logits = own[customer[i]] + slope * x[i]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[i])

    return Groups(model, data, truth)


def panel(full: bool) -> Groups:
    """Five grades at six visits of 400 patients, each with an intercept and a slope that go
    together, of which one visit in ten is missing; there is one size."""
    rng = np.random.default_rng(3)
    patient, visit = (x.ravel() for x in np.meshgrid(np.arange(400), np.arange(6), indexing="ij"))
    here = rng.uniform(size=len(patient)) > 0.1
    patient, time = patient[here], (visit[here] - 2.5) / 2.5
    own = rng.multivariate_normal(
        [0, 0], [[1.5**2, 0.4 * 1.5 * 0.8], [0.4 * 1.5 * 0.8, 0.8**2]], 400
    )
    eta = own[patient, 0] + (0.5 + own[patient, 1]) * time + rng.logistic(size=len(time))
    y = np.searchsorted([-2.0, -0.7, 0.7, 2.0], eta)

    def model(patient: Any, time: Any, y: Any, batch: Any = None, decentred: bool = False) -> None:
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(2).expand([2]).to_event(1))
        root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
        cut = numpyro.sample(
            "cut",
            dist.TransformedDistribution(
                dist.Normal(0, 2).expand([4]).to_event(1), dist.transforms.OrderedTransform()
            ),
        )
        with numpyro.plate("patients", 400):
            if decentred:
                unit = numpyro.sample("unit", dist.Normal(0, 1).expand([2]).to_event(1))
                own = numpyro.deterministic("own", unit @ (tau[:, None] * root).T)
            else:
                law = dist.MultivariateNormal(jnp.zeros(2), scale_tril=tau[:, None] * root)
                own = numpyro.sample("own", law)
        numpyro.deterministic("correlation", root[1, 0])
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            eta = own[patient[i], 0] + (slope + own[patient[i], 1]) * time[i]
            numpyro.sample("y", dist.OrderedLogistic(eta, cut), obs=y[i])

    data = {"patient": patient, "time": time, "y": y}
    truth = {"tau": np.array([1.5, 0.8]), "own": own, "slope": 0.5, "correlation": 0.4}
    return Groups(model, data, truth, decentred=True)


def counts(full: bool) -> Groups:
    """Counts with an exposure, of shops and products, crossed, over 104 weeks that walk."""
    shops, products, N = (200, 2000, 200_000) if full else (60, 300, 20_000)
    rng = np.random.default_rng(4)
    shop, product = rng.integers(0, shops, N), rng.integers(0, products, N)
    week, exposure = rng.integers(0, 104, N), rng.uniform(0.5, 4, N)
    truth: dict[str, Any] = {"s_shop": 0.3, "s_product": 0.7, "s_week": 0.1}
    truth |= {"shop": 0.3 * rng.normal(size=shops), "product": 0.7 * rng.normal(size=products)}
    truth["walk"] = np.cumsum(0.1 * rng.normal(size=104))
    eta = 0.4 + truth["shop"][shop] + truth["product"][product] + truth["walk"][week]
    data = {"shop": shop, "product": product, "week": week, "exposure": exposure}
    data["y"] = rng.poisson(exposure * np.exp(eta))

    def model(shop: Any, product: Any, week: Any, exposure: Any, y: Any, batch: Any = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        s_shop = numpyro.sample("s_shop", dist.HalfNormal(1))
        s_product = numpyro.sample("s_product", dist.HalfNormal(1))
        s_week = numpyro.sample("s_week", dist.HalfNormal(0.5))
        of_shop, of_product = (
            effects("shop", 0, s_shop, shops),
            effects("product", 0, s_product, products),
        )
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(s_week, 104))
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            eta = mean + of_shop[shop[i]] + of_product[product[i]] + walk[week[i]]
            numpyro.sample("y", dist.Poisson(exposure[i] * jnp.exp(eta)), obs=y[i])

    return Groups(model, data, truth, [("mean", "shop", "walk")])


def visits(full: bool) -> Groups:
    """Counts at three visits of each patient on average, with a column: few rows in each group."""
    patients = 30_000 if full else 1500
    rng = np.random.default_rng(5)
    patient, x = rng.integers(0, patients, 3 * patients), rng.normal(size=3 * patients)
    own = rng.normal(0.2, 0.6, patients)
    y = rng.poisson(np.exp(own[patient] + 0.3 * x))

    def model(patient: Any, x: Any, y: Any, batch: Any = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        s = numpyro.sample("s", dist.HalfNormal(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        own = effects("own", mean, s, patients)
        with numpyro.plate("rows", len(y), subsample_size=batch) as i:
            rate = jnp.exp(own[patient[i]] + slope * x[i])
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    truth = {"mean": 0.2, "s": 0.6, "slope": 0.3, "own": own}
    return Groups(model, {"patient": patient, "x": x, "y": y}, truth)


MODELS: dict[str, Callable[[bool], Groups]] = {
    made.__name__: made for made in (claims, answers, panel, counts, visits)
}
