"""Seconds of one compiled piece of each room, to compare two versions of the package.

A kernel makes 40,000 transitions on minibatches, a loss 3,000 steps, a field 200 steps of 100
particles, and EP at most 40 parallel sweeps over 500 rows; each is compiled before, and the least
of so many repetitions counts. Run two versions by turns, since the machine may change meanwhile:

    cd other_version && PYTHONPATH=. python ../this_version/benchmarks/reading/speed.py
"""

import argparse
from collections.abc import Callable
import time
from typing import Any
import warnings

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
from numpyro.infer.autoguide import AutoNormal
import optax

import numpyro_ext
from numpyro_ext.ep import EP
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from numpyro_ext.particles import SVGD, AutoParticles

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((2000, 10)))
Y = jnp.asarray(RNG.integers(0, 2, 2000))


def model(x, y, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def kernel() -> Callable[[], object]:
    sghmc = SGHMC(model, 0.01, friction=1.0, steps_per_sample=20_000)
    mcmc = MCMC(sghmc, num_warmup=0, num_samples=2, progress_bar=False)

    def run() -> object:
        mcmc.run(KEY, X, Y, batch=100)
        return mcmc.get_samples()

    return run


def steps(svi: SVI, number: int, **kwargs: Any) -> Callable[[], object]:
    start = svi.init(KEY, X, Y, **kwargs)

    @jax.jit
    def run(state):
        return lax.fori_loop(0, number, lambda _, s: svi.update(s, X, Y, **kwargs)[0], state)

    return lambda: run(start)


def loss() -> Callable[[], object]:
    return steps(SVI(model, AutoNormal(model), optax.adam(1e-3), VRELBO(0.5)), 3000, batch=100)


def field() -> Callable[[], object]:
    guide = AutoParticles(model, 100, init_from=None)
    return steps(SVI(model, guide, optax.adam(1e-2), SVGD()), 200)


def sweeps() -> Callable[[], object]:
    engine = EP(model, schedule="parallel", tol=1e-30)
    return lambda: engine.run(KEY, 40, X[:500], Y[:500], progress_bar=False).params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    warnings.simplefilter("ignore")
    print(numpyro_ext.__file__)
    for make in (kernel, loss, field, sweeps):
        run, seconds = make(), []
        jax.block_until_ready(run())
        for _ in range(repeats):
            began = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - began)
        print(f"{make.__name__:<8} {min(seconds):.3f}", flush=True)


if __name__ == "__main__":
    main()
