"""VAE, IWAE and VR-max on binary images
=====================================

Three orders of one bound are compared (Li and Turner, 2016, section 5.2).

The same decoder and encoder, one tanh layer each, are trained with ``VRELBO`` of order 1 (VAE), 0
(IWAE) and -inf (VR-max, which by ``gradient="single"`` has one backward pass whatever K). On the
Caltech 101 silhouettes the protocol is the published one: 500 units, 200 latent dimensions, batches
of 20 images, 255 epochs in 8 stages of 2^i epochs at Adam's rate 1e-3 * 10^(-i/7), K = 5 particles
for each image. The script scores the test images by the importance-weighted bound with 5000
particles, after the last epoch and after the one that is best on validation images, and saves
samples of each model. It also saves the trained parameters, which ``--trained`` scores without
training. The second table says why VR-max may differentiate one particle alone: the share that the
largest of the K weights of a training image has in their sum, in the mean over 200 images.

The first command requires no data files (scikit-learn's 8x8 digits and a small network), and the
second uses the silhouettes. ::

    python examples/vae_silhouettes.py
    python examples/vae_silhouettes.py --data-dir data

.. image:: /recorded/vae_silhouettes.png
   :alt: Images of the data, and samples of the auto-encoder, IWAE and VR-max.

.. literalinclude:: /recorded/vae_silhouettes.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/vae_silhouettes.png"

import argparse
from functools import partial
from pathlib import Path
import sys
import time

import jax
from jax import lax, random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
from tqdm.auto import trange

from numpyro_ext.diagnostics import evidence_bounds
from numpyro_ext.objectives import VRELBO, log_weights

METHODS = {"VAE": 1.0, "IWAE": 0.0, "VR-max": -np.inf}
# By Li and Turner (2016), for 5 and for 50 particles.
PUBLISHED = {"VAE": (-119.69, -119.61), "IWAE": (-117.89, -117.21), "VR-max": (-118.01, -117.10)}


def load_images(data_dir: Path | None):
    """Binary ``(train, validation, test)`` images, one row each."""
    if data_dir is None:
        from sklearn.datasets import load_digits

        images = (load_digits().data > 7.5).astype(np.float32)
        order = np.random.default_rng(0).permutation(len(images))
        return np.split(images[order], [1200, 1500])
    from scipy.io import loadmat

    path = data_dir / "silhouettes" / "caltech101_silhouettes_28_split1.mat"
    if not path.exists():
        raise SystemExit(f"no data at {path}.")
    data = loadmat(path)
    # An object is black (0) on white in the file; here its pixels are the ones.
    return [1.0 - data[f"{part}_data"].astype(np.float32) for part in ("train", "val", "test")]


def make_model(num_pixels: int, latent: int, width: int):
    decoder = stax.serial(stax.Dense(width), stax.Tanh, stax.Dense(num_pixels))
    encoder = stax.serial(
        stax.Dense(width),
        stax.Tanh,
        stax.FanOut(2),
        stax.parallel(stax.Dense(latent), stax.Dense(latent)),
    )

    def model(images):
        decode = numpyro.module("decoder", decoder, (latent,))
        with numpyro.plate("images", images.shape[0]):
            z = numpyro.sample("z", dist.Normal().expand([latent]).to_event(1))
            numpyro.sample("x", dist.Bernoulli(logits=decode(z)).to_event(1), obs=images)

    def guide(images):
        encode = numpyro.module("encoder", encoder, (num_pixels,))
        loc, log_scale = encode(images)
        with numpyro.plate("images", images.shape[0]):
            numpyro.sample("z", dist.Normal(loc, jnp.exp(log_scale)).to_event(1))

    return model, guide, decoder[1]


def adam_in_stages(
    rate: float, num_stages: int, steps_per_epoch: int
) -> optax.GradientTransformation:
    """Adam whose rate falls by 10^(1/7) at the end of stage i, which has 2^i epochs."""
    ends = {steps_per_epoch * (2**i - 1): 10 ** (-1 / 7) for i in range(1, num_stages)}
    return optax.adam(optax.piecewise_constant_schedule(rate, ends), eps=1e-4)


def train(svi, rng_key, images, validation, epochs: int, batch: int, label: str):
    """The parameters of the last epoch and of the one that is best on the validation images, the
    number of the latter, the seconds of processor time of an epoch, and the shares of the largest
    weights at the end of each stage."""
    num_batches = len(images) // batch
    key_init, key_shuffle = random.split(rng_key)
    state = svi.init(key_init, images[:batch])

    @jax.jit
    def epoch(state, key):
        order = random.permutation(key, len(images))[: num_batches * batch]
        return lax.scan(lambda s, i: svi.update(s, images[i]), state, order.reshape(-1, batch))

    best, seconds, shares = (-np.inf, None, 0), [], []
    bar = trange(1, epochs + 1, desc=label, mininterval=10)
    for i in bar:
        start = time.process_time()
        state, losses = jax.block_until_ready(epoch(state, random.fold_in(key_shuffle, i)))
        seconds.append(time.process_time() - start)
        params = svi.get_params(state)
        if i & (i + 1) == 0:
            options = {"num_samples": svi.loss.num_particles}
            lw = log_weights(key_shuffle, params, svi.model, svi.guide, images[:200], **options)
            shares.append(evidence_bounds(lw).max_weight_share.mean())
        if i % 5 == 0 or i == epochs:
            score = float(test_bound(params, svi.model, svi.guide, validation, 50).mean())
            best = max(best, (score, params, i), key=lambda x: x[0])
            postfix = f"loss {losses.mean() / batch:.2f}, validation {-score:.2f}"
            bar.set_postfix_str(f"{postfix}, best {-best[0]:.2f} at {best[2]}")
    return svi.get_params(state), best[1], best[2], float(np.median(seconds)), shares


def trained(path: Path, svi, rng_key, images, fit):
    """What ``fit()`` gives, from the file if it is there."""
    if path.exists():
        _, unravel = ravel_pytree(svi.get_params(svi.init(rng_key, images)))
        with np.load(path) as file:
            last, best = (unravel(jnp.asarray(file[name])) for name in ("last", "best"))
            return last, best, int(file["epoch"]), float(file["seconds"]), file["shares"]
    last, best, epoch, seconds, shares = fit()
    path.parent.mkdir(parents=True, exist_ok=True)
    flat = {"last": ravel_pytree(last)[0], "best": ravel_pytree(best)[0]}
    np.savez(path, **flat, epoch=epoch, seconds=seconds, shares=shares)
    return last, best, epoch, seconds, shares


@partial(jax.jit, static_argnums=(1, 2, 4))
def bound_of_some(params, model, guide, images, num_particles: int) -> jax.Array:
    options = {"num_samples": num_particles, "batch_size": 10}
    log_w = log_weights(random.key(7), params, model, guide, images, **options)
    return logsumexp(log_w, axis=0) - jnp.log(num_particles)


def test_bound(params, model, guide, images, num_particles: int) -> np.ndarray:
    """The importance-weighted bound of every image, nats, 100 images at once."""
    starts = range(0, len(images), 100)
    some = [images[i : i + 100] for i in starts]
    return np.concatenate([bound_of_some(params, model, guide, x, num_particles) for x in some])


def show(values: np.ndarray) -> str:
    return f"{values.mean():.2f} +- {values.std(ddof=1) / np.sqrt(len(values)):.2f}"


def draw_picture(rows: dict[str, np.ndarray], side: int, path: Path) -> None:
    fig, axes = plt.subplots(len(rows), 1, figsize=(10, 0.8 * len(rows)), constrained_layout=True)
    for ax, (label, images) in zip(axes, rows.items(), strict=True):
        strip = np.concatenate([im.reshape(side, side) for im in images], axis=1)
        ax.imshow(strip, cmap="gray_r", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
        ax.set_ylabel(label, rotation=0, ha="right", va="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="holds silhouettes/; without it: digits")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--stages", type=int, default=8, help="stage i has 2^i epochs")
    parser.add_argument(
        "--rate", type=float, help="Adam's first: 1e-3 on silhouettes, 5e-3 on digits"
    )
    parser.add_argument("--particles", type=int, default=5)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--latent", type=int, help="200 on silhouettes, 20 on digits")
    parser.add_argument("--width", type=int, help="500 on silhouettes, 200 on digits")
    parser.add_argument("--test-particles", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trained", action="store_true", help="score what was saved before")
    parser.add_argument("--out", type=Path, default=Path("out/vae_silhouettes.png"))
    options = parser.parse_args()
    offline = options.data_dir is None
    stages = options.stages
    latent = options.latent or (20 if offline else 200)
    width = options.width or (200 if offline else 500)
    rate = options.rate or (5e-3 if offline else 1e-3)
    epochs = 2**stages - 1

    train_images, validation, test_images = (jnp.asarray(a) for a in load_images(options.data_dir))
    validation = validation[:500]
    num_pixels = train_images.shape[1]
    side = round(num_pixels**0.5)
    model, guide, decode = make_model(num_pixels, latent, width)
    draws = random.normal(random.key(3), (16, latent))
    pictures = {"data": np.asarray(test_images[:16])}
    print(
        f"d{width}-s{latent}, K = {options.particles}, {epochs} epochs, {len(test_images)} test"
        f" images; test log-likelihood: importance-weighted bound, {options.test_particles}"
        " particles.\n\n| method | last epoch | above the VAE | published | best epoch |"
        " above the VAE | CPU s per epoch |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    last_of, best_of, shares_of = {}, {}, {}
    for label in options.only:
        alpha = METHODS[label]
        gradient = "single" if label == "VR-max" else "standard"
        loss = VRELBO(alpha, options.particles, gradient=gradient)
        optim = adam_in_stages(rate, stages, len(train_images) // options.batch)
        svi = SVI(model, guide, optim, loss)
        key = random.key(options.seed)
        data = (train_images, validation, epochs, options.batch, label)
        path = options.out.with_name(f"{options.out.stem}_{label}.npz")
        if not options.trained:
            path.unlink(missing_ok=True)
        fit = partial(train, svi, key, *data)
        start = train_images[: options.batch]
        last, best, epoch, seconds, shares_of[label] = trained(path, svi, key, start, fit)
        cells = [label]
        for params, of in ((last, last_of), (best, best_of)):
            of[label] = test_bound(params, model, guide, test_images, options.test_particles)
            cells.append(show(of[label]) + ("" if of is last_of else f" ({epoch})"))
            both = label != "VAE" and "VAE" in of
            cells.append(show(of[label] - of["VAE"]) if both else "-")
        theirs = {} if offline else dict(zip((5, 50), PUBLISHED[label], strict=True))
        k = options.particles
        cells.insert(3, f"{theirs[k]:.2f}" if k in theirs else "-")
        print("| " + " | ".join([*cells, f"{seconds:.2f}"]) + " |", flush=True)
        pictures[label] = np.asarray(jax.nn.sigmoid(decode(best["decoder$params"], draws)))
    ends = " | ".join(f"{2 ** (i + 1) - 1}" for i in range(stages))
    print(f"\n| share of the largest weight after epoch | {ends} |\n|---{'|---' * stages}|")
    for label, shares in shares_of.items():
        print(f"| {label} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    draw_picture(pictures, side, options.out)
    print(f"\nPicture: {options.out}")
    for label, bounds in last_of.items():
        gain = bounds - last_of.get("VAE", bounds)
        if gain.mean() < -2 * gain.std() / np.sqrt(len(gain)):
            print(f"{label} is below the VAE, against what is published.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
