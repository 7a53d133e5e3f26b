"""
Binary latent variables: a sigmoid belief network
=================================================

A sigmoid belief network has layers of binary units, each a Bernoulli whose log odds are linear in
the layer above. A draw of a binary unit has no derivative by the guide's parameters, so that
``Trace_ELBO`` cannot be used. NumPyro's ``TraceGraph_ELBO`` takes score functions, in which each
draw is multiplied by its whole log weight, and on a minibatch of B of N rows by N / B once more;
``VIMCO`` (Mnih and Rezende, 2016) takes K draws of each image, subtracts from the log weight of one
what the others predict, and so needs no baseline network, while its bound is the one of
``IWELBO(K)``, which is tighter than the ELBO.

Wake-sleep multiplies no score by a log weight. ``WakeSleep`` (Hinton et al., 1995) trains the guide
on dreams, images and units that the network draws. ``ReweightedWakeSleep`` (Bornschein and Bengio,
2015) trains it on the guide's own draws by their importance weights, or by half on each. For the
network the former has the ELBO, and the latter the bound of K draws, as ``VIMCO`` has.

The digits of scikit-learn (8 x 8, a pixel is on above 7), 1,500 to learn from and 297 to test; 50
units below 20; all losses take ten draws of each of 100 images a step, and the same steps of Adam
from the same start. The table has the log likelihood of a test image, estimated by 1,000 importance
draws with the guide of each (a lower bound, nats), the ELBO, and the time of a step. The fit that
each pixel has by itself is the line to beat.

The exit code is 1 if VIMCO is not at least half a nat better than ``TraceGraph_ELBO``.
::

    python examples/sigmoid_belief_network.py --out out/sigmoid_belief_network.png

.. image:: /recorded/sigmoid_belief_network.png
   :alt: Test digits, and images drawn from the networks that each loss has trained.

.. literalinclude:: /recorded/sigmoid_belief_network.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/sigmoid_belief_network.png"

import argparse
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
from numpyro.infer import SVI, TraceGraph_ELBO
import optax
from sklearn.datasets import load_digits

from numpyro_ext.objectives import VIMCO, ReweightedWakeSleep, WakeSleep

PIXELS, BELOW, ABOVE, BATCH = 64, 50, 20, 100


def layer(name, rng_key, inputs, sizes):
    """Log odds that are linear in the layer above."""
    start = random.normal(rng_key, sizes) / sizes[0] ** 0.5
    return inputs @ numpyro.param(f"{name}_w", start) + numpyro.param(
        f"{name}_b", jnp.zeros(sizes[1])
    )


def units(name, log_odds, obs=None):
    return numpyro.sample(name, dist.Bernoulli(logits=log_odds).to_event(1), obs=obs)


def model(x, batch=BATCH):
    top = numpyro.param("top", jnp.zeros(ABOVE))
    with numpyro.plate("images", len(x), subsample_size=batch) as idx:
        above = units("above", jnp.broadcast_to(top, (len(idx), ABOVE)))
        below = units("below", layer("down", random.key(1), above, (ABOVE, BELOW)))
        units("x", layer("pixels", random.key(2), below, (BELOW, PIXELS)), obs=x[idx])


def guide(x, batch=BATCH):
    with numpyro.plate("images", len(x), subsample_size=batch) as idx:
        below = units("below", layer("up", random.key(3), x[idx], (PIXELS, BELOW)))
        units("above", layer("up2", random.key(4), below, (BELOW, ABOVE)))


def pictures():
    x = (load_digits().images.reshape(-1, PIXELS) > 7).astype(np.float32)
    x = x[np.random.default_rng(0).permutation(len(x))]
    return jnp.asarray(x[:1500]), jnp.asarray(x[1500:])


def per_image(loss, params, x, draws):
    """Minus the loss of an image; few images at once, since each has so many draws."""

    @jax.jit
    def of_some(x):
        return loss.loss(random.key(5), params, model, guide, x, batch=None)

    pieces = np.array_split(np.asarray(x), max(1, len(x) * draws // 20_000))
    total = sum(float(of_some(jnp.asarray(piece))) for piece in pieces)
    return -total / len(x)


def train(rng_key, loss, x, steps):
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(3e-3, steps)), loss)
    state = svi.init(rng_key, x)
    run = jax.jit(lambda s, x: lax.fori_loop(0, steps, lambda _, s: svi.update(s, x)[0], s))
    run = run.lower(state, x).compile()
    began = time.perf_counter()
    state = jax.block_until_ready(run(state, x))
    return svi.get_params(state), (time.perf_counter() - began) / steps


def dream(rng_key, params, num):
    """Probabilities of the pixels of new images."""
    keys = random.split(rng_key, 2)
    above = random.bernoulli(keys[0], jax.nn.sigmoid(params["top"]), (num, ABOVE))
    below = jax.nn.sigmoid(above @ params["down_w"] + params["down_b"])
    below = random.bernoulli(keys[1], below)
    return jax.nn.sigmoid(below @ params["pixels_w"] + params["pixels_b"])


def main(out, steps, draws, seed):
    learn, test = pictures()
    p = jnp.clip(learn.mean(0), 0.01, 0.99)
    alone = float(jnp.mean(jnp.sum(jnp.log(jnp.where(test > 0, p, 1 - p)), 1)))
    print(f"{'':40}{'log likelihood':>16}{'ELBO':>9}{'ms a step':>11}")
    print(f"{'each pixel alone':40}{alone:16.2f}")
    found, params = {}, {}
    for name, loss in {
        "TraceGraph_ELBO(10)": TraceGraph_ELBO(10),
        "VIMCO(10)": VIMCO(num_particles=10),
        "WakeSleep(10)": WakeSleep(10),
        "ReweightedWakeSleep(10)": ReweightedWakeSleep(10),
        "ReweightedWakeSleep(10, both)": ReweightedWakeSleep(10, guide_update="both"),
    }.items():
        params[name], seconds = train(random.key(seed), loss, learn, steps)
        found[name] = per_image(VIMCO(num_particles=draws), params[name], test, draws)
        elbo = per_image(TraceGraph_ELBO(), params[name], test, 1)
        print(f"{name:40}{found[name]:16.2f}{elbo:9.2f}{1000 * seconds:11.2f}", flush=True)

    fig, axes = plt.subplots(2, 3, figsize=(10, 7.2), layout="constrained")
    shown = {"test images": test[:64]}
    shown |= {f"dreams, {name}": dream(random.key(6), params[name], 64) for name in params}
    for ax, (title, images) in zip(axes.flat, shown.items(), strict=True):
        grid = np.asarray(images).reshape(8, 8, 8, 8)
        grid = np.pad(grid, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.5)
        ax.imshow(grid.transpose(0, 2, 1, 3).reshape(80, 80), cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.set_title(title, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    return 0 if found["VIMCO(10)"] > found["TraceGraph_ELBO(10)"] + 0.5 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/sigmoid_belief_network.png"))
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--draws", type=int, default=1000, help="of each test image")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(main(args.out, args.steps, args.draws, args.seed))
