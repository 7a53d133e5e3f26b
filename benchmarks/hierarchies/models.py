"""Hierarchies as people bring them, in raw units, with data that hang on fixed seeds: crossed and
nested effects, 3 to 300 groups of 1 to 84 rows, centred and decentred, counts, answers of yes and
no, durations of which some are censored, correlated slopes, and a series in time.

None was tuned: scales, sizes and seeds were written down before anything was run on them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.reparam import LocScaleReparam

sys.path.append(str(Path(__file__).parents[1]))
from _shared.unseen_models import Model, Unseen
from _shared.verdicts import Truth
from settings import exact

REFERENCES = Path(__file__).with_name("references.tsv")


def reference(name: str) -> Truth:
    """Means and standard deviations of NUTS, which ``run.py --reference`` has written."""
    rows = [line.split("\t") for line in REFERENCES.read_text().splitlines()[1:]]
    sites: dict[str, list[list[str]]] = {}
    for model, site, *numbers in rows:
        if model == name:
            sites.setdefault(site, []).append(numbers)
    values = {site: np.array(numbers, float).squeeze() for site, numbers in sites.items()}
    return {site: (x[..., 0], x[..., 1]) for site, x in values.items()}


def effects(name: str, loc: Any, scale: Any, size: int) -> Any:
    with numpyro.plate(f"groups of {name}", size):
        return numpyro.sample(name, dist.Normal(loc, scale))


def decentred(model: Model, *sites: str) -> Model:
    return handlers.reparam(model, config={site: LocScaleReparam(0) for site in sites})


def hospitals() -> Unseen:
    """5,040 counts with an offset, of 60 hospitals in each of 84 weeks: crossed, of which the weeks
    are decentred."""
    rng = np.random.default_rng(1)
    hospital, week = (x.ravel() for x in np.meshgrid(np.arange(60), np.arange(84), indexing="ij"))
    x = rng.normal(size=(len(week), 3)) * [1.0, 2.0, 0.5]
    days = rng.integers(50, 400, len(week)).astype(float)
    level = -6.3 + 0.45 * rng.normal(size=60)[hospital] + 0.12 * rng.normal(size=84)[week]
    mean = np.exp(level + x @ [0.2, -0.1, 0.3] + np.log(days))
    y = rng.poisson(mean * rng.gamma(6, 1 / 6, len(week)))

    def model(x: Any, hospital: Any, week: Any, days: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(-6, 2))
        s_h = numpyro.sample("s_h", dist.LogNormal(-1, 0.7))
        s_w = numpyro.sample("s_w", dist.LogNormal(-2, 0.7))
        size = numpyro.sample("size", dist.LogNormal(1.5, 1))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([3]).to_event(1))
        hosp, wk = effects("hosp", mean, s_h, 60), effects("wk", 0, s_w, 84)
        log_mean = x @ slope + hosp[hospital] + wk[week] + jnp.log(days)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_mean), size), obs=y)

    compared = ("mean", "s_h", "s_w", "size", "slope", "hosp", "wk")
    return Unseen(decentred(model, "wk"), (x, hospital, week, days, y), compared)


def villages() -> Unseen:
    """Four answers of yes and no in each of 150 villages, nested in 15 districts: decentred."""
    rng = np.random.default_rng(2)
    district = np.arange(150) % 15
    logits = -0.8 + 0.7 * rng.normal(size=15)[district] + 0.9 * rng.normal(size=150)
    y = rng.binomial(4, 1 / (1 + np.exp(-logits)))

    def model(district: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        s_d = numpyro.sample("s_d", dist.HalfNormal(1))
        s_v = numpyro.sample("s_v", dist.HalfNormal(1))
        of_district = effects("district", mean, s_d, 15)
        of_village = effects("village", 0, s_v, 150)
        with numpyro.plate("rows", len(y)):
            logits = of_district[district] + of_village
            numpyro.sample("y", dist.Binomial(4, logits=logits), obs=y)

    compared = ("mean", "s_d", "s_v", "district", "village")
    return Unseen(decentred(model, "district", "village"), (district, y), compared)


def repairs() -> Unseen:
    """Durations in hours of 300 repairs in 25 workshops, of which those still open are censored:
    log-normal, centred, far from 0."""
    rng = np.random.default_rng(3)
    shop, complexity = rng.integers(0, 25, 300), rng.normal(size=300)
    log_time = 6.0 + 0.35 * rng.normal(size=25)[shop] + 0.25 * complexity
    log_time, log_end = log_time + 0.6 * rng.normal(size=300), np.log(rng.uniform(150, 1500, 300))

    def model(shop: Any, complexity: Any, log_time: Any, closed: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(5, 3))
        s_shop = numpyro.sample("s_shop", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        effect = effects("effect", mean, s_shop, 25)
        law = dist.Normal(effect[shop] + slope * complexity, sigma)
        with numpyro.plate("rows", len(log_time)):
            longer = jnp.log1p(-jnp.clip(law.cdf(log_time), 0, 1 - 1e-6))
            numpyro.factor("time", jnp.where(closed, law.log_prob(log_time), longer))

    data = shop, complexity, np.minimum(log_time, log_end), log_time < log_end
    return Unseen(model, data, ("mean", "s_shop", "sigma", "slope", "effect"))


def firms() -> Unseen:
    """Wages of 40 firms in six to ten years each, raw: intercepts and slopes that go together, with
    an LKJ prior, centred."""
    rng = np.random.default_rng(4)
    firm = np.repeat(np.arange(40), rng.integers(6, 11, 40))
    year = rng.integers(0, 12, len(firm)).astype(float)
    own = rng.multivariate_normal([2400.0, 55.0], [[220.0**2, 1800.0], [1800.0, 18.0**2]], 40)
    wage = own[firm, 0] + own[firm, 1] * year + 90 * rng.normal(size=len(firm))

    def model(firm: Any, year: Any, wage: Any, centred: bool = True) -> None:
        mean = numpyro.sample(
            "mean", dist.Normal(jnp.array([2000.0, 0.0]), jnp.array([1000.0, 100.0])).to_event(1)
        )
        tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([500.0, 50.0])).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(200))
        root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
        factor = tau[:, None] * root
        with numpyro.plate("firms", 40):
            if centred:
                own = numpyro.sample("own", dist.MultivariateNormal(mean, scale_tril=factor))
            else:
                z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
                own = numpyro.deterministic("own", mean + z @ factor.T)
        numpyro.deterministic("correlation", root[1, 0])
        with numpyro.plate("rows", len(wage)):
            at_year = own[firm, 0] + own[firm, 1] * year
            numpyro.sample("wage", dist.Normal(at_year, sigma), obs=wage)

    data, compared = (firm, year, wage), ("mean", "tau", "sigma", "correlation", "own")
    return Unseen(model, data, compared, same=(partial(model, centred=False), data))


def eight_schools() -> Unseen:
    """The eight schools (Rubin 1981), centred."""

    def model(sigma: Any, y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        theta = effects("theta", mu, tau, 8)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    sigma = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
    truth = partial(exact.eight_schools, y, sigma, centred=True)
    return Unseen(model, (sigma, y), ("mu", "tau", "theta"), exact=truth)


def sites() -> Unseen:
    """Birds on three sites, 30 counts each: few groups, centred."""
    rng = np.random.default_rng(6)
    site = np.repeat(np.arange(3), 30)
    y = rng.poisson(np.exp(2.5 + np.array([-0.3, 0.1, 0.4])[site]))

    def model(site: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 5))
        s = numpyro.sample("s", dist.HalfNormal(1))
        level = effects("level", mean, s, 3)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Poisson(jnp.exp(level[site])), obs=y)

    def truth() -> Truth:
        points, means = np.linspace(1.6, 3.6, 401), np.linspace(-12, 16, 281)
        scales = np.geomspace(0.03, 8, 101)
        counts = np.bincount(site, y)[:, None] * points - 30 * np.exp(points)
        prior = (means, -0.5 * (means / 5) ** 2), (scales, -0.5 * scales**2)
        mean, s, level = exact.normal_groups(counts, points, *prior)
        return {"mean": mean, "s": s, "level": level}

    return Unseen(model, (site, y), ("mean", "s", "level"), exact=truth)


def words() -> Unseen:
    """Times in milliseconds of 30 readers on 20 words, crossed, in raw units and decentred."""
    rng = np.random.default_rng(7)
    reader, word = (x.ravel() for x in np.meshgrid(np.arange(30), np.arange(20)))
    y = 620 + 80 * rng.normal(size=30)[reader] + 35 * rng.normal(size=20)[word]
    y = y + 110 * rng.normal(size=600)

    def model(reader: Any, word: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(500, 300))
        s_r = numpyro.sample("s_r", dist.HalfNormal(200))
        s_w = numpyro.sample("s_w", dist.HalfNormal(200))
        sigma = numpyro.sample("sigma", dist.HalfNormal(300))
        of_reader, of_word = effects("reader", 0, s_r, 30), effects("word", 0, s_w, 20)
        with numpyro.plate("rows", len(y)):
            level = mean + of_reader[reader] + of_word[word]
            numpyro.sample("y", dist.Normal(level, sigma), obs=y)

    compared = ("mean", "s_r", "s_w", "sigma", "reader", "word")
    return Unseen(decentred(model, "reader", "word"), (reader, word, y), compared)


def catches() -> Unseen:
    """Counts with an offset of 300 boats with one to eight trips each, most of them 0: centred."""
    rng = np.random.default_rng(8)
    boat = np.repeat(np.arange(300), rng.integers(1, 9, 300))
    hours = rng.uniform(1, 12, len(boat))
    y = rng.poisson(hours * np.exp(-2.2 + 0.8 * rng.normal(size=300)[boat]))

    def model(boat: Any, hours: Any, y: Any) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 3))
        s = numpyro.sample("s", dist.HalfNormal(2))
        level = effects("level", mean, s, 300)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Poisson(hours * jnp.exp(level[boat])), obs=y)

    def truth() -> Truth:
        points, means = np.linspace(-9, 4, 301), np.linspace(-3, -1.5, 31)
        scales, total = np.geomspace(0.3, 2, 31), np.bincount(boat, hours)[:, None]
        counts = np.bincount(boat, y)[:, None] * points - total * np.exp(points)
        prior = (means, -0.5 * (means / 3) ** 2), (scales, -0.5 * (scales / 2) ** 2)
        mean, s, level = exact.normal_groups(counts, points, *prior)
        return {"mean": mean, "s": s, "level": level}

    return Unseen(model, (boat, hours, y), ("mean", "s", "level"), exact=truth)


def sales() -> Unseen:
    """A level that walks and a week that repeats, on 84 days, all three scales unknown: innovations
    are standard normals, as a scan draws them."""
    rng = np.random.default_rng(9)
    day = np.arange(84)
    level = 50 + np.cumsum(0.8 * rng.normal(size=84))
    y = level + np.array([-4.0, -2, 0, 1, 2, 5, -2])[day % 7] + 2 * rng.normal(size=84)

    def model(y: Any) -> None:
        start = numpyro.sample("start", dist.Normal(40, 20))
        s_level = numpyro.sample("s_level", dist.HalfNormal(2))
        s_week = numpyro.sample("s_week", dist.HalfNormal(5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with numpyro.plate("days", 84):
            steps = numpyro.sample("steps", dist.Normal(0, 1))
        with numpyro.plate("week", 7):
            week = numpyro.sample("week_z", dist.Normal(0, 1)) * s_week
        level = numpyro.deterministic("level", start + s_level * jnp.cumsum(steps))
        numpyro.deterministic("season", week)
        numpyro.sample("y", dist.Normal(level + week[jnp.arange(84) % 7], sigma), obs=y)

    return Unseen(model, (y,), ("s_level", "s_week", "sigma", "level", "season"))


PARTICLES = 350


def with_truth(made: Callable[[], Unseen]) -> Callable[[], Unseen]:
    """The model with its particles, and by :func:`reference` where its truth is no quadrature."""

    def problem() -> Unseen:
        bare = made()
        exact = bare.exact or partial(reference, made.__name__)
        return bare._replace(exact=exact, particles=PARTICLES)

    return problem


HIERARCHIES: dict[str, Callable[[], Unseen]] = {
    made.__name__: with_truth(made)
    for made in (
        *(sites, eight_schools, repairs, firms, words),
        *(sales, villages, catches, hospitals),
    )
}
EXACT = "sites", "eight_schools", "catches"
