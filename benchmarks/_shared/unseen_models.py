"""Models that no other table of the benchmarks has: small ones of the literature with their data,
two hierarchies among them and one whose mass lies at a bound, two of more than 100,000 rows, and
three with modes of unequal weight. What is simulated hangs on fixed seeds.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import OrderedTransform
from sklearn.datasets import load_linnerud

sys.path.append(str(Path(__file__).parents[1]))
from _shared.nuts import nuts
from _shared.verdicts import Truth, moments
from settings import exact

NUTS_DRAWS = {"warmup": 2000, "draws": 5000, "x64": True}
Model = Callable[..., None]


class Unseen(NamedTuple):
    """A model of ``(*data, batch)``, where ``batch`` may be left out for all rows."""

    model: Model
    data: tuple[Any, ...]
    compared: tuple[str, ...]
    """Sites, latent or deterministic, that say whether an answer is right."""
    batch: int | None = None
    """Rows of a minibatch, for a model of many rows."""
    exact: Callable[[], Truth] | None = None
    """Means and standard deviations by quadrature, where NUTS would not mix or is not needed."""
    same: tuple[Model, tuple[Any, ...]] | None = None
    """The same posterior, by a model and data with which NUTS has an easier task."""
    particles: int = 200

    def truth(self, folder: Path, name: str) -> Truth:
        """Means and standard deviations: exact, or of NUTS in double precision, which is kept."""
        if self.exact is not None:
            return self.exact()
        model, data = self.same or (self.model, self.data)
        return moments(nuts(folder, name, model, data, self.compared, **NUTS_DRAWS))

    @property
    def rows(self) -> tuple[Any, ...]:
        return jax.tree.map(jnp.asarray, self.data)

    @property
    def batched(self) -> Model:
        return self.model if self.batch is None else partial(self.model, batch=self.batch)


def standardised(x: np.ndarray) -> np.ndarray:
    return (x - x.mean(0)) / x.std(0)


def table(text: str) -> np.ndarray:
    return np.array([line.split() for line in text.strip().split("\n")], float)


def coefficients(name: str, size: int, scale: float) -> Any:
    return numpyro.sample(name, dist.Normal(0, scale).expand([size]).to_event(1))


def dugongs() -> Unseen:
    """Length of 27 dugongs against age (Carlin and Gelfand 1991), priors as in posteriordb."""
    age = "1 1.5 1.5 1.5 2.5 4 5 5 7 8 8.5 9 9.5 9.5 10 12 12 13 13 14.5 15.5 15.5 16.5 17 22.5 29"
    length = (
        "1.8 1.85 1.87 1.77 2.02 2.27 2.15 2.26 2.47 2.19 2.26 2.4 2.39 2.41 2.5 2.32 2.32 2.43"
        " 2.47 2.56 2.65 2.47 2.64 2.56 2.7 2.72 2.57"
    )

    def model(age: Any, length: Any, batch: int | None = None) -> None:
        alpha = numpyro.sample("alpha", dist.Normal(0, 1000))
        beta = numpyro.sample("beta", dist.Normal(0, 1000))
        decay = numpyro.sample("lambda", dist.Uniform(0.5, 1))
        precision = numpyro.sample("tau", dist.Gamma(1e-4, 1e-4))
        sigma = numpyro.deterministic("sigma", precision**-0.5)
        numpyro.sample("length", dist.Normal(alpha - beta * decay**age, sigma), obs=length)

    data = table(f"{age} 31.5")[0], table(length)[0]
    return Unseen(model, data, ("alpha", "beta", "lambda", "sigma"))


def seeds() -> Unseen:
    """Germination on 21 plates (Crowder 1978): logits with an effect of each plate, centred."""
    germinated = "10 23 23 26 17 5 53 55 32 46 10 8 10 8 23 0 3 22 15 32 3"
    seeds = "39 62 81 51 39 6 74 72 51 79 13 16 30 28 45 4 12 41 30 51 7"

    def model(n: Any, r: Any, batch: int | None = None, centred: bool = True) -> None:
        seed, extract = (np.arange(21) >= 11) * 1.0, np.isin(np.arange(21) % 11, range(5, 11)) * 1.0
        x = np.column_stack([np.ones(21), seed, extract, seed * extract])
        alpha = coefficients("alpha", 4, 1.0)
        sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
        with numpyro.plate("plates", 21):
            if centred:
                b = numpyro.sample("b", dist.Normal(0, sigma))
            else:
                b = numpyro.deterministic("b", sigma * numpyro.sample("z", dist.Normal(0, 1)))
            numpyro.sample("r", dist.Binomial(n, logits=x @ alpha + b), obs=r)

    data = table(seeds)[0].astype(int), table(germinated)[0].astype(int)
    return Unseen(model, data, ("alpha", "sigma", "b"), same=(partial(model, centred=False), data))


RATS = """
151 199 246 283 320 145 199 249 293 354 147 214 263 312 328 155 200 237 272 297 135 188 230 280 323
159 210 252 298 331 141 189 231 275 305 159 201 248 297 338 177 236 285 350 376 134 182 220 260 296
160 208 261 313 352 143 188 220 273 314 154 200 244 289 325 171 221 270 326 358 163 216 242 281 312
160 207 248 288 324 142 187 234 280 316 156 203 243 283 317 157 212 259 307 336 152 203 246 286 321
154 205 253 298 334 139 190 225 267 302 146 191 229 272 302 157 211 250 285 323 132 185 237 286 331
160 207 257 303 345 169 216 261 295 333 157 205 248 289 316 137 180 219 258 291 153 200 244 286 324
"""


def rats() -> Unseen:
    """Weights of 30 rats in five weeks (Gelfand et al. 1990), centred, in grams and days."""

    def model(day: Any, weight: Any, batch: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(jnp.array([200.0, 0.0]), jnp.array([100.0, 10.0])))
        tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([50.0, 5.0])))
        sigma = numpyro.sample("sigma", dist.HalfNormal(50))
        with numpyro.plate("rats", 30):
            a = numpyro.sample("a", dist.Normal(mu[0], tau[0]))
            b = numpyro.sample("b", dist.Normal(mu[1], tau[1]))
        mean = a[:, None] + b[:, None] * day
        numpyro.sample("weight", dist.Normal(mean, sigma), obs=weight)

    data = np.array([8.0, 15, 22, 29, 36]) - 22, table(RATS).reshape(30, 5)
    return Unseen(model, data, ("mu", "tau", "sigma", "a", "b"))


STACK_LOSS = """
80 80 75 62 62 62 62 62 58 58 58 58 58 58 50 50 50 50 50 56 70
27 27 25 24 22 23 24 24 23 18 18 17 18 19 18 18 19 19 20 20 20
89 88 90 87 87 87 93 93 87 80 89 88 82 93 89 86 72 79 80 82 91
42 37 37 28 18 18 19 20 15 14 14 13 11 12 8 7 8 8 9 15 15
"""


def stack_loss() -> Unseen:
    """Loss of ammonia in 21 days (Brownlee 1965; in statsmodels): noise of Student's t."""

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        a = numpyro.sample("a", dist.Normal(0, 100))
        w = coefficients("w", 3, 10.0)
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        numpyro.sample("y", dist.StudentT(4, a + x @ w, sigma), obs=y)

    columns = table(STACK_LOSS)
    return Unseen(model, (standardised(columns[:3].T), columns[3]), ("a", "w", "sigma"))


LONGLEY = """
60323 61122 60171 61187 63221 63639 64989 63761 66019 67857 68169 66513 68655 69564 69331 70551
83 88.5 88.2 89.5 96.2 98.1 99 100 101.2 104.6 108.4 110.8 112.6 114.2 115.7 116.9
234289 259426 258054 284599 328975 346999 365385 363112
2356 2325 3682 3351 2099 1932 1870 3578 2904 2822 2936 4681 3813 3931 4806 4007
1590 1456 1616 1650 3099 3594 3547 3350 3048 2857 2798 2637 2552 2514 2572 2827
107608 108632 109773 110929 112075 113270 115094 116219
397469 419180 442769 444546 482704 502601 518173 554894
117388 118734 120445 121950 123366 125368 127852 130081
"""


def longley() -> Unseen:
    """Employment in 16 years against six columns (Longley 1967; in statsmodels) that are nearly
    collinear."""
    parts = [np.array(line.split(), float) for line in LONGLEY.strip().split("\n")]
    gnp, people = np.append(parts[2], parts[6]), np.append(parts[5], parts[7])
    columns = np.column_stack([parts[1], gnp, *parts[3:5], people, np.arange(16.0)])
    x, y = standardised(columns), standardised(parts[0])

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        w = coefficients("w", 6, 2.0)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    def truth() -> Truth:
        precision, middle = np.full(6, 0.25), np.zeros(6)
        w, sigma = exact.linear_regression(x, y, middle, precision, lambda s: -0.5 * s**2)
        return {"w": w, "sigma": sigma}

    return Unseen(model, (x, y), ("w", "sigma"), exact=truth)


def linnerud() -> Unseen:
    """Chin-ups of 20 men against weight, waist and pulse, with coefficients that may not be
    negative where least squares makes two of them so: most of their mass lies at 0."""

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        w = numpyro.sample("w", dist.HalfNormal(1).expand([3]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(x @ w, sigma), obs=y)

    raw: Any = load_linnerud()
    data = standardised(raw.target), standardised(raw.data[:, 0])
    return Unseen(model, data, ("w", "sigma"))


def clumps() -> Unseen:
    """Location and scale of Cauchy noise on seven measurements that disagree: modes of 0.95 and
    0.05, where the density between them is a tenth of that at the lower one."""
    y = np.array([-2.3, -2.1, -1.7, 1.9, 2.1, 2.4, 3.0])
    usual, log_sd = 0.45, 0.3

    def model(y: Any, batch: int | None = None) -> None:
        loc = numpyro.sample("loc", dist.Normal(0, 5))
        scale = numpyro.sample("scale", dist.LogNormal(np.log(usual), log_sd))
        numpyro.sample("y", dist.Cauchy(loc, scale), obs=y)

    def truth() -> Truth:
        locs, log_scales = np.linspace(-12, 12, 1201), np.log(usual) + np.linspace(-3, 3, 301)
        loc, log_scale = (v.ravel() for v in np.meshgrid(locs, log_scales))
        log_weight = -0.5 * (loc / 5) ** 2 - 0.5 * ((log_scale - np.log(usual)) / log_sd) ** 2
        for value in y:
            log_weight -= log_scale + np.log1p(((value - loc) / np.exp(log_scale)) ** 2)
        points = np.column_stack([loc, np.exp(log_scale)])
        mean, sd = exact.mixed(log_weight, points, np.zeros_like(points))
        return {"loc": (mean[0], sd[0]), "scale": (mean[1], sd[1])}

    return Unseen(model, (y,), ("loc", "scale"), exact=truth)


def components(rows: int, seed: int) -> Unseen:
    """The locations of two components of shares 0.6 and 0.4, simulated: the exchanged pair is a
    second mode, of less weight. With 20 rows it has 0.16 of the mass, 4 nats above the saddle; with
    40 it has 0.14, and 16 nats lie between: who starts in one mode does not find the other."""
    rng = np.random.default_rng(seed)
    y = np.where(rng.random(rows) < 0.4, 3.0, 0.0) + rng.standard_normal(rows)
    share = np.array([0.6, 0.4])

    def model(y: Any, batch: int | None = None) -> None:
        mu = coefficients("mu", 2, 5.0)
        parts = dist.MixtureSameFamily(dist.Categorical(jnp.asarray(share)), dist.Normal(mu, 1))
        with numpyro.plate("data", len(y)):
            numpyro.sample("y", parts, obs=y)

    def truth() -> Truth:
        grid = np.linspace(-5, 8, 651)
        points = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
        log_weight = -0.5 * np.sum((points / 5) ** 2, 1)
        for value in y:
            log_weight += np.log(np.exp(-0.5 * (value - points) ** 2) @ share + 1e-300)
        return {"mu": exact.mixed(log_weight, points, np.zeros_like(points))}

    return Unseen(model, (y,), ("mu",), exact=truth)


def _counted(counts: Any) -> Any:
    """Rows that stand for several equal ones."""
    return nullcontext() if counts is None else numpyro.handlers.scale(scale=counts)


def _many(model: Model, x: np.ndarray, y: np.ndarray, sites: tuple[str, ...], batch: int) -> Unseen:
    """A model of many rows, of which few are different: NUTS takes these, with their counts."""
    rows, counts = np.unique(np.column_stack([x, y]), axis=0, return_counts=True)
    few = rows[:, :-1], rows[:, -1].astype(y.dtype), counts.astype(float)

    def same(x: Any, y: Any, counts: Any) -> None:
        model(x, y, counts=counts)

    return Unseen(model, (x, y), sites, batch, same=(same, few))


def visits() -> Unseen:
    """Visits to a doctor of 200,000 persons, simulated: negative binomial."""
    rng = np.random.default_rng(11)
    binary = rng.random((200_000, 3)) < np.array([0.5, 0.2, 0.7])
    age = rng.integers(-2, 3, 200_000)
    x = np.column_stack([np.ones(200_000), binary, age])
    mean = np.exp(x @ np.array([0.2, -0.3, 0.7, 0.25, 0.15]))
    y = rng.poisson(mean * rng.gamma(1.2, 1 / 1.2, 200_000))

    def model(x: Any, y: Any, batch: int | None = None, counts: Any = None) -> None:
        w = coefficients("w", 5, 1.0)
        concentration = numpyro.sample("concentration", dist.HalfNormal(5))
        with numpyro.plate("persons", len(x), subsample_size=batch) as i, _counted(counts):
            rate = jnp.exp(x[i] @ w)
            numpyro.sample("y", dist.NegativeBinomial2(rate, concentration), obs=y[i])

    return _many(model, x, y, ("w", "concentration"), 200)


def ratings() -> Unseen:
    """120,000 ratings from 0 to 4, simulated: ordered logits."""
    rng = np.random.default_rng(12)
    binary = rng.random((120_000, 2)) < np.array([0.6, 0.1])
    x = np.column_stack([binary, rng.integers(-2, 3, 120_000)])
    latent = x @ np.array([0.4, -1.2, 0.3]) + rng.logistic(size=120_000)
    y = np.searchsorted([-2.5, -1.2, 0.1, 1.8], latent)

    def model(x: Any, y: Any, batch: int | None = None, counts: Any = None) -> None:
        w = coefficients("w", 3, 1.0)
        ordered = dist.TransformedDistribution(
            dist.Normal(0, 3).expand([4]).to_event(1), OrderedTransform()
        )
        cuts = numpyro.sample("cuts", ordered)
        with numpyro.plate("ratings", len(x), subsample_size=batch) as i, _counted(counts):
            numpyro.sample("y", dist.OrderedLogistic(x[i] @ w, cuts), obs=y[i])

    return _many(model, x.astype(float), y, ("w", "cuts"), 300)


MODELS: dict[str, Callable[[], Unseen]] = {
    "dugongs": dugongs,
    "seeds": seeds,
    "rats": rats,
    "stack loss": stack_loss,
    "Longley": longley,
    "Linnerud": linnerud,
    "clumps": clumps,
    "components": partial(components, 20, seed=3),
    "components, far apart": partial(components, 40, seed=0),
    "visits": visits,
    "ratings": ratings,
}
