"""Networks as people write them: two heads, many rows, and images of kinds that were not seen.

- `two heads`: a mean and a log scale, with a layer norm, of 3,000 rows whose noise depends on x.
- `many rows`: two hidden layers, noise of sd 0.3, one row seen once or less.
- `digits`: a small convolutional network of the digits 0 to 7; the unseen are 8, 9 and noise.

The mean field, `ivon` and dropout draw 4 networks a step; rates fall along a cosine. `error` is the
RMSE of test rows (of digits the share of wrong ones, in per cent), `nats` their mean log predictive
density, each beside that of the truth in brackets, and `inside` the share of test rows in the
central 90 % interval. `AUROC` is that of the entropy of the prediction, of 8 and 9, and of
noise, against the digits of the test set. `ms` is the time of a step, warm; `s` is that of the
fit, or of all five, compilation included.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any, NamedTuple

from flax import nnx
import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.module import random_nnx_module
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from numpyro_ext.diagnostics import predictive_scores, predictive_uncertainty, restarts
from numpyro_ext.guides import AutoDropout, init_to_fan_in
from numpyro_ext.optim import ivon

START = init_to_fan_in()


class TwoHeads(nnx.Module):
    def __init__(self, inputs: int) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.norm = nnx.Linear(inputs, 50, rngs=rngs), nnx.LayerNorm(50, rngs=rngs)
        self.second = nnx.Linear(50, 50, rngs=rngs)
        self.mean, self.log_scale = nnx.Linear(50, 1, rngs=rngs), nnx.Linear(50, 1, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        h = nnx.relu(self.second(nnx.relu(self.norm(self.first(x)))))
        return self.mean(h)[..., 0], self.log_scale(h)[..., 0]


class OneHead(nnx.Module):
    def __init__(self, inputs: int) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(inputs, 50, rngs=rngs), nnx.Linear(50, 50, rngs=rngs)
        self.mean = nnx.Linear(50, 1, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.mean(nnx.relu(self.second(nnx.relu(self.first(x)))))[..., 0]


class Images(nnx.Module):
    def __init__(self, inputs: int) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(16 * 4 * 4, 8, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        h = nnx.relu(self.second(nnx.relu(self.first(x[..., None]))))
        return self.out(h.reshape(*h.shape[:-3], -1))


def model(Net: type, x: Array, y: Array | None = None, batch: int | None = None) -> None:
    net = random_nnx_module("net", Net(x.shape[1]), dist.Normal(0, 1))
    precision = numpyro.sample("precision", dist.Gamma(1, 0.1)) if Net is OneHead else None
    with numpyro.plate("rows", len(x), subsample_size=batch):
        f = net(numpyro.subsample(x, event_dim=x.ndim - 1))
        y = None if y is None else numpyro.subsample(y, event_dim=0)
        if Net is TwoHeads:
            numpyro.sample("y", dist.Normal(f[0], jnp.exp(f[1])), obs=y)
        elif Net is OneHead:
            numpyro.sample("y", dist.Normal(f, precision**-0.5), obs=y)
        else:
            numpyro.sample("y", dist.Categorical(logits=f), obs=y)


class Task(NamedTuple):
    net: type
    batch: int
    train: tuple[Array, Array]
    test: tuple[Array, Array]
    truth: Any
    """Mean and scale of the test rows; of digits the images of other kinds."""


def simulated(kind: type, rows: int, batch: int) -> Task:
    noise = np.random.default_rng(1)
    x = noise.normal(size=(rows + 3000, 6 if kind is TwoHeads else 10)).astype(np.float32)
    mean = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * x[:, 3]
    scale = np.exp(-1 + 0.6 * x[:, 1]) if kind is TwoHeads else np.full(len(x), 0.3)
    y = (mean + scale * noise.normal(size=len(x))).astype(np.float32)
    train, test = ((jnp.asarray(x[s]), jnp.asarray(y[s])) for s in (np.s_[:rows], np.s_[rows:]))
    return Task(kind, batch, train, test, (mean[rows:], scale[rows:]))


def digits() -> Task:
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    seen, noise = labels < 8, np.random.default_rng(0)
    order = noise.permutation(seen.sum())
    x, y = images[seen][order], labels[seen][order]
    train, test = ((jnp.asarray(x[s]), jnp.asarray(y[s])) for s in (np.s_[400:], np.s_[:400]))
    other = images[~seen], noise.random((400, 8, 8)).astype(np.float32)
    return Task(Images, 64, train, test, tuple(map(jnp.asarray, other)))


def falling(rate: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(rate, steps)


def mean_field(optim: Callable[..., Any], rate: float, of: Callable[..., None], steps: int) -> SVI:
    guide = AutoNormal(of, init_loc_fn=START, init_scale=0.02)
    return SVI(of, guide, optim(falling(rate, steps)), Trace_ELBO(4))


def one_mode(of: Callable[..., None], steps: int) -> SVI:
    return SVI(of, AutoDelta(of, init_loc_fn=START), optax.adam(falling(0.01, steps)), Trace_ELBO())


def dropout(of: partial[None], steps: int) -> SVI:
    in_axis = -2 if of.args[0] is Images else None  # convolutions do not say it by their shape
    guide = AutoDropout(of, keep_prob=0.95, in_axis=in_axis, init_loc_fn=START)
    return SVI(of, guide, optax.adam(falling(0.01, steps)), Trace_ELBO(4))


METHODS: dict[str, Callable[..., SVI]] = {
    "one mode": one_mode,
    "five modes": one_mode,
    "mean field, adam(0.01)": partial(mean_field, optax.adam, 0.01),
    "mean field, ivon(0.1)": partial(mean_field, ivon, 0.1),
    "mean field, ivon(0.03)": partial(mean_field, ivon, 0.03),
    "dropout 0.95": dropout,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=float, default=300_000, help="of the task of many rows")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", default=["two heads", "many rows", "digits"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--vectorized", action="store_true", help="the five modes, together")
    parser.add_argument("--key", type=int, default=0)
    args = parser.parse_args()
    tasks = {
        "two heads": lambda: simulated(TwoHeads, 3000, 256),
        "many rows": lambda: simulated(OneHead, int(args.rows), 512),
        "digits": digits,
    }
    columns = "task|method|error (truth)|nats (truth)|inside|AUROC 8, 9|AUROC noise|ms|s".split("|")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for name in args.only:
        task = tasks[name]()
        of = partial(model, task.net)
        for title in args.methods:
            make = partial(METHODS[title], of, args.steps)
            options = {"batch": task.batch, "progress_bar": False}
            key, svi = random.key(args.key), make()
            began = time.perf_counter()
            if title == "five modes":
                options_of_five = options | {"vectorized": args.vectorized}
                result: Any = restarts(make, key, 5, args.steps, *task.train, **options_of_five)
            else:
                result = svi.run(key, args.steps, *task.train, **options)
            jax.block_until_ready(jax.tree.leaves(result))
            seconds = time.perf_counter() - began
            began = time.perf_counter()
            jax.block_until_ready(svi.run(key, args.steps, *task.train, **options).losses)
            took = 1e3 * (time.perf_counter() - began) / args.steps
            row = f"| {name} | {title} | {scores(task, svi, result)} | {took:.2f} | {seconds:.1f} |"
            print(row, flush=True)


def scores(task: Task, svi: SVI, result: Any) -> str:
    judged = predictive_scores(svi, result, model_args=task.test, num_samples=200)
    nats = f"{judged.log_density:.3f}"
    if task.net is Images:
        inputs = (task.test[0], *task.truth)
        seen, *other = (
            predictive_uncertainty(svi, result, model_args=(x,), num_samples=200).total
            for x in inputs
        )
        areas = [
            roc_auc_score(np.repeat([0, 1], [len(seen), len(x)]), np.concatenate([seen, x]))
            for x in other
        ]
        wrong = f"{100 * (1 - judged.accuracy):.1f}"
        return f"{wrong} | {nats} | - | {areas[0]:.3f} | {areas[1]:.3f}"
    mean, scale = task.truth
    truth = dist.Normal(mean, scale).log_prob(task.test[1]).mean()
    least = np.sqrt(np.mean((mean - task.test[1]) ** 2))
    error, inside = f"{judged.rmse:.3f} ({least:.3f})", f"{judged.coverage_90:.2f}"
    return f"{error} | {nats} ({truth:.3f}) | {inside} | - | -"


if __name__ == "__main__":
    main()
