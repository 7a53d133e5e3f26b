"""Six models of data that statsmodels brings, chosen before any of them was run."""

from collections.abc import Callable
from pathlib import Path
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import statsmodels.api as sm

sys.path.append(str(Path(__file__).parents[1]))
from _shared.unseen_models import Unseen, standardised


def columns(name: str) -> Any:
    return getattr(sm.datasets, name).load_pandas().data


def engel() -> Unseen:
    """Food expenditure on income, 235 households: Student errors that grow with income."""
    data = columns("engel")

    def model(income: Any, food: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 500))
        b = numpyro.sample("b", dist.Normal(0, 2))
        power = numpyro.sample("power", dist.Normal(0, 1))
        scale = numpyro.sample("scale", dist.HalfNormal(200))
        df = numpyro.sample("df", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(food)):
            spread = scale * (income / 1000) ** power
            numpyro.sample("food", dist.StudentT(df, a + b * income, spread), obs=food)

    sites = ("a", "b", "power", "scale", "df")
    return Unseen(model, (data.income.to_numpy(), data.foodexp.to_numpy()), sites)


def spector() -> Unseen:
    """Whether a grade improved, 32 students: probit on three raw columns."""
    data = columns("spector")
    x, y = data[["GPA", "TUCE", "PSI"]].to_numpy(), data.GRADE.to_numpy()

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 2).expand([3]).to_event(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Bernoulli(dist.Normal().cdf(a + x @ b)), obs=y)

    return Unseen(model, (x, y), ("a", "b"))


def cancer() -> Unseen:
    """Deaths in 301 counties: negative binomial on the log of the population."""
    data = columns("cancer")

    def model(population: Any, deaths: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 2))
        shape = numpyro.sample("shape", dist.LogNormal(1, 2))
        with numpyro.plate("rows", len(deaths)):
            mean = jnp.exp(a + b * jnp.log(population))
            numpyro.sample("deaths", dist.NegativeBinomial2(mean, shape), obs=deaths)

    return Unseen(model, (data.population.to_numpy(), data.cancer.to_numpy()), ("a", "b", "shape"))


def scotland() -> Unseen:
    """Votes for a tax, 32 districts: Gamma with a log link on five columns, which are standardised:
    on the raw ones NUTS finds no place to start."""
    data = columns("scotland")
    x = standardised(data[["COUTAX", "UNEMPF", "MOR", "ACT", "AGE"]].to_numpy())

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 0.1).expand([5]).to_event(1))
        shape = numpyro.sample("shape", dist.LogNormal(3, 2))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Gamma(shape, shape / jnp.exp(a + x @ b)), obs=y)

    return Unseen(model, (x, data.YES.to_numpy()), ("a", "b", "shape"))


def schools() -> Unseen:
    """Pupils above the median, 303 districts: beta-binomial on four columns, standardised for the
    same reason."""
    data = columns("star98")
    x = standardised(data[["LOWINC", "PERASIAN", "PERBLACK", "PTRATIO"]].to_numpy())
    total = (data.NABOVE + data.NBELOW).to_numpy()

    def model(x: Any, total: Any, above: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 0.5).expand([4]).to_event(1))
        size = numpyro.sample("size", dist.LogNormal(3, 2))
        with numpyro.plate("rows", len(above)):
            p = 1 / (1 + jnp.exp(-(a + x @ b)))
            kind = dist.BetaBinomial(p * size, (1 - p) * size, total)
            numpyro.sample("above", kind, obs=above)

    return Unseen(model, (x, total, data.NABOVE.to_numpy()), ("a", "b", "size"))


def sunspots() -> Unseen:
    """309 years of sunspots: Student autoregression of order 2, raw numbers."""
    spots = columns("sunspots").SUNACTIVITY.to_numpy()
    before = np.stack([spots[1:-1], spots[:-2]], 1)

    def model(before: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 50))
        phi = numpyro.sample("phi", dist.Normal(0, 1).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(50))
        df = numpyro.sample("df", dist.Gamma(2, 0.1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.StudentT(df, a + before @ phi, scale), obs=y)

    return Unseen(model, (before, spots[2:]), ("a", "phi", "scale", "df"))


STATSMODELS: dict[str, Callable[[], Unseen]] = {
    "engel": engel,
    "spector": spector,
    "cancer": cancer,
    "scotland": scotland,
    "schools": schools,
    "sunspots": sunspots,
}
