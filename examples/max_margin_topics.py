"""
Topics with a margin
====================

Latent Dirichlet allocation finds the topics that describe documents, and a classifier on the shares
of topics comes second. Where a class is in a rare topic, and there are more topics than are fitted,
the topics found are others. A maximum-entropy discrimination topic model (MedLDA; Zhu, Ahmed and
Xing, 2012) finds both at once: with the shares of the topics theta_n in document n, weights eta of
the topics, and the class y = -1 or 1,

    minimise over q   - ELBO(q) + c sum_n max(0, 1 - y_n E_q[eta . theta_n]).

The margin is asked of the *expectation*, not of every draw: ``PosteriorRegularizedELBO`` around a
bound, and ``numpyro.deterministic("margin", ...)`` in the model. A ``numpyro.factor`` with the same
hinge is the expectation of the hinge, which narrows the guide until every draw keeps the margin.

Documents of 80 words are simulated from ten topics, the rows and the columns of 5 x 5 pixels, each
pixel a word. One row stands for the one class and one column for the other, with up to 40 % of the
words. Five topics are fitted to 1,000 documents, of which 500 show their class, for five corpora.
The table has the share of wrong classes of the other 500, by a logistic regression on mean shares
(cross-validated) and by the sign of E_q[eta . theta]; the log density of a word; and the standard
deviation of eta, whose prior has 3.

The exit code is 1 if a margin by expectations does not lower the error of topics followed by a
classifier, or if it narrows eta by more than a half, or the factor by less. ::

    python examples/max_margin_topics.py --out out/max_margin_topics.png

.. image:: /recorded/max_margin_topics.png
   :alt: Topics as pictures of 5 x 5 pixels, without and with a margin, and the error of
         classification by the strength of the margin.

.. literalinclude:: /recorded/max_margin_topics.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/max_margin_topics.png"

import argparse
from functools import partial
from pathlib import Path
import sys
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_sample
from numpyro.infer.autoguide import AutoNormal
import optax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from numpyro_ext.objectives import VRELBO, PosteriorRegularizedELBO

SIDE, TOPICS, WORDS = 5, 5, 80
CLASSES = 2, 7  # the third row, and the third column
STRENGTHS = (0.0, 1.0, 3.0, 10.0)


def bars():
    """``(10, 25)``, the words of the true topics."""
    rows = np.repeat(np.eye(SIDE)[:, :, None], SIDE, 2)
    return np.concatenate([rows, rows.swapaxes(1, 2)]).reshape(2 * SIDE, -1) / SIDE


def simulate(seed, documents):
    """Counts of words, and the classes."""
    rng = np.random.default_rng(seed)
    y = np.where(np.arange(documents) % 2, 1.0, -1.0)
    shares = np.zeros((documents, 2 * SIDE))
    others = [k for k in range(2 * SIDE) if k not in CLASSES]
    shares[:, others] = rng.dirichlet(np.full(len(others), 0.3), documents)
    of_class = rng.uniform(0.0, 0.4, documents)
    shares *= 1 - of_class[:, None]
    shares[np.arange(documents), np.where(y > 0, *CLASSES)] = of_class
    counts = np.stack([rng.multinomial(WORDS, p / p.sum()) for p in shares @ bars()])
    return jnp.asarray(counts, float), jnp.asarray(y)


def hinge(margin):
    return jax.nn.relu(1.0 - margin)


def model(counts, y, factor=0.0):
    """``y`` is 0 where the class is not known; ``factor`` is the strength of the hinge as one."""
    words = counts.shape[1]
    with numpyro.plate("of_topic", TOPICS):
        topics = numpyro.sample("topics", dist.Dirichlet(jnp.full(words, 0.3)))
    eta = numpyro.sample("eta", dist.Normal(0.0, 3.0).expand([TOPICS]).to_event(1))
    with numpyro.plate("documents", len(counts)):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(TOPICS, 0.3)))
        numpyro.factor("words", jnp.sum(counts * jnp.log(shares @ topics + 1e-10), -1))
        margin = numpyro.deterministic("margin", y * (shares @ eta))
        numpyro.factor("hinge", -factor * hinge(margin))


@partial(jax.jit, static_argnames=("by_factor", "steps"))
def fit(rng_key, counts, y, strength, by_factor, steps):
    """100 draws of the guide."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    base, factor = VRELBO(1.0, 2), strength if by_factor else 0.0
    loss = base
    if not by_factor:
        loss = PosteriorRegularizedELBO(base, {"margin": lambda e: strength * hinge(e)}, 4)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), loss)
    state = svi.init(rng_key, counts, y, factor)
    state, _ = lax.scan(lambda s, _: svi.update(s, counts, y, factor), state, None, length=steps)
    key, params = random.fold_in(rng_key, 1), svi.get_params(state)
    return guide.sample_posterior(key, params, sample_shape=(100,))


def classified(x, y, known):
    """Wrong classes of the documents whose class is not known, by logistic regression."""
    grid = {"C": list(np.logspace(-2, 4, 7))}
    found = GridSearchCV(LogisticRegression(max_iter=1000), grid).fit(x[known], y[known])
    return 1 - found.score(x[~known], y[~known])


def scores(draws, counts, y, known):
    """Errors by a classifier and by the sign of the expectation, nats of a word, and sd of eta."""
    shares = np.asarray(draws["shares"].mean(0))
    f = np.asarray(jnp.einsum("sdk,sk->sd", draws["shares"], draws["eta"]).mean(0))
    words = jnp.einsum("sdk,skv->dv", draws["shares"], draws["topics"]) / 100
    nats = jnp.sum(counts * jnp.log(words)) / jnp.sum(counts)
    sign = np.mean(np.sign(f[~known]) != y[~known])
    return classified(shares, y, known), sign, nats, np.median(draws["eta"].std(0))


def ordered(topics, eta):
    """Pictures of the topics by their weights."""
    order = np.argsort(-eta)
    return np.asarray(topics)[order].reshape(-1, SIDE, SIDE), np.asarray(eta)[order]


def main(out, documents, corpora, steps, strengths):
    ways = [("expectation", c) for c in strengths] + [("factor", c) for c in strengths[1:]]
    found, raw, pictures = np.zeros((len(ways), corpora, 4)), [], {}
    began = time.perf_counter()
    for k in range(corpora):
        counts, y = simulate(k, documents)
        known = np.arange(documents) < documents // 2
        labels, seen = np.asarray(y), jnp.where(known, y, 0.0)
        raw.append(classified(np.asarray(counts) / WORDS, labels, known))
        for i, (way, strength) in enumerate(ways):
            draws = fit(random.key(k), counts, seen, strength, way == "factor", steps)
            found[i, k] = scores(draws, counts, labels, known)
            if k == 0 and way == "expectation":
                pictures[strength] = ordered(draws["topics"].mean(0), draws["eta"].mean(0))
    seconds = time.perf_counter() - began
    mean, error = found.mean(1), found.std(1) / max(1, corpora - 1) ** 0.5
    print(f"{'wrong classes, %':>50}\n{'':22}{'classifier':>15}{'sign':>16}", end="")
    print(f"{'word, nats':>17}{'sd of eta':>11}")
    for (way, strength), m, e in zip(ways, mean, error, strict=True):
        name = f"margin of {way}, c = {strength:.0f}" if strength else "topics alone"
        sign = f"{100 * m[1]:9.1f} +- {100 * e[1]:.1f}" if strength else f"{'':16}"
        print(
            f"{name:29}{100 * m[0]:5.1f} +- {100 * e[0]:.1f}{sign}{m[2]:10.3f} +- {e[2]:.3f}"
            f"{m[3]:9.2f}"
        )
    print(f"{'logistic regression on words':29}{100 * np.mean(raw):5.1f}")
    print(f"\n{seconds:.0f} seconds for {len(ways) * corpora} fits")

    fig = plt.figure(figsize=(11, 4), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(1.2, 1))
    best = strengths[1 + int(np.argmin(mean[1 : len(strengths), 1]))]
    axes = left.subplots(2, TOPICS)
    for row, strength in zip(axes, (0.0, best), strict=True):
        topics, eta = pictures[strength]
        for ax, picture, weight in zip(row, topics, eta, strict=True):
            ax.imshow(picture, cmap="Greys", vmin=0, vmax=0.25)
            ax.set(xticks=[], yticks=[])
            if strength:
                ax.set_xlabel(f"eta {weight:+.1f}", fontsize=9)
        row[0].set_ylabel("topics alone" if not strength else f"margin, c = {strength:.0f}")
    left.suptitle("Topics of one corpus; the classes are the middle row and column", fontsize=10)
    ax, n = right.subplots(), len(strengths)
    for name, rows, colour in (
        ("expectation", slice(1, n), "C0"),
        ("factor", slice(n, None), "C1"),
    ):
        ax.errorbar(
            strengths[1:],
            100 * mean[rows, 1],
            100 * error[rows, 1],
            fmt="o-",
            color=colour,
            capsize=3,
            label=f"margin of {name}, by the sign",
        )
    ax.axhline(100 * mean[0, 0], color="0.4", ls="--", label="topics, then a classifier")
    ax.axhline(100 * np.mean(raw), color="0.7", ls=":", label="a classifier on the words")
    ax.set(xlabel="strength c", ylabel="wrong classes, %", title="Documents of unknown class")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    better = mean[1:n, 1].min() < mean[0, 0]
    return 0 if better and mean[1:n, 3].min() > 1.5 and mean[n:, 3].max() < 1.5 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/max_margin_topics.png"))
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--corpora", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS, help="from 0 on")
    args = parser.parse_args()
    sys.exit(main(args.out, args.documents, args.corpora, args.steps, tuple(args.strengths)))
