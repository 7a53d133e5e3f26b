"""A generator kept from collapse
==============================

A network that turns noise into draws minimises an energy. What keeps it from putting all of its
draws where the energy is least is their entropy, and of that an implicit distribution has no
gradient but by an estimate of its score g = grad log q: for draws x = G(noise),

    grad E[energy(x)] - strength * grad H[q],    - grad H[q] = E[g(x) dx / dphi] .

The script does this with no entropy, with the three estimates of the score that Li and Turner
(2018, section 5.3) compare, and with the spectral one, on two problems.

*A ring of eight normals.* The energy is minus the log density, so that at a strength of 1 the best
generator draws from the ring, an eighth in each normal. (``ImplicitELBO`` does the same for a
NumPyro model.)

*Digits.* The energy is the reconstruction error of an auto-encoder, which learns beside the
generator to reconstruct scikit-learn's 8x8 digits, and not to reconstruct its draws (boundary
equilibrium, Berthelot et al., 2017). It is in pixels, so the strength of the entropy (0.2) is a
choice: more of it gives more kinds of digits, and draws that are less like digits. The nearest of
the training images says which digit a draw is, and its distance how good the draw is.

Without entropy the draws collapse to a normal or two of eight, and to a single digit. They do so
with the kernel density estimate too: it is the score of a wider distribution, whose entropy hardly
falls when the draws come together. Networks, rates and strength are not the ones of the paper,
whose images are larger.

The exit code is 1 if Stein's estimate does not reach more normals and more digits than no entropy
and than the kernel density estimate, by the mean over keys. ::

    python examples/implicit_generator.py

.. image:: /recorded/implicit_generator.png
   :alt: Draws on the ring and of digits, without entropy and with four estimates of its gradient.

.. literalinclude:: /recorded/implicit_generator.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/implicit_generator.png"

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import Array, lax, random
from jax.example_libraries import stax
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from numpyro_ext.scores import KDEScore, ScoreMatchingScore, SpectralScore, SteinScore

Score = Callable[[Array], Array]
SCORES: dict[str, Score] = {
    "no entropy": jnp.zeros_like,
    "KDEScore()": KDEScore(),
    "ScoreMatchingScore()": ScoreMatchingScore(),
    "SteinScore()": SteinScore(),
    "SpectralScore(20)": SpectralScore(20),
}
BATCH, DRAWS = 100, 2000
CENTRES = 2 * jnp.stack([f(jnp.arange(8) * jnp.pi / 4) for f in (jnp.cos, jnp.sin)], axis=1)
SD, NOISE = 0.3, 2
TRAINING, LATENT, CODE, DIVERSITY = 1400, 8, 8, 0.5
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES = jnp.asarray(IMAGES / 16, jnp.float32)
NEAREST = KNeighborsClassifier(1).fit(IMAGES[:TRAINING], LABELS[:TRAINING])


def network(width: int, outputs: int) -> Any:
    relu = (stax.Dense(width), stax.Relu)
    return stax.serial(*relu, *relu, stax.Dense(outputs))


def minus_entropy(score: Score, x: Array) -> Array:
    """A number whose gradient is that of minus the entropy of the generator."""
    return jnp.sum(lax.stop_gradient(score(x)) * x, axis=1).mean()


def ring(score: Score, steps: int, rng_key: Array) -> Array:
    """Draws of a generator whose energy is minus the log density of the ring."""
    init, generate = network(64, 2)
    optim = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    key_start, key_steps, key_draws = random.split(rng_key, 3)
    params = init(key_start, (-1, NOISE))[1]

    def loss(params: Any, noise: Array) -> Array:
        x = generate(params, noise)
        squares = jnp.sum((x[:, None] - CENTRES) ** 2, axis=2)
        energy = -jax.nn.logsumexp(-0.5 * squares / SD**2, axis=1)
        return energy.mean() + minus_entropy(score, x)

    def step(carry: Any, key: Array) -> tuple[Any, None]:
        params, state = carry
        gradient = jax.grad(loss)(params, random.normal(key, (BATCH, NOISE)))
        updates, state = optim.update(gradient, state)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = lax.scan(step, (params, optim.init(params)), random.split(key_steps, steps))
    return generate(params, random.normal(key_draws, (DRAWS, NOISE)))


class Players(NamedTuple):
    generator: Any
    auto_encoder: Any
    of_generator: Any
    """State of the optimiser."""
    of_auto_encoder: Any
    weight: Array
    """Of the draws in the loss of the auto-encoder."""


def digits(score: Score, steps: int, rng_key: Array, *, strength: float) -> Array:
    """Draws of a generator whose energy is the error of an auto-encoder that learns beside it."""
    (init, to_logits), (init_code, code), (init_back, back) = (
        network(128, outputs) for outputs in (64, CODE, 64)
    )
    optim = optax.adam(1e-3, b1=0.5)
    *key_starts, key_steps, key_draws = random.split(rng_key, 5)
    shapes = (init, LATENT), (init_code, 64), (init_back, CODE)
    first, *both = (
        f(key, (-1, size))[1] for key, (f, size) in zip(key_starts, shapes, strict=True)
    )

    def generate(params: Any, noise: Array) -> Array:
        return jax.nn.sigmoid(to_logits(params, noise))

    def energy(params: Any, x: Array) -> Array:
        again = jax.nn.sigmoid(back(params[1], code(params[0], x)))
        return jnp.abs(x - again).sum(1).mean()

    def step(now: Players, key: Array) -> tuple[Players, None]:
        key_rows, key_noise = random.split(key)
        x = IMAGES[random.randint(key_rows, (BATCH,), 0, TRAINING)]
        noise = random.normal(key_noise, (BATCH, LATENT))

        def loss_auto_encoder(params: Any) -> tuple[Array, Array]:
            of_images = energy(params, x)
            of_draws = energy(params, generate(now.generator, noise))
            return of_images - now.weight * of_draws, DIVERSITY * of_images - of_draws

        def loss_generator(params: Any) -> Array:
            draws = generate(params, noise)
            return energy(now.auto_encoder, draws) + strength * minus_entropy(score, draws)

        downhill, short = jax.grad(loss_auto_encoder, has_aux=True)(now.auto_encoder)
        update, of_auto_encoder = optim.update(downhill, now.of_auto_encoder)
        auto_encoder = optax.apply_updates(now.auto_encoder, update)
        update, of_generator = optim.update(
            jax.grad(loss_generator)(now.generator), now.of_generator
        )
        generator = optax.apply_updates(now.generator, update)
        weight = jnp.clip(now.weight + 0.001 * short, 0.0, 1.0)
        return Players(generator, auto_encoder, of_generator, of_auto_encoder, weight), None

    start = Players(first, both, optim.init(first), optim.init(both), jnp.zeros(()))
    end, _ = lax.scan(step, start, random.split(key_steps, steps))
    return generate(end.generator, random.normal(key_draws, (DRAWS, LATENT)))


def shares_of_ring(draws: np.ndarray) -> tuple[np.ndarray, float]:
    """Of the draws within three standard deviations of a centre, and the share of these."""
    distances = np.linalg.norm(draws[:, None] - np.asarray(CENTRES), axis=2)
    near = distances.min(1) < 3 * SD
    return np.bincount(distances.argmin(1)[near], minlength=8) / near.sum(), near.mean()


def shares_of_digits(draws: np.ndarray) -> tuple[np.ndarray, float]:
    """By the label of the nearest training image, and the mean distance to it."""
    counts = np.bincount(NEAREST.predict(draws), minlength=10)
    return counts / len(draws), NEAREST.kneighbors(draws)[0].mean()


def draw_picture(ring: dict[str, np.ndarray], digit: dict[str, np.ndarray], path: Path) -> None:
    """Of the first key."""
    fig, axes = plt.subplots(2, len(SCORES), figsize=(12.5, 5.4), constrained_layout=True)
    for (above, below), name in zip(axes.T, SCORES, strict=True):
        above.scatter(*np.asarray(CENTRES).T, s=400, color="0.85")
        above.scatter(*ring[name][0, :500].T, s=2)
        above.set(title=name, xlim=(-3.2, 3.2), ylim=(-3.2, 3.2), aspect="equal")
        tiles = np.pad(digit[name][0, :36].reshape(6, 6, 8, 8), [(0, 0), (0, 0), (1, 1), (1, 1)])
        below.imshow(tiles.swapaxes(1, 2).reshape(60, 60), cmap="gray_r", vmin=0, vmax=1)
        below.set(xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--keys", type=int, default=3)
    parser.add_argument("--strength", type=float, default=0.2, help="of the entropy of digits")
    parser.add_argument("--out", type=Path, default=Path("out/implicit_generator.png"))
    args = parser.parse_args()
    keys = random.split(random.key(0), args.keys)
    of_digits = partial(digits, strength=args.strength)
    held_out = NEAREST.kneighbors(IMAGES[TRAINING:])[0].mean()
    problems = {
        "normals of 8": (ring, shares_of_ring, "near a centre (exact: 0.99)"),
        "digits of 10": (
            of_digits,
            shares_of_digits,
            f"distance (held-out images: {held_out:.2f})",
        ),
    }
    draws: dict[str, dict[str, np.ndarray]] = {}
    reached: dict[str, dict[str, float]] = {}
    for problem, (fit, shares, quality) in problems.items():
        print(f"\n| score | {problem} | largest share | {quality} | s |\n|---|---|---|---|---|")
        draws[problem], reached[problem] = {}, {}
        for name, score in SCORES.items():
            began = time.perf_counter()
            run = jax.jit(jax.vmap(partial(fit, score, args.steps)))
            x = draws[problem][name] = np.asarray(run(keys))
            seconds = time.perf_counter() - began
            each, good = zip(*map(shares, x), strict=True)
            modes = [int((share >= 0.02).sum()) for share in each]
            reached[problem][name] = float(np.mean(modes))
            largest = ", ".join(f"{share.max():.2f}" for share in each)
            cells = [", ".join(map(str, modes)), largest, f"{np.mean(good):.2f}", f"{seconds:.0f}"]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nOne number for each of {args.keys} keys. Picture: {args.out}")
    draw_picture(*draws.values(), args.out)
    good = all(
        modes["SteinScore()"] > max(modes["no entropy"], modes["KDEScore()"])
        for modes in reached.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
