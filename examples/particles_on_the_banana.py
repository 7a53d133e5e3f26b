"""One hundred particles move onto the banana along five fields, from the same start.

The target is ``z1 ~ N(0, 1)``, ``x2 ~ N(3 (z1^2 - 1), 1)``: all moments are known. Each field is a
loss for ``SVI`` with ``particle_step``, which needs no tuning; ``SVGD`` takes four times as many
steps as the others, because its kernel smooths the gradients.

Prints the means and the standard deviations of the particles over the exact ones, and saves a
picture: the particles at the end, and the paths of twenty of them. Exit code 1 if a mean of
``RegularizedSVGD``, the default of ``ParVI``, is further than 0.15 standard deviations from the
exact one or a ratio of its standard deviations is outside 0.9 to 1.1; or if those of another field
are outside the wider limits that are printed beside them.

    python examples/particles_on_the_banana.py --out out/particles_on_the_banana.png
"""

import argparse
from pathlib import Path
import sys
import time
from typing import NamedTuple

import jax
from jax import lax, random
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import SVI

from numpyro_ext.particles import (
    GFSD,
    GFSF,
    SVGD,
    AutoParticles,
    Blob,
    RegularizedSVGD,
    particle_step,
)
from numpyro_ext.targets import banana

PARTICLES = 100
EXACT_SD = np.array([1.0, 19**0.5])
WHITENED = {"precondition": "covariance"}


class Case(NamedTuple):
    """A field, its number of steps, and the limits of its mean errors and of its sd ratios."""

    field: object
    steps: int
    mean: float
    ratio: tuple[float, float]


CASES = {
    "RegularizedSVGD": Case(RegularizedSVGD(), 500, 0.15, (0.9, 1.1)),
    "SVGD": Case(SVGD(**WHITENED), 2000, 0.3, (0.7, 1.2)),
    "GFSF": Case(GFSF(**WHITENED), 500, 0.3, (0.7, 1.2)),
    "GFSD": Case(GFSD(**WHITENED), 500, 0.3, (0.7, 1.2)),
    "Blob": Case(Blob(**WHITENED), 500, 0.3, (0.7, 1.2)),
}


def paths(case: Case) -> np.ndarray:
    """Where the particles are before the first step and after each, ``(steps + 1, m, 2)``."""
    svi = SVI(banana, AutoParticles(banana, PARTICLES), particle_step(case.steps), loss=case.field)
    state = svi.init(random.key(0))

    def step(state, _):
        state, _ = svi.update(state)
        return state, svi.get_params(state)["auto_particles"]

    start = svi.get_params(state)["auto_particles"]
    _, later = jax.jit(lambda state: lax.scan(step, state, length=case.steps))(state)
    return np.concatenate([start[None], later])


def draw(found: dict[str, np.ndarray], path: Path) -> None:
    z1, x2 = np.meshgrid(np.linspace(-3.2, 3.2, 300), np.linspace(-9, 24, 300))
    log_density = -0.5 * z1**2 - 0.5 * (x2 - 3 * (z1**2 - 1)) ** 2
    fig, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 4.4), layout="constrained")
    for ax, (name, x) in zip(axes, found.items(), strict=True):
        ax.contour(z1, x2, np.exp(log_density), [0.02, 0.15, 0.5], colors="0.75", linewidths=1)
        for i in range(0, PARTICLES, PARTICLES // 20):
            ax.plot(*x[:, i].T, color="tab:blue", lw=0.6, alpha=0.6)
        ax.plot(*x[0].T, ".", color="0.6", ms=3, label="start")
        ax.plot(*x[-1].T, ".", color="tab:red", ms=5, label="end")
        ratio = x[-1].std(0) / EXACT_SD
        ax.set_title(f"{name}, {len(x) - 1} steps\nsd ratios {ratio[0]:.2f} and {ratio[1]:.2f}")
        ax.set(xlabel="z1", xlim=(-3.2, 3.2), ylim=(-9, 24))
    axes[0].set_ylabel("x2")
    axes[0].legend(loc="upper center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/particles_on_the_banana.png"))
    args = parser.parse_args()
    found, wrong = {}, []
    print("field              mean / sd       sd ratio        limits                seconds")
    for name, case in CASES.items():
        began = time.perf_counter()
        found[name] = x = paths(case)
        mean, ratio = x[-1].mean(0) / EXACT_SD, x[-1].std(0) / EXACT_SD
        low, high = case.ratio
        if np.abs(mean).max() > case.mean or ratio.min() < low or ratio.max() > high:
            wrong.append(name)
        print(
            f"{name:<16}  {mean[0]:>5.2f} {mean[1]:>5.2f}   {ratio[0]:>8.2f} {ratio[1]:>5.2f}    "
            f"{case.mean:>5.2f}, {low} to {high}   {time.perf_counter() - began:>11.1f}"
        )
    draw(found, args.out)
    print(f"picture: {args.out}")
    if wrong:
        print(f"outside its limits: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
