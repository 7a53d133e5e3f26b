"""Quick start: one model, four posteriors
=======================================

Swap a loss, a guide or a kernel, and keep the rest of the script: logistic regression with a learnt
prior scale on the breast-cancer data, fitted by

- ``NUTS``, the reference;
- ``VRELBO(0.5)`` with ``AutoRealNVPNormal`` through ``SVI``, on all rows (with a minibatch this
  bound is biased unless alpha = 1);
- ``SGHMC`` through ``MCMC``, on minibatches of 100 rows;
- ``RegularizedSVGD`` with ``AutoParticles`` and ``particle_step`` through ``SVI``, on all rows.

``to_arviz`` converts all four. The script prints one table and the summary of each, and saves a
picture. The exit code is 1 if a posterior mean is further than 0.3 posterior standard deviations
from NUTS's. ::

    python examples/quickstart.py --out out/quickstart.png

.. image:: /recorded/quickstart.png
   :alt: The four posteriors of the quick start.

.. literalinclude:: /recorded/quickstart.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/quickstart.png"

import argparse
from functools import partial
from pathlib import Path
import sys
import time
from typing import NamedTuple

import arviz as az
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, log_likelihood
import optax

from numpyro_ext.diagnostics import pareto_khat, to_arviz
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step
from numpyro_ext.targets import breast_cancer, logistic_regression

BATCH = 100
TOLERANCE = 0.3  # posterior standard deviations
SITES = ("scale", "intercept", "weights")


class Fit(NamedTuple):
    posterior: object  # a DataTree
    seconds: float
    khat: float


def fit_nuts(rng_key, x, y) -> Fit:
    start = time.perf_counter()
    mcmc = MCMC(
        NUTS(logistic_regression),
        num_warmup=500,
        num_samples=1500,
        num_chains=2,
        chain_method="vectorized",
    )
    mcmc.run(rng_key, x, y)
    return Fit(to_arviz(mcmc, model_args=(x, y)), time.perf_counter() - start, np.nan)


def fit_vr(rng_key, x, y) -> Fit:
    start = time.perf_counter()
    guide = AutoRealNVPNormal(logistic_regression)
    optim = optax.adam(optax.cosine_decay_schedule(1e-2, 4000))
    svi = SVI(logistic_regression, guide, optim, VRELBO(0.5, num_particles=10))
    result = svi.run(rng_key, 4000, x, y)
    posterior = to_arviz(svi, result=result, model_args=(x, y), num_samples=3000)
    return Fit(posterior, time.perf_counter() - start, float(pareto_khat(posterior).khat))


def fit_sghmc(rng_key, x, y) -> Fit:
    start = time.perf_counter()
    model = partial(logistic_regression, subsample_size=BATCH)
    kernel = SGHMC(model, steps_per_sample=20)  # it finds its own settings
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, num_chains=2, chain_method="vectorized")
    mcmc.run(rng_key, x, y)
    return Fit(to_arviz(mcmc, model_args=(x, y)), time.perf_counter() - start, np.nan)


def fit_particles(rng_key, x, y) -> Fit:
    start = time.perf_counter()
    guide = AutoParticles(logistic_regression, num_particles=200)
    # All particles see the same minibatch, so its noise would move them together: take all rows.
    svi = SVI(logistic_regression, guide, particle_step(1000), RegularizedSVGD())
    result = svi.run(rng_key, 1000, x, y)
    posterior = to_arviz(svi, result=result, model_args=(x, y))
    return Fit(posterior, time.perf_counter() - start, np.nan)


METHODS = {
    "NUTS": fit_nuts,
    "VRELBO(0.5) + AutoRealNVPNormal": fit_vr,
    "SGHMC, batch 100": fit_sghmc,
    "RegularizedSVGD, 200 particles": fit_particles,
}


def coordinates(posterior) -> np.ndarray:
    """Draws of all parameters side by side, shape ``(draws, 12)``."""
    group = posterior["posterior"]
    draws = [np.asarray(group[name]) for name in SITES]
    return np.concatenate([d.reshape(d.shape[0] * d.shape[1], -1) for d in draws], axis=1)


def held_out(posterior, x, y) -> float:
    """Mean log predictive density per held-out row, in nats."""
    group = posterior["posterior"]
    draws = {name: jnp.asarray(group[name].values) for name in SITES}
    rows = log_likelihood(logistic_regression, draws, x, y, batch_ndims=2)["y"]
    rows = rows.reshape(-1, rows.shape[-1])
    return float(jnp.mean(logsumexp(rows, axis=0) - jnp.log(rows.shape[0])))


def draw_picture(fits: dict[str, Fit], names: list[str], path: Path) -> None:
    fig, axes = plt.subplots(3, 4, figsize=(14, 8), constrained_layout=True)
    for j, (ax, name) in enumerate(zip(axes.flat, names, strict=True)):
        for label, fit in fits.items():
            density_x, density, _ = az.kde(coordinates(fit.posterior)[:, j])
            style = {"color": "black", "lw": 2.5, "alpha": 0.5} if label == "NUTS" else {"lw": 1.5}
            ax.plot(density_x, density, label=label, **style)
        ax.set(title=name, yticks=[])
        ax.spines[["left", "right", "top"]].set_visible(False)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    fig.suptitle("Breast cancer, logistic regression: four posteriors of one model")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/quickstart.png"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    data = breast_cancer()
    keys = random.split(random.key(options.seed), len(METHODS))
    fits = {}
    for key, (label, fit) in zip(keys, METHODS.items(), strict=True):
        print(f"\n{label}", flush=True)
        fits[label] = fit(key, data.x_train, data.y_train)

    for label, fit in fits.items():
        print(f"\n{label}\n{az.summary(fit.posterior, var_names=list(SITES))}")

    reference = coordinates(fits["NUTS"].posterior)
    print(
        "\nErrors against NUTS, worst of 12 parameters; held-out log predictive density per"
        " row, nats.\n"
        f"\n{'method':<34}{'|mean error|/sd':>16}{'sd ratio':>16}"
        f"{'k-hat':>8}{'held-out':>10}{'seconds':>9}"
    )
    worst = {}
    for label, fit in fits.items():
        draws = coordinates(fit.posterior)
        error = np.abs(draws.mean(0) - reference.mean(0)) / reference.std(0)
        ratio = draws.std(0) / reference.std(0)
        worst[label] = float(error.max())
        khat = "-" if np.isnan(fit.khat) else f"{fit.khat:.2f}"
        print(
            f"{label:<34}{worst[label]:>16.3f}{f'{ratio.min():.2f}-{ratio.max():.2f}':>16}{khat:>8}"
            f"{held_out(fit.posterior, data.x_test, data.y_test):>10.4f}{fit.seconds:>9.1f}"
        )

    names = ["prior scale", "intercept", *data.names]
    draw_picture(fits, names, options.out)
    print(f"\nPicture: {options.out}")

    off = [label for label, error in worst.items() if not error <= TOLERANCE]
    if off:
        print(
            f"\nA posterior mean is off by more than {TOLERANCE} standard deviations:"
            f" {', '.join(off)}."
        )
    return 1 if off else 0


if __name__ == "__main__":
    if main():
        sys.exit(1)
