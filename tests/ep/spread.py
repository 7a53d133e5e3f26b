"""A fit of which two processes have the rows; ``test_processes.py`` starts it and reads what it
saves.
"""

import sys

import jax
from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_ext.data import HostArray
from numpyro_ext.ep import StochasticEP
from tests.mcmc.spread import along


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=y[i])


def rows():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 2)).astype(np.float32)
    return x, (rng.random(40) < 1 / (1 + np.exp(-x @ [1.0, -0.5]))).astype(np.int32)


def fit(*data):
    engine = StochasticEP(model, batch_size=8)
    # The same key in every process, also where the keys of the suite are shifted.
    key = random.wrap_key_data(np.zeros(2, np.uint32))
    result = engine.run(key, 12, *data, progress_bar=False)
    return {**result.params, "losses": result.losses}


if __name__ == "__main__":
    path, address, rank = sys.argv[1:]
    jax.distributed.initialize(address, 2, int(rank))
    sharding = along("data", data=2)
    mine = slice(0, 15) if rank == "0" else slice(15, None)  # parts of unequal size
    on_host = [HostArray(x[mine], sharding=sharding) for x in rows()]
    spread = [
        jax.make_array_from_callback(x.shape, sharding, lambda part, x=x: x[part]) for x in rows()
    ]
    runs = {"host": fit(*on_host), "arrays": fit(*spread)}
    found = {f"{run}/{k}": np.asarray(x) for run, values in runs.items() for k, x in values.items()}
    np.savez(path, **found)
