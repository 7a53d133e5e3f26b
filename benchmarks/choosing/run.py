"""One problem after the other, by what this package has for it and by NumPyro's own.

Nothing is tuned: a method is the three lines of `methods.py`, the same on every problem. The truth
is exact by quadrature, or NUTS (4 chains, kept under `--out`). `worst mean` is the largest error of
a mean in standard deviations, `sd ratio` the mean, and [least, largest], of the standard deviations
over the right ones. `right`: each mean is within 0.2 sd, and each sd within 20 %. `says` is what
`diagnose` finds wrong or could not judge, or `ok`; for NUTS of one chain it is R-hat and ESS.
`seconds` are those of fit and draws, compilation included, without `diagnose`. Rows are kept under
`--out`, so that a table which was stopped goes on.

    python benchmarks/choosing/run.py
    python benchmarks/choosing/run.py --only curved
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
from typing import Any, NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
import methods
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

sys.path.append(str(Path(__file__).parents[1]))
from _shared.nuts import nuts
from _shared.unseen_models import clumps, dugongs
from _shared.verdicts import HEADS, Truth, Verdict, counted, errors, kept, moments

COLUMNS = ("problem", "method", "worst mean", "sd ratio", *HEADS, "seconds")


class Problem(NamedTuple):
    model: Callable[..., None]
    data: tuple[Any, ...]
    compared: tuple[str, ...]
    methods: tuple[str, ...]
    batch: int | None = None
    exact: Callable[[], Truth] | None = None
    same: Callable[..., None] | None = None
    """The same posterior in coordinates that NUTS finds easier, for the truth."""


def many_rows() -> Problem:
    """A Poisson regression of 20,000 counts on five columns."""

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([6]).to_event(1))
        with numpyro.plate("rows", len(x), subsample_size=batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ w)), obs=y[i])

    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(20_000), rng.standard_normal((20_000, 5))])
    y = rng.poisson(np.exp(x @ np.array([0.5, 0.3, -0.2, 0.1, 0.0, 0.4])))
    names = "proxy", "SGHMC", "AutoMultivariateNormal", "NUTS"
    return Problem(model, (x, y.astype(float)), ("w",), names, batch=256)


def curved() -> Problem:
    """Growth of 27 dugongs: four numbers whose posterior is curved."""
    of = dugongs()
    longer = "flow, 16 draws, 10,000 steps"
    names = "flow", longer, "particles", "only draws", "AutoMultivariateNormal", "NUTS"
    return Problem(of.model, of.data, of.compared, names, exact=of.exact)


def several_modes() -> Problem:
    """Measurements that disagree: two modes, of 0.95 and 0.05."""
    of = clumps()
    names = "mixture", "particles", "only draws", "AutoMultivariateNormal", "NUTS"
    return Problem(of.model, of.data, of.compared, names, exact=of.exact)


def hierarchy() -> Problem:
    """The eight schools with their effects as they are, centred."""
    y = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
    sd = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(y: Any, sd: Any, batch: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([8]))
        with numpyro.plate("schools", 8) as i:
            numpyro.sample("y", dist.Normal(theta[i], sd[i]), obs=y[i])

    def same(y: Any, sd: Any, batch: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        z = numpyro.sample("z", dist.Normal().expand([8]))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, sd), obs=y)

    names = "EP", "flow", "only draws", "AutoMultivariateNormal", "NUTS"
    return Problem(model, (y, sd), ("mu", "theta"), names, same=same)


def number_of_a_row() -> Problem:
    """500 counts, more variable than Poisson: each row has a normal number of its own."""

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1))
        with numpyro.plate("rows", len(x), subsample_size=batch) as i:
            z = numpyro.sample("z", dist.Normal(x[i] @ w, s))
            numpyro.sample("y", dist.Poisson(jnp.exp(z)), obs=y[i])

    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(500), rng.standard_normal((500, 2))])
    z = x @ np.array([0.5, 0.3, -0.4]) + 0.6 * rng.standard_normal(500)
    y = rng.poisson(np.exp(z)).astype(float)
    names = "EP", "nested", "AutoNormal", "NUTS"
    return Problem(model, (x, y), ("w", "s"), names)


def sequence() -> Problem:
    """300 returns of zero mean, whose log variance is an autoregression of one lag."""

    def model(y: Any, batch: int | None = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        phi = numpyro.sample("phi", dist.Uniform(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))

        def step(h: Any, _: None) -> tuple[Any, Any]:
            h = numpyro.sample("h", dist.Normal(mu + phi * (h - mu), sigma))
            return h, h

        start = numpyro.sample("start", dist.Normal(mu, 1))
        _, h = scan(step, start, None, len(y))
        numpyro.sample("y", dist.Normal(0, jnp.exp(h / 2)), obs=y)

    rng = np.random.default_rng(0)
    h = [0.0]
    for _ in range(299):
        h.append(0.95 * h[-1] + 0.3 * rng.standard_normal())
    y = np.exp(np.array(h) / 2 - 1) * rng.standard_normal(300)
    names = "banded", "AutoNormal", "AutoMultivariateNormal", "NUTS"
    return Problem(model, (y,), ("h",), names)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "many rows": many_rows,
    "curved": curved,
    "several modes": several_modes,
    "hierarchy": hierarchy,
    "a number in each row": number_of_a_row,
    "sequence": sequence,
}


def truth_of(problem: Problem, folder: Path, name: str) -> Truth:
    if problem.exact is not None:
        return problem.exact()
    model = problem.same or problem.model
    return moments(nuts(folder, name, model, problem.data, problem.compared, draws=2500, x64=True))


def line(name: str, method: str, problem: Problem, truth: Truth) -> tuple[str, Verdict]:
    data = jax.tree.map(jnp.asarray, problem.data)
    options = {} if problem.batch is None else {"batch": problem.batch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = methods.METHODS[method](random.key(1), problem.model, data, options)
        error = errors(fit.draws, truth)
        try:
            verdict = Verdict(error.right(), fit.found())
        except ValueError as refused:  # a fit that is not finite
            verdict = Verdict(right=False, told=str(refused))
    cells = [name, method, f"{error.mean:.2f}", error.spread, *verdict.cells, f"{fit.seconds:.0f}"]
    return f"| {' | '.join(cells)} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--out", type=Path, default=Path("out/choosing"))
    args = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    lines = []
    for name in args.only:
        problem = PROBLEMS[name]()
        truth = truth_of(problem, args.out, name)
        for method in problem.methods:
            row = lambda m=method: line(name, m, problem, truth)  # noqa: B023, E731
            lines.append(kept(args.out, f"{name} {method}", row))
    print(counted(lines))


if __name__ == "__main__":
    main()
