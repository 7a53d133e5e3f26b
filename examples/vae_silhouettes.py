"""VAE, IWAE and VR-max on binary images
=====================================

Three orders of one bound (Li and Turner, 2016, section 5.2).

Two tanh layers of 200 units to and from 50 latent dimensions, Bernoulli pixels, K particles per
image. The same model and encoder are trained with ``VRELBO`` of order 1 (VAE), 0 (IWAE) and -inf
(VR-max, which by ``gradient="single"`` has one backward pass whatever K). Takes the epoch that is
best on the validation images, scores the test images by the importance-weighted bound with many
particles, and saves samples of each model. Published on MNIST at K = 5: -86.47, -85.41, -85.42:
both others are above the VAE, VR-max within .3 nats of IWAE.

    python examples/vae_silhouettes.py                                 # offline: scikit-learn's 8x8
    digits python examples/vae_silhouettes.py --data-dir ../shared/data       # Caltech 101
    silhouettes, 28x28
"""

import argparse
from pathlib import Path
import sys
import time

import jax
from jax import lax, random
from jax.example_libraries import stax
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

from numpyro_ext.objectives import VRELBO, log_weights

METHODS = {"VAE": 1.0, "IWAE": 0.0, "VR-max": -np.inf}


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


def hidden_layers(width: int):
    return stax.Dense(width), stax.Tanh, stax.Dense(width), stax.Tanh


def make_model(num_pixels: int, latent: int, width: int):
    decoder = stax.serial(*hidden_layers(width), stax.Dense(num_pixels))
    encoder = stax.serial(
        *hidden_layers(width),
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


def train(svi, rng_key, images, validation, epochs: int, batch: int, label: str):
    """Epochs over shuffled batches; the parameters of the epoch that is best on the validation
    images.

    Also that epoch, and the seconds of an epoch.
    """
    num_batches = len(images) // batch
    key_init, key_shuffle = random.split(rng_key)
    state = svi.init(key_init, images[:batch])

    @jax.jit
    def epoch(state, key):
        order = random.permutation(key, len(images))[: num_batches * batch]
        return lax.scan(lambda s, i: svi.update(s, images[i]), state, order.reshape(-1, batch))

    @jax.jit
    def judge(params):
        return test_bound(params, svi.model, svi.guide, validation, 50).mean()

    best, seconds = (-np.inf, None, 0), []
    bar = trange(1, epochs + 1, desc=label)
    for i in bar:
        start = time.perf_counter()
        state, losses = jax.block_until_ready(epoch(state, random.fold_in(key_shuffle, i)))
        seconds.append(time.perf_counter() - start)
        if i % 10 == 0 or i == epochs:
            score = float(judge(svi.get_params(state)))
            best = max(best, (score, svi.get_params(state), i), key=lambda x: x[0])
            bar.set_postfix_str(f"loss {losses.mean() / batch:.1f}, validation {-score:.1f}")
    return best[1], best[2], float(np.median(seconds))


def test_bound(params, model, guide, images, num_particles: int) -> jax.Array:
    """The importance-weighted bound of every image, nats."""
    key = random.key(7)
    options = {"num_samples": num_particles, "batch_size": min(10, num_particles)}
    log_w = log_weights(key, params, model, guide, images, **options)
    return logsumexp(log_w, axis=0) - jnp.log(num_particles)


def show(values: np.ndarray) -> str:
    return f"{values.mean():.2f} +- {values.std() / np.sqrt(len(values)):.2f}"


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
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--particles", type=int, default=5)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--latent", type=int, default=50)
    parser.add_argument("--width", type=int, default=200)
    parser.add_argument("--test-images", type=int, default=500)
    parser.add_argument("--test-particles", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/vae_silhouettes.png"))
    options = parser.parse_args()

    train_images, *others = (jnp.asarray(a) for a in load_images(options.data_dir))
    validation_images, test_images = (x[: options.test_images] for x in others)
    num_pixels = train_images.shape[1]
    side = round(num_pixels**0.5)
    model, guide, decode = make_model(num_pixels, options.latent, options.width)
    draws = random.normal(random.key(3), (16, options.latent))
    pictures = {"data": np.asarray(test_images[:16])}
    table = []
    for label, alpha in METHODS.items():
        gradient = "single" if label == "VR-max" else "standard"
        loss = VRELBO(alpha, options.particles, gradient=gradient)
        svi = SVI(model, guide, optax.adam(1e-3), loss)
        key = random.key(options.seed)
        params, epoch, seconds = train(
            svi, key, train_images, validation_images, options.epochs, options.batch, label
        )
        bounds = test_bound(params, model, guide, test_images, options.test_particles)
        table.append((label, np.asarray(bounds), epoch, seconds))
        pictures[label] = np.asarray(jax.nn.sigmoid(decode(params["decoder$params"], draws)))

    print(
        f"\nK = {options.particles}, {options.epochs} epochs, {len(test_images)} test images;"
        f" test log-likelihood: importance-weighted bound, {options.test_particles} particles.\n"
        f"\n{'method':<8}{'test LL per image':>20}{'above the VAE':>18}"
        f"{'best epoch':>12}{'s per epoch':>13}"
    )
    vae = table[0][1]
    for label, bounds, epoch, seconds in table:
        print(f"{label:<8}{show(bounds):>20}{show(bounds - vae):>18}{epoch:>12}{seconds:>13.2f}")
    draw_picture(pictures, side, options.out)
    print(f"\nPicture: {options.out}")
    for label, bounds, *_ in table[1:]:
        gain = bounds - vae
        if gain.mean() < -2 * gain.std() / np.sqrt(len(gain)):
            print(f"{label} is below the VAE, against what is published.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
