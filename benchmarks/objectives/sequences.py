"""A stochastic volatility by the ELBO, importance weights and a particle filter, at equal K.

The series is simulated. Each loss trains the three parameters of the model and the four of the
guide; the log likelihood of the parameters that it finds is then estimated by a filter of 1,000
particles.
"""

import argparse
import time
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax

from numpyro_ext.objectives import IWELBO, VRELBO, FilteringELBO

LOSSES = {
    "VRELBO(1.)": lambda K: VRELBO(1.0, K, gradient="standard"),
    "IWELBO": IWELBO,
    "FilteringELBO": FilteringELBO,
    "FilteringELBO, ess_threshold=1": lambda K: FilteringELBO(K, ess_threshold=1.0),
    "FilteringELBO, score": lambda K: FilteringELBO(K, gradient="score"),
}


def parameters() -> tuple[Any, Any, Any]:
    mu = numpyro.param("mu", 0.0)
    phi = numpyro.param("phi", 0.5, constraint=constraints.unit_interval)
    sigma = numpyro.param("sigma", 0.5, constraint=constraints.positive)
    return mu, phi, sigma


def model(y: Array) -> None:
    def step(carry: Any, y: Any) -> Any:
        h, sd = carry
        h = numpyro.sample("h", dist.Normal(mu + phi * (h - mu), sd))
        numpyro.sample("y", dist.Normal(0, jnp.exp(h / 2)), obs=y)
        return (h, sigma), None

    mu, phi, sigma = parameters()
    scan(step, (mu, sigma / jnp.sqrt(1 - phi**2)), y)


def guide(y: Array) -> None:
    """Normal, around the mean of the next state, moved by the square of the observation."""

    def step(h: Any, y: Any) -> Any:
        loc = level + slope * h + gain * jnp.log(y**2 + 0.01)
        return numpyro.sample("h", dist.Normal(loc, scale)), None

    level, slope, gain = (numpyro.param(name, x) for name, x in START.items())
    scale = numpyro.param("scale", 0.5, constraint=constraints.positive)
    scan(step, numpyro.param("first", 0.0), y)


START = {"level": 0.0, "slope": 0.5, "gain": 0.0}


def series(length: int) -> Array:
    rng, h, y = np.random.default_rng(0), -1.0, []
    for _ in range(length):
        h = -1.0 + 0.95 * (h + 1.0) + 0.3 * rng.standard_normal()
        y.append(np.exp(h / 2) * rng.standard_normal())
    return jnp.asarray(np.array(y))


def mean_bound(loss: Any, params: Any, y: Array, num_keys: int) -> tuple[float, float]:
    """The mean of minus the loss and its standard error."""

    def of_key(key: Array) -> Array:
        return -loss.loss(key, params, model, guide, y)

    values = np.asarray(jax.lax.map(jax.jit(of_key), random.split(random.key(1), num_keys)))
    return values.mean(), values.std() / num_keys**0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print("| T | K | loss | bound | log likelihood | mu | phi | sigma | us a step |")
    print("|---|---|---|---|---|---|---|---|---|")
    for length, K in ((100, 4), (100, 16), (400, 16)):
        y = series(length)
        for name, make in LOSSES.items():
            optim = optax.adam(optax.cosine_decay_schedule(0.02, args.steps))
            svi = SVI(model, guide, optim, make(K))
            svi.run(random.key(0), 2, y, progress_bar=False)
            start = time.perf_counter()
            fit = svi.run(random.key(0), args.steps, y, progress_bar=False)
            seconds = time.perf_counter() - start
            bound, error = mean_bound(make(K), fit.params, y, 500)
            log_lik, error_of_it = mean_bound(FilteringELBO(1000), fit.params, y, 20)
            learnt = " | ".join(f"{fit.params[n]:.2f}" for n in ("mu", "phi", "sigma"))
            print(
                f"| {length} | {K} | `{name}` | {bound:.2f} +- {error:.2f} | {log_lik:.2f} +-"
                f" {error_of_it:.2f} | {learnt} | {seconds / args.steps * 1e6:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
