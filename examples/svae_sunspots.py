"""Forecasts of sunspots
=====================

A linear dynamical system behind a neural network (Johnson et al., 2016) is fitted to the yearly
sunspot numbers of 1700-1979 from statsmodels, and forecasts 1980-2008.

The number of sunspots rises and falls in about eleven years, higher in some cycles than in others,
faster upwards than downwards, and never below zero. A rotation in a latent plane that shrinks and
is driven by noise has such cycles; a network bends its path into the square roots of the counts,
and another network gives each year a Gaussian potential. Years without data have the potential
zero, so that one pass over a series that ends in NaN smooths and forecasts. The script prints the
period of the rotation, and the scores of the forecasts beside the scores of a plain variational
auto-encoder with the same networks and of autoregressions from statsmodels. ::

    python examples/svae_sunspots.py

.. image:: /recorded/svae_sunspots.png
   :alt: Sunspot numbers, their forecasts and bands.

.. literalinclude:: /recorded/svae_sunspots.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/svae_sunspots.png"

import argparse
from pathlib import Path

import jax
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from scipy.stats import norm
from statsmodels.datasets import sunspots
from statsmodels.tsa.ar_model import AutoReg

from numpyro_ext.expfam import MNIW, NIW, Gaussian, GaussianChain
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    LDS,
    SVAEELBO,
    FixedGaussian,
    SVAEGuide,
    allow_missing,
    decoder_network,
    recognition_network,
)

# %%
# The data are one sequence of 280 years, so the plate has one row. Windows as rows would cut the
# series where its state matters, or, if they overlap, count a year several times, and q of the
# dynamics would be too narrow.

table = sunspots.load_pandas().data
YEARS, COUNTS = table["YEAR"].to_numpy().astype(int), table["SUNACTIVITY"].to_numpy()
TRAIN = YEARS < 1980
MEAN, SD = np.sqrt(COUNTS[TRAIN]).mean(), np.sqrt(COUNTS[TRAIN]).std()
Y = ((np.sqrt(COUNTS) - MEAN) / SD).astype(np.float32)
T, ALL = TRAIN.sum(), len(Y)

# %%
# The model and its prior. The precision of the transition matrix is in units of Q, so that one of
# 0.05 beside noise of variance 0.05 allows entries of about 1; with the identity the prior would
# pull the rotation towards zero.

D, NOISE = 2, 0.05
EYE = jnp.eye(D)
INITIAL = {"loc": jnp.zeros(D), "kappa": 1.0, "df": D + 2.0, "scale_matrix": EYE}
DYNAMICS = {"precision": NOISE * EYE, "df": D + 2.0, "scale_matrix": NOISE * EYE}
PRIOR = {
    "initial": NIW.from_standard(**INITIAL),
    "dynamics": MNIW.from_standard(jnp.zeros((D, D)), **DYNAMICS),
}
DECODER = decoder_network(1, hidden=(20,))
RECOGNITION = allow_missing(recognition_network(D, hidden=(20,)))


def system(y):
    Sigma = numpyro.sample("Sigma_1", dist.InverseWishart(D + 2.0, scale_matrix=EYE))
    mu = numpyro.sample("mu_1", dist.MultivariateNormal(jnp.zeros(D), Sigma))
    Q = numpyro.sample("Q", dist.InverseWishart(D + 2.0, scale_matrix=NOISE * EYE))
    rows, columns = jnp.linalg.cholesky(Q), EYE / NOISE**0.5
    A = numpyro.sample("A", dist.MatrixNormal(jnp.zeros((D, D)), rows, columns))
    with numpyro.plate("data", len(y)):
        chain = GaussianChain.from_standard(mu, Sigma, A, Q, y.shape[1])
        x = numpyro.sample("x", GaussianChain.to_distribution(chain))
        observe(x, y)


def plain(y):
    with numpyro.plate("data", len(y)):
        observe(numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), EYE)), y)


def observe(x, y):
    decode = numpyro.module("decoder", DECODER, (D,))
    noise = dist.Normal(*decode(x)).mask(~jnp.isnan(y)).to_event(y.ndim - 1)
    numpyro.sample("y", noise, obs=jnp.nan_to_num(y))


def fit(model, rule, prior, rng_key, y, steps, start=None):
    guide = SVAEGuide(prior, RECOGNITION, rule, init_natural=start)
    optim = optax.multi_transform(
        {"natural": natural_gradient(0.03, guide.domain), "network": optax.adam(1e-2)},
        guide.param_labels,
    )
    svi = SVI(model, guide, optim, SVAEELBO("explicit_only"))
    return guide, svi.run(rng_key, steps, y, progress_bar=False)


# %%
# The start of the dynamics. The default, 0.9 times the identity, treats all directions alike, and
# the network's first potentials show it one: little tells the other coordinate to take part. A
# rotation, here by 0.8, saves the steps that it takes to find one.


def rotation(angle):
    turn = jnp.array([[jnp.cos(angle), -jnp.sin(angle)], [jnp.sin(angle), jnp.cos(angle)]])
    return {**PRIOR, "dynamics": MNIW.from_standard(0.95 * turn, **DYNAMICS)}


# %%
# Forecasts. A row is the series up to some year, with NaN after it. What is forecast is a normal
# marginal of x, and draws of it through the decoder. The parameters are from 1700-1979.


def until(year):
    return jnp.where(YEARS <= year, Y, jnp.nan)[:, None]


def predictive(params, moments, rng_key, num_draws=1000):
    """Mean and scale of y, ``(num_draws, ...)``, given the moments of x."""
    marginals = Gaussian.natural(Gaussian.Mean(moments.x, moments.xx))
    x = Gaussian.sample(rng_key, marginals, (num_draws,))
    loc, scale = DECODER[1](params["decoder$params"], x)
    return loc[..., 0], scale[..., 0]


def ahead(guide, params, years, horizons):
    """Moments of x in these years, from the data until ``horizons`` years before: one pass."""
    rows = jnp.stack([until(year) for year in years - horizons])
    x = jax.jit(guide.local_posterior)(params, rows).mean["x"]
    at = jnp.arange(len(years)), jnp.asarray(years - YEARS[0])
    return Gaussian.Mean(x.x[at], x.xx[at])


def score(params, moments, years, rng_key):
    """Root mean square error, mean log density, and share of the years in the 90 % band."""
    key_x, key_y = random.split(rng_key)
    loc, scale = predictive(params, moments, key_x)
    y = Y[years - YEARS[0]]
    log_p = jax.nn.logsumexp(dist.Normal(loc, scale).log_prob(y), axis=0) - jnp.log(len(loc))
    low, high = band(loc, scale, key_y)
    return np.sqrt(np.mean((loc.mean(0) - y) ** 2)), log_p.mean(), np.mean((low < y) & (y < high))


def band(loc, scale, rng_key):
    draws = loc + scale * random.normal(rng_key, loc.shape)
    return jnp.quantile(draws, jnp.array([0.05, 0.95]), axis=0)


def autoregression(lags, years, horizons):
    """Mean and scale of y of an autoregression that was fitted to 1700-1979."""
    found = AutoReg(Y[:T].astype(float), lags).fit()
    scale = np.sqrt(found.get_prediction(T, 2 * T).var_pred_mean)
    loc = []
    for end, step in zip(years - YEARS[0] - horizons + 1, horizons, strict=True):
        path = AutoReg(Y[:end].astype(float), lags).predict(found.params, end, end + step - 1)
        loc.append(path[-1])
    return np.array(loc), scale[horizons - 1]


def score_autoregression(lags, years, horizons):
    y, (loc, scale) = Y[years - YEARS[0]], autoregression(lags, years, horizons)
    inside = np.abs(y - loc) < norm.ppf(0.95) * scale
    return np.sqrt(np.mean((loc - y) ** 2)), norm.logpdf(y, loc, scale).mean(), inside.mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    key_fit, key_score, key_draw = random.split(random.key(args.seed), 3)

    y = jnp.asarray(Y[:T])[:, None]
    guide, result = fit(system, LDS(), PRIOR, key_fit, y[None], args.steps, rotation(0.8))
    guide.check(system, key_fit, y[None, :5])
    normal = FixedGaussian(Gaussian.from_standard(jnp.zeros(D), EYE))
    vae, plain_result = fit(plain, normal, {}, key_fit, y, args.steps)

    for name, found in (("linear system", result), ("plain auto-encoder", plain_result)):
        print(f"mean of the last 100 losses, {name}: {found.losses[-100:].mean():.1f}")
    weight = MNIW.to_standard(guide.global_natural(result.params)["dynamics"]).weight
    for root in np.linalg.eigvals(np.asarray(weight)):
        period = 2 * np.pi / abs(np.angle(root)) if root.imag else np.inf
        print(f"eigenvalue of E[A]: modulus {abs(root):.3f}, period {period:.1f} years")

    trained, held_out = YEARS[20:T], YEARS[T:]
    questions = {
        "1720-1979, one year ahead": (trained, np.full(len(trained), 1)),
        "1980-2008, one year ahead": (held_out, np.full(len(held_out), 1)),
        "1984-2008, five years ahead": (held_out[4:], np.full(len(held_out) - 4, 5)),
        "1980-2008, from 1979": (held_out, held_out - YEARS[T - 1]),
    }
    everything = ahead(guide, result.params, *np.hstack(list(questions.values())))
    nothing = vae.local_posterior(plain_result.params, jnp.full((1, 1), jnp.nan)).mean["x"]
    start = 0
    for question, (years, horizons) in questions.items():
        now = slice(start, start := start + len(years))
        found = jax.tree.map(lambda leaf, now=now: leaf[now], everything)
        scores = {
            "linear system": score(result.params, found, years, key_score),
            "plain auto-encoder": score(plain_result.params, nothing, years, key_score),
            **{f"AutoReg({k})": score_autoregression(k, years, horizons) for k in (2, 9)},
        }
        print(f"{question}: error, log score, share in the 90 % band")
        for name, (error, log_score, share) in scores.items():
            print(f"  {name:20s}{error:.2f} {log_score:6.2f} {share:5.2f}")

    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / "svae_sunspots.png", guide, result.params, key_draw)


def turned(x, weight):
    """x in coordinates of unit variance in which the transition matrix is a rotation that shrinks.

    The latent plane has no axes of its own; a left eigenvector of the matrix gives a pair of them.
    """
    roots, left = np.linalg.eig(np.asarray(weight).T)
    z = np.asarray(x) @ left[:, np.argmax(roots.imag)]
    return np.stack([z.real, z.imag]) / np.sqrt(np.mean(np.abs(z[:T]) ** 2) / 2)


def counts(y):
    """From a standardised root."""
    return np.maximum(MEAN + SD * np.asarray(y), 0) ** 2


def draw(path, guide, params, rng_key) -> None:
    key_x, key_y = random.split(rng_key)
    found = jax.jit(guide.local_posterior)(params, until(1979)[None]).mean["x"]
    x = jax.tree.map(lambda leaf: leaf[0], found)
    loc, scale = predictive(params, x, key_x)
    low, high = band(loc, scale, key_y)
    middle = jnp.median(loc, axis=0)

    fig = plt.figure(figsize=(11, 7), layout="constrained")
    top, left, right = fig.subplot_mosaic([["a", "a", "a"], ["b", "b", "c"]]).values()
    top.fill_between(YEARS, counts(low), counts(high), color="C0", alpha=0.3, lw=0)
    top.plot(YEARS, counts(middle), "C0", lw=1)
    top.plot(YEARS, COUNTS, "k.", ms=3)
    top.axvline(1979.5, color="0.5", lw=0.8)
    top.set(
        title="sunspots: what was seen, smoothed median and 90 % band, and forecast from 1979",
        xlim=(1700, 2008),
    )

    late = YEARS >= 1960
    held_out = YEARS[T:]
    left.fill_between(
        YEARS[late], counts(low[late]), counts(high[late]), color="C0", alpha=0.3, lw=0
    )
    left.plot(YEARS[late], counts(middle[late]), "C0", label="linear system behind a network")
    mean, sd = autoregression(9, held_out, held_out - 1979)
    for bound in (-1, 1):
        left.plot(held_out, counts(mean + bound * norm.ppf(0.95) * sd), "C1:", lw=1)
    left.plot(held_out, counts(mean), "C1", label="AutoReg(9)")
    left.plot(YEARS[late], COUNTS[late], "k.")
    left.axvline(1979.5, color="0.5", lw=0.8)
    left.legend(loc="upper right")
    left.set(title="forecasts from 1979 with 90 % bands, and what came", ylim=(0, 290))

    weight = MNIW.to_standard(guide.global_natural(params)["dynamics"]).weight
    plane = turned(x.x, weight)
    right.plot(*plane[:, :T], color="0.8", lw=0.6, zorder=0)
    dots = right.scatter(*plane[:, :T], c=YEARS[:T], s=10, cmap="viridis")
    right.plot(*plane[:, T - 1 :], "C3", lw=1.5, label="forecast")
    fig.colorbar(dots, ax=right, label="year")
    right.legend(loc="upper left")
    right.set(title="smoothed path in the latent plane", aspect="equal")
    right.set(xlabel="x[0]", ylabel="x[1]")
    top.set_ylabel("sunspot number")
    left.set_ylabel("sunspot number")
    fig.savefig(path, dpi=100)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
