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
half is kept. 40 % of the rows are for sampling and 60 % for the test, in 5 splits.

Two baselines tell what the training is worth. *MAP* is the same sampler, trained in the same way
without the entropy: it learns to go to where the density is largest. *SGLD* is Langevin steps with
the gradients of 32 rows, from the same starts and as many; of a grid of steps it has the one with
the best test log-likelihood on the training task, crabs, in 5 such splits.

The script prints the test log-likelihood, the share of wrong labels, and the squared kernel Stein
discrepancy of the 100 states from the posterior, for each weight of the network: states that are
draws have about 0. On these sets the log-likelihoods by Stein, by KDE and of MAP are equal to all
digits shown, so that the table cannot tell these estimates of the entropy apart, nor show that the
entropy is worth anything; only score matching differs. It saves a picture. The exit code is 1 if
the sampler trained by the Stein estimate is worse than SGLD by more than one standard error of the
mean over the data sets. ::

    python examples/meta_learned_sampler.py --data-dir data

.. image:: /recorded/meta_learned_sampler.png
   :alt: Energy in training, and test log-likelihood and discrepancy of the samplers on other data.

.. literalinclude:: /recorded/meta_learned_sampler.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/meta_learned_sampler.png"

import argparse
from collections.abc import Callable
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

from numpyro_ext.diagnostics import kernel_stein_discrepancy
from numpyro_ext.guides import Implicit, NNSampler
from numpyro_ext.objectives import ImplicitELBO
from numpyro_ext.scores import KDEScore, ScoreMatchingScore, SteinScore

TRAIN, TEST = "crabs", ("australian", "breast", "sonar")
SCORES: dict[str, Callable[[Array], Array]] = {
    "Stein": SteinScore(0.1),
    "KDE": KDEScore(),
    "score matching": ScoreMatchingScore(0.1),
    "MAP": jnp.zeros_like,
}
UPDATES, RESTART, CHAINS, T, STEP_SIZE, UNITS = 300, 50, 32, 10, 1e-5, 20
SPLITS, TEST_CHAINS, TEST_STEPS, THIN, MINIBATCH = 5, 10, 500, 25, 32
SGLD_STEPS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SMALL = {"hidden": 20, "act": jax.nn.relu}
LARGE = {"hidden": 50, "act": jax.nn.sigmoid}
COLUMNS = ("log-likelihood", "wrong, %", "discrepancy")
Data = tuple[Array, Array]
Move = Callable[[Array, Array], Array]
"""Of a state and a key."""


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


def log_posterior(theta: Array, data: Data, **net: Any) -> Array:
    return -0.5 * jnp.sum(theta**2) + log_lik(theta, data, **net).sum()


def network_move(data: Data, **net: Any) -> Move:
    """A step of the sampler whose weights are in the handlers around."""
    none, step = NNSampler(T, STEP_SIZE, UNITS).begin("meta", size_of(data[0], net["hidden"]))

    def move(z: Array, key: Array) -> Array:
        gradient = jax.grad(log_posterior)(z, data, **net)
        return step(none, z, gradient, random.normal(key, z.shape))

    return move


def langevin_move(step_size: Array, data: Data, **net: Any) -> Move:
    def move(z: Array, key: Array) -> Array:
        key_rows, key_noise = random.split(key)
        rows = random.randint(key_rows, (MINIBATCH,), 0, len(data[1]))
        some = (data[0][rows], data[1][rows])
        log_liks = jax.grad(lambda z: log_lik(z, some, **net).mean())(z)
        noise = random.normal(key_noise, z.shape)
        drift = step_size * (len(data[1]) * log_liks - z)
        return z + drift + jnp.sqrt(2 * step_size) * noise

    return move


def chain(move: Move, z: Array, keys: Array) -> Array:
    """All states, ``(num_steps, d)``."""

    def one(z: Array, key: Array) -> tuple[Array, Array]:
        z = move(z, key)
        return z, z

    return lax.scan(one, z, keys)[1]


def train(score: Any, data: Data) -> tuple[dict[str, Array], np.ndarray]:
    """The weights of the sampler, and the energy of its draws at each update."""
    d = size_of(data[0], SMALL["hidden"])

    def model(starts: Array) -> None:
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
        numpyro.factor("likelihood", log_lik(theta, data, **SMALL).sum())

    def guide(starts: Array) -> None:
        key: Any = numpyro.prng_key()
        key_start, key_steps = random.split(key)
        start = starts[random.randint(key_start, (), 0, len(starts))]
        path = chain(network_move(data, **SMALL), start, random.split(key_steps, T))
        numpyro.sample("theta", Implicit(path[-1], event_dim=1, trajectory=path))

    svi = SVI(model, guide, optax.adam(1e-3), ImplicitELBO(CHAINS, score))

    def update(carry: Any, i: Array) -> tuple[Any, Array]:
        state, z = carry
        key = random.fold_in(random.key(1), i)
        z = jnp.where(i % RESTART == 0, random.normal(key, z.shape), z)
        state, loss = svi.update(state, z)
        keys = random.split(random.fold_in(key, 1), (CHAINS, T))
        with handlers.block(), handlers.substitute(data=svi.get_params(state)):
            move = network_move(data, **SMALL)
            z = jax.vmap(lambda z, keys: chain(move, z, keys)[-1])(z, keys)
        return (state, z), loss

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


def judge(move: Move, fit: Data, test: Data, key: Array, **net: Any) -> Array:
    """The three columns, of chains that start at the prior."""
    d = size_of(fit[0], net["hidden"])

    def one(key: Array) -> Array:
        def piece(z: Array, key: Array) -> tuple[Array, Array]:
            z = chain(move, z, random.split(key, THIN))[-1]
            return z, z

        key_start, key_steps = random.split(key)
        keys = random.split(key_steps, TEST_STEPS // THIN)
        kept = lax.scan(piece, random.normal(key_start, (d,)), keys)[1]
        return kept[len(kept) // 2 :]

    draws = jax.vmap(one)(random.split(key, TEST_CHAINS)).reshape(-1, d)
    log_liks = jax.vmap(lambda z: log_lik(z, test, **net))(draws)
    log_lik_of_rows = jax.nn.logsumexp(log_liks, axis=0) - jnp.log(len(draws))
    gradients = jax.vmap(jax.grad(lambda z: log_posterior(z, fit, **net)))(draws)
    discrepancy = kernel_stein_discrepancy(draws, gradients) / d
    return jnp.stack(
        [log_lik_of_rows.mean(), 100 * jnp.mean(log_lik_of_rows < -jnp.log(2)), discrepancy]
    )


@jax.jit
def by_network(params: dict[str, Array], fit: Data, test: Data, key: Array) -> Array:
    with handlers.block(), handlers.substitute(data=params):
        return judge(network_move(fit, **LARGE), fit, test, key, **LARGE)


@jax.jit
def by_langevin(step_size: Array, fit: Data, test: Data, key: Array) -> Array:
    return judge(langevin_move(step_size, fit, **LARGE), fit, test, key, **LARGE)


def tune(data: Data) -> float:
    """The step of SGLD that predicts best on the training task."""

    splits = [split(data, j) for j in range(SPLITS)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *splits), random.split(random.key(2), SPLITS)

    @jax.jit
    def log_lik_of_rows(step_size: Array) -> Array:
        def one(task: Any) -> Array:
            (fit, test), key = task
            return judge(langevin_move(step_size, fit, **SMALL), fit, test, key, **SMALL)[0]

        return lax.map(one, together).mean()

    found = [float(log_lik_of_rows(jnp.float32(step_size))) for step_size in SGLD_STEPS]
    for step_size, value in zip(SGLD_STEPS, found, strict=True):
        print(f"SGLD by steps of {step_size:g}: {value:.3f} on {TRAIN}")
    return SGLD_STEPS[int(np.nanargmax(found))]


def draw_picture(losses: dict[str, np.ndarray], table: dict[str, Any], path: Path) -> None:
    fig, (left, *others) = plt.subplots(1, 3, figsize=(12, 3.6))
    for (name, values), width in zip(losses.items(), (4, 2.5, 1.5, 0.8), strict=True):
        left.plot(values, label=name, lw=width)  # some are nearly equal: the first is the widest
    left.set(xlabel="update", ylabel="loss of the states on crabs", title="training")
    left.set_yscale("log")
    left.legend(fontsize=8)
    for ax, column in zip(others, (0, 2), strict=True):
        for i, (name, values) in enumerate(table.items()):
            mean = values[..., column].mean(1)
            error = values[..., column].std(1, ddof=1) / SPLITS**0.5
            ax.errorbar(np.arange(len(TEST)) + 0.12 * (i - 2), mean, error, fmt="o", label=name)
        ax.set_xticks(range(len(TEST)), TEST)
        ax.set(ylabel=COLUMNS[column], title="data that it has not seen")
    others[0].legend(fontsize=8)
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
    best = tune(crabs)
    print(f"trained and tuned after {time.perf_counter() - began:.0f} s")

    table = {name: np.zeros((len(TEST), SPLITS, len(COLUMNS))) for name in [*weights, "SGLD"]}
    for i, task in enumerate(TEST):
        data = load(args.data_dir, task)
        for j in range(SPLITS):
            fit, test = split(data, j)
            for name, params in weights.items():
                table[name][i, j] = by_network(params, fit, test, random.key(j))
            table["SGLD"][i, j] = by_langevin(jnp.float32(best), fit, test, random.key(j))
    for column, (title, digits) in enumerate(zip(COLUMNS, (3, 1, 4), strict=True)):
        print(f"\n| {title} | " + " | ".join(TEST) + " |")
        print("|---" * (len(TEST) + 1) + "|")
        for name, values in table.items():
            cells = [
                f"{v.mean():.{digits}f} +- {v.std(ddof=1) / SPLITS**0.5:.{digits}f}"
                for v in values[..., column]
            ]
            print(f"| {name} | " + " | ".join(cells) + " |")
    draw_picture(losses, table, args.out)
    print(f"\npicture: {args.out}; {time.perf_counter() - began:.0f} s in all")
    apart = (table["Stein"] - table["SGLD"])[..., 0].mean(0)
    return 0 if apart.mean() > -apart.std(ddof=1) / SPLITS**0.5 else 1


if __name__ == "__main__":
    sys.exit(main())
