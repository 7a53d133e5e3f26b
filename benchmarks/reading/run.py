"""How much of the package has to be read in order to understand one public class?

Each row uses one class once on a small model, and records which functions of the package Python
enters while it does so. `files` are the files with at least one such function, `lines` are all
lines of these files, docstrings included, and `functions` are the lines of the recorded functions
alone. Imports are left out, because the whole package is imported before the recording begins, and
so is the construction of what the row uses; a draw, an update and a loss do without the reading of
the model and the start of the chain or of the fit. A process of its own for each row leaves nothing
compiled from the row before. No file is listed by hand, so two versions of the package can be
compared by the same command.

A second table has what a user waits for who does something for the first time: how many programs
JAX compiles, and the processor seconds of the whole process from its start, on a logistic
regression with 30 groups; and both for the same use of other data, with another guide or kernel, in
that process. `--cold` chooses rows of it, and `--row` of the first one; without either, both tables
are made. With `JAX_COMPILATION_CACHE_DIR` set, programs that are found there do not count.

A third table, by `--seconds`, has the processor seconds of a fit in a new process on five small
models over those of NumPyro's NUTS: from the construction of the kernel or guide to its draws, with
compilation and with the seconds of child processes, and without imports. Chains go on until each
latent number has 400 effective draws, after 500 steps of warmup by NUTS and 200 by `SGHMC`, of
which a draw is 20 steps; a flow makes 5,000 steps, and 50 particles 500. Compiled programs are not
kept.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
import importlib
import multiprocessing
import os
from pathlib import Path
import pkgutil
import statistics
import sys
import time
from types import CodeType
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax

import numpyro_ext
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.ep import EP
from numpyro_ext.expfam import NIW, Dirichlet
from numpyro_ext.guides import AutoLaplaceGGN, AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from numpyro_ext.optim import natural_gradient
from numpyro_ext.particles import SVGD, AutoParticles
from numpyro_ext.svae import GMMEP, SVAEELBO, SVAEGuide, decoder_network, recognition_network

PACKAGE = Path(numpyro_ext.__file__).parent
Use = Callable[[], object]


def model(x, batch=None):
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    sd = numpyro.sample("sd", dist.HalfNormal(2))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        numpyro.sample("x", dist.Normal(mean, sd), obs=numpyro.subsample(x, event_dim=0))


X = jnp.linspace(0.0, 6.0, 20)


def a_chain(kernel) -> Use:
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
    return lambda: mcmc.run(random.key(0), X, batch=5)


def a_draw(kernel) -> Use:
    data: tuple = (X,), {"batch": 5}
    state = kernel.init(random.key(0), 2, None, *data)
    return lambda: kernel.sample(state, *data)


def a_fit(guide, loss, model=model, optim=None, data=X) -> Use:
    svi = SVI(model, guide, optax.adam(0.01) if optim is None else optim, loss)
    return lambda: svi.run(random.key(0), 2, data, progress_bar=False)


def a_started_fit(guide, loss) -> tuple[SVI, object]:
    svi = SVI(model, guide, optax.adam(0.01), loss)
    return svi, svi.init(random.key(0), X)


def an_update(guide, loss) -> Use:
    svi, state = a_started_fit(guide, loss)
    return lambda: svi.update(state, X)


def a_loss(guide, loss) -> Use:
    svi, state = a_started_fit(guide, loss)
    params = svi.get_params(state)
    loss.loss(random.key(0), params, model, guide, X)
    return lambda: loss.loss(random.key(1), params, model, guide, X)


def structured() -> Use:
    K, D, concentration = 3, 2, jnp.ones(3)

    def mixture(y):
        pi = numpyro.sample("pi", dist.Dirichlet(concentration))
        with numpyro.plate("components", K):
            Sigma = numpyro.sample("Sigma", dist.InverseWishart(3.0, scale_matrix=jnp.eye(D)))
            mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(D), Sigma))
        decode = numpyro.module("decoder", decoder_network(D), (D,))
        with numpyro.plate("data", len(y)):
            z = numpyro.sample("z", dist.Categorical(pi))
            x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
            numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y)

    niw = {"loc": jnp.zeros((K, D)), "kappa": 1.0, "df": 3.0, "scale_matrix": jnp.eye(D)}
    prior = {"pi": Dirichlet.from_standard(concentration), "components": NIW.from_standard(**niw)}
    guide = SVAEGuide(prior, recognition_network(D), GMMEP())
    steps = {"natural": natural_gradient(0.1, guide.domain), "network": optax.adam(0.01)}
    optim = optax.multi_transform(steps, guide.param_labels)
    return a_fit(guide, SVAEELBO("explicit_only"), mixture, optim, jnp.stack([X, -X], -1))


def a_run_of_ep() -> Use:
    engine = EP(model)
    return lambda: engine.run(random.key(0), 2, X, progress_bar=False)


def a_sweep_of_ep() -> Use:
    engine = EP(model)
    state = engine.init(random.key(0), X)
    return lambda: engine.update(state, X)


def a_laplace() -> Use:
    guide = AutoLaplaceGGN(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())

    def use() -> object:
        params = svi.run(random.key(0), 2, X, progress_bar=False).params
        return guide.sample_posterior(random.key(1), params, X, sample_shape=(2,))

    return use


def a_diagnosis() -> Use:
    guide = AutoNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    result = svi.run(random.key(0), 100, X, progress_bar=False)
    return lambda: diagnose(svi, result=result, model_args=(X,))


ROWS: dict[str, Callable[[], Use]] = {
    "`SGHMC(model, 0.1)`": lambda: a_chain(SGHMC(model, 0.1)),
    "`SGHMC(model, 0.1)`, a draw": lambda: a_draw(SGHMC(model, 0.1)),
    "`SGHMC(model)`, settings found": lambda: a_chain(SGHMC(model)),
    "`VRELBO(0.5)`, `AutoNormal`": lambda: a_fit(AutoNormal(model), VRELBO(0.5)),
    "`VRELBO(0.5)`, a loss": lambda: a_loss(AutoNormal(model), VRELBO(0.5)),
    "`SVGD()`, `AutoParticles`": lambda: a_fit(AutoParticles(model, 10), SVGD()),
    "`SVGD()`, an update": lambda: an_update(AutoParticles(model, 10), SVGD()),
    "`AutoRealNVPNormal`": lambda: a_fit(AutoRealNVPNormal(model), Trace_ELBO()),
    "`AutoLaplaceGGN`": a_laplace,
    "`EP`": a_run_of_ep,
    "`EP`, a sweep": a_sweep_of_ep,
    "`GMMEP`, `SVAEGuide`, `SVAEELBO`": structured,
    "`diagnose(svi)`": a_diagnosis,
}


rng = np.random.default_rng(0)
GROUP, X_OF_ROWS = rng.integers(0, 30, 600), rng.normal(size=600)
LOGITS = rng.normal(size=30)[GROUP] + X_OF_ROWS
type Data = tuple[np.ndarray, ...]
GROUPS = X_OF_ROWS, GROUP, (rng.uniform(size=600) < 1 / (1 + np.exp(-LOGITS))).astype(int)


def groups(x, group, y):
    mean, slope = (numpyro.sample(name, dist.Normal(0, 2)) for name in ("mean", "slope"))
    sd = numpyro.sample("sd", dist.HalfNormal(1))
    with numpyro.plate("groups", 30):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", 600):
        logits = mean + sd * level[group] + slope * x
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def cold_chain(kernel, data: Data) -> Use:
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, progress_bar=False)
    return lambda: mcmc.run(random.key(0), *data)


def cold_fit(guide, loss, data: Data, num_steps: int = 2000) -> Use:
    svi = SVI(groups, guide, optax.adam(0.005), loss)
    return lambda: svi.run(random.key(0), num_steps, *data, progress_bar=False)


def cold_engine(data: Data) -> Use:
    engine = EP(groups)
    return lambda: engine.run(random.key(0), 10, *data, progress_bar=False)


def cold_diagnosis(data: Data) -> Use:
    svi = SVI(groups, AutoNormal(groups), optax.adam(0.01), Trace_ELBO())
    result = svi.run(random.key(0), 2000, *data, progress_bar=False)
    return lambda: diagnose(svi, result=result, model_args=data)


COLD: dict[str, Callable[[Data], Use]] = {
    "`AutoRealNVPNormal`, 2,000 steps": lambda data: cold_fit(
        AutoRealNVPNormal(groups), Trace_ELBO(), data
    ),
    "`VRELBO(0.5)`, `AutoNormal`": lambda data: cold_fit(AutoNormal(groups), VRELBO(0.5), data),
    "`SGHMC(model)`": lambda data: cold_chain(SGHMC(groups), data),
    "`AutoParticles`, 500 steps": lambda data: cold_fit(
        AutoParticles(groups, 50), SVGD(), data, 500
    ),
    "`EP`": cold_engine,
    "`diagnose(svi)`, after the fit": cold_diagnosis,
    "`AutoNormal` and `Trace_ELBO` of NumPyro": lambda data: cold_fit(
        AutoNormal(groups), Trace_ELBO(), data
    ),
    "`NUTS` of NumPyro": lambda data: cold_chain(NUTS(groups), data),
}
"""What is done in a new process, and again on other data; a function of the data prepares it."""


def run_cold(name: str) -> tuple[int, float, int, float]:
    """Programs compiled by a use, and the processor seconds of this process until its end; and both
    of the same use of other data, with another guide or kernel."""
    compiled = []

    def count(event: str, *_: float, **__: object) -> None:
        compiled.append(event.endswith("backend_compile_duration") - event.endswith("cache_hits"))

    jax.monitoring.register_event_duration_secs_listener(count)
    jax.monitoring.register_event_listener(count)

    def used(data: Data) -> tuple[int, float]:
        use = COLD[name](data)
        before, begun = sum(compiled), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use()
        return sum(compiled) - before, time.process_time() - begun

    programs, _ = used(GROUPS)
    spent, (x, group, y) = time.process_time(), GROUPS
    return programs, spent, *used((x[::-1].copy(), group, y))


def robust(x, y):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([4]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.sample("y", dist.StudentT(3, x @ b, scale), obs=y)


def counts(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2, 0.5))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ b), concentration), obs=y)


def growth(t, y):
    top = numpyro.sample("top", dist.LogNormal(2, 1))
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    middle = numpyro.sample("middle", dist.Normal(5, 3))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(top / (1 + jnp.exp(-rate * (t - middle))), noise), obs=y)


def schools(y, error):
    mean = numpyro.sample("mean", dist.Normal(0, 5))
    sd = numpyro.sample("sd", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mean + sd * effect, error), obs=y)


COLUMNS = np.c_[np.ones(200), rng.normal(size=(200, 3))]
TIMES = np.linspace(0, 10, 50)
CURVE = 8 / (1 + np.exp(-0.9 * (TIMES - 4)))
RATES = np.exp(COLUMNS[:, :3] @ [1.0, 0.5, -0.3])
MODELS: dict[str, tuple[Callable[..., object], tuple[np.ndarray, ...]]] = {
    "robust regression": (robust, (COLUMNS, COLUMNS @ [1, 2, 0, -1] + rng.standard_t(3, 200))),
    "30 groups": (groups, GROUPS),
    "counts": (counts, (COLUMNS[:, :3], rng.negative_binomial(3, 3 / (3 + RATES)))),
    "growth": (growth, (TIMES, CURVE + 0.5 * rng.normal(size=50))),
    "eight schools": (
        schools,
        (np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])),
    ),
}
EFFECTIVE, MOST_RUNS = 400, 20


def to_effective(kernel, num_warmup: int, data: tuple[np.ndarray, ...]) -> None:
    mcmc, draws = MCMC(kernel, num_warmup=num_warmup, num_samples=1000, progress_bar=False), []
    for key in range(MOST_RUNS):
        mcmc.run(random.key(key), *data)
        draws.append({name: np.asarray(x) for name, x in mcmc.get_samples().items()})
        sites = [np.concatenate([x[name] for x in draws]) for name in draws[0]]
        if min(np.min(effective_sample_size(site[None])) for site in sites) >= EFFECTIVE:
            return
        mcmc.post_warmup_state = mcmc.last_state
    raise RuntimeError(f"there are no {EFFECTIVE} effective draws after {MOST_RUNS} runs.")


def fitted(guide, loss, num_steps: int, data: tuple[np.ndarray, ...]) -> object:
    svi = SVI(guide.model, guide, optax.adam(0.005), loss)
    params = svi.run(random.key(0), num_steps, *data, progress_bar=False).params
    draws = guide.sample_posterior(random.key(1), params, *data, sample_shape=(400,))
    return jax.block_until_ready(draws)


METHODS: dict[str, Callable[..., object]] = {
    "NUTS": lambda model, data: to_effective(NUTS(model), 500, data),
    "flow": lambda model, data: fitted(AutoRealNVPNormal(model), Trace_ELBO(), 5000, data),
    "`SGHMC`": lambda model, data: to_effective(SGHMC(model, steps_per_sample=20), 200, data),
    "particles": lambda model, data: fitted(AutoParticles(model, 50), SVGD(), 500, data),
}


def processor_seconds() -> float:
    """Of this process, and of its children."""
    return sum(os.times()[:4])


def run_seconds(model: str, method: str) -> float:
    jax.config.update("jax_enable_compilation_cache", False)
    before = processor_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        METHODS[method](*MODELS[model])
    return processor_seconds() - before


def functions_entered(use: Use) -> set[CodeType]:
    """The functions of the package that Python enters while `use` runs."""
    entered = set()
    monitoring = sys.monitoring

    def enter(code: CodeType, offset: int) -> object:
        if PACKAGE in Path(code.co_filename).parents:
            entered.add(code)
        return monitoring.DISABLE  # once is enough

    monitoring.use_tool_id(monitoring.COVERAGE_ID, "reading")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.PY_START, enter)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.PY_START)
    use()
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.NO_EVENTS)
    return entered


def count(path: str | Path) -> int:
    return len(Path(path).read_text().splitlines())


def measure(name: str) -> tuple[dict[str, int], int]:
    """The lines of each file to read, and the lines of the functions alone."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "numpyro_ext."):
        importlib.import_module(module.name)
    use = ROWS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # twenty rows and two draws are too few for a result
        entered = functions_entered(use)
    within = {
        (code.co_filename, line)
        for code in entered
        for first in [code.co_firstlineno]
        for last in [max(line for *_, line in code.co_lines() if line)]
        for line in range(first, last + 1)
    }
    paths = {code.co_filename for code in entered}
    files = {str(Path(path).relative_to(PACKAGE)): count(path) for path in sorted(paths)}
    return files, len(within)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", nargs="*", choices=list(ROWS))
    parser.add_argument("--cold", nargs="*", choices=list(COLD))
    parser.add_argument("--seconds", nargs="*", choices=list(MODELS), help="five small models")
    parser.add_argument("--files", action="store_true", help="list the files of each row")
    args = parser.parse_args()
    if args.row is None and args.cold is None and args.seconds is None:
        args.row, args.cold = list(ROWS), list(COLD)
    if args.row is not None:
        print_lines(args.row or list(ROWS), args.files)
    if args.cold is not None:
        print_programs(args.cold or list(COLD))
    if args.seconds is not None:
        print_seconds(args.seconds or list(MODELS))
    return 0


def processes() -> ProcessPoolExecutor:
    """A new process for each row."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1)


def print_programs(names: list[str]) -> None:
    print("\n| use, from a cold start | programs | processor seconds | of other data | seconds |")
    print("|---|---|---|---|---|")
    with processes() as pool:
        for name, (first, spent, again, more) in zip(names, pool.map(run_cold, names), strict=True):
            print(f"| {name} | {first} | {spent:.1f} | {again} | {more:.1f} |", flush=True)


def print_seconds(models: list[str]) -> None:
    methods = list(METHODS)
    print(f"\n| processor seconds | {' | '.join(methods)} |\n|---|{'---|' * len(methods)}")
    ratios = []
    with processes() as pool:
        for model in models:
            seconds = list(pool.map(run_seconds, [model] * len(methods), methods))
            ratios.append([x / seconds[0] for x in seconds])
            print(f"| {model} | {' | '.join(f'{x:.1f}' for x in seconds)} |", flush=True)
    medians = [statistics.median(x) for x in zip(*ratios, strict=True)]
    print(f"| over NUTS, median | {' | '.join(f'{x:.2f}' for x in medians)} |")


def print_lines(names: list[str], list_files: bool) -> None:
    print("| use | files | lines | functions |")
    print("|---|---|---|---|")
    with processes() as pool:
        for name, (files, functions) in zip(names, pool.map(measure, names), strict=True):
            lines = sum(files.values())
            print(f"| {name} | {len(files)} | {lines:,} | {functions:,} |", flush=True)
            if list_files:
                print(*(f"    {size:>5} {path}" for path, size in files.items()), sep="\n")
    sizes = sorted(count(path) for path in PACKAGE.rglob("*.py"))
    print(f"\nlines of the package: {sum(sizes):,} in {len(sizes)} files")
    print(f"median file: {statistics.median(sizes):g} lines")
    for limit in (300, 400):
        print(f"files over {limit} lines: {sum(size > limit for size in sizes)}")


if __name__ == "__main__":
    sys.exit(main())
