"""The log evidence of two models of `run.py`, by the methods of its tables.

The truth is an integral over a grid (several modes), or importance sampling with 200,000 draws from
the normal distribution at the mode, in double precision (many rows; its own error is printed).
`order 1` is the ELBO, `order 0` the importance-weighted estimate and `order -1` an upper bound,
each minus the truth, in nats with their standard errors; `ESS` is the effective sample size of the
5,000 weights. `seconds` are those of the fit and the bounds, compilation included.

    python benchmarks/choosing/evidence.py
"""

from collections.abc import Callable
import time
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import methods
import numpy as np
from numpyro.infer.util import log_density
import run
from scipy.optimize import minimize
from scipy.special import logsumexp

ORDERS = (1.0, 0.0, -1.0)


def log_joint(problem: run.Problem) -> Callable[[dict[str, Any]], Any]:
    data = jax.tree.map(jnp.asarray, problem.data)
    return jax.jit(jax.vmap(lambda z: log_density(problem.model, data, {}, z)[0]))


def by_grid(problem: run.Problem) -> tuple[float, float]:
    """Of the location and the log of the scale."""
    locs, logs = np.linspace(-20, 20, 4001), np.linspace(-4, 3, 701)
    loc, log_scale = (v.ravel() for v in np.meshgrid(locs, logs))
    values = log_joint(problem)({"loc": loc, "scale": np.exp(log_scale)}) + log_scale
    cell = (locs[1] - locs[0]) * (logs[1] - logs[0])
    return float(logsumexp(np.asarray(values)) + np.log(cell)), 0.0


def by_weights(problem: run.Problem) -> tuple[float, float]:
    """Of the six coefficients ``w``; the second number is the standard error."""
    of = log_joint(problem)
    value = lambda w: -of({"w": w[None]})[0]  # noqa: E731
    slope, curvature = jax.jit(jax.grad(value)), jax.jit(jax.hessian(value))
    mode = minimize(lambda w: float(value(w)), np.zeros(6), jac=lambda w: np.asarray(slope(w))).x
    A = np.linalg.cholesky(np.linalg.inv(np.asarray(curvature(mode))))
    e = np.random.default_rng(0).standard_normal((200_000, 6))
    log_q = -0.5 * (e**2).sum(1) - 3 * np.log(2 * np.pi) - np.log(np.diag(A)).sum()
    values = [np.asarray(of({"w": mode + part @ A.T})) for part in np.split(e, 2000)]
    weights = np.concatenate(values) - log_q
    top = weights.max()
    scaled = np.exp(weights - top)
    return top + np.log(scaled.mean()), scaled.std() / scaled.mean() / np.sqrt(len(e))


PROBLEMS = {
    "several modes": (by_grid, ("mixture", "AutoMultivariateNormal")),
    "many rows": (by_weights, ("proxy", "AutoMultivariateNormal")),
}


def main() -> None:
    columns = ("problem", "method", *(f"order {order:g}" for order in ORDERS), "ESS", "seconds")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name, (exact, names) in PROBLEMS.items():
        problem = run.PROBLEMS[name]()
        with jax.enable_x64(True):
            truth, error = exact(problem)
        data = jax.tree.map(jnp.asarray, problem.data)
        options = {} if problem.batch is None else {"batch": problem.batch}
        for method in names:
            began = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = methods.METHODS[method](random.key(1), problem.model, data, options)
                assert fit.evidence
                found = fit.evidence(alphas=ORDERS)
            seconds = time.perf_counter() - began
            each = zip(found.values, found.standard_errors, strict=True)
            cells = [f"{v - truth:.3f} +- {e:.3f}" for v, e in each]
            cells += [f"{np.min(found.effective_sample_size):.0f}", f"{seconds:.0f}"]
            print(f"| {name} | {method} | {' | '.join(cells)} |", flush=True)
        print(f"\n{name}: {truth:.3f} +- {error:.4f} nats\n", flush=True)


if __name__ == "__main__":
    main()
