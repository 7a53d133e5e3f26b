"""Topics of a synthetic corpus by particles, at the settings published for latent Dirichlet
allocation.

There are 30 topics over 500 words and 800 documents of 60 words, of which 80 are held out; topics
and mixtures are Dirichlet(0.1). A particle is the 30 x 500 logarithms of the expanded simplex, whose
softmax are the topics (`GammaSimplexReparam`). The gradient of the words of 100 documents has no
closed form. By Fisher's identity it is that of the log probability of words and topics together, in
the mean over the topics of the words given theirs, which 50 Gibbs sweeps draw. So the model counts
the draws in a `numpyro.factor`, without a gradient of their own, and every method of the package
takes it as it takes any model. Its value is not the likelihood, and is not printed.

- `Blob`, `GFSD`: 20 particles by `SVI`; plain steps e (k + 1000)^-0.55 with e = 0.3; PO with e =
  0.3, decay 0.7 and noise 1e-4 k^-0.7; WAG with e = 0.03 and alpha 2.1; WNes with e = 0.3, mu 0.3
  and beta 0.2 (Liu et al. 2019).
- `PSGHMC`: `Blob` with the heat-equation rule, step 1e-3, 1 / mass = 300, friction 0.1 (Liu, Zhuo
  and Zhu 2019), by `ParVI`.
- `SGRLD` with `ExpandedMean`: 20 chains at the same number of steps, the best of a grid of steps,
  and one chain of 20 times as many, of which 20 draws of the second half count.

`perplexity` is that of the second halves of held-out documents under the mean of the 20 predictions,
the mixture of a document learnt from its first half. `against` is the logarithm of the perplexity
over that of the row named, with the standard error of this difference over the documents.
"""

import argparse
from collections.abc import Callable
import time
from typing import Any
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
PRIOR, BATCH, SWEEPS, KEPT, PARTICLES = 0.1, 100, 50, 25, 20
STEPS = (0.0005, 0.002, 0.008)  # of SGRLD


def shares(rng_key: Array, topics: Array, words: Array) -> Array:
    """Probabilities of the topics of each word, ``(words, K, documents)``, by Gibbs sweeps.

    The mixtures are integrated out. The last axis is long, so that one instruction serves several
    documents.
    """
    likelihood = jnp.swapaxes(topics[:, words.T], 0, 1)

    def one_hot(z: Array) -> Array:
        return (z == jnp.arange(TOPICS)[:, None]).astype(topics.dtype)

    def draw(weights: Array, u: Array) -> Array:
        goal, below, z = u * jnp.sum(weights, 0), jnp.zeros_like(u), jnp.zeros(u.shape, int)
        for weight in weights[:-1]:
            below += weight
            z += below < goal
        return z

    def visit(counts: Array, word: Any) -> tuple[Array, Array]:
        z, likelihood, u = word
        counts = counts - one_hot(z)
        z = draw((counts + PRIOR) * likelihood, u)
        return counts + one_hot(z), z

    def sweep(state: tuple[Array, Array], key: Array) -> tuple[tuple[Array, Array], Array]:
        counts, z = state
        u = random.uniform(key, z.shape)
        state = lax.scan(visit, counts, (z, likelihood, u))
        return state, state[1]

    start, *keys = random.split(rng_key, SWEEPS + 1)
    z = jax.vmap(draw)(likelihood, random.uniform(start, words.T.shape))
    counts = jnp.sum(jax.vmap(one_hot)(z), 0)
    _, draws = lax.scan(sweep, (counts, z), jnp.stack(keys))
    return jnp.mean(jax.vmap(jax.vmap(one_hot))(draws[-KEPT:]), 0)


def topic_model(words: Array) -> None:
    prior = dist.Dirichlet(jnp.full(VOCABULARY, PRIOR)).expand([TOPICS]).to_event(1)
    topics = jnp.maximum(numpyro.sample("topics", prior), 1e-30)
    with numpyro.plate("documents", len(words), subsample_size=BATCH) as rows:
        batch = numpyro.subsample(words, event_dim=1)
        # The rows differ from step to step, and so does a key that is made of them.
        key = random.fold_in(random.key(0), jnp.sum(rows * jnp.arange(1, BATCH + 1)))
        weights = lax.stop_gradient(shares(key, lax.stop_gradient(topics), batch))
        log_topics = jnp.swapaxes(jnp.log(topics)[:, batch.T], 0, 1)
        numpyro.factor("words", jnp.sum(weights * log_topics, (0, 1)))


MODEL = reparam(topic_model, config={"topics": GammaSimplexReparam()})


def falling(scale: float) -> Callable[[Any], Any]:
    return lambda i: scale * (i + 1001.0) ** -0.55


OPTIMISERS = {
    "plain": lambda: optax.scale_by_learning_rate(falling(0.3)),
    "PO": lambda: po(
        falling(0.3), decay=0.7, noise=1e-4, noise_decay=0.7, rng_key=random.key(7)
    ),
    "WAG": lambda: wag(falling(0.03), 2.1),
    "WNes": lambda: wnes(falling(0.3), mu=0.3, beta=0.2),
}


def by_svi(field: Any, label: str, words: Array, records: int, every: int) -> Array:
    guide = AutoParticles(MODEL, PARTICLES, init_loc_fn=init_to_uniform)
    svi = SVI(MODEL, guide, OPTIMISERS[label](), loss=field(RBF("median")))

    def record(state: Any, _: None) -> tuple[Any, Array]:
        state = lax.scan(lambda s, _: (svi.update(s, words)[0], None), state, length=every)[0]
        params = svi.get_params(state)
        if label in ("WAG", "WNes"):
            params = wasserstein_eval_params(state.optim_state, params)
        return state, guide.particles(params)["topics_gamma"]

    state = svi.init(random.key(0), words)
    return jax.jit(lambda state: lax.scan(record, state, length=records)[1])(state)


def by_mcmc(kernel: Any, words: Array, records: int, chains: int = PARTICLES) -> Array:
    """Records of the particles or chains, ``(records, chains, K, W)``."""
    options: Any = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=0, num_samples=records, **options)
    mcmc.run(random.key(0), words)
    return jnp.swapaxes(mcmc.get_samples(group_by_chain=True)["topics_gamma"], 0, 1)


def dynamics(flow: str, words: Array, records: int, every: int) -> Array:
    step = PSGHMC(1e-3, flow=flow, friction=0.1, mass=1 / 300)
    start: Any = {"init_from": None, "steps_per_sample": every}
    return by_mcmc(ParVI(MODEL, Blob(RBF("he")), step, **start), words, records)


def langevin(step: float, words: Array, records: int, every: int, chains: int) -> Array:
    schedule = PolynomialSchedule(step * 100**0.33, 100, 0.33)
    kernel = SGRLD(MODEL, schedule, metric=ExpandedMean(), steps_per_sample=every)
    return by_mcmc(kernel, words, records, chains)


@jax.jit
def held_out(gammas: Array, words: Array) -> Array:
    """Mean log probability of the words of each document's second half, ``(documents,)``."""
    seen, unseen = jnp.split(words, 2, axis=1)

    def probability(key: Array, gammas: Array) -> Array:
        topics = gammas / jnp.sum(gammas, -1, keepdims=True)
        mixture = jnp.sum(shares(key, topics, seen), 0) + PRIOR
        mixture /= jnp.sum(mixture, 0)
        return jnp.einsum("kd,kdw->dw", mixture, topics[:, unseen])

    p = jax.vmap(probability)(random.split(random.key(5), len(gammas)), gammas)
    return jnp.mean(jnp.log(jnp.mean(p, 0)), 1)


def corpus(rng_key: Array) -> tuple[Array, Array]:
    """The topics and all documents."""
    keys = random.split(rng_key, 4)
    topics = random.dirichlet(keys[0], jnp.full(VOCABULARY, PRIOR), (TOPICS,))
    mixture = random.dirichlet(keys[1], jnp.full(TOPICS, PRIOR), (DOCUMENTS,))
    z = random.categorical(keys[2], jnp.log(mixture)[:, None], shape=(DOCUMENTS, LENGTH))
    return topics, random.categorical(keys[3], jnp.log(topics)[z])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--records", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="parts of the names of rows")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # particles are few for 15,000 numbers, and HE is for few
    truth, words = corpus(random.key(1))
    train, test = words[HELD_OUT:], words[:HELD_OUT]
    budget = args.records, args.steps // args.records
    rows: dict[str, Callable[[], Array]] = {
        f"SGRLD, {step:g}": lambda e=step: langevin(e, train, *budget, PARTICLES)
        for step in STEPS
    }
    for field in (Blob, GFSD):
        for label in OPTIMISERS:
            rows[f"{field.__name__}, {label}"] = lambda f=field, o=label: by_svi(
                f, o, train, *budget
            )
    for flow in ("det", "fgh"):
        rows[f"PSGHMC, {flow}"] = lambda flow=flow: dynamics(flow, train, *budget)
    marks = [args.records // 4 - 1, args.records // 2 - 1, args.records - 1]
    found: dict[str, Array] = {"true topics": held_out(truth[None], test)}
    print(f"true topics: {np.exp(-np.mean(found['true topics'])):.1f}")
    for name, run in rows.items():
        if args.only and not any(part in name for part in args.only):
            continue
        began = time.perf_counter()
        records = jax.block_until_ready(run())
        seconds = time.perf_counter() - began
        path = [held_out(records[k], test) for k in range(args.records)]
        print(name, [f"{np.exp(-np.mean(p)):.1f}" for p in path], f"{seconds:.0f}", flush=True)


if __name__ == "__main__":
    main()
