"""Clusters behind a neural network
================================

A mixture whose components are bent by a decoder (Johnson et al., 2016, figure 1), on the pinwheel.

The arms of the pinwheel are no normals, so a mixture in the plane of the data needs several
components for each. Here the mixture lives in a latent plane, a network bends it into the data, and
another network answers each datum with a Gaussian potential; expectation propagation does the rest.
The script prints the clusters, the held-out log likelihood beside a plain variational auto-encoder
with the same networks, and the responsibilities of new data from ``Predictive`` and ``to_arviz``.

    python examples/svae_pinwheel.py
"""

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
from numpyro.infer import SVI, Predictive
import optax

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.expfam import NIW, Dirichlet, Gaussian
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    GMMEP,
    SVAEELBO,
    FixedGaussian,
    SVAEGuide,
    decoder_network,
    recognition_network,
)
from numpyro_ext.targets import pinwheel

# %%
# The model, the prior in natural parameters, and the fit. ``GMMMeanField()`` in place of
# ``GMMEP()`` is all that mean field takes.

K, D = 15, 2
CONCENTRATION = jnp.full(K, 1 + 0.05 / K)
NIW_PRIOR = {"loc": jnp.zeros((K, D)), "kappa": 1.0, "df": 3.0, "scale_matrix": 3 * jnp.eye(D)}
DECODER = decoder_network(2, residual="identity")
RECOGNITION = recognition_network(D, residual="identity")


def mixture(y, B=None):
    pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
    with numpyro.plate("components", K):
        Sigma = numpyro.sample("Sigma", dist.InverseWishart(3.0, scale_matrix=3 * jnp.eye(D)))
        mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(D), Sigma))
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", len(y), subsample_size=B) as idx:
        z = numpyro.sample("z", dist.Categorical(pi))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
        numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y[idx])


def plain(y, B=None):
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", len(y), subsample_size=B) as idx:
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), jnp.eye(D)))
        numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y[idx])


def plate(y, B=None):
    return numpyro.plate("data", len(y), subsample_size=B)


def fit(model, rule, prior, rng_key, y, steps):
    guide = SVAEGuide(prior, RECOGNITION, rule, create_plates=plate)
    optim = optax.multi_transform(
        {"natural": natural_gradient(0.02, guide.domain), "network": optax.adam(1e-3)},
        guide.param_labels,
    )
    svi = SVI(model, guide, optim, SVAEELBO("explicit_only"))
    return guide, svi, svi.run(rng_key, steps, y, 50, progress_bar=False)


# %%
# What is asked of a fit. The held-out log likelihood is an importance-sampling estimate with 500
# draws of x from q for each point, at the expected precisions of the components.


def prior_of_x(guide, params):
    natural = guide.global_natural(params)
    if not natural:
        return dist.MultivariateNormal(jnp.zeros(D), jnp.eye(D))
    pi = (natural["pi"].a + 1) / (natural["pi"].a + 1).sum()
    m, _, nu, S = NIW.to_standard(natural["components"])
    parts = dist.MultivariateNormal(m, S / nu[:, None, None])
    return dist.MixtureSameFamily(dist.Categorical(pi), parts)


def held_out(guide, params, rng_key, y):
    """Mean log likelihood of a row, in nats."""
    q = Gaussian.to_distribution(guide.local_posterior(params, y).natural["x"])
    x = q.sample(rng_key, (500,))
    noise = dist.Normal(*DECODER[1](params["decoder$params"], x)).to_event(1)
    log_w = noise.log_prob(y) + prior_of_x(guide, params).log_prob(x) - q.log_prob(x)
    return float(jnp.mean(jax.nn.logsumexp(log_w, axis=0) - jnp.log(500)))


def purity(cluster, labels):
    table = np.zeros((K, 5))
    np.add.at(table, (np.asarray(cluster), np.asarray(labels)), 1)
    return table.max(1).sum() / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    key_data, key_new, key_fit, key_draw = random.split(random.key(0), 4)
    y, _ = pinwheel(key_data)
    new, labels = pinwheel(key_new, num_per_class=50)

    prior = {
        "pi": Dirichlet.from_standard(CONCENTRATION),
        "components": NIW.from_standard(**NIW_PRIOR),
    }
    svae, svi, result = fit(mixture, GMMEP(), prior, key_fit, y, args.steps)
    svae.check(mixture, key_fit, y)
    normal = FixedGaussian(Gaussian.from_standard(jnp.zeros(D), jnp.eye(D)))
    vae, _, plain_result = fit(plain, normal, {}, key_fit, y, args.steps)

    r = svae.local_posterior(result.params, new).mean["z"].probs
    cluster = r.argmax(1)
    print("held-out log likelihood of a point, in nats")
    print(f"  mixture behind the network  {held_out(svae, result.params, key_draw, new):.3f}")
    print(f"  plain auto-encoder          {held_out(vae, plain_result.params, key_draw, new):.3f}")
    found = len(np.unique(np.asarray(cluster)))
    print(f"{found} clusters of new points, purity {purity(cluster, labels):.3f}")

    # The same responsibilities as draws of z.
    draws = Predictive(svae, params=result.params, num_samples=500)(key_draw, new)
    shares = jax.nn.one_hot(draws["z"], K).mean(0)
    print(f"largest difference of shares and responsibilities {jnp.abs(shares - r).max():.3f}")
    tree = to_arviz(svi, result=result, model_args=(new,), num_samples=500)
    print(f"posterior of new points: {dict(tree.posterior['z'].sizes)}")
    print(diagnose(svi, result=result, model_args=(y,), num_samples=200))

    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / "svae_pinwheel.png", new, cluster, svae, vae, result, plain_result, key_draw)


def draw(path, new, cluster, svae, vae, result, plain_result, rng_key) -> None:
    fig, axes = plt.subplots(1, 4, figsize=(14, 3.6))
    colours = plt.get_cmap("tab20")(np.asarray(cluster) % 20)
    axes[0].scatter(*new.T, s=6, c=colours)
    axes[0].set_title("new points by cluster")
    x = svae.local_posterior(result.params, new).mean["x"].x
    axes[1].scatter(*x.T, s=6, c=colours)
    axes[1].set_title("where they are in the latent plane")
    for ax, guide, fitted, name in (
        (axes[2], svae, result, "draws of the mixture"),
        (axes[3], vae, plain_result, "draws of the plain auto-encoder"),
    ):
        key_x, key_y = random.split(rng_key)
        x = prior_of_x(guide, fitted.params).sample(key_x, (1500,))
        loc, scale = DECODER[1](fitted.params["decoder$params"], x)
        points = loc + scale * random.normal(key_y, loc.shape)
        ax.scatter(*points.T, s=2, c="0.3")
        ax.set_title(name)
    for ax in axes[[0, 2, 3]]:
        ax.set(xlim=(-22, 22), ylim=(-22, 22), aspect="equal")
    fig.tight_layout()
    fig.savefig(path, dpi=100)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
