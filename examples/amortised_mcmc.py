"""A generator that learns from Markov chains
==========================================

A network learns to draw from a posterior with two modes: by amortised MCMC and amortised SVGD.

The model is ``z1, z2 ~ N(0, 1)``, ``y ~ N(z1^2, 0.5^2)``, ``x ~ N(z2 - 0.8 z1, 0.5^2)`` with the
data ``y = 1.5`` and ``x = 0.5``. The sign of z1 is lost, and the two modes have different weights
and different z2. ``AutoImplicit`` starts as a standard normal distribution. ``AmortizedMCMC`` moves
100 of its draws by T steps of MALA in each of 3,000 steps of the optimiser, ``SVGD`` moves them by
its field, ``ImplicitELBO`` follows the estimated gradient of the ELBO, and
``AutoMultivariateNormal`` with ``Trace_ELBO`` is a guide with one mode. The truth is computed on a
grid. The discrepancy is the maximum mean discrepancy between 2,000 draws of the guide and of the
truth. Networks differ from one start to the next, so each is trained from eight starts, side by
side in one program (``jax.vmap`` over the key).

Chains that are long enough to cross between the modes teach a network both, with their weights,
from every start. What sees one mode at a time (short chains, the field of ``SVGD``, the gradient of
an ELBO) mostly loses one, and which one depends on the start.

The script prints a table of medians and ranges, and saves a picture of the start with the median
discrepancy. The exit code is 1 if amortised MCMC with the longest chains has, from any start, less
than half of the true weight in either mode. ::

    python examples/amortised_mcmc.py --out out/amortised_mcmc.png

.. image:: /recorded/amortised_mcmc.png
   :alt: Draws of seven guides over the contours of a posterior with two modes.

.. literalinclude:: /recorded/amortised_mcmc.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/amortised_mcmc.png"

import argparse
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import Array, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_median
import optax

from numpyro_ext.diagnostics import maximum_mean_discrepancy
from numpyro_ext.guides import AutoImplicit
from numpyro_ext.objectives import AmortizedMCMC, ImplicitELBO
from numpyro_ext.particles import SVGD
from numpyro_ext.scores import RBF

STEPS, DRAWS, PARTICLES, RATE = 3000, 2000, 100, 3e-3
CHAINS = (1, 10, 100)
STARTS = 8
STEP_SIZE = 0.05
Y, X = 1.5, 0.5


def model() -> None:
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(z[0] ** 2, 0.5), obs=Y)
    numpyro.sample("x", dist.Normal(z[1] - 0.8 * z[0], 0.5), obs=X)


def log_joint(z1: np.ndarray, z2: np.ndarray) -> np.ndarray:
    prior = -0.5 * (z1**2 + z2**2)
    return prior - 0.5 * ((Y - z1**2) / 0.5) ** 2 - 0.5 * ((X - z2 + 0.8 * z1) / 0.5) ** 2


class Truth(NamedTuple):
    grid: np.ndarray
    density: np.ndarray
    right: float  # posterior probability of z1 > 0
    draws: np.ndarray


def truth() -> Truth:
    grid = np.linspace(-3.0, 3.0, 601)
    z1, z2 = np.meshgrid(grid, grid, indexing="ij")
    p = np.exp(log_joint(z1, z2) - log_joint(z1, z2).max())
    p = p / p.sum()
    rng = np.random.default_rng(0)
    chosen = rng.choice(p.size, DRAWS, p=p.ravel())
    cell = grid[1] - grid[0]
    draws = np.stack([z1.ravel()[chosen], z2.ravel()[chosen]], 1)
    return Truth(grid, p, p[grid > 0].sum(), draws + cell * (rng.random(draws.shape) - 0.5))


class Fit(NamedTuple):
    """Arrays over the starts, by rising discrepancy."""

    name: str
    draws: np.ndarray
    right: np.ndarray
    discrepancy: np.ndarray
    seconds: float

    @property
    def median(self) -> int:
        return len(self.right) // 2


def fit(name: str, guide: Any, loss: Any, exact: Truth) -> Fit:
    began = time.perf_counter()
    optim = optax.adam(optax.cosine_decay_schedule(RATE, STEPS))
    svi = SVI(model, guide, optim, loss)

    def one(key: Array) -> tuple[Array, Array]:
        params = svi.run(key, STEPS, progress_bar=False).params
        z = guide.sample_posterior(random.key(2), params, sample_shape=(DRAWS,))["z"]
        squared = maximum_mean_discrepancy(z, jnp.asarray(exact.draws, z.dtype))
        return z, jnp.sqrt(jnp.maximum(squared, 0.0))

    z, discrepancy = jax.device_get(jax.vmap(one)(random.split(random.key(1), STARTS)))
    seconds = time.perf_counter() - began
    order = np.argsort(discrepancy)
    right = (z[..., 0] > 0).mean(1)
    return Fit(name, z[order], right[order], discrepancy[order], seconds)


def shown(values: np.ndarray, digits: int) -> str:
    middle, least, most = np.median(values), values.min(), values.max()
    return f"{middle:.{digits}f} [{least:.{digits}f}, {most:.{digits}f}]"


def generator() -> AutoImplicit:
    return AutoImplicit(model, init_scale=1.0, init_loc_fn=init_to_median)


def draw_picture(fits: list[Fit], exact: Truth, path: Path) -> None:
    fig, axes = plt.subplots(2, 4, figsize=(11, 6), sharex=True, sharey=True)
    axes.flat[-1].set_axis_off()
    for ax, one in zip(axes.flat, fits, strict=False):
        ax.contour(exact.grid, exact.grid, exact.density.T, 6, colors="0.6", linewidths=0.8)
        ax.plot(*one.draws[one.median][:600].T, ".", ms=2, color="tab:blue", alpha=0.6)
        right = one.right[one.median]
        ax.set_title(f"{one.name}\nz1 > 0: {right:.2f} (exact {exact.right:.2f})", fontsize=9)
        ax.set_xlim(-2.4, 2.4)
        ax.set_ylim(-2.8, 3.0)
    for ax in axes[1]:
        ax.set_xlabel("z1")
    for ax in axes[:, 0]:
        ax.set_ylabel("z2")
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/amortised_mcmc.png"))
    args = parser.parse_args()
    exact = truth()
    mcmc = [
        fit(
            f"amortised MCMC, T = {T}",
            generator(),
            AmortizedMCMC(PARTICLES, T, transition="mala", step_size=STEP_SIZE),
            exact,
        )
        for T in CHAINS
    ]
    short, wide = SVGD(RBF("median"), num_particles=PARTICLES), SVGD(num_particles=PARTICLES)
    fits = [
        *mcmc,
        fit("ImplicitELBO", generator(), ImplicitELBO(PARTICLES), exact),
        fit("amortised SVGD", generator(), short, exact),
        fit("amortised SVGD, wide kernel", generator(), wide, exact),
        fit("AutoMultivariateNormal", AutoMultivariateNormal(model), Trace_ELBO(10), exact),
    ]
    print(f"exact probability of z1 > 0: {exact.right:.2f}\n")
    print("| fit | z1 > 0 | discrepancy | seconds |")
    print("|---|---|---|---|")
    for one in fits:
        cells = one.name, shown(one.right, 2), shown(one.discrepancy, 3), f"{one.seconds:.0f}"
        print(f"| {' | '.join(cells)} |")
    draw_picture(fits, exact, args.out)
    print(f"\npicture: {args.out}")

    right = mcmc[-1].right
    return 0 if np.all((exact.right / 2 < right) & (right < (1 + exact.right) / 2)) else 1


if __name__ == "__main__":
    sys.exit(main())
