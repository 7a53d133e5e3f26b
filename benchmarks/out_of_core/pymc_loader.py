"""PyMC on the same file, by the loader of pymc-extras; `run.py --pymc PYTHON` runs it.

The interpreter needs `pip install pymc pymc-extras`. Blocks of random rows of the mapped file go
through `DataLoader`, and `Trainer` takes a step on each batch: a normal of full covariance, by Adam
whose rate falls from 0.01. The steps of the given seconds are known from a first fit of 1,000.
"""

import itertools
import sys
import time

import numpy as np
import pymc as pm
from pymc_extras.inference.advi import AutoMultivariateNormal, Trainer, clipped_adam
from pymc_extras.variational import DataLoader
from run import BATCH, COLUMNS, print_line, read_columns, watched


def batches_of(x, y):
    """A stream of dicts of 256 random rows."""

    def blocks():
        rng = np.random.default_rng(0)
        while True:
            i = np.sort(rng.integers(0, len(x), 16 * BATCH))
            yield np.column_stack([x[i], y[i]])[rng.permutation(len(i))]

    for rows in DataLoader(blocks, batch_size=BATCH, total_size=len(x)):
        yield {"x": rows[:, :-1], "y": rows[:, -1]}


def main(folder, seconds):
    with watched() as line:
        x, y = read_columns(folder)
        with pm.Model() as model:
            w = pm.Normal("w", 0, 10, shape=COLUMNS)
            rows = pm.Data("x", np.zeros((BATCH, COLUMNS), np.float32))
            seen = pm.Data("y", np.zeros(BATCH, np.float32))
            pm.Bernoulli("seen", logit_p=rows @ w, observed=seen, total_size=len(x))
        batches = batches_of(x, y)

        def fitted(num_steps, data):
            adam = clipped_adam(lambda step: 0.01 * (1 - step / num_steps))
            trainer = Trainer(guide=AutoMultivariateNormal, optimizer=adam, random_seed=0)
            began = time.perf_counter()
            trainer.fit(num_steps, data, model=model, random_seed=1)
            return trainer, (time.perf_counter() - began) / num_steps

        each = fitted(1000, itertools.islice(batches, 1000))[1]
        num_steps = max(1000, int((seconds - line.seconds()) / each))
        line.ready(num_steps)
        trainer, _ = fitted(num_steps, itertools.islice(batches, num_steps))
        draws = trainer.sample_posterior(20_000, model=model, random_seed=2)
        draws = draws.posterior["w"].to_numpy().reshape(-1, COLUMNS)
        line.found(draws.mean(0), draws.std(0))
    print_line(line, folder)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
