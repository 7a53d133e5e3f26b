"""Systems that are more than one name of a script, nothing tuned, on models that are in no page,
example, test or other benchmark.

- *conjugate*: coordinate ascent by `numpyro_ext.expfam`, 200 sweeps, or 300 steps of 0.5 of
  `natural_gradient`, on a factorised q. The ten pumps (gamma rates of Poisson counts, whose own
  rate is gamma), dyestuff (six batches; three inverse gammas and normals), and heads of brothers
  (a normal of four columns, Wishart precision).
- *regularised*: `PosteriorRegularizedELBO(VRELBO(1., 4), ...)` around `AutoRealNVPNormal`, on the
  counts of six insecticides: a mean rate below 3 costs 5 times the square of what is missing.
  The best q is the posterior times exp(slope x rate), with the slope at its own mean.
- *streaming*: six days of 1,061 rows of `fair`, with `forgetting_factor=0.9`, by `EP(model,
  prior=fit)` and by SVI, `AutoMultivariateNormal` and `posterior_as_prior`, from yesterday's
  parameters (`init_params=`) or from a new start each day. The truth is the posterior in which the
  rows of k days ago count 0.9^k times, and so does the first prior.
- *distributed*: `DAEP(model, 4, power=0.5, mean="moments")`, Weibull durations of 62 strikes.
- *local*: `BBAlphaELBO(0.5)` with a `FlowGuide`, whose network sees a row's columns and its
  logarithm of the count, on 300 rows of `randhie`: Poisson visits, with an effect of each row.
- *sequence*: `AutoMarkov` with `VRELBO(1., 4)` on 203 quarters of inflation: a level that is a
  random walk under noise of Student's t, with two scales.
- *hierarchical*: `AutoAuxiliary`, `AutoHVI` (`Trace_ELBO(8)`) and `AutoSemiImplicit`
  (`SemiImplicitELBO()`) on the oxygen demand of six bottles, an asymptote that six points hardly
  show.

Guides run for 5,000 steps of `optax.adam(5e-3)`, engines for 50. The truth is NUTS in double
precision (4 chains of 1,000 + 2,000), kept under `--out`, or 40,000 draws of a Gibbs sampler for
dyestuff and heads, or a quadrature for the pumps. The columns are those of `run.py`.

    python benchmarks/newcomers/systems.py
    python benchmarks/newcomers/systems.py --only conjugate streaming
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

from conjugate import Found, dyestuff, heads, pumps
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
from scipy.optimize import brentq
import statsmodels.api as sm

from numpyro_ext.ep import DAEP, EP
from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoHVI,
    AutoMarkov,
    AutoRealNVPNormal,
    AutoSemiImplicit,
    FlowGuide,
    posterior_as_prior,
)
from numpyro_ext.objectives import (
    VRELBO,
    BBAlphaELBO,
    PosteriorRegularizedELBO,
    SemiImplicitELBO,
)

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import by_guide, judged
from _shared.nuts import nuts
from _shared.unseen_models import standardised, table
from _shared.verdicts import HEADS, Line, Verdict, counted, errors, kept, moments

COLUMNS = ("system", "model", "compared", "worst mean", "sd ratio", *HEADS, "seconds")
ADAM = optax.adam(5e-3)


def by_nuts(out: Path, name: str, model: Any, data: Any, sites: tuple[str, ...]) -> Any:
    return nuts(out, name, model, data, sites, x64=True)


def single(data: Any) -> Any:
    return jax.tree.map(jnp.asarray, data)


INSECTS = """
10 7 20 14 14 12 10 23 17 20 14 13
11 17 21 11 16 14 17 17 19 21 7 13
0 1 7 2 3 1 2 1 3 0 1 4
3 5 12 6 4 3 5 5 5 5 2 4
3 5 3 5 3 6 1 1 3 2 6 4
11 9 15 22 15 16 13 10 26 26 24 13
"""
FLOOR, PRICE = 3.0, 5.0


def insects(out: Path) -> Found:
    """Insects under six sprays (Beall 1942): negative binomial, log rates of a common normal."""

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(2, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        concentration = numpyro.sample("concentration", dist.LogNormal(2.0, 1.0))
        with numpyro.plate("sprays", 6):
            log_rate = numpyro.sample("log_rate", dist.Normal(mu, tau))
        rate = numpyro.deterministic("rate", jnp.exp(log_rate))
        numpyro.sample("y", dist.NegativeBinomial2(rate[:, None], concentration), obs=y)

    rows = table(INSECTS).astype(int)
    shortfall = {"rate": lambda mean: PRICE * jax.nn.relu(FLOOR - mean) ** 2}
    loss = PosteriorRegularizedELBO(VRELBO(1.0, 4), shortfall)
    data = single((rows,))
    fit = by_guide(model, data, AutoRealNVPNormal(model), loss, ADAM)
    sites = ("mu", "tau", "concentration", "log_rate")
    draws = by_nuts(out, "insects", model, (rows,), sites)
    rate = np.exp(draws["log_rate"])

    def tilted(slope: float) -> np.ndarray:
        w = np.exp(slope * (rate[:, 2] - rate[:, 2].mean()))
        return w / w.sum()

    slope = brentq(
        lambda s: s - 2 * PRICE * max(0.0, FLOOR - float(tilted(s) @ rate[:, 2])), 0.0, 20.0
    )
    w = tilted(slope)
    mean = w @ rate
    print(
        f"    slope {slope:.2f}: rate of C {rate[:, 2].mean():.3f} to {mean[2]:.3f}, least other"
        f" {np.delete(mean, 2).min():.2f}, ess {1 / np.sum(w**2):,.0f} of {len(w):,}"
    )
    truth = {}
    for site, x in draws.items():
        m = np.tensordot(w, x, 1)
        truth[site] = m, np.sqrt(np.tensordot(w, (x - m) ** 2, 1))
    return fit, truth


KEEP, DAYS = 0.9, 6


def fair(by: str, out: Path) -> Found:
    """Whether 6,366 readers had an affair (Fair 1978): complementary log-log."""
    data = sm.datasets.fair.load_pandas().data
    x = standardised(data[["rate_marriage", "age", "yrs_married", "religious"]].to_numpy())
    y = (data.affairs.to_numpy() > 0) * 1.0
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].reshape(DAYS, -1, 4), y[order].reshape(DAYS, -1)

    def log_lik(eta: Any, y: Any) -> Any:
        return jnp.where(y > 0, jnp.log(-jnp.expm1(-jnp.exp(eta))), -jnp.exp(eta))

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.plate("rows", len(y)) as i:
            p = -jnp.expm1(-jnp.exp(a + x[i] @ b))
            numpyro.sample("y", dist.Bernoulli(p), obs=y[i])

    def all_days(x: Any, y: Any) -> None:
        first = KEEP ** (-(DAYS - 1) / 2)
        a = numpyro.sample("a", dist.Normal(0, 2 * first))
        b = numpyro.sample("b", dist.Normal(0, first).expand([4]).to_event(1))
        age = jnp.arange(DAYS - 1, -1, -1)[:, None]
        numpyro.factor("rows", jnp.sum(KEEP**age * log_lik(a + x @ b, y)))

    began, fit = time.perf_counter(), None
    for day in range(DAYS):
        today = single((x[day], y[day]))
        if by == "EP":
            engine = EP(model, prior=fit, forgetting_factor=KEEP)
            result = engine.run(random.key(day), 50, *today, progress_bar=False)
            fit = engine, result
        else:
            prior = model if fit is None else posterior_as_prior(model, fit, KEEP)
            svi = SVI(prior, AutoMultivariateNormal(prior), ADAM, VRELBO(1.0, 4))
            first = fit[1].params if fit and by == "SVI, from yesterday" else None
            fit = svi, svi.run(random.key(day), 5000, *today, init_params=first, progress_bar=False)
    found = judged(*fit, today, began, seed=1)
    return found, moments(by_nuts(out, "fair", all_days, (x, y), ("a", "b")))


def strikes(out: Path) -> Found:
    """Days of 62 strikes (Kennan 1985), Weibull on unexpected production."""
    data = sm.datasets.strikes.load_pandas().data
    x, y = standardised(data.iprod.to_numpy()), data.duration.to_numpy()

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(3, 2))
        b = numpyro.sample("b", dist.Normal(0, 1))
        k = numpyro.sample("k", dist.LogNormal(0.0, 1.0))
        with numpyro.plate("rows", len(y)) as i:
            numpyro.sample("y", dist.Weibull(jnp.exp(a + b * x[i]), k), obs=y[i])

    today, began = single((x, y)), time.perf_counter()
    engine = DAEP(model, 4, power=0.5, mean="moments")
    result = engine.run(random.key(1), 50, *today, progress_bar=False)
    found = judged(engine, result, today, began, seed=1)
    return found, moments(by_nuts(out, "strikes", model, (x, y), ("a", "b", "k")))


def doctors(out: Path) -> Found:
    """Visits of 300 persons (the RAND experiment): Poisson, and an effect of each person."""
    from jax.example_libraries import stax

    data = sm.datasets.randhie.load_pandas().data.iloc[::67][:300]
    x = standardised(data[["lncoins", "disea", "physlm"]].to_numpy())
    y = data.mdvis.to_numpy().astype(int)

    def model(x: Any, y: Any) -> None:
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y)) as i:
            z = numpyro.sample("z", dist.Normal(0, 1))
            numpyro.sample("y", dist.Poisson(jnp.exp(a + x[i] @ b + s * z)), obs=y[i])

    net = stax.serial(stax.Dense(32), stax.Elu, stax.Dense(2))
    features = lambda x, y: jnp.column_stack([x, jnp.log1p(y)])  # noqa: E731
    guide = FlowGuide(model, net, plate="rows", features=features, num_flows=0)
    fit = by_guide(model, single((x, y)), guide, BBAlphaELBO(0.5), ADAM)
    return fit, moments(by_nuts(out, "doctors", model, (x, y), ("a", "b", "s", "z")))


def inflation(out: Path) -> Found:
    """Inflation of the United States, quarterly, 1959 to 2009."""
    y = sm.datasets.macrodata.load_pandas().data.infl.to_numpy()

    def model(y: Any) -> None:
        step = numpyro.sample("step", dist.HalfNormal(2))
        noise = numpyro.sample("noise", dist.HalfNormal(4))
        level = numpyro.sample("level", dist.GaussianRandomWalk(step, len(y)))
        numpyro.sample("y", dist.StudentT(4, level, noise), obs=y)

    fit = by_guide(model, single((y,)), AutoMarkov(model), VRELBO(1.0, 4), ADAM)
    return fit, moments(by_nuts(out, "inflation", model, (y,), ("step", "noise", "level")))


def bottles(make: Callable[[Any], Any], loss: Any, out: Path) -> Found:
    """Oxygen demand on seven days (Marske 1967)."""
    t, y = np.array([1.0, 2, 3, 4, 5, 7]), np.array([8.3, 10.3, 19.0, 16.0, 15.6, 19.8])

    def model(t: Any, y: Any) -> None:
        top = numpyro.sample("top", dist.LogNormal(np.log(20.0), 0.7))
        rate = numpyro.sample("rate", dist.LogNormal(np.log(0.5), 1.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        numpyro.sample("y", dist.Normal(top * -jnp.expm1(-rate * t), sigma), obs=y)

    fit = by_guide(model, single((t, y)), make(model), loss, ADAM)
    return fit, moments(by_nuts(out, "bottles", model, (t, y), ("top", "rate", "sigma")))


class Case:
    """A line of the table for each group of sites, from one fit."""

    def __init__(
        self, system: str, method: str, model: Callable[[Path], Found], *groups: tuple[str, ...]
    ) -> None:
        self.system, self.method, self.model, self.groups = system, method, model, groups

    def lines(self, out: Path) -> list[Line]:
        made: dict[str, Any] = {}

        def line(sites: tuple[str, ...]) -> Line:
            if not made:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    made["fit"] = self.model(out)
                for one in seen:
                    print(f"    {one.category.__name__}: {str(one.message)[:300]}")
            fit, truth = made["fit"]
            error = errors(fit.draws, {site: truth[site] for site in sites or truth})
            verdict = Verdict(error.right(), fit.found)
            cells = (self.method, ", ".join(sites) or "all", f"{error.mean:.2f}", error.spread)
            text = f"| {self.system} | {' | '.join([*cells, *verdict.cells])} | {fit.seconds:.1f} |"
            return Line.of(text, verdict)

        return [
            kept(out, f"{self.system} {self.method} {' '.join(sites)}", partial(line, sites))
            for sites in self.groups or ((),)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    hierarchical = {
        "AutoAuxiliary": (AutoAuxiliary, Trace_ELBO(8)),
        "AutoHVI": (AutoHVI, Trace_ELBO(8)),
        "AutoSemiImplicit": (AutoSemiImplicit, SemiImplicitELBO()),
    }
    cases = [
        Case("conjugate", "pumps, ascent", partial(pumps, False)),
        Case("conjugate", "pumps, natural gradient", partial(pumps, True)),
        Case("conjugate", "dyestuff, ascent", dyestuff),
        Case("conjugate", "heads, ascent", heads),
        Case("regularised", "insects", insects),
        *(
            Case("streaming", f"fair, {by}", partial(fair, by))
            for by in ("EP", "SVI, from yesterday", "SVI, from a new start")
        ),
        Case("distributed", "strikes", strikes),
        Case("local", "doctors", doctors, ("a", "b", "s"), ("z",)),
        Case("sequence", "inflation", inflation, ("level",), ("step", "noise")),
        *(
            Case("hierarchical", f"bottles, {name}", partial(bottles, make, loss))
            for name, (make, loss) in hierarchical.items()
        ),
    ]
    names = list(dict.fromkeys(case.system for case in cases))
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=Path("out/systems"))
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    lines = [line for case in cases if case.system in args.only for line in case.lines(args.out)]
    print(counted(lines))


if __name__ == "__main__":
    main()
