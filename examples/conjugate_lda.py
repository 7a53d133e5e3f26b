"""
Topics by coordinate ascent
===========================

Latent Dirichlet allocation, where each word of a document belongs to one of K topics: the shares of
the topics in a document, and of the words in a topic, have Dirichlet priors. With
``numpyro_ext.expfam`` its mean field is three lines: the responsibilities of the words, and two
posteriors that are prior plus expected counts.

**Four documents of four words**, two topics: all 65,536 assignments of words to topics are summed,
so the evidence, the probability that two words share a topic, and the probability of the next word
of each document are exact. The table says what mean field loses: it is sure of topics that the data
leave open, as in ``conjugate_ascent.py``, and its next words are likelier to be the topic's.

**2,000 documents of 50 words**, five topics that are known: coordinate ascent reads all documents
for a step of the topics, and natural gradients (Hoffman et al., 2010), by ``natural_gradient``,
read 100. The local posterior of each document is found by ``fixed_point``.

The exit code is 1 if the bound is above the exact evidence or falls at a step of coordinate ascent,
if a next word is off by more than 0.1, or if natural gradients are behind coordinate ascent after
three readings, or further than 0.1 (in total variation) from a true topic. ::

    python examples/conjugate_lda.py --out out/conjugate_lda.png

.. image:: /recorded/conjugate_lda.png
   :alt: Left: next words, exact and by mean field. Middle: the bounds after so many readings.
         Right: words of the five topics, found and true.

.. literalinclude:: /recorded/conjugate_lda.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/conjugate_lda.png"

import argparse
from pathlib import Path
import sys
from typing import NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib.pyplot as plt
import numpy as np
from scipy.optimize import linear_sum_assignment

from numpyro_ext.expfam import Dirichlet, DirichletNatural, fixed_point, multiply
from numpyro_ext.optim import natural_gradient

WORDS = "ball goal team bank coin".split()
TINY = ["ball goal ball team", "goal team ball coin", "bank coin bank coin", "bank coin goal bank"]


class Prior(NamedTuple):
    """Natural parameters of a document's shares of topics, and of a topic's shares of words."""

    shares: DirichletNatural
    topic: DirichletNatural


def symmetric(topics: int, words: int, of_shares: float, of_words: float) -> Prior:
    shares, topic = jnp.full(topics, of_shares), jnp.full(words, of_words)
    return Prior(Dirichlet.from_standard(shares), Dirichlet.from_standard(topic))


def responsibilities(topics: DirichletNatural, shares: DirichletNatural) -> tuple[Array, Array]:
    """``(documents, words, topics)``, and the log of their normalisers."""
    of_word = Dirichlet.mean(topics).log_prob.T
    log_r = Dirichlet.mean(shares).log_prob[:, None] + of_word
    total = logsumexp(log_r, axis=-1)
    return jnp.exp(log_r - total[..., None]), total


def shares_of(prior: Prior, topics: DirichletNatural, counts: Array) -> DirichletNatural:
    """The shares of topics in each document, ``counts`` being ``(documents, words)``."""

    def update(topics: DirichletNatural, shares: DirichletNatural) -> DirichletNatural:
        r, _ = responsibilities(topics, shares)
        return multiply(prior.shares, DirichletNatural(jnp.einsum("dv,dvk->dk", counts, r)))

    num = len(prior.shares.a)
    even = jnp.repeat(counts.sum(1, keepdims=True) / num, num, axis=1)
    first = multiply(prior.shares, DirichletNatural(even))
    return fixed_point(update, topics, first, tol=1e-4, max_iter=100).value


def updated(prior: Prior, topics: DirichletNatural, counts: Array, scale: float = 1.0):
    """The topics: prior plus expected counts of these documents, each ``scale`` times."""
    r, _ = responsibilities(topics, shares_of(prior, topics, counts))
    return multiply(prior.topic, DirichletNatural(scale * jnp.einsum("dv,dvk->kv", counts, r)))


def bound(prior: Prior, topics: DirichletNatural, counts: Array) -> Array:
    """The evidence lower bound at the best local posteriors, in nats."""
    shares = shares_of(prior, topics, counts)
    kl = Dirichlet.kl(shares, prior.shares).sum() + Dirichlet.kl(topics, prior.topic).sum()
    return jnp.sum(counts * responsibilities(topics, shares)[1]) - kl


def start(rng_key: Array, prior: Prior) -> DirichletNatural:
    shape = len(prior.shares.a), len(prior.topic.a)
    return multiply(prior.topic, DirichletNatural(random.gamma(rng_key, 10.0, shape) / 10))


@jax.jit
def improved(prior: Prior, topics: DirichletNatural, counts: Array):
    """The topics after a step of coordinate ascent, and the bound before it."""
    return updated(prior, topics, counts), bound(prior, topics, counts)


def ascend(
    prior: Prior, topics: DirichletNatural, counts: Array, steps: int
) -> tuple[np.ndarray, DirichletNatural]:
    """The bound before each step, and the last topics."""
    bounds = []
    for _ in range(steps):
        topics, value = improved(prior, topics, counts)
        bounds.append(float(value))
    return np.array(bounds), topics


class Answers(NamedTuple):
    together: np.ndarray
    """The probability that two words of the corpus share a topic."""
    next_word: np.ndarray
    """``(documents, words)``"""


def exact(prior: Prior, document: np.ndarray, word: np.ndarray) -> tuple[float, Answers]:
    """The log evidence and what else is summed over all topics of the words of a corpus."""
    num = len(prior.shares.a)
    codes = np.stack(np.unravel_index(np.arange(num ** len(word)), (num,) * len(word)), -1)
    of_document, of_word = (jax.nn.one_hot(x, x.max() + 1) for x in (document, word))

    def gained(prior: DirichletNatural, counts: Array) -> tuple[Array, Array]:
        """Of each row of counts: the log evidence, and the probabilities of what comes next."""
        posterior = multiply(prior, DirichletNatural(counts))
        log_p = Dirichlet.log_partition(posterior) - Dirichlet.log_partition(prior)
        return log_p.sum(), mean_of(posterior)

    @jax.jit
    def one(z: Array) -> tuple[Array, Array]:
        r = jax.nn.one_hot(z, num)
        log_shares, shares = gained(prior.shares, of_document.T @ r)
        log_topics, topics = gained(prior.topic, r.T @ of_word)
        return log_shares + log_topics, shares @ topics

    log_p, coming = jax.lax.map(one, jnp.asarray(codes), batch_size=4096)
    share = np.exp(np.asarray(log_p - logsumexp(log_p), np.float64))
    same = sum((codes == k).T @ ((codes == k) * share[:, None]) for k in range(num))
    return float(logsumexp(log_p)), Answers(same, np.einsum("s,sdv->dv", share, coming))


def mean_of(natural: DirichletNatural) -> Array:
    return (natural.a + 1) / jnp.sum(natural.a + 1, axis=-1, keepdims=True)


def by_mean_field(
    prior: Prior, topics: DirichletNatural, counts: Array, document: np.ndarray, word: np.ndarray
) -> Answers:
    shares = shares_of(prior, topics, counts)
    r = np.asarray(responsibilities(topics, shares)[0])[document, word]
    together = r @ r.T
    np.fill_diagonal(together, 1)
    return Answers(together, np.asarray(mean_of(shares) @ mean_of(topics)))


def corpus(rng_key: Array, documents: int, prior: Prior, length: int) -> tuple[Array, Array]:
    """True topics, and the counts of the words of each document."""
    key_topics, key_shares, key_words = random.split(rng_key, 3)
    topics = Dirichlet.sample(key_topics, prior.topic, (len(prior.shares.a),))
    shares = Dirichlet.sample(key_shares, prior.shares, (documents,))
    logits = jnp.log(shares @ topics)[:, None]
    words = random.categorical(key_words, logits, shape=(documents, length))
    return topics, jax.vmap(lambda w: jnp.bincount(w, length=topics.shape[1]))(words) * 1.0


def matched(found: Array, true: Array) -> tuple[np.ndarray, float]:
    """The topics in the order of the true ones, and the largest total variation from them."""
    distance = 0.5 * np.abs(np.asarray(found)[:, None] - np.asarray(true)).sum(-1)
    row, column = linear_sum_assignment(distance)
    return np.asarray(found)[row[np.argsort(column)]], float(distance[row, column].max())


def small(seed: int) -> tuple[bool, Answers, Answers]:
    prior = symmetric(2, len(WORDS), 0.5, 0.5)
    word = np.array([WORDS.index(w) for text in TINY for w in text.split()])
    document = np.repeat(np.arange(len(TINY)), 4)
    counts = jnp.zeros((len(TINY), len(WORDS))).at[document, word].add(1)
    evidence, truth = exact(prior, document, word)
    keys = random.split(random.key(seed), 10)
    runs = [ascend(prior, start(key, prior), counts, 100) for key in keys]
    never_falls = all(np.all(np.diff(bounds) > -1e-3) for bounds, _ in runs)
    bounds, topics = max(runs, key=lambda run: run[0][-1])
    guess = by_mean_field(prior, topics, counts, document, word)
    off = ~np.eye(len(word), dtype=bool)
    error = np.abs(guess.together - truth.together)[off].mean()
    wrong = np.abs(guess.next_word - truth.next_word).max()
    print("four documents of four words, all assignments summed")
    print(f"  log evidence                        {evidence:9.3f}")
    print(f"  bound, best of 10 starts            {bounds[-1]:9.3f}")
    print(f"  the same, both labellings           {bounds[-1] + np.log(2):9.3f}")
    print(f"  two words together, mean |error|    {error:9.3f}")
    doubt = [np.minimum(x.together, 1 - x.together)[off].mean() for x in (truth, guess)]
    print(f"  doubt about a pair: exact {doubt[0]:.3f}, mean field {doubt[1]:.3f}")
    print(f"  next word, largest |error|          {wrong:9.3f}")
    return bool(never_falls and bounds[-1] < evidence and wrong < 0.1), truth, guess


def main(out: Path, documents: int, seed: int) -> int:
    good, truth, guess = small(seed)
    prior, batch, steps, readings = symmetric(5, 100, 0.2, 0.1), 100, 20, 3
    key_corpus, key_start, key_steps = random.split(random.key(seed), 3)
    true, counts = corpus(key_corpus, documents, prior, 50)
    topics = start(key_start, prior)
    whole, last = ascend(prior, topics, counts, steps)
    optim = natural_gradient(lambda i: (i + 1.0) ** -0.7)

    @jax.jit
    def step(topics: DirichletNatural, state, rng_key: Array):
        some = counts[random.randint(rng_key, (batch,), 0, documents)]
        target = updated(prior, topics, some, documents / batch)
        moves, state = optim.update(jax.tree.map(jnp.subtract, topics, target), state, topics)
        return jax.tree.map(jnp.add, topics, moves), state

    value = jax.jit(lambda topics: bound(prior, topics, counts))
    num = max(1, readings * documents // batch)
    state, read, reached = optim.init(topics), [], []
    for i, key in enumerate(random.split(key_steps, num)):
        if i % max(1, num // 20) == 0:
            read.append(i * batch / documents)
            reached.append(float(value(topics)))
        topics, state = step(topics, state, key)
    read.append(num * batch / documents)
    reached.append(float(value(topics)))
    total = float(counts.sum())
    found, distance = matched(mean_of(topics), true)
    print(f"\n{documents:,} documents of 50 words, five topics; nats a word, and the distance of")
    print("the worst topic from the true one (total variation)")
    rows = {
        f"coordinate ascent, {readings} readings": (whole[readings], None),
        f"coordinate ascent, {steps} readings": (value(last), matched(mean_of(last), true)[1]),
        f"natural gradients, {readings} readings": (reached[-1], distance),
    }
    for name, (nats, far) in rows.items():
        print(f"  {name:<32} {nats / total:9.4f} {'' if far is None else f'{far:9.3f}'}")

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.plot([0, 0.6], [0, 0.6], color="0.7", lw=1, zorder=0)
    for d, text in enumerate(TINY):
        left.plot(truth.next_word[d], guess.next_word[d], ".", ms=9, alpha=0.7, label=text)
    left.set(xlabel="exact", ylabel="mean field", title="Probability of the next word")
    left.legend(frameon=False, fontsize=8, title="after the document")
    best = max(float(value(last)), reached[-1]) + 1e-4 * total
    middle.plot(np.arange(steps), (best - whole) / total, "o-", ms=3, label="coordinate ascent")
    middle.plot(read, (best - np.array(reached)) / total, label=f"{batch} documents a step")
    middle.set(yscale="log", xlabel="readings of all documents", title=f"{documents:,} documents")
    middle.set_ylabel("nats a word below the best bound")
    middle.legend(frameon=False)
    for k in range(len(true)):
        right.loglog(true[k], found[k], ".", ms=4, label=f"topic {k + 1}")
    right.plot([1e-4, 0.6], [1e-4, 0.6], color="0.7", lw=1, zorder=0)
    right.set(xlabel="true", ylabel="natural gradients", title="Share of a word in a topic")
    right.set(xlim=(1e-4, 0.6), ylim=(1e-4, 0.6))
    right.legend(frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    good = good and reached[-1] > whole[readings] and distance < 0.1
    return 0 if good and bool(np.all(np.diff(whole) > -1e-5 * total)) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/conjugate_lda.png"))
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(main(args.out, args.documents, args.seed))
