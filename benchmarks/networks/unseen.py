"""Rows unlike the training set: which score of a network tells them from rows like it.

- `shapes`: a convolutional network of images of a disc, a square and a cross, with noise; unlike
  them are a triangle, and pixels that are noise.
- `wine`: a dense network of two of scikit-learn's three cultivars, by 13 columns; unlike them are
  the third, which is each in turn, and rows whose columns come from different bottles.

The scores are the entropy of the predicted class (`total`), its part between the draws
(`epistemic`), and the distance of the features of the last layer from the nearest class, by their
covariance within classes, at one mode. Each number is the area under the ROC curve against test
rows, with its standard error over keys, which choose rows, network and images.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
import time
from typing import Any

from flax import nnx
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.module import random_nnx_module
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_wine
from sklearn.metrics import roc_auc_score

from numpyro_ext.diagnostics import predictive_scores, predictive_uncertainty, restarts
from numpyro_ext.guides import AutoDropout, AutoLaplaceGGN, init_to_fan_in
from numpyro_ext.mcmc import SGHMC, CyclicalSchedule

START = init_to_fan_in()
SIZE, STEPS = 12, 500
Rows = dict[str, tuple[np.ndarray, np.ndarray]]


class Images(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(16 * 3 * 3, 3, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        h = nnx.relu(self.second(nnx.relu(self.first(x[..., None]))))
        h = h.reshape(*h.shape[:-3], -1)
        return self.out(h), h


class Columns(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(13, 50, rngs=rngs), nnx.Linear(50, 2, rngs=rngs)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        h = nnx.relu(self.hidden(x))
        return self.out(h), h


def model(Net: type, x: Array, y: Array | None = None, batch: int | None = None) -> None:
    net = random_nnx_module("net", Net(), dist.Normal(0, 1))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        logits, features = net(numpyro.subsample(x, event_dim=x.ndim - 1))
        numpyro.deterministic("features", features)
        y = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def draw_shapes(rng: np.random.Generator, kinds: np.ndarray) -> np.ndarray:
    """Images of a disc, a square, a cross, or a triangle, by their number."""
    i, j = np.mgrid[:SIZE, :SIZE]
    place = rng.uniform(4, SIZE - 5, (2, len(kinds), 1, 1))
    half = rng.uniform(2.5, 3.5, (len(kinds), 1, 1))
    a, b = i - place[0], j - place[1]
    square = np.maximum(np.abs(a), np.abs(b)) < half
    shapes = np.stack([
        a**2 + b**2 < half**2,
        square,
        square & (np.minimum(np.abs(a), np.abs(b)) < 1),
        (np.abs(a) < half) & (2 * np.abs(b) < a + half),
    ])  # fmt: skip
    return shapes[kinds, np.arange(len(kinds))] + 0.1 * rng.normal(size=(len(kinds), SIZE, SIZE))


def shapes(rng: np.random.Generator, key: int) -> Rows:
    rows = {}
    for name, num in {"train": 600, "test": 400}.items():
        kinds = rng.integers(3, size=num)
        rows[name] = draw_shapes(rng, kinds), kinds
    rows["triangle"] = draw_shapes(rng, np.full(400, 3)), np.zeros(400)
    rows["noise"] = rng.uniform(size=(400, SIZE, SIZE)), np.zeros(400)
    return rows


def wine(rng: np.random.Generator, key: int) -> Rows:
    x, y = load_wine(return_X_y=True)
    other = y == key % 3
    x, y, unseen = x[~other], np.unique(y[~other], return_inverse=True)[1], x[other]
    order, unseen = rng.permutation(len(y)), rng.permutation(unseen)[:48]
    train, test = order[:55], order[55:105]
    mean, sd = x[train].mean(0), x[train].std(0)
    mixed = np.stack([rng.choice(column, 200) for column in x[test].T], -1)
    rows = {"train": (x[train], y[train]), "test": (x[test], y[test])}
    rows |= {"cultivar": (unseen, np.zeros(len(unseen))), "mixed": (mixed, np.zeros(len(mixed)))}
    return {name: ((a - mean) / sd, b) for name, (a, b) in rows.items()}


SETS = {"shapes": (Images, shapes), "wine": (Columns, wine)}


def falling(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(0.01, steps))


def one_mode(of: Callable[..., None], steps: int) -> SVI:
    return SVI(of, AutoDelta(of, init_loc_fn=START), falling(steps), Trace_ELBO())


def mean_field(of: Callable[..., None], steps: int) -> SVI:
    guide = AutoNormal(of, init_loc_fn=START, init_scale=0.02)
    return SVI(of, guide, falling(steps), Trace_ELBO(4))


def dropout(of: Any, steps: int) -> SVI:
    in_axis = -2 if of.args[0] is Images else None  # convolutions do not say it by their shape
    guide = AutoDropout(of, keep_prob=0.95, in_axis=in_axis, init_loc_fn=START)
    return SVI(of, guide, falling(steps), Trace_ELBO(4))


def last_layer(of: Callable[..., None], steps: int) -> SVI:
    guide = AutoLaplaceGGN(of, structure="last_layer", init_loc_fn=START)
    return SVI(of, guide, falling(steps), Trace_ELBO())


def sghmc(of: Callable[..., None], size: int) -> MCMC:
    schedule = CyclicalSchedule(0.2 / size**0.5, cycle_length=500, exploration=0.25)
    kernel = SGHMC(of, schedule, friction=10.0, steps_per_sample=10, init_strategy=START)
    return MCMC(kernel, num_warmup=50, num_samples=200, progress_bar=False)


METHODS: dict[str, Callable[..., SVI]] = {
    "mean field": mean_field,
    "dropout": dropout,
    "last layer": last_layer,
}


def fits(of: Any, key: Array, train: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, the object and the result of each method."""
    options = {"batch": 50, "progress_bar": False}
    make = partial(one_mode, of, STEPS)
    modes = restarts(make, key, 5, STEPS, *train, **options)
    yield "one mode", (svi := make()), modes[0]
    yield "five modes", svi, modes
    for name, method in METHODS.items():
        svi = method(of, STEPS)
        yield name, svi, svi.run(key, STEPS, *train, **options)
    mcmc = sghmc(of, len(train[0]))
    mcmc.run(key, *train, batch=50)
    yield "SGHMC", mcmc, None


def distances(svi: SVI, params: Any, train: Any, rows: Array) -> np.ndarray:
    """The squared distance of the features of rows from the nearest class."""
    predict = Predictive(
        svi.model, guide=svi.guide, params=params, num_samples=1, return_sites=["features"]
    )
    x = predict(random.key(0), jnp.concatenate([train[0], rows]))["features"][0]
    h, others = np.split(np.asarray(x, float), [len(train[0])])
    labels = np.asarray(train[1])
    means = np.stack([h[labels == c].mean(0) for c in np.unique(labels)])
    within = LedoitWolf(assume_centered=True).fit(h - means[labels])
    return np.min([within.mahalanobis(others - mean) for mean in means], 0)


def area(like: np.ndarray, unlike: np.ndarray) -> float:
    labels = np.repeat([0, 1], [len(like), len(unlike)])
    return float(roc_auc_score(labels, np.concatenate([like, unlike])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(SETS), choices=SETS)
    parser.add_argument("--keys", type=int, default=3, help="how often all is repeated")
    args = parser.parse_args()
    for title in args.only:
        Net, draw = SETS[title]
        of, began = partial(model, Net), time.process_time()
        found: dict[tuple[str, str], list[list[float]]] = {}
        nats: dict[str, list[float]] = {}
        kinds: list[str] = []
        for key in range(args.keys):
            rows = draw(np.random.default_rng(key), key)
            inputs = {name: jnp.asarray(x, jnp.float32) for name, (x, _) in rows.items()}
            train = inputs["train"], jnp.asarray(rows["train"][1])
            test = inputs["test"], jnp.asarray(rows["test"][1])
            kinds = [name for name in inputs if name not in ("train", "test")]
            ends = np.cumsum([len(inputs[name]) for name in ("test", *kinds)])
            asked = jnp.concatenate([inputs[name] for name in ("test", *kinds)])
            for name, obj, result in fits(of, random.key(key), train):
                judged = predictive_scores(obj, result, model_args=test, num_samples=100)
                nats.setdefault(name, []).append(float(judged.log_density))
                parts = predictive_uncertainty(obj, result, model_args=(asked,), num_samples=100)
                scores = {"total": parts.total, "epistemic": parts.epistemic}
                if name == "one mode":  # which has no draws to differ
                    scores["distance"] = distances(obj, result.params, train, asked)
                    del scores["epistemic"]
                for score, x in scores.items():
                    like, *others = np.split(x, ends[:-1])
                    areas = [area(like, x) for x in others]
                    found.setdefault((name, score), []).append(areas)
        print(f"\n| {title} | nats | score | {' | '.join(kinds)} |\n|{'---|' * (3 + len(kinds))}")
        for (name, score), areas in found.items():
            mean, error = np.mean(areas, 0), np.std(areas, 0, ddof=1) / len(areas) ** 0.5
            cells = [f"{m:.2f} +- {e:.2f}" for m, e in zip(mean, error, strict=True)]
            print(f"| {name} | {np.mean(nats[name]):.3f} | {score} | {' | '.join(cells)} |")
        print(f"{time.process_time() - began:.0f} processor seconds", flush=True)


if __name__ == "__main__":
    main()
