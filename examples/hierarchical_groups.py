"""
One hierarchy, every family
===========================

The investment of eleven American firms over twenty years (Grunfeld's data, in statsmodels), on the
value and the capital of the firm, all as logarithms. Each firm has a level and a slope of its own,
which share a mean and a spread: 28 numbers with a hierarchy of real groups, as most analyses of
grouped data have it, and centred, as one would write it.

The same model goes through every family of the package: normal guides, a flow, a mixture, draws
without a density, stochastic gradients on minibatches of 44 rows, particles, and expectation
propagation. No method is tuned: each is the call of its page under *How to choose*. The reference
is ``NUTS`` on the form in which the slopes are not centred, four chains. ``NUTS`` on the centred
form is a row of the table as well, because where the spread of the slopes is small its trajectories
diverge.

The columns are the largest error of a mean in standard deviations, the smallest and the largest
ratio of a standard deviation, of the levels and slopes of the firms and of the six numbers that
they share, the seconds with compilation, and what ``diagnose`` finds wrong. It knows nothing of the
reference, and it judges all numbers, on the scale of the logarithm where they are positive. So a
line about the tail of a spread towards 0 does not mean that the firms are wrong.

The exit code is 1 if ``NUTS``, the flow, ``SGHMC`` or ``EP`` has a mean of a firm that is off by
more than 0.25 standard deviations, or a standard deviation by more than 25 %, or if ``diagnose`` is
content with a method of which any number is off by more than 0.5. ::

    python examples/hierarchical_groups.py --out out/hierarchical_groups.png

.. image:: /recorded/hierarchical_groups.png
   :alt: The level and the slope of each firm by each method, as medians and 90 % intervals.

.. literalinclude:: /recorded/hierarchical_groups.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/hierarchical_groups.png"

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.reparam import LocScaleReparam
import optax
from statsmodels.datasets import grunfeld

from numpyro_ext.diagnostics import Diagnosis, diagnose
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoImplicit, AutoMixtureNormal, AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, ImplicitELBO, MixtureELBO
from numpyro_ext.optim import find_modes
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

Data = tuple[Array, Array, Array, Array]
SITES = "level slope level_mean slope_mean level_spread slope_spread of_capital noise".split()
OF_FIRMS = 22
SHOULD_BE_RIGHT = "NUTS, centred", "flow", "SGHMC, 44 rows", "EP"


def firms() -> tuple[list[str], Data]:
    """Names, and of each row: the number of the firm, and three logarithms around 0."""
    table = grunfeld.load_pandas().data.sort_values(["firm", "year"])
    names, firm = np.unique(np.asarray(table["firm"], str), return_inverse=True)
    logs = np.log(table[["value", "capital", "invest"]].to_numpy(float))
    value, capital, invest = (jnp.asarray(x) for x in (logs - logs.mean(0)).T)
    return list(names), (jnp.asarray(firm), value, capital, invest)


def model(firm: Array, value: Array, capital: Array, invest: Array, batch: int | None = None):
    level_mean = numpyro.sample("level_mean", dist.Normal(0, 1))
    level_spread = numpyro.sample("level_spread", dist.HalfNormal(1))
    slope_mean = numpyro.sample("slope_mean", dist.Normal(0, 1))
    slope_spread = numpyro.sample("slope_spread", dist.HalfNormal(1))
    of_capital = numpyro.sample("of_capital", dist.Normal(0, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("firms", 11):
        level = numpyro.sample("level", dist.Normal(level_mean, level_spread))
        slope = numpyro.sample("slope", dist.Normal(slope_mean, slope_spread))
    with numpyro.plate("rows", len(firm), subsample_size=batch) as i:
        mean = level[firm[i]] + slope[firm[i]] * value[i] + of_capital * capital[i]
        numpyro.sample("invest", dist.Normal(mean, noise), obs=invest[i])


not_centred = reparam(model, {"slope": LocScaleReparam(0.0)})


class Fit(NamedTuple):
    draws: dict[str, np.ndarray]
    seconds: float
    judge: Callable[[], Diagnosis]


def of_guide(began: float, obj: Any, fit: Any, data: Data) -> Fit:
    draws = obj.guide.sample_posterior(random.key(2), fit.params, *data, sample_shape=(4000,))
    draws = jax.device_get(draws)
    seconds = time.perf_counter() - began
    return Fit(draws, seconds, lambda: diagnose(obj, fit, model_args=data))


def by_svi(Guide: Any, rate: float, loss: Any, steps: int, data: Data) -> Fit:
    began = time.perf_counter()
    optim = optax.adam(optax.cosine_decay_schedule(rate, steps))
    svi = SVI(model, Guide(model), optim, loss)
    return of_guide(began, svi, svi.run(random.key(1), steps, *data, progress_bar=False), data)


def normal_from_the_mode(steps: int, data: Data) -> Fit:
    began = time.perf_counter()
    guide = AutoMultivariateNormal(model)
    start = find_modes(model, *data).whitening.init_params(guide, *data)
    optim = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    svi = SVI(model, guide, optim, VRELBO(1.0, 4))
    fit = svi.run(random.key(1), steps, *data, init_params=start, progress_bar=False)
    return of_guide(began, svi, fit, data)


def by_chains(kernel: Any, warmup: int, draws: int, chains: int, data: Data, **batch: int) -> Fit:
    began = time.perf_counter()
    how = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **how)
    mcmc.run(random.key(1), *data, **batch)
    found = jax.device_get(mcmc.get_samples())
    return Fit(found, time.perf_counter() - began, lambda: diagnose(mcmc))


def particles(num: int, steps: int, data: Data) -> Fit:
    began = time.perf_counter()
    guide = AutoParticles(model, num)
    svi = SVI(model, guide, particle_step(steps), RegularizedSVGD())
    fit = svi.run(random.key(1), steps, *data, progress_bar=False)
    draws = jax.device_get(guide.particles(fit.params))
    seconds = time.perf_counter() - began
    return Fit(draws, seconds, lambda: diagnose(svi, fit, model_args=data))


def propagation(sweeps: int, data: Data) -> Fit:
    began = time.perf_counter()
    engine = EP(model)
    fit = engine.run(random.key(1), sweeps, *data, progress_bar=False)
    return of_guide(began, engine, fit, data)


def numbers(draws: dict[str, np.ndarray]) -> np.ndarray:
    """``(draw, 28)``, the numbers of the firms first."""
    columns = [np.reshape(draws[site], (len(draws[site]), -1)) for site in SITES]
    return np.concatenate(columns, axis=1)


class Row(NamedTuple):
    mean_error: np.ndarray
    ratio: np.ndarray
    content: bool

    def off(self, num: int | None = None) -> float:
        """The largest of the errors of the first ``num`` numbers: of means in standard deviations,
        and of standard deviations as shares of the right ones."""
        return max(self.mean_error[:num].max(), np.abs(self.ratio[:num] - 1).max())


def compare(draws: dict[str, np.ndarray], truth: np.ndarray, content: bool) -> Row:
    x, sd = numbers(draws), truth.std(0)
    return Row(np.abs(x.mean(0) - truth.mean(0)) / sd, x.std(0) / sd, content)


def words(found: Diagnosis) -> str:
    wrong = [f"{row.quantity} {row.shown}" for row in found.rows if row.ok is False]
    return "; ".join(wrong) or ("right" if found.ok else "cannot judge")


def draw_picture(names: list[str], draws: dict[str, dict[str, np.ndarray]], path: Path) -> None:
    fig, axes = plt.subplots(1, 2, figsize=(10, 9), sharey=True, layout="constrained")
    place = np.arange(len(names))[::-1]
    for k, (method, found) in enumerate(draws.items()):
        colour = "k" if k == 0 else f"C{k - 1}"
        for ax, site in zip(axes, ("level", "slope"), strict=True):
            low, mid, high = np.quantile(found[site], [0.05, 0.5, 0.95], axis=0)
            at = place + 0.35 - 0.8 * k / len(draws)
            ends = [mid - low, high - mid]
            ax.errorbar(mid, at, xerr=ends, fmt="o", ms=3, lw=1.2, color=colour, label=method)
    for ax, title in zip(axes, ("level of log investment", "slope of log value"), strict=True):
        ax.set(title=f"{title}, median and 90 %", yticks=place, yticklabels=names)
        ax.set_ylim(-0.6, len(names) - 0.4)
        for line in place[:-1] - 0.5:
            ax.axhline(line, color="0.85", lw=0.8)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--scale", type=float, default=1.0, help="of the length of every run")
    parser.add_argument("--methods", nargs="*", help="beside NUTS; all by default")
    parser.add_argument("--out", type=Path, default=Path("out/hierarchical_groups.png"))
    args = parser.parse_args()

    def many(number: int) -> int:
        return max(8, round(number * args.scale))

    names, data = firms()
    methods: dict[str, Callable[[], Fit]] = {
        "NUTS": lambda: by_chains(
            NUTS(not_centred, target_accept_prob=0.95), many(1000), many(2500), 4, data
        ),
        "NUTS, centred": lambda: by_chains(NUTS(model), many(1000), many(1000), 4, data),
        "AutoNormal": lambda: by_svi(AutoNormal, 5e-3, Trace_ELBO(), many(5000), data),
        "normal from the mode": lambda: normal_from_the_mode(many(2000), data),
        "flow": lambda: by_svi(AutoRealNVPNormal, 2e-3, VRELBO(1.0, 4), many(5000), data),
        "mixture": lambda: by_svi(AutoMixtureNormal, 5e-3, MixtureELBO(), many(5000), data),
        "only draws": lambda: by_svi(AutoImplicit, 1e-2, ImplicitELBO(200), many(3000), data),
        "SGHMC, 44 rows": lambda: by_chains(
            SGHMC(model, steps_per_sample=20), many(50), many(2000), 2, data, batch=44
        ),
        "200 particles": lambda: particles(many(200), many(1000), data),
        "EP": lambda: propagation(many(60), data),
    }
    print(f"{'':21}{'mean error':>15}{'sd ratio, firms':>19}{'shared':>15}{'seconds':>9}")
    fits, rows = {}, {}
    for name in ["NUTS", *(args.methods or list(methods)[1:])]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they say is in the line below
            fit = methods[name]()
            found = fit.judge()
        fits[name] = fit.draws
        row = rows[name] = compare(fit.draws, numbers(fits["NUTS"]), found.ok)
        parts = row.ratio[:OF_FIRMS], row.ratio[OF_FIRMS:]
        firms_sd, shared = (f"{x.min():.2f} to {x.max():.2f}" for x in parts)
        error = f"{row.mean_error.max():.2f} sd"
        print(f"{name:21}{error:>15}{firms_sd:>19}{shared:>15}{fit.seconds:>9.0f}")
        print(f"    diagnose: {words(found)}", flush=True)
    print(f"picture: {args.out}")
    draw_picture(names, fits, args.out)
    judged = [name for name in SHOULD_BE_RIGHT if name in rows]
    right = all(rows[name].off(OF_FIRMS) <= 0.25 for name in judged)
    silent = [name for name, row in rows.items() if row.off() > 0.5 and row.content]
    return 0 if right and not silent else 1


if __name__ == "__main__":
    sys.exit(main())
