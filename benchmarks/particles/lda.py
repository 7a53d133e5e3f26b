"""Topics of a synthetic corpus by particles, at the settings published for topic models.

There are 30 topics over 500 words and 800 documents of 60 words, of which 80 are held out; topics
and mixtures are Dirichlet(0.1). A particle has the logarithms of 30 x 500 Gammas, which divided by
their sums are the topics (`GammaSimplexReparam`). The gradient of the words of 100 documents has no
closed form. By Fisher's identity it is that of the log probability of words and assignments, in the
mean over the assignments given words and topics, which Gibbs sweeps draw; the second half of them
counts. The model has this mean as a `numpyro.factor` with constant weights, so that every method
takes it as it takes any model. Its value is not the likelihood, and is not shown.

- `Blob` and `GFSD`: 20 particles by `SVI`, with the median rule and the steps e (k + 1000)^-0.55 of
  Liu et al. (2019): plain with e = 0.3; PO with e = 0.3, decay 0.7 and noise 1e-4 k^-0.7; WAG with
  e = 0.03 and alpha 2.1; WNes with e = 0.3, mu 0.3 and beta 0.2.
- `PSGHMC` by `ParVI`: `Blob` with the heat-equation rule, step 1e-3, 1 / mass = 300 and friction
  0.1, as Liu, Zhuo and Zhu (2019) have it for "fgh".
- `SGRLD` with `ExpandedMean`: 20 chains of as many steps, for a grid of first steps; and, with the
  best of them, one chain of 20 times as many, of which 20 draws of the second half count.

The numbers are the perplexity of the second half of each held-out document, by the mean of the 20
predictions, after a quarter, half and all of the steps; the mixture of a document is learnt from
its first half. `log ratio` is the logarithm of the last one over that of the row that it names
(`SGRLD`: the best of the grid), with its standard error over the documents.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, SVI, init_to_uniform
import optax

from numpyro_ext.mcmc import SGRLD, ExpandedMean, GammaSimplexReparam, PolynomialSchedule
from numpyro_ext.optim import po, wag, wasserstein_eval_params, wnes
from numpyro_ext.particles import GFSD, PSGHMC, AutoParticles, Blob, ParVI
from numpyro_ext.scores import RBF

TOPICS, VOCABULARY, DOCUMENTS, HELD_OUT, LENGTH = 30, 500, 800, 80, 60
PRIOR, BATCH, PARTICLES, RECORDS = 0.1, 100, 20, 4
GRID = (0.03, 0.1)  # first steps of SGRLD


def weights_of_topics(rng_key: Array, topics: Array, words: Array, sweeps: int) -> Array:
    """Probability of each topic for each word, ``(words, K, documents)``, by Gibbs sampling.

    The mixture of each document is integrated out. The documents are the last axis, because an
    instruction of the processor takes several neighbours.
    """
    likelihood = jnp.swapaxes(topics[:, words.T], 0, 1)

    def one_hot(z: Array) -> Array:
        return (z == jnp.arange(len(topics))[:, None]).astype(topics.dtype)

    def draw(weights: Array, u: Array) -> Array:
        goal, below, z = u * jnp.sum(weights, 0), jnp.zeros_like(u), jnp.zeros(u.shape, int)
        for weight in weights[:-1]:
            below += weight
            z += below < goal
        return z

    def visit(counts: Array, word: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        z, likelihood, u = word
        counts -= one_hot(z)
        z = draw((counts + PRIOR) * likelihood, u)
        return counts + one_hot(z), z

    def sweep(state: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        u = random.uniform(key, words.T.shape)
        counts, z = lax.scan(visit, state[0], (state[1], likelihood, u))
        return (counts, z), z

    start, rest = random.split(rng_key)
    z = jax.vmap(draw)(likelihood, random.uniform(start, words.T.shape))
    state = jnp.sum(jax.vmap(one_hot)(z), 0), z
    draws = lax.scan(sweep, state, random.split(rest, sweeps))[1]
    return jnp.mean(jax.vmap(jax.vmap(one_hot))(draws[sweeps // 2 :]), 0)


def topic_model(words: Array, sweeps: int) -> None:
    prior = dist.Dirichlet(jnp.full(VOCABULARY, PRIOR)).expand([TOPICS]).to_event(1)
    topics = jnp.maximum(numpyro.sample("topics", prior), 1e-30)
    with numpyro.plate("documents", len(words), subsample_size=BATCH) as rows:
        batch = numpyro.subsample(words, event_dim=1)
        # A model has no key of its own for each step; its rows differ, and so does what they make.
        key = random.fold_in(random.key(0), jnp.sum(rows * jnp.arange(1, len(rows) + 1)))
        weights = weights_of_topics(key, lax.stop_gradient(topics), batch, sweeps)
        log_topics = jnp.swapaxes(jnp.log(topics)[:, batch.T], 0, 1)
        numpyro.factor("words", jnp.sum(weights * log_topics, (0, 1)))


class Task(NamedTuple):
    words: Array
    steps: int
    sweeps: int

    @property
    def model(self) -> Callable[..., Any]:
        model = partial(topic_model, sweeps=self.sweeps)
        return reparam(model, config={"topics": GammaSimplexReparam()})


def falling(scale: float) -> Callable[[Any], Any]:
    return lambda i: scale * (i + 1001.0) ** -0.55


OPTIMISERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: optax.scale_by_learning_rate(falling(0.3)),
    "PO": lambda: po(falling(0.3), decay=0.7, noise=1e-4, noise_decay=0.7, rng_key=random.key(7)),
    "WAG": lambda: wag(falling(0.03), 2.1),
    "WNes": lambda: wnes(falling(0.3), mu=0.3, beta=0.2),
}


def by_svi(field: Any, label: str, rng_key: Array, task: Task) -> Array:
    """Gammas of the particles after each quarter of the steps, ``(4, m, K, W)``."""
    model = task.model
    guide = AutoParticles(model, PARTICLES, init_loc_fn=init_to_uniform)
    svi = SVI(model, guide, OPTIMISERS[label](), loss=field(RBF("median")))

    def quarter(state: Any, _: None) -> tuple[Any, Array]:
        def step(state: Any, _: None) -> tuple[Any, None]:
            return svi.update(state, task.words)[0], None

        state = lax.scan(step, state, length=task.steps // RECORDS)[0]
        params = svi.get_params(state)
        if label in ("WAG", "WNes"):
            params = wasserstein_eval_params(state.optim_state, params)
        return state, guide.particles(params)["topics_gamma"]

    state = svi.init(rng_key, task.words)
    return jax.jit(lambda state: lax.scan(quarter, state, length=RECORDS)[1])(state)


def by_mcmc(kernel: Any, rng_key: Array, words: Array, records: int, chains: int) -> Array:
    """Gammas of the particles or chains, ``(records, m, K, W)``."""
    options: Any = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=0, num_samples=records, **options)
    mcmc.run(rng_key, words)
    return jnp.swapaxes(mcmc.get_samples(group_by_chain=True)["topics_gamma"], 0, 1)


def dynamics(flow: str, rng_key: Array, task: Task) -> Array:
    move = PSGHMC(1e-3, flow=flow, friction=0.1, mass=1 / 300)
    options: Any = {"init_from": None, "steps_per_sample": task.steps // RECORDS}
    kernel = ParVI(task.model, Blob(RBF("he")), move, **options)
    return by_mcmc(kernel, rng_key, task.words, RECORDS, PARTICLES)


def langevin(first: float, rng_key: Array, task: Task, long: bool = False) -> Array:
    step = PolynomialSchedule(first * 100**0.33, 100, 0.33)
    each = task.steps // (2 if long else RECORDS)
    kernel = SGRLD(task.model, step, metric=ExpandedMean(), steps_per_sample=each)
    if not long:
        return by_mcmc(kernel, rng_key, task.words, RECORDS, PARTICLES)
    return jnp.swapaxes(by_mcmc(kernel, rng_key, task.words, 2 * PARTICLES, 1)[PARTICLES:], 0, 1)


@partial(jax.jit, static_argnums=2)
def held_out(gammas: Array, words: Array, sweeps: int) -> Array:
    """Mean log probability of the words of the second half of each document, ``(documents,)``."""
    seen, unseen = jnp.split(words, 2, axis=1)

    def probability(key: Array, gammas: Array) -> Array:
        topics = gammas / jnp.sum(gammas, -1, keepdims=True)
        mixture = jnp.sum(weights_of_topics(key, topics, seen, sweeps), 0) + PRIOR
        return jnp.einsum("kd,kdw->dw", mixture / jnp.sum(mixture, 0), topics[:, unseen])

    p = jax.vmap(probability)(random.split(random.key(5), len(gammas)), gammas)
    return jnp.mean(jnp.log(jnp.mean(p, 0)), 1)


def corpus(rng_key: Array) -> tuple[Array, Array]:
    """The topics, and all documents."""
    keys = random.split(rng_key, 4)
    topics = random.dirichlet(keys[0], jnp.full(VOCABULARY, PRIOR), (TOPICS,))
    mixture = random.dirichlet(keys[1], jnp.full(TOPICS, PRIOR), (DOCUMENTS,))
    z = random.categorical(keys[2], jnp.log(mixture), shape=(LENGTH, DOCUMENTS)).T
    return topics, random.categorical(keys[3], jnp.log(topics)[z])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the corpus and the runs")
    parser.add_argument("--sweeps", type=int, default=50, help="of Gibbs for a gradient")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # 20 particles are few for 15,000 numbers, and HE is for few
    key_corpus, key = random.split(random.key(args.seed))
    truth, words = corpus(key_corpus)
    task, test = Task(words[HELD_OUT:], args.steps, args.sweeps), words[:HELD_OUT]
    judge = lambda gammas: np.asarray(held_out(gammas, test, args.sweeps))  # noqa: E731
    found = {"true topics": judge(jnp.tile(truth, (PARTICLES, 1, 1)))}

    def show(name: str, path: list[Any], against: str = "", seconds: str = "") -> None:
        shown = [f"{np.exp(-np.mean(one)):.1f}" for one in path]
        if against:
            off = found[against] - path[-1]
            error = off.std(ddof=1) / len(off) ** 0.5
            against = f"{off.mean():+.3f} ± {error:.3f} ({against})"
        cells = [name, *[""] * (3 - len(shown)), *shown, against, seconds]
        print(f"| {' | '.join(cells)} |", flush=True)

    def add(name: str, fit: Callable[..., Array], against: str = "") -> None:
        began = time.perf_counter()
        records = jax.block_until_ready(fit(key, task))
        seconds = f"{time.perf_counter() - began:.0f}"
        path = [judge(records[k]) for k in (0, 1, 3) if k < len(records)]
        show(name, path, against if against in found else "", seconds)
        found[name] = path[-1]

    print("| method | a quarter | half | all steps | log ratio | seconds |\n|" + "---|" * 6)
    show("true topics", [found["true topics"]])
    best = GRID[0]
    for first in GRID:
        add(f"SGRLD, {first:g}", partial(langevin, first))
        best = max(best, first, key=lambda one: found[f"SGRLD, {one:g}"].mean())
    found["SGRLD"] = found[f"SGRLD, {best:g}"]
    add("Blob, plain", partial(by_svi, Blob, "plain"), "SGRLD")
    add("Blob, WNes", partial(by_svi, Blob, "WNes"), "Blob, plain")
    add("GFSD, plain", partial(by_svi, GFSD, "plain"), "SGRLD")
    add("GFSD, WNes", partial(by_svi, GFSD, "WNes"), "GFSD, plain")
    add("PSGHMC, det", partial(dynamics, "det"), "SGRLD")
    add("PSGHMC, fgh", partial(dynamics, "fgh"), "PSGHMC, det")
    add("SGRLD, one long chain", partial(langevin, best, long=True), "SGRLD")
    add("Blob, PO", partial(by_svi, Blob, "PO"), "Blob, plain")
    add("Blob, WAG", partial(by_svi, Blob, "WAG"), "Blob, plain")


if __name__ == "__main__":
    main()
