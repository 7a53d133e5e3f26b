"""
Start here
==========

One model, fitted in four ways: the number of calls to a help line of each of 20,000 customers in
eight regions, as a Poisson regression with a level for each region. ``NUTS`` is the reference; a
flow and ``SGHMC`` take 256 rows at a time, and particles take all of them. ``diagnose`` judges each
fit, and ArviZ reads it. The script prints the seconds of each step, and a table of the errors of
means and standard deviations. It exits with 1 if one of them is off by more than 0.15 (of the
standard deviation by ``NUTS``), or if ``diagnose`` finds a fit wrong. ::

    python examples/start_here.py
"""

# sphinx_gallery_thumbnail_path = "pictures/start_here_forest.png"

import argparse
from functools import partial
from pathlib import Path
import sys
import time
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Predictive
import optax

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

parser = argparse.ArgumentParser(description="One model, fitted in four ways.")
parser.add_argument("--rows", type=int, default=20_000)
parser.add_argument("--batch", type=int, default=256, help="rows of a minibatch")
parser.add_argument("--steps", type=int, default=2000, help="of the flow; particles take a quarter")
parser.add_argument("--draws", type=int, default=1000, help="of each of two chains")
parser.add_argument("--particles", type=int, default=200)
parser.add_argument(
    "--tolerance", type=float, default=0.15, help="of means and standard deviations"
)
parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the pictures")
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)

# %%
# The data: three standardised columns, a region, and the calls of each customer.

FEATURES = ["age", "tenure", "spend"]
REGIONS = ["Alba", "Brix", "Cole", "Dorn", "Esk", "Fyne", "Gard", "Holm"]
rng = np.random.default_rng(0)
x = rng.standard_normal((options.rows, 3))
region = rng.choice(8, options.rows, p=[0.3, 0.2, 0.15, 0.12, 0.1, 0.07, 0.04, 0.02])
true_level = rng.normal(0.3, 0.5, 8)
calls = rng.poisson(np.exp(x @ [0.4, -0.2, 0.1] + true_level[region]))
data = jnp.asarray(x, jnp.float32), jnp.asarray(region), jnp.asarray(calls)

# %%
# The model: with ``batch=256`` the plate of the customers holds 256 of them, drawn anew at each
# step, and with ``batch=None`` it holds all. Everything else is plain NumPyro.


def model(x, region, calls=None, batch=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("feature", 3):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("region", 8):
        level = numpyro.sample("level", dist.Normal(mean, spread))
    with numpyro.plate("customer", len(x), subsample_size=batch) as i:
        rate = jnp.exp(x[i] @ slope + level[region[i]])
        obs = None if calls is None else calls[i]
        numpyro.sample("calls", dist.Poisson(rate), obs=obs)


# %%
# ``NUTS``, the reference, whose gradients take all rows. In ArviZ the plates of the model name the
# axes, and ``coords`` their entries.

seconds, verdict, tree, pictures = {}, {}, {}, {}
chains = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
in_arviz = partial(to_arviz, coords={"feature": FEATURES, "region": REGIONS})


def lap(name, since):
    """Keeps and prints the seconds since ``since``, compilation included."""
    seconds[name] = time.perf_counter() - since
    print(f"[{name}: {seconds[name]:.0f} s]", flush=True)


start = time.perf_counter()
nuts = MCMC(NUTS(model), num_warmup=500, num_samples=options.draws, **chains)
nuts.run(jax.random.key(0), *data)
lap("NUTS", start)
start = time.perf_counter()
verdict["NUTS"] = diagnose(nuts)
tree["NUTS"] = in_arviz(nuts)
lap("NUTS, diagnose and to_arviz", start)
print(verdict["NUTS"])
print(az.summary(tree["NUTS"]))

# %%
# A flow on minibatches. The proxy is found by one search for the mode. The flow starts there with
# the covariance there, and the proxy and the gradient ``"stl"`` take away nearly all noise.
# The same lines fit raw columns, which ``NUTS`` by itself does not: the age in years, the tenure in
# months, and what was spent in money.

UNIT, MIDDLE = np.array([12.0, 40.0, 300.0]), np.array([45.0, 60.0, 500.0])
raw = jnp.asarray(x * UNIT + MIDDLE, jnp.float32), *data[1:]
minibatch = {"batch": options.batch}


def fit_flow(name, data):
    start = time.perf_counter()
    proxy = taylor_proxy(model, *data, **minibatch)
    guide = AutoRealNVPNormal(model, init_from=proxy)
    optim = optax.adam(optax.cosine_decay_schedule(2e-3, options.steps))
    svi = SVI(model, guide, optim, VRELBO(1.0, 4, proxy=proxy))
    fit = svi.run(jax.random.key(1), options.steps, *data, **minibatch, progress_bar=False)
    lap(name, start)
    of_fit = {"result": fit, "model_args": data, "model_kwargs": minibatch}
    start = time.perf_counter()
    verdict[name] = diagnose(svi, **of_fit)
    tree[name] = in_arviz(svi, **of_fit, num_samples=2 * options.draws)
    lap(f"{name}, diagnose and to_arviz", start)
    print(verdict[name])
    return svi, guide, fit, of_fit


svi, guide, fit, of_fit = fit_flow("flow", data)
fit_flow("flow, raw columns", raw)

# %%
# ``SGHMC`` on minibatches, whose settings are found before it starts: 20 transitions for a draw.

start = time.perf_counter()
sghmc = MCMC(SGHMC(model, steps_per_sample=20), num_warmup=50, num_samples=options.draws, **chains)
sghmc.run(jax.random.key(2), *data, **minibatch)
lap("SGHMC", start)
start = time.perf_counter()
verdict["SGHMC"] = diagnose(sghmc, num_moves=40)
tree["SGHMC"] = in_arviz(sghmc)
lap("SGHMC, diagnose and to_arviz", start)
print(sghmc.sampler.settings)
print(verdict["SGHMC"])

# %%
# Particles, first on minibatches, which ``diagnose`` finds wrong, and then on all rows.

num_steps = options.steps // 4
points = AutoParticles(model, options.particles)
svi_points = SVI(model, points, particle_step(num_steps), RegularizedSVGD())
for name, how in {"particles, 256 rows": minibatch, "particles": {}}.items():
    start = time.perf_counter()
    fit_points = svi_points.run(jax.random.key(3), num_steps, *data, **how, progress_bar=False)
    lap(name, start)
    of_points = {"result": fit_points, "model_args": data, "model_kwargs": how}
    start = time.perf_counter()
    verdict[name] = diagnose(svi_points, **of_points)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of particles on minibatches, as the table says
        tree[name] = in_arviz(svi_points, **of_points)
    lap(f"{name}, diagnose and to_arviz", start)
    print(verdict[name])

# %%
# All of them in one forest. ArviZ leaves out, without an error, the fits that have fewer draws than
# another, so each is made one sample of the same size, in which particles are repeated.

FITS = ["NUTS", "flow", "SGHMC", "particles"]
RIGHT = [*FITS, "flow, raw columns"]


def one_sample(name, size=2000):
    draws = az.extract(tree[name]).drop_vars(["sample", "chain", "draw"])
    return draws.isel(sample=np.arange(size) % draws.sizes["sample"])


pictures["forest"] = forest = az.plot_forest(
    {name: one_sample(name) for name in FITS},
    var_names=["mean", "spread", "level"],
    labels=["__variable__", "region"],
    visuals={"point_estimate": {"size": 5}},  # smaller than the intervals
    sample_dims=["sample"],
    figure_kwargs={"figsize": (9, 6)},
)
forest.add_legend("model")

# %%
# A posterior predictive check of the flow: how many customers call 0, 1, 2, ... times?

start = time.perf_counter()
predicted = to_arviz(
    svi, **of_fit, num_samples=200, log_likelihood=False, posterior_predictive=True
)
pictures["predictive"] = az.plot_ppc_rootogram(predicted, figure_kwargs={"figsize": (9, 4)})
plt.tight_layout()
lap("posterior predictive", start)

# %%
# Leave-one-out cross-validation: for a guide it corrects for the guide. Particles have none.

start = time.perf_counter()
loo = {name: az.loo(tree[name]) for name in ("NUTS", "SGHMC")}
stats = tree["flow"].sample_stats
loo["flow"] = az.loo_approximate_posterior(tree["flow"], log_p=stats.lp, log_q=stats.log_q)
lap("loo of three fits", start)
print(loo["flow"])

# %%
# Predictions for new customers.

new = jnp.zeros((2, 3)), jnp.array([REGIONS.index("Dorn"), REGIONS.index("Holm")])
predict = Predictive(model, guide=guide, params=fit.params, num_samples=1000)
print(predict(jax.random.key(4), *new)["calls"].mean(0))

# %%
# The table: errors of means in standard deviations, and ratios of standard deviations, each the
# worst of 13 numbers and relative to ``NUTS``.


def numbers(name):
    draws = tree[name].posterior
    if "raw" in name:  # in the units of the others
        mean, slope, level = (draws[site] for site in ("mean", "slope", "level"))
        shift = (slope * MIDDLE).sum("feature")
        draws = {**draws, "mean": mean + shift, "slope": slope * UNIT, "level": level + shift}
    sites = [draws[site].values for site in ("mean", "spread", "slope", "level")]
    return np.concatenate([v.reshape(v.shape[0] * v.shape[1], -1) for v in sites], axis=1)


reference = numbers("NUTS")
centre, sd = reference.mean(0), reference.std(0)
off = []
print(f"{'':<21}{'mean error':>11}{'sd ratio':>15}{'elpd':>11}{'diagnose':>10}{'seconds':>9}")
for name in ["NUTS", "flow", "flow, raw columns", "SGHMC", "particles", "particles, 256 rows"]:
    error = np.abs(numbers(name).mean(0) - centre) / sd
    ratio = numbers(name).std(0) / sd
    elpd = f"{loo[name].elpd:.1f}" if name in loo else "-"
    said = "right" if verdict[name].ok else "wrong"
    print(
        f"{name:<21}{error.max():>8.2f} sd{f'{ratio.min():.2f} to {ratio.max():.2f}':>15}"
        f"{elpd:>11}{said:>10}{seconds[name]:>9.0f}"
    )
    if name in RIGHT and not (
        verdict[name].ok and max(error.max(), np.abs(ratio - 1).max()) <= options.tolerance
    ):
        off.append(name)

for name, shown in pictures.items():  # last, so that a full disk loses nothing else
    shown.savefig(options.out / f"start_here_{name.lower()}.png", dpi=120, bbox_inches="tight")
if off and np.isfinite(options.tolerance):
    sys.exit(f"off by more than {options.tolerance}, or found wrong: {', '.join(off)}")
