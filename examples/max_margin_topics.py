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

Other ``--ways``: ``assignments``, the margin of the mean assignment of the words to topics, as in
the paper, in place of theta; and ``slda``, supervised LDA (Blei and McAuliffe, 2007), the baseline
with a likelihood of the class. With ``--numbers`` a document has a number in place of its class,
how much of it comes from the one rare topic, or minus how much from the other, and the hinge is the
epsilon-insensitive loss, c max(0, abs(y - E[eta . theta]) - 0.1).

The exit code is 1 if a margin by expectations does not lower the error of topics followed by a
classifier, or if it narrows eta by more than a half, or the factor by less. ::

    python examples/max_margin_topics.py --out out/max_margin_topics.png
    python examples/max_margin_topics.py --corpora 2 --strengths 0 10 --ways assignments slda
    python examples/max_margin_topics.py --numbers --corpora 2 --strengths 0 10 \
        --ways assignments slda

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
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import GridSearchCV

from numpyro_ext.objectives import VRELBO, PosteriorRegularizedELBO

SIDE, TOPICS, WORDS = 5, 5, 80
CLASSES = 2, 7  # the third row, and the third column
STRENGTHS = (0.0, 1.0, 3.0, 10.0)


def bars():
    """``(10, 25)``, the words of the true topics."""
    rows = np.repeat(np.eye(SIDE)[:, :, None], SIDE, 2)
    return np.concatenate([rows, rows.swapaxes(1, 2)]).reshape(2 * SIDE, -1) / SIDE


def simulate(seed, documents, numbers):
    """Counts of words, and the classes or the numbers, of which none is 0."""
    rng = np.random.default_rng(seed)
    y = np.where(np.arange(documents) % 2, 1.0, -1.0)
    shares = np.zeros((documents, 2 * SIDE))
    others = [k for k in range(2 * SIDE) if k not in CLASSES]
    shares[:, others] = rng.dirichlet(np.full(len(others), 0.3), documents)
    of_class = rng.uniform(0.0, 0.4, documents)
    shares *= 1 - of_class[:, None]
    shares[np.arange(documents), np.where(y > 0, *CLASSES)] = of_class
    counts = np.stack([rng.multinomial(WORDS, p / p.sum()) for p in shares @ bars()])
    return jnp.asarray(counts, float), jnp.asarray(5 * y * of_class if numbers else y)


def hinge(margin):
    return jax.nn.relu(1.0 - margin)


def insensitive(residual):
    return jax.nn.relu(jnp.abs(residual) - 0.1)


def predictor(counts, shares, topics, eta, way):
    """``(documents,)``, eta . theta, or the same of the mean assignment of the words to topics."""
    if way in ("assignments", "slda"):
        of_word = shares[:, None, :] * topics.T
        of_word = of_word / (of_word.sum(-1, keepdims=True) + 1e-10)
        shares = jnp.einsum("dv,dvk->dk", counts, of_word) / WORDS
    return shares @ eta


def model(counts, y, factor=0.0, way="expectation", numbers=False):
    """``y`` is 0 where it is not known; ``factor`` is the strength of the hinge as one."""
    words = counts.shape[1]
    with numpyro.plate("of_topic", TOPICS):
        topics = numpyro.sample("topics", dist.Dirichlet(jnp.full(words, 0.3)))
    eta = numpyro.sample("eta", dist.Normal(0.0, 3.0).expand([TOPICS]).to_event(1))
    with numpyro.plate("documents", len(counts)):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.full(TOPICS, 0.3)))
        numpyro.factor("words", jnp.sum(counts * jnp.log(shares @ topics + 1e-10), -1))
        f = predictor(counts, shares, topics, eta, way)
        if way == "slda":
            sd = numpyro.param("sd", 0.5, constraint=dist.constraints.positive)
            of_y = dist.Normal(f, sd) if numbers else dist.Bernoulli(logits=f)
            numpyro.sample("y", of_y.mask(y != 0), obs=y if numbers else (y > 0).astype(float))
        margin = numpyro.deterministic("margin", y * f)
        numpyro.deterministic("residual", jnp.where(y == 0, 0.0, y - f))
        numpyro.factor("hinge", -factor * hinge(margin))


@partial(jax.jit, static_argnames=("way", "steps", "numbers"))
def fit(rng_key, counts, y, strength, way, steps, numbers=False):
    """100 draws of the guide."""
    guide = AutoNormal(model, init_loc_fn=init_to_sample)
    loss = VRELBO(1.0, 2)
    data = counts, y, strength if way == "factor" else 0.0, way, numbers
    if way in ("expectation", "assignments"):
        site, penalty = ("residual", insensitive) if numbers else ("margin", hinge)
        loss = PosteriorRegularizedELBO(loss, {site: lambda e: strength * penalty(e)}, 4)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.05, steps)), loss)
    state = svi.init(rng_key, *data)
    state, _ = lax.scan(lambda s, _: svi.update(s, *data), state, None, length=steps)
    key, params = random.fold_in(rng_key, 1), svi.get_params(state)
    return guide.sample_posterior(key, params, sample_shape=(100,))


def error_of(f, y):
    """The share of wrong signs, or, of numbers, the root mean squared error over their sd."""
    if set(y) == {-1.0, 1.0}:
        return np.mean(np.sign(f) != y)
    return np.mean((f - y) ** 2) ** 0.5 / np.std(y)


def classified(x, y, known):
    """The error where y is not known, by logistic regression, or by ridge regression of numbers."""
    if set(y) != {-1.0, 1.0}:
        ridge = RidgeCV(np.logspace(-4, 2, 13)).fit(x[known], y[known])
        return error_of(ridge.predict(x[~known]), y[~known])
    grid = {"C": list(np.logspace(-2, 4, 7))}
    found = GridSearchCV(LogisticRegression(max_iter=1000), grid).fit(x[known], y[known])
    return 1 - found.score(x[~known], y[~known])


def scores(draws, counts, y, known, way):
    """Errors by a classifier and by the sign of the expectation, nats of a word, and sd of eta."""
    shares = np.asarray(draws["shares"].mean(0))
    each = jax.jit(jax.vmap(lambda *draw: predictor(counts, *draw, way)))
    f = np.asarray(each(draws["shares"], draws["topics"], draws["eta"]).mean(0))
    words = jnp.einsum("sdk,skv->dv", draws["shares"], draws["topics"]) / 100
    nats = jnp.sum(counts * jnp.log(words)) / jnp.sum(counts)
    sign = error_of(f[~known], y[~known])
    return classified(shares, y, known), sign, nats, np.median(draws["eta"].std(0))


def ordered(topics, eta):
    """Pictures of the topics by their weights."""
    order = np.argsort(-eta)
    return np.asarray(topics)[order].reshape(-1, SIDE, SIDE), np.asarray(eta)[order]


NAMES = {
    "expectation": "margin of expectation",
    "factor": "margin of factor",
    "assignments": "margin of assignments",
    "slda": "supervised LDA",
}


def main(out, documents, corpora, steps, strengths, kinds, numbers):
    ways = [(kinds[0], 0.0)]
    ways += [(kind, c) for kind in kinds for c in (strengths[1:] if kind != "slda" else (1.0,))]
    found, raw, pictures = np.zeros((len(ways), corpora, 4)), [], {}
    began = time.perf_counter()
    for k in range(corpora):
        counts, y = simulate(k, documents, numbers)
        known = np.arange(documents) < documents // 2
        labels, seen = np.asarray(y), jnp.where(known, y, 0.0)
        raw.append(classified(np.asarray(counts) / WORDS, labels, known))
        for i, (way, strength) in enumerate(ways):
            way = way if strength else "expectation"
            draws = fit(random.key(k), counts, seen, strength, way, steps, numbers)
            found[i, k] = scores(draws, counts, labels, known, way)
            if k == 0:
                pictures[i] = ordered(draws["topics"].mean(0), draws["eta"].mean(0))
    seconds = time.perf_counter() - began
    mean, error = found.mean(1), found.std(1) / max(1, corpora - 1) ** 0.5
    title = "root mean squared error, % of the sd" if numbers else "wrong classes, %"
    print(f"{title:>50}\n{'':22}{'classifier':>15}{'sign':>16}", end="")
    print(f"{'word, nats':>17}{'sd of eta':>11}")
    for (way, strength), m, e in zip(ways, mean, error, strict=True):
        name = f"{NAMES[way]}, c = {strength:.0f}" if way != "slda" else NAMES[way]
        name = name if strength else "topics alone"
        sign = f"{100 * m[1]:9.1f} +- {100 * e[1]:.1f}" if strength else f"{'':16}"
        print(
            f"{name:29}{100 * m[0]:5.1f} +- {100 * e[0]:.1f}{sign}{m[2]:10.3f} +- {e[2]:.3f}"
            f"{m[3]:9.2f}"
        )
    regression = f"{'ridge' if numbers else 'logistic'} regression on words"
    print(f"{regression:29}{100 * np.mean(raw):5.1f}")
    print(f"\n{seconds:.0f} seconds for {len(ways) * corpora} fits")

    fig = plt.figure(figsize=(11, 4), layout="constrained")
    left, right = fig.subfigures(1, 2, width_ratios=(1.2, 1))
    best = 1 + int(np.argmin(mean[1:, 1]))
    axes = left.subplots(2, TOPICS)
    for row, i in zip(axes, (0, best), strict=True):
        (way, strength), (topics, eta) = ways[i], pictures[i]
        for ax, picture, weight in zip(row, topics, eta, strict=True):
            ax.imshow(picture, cmap="Greys", vmin=0, vmax=0.25)
            ax.set(xticks=[], yticks=[])
            if strength:
                ax.set_xlabel(f"eta {weight:+.1f}", fontsize=9)
        row[0].set_ylabel(f"{NAMES[way]}, c = {strength:.0f}" if strength else "topics alone")
    left.suptitle("Topics of one corpus; the classes are the middle row and column", fontsize=10)
    ax = right.subplots()
    for kind in kinds:
        rows = [i for i, (way, strength) in enumerate(ways) if way == kind and strength]
        points = [ways[i][1] for i in rows], 100 * mean[rows, 1], 100 * error[rows, 1]
        ax.errorbar(*points, fmt="o-", capsize=3, label=f"{NAMES[kind]}, by the sign")
    ax.axhline(100 * mean[0, 0], color="0.4", ls="--", label="topics, then a classifier")
    ax.axhline(100 * np.mean(raw), color="0.7", ls=":", label=regression)
    ax.set(xlabel="strength c", ylabel=title, title="Documents of unknown class")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    if numbers or not {"expectation", "factor"} <= {*kinds}:
        return 0
    by_mean, by_factor = (
        mean[[way == kind for way, _ in ways]] for kind in ("expectation", "factor")
    )
    better = by_mean[1:, 1].min() < mean[0, 0] and by_mean[1:, 3].min() > 1.5
    return 0 if better and by_factor[:, 3].max() < 1.5 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/max_margin_topics.png"))
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--corpora", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS, help="from 0 on")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=["expectation", "factor"])
    parser.add_argument("--numbers", action="store_true", help="in place of classes")
    args = parser.parse_args()
    sizes = args.documents, args.corpora, args.steps, tuple(args.strengths)
    sys.exit(main(args.out, *sizes, args.ways, args.numbers))
