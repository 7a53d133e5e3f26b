"""Guides on the banana
====================

Flows on two posteriors that a normal guide does not fit: a banana and two moons.

The banana is ``z1 ~ N(0, 1)``, ``x2 ~ N(3 (z1^2 - 1), 1)``; the moons are a ring with two gaps. The
log normalising constants of both are known, so that the ELBO gives the Kullback-Leibler divergence
``KL(q || p)``. All guides start with standard deviations of 1, about as wide as the targets, and
are trained in the same way: Adam, 5e-3 falling along a cosine, 5,000 steps of ``Trace_ELBO(16)``. A
flow is one connected piece, so that a bridge remains between the moons, or the flow misses one of
them. In the second case the divergence is log 2 or more.

The script prints the divergences and saves a picture of the densities. The exit code is 1 if a flow
has more than half of the divergence of the normal guide on the banana. ::

    python examples/guides_on_the_banana.py --out out/guides_on_the_banana.png

.. image:: /recorded/guides_on_the_banana.png
   :alt: Densities of three flows and a normal guide beside the exact ones.

.. literalinclude:: /recorded/guides_on_the_banana.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/guides_on_the_banana.png"

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import time
from typing import NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

from numpyro_ext.guides import AutoMAFNormal, AutoRealNVPNormal, AutoSplineNormal
from numpyro_ext.objectives import log_weights
from numpyro_ext.targets import banana

STEPS, DRAWS = 5000, 20_000
GUIDES = (AutoMultivariateNormal, AutoRealNVPNormal, AutoSplineNormal, AutoMAFNormal)


def moons() -> None:
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    ring = -0.5 * ((jnp.linalg.norm(z) - 2) / 0.4) ** 2
    sides = jnp.logaddexp(-0.5 * ((z[0] - 2) / 0.6) ** 2, -0.5 * ((z[0] + 2) / 0.6) ** 2)
    numpyro.factor("moons", ring + sides)


class Target(NamedTuple):
    """A model of two dimensions, the log of its normalising constant, and where it is drawn."""

    model: Callable[[], None]
    log_z: float
    limits: tuple[float, float, float, float]


TARGETS = {
    "banana": Target(banana, 0.0, (-3.2, 3.2, -9.0, 24.0)),
    "moons": Target(moons, 1.8775016261, (-3.8, 3.8, -3.8, 3.8)),
}


def fit(make, target: Target) -> tuple[float, float, np.ndarray]:
    """The divergence, its Monte Carlo error, and the density on a grid."""
    guide = make(target.model, init_scale=1.0)
    optim = optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))
    svi = SVI(target.model, guide, optim, Trace_ELBO(16))
    params = svi.run(random.key(0), STEPS, progress_bar=False).params

    @jax.jit
    def evaluate(params):
        lw = log_weights(random.key(1), params, target.model, guide, num_samples=DRAWS)
        return lw, guide.get_posterior(params).log_prob(grid(target))

    lw, log_q = evaluate(params)
    return target.log_z - float(lw.mean()), float(lw.std()) / DRAWS**0.5, np.exp(log_q)


def grid(target: Target) -> np.ndarray:
    left, right, low, high = target.limits
    return np.stack(np.meshgrid(np.linspace(left, right, 200), np.linspace(low, high, 200)), -1)


def exact_density(name: str, target: Target) -> np.ndarray:
    x, y = np.moveaxis(grid(target), -1, 0)
    if name == "banana":
        return np.exp(-0.5 * x**2 - 0.5 * (y - 3 * (x**2 - 1)) ** 2) / (2 * np.pi)
    ring = -0.5 * ((np.hypot(x, y) - 2) / 0.4) ** 2
    sides = np.logaddexp(-0.5 * ((x - 2) / 0.6) ** 2, -0.5 * ((x + 2) / 0.6) ** 2)
    return np.exp(ring + sides - target.log_z)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/guides_on_the_banana.png"))
    args = parser.parse_args()
    columns = len(GUIDES) + 1
    fig, axes = plt.subplots(2, columns, figsize=(3.2 * columns, 6.6), layout="constrained")
    bad = []
    print("target   guide                    KL               seconds")
    for row, (name, target) in zip(axes, TARGETS.items(), strict=True):
        exact, normal = exact_density(name, target), None
        pictures = [("exact", exact)]
        for make in GUIDES:
            began = time.perf_counter()
            kl, error, density = fit(make, target)
            normal = kl if normal is None else normal
            if name == "banana" and make is not AutoMultivariateNormal and kl > normal / 2:
                bad.append(make.__name__)
            pictures.append((f"{make.__name__}: KL {kl:.2f}", density))
            seconds = time.perf_counter() - began
            print(f"{name:<8} {make.__name__:<24} {kl:.3f} +- {error:.3f}   {seconds:>7.1f}")
        left, right, low, high = target.limits
        for ax, (title, density) in zip(row, pictures, strict=True):
            extent = (left, right, low, high)
            ax.imshow(density, origin="lower", extent=extent, aspect="auto", vmax=exact.max())
            ax.set_title(title, fontsize=10)
            ax.set(xticks=[], yticks=[])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.out, dpi=80)
    print(f"picture: {args.out}")
    if bad:
        print(f"more than half of the divergence of the normal guide: {', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    if main():
        sys.exit(1)
