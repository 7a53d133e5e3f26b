"""Regressions on many columns: all coefficients of 1,000 and 700, beside the truth or NUTS.

    python benchmarks/groups/columns.py                 # all rows, some 15 minutes of one core
    python benchmarks/groups/columns.py SGHMC           # NUTS and some methods

Neighbouring columns are correlated by .47. *linear*: 4,000 rows, 1,000 columns, a noise that is not
known; the truth is an integral over it. *logistic*: 3,000 rows, 700 columns; the truth is NUTS (two
chains of 400 + 600). Guides are trained by 2,000 steps of Adam of rate .001, and `SGHMC` runs two
chains of 500 + 2,000, nothing tuned. Columns: the mean that is farthest from the right one, in
standard deviations; the least, median and largest ratio of standard deviations; what is said of the
result; processor seconds of a process of its own, with nothing compiled before.
"""

import subprocess
import sys
import tempfile
import time
from typing import Any
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.guides import AutoSplineNormal, AutoStructuredNormal
from numpyro_ext.mcmc import SGHMC

SIZES = {"linear": (4000, 1000), "logistic": (3000, 700)}
GUIDES = AutoStructuredNormal, AutoSplineNormal, AutoMultivariateNormal, AutoNormal
METHODS = [*(guide.__name__ for guide in GUIDES), "SGHMC", "NUTS"]


def linear(x: Any, y: Any) -> None:
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ b, sd), obs=y)


def logistic(x: Any, y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0.0, 5.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=a + x @ b), obs=y)


def data(kind: str) -> tuple[np.ndarray, np.ndarray]:
    rows, k = SIZES[kind]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, k))
    x = x + 0.7 * np.roll(x, 1, axis=1)
    x /= x.std(axis=0)
    if kind == "linear":
        return x, x @ (0.07 * rng.normal(size=k)) + rng.normal(size=rows)
    odds = x @ (0.1 * rng.normal(size=k))
    return x, (rng.uniform(size=rows) < 1 / (1 + np.exp(-odds))).astype(int)


def integral(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Means and standard deviations of the coefficients of *linear*, ``(2, k)``."""
    w, Q = np.linalg.eigh(x.T @ x)
    along, each = Q.T @ x.T @ y, []
    for sd in np.exp(np.linspace(-0.2, 0.2, 81)):
        precision = w / sd**2 + 1
        mean = along / sd**2 / precision
        log_p = (along @ mean - y @ y) / sd**2 / 2 - np.sum(np.log(precision)) / 2
        log_p += (1 - len(y)) * np.log(sd) - sd**2 / 2
        each.append((log_p, Q @ mean, Q**2 @ (1 / precision)))
    log_p, means, variances = (np.array(part) for part in zip(*each, strict=True))
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ means
    return np.array([mean, (p @ (variances + (means - mean) ** 2)) ** 0.5])


def draws_of(method: str, model: Any, x: Any, y: Any) -> tuple[np.ndarray, Any]:
    """Draws of the coefficients, and what ``diagnose`` takes."""
    if method in ("SGHMC", "NUTS"):
        kernel = SGHMC(model) if method == "SGHMC" else NUTS(model)
        lengths = (500, 2000) if method == "SGHMC" else (400, 600)
        chains: Any = "vectorized" if method == "SGHMC" else "sequential"
        mcmc = MCMC(
            kernel,
            num_warmup=lengths[0],
            num_samples=lengths[1],
            num_chains=2,
            chain_method=chains,
            progress_bar=False,
        )
        mcmc.run(random.key(0), x, y)
        return np.asarray(mcmc.get_samples()["b"]), mcmc
    guide = next(guide for guide in GUIDES if guide.__name__ == method)(model)
    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    fit = svi.run(random.key(0), 2000, x, y, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), fit.params, sample_shape=(4000,))
    return np.asarray(draws["b"]), None


def row(kind: str, method: str, truth: str) -> None:
    model = {"linear": linear, "logistic": logistic}[kind]
    x, y = data(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        began = time.process_time()
        draws, mcmc = draws_of(method, model, jnp.asarray(x), jnp.asarray(y))
        seconds = time.process_time() - began
        says = "!!" if any(w.category.__name__ == "InferenceWarning" for w in caught) else "-"
        if method == "SGHMC":
            says = str(diagnose(mcmc)).splitlines()[0].split(": ")[-1]
    found = np.array([draws.mean(axis=0), draws.std(axis=0)])
    if method == "NUTS" and kind == "logistic":
        np.save(truth, found)
    right = integral(x, y) if kind == "linear" else np.load(truth)
    off, ratio = np.max(np.abs(found[0] - right[0]) / right[1]), found[1] / right[1]
    of_ratio = f"{ratio.min():.2f}, {np.median(ratio):.2f}, {ratio.max():.2f}"
    print(f"| {kind} | {method} | {off:.2f} | {of_ratio} | {says} | {seconds:.0f} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        return row(*sys.argv[2:])
    methods = ["NUTS", *(method for method in sys.argv[1:] or METHODS if method != "NUTS")]
    print(
        "| model | method | mean | sd | says | processor s |\n|---|---|---|---|---|---|", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in SIZES:
            for method in methods:
                command = [sys.executable, __file__, "--row", kind, method, f"{folder}/nuts.npy"]
                subprocess.run(command, check=True)
    return None


if __name__ == "__main__":
    main()
