"""A sampler learnt on one data set and used on others
===================================================

The transition of a Markov chain is a small network, which is trained although its draws have no
density.

The model is a network with one hidden layer, ``p(y = 1) = sigmoid(net(x; theta))``,
``theta ~ N(0, I)``. ``NNSampler`` (T = 10 steps from a step size of 1e-5, 20 softplus units, the
same for every weight) is trained on crabs with 20 ReLU units by the mean of ``ImplicitELBO`` over
its T states. 32 chains continue from update to update, and start again at the prior every 50
updates. Then the sampler is used without changes for the posteriors of other data sets with 50
sigmoid units: 10 chains start at the prior and take 500 steps, of which every 25th after the first
half is kept. 40 % of the rows are for sampling and 60 % for the test, in 5 splits. The baselines
are Langevin steps of 1e-5 (the sampler before training) and the mode.

The script prints a table of test log-likelihoods and saves a picture. The exit code is 1 if the
sampler trained by the Stein estimate is worse than the Langevin steps by more than one standard
error on the mean over the data sets. ::

    python examples/meta_learned_sampler.py --data-dir data

.. image:: /recorded/meta_learned_sampler.png
   :alt: Energy in training, and test log-likelihood of the samplers on other data.

.. literalinclude:: /recorded/meta_learned_sampler.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/meta_learned_sampler.png"

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

from numpyro_ext.guides import Implicit, NNSampler
from numpyro_ext.objectives import ImplicitELBO
from numpyro_ext.scores import KDEScore, ScoreMatchingScore, SteinScore

TRAIN, TEST = "crabs", ("australian", "breast", "sonar")
SCORES = {
    "Stein": SteinScore(0.1),
    "KDE": KDEScore(),
    "score matching": ScoreMatchingScore(0.1),
}
UPDATES, RESTART, CHAINS, T, STEP_SIZE, UNITS = 300, 50, 32, 10, 1e-5, 20
SPLITS, TEST_CHAINS, TEST_STEPS, THIN = 5, 10, 500, 25
Data = tuple[Array, Array]
LogP = Callable[[Array], Array]


def load(folder: Path, name: str) -> Data:
    where = folder / "probit" / name
    if not (where / "data.txt").is_file():
        sys.exit(f"There is no data.txt in {where}; give the folder of probit as --data-dir.")
    table = np.loadtxt(where / "data.txt")
    columns = np.loadtxt(where / "index_features.txt", dtype=int)
    y = table[:, int(np.loadtxt(where / "index_target.txt"))]
    x = table[:, columns]
    x = (x - x.mean(0)) / np.maximum(x.std(0), 1e-6)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y == y.max(), jnp.float32)


def logits(theta: Array, x: Array, hidden: int, act: Callable[[Array], Array]) -> Array:
    w1, b1, w2, b2 = jnp.split(theta, np.cumsum([x.shape[1] * hidden, hidden, hidden]))
    return act(x @ w1.reshape(x.shape[1], hidden) + b1) @ w2 + b2


def log_lik(theta: Array, data: Data, **net: Any) -> Array:
    x, y = data
    return dist.Bernoulli(logits=logits(theta, x, **net)).log_prob(y)


def size_of(x: Array, hidden: int) -> int:
    return (x.shape[1] + 2) * hidden + 1


def sampler(params: dict[str, Array], dim: int) -> Callable[..., Array]:
    """The step ``(z, grad, noise) -> z`` with these weights."""
    with handlers.block(), handlers.substitute(data=params):
        none, step = NNSampler(T, STEP_SIZE, UNITS).begin("meta", dim)
    return partial(step, none)


def chain(step: Callable[..., Array], log_p: LogP, z: Array, noise: Array) -> Array:
    """All states, ``(num_steps, d)``."""

    def one(z: Array, xi: Array) -> tuple[Array, Array]:
        z = step(z, jax.grad(log_p)(z), xi)
        return z, z

    return lax.scan(one, z, noise)[1]


def train(score: Any, data: Data) -> tuple[dict[str, Array], np.ndarray]:
    """The weights of the sampler, and the energy of its draws at each update."""
    net = {"hidden": 20, "act": jax.nn.relu}
    d = size_of(data[0], 20)

    def model(starts: Array) -> None:
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
        numpyro.factor("likelihood", log_lik(theta, data, **net).sum())

    def log_p(theta: Array) -> Array:
        return -0.5 * jnp.sum(theta**2) + log_lik(theta, data, **net).sum()

    def guide(starts: Array) -> None:
        key: Any = numpyro.prng_key()
        key_start, key_noise = random.split(key)
        start = starts[random.randint(key_start, (), 0, len(starts))]
        none, step = NNSampler(T, STEP_SIZE, UNITS).begin("meta", d)
        path = chain(partial(step, none), log_p, start, random.normal(key_noise, (T, d)))
        numpyro.sample("theta", Implicit(path[-1], event_dim=1, trajectory=path))

    svi = SVI(model, guide, optax.adam(1e-3), ImplicitELBO(CHAINS, score))

    def update(carry: Any, i: Array) -> tuple[Any, Array]:
        state, z = carry
        key = random.fold_in(random.key(1), i)
        z = jnp.where(i % RESTART == 0, random.normal(key, z.shape), z)
        state, loss = svi.update(state, z)
        step = sampler(svi.get_params(state), d)
        noise = random.normal(random.fold_in(key, 1), (CHAINS, T, d))
        return (state, jax.vmap(lambda z, xi: chain(step, log_p, z, xi)[-1])(z, noise)), loss

    z = jnp.zeros((CHAINS, d))
    start = svi.init(random.key(0), z)
    run = jax.jit(lambda carry: lax.scan(update, carry, jnp.arange(UPDATES)))
    (state, _), losses = run((start, z))
    return svi.get_params(state), np.asarray(losses)


def split(data: Data, seed: int) -> tuple[Data, Data]:
    order = np.random.default_rng(seed).permutation(len(data[1]))
    cut = int(0.4 * len(order))
    take = lambda rows: (data[0][rows], data[1][rows])  # noqa: E731
    return take(order[:cut]), take(order[cut:])


def by_chains(params: dict[str, Array], fit: Data, test: Data, key: Array) -> Array:
    """Mean test log-likelihood of the kept states."""
    net = {"hidden": 50, "act": jax.nn.sigmoid}
    d = size_of(fit[0], 50)
    step = sampler(params, d)
    log_p = lambda z: -0.5 * jnp.sum(z**2) + log_lik(z, fit, **net).sum()  # noqa: E731

    def one(key: Array) -> Array:
        def piece(z: Array, key: Array) -> tuple[Array, Array]:
            z = chain(step, log_p, z, random.normal(key, (THIN, d)))[-1]
            return z, log_lik(z, test, **net)

        key_start, key_noise = random.split(key)
        keys = random.split(key_noise, TEST_STEPS // THIN)
        kept = lax.scan(piece, random.normal(key_start, (d,)), keys)[1]
        return kept[len(kept) // 2 :]

    draws = jax.vmap(one)(random.split(key, TEST_CHAINS)).reshape(-1, len(test[1]))
    return jnp.mean(jax.nn.logsumexp(draws, axis=0) - jnp.log(len(draws)))


def by_mode(fit: Data, test: Data, key: Array) -> Array:
    net = {"hidden": 50, "act": jax.nn.sigmoid}
    optim = optax.adam(1e-2)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        z, state = carry
        grad = jax.grad(lambda z: 0.5 * jnp.sum(z**2) - log_lik(z, fit, **net).sum())(z)
        updates, state = optim.update(grad, state)
        return (optax.apply_updates(z, updates), state), None

    z = random.normal(key, (size_of(fit[0], 50),))
    (z, _), _ = lax.scan(step, (z, optim.init(z)), length=1000)
    return jnp.mean(log_lik(z, test, **net))


def draw_picture(losses: dict[str, np.ndarray], table: dict[str, Any], path: Path) -> None:
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for (name, values), width in zip(losses.items(), (3, 1.5, 0.8), strict=True):
        left.plot(values, label=name, lw=width)  # they are nearly equal: the first is the widest
    left.set(xlabel="update", ylabel="energy of the states on crabs", title="training")
    left.set_yscale("log")
    left.legend(fontsize=8)
    for i, (name, values) in enumerate(table.items()):
        mean, error = values.mean(1), values.std(1, ddof=1) / SPLITS**0.5
        right.errorbar(np.arange(len(TEST)) + 0.12 * (i - 2), mean, error, fmt="o", label=name)
    right.set_xticks(range(len(TEST)), TEST)
    right.set(ylabel="test log-likelihood", title="data that it has not seen")
    right.legend(fontsize=8)
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("out/meta_learned_sampler.png"))
    args = parser.parse_args()
    began = time.perf_counter()
    crabs = load(args.data_dir, TRAIN)
    weights, losses = {}, {}
    for name, score in SCORES.items():
        weights[name], losses[name] = train(score, crabs)
    weights["Langevin"] = {"meta_sampler$params": jnp.zeros_like(*weights["Stein"].values())}
    print(f"trained after {time.perf_counter() - began:.0f} s\n")

    table = {name: np.zeros((len(TEST), SPLITS)) for name in [*weights, "mode"]}
    run, climb = jax.jit(by_chains), jax.jit(by_mode)
    for i, task in enumerate(TEST):
        data = load(args.data_dir, task)
        for j in range(SPLITS):
            fit, test = split(data, j)
            for name, params in weights.items():
                table[name][i, j] = run(params, fit, test, random.key(j))
            table["mode"][i, j] = climb(fit, test, random.key(j))
    print("| sampler | " + " | ".join(TEST) + " |")
    print("|---" * (len(TEST) + 1) + "|")
    for name, values in table.items():
        cells = [f"{v.mean():.3f} +- {v.std(ddof=1) / SPLITS**0.5:.3f}" for v in values]
        print(f"| {name} | " + " | ".join(cells) + " |")
    draw_picture(losses, table, args.out)
    print(f"\npicture: {args.out}; {time.perf_counter() - began:.0f} s in all")
    apart = (table["Stein"] - table["Langevin"]).mean(0)
    return 0 if apart.mean() > -apart.std(ddof=1) / SPLITS**0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
