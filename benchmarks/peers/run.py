"""The same work by this package and by what its users would take instead, in one run.

Model, batch, number of particles and data type of a row are the same on both sides. Each side is
one compiled loop of steps; the two take turns, and a time is the shortest of its repeats, so that
other work of the machine falls on both. A ratio below 1 means that this package is faster.

    python benchmarks/peers/run.py             # writes docs/peers.md; or `make bench`
    python benchmarks/peers/run.py --quick     # that everything runs; its times mean nothing

A second table has the times of libraries that do not live beside JAX, as `elsewhere.py` recorded
them in an environment of their own.
"""

import argparse
from collections.abc import Callable, Iterator
import csv
from datetime import date
from importlib.metadata import version
import importlib.util
import os
from pathlib import Path
import platform
from types import ModuleType
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import RenyiELBO, Trace_ELBO, TraceGraph_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
import optax

from numpyro_ext.guides import (
    AutoImplicit,
    AutoMAFNormal,
    AutoMarkov,
    AutoMixtureNormal,
    AutoRealNVPNormal,
)
from numpyro_ext.mcmc import SGHMC, SGLD
from numpyro_ext.objectives import IWELBO, VIMCO, VRELBO, ImplicitELBO, MixtureELBO
from numpyro_ext.optim import ivon
from numpyro_ext.particles import SVGD
from numpyro_ext.scores import RBF

BENCHMARKS = Path(__file__).parents[1]
Loop = Callable[[], Any]
ELSEWHERE = {
    "posteriors, sgld": "`SGLD`",
    "posteriors, sghmc": "`SGHMC`",
    "Pyro, RenyiELBO(0.5)": "`VRELBO(0.5)`",
    "Pyro, RenyiELBO(0)": "`IWELBO()`",
    "Pyro, Trace_ELBO": "`VRELBO(1.)`",
    "Pyro, SVGD": "`SVGD`",
    "PyMC, ADVI": "`VRELBO(1.)`",
    "PyMC, SVGD": "`SVGD`",
}
"""What is recorded of another library, and what stands here for it."""


def sibling(name: str) -> ModuleType:
    """The measurements of another folder, of which a row here is one."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / name / "run.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels, losses, particles = map(sibling, ("sgmcmc", "objectives", "particles"))


class Row(NamedTuple):
    work: str
    here: str
    peer: str
    of_here: Loop
    of_peer: Loop
    steps: int


def of_kernels(steps: int) -> Iterator[Row]:
    for rows in (1000, 1_000_000):
        data, batch = kernels.make_data(rows), 100
        work = f"a transition, batches of 100 of {rows:,} rows, d = 10"
        for Kernel in (SGLD, SGHMC):
            kernel = Kernel(kernels.make_model(batch), kernels.STEP, steps_per_sample=steps)
            run = kernels.kernel_run(kernel, data)
            name = Kernel.__name__
            other = kernels.blackjax_run(name, data, batch, steps)
            yield Row(work, f"`{name}`", f"BlackJAX, {name.lower()}", run, other, steps)
            if name == "SGLD":
                bare = kernels.bare_run(data, batch, steps)
                yield Row(work, "`SGLD`", "a loop written by hand", run, bare, steps)


def discrete(x: Array) -> None:
    w = numpyro.param("w", jnp.zeros((5, x.shape[1])))
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Bernoulli(logits=jnp.zeros(5)).to_event(1))
        numpyro.sample("x", dist.Bernoulli(logits=z @ w).to_event(1), obs=x)


def of_discrete(x: Array) -> None:
    logits = numpyro.param("logits", jnp.zeros((len(x), 5)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("z", dist.Bernoulli(logits=logits).to_event(1))


def path(y: Array) -> None:
    z = numpyro.sample("z", dist.GaussianRandomWalk(0.3, len(y)))
    numpyro.sample("y", dist.Normal(z, 0.5), obs=y)


def of_svi(steps: int) -> Iterator[Row]:
    """Steps of `SVI`: losses with one guide, guides with one loss, an optimiser."""
    x = random.normal(random.key(0), (500, 20))
    y = random.bernoulli(random.key(1), jax.nn.sigmoid(x[:, 0])).astype(float)
    regression = losses.regression

    def loop(loss: Any, Guide: Any, optim: Any = None) -> Loop:
        return losses.stepper(loss, regression, Guide(regression), steps, x, y, optim=optim)

    shown = "a step, logistic regression of 500 rows, d = 20"
    ten, normal = f"{shown}, 10 particles", "`AutoNormal`"
    renyi = loop(RenyiELBO(0.5, 10), AutoNormal)
    elbo = loop(Trace_ELBO(10), AutoNormal)
    yield Row(
        ten, "`VRELBO(0.5)`", "`RenyiELBO(0.5)`", loop(VRELBO(0.5, 10), AutoNormal), renyi, steps
    )
    bound = loop(RenyiELBO(0.0, 10), AutoNormal)
    yield Row(ten, "`IWELBO()`", "`RenyiELBO(0.)`", loop(IWELBO(10), AutoNormal), bound, steps)
    yield Row(ten, "`VRELBO(1.)`", "`Trace_ELBO()`", loop(VRELBO(1.0, 10), AutoNormal), elbo, steps)
    single = loop(VRELBO(0.5, 10, gradient="single"), AutoNormal)
    yield Row(ten, '`VRELBO(0.5, gradient="single")`', "`RenyiELBO(0.5)`", single, renyi, steps)
    mixture = loop(MixtureELBO(10), AutoMixtureNormal)
    yield Row(ten, "`AutoMixtureNormal`", normal, mixture, elbo, steps)
    draws = loop(ImplicitELBO(64), AutoImplicit)
    of_draws = loop(Trace_ELBO(64), AutoBNAFNormal)
    yield Row(
        f"{shown}, 64 particles", "`AutoImplicit`", "`AutoBNAFNormal`", draws, of_draws, steps
    )
    one = Trace_ELBO()
    iaf = loop(one, AutoIAFNormal)
    for Guide in (AutoRealNVPNormal, AutoMAFNormal):
        name = f"`{Guide.__name__}`"
        yield Row(shown, name, "`AutoIAFNormal`", loop(one, Guide), iaf, steps)
    natural = loop(one, AutoNormal, ivon(1e-3))
    yield Row(shown, "`ivon`", "`optax.adam`", natural, loop(one, AutoNormal), steps)
    series = random.normal(random.key(2), (300,))
    banded, dense = (
        losses.stepper(one, path, Guide(path), steps, series)
        for Guide in (AutoMarkov, AutoMultivariateNormal)
    )
    yield Row(
        "a step, a random walk of 300 steps",
        "`AutoMarkov`",
        "`AutoMultivariateNormal`",
        banded,
        dense,
        steps,
    )
    bits = random.bernoulli(random.key(3), 0.3, (100, 20)).astype(float)
    by_score = losses.stepper(VIMCO(num_particles=10), discrete, of_discrete, steps, bits)
    by_graph = losses.stepper(TraceGraph_ELBO(10), discrete, of_discrete, steps, bits)
    work = "a step, 100 rows of 5 bits behind 20, 10 particles"
    yield Row(work, "`VIMCO`", "`TraceGraph_ELBO`", by_score, by_graph, steps)


def of_particles(steps: int) -> Iterator[Row]:
    args = (*particles.problem(particles.DIM), None)
    adam, work = optax.adam(0.01), "a step, 100 particles, d = 50, 1,000 rows"
    field = particles.ours(particles.logistic, 100, args, SVGD(RBF("median")), adam)
    here = particles.loop_of(*field, steps)
    others = {
        "NumPyro's `SVGD`": particles.numpyros(particles.logistic, 100, args),
        "BlackJAX, svgd": particles.blackjaxs(100, args),
    }
    for name, other in others.items():
        yield Row(work, "`SVGD`", name, here, particles.loop_of(*other, steps), steps)


def micros(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def recorded(of_here: dict[tuple[str, str], float]) -> tuple[str, list[str]]:
    """Where and when the other libraries ran, and their rows.

    :param of_here: microseconds of this package, by work and name.
    """
    with Path(__file__).with_name("elsewhere.csv").open(newline="") as file:
        (*_, about), *rows = csv.reader(file)
    lines = []
    for work, name, time, _ in rows:
        here = of_here[work, ELSEWHERE[name]]
        cells = work, ELSEWHERE[name], micros(here), name, micros(float(time))
        lines.append(f"| {' | '.join(cells)} | {here / float(time):.3f} |")
    return about, lines


def page(rows: list[str], of_here: dict[tuple[str, str], float], quick: bool) -> str:
    used = ("jax", "numpyro", "blackjax", "optax")
    versions = ", ".join(f"{name} {version(name)}" for name in used)
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    head = "| work | here | microseconds | instead | microseconds | here / instead |"
    table = "\n".join([head, "|---|---|---|---|---|---|", *rows])
    about, others = recorded(of_here)
    elsewhere = "\n".join([head, "|---|---|---|---|---|---|", *others])
    said = "\n**Made by `--quick`: these times mean nothing.**\n" if quick else ""
    return f"""# Beside its peers

    python benchmarks/peers/run.py       # or `make bench`
{said}
The same work by this package and by what you would take instead: model, batch, particles and data
type are the same on both sides. Each side is one compiled loop of steps; the two take turns, and a
time is the shortest of its repeats. Below 1 this package is faster. {date.today()}, {machine},
{versions}.

{table}

A row of two different methods (a mixture for a normal, a flow for another) says what the step
costs, and not what it is worth: the answers of [](how_to_choose.md) compare results with NumPyro's
own methods on the same problems.

## Libraries that do not live beside JAX

    python -m venv build/peers && build/peers/bin/pip install pyro-ppl posteriors pymc
    build/peers/bin/python benchmarks/peers/elsewhere.py    # writes what the next run.py shows

Recorded in an environment of their own, with one thread, and their steps called one by one as their
documentation does. The times of this package are those of the first table.
{about}.

{elsewhere}

- Not measured: Stan, whose compiler pip does not install.
- Longer comparisons, of results as well as times: `benchmarks/sgmcmc` (bias of the kernels, beside
  BlackJAX and NUTS), `benchmarks/particles` (SVGD, beside NumPyro and BlackJAX),
  `benchmarks/guides` (NumPyro's flows), `benchmarks/large_data` (`Trace_ELBO`) and
  `benchmarks/uci` (networks).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("docs/peers.md"))
    args = parser.parse_args()
    rooms = {of_kernels: 20_000, of_svi: 1000, of_particles: 200}
    lines, of_here = [], {}
    for room, steps in rooms.items():
        for row in room(2 if args.quick else steps):
            repeats = 1 if args.quick else args.repeats
            here, peer = losses.shortest(repeats, row.of_here, row.of_peer)
            times = [1e6 * t / row.steps for t in (here, peer)]
            of_here[row.work, row.here] = times[0]
            cells = row.work, row.here, micros(times[0]), row.peer, micros(times[1])
            lines.append(f"| {' | '.join(cells)} | {here / peer:.2f} |")
            print(lines[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(lines, of_here, args.quick))
    print(f"page: {args.out}")


if __name__ == "__main__":
    main()
