"""
Auto-encoders of digits
=======================

A variational auto-encoder and a conditional one of scikit-learn's 8x8 digits, with the losses and
guides of this package in the place of NumPyro's.

The decoder has 8 latent numbers z ~ N(0, I) for each image and, in the conditional model, the upper
half of the image. It gives the probabilities of the other pixels; an auto-encoder is the case in
which nothing is given. What changes from row to row is one name: the loss, or the guide (a diagonal
normal whose mean and width a network reads from the image, ``num_flows=0``; a flow on top of it;
draws of a network that has no density).

The score is the log probability of held-out images by importance sampling with 5,000 draws for
each, of the parameters that were best on validation images. That of ``ImplicitGuide`` takes the
draws of a normal encoder, which is trained for its fixed decoder afterwards. The conditional model
is compared with a network that gives the probability of each pixel of the lower half, which knows
nothing of pixels that go together. Gains are those over the first row of each block, with the
standard error of the paired difference.

On so few and so small images all auto-encoders are within half a nat of each other: a flow is worth
more than another loss, and a guide without a density is no worse than one that has it. What the
latent numbers are worth is in the second block, and in the picture: the network blurs what it does
not know, and the draws of the conditional model are digits.

The exit code is 1 if the flow is not ahead of the normal encoder under the ELBO, or the conditional
model not ahead of the network, by two standard errors. ::

    python examples/vae_digits.py --out out/vae_digits.png

.. image:: /recorded/vae_digits.png
   :alt: Held-out digits and their completions by the conditional auto-encoder and by the network.

.. literalinclude:: /recorded/vae_digits.txt
   :language: text

With ``--sizes 2 8 32`` auto-encoders of so many latent numbers stand beside those that are given
the label: the two terms of the bound over the epochs, and the plane of two numbers, as in Cinelli
(2019, figures 4.8 to 4.13).

.. image:: /recorded/vae_digits_sizes.png
   :alt: ELBO and KL term over epochs by latent size, and the plane with and without the label.
"""

# sphinx_gallery_thumbnail_path = "recorded/vae_digits.png"

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jax.example_libraries import stax
import jax.numpy as jnp
from jax.scipy.special import logsumexp, ndtri
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import kl_divergence
from numpyro.handlers import substitute
from numpyro.infer import SVI, Trace_ELBO
import optax
from sklearn.datasets import load_digits

from numpyro_ext.guides import FlowGuide, ImplicitGuide
from numpyro_ext.objectives import IWELBO, VRELBO, ImplicitELBO, log_weights

LATENT, WIDTH, BATCH, BLOCKS, CURVE, HALF = 8, 200, 100, 8, 60, 32
NORMAL, FLOW = "normal, Trace_ELBO(10)", "FlowGuide, Trace_ELBO(10)"
Params = dict[str, Any]
Score = Callable[[Params, tuple[Array, Array], int], Array]
"""Of parameters and images, by so many draws: the log likelihood of each image, nats."""


def network(outputs: int) -> Any:
    return stax.serial(stax.Dense(WIDTH), stax.Tanh, stax.Dense(outputs))


def auto_encoder(latent: int) -> Any:
    def model(given: Array, image: Array, batch: int | None = None) -> None:
        """``given`` and ``image`` are of the same rows, ``(n, g)`` and ``(n, p)``."""
        decode = numpyro.module("decoder", network(image.shape[1]), (latent + given.shape[1],))
        with numpyro.plate("images", len(image), subsample_size=batch):
            z = numpyro.sample("z", dist.Normal().expand([latent]).to_event(1))
            given, image = (numpyro.subsample(x, event_dim=1) for x in (given, image))
            logits = decode(jnp.concatenate([z, given], axis=-1))
            numpyro.sample("image", dist.Bernoulli(logits=logits).to_event(1), obs=image)

    return model


model = auto_encoder(LATENT)


def without_latents(given: Array, image: Array, batch: int | None = None) -> None:
    net = numpyro.module("net", network(image.shape[1]), (given.shape[1],))
    with numpyro.plate("images", len(image), subsample_size=batch):
        given, image = (numpyro.subsample(x, event_dim=1) for x in (given, image))
        numpyro.sample("image", dist.Bernoulli(logits=net(given)).to_event(1), obs=image)


def no_guide(given: Array, image: Array, batch: int | None = None) -> None:
    pass


def pixels(given: Array, image: Array, batch: int | None = None) -> Array:
    """What an encoder reads: all of the image."""
    return numpyro.subsample(jnp.concatenate([given, image], axis=-1), event_dim=1)


def encoder(Guide: Any, outputs: int, of: Any = model, **kwargs: Any) -> Any:
    return Guide(of, network(outputs), plate="images", features=pixels, **kwargs)


def normal(of: Any = model, latent: int = LATENT) -> Any:
    return encoder(FlowGuide, 2 * latent, of, num_flows=0)


class Images(NamedTuple):
    """Pairs of what is given and what is modelled."""

    train: tuple[Array, Array]
    validation: tuple[Array, Array]
    test: tuple[Array, Array]


def digits(given: int, labels: bool = False) -> Images:
    """The first so many pixels are given, or the labels are (one-hot)."""
    images, classes = load_digits(return_X_y=True)
    images = (images > 7.5).astype(float)
    if labels:
        images, given = np.concatenate([np.eye(10)[classes], images], axis=1), 10
    order = np.random.default_rng(0).permutation(len(images))
    parts = np.split(images[order], [1200, 1400])
    return Images(*((jnp.asarray(x[:, :given]), jnp.asarray(x[:, given:])) for x in parts))


def log_likelihood(of: Any, guide: Any) -> Score:
    """By importance sampling with the draws of the guide."""

    @partial(jax.jit, static_argnums=2)
    def score(params: Params, data: tuple[Array, Array], draws: int) -> Array:
        options = {"num_samples": draws, "batch_size": min(draws, 50)}
        weights = log_weights(random.key(7), params, of, guide, *data, **options)
        return logsumexp(weights, axis=0) - jnp.log(draws)

    return score


def pointwise(params: Params, data: tuple[Array, Array], _: int) -> Array:
    """The log likelihood where nothing is latent."""
    logits = network(HALF)[1](params["net$params"], data[0])
    return dist.Bernoulli(logits=logits).log_prob(data[1]).sum(-1)


class Fit(NamedTuple):
    params: Params
    scores: np.ndarray
    """Log likelihood of each test image."""
    seconds: float
    along: list[Params]
    """After each block."""


def fit(
    of: Any,
    guide: Any,
    loss: Any,
    images: Images,
    steps: int,
    score: Score,
    draws: int,
    blocks: int = BLOCKS,
) -> Fit:
    """The parameters of the block of steps that is best on the validation images."""
    began = time.perf_counter()
    state, block, params_of = training(of, guide, loss, images, steps // blocks)
    best, along = (-np.inf, {}), []
    for _ in range(blocks):
        state = block(state)
        params = params_of(state)
        along.append(params)
        found = float(score(params, images.validation, 20).mean())
        best = max(best, (found, params), key=lambda x: x[0])
    seconds = time.perf_counter() - began
    return Fit(best[1], np.asarray(score(best[1], images.test, draws)), seconds, along)


def training(of: Any, guide: Any, loss: Any, images: Images, steps: int) -> Any:
    """The first state, a function that takes so many steps, and one that reads the parameters."""
    svi = SVI(of, guide, optax.adam(1e-3), loss)

    def step(state: Any, _: None) -> Any:
        return svi.update(state, *images.train, batch=BATCH)

    block = jax.jit(lambda state: jax.lax.scan(step, state, length=steps)[0])
    return svi.init(random.key(1), *images.train, batch=BATCH), block, svi.get_params


def implicit(images: Images, steps: int, draws: int) -> Fit:
    """Its decoder, and then a normal encoder for that decoder, which has a density."""
    began = time.perf_counter()
    guide = encoder(ImplicitGuide, LATENT)
    state, run, params_of = training(model, guide, ImplicitELBO(20), images, steps)
    params = params_of(run(state))
    seconds = time.perf_counter() - began
    fixed = substitute(model, {"decoder$params": params["decoder$params"]})
    other = normal(fixed)
    score = log_likelihood(fixed, other)
    return fit(fixed, other, IWELBO(10), images, steps, score, draws)._replace(seconds=seconds)


def show(values: np.ndarray) -> str:
    return f"{values.mean():.2f} +- {values.std(ddof=1) / np.sqrt(len(values)):.2f}"


def ahead(one: Fit, other: Fit) -> bool:
    difference = one.scores - other.scores
    return bool(difference.mean() > 2 * difference.std(ddof=1) / np.sqrt(len(difference)))


def bound(of: Any, guide: Any) -> Callable[[Params, tuple[Array, Array]], tuple[Array, Array]]:
    """The ELBO of an image and its KL term, means over images, nats; of a normal encoder."""

    @jax.jit
    def terms(params: Params, data: tuple[Array, Array]) -> tuple[Array, Array]:
        elbo = log_weights(random.key(7), params, of, guide, *data, num_samples=20).mean()
        q = guide.get_posterior(params, *data)
        prior = dist.Normal().expand(q.event_shape).to_event(1)
        return elbo, kl_divergence(q, prior).mean()

    return terms


class Curve(NamedTuple):
    params: Params
    """Those of the best block."""
    epochs: np.ndarray
    train: np.ndarray
    """The ELBO and its KL term after each block, ``(blocks, 2)``."""
    validation: np.ndarray


def by_size(sizes: list[int], steps: int, draws: int, path: Path) -> None:
    """Auto-encoders that are given the label beside those that are not."""
    print(f"{'':16}{'no label':^34}{'given the label':^34}")
    print(f"{'latent numbers':16}" + 2 * f"{'log probability':>17}{'ELBO':>9}{'KL':>8}", end="")
    print(f"{'gain':>16}")
    curves: dict[tuple[int, bool], Curve] = {}
    for latent in sizes:
        of = auto_encoder(latent)
        guide = normal(of, latent)
        score, terms = log_likelihood(of, guide), bound(of, guide)
        fits, cells = [], ""
        for labels in (False, True):
            images, blocks = digits(0, labels), min(CURVE, steps)
            best = fit(of, guide, Trace_ELBO(10), images, steps, score, draws, blocks)
            elbo, kl = terms(best.params, images.test)
            cells += f"{show(best.scores):>17}{elbo:9.2f}{kl:8.2f}"
            epochs = (1 + np.arange(blocks)) * (steps // blocks) * BATCH / len(images.train[1])
            train, validation = (
                np.asarray([terms(params, data) for params in best.along])
                for data in (images.train, images.validation)
            )
            curves[latent, labels] = Curve(best.params, epochs, train, validation)
            fits.append(best)
        gain = show(fits[1].scores - fits[0].scores)
        print(f"{latent:<16}{cells}{gain:>16}", flush=True)
    print(f"picture: {path}")
    draw_sizes(curves, path)


def draw_sizes(curves: dict[tuple[int, bool], Curve], path: Path) -> None:
    """The two terms over the epochs, and the plane of two latent numbers."""
    fig, axes = plt.subplots(2, 3, figsize=(12, 7), constrained_layout=True)
    sizes = list(dict.fromkeys(latent for latent, _ in curves))
    for j, (ax, term) in enumerate(zip(axes[:, 0], ("ELBO", "KL term"), strict=True)):
        for (latent, labels), curve in curves.items():
            style = {"color": f"C{sizes.index(latent)}", "ls": "--" if labels else "-"}
            name = f"{latent}, given the label" if labels else f"{latent} numbers"
            ax.plot(curve.epochs, curve.validation[:, j], **style, label=name)
            ax.plot(curve.epochs, curve.train[:, j], **style, lw=0.6)
        ax.set(xscale="log", xlabel="epoch", ylabel=f"{term} of an image, nats")
    axes[0, 0].set_title("validation images; thin: training images")
    axes[0, 0].legend(fontsize=7)
    classes = np.asarray(digits(0, labels=True).test[0].argmax(1))
    for row, labels in zip(axes, (False, True), strict=True):
        of, params = auto_encoder(2), curves[2, labels].params
        mean = normal(of, 2).get_posterior(params, *digits(0, labels).test).mean
        row[1].scatter(*np.asarray(mean).T, c=classes, cmap="tab10", s=8)
        title = "given the label" if labels else "no label; colour: the digit"
        row[1].set(title=f"plane of held-out digits, {title}", aspect="equal")
        # A row for each label, along the first number; or the plane at quantiles of N(0, I).
        steps = ndtri((jnp.arange(10) + 0.5) / 10)
        across, down = (x.ravel() for x in jnp.meshgrid(steps, steps))
        z = jnp.stack([across, 0 * down if labels else down], axis=-1)
        given = jnp.repeat(jnp.eye(10), 10, axis=0) if labels else jnp.zeros((100, 0))
        logits = network(64)[1](params["decoder$params"], jnp.concatenate([z, given], axis=-1))
        tiles = np.asarray(jax.nn.sigmoid(logits)).reshape(10, 10, 8, 8)
        tiles = np.pad(tiles, [(0, 0), (0, 0), (1, 1), (1, 1)]).swapaxes(1, 2)
        row[2].imshow(tiles.reshape(100, 100), cmap="gray_r", vmin=0, vmax=1)
        title = "each label along the first number" if labels else "the plane, decoded"
        row[2].set(title=title, xticks=[], yticks=[])
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def draw_picture(images: Images, params: Params, net: Params, path: Path) -> None:
    """Held-out digits, what the network says of their lower half, and three completions."""
    given, below = (np.asarray(x[:12]) for x in images.test)
    apply = network(HALF)[1]
    rows = {"digit": below, "network": jax.nn.sigmoid(apply(net["net$params"], given))}
    for i in range(3):
        z = random.normal(random.key(i), (len(given), LATENT))
        logits = apply(params["decoder$params"], jnp.concatenate([z, given], axis=-1))
        rows[f"draw {i + 1}"] = jax.nn.sigmoid(logits)
    fig, axes = plt.subplots(len(rows), 12, figsize=(9, 4), constrained_layout=True)
    for line, (name, lower) in zip(axes, rows.items(), strict=True):
        for ax, top, bottom in zip(line, given, np.asarray(lower), strict=True):
            ax.imshow(np.concatenate([top, bottom]).reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            ax.axhline(3.5, color="tab:red", lw=0.6)
            ax.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    fig.suptitle("The lower half, given the upper half")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--half", action="store_true", help="the conditional models alone")
    help = "2 and so many latent numbers, with and without the label: bounds over epochs, plane"
    parser.add_argument("--sizes", type=int, nargs="+", help=help)
    parser.add_argument("--out", type=Path, default=Path("out/vae_digits.png"))
    args = parser.parse_args()

    if args.sizes:
        by_size([2, *(x for x in args.sizes if x != 2)], args.steps, args.draws, args.out)
        return 0

    def vae(guide: Any, loss: Any, images: Images) -> Fit:
        score = log_likelihood(model, guide)
        return fit(model, guide, loss, images, args.steps, score, args.draws)

    print(f"nats of a held-out image           {'log probability':>16} {'gain':>15} {'seconds':>8}")
    whole, parts = digits(0), digits(HALF)
    flow = partial(encoder, FlowGuide, 3 * LATENT)
    auto_encoders: dict[str, Callable[[], Fit]] = {
        NORMAL: lambda: vae(normal(), Trace_ELBO(10), whole),
        "normal, IWELBO(10)": lambda: vae(normal(), IWELBO(10), whole),
        "normal, VRELBO(-inf, 10)": lambda: vae(normal(), VRELBO(-np.inf, 10), whole),
        FLOW: lambda: vae(flow(), Trace_ELBO(10), whole),
        "FlowGuide, IWELBO(10)": lambda: vae(flow(), IWELBO(10), whole),
        "ImplicitGuide, ImplicitELBO(20)": lambda: implicit(whole, args.steps, args.draws),
    }
    conditional: dict[str, Callable[[], Fit]] = {
        "lower half: a network": lambda: fit(
            without_latents, no_guide, Trace_ELBO(), parts, args.steps, pointwise, args.draws
        ),
        "lower half: IWELBO(10)": lambda: vae(normal(), IWELBO(10), parts),
        "lower half: FlowGuide, IWELBO(10)": lambda: vae(flow(), IWELBO(10), parts),
    }
    fits: dict[str, Fit] = {}
    for block in [conditional] if args.half else [auto_encoders, conditional]:
        first, *_ = block
        for name, make in block.items():
            found = fits[name] = make()
            gain = show(found.scores - fits[first].scores) if name != first else "-"
            numbers = f"{show(found.scores):>16} {gain:>15} {found.seconds:8.0f}"
            print(f"{name:34} {numbers}", flush=True)
    best, net = fits["lower half: FlowGuide, IWELBO(10)"], fits["lower half: a network"]
    print(f"picture: {args.out}")
    draw_picture(parts, best.params, net.params, args.out)
    good = ahead(best, net)
    if not args.half:
        good = good and ahead(fits[FLOW], fits[NORMAL])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
