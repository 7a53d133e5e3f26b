"""
Bayesian neural networks
========================

One network of Flax, fitted in seven ways to scikit-learn's diabetes (a number) and digits (ten
classes), and scored on rows that were left out. ::

    python examples/networks.py
"""

# sphinx_gallery_thumbnail_path = "pictures/networks.png"

from functools import partial
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpyro
from numpyro.contrib.module import random_nnx_module
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
from sklearn.datasets import load_diabetes, load_digits
from sklearn.model_selection import train_test_split

from numpyro_ext.diagnostics import (
    predictive_scores,
    regression_calibration,
    reliability_bins,
    restarts,
)
from numpyro_ext.ep import PBP
from numpyro_ext.guides import AutoDropout, AutoLaplaceGGN, init_to_fan_in
from numpyro_ext.mcmc import SGHMC, CyclicalSchedule
from numpyro_ext.optim import ivon

STEPS, BATCH = 2000, 50


class Net(nnx.Module):
    def __init__(self, inputs, outputs):
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(inputs, 50, rngs=rngs)
        self.out = nnx.Linear(50, outputs, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def regression(x, y=None, batch=None):
    net = random_nnx_module("net", Net(x.shape[1], 1), dist.Normal(0, 1))
    precision = numpyro.sample("precision", dist.Gamma(1, 0.1))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        f = net(numpyro.subsample(x, event_dim=1))[..., 0]
        y = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f, precision**-0.5), obs=y)


def classes(x, y=None, batch=None):
    net = random_nnx_module("net", Net(x.shape[1], 10), dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        logits = net(numpyro.subsample(x, event_dim=1))
        y = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def falling(rate):
    return optax.cosine_decay_schedule(rate, STEPS)


def svi_of(model, method):
    start = init_to_fan_in()
    if method in ("Adam", "ivon"):  # of a mean field
        optim = ivon(falling(0.1)) if method == "ivon" else optax.adam(falling(0.01))
        guide = AutoNormal(model, init_loc_fn=start, init_scale=0.02)
        return SVI(model, guide, optim, Trace_ELBO(4))
    if method == "dropout":
        guide = AutoDropout(model, keep_prob=0.95, init_loc_fn=start)
        return SVI(model, guide, optax.adam(falling(0.01)), Trace_ELBO(4))
    if method == "Laplace":
        guide = AutoLaplaceGGN(model, structure="full" if model is regression else "last_layer")
    else:
        guide = AutoDelta(model, init_loc_fn=start)
    return SVI(model, guide, optax.adam(falling(0.01)), Trace_ELBO())


def sghmc(model, rows):
    """The first factor is 0.3 of the noise of a row, as a share of the spread of y."""
    schedule = CyclicalSchedule(0.2 / rows**0.5, cycle_length=500)
    start = init_to_fan_in()
    kernel = SGHMC(model, schedule, friction=10.0, steps_per_sample=10, init_strategy=start)
    return MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)


def fits(model, train):
    """Each method with what it returned."""
    data, key = {"batch": BATCH, "progress_bar": False}, jax.random.key(0)
    for method in ("one mode", "Adam", "ivon", "Laplace", "dropout"):
        svi = svi_of(model, method)
        yield method, svi, svi.run(key, STEPS, *train, **data)
    found = restarts(partial(svi_of, model, "one mode"), key, 5, STEPS, *train, **data)
    yield "five modes", svi_of(model, "one mode"), found
    mcmc = sghmc(model, len(train[0]))
    mcmc.run(key, *train, batch=BATCH)
    yield "SGHMC", mcmc, None
    if model is regression:
        pbp = PBP([train[0].shape[1], 50, 1])
        yield "PBP", pbp, pbp.run(key, 40, *train, progress_bar=False)


def split(x, y):
    x, x_test, y, y_test = map(jnp.asarray, train_test_split(x, y, test_size=0.25, random_state=0))
    return (x, y), (x_test, y_test)


train, test = split(*load_diabetes(return_X_y=True))
units = [(a.mean(0), a.std(0)) for a in train]  # of the rows of the fit alone
diabetes = [
    tuple((a - mean) / sd for a, (mean, sd) in zip(rows, units, strict=True))
    for rows in (train, test)
]
x, y = load_digits(return_X_y=True)
digits = split(x / 16, y)

fig, (left, *right) = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
intervals, shown, first = {}, iter(right), None
for model, (train, test) in ((regression, diabetes), (classes, digits)):
    of_numbers, new = model is regression, {"model_args": test, "num_samples": 200}
    error = "RMSE" if of_numbers else "wrong"
    print(f"{model.__name__:12}{error:>6}{'log density':>17}{'calibration (perfect)':>23}")
    for name, fit, result in fits(model, train):
        scores = predictive_scores(fit, result, **new)
        wrong = scores.rmse if of_numbers else 1 - scores.accuracy
        density = f"{scores.log_density:.3f} +- {scores.log_density_error:.3f}"
        calibration = f"{scores.calibration_error:.4f} ({scores.perfect_calibration_error:.4f})"
        print(f"{name:12}{wrong:6.3f}{density:>17}{calibration:>23}", flush=True)
        first = scores if of_numbers and name == "one mode" else first
        if of_numbers and name in ("one mode", "five modes", "ivon", "Laplace"):
            intervals[name] = regression_calibration(fit, result, **new)
        if not of_numbers and name in ("one mode", "ivon"):
            ax, bins = next(shown), reliability_bins(fit, result, **new)
            ax.bar(jnp.arange(15) / 15, bins.accuracy, 1 / 15, align="edge", alpha=0.75)
            ax.set(title=f"digits: {name}", xlabel="probability of the most probable class")
            ax.set(ylabel="share that is right")
print(first)
for name, each in intervals.items():
    left.plot(each.levels, each.empirical, "o-", label=f"{name}, error {each.error:.2g}")
left.set(title="diabetes", xlabel="stated probability", ylabel="share of the observations")
left.legend()
for ax in fig.axes:
    ax.axline((0, 0), slope=1, color="0.4", linewidth=1)
Path("out").mkdir(exist_ok=True)
fig.savefig("out/networks.png", dpi=120)
