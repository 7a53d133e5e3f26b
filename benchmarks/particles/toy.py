"""The heat-equation rule against the median rule on a density in two dimensions.

The density of Liu et al. (2019), figure 2: a ring of radius 3 with two bright sides,

    U(z) = 2 (|z| - 3)^2 - log(exp(-2 (z1 - 3)^2) + exp(-2 (z1 + 3)^2)).

200 particles start at N(0, I) and take 400 plain steps: 0.3 for SVGD, 0.01 for the other fields;
the ridge of GFSF is 0.01. The heat-equation rule takes one step of its search in each step of the
particles, from the bandwidth of the last. `energy distance` is that to 20,000 exact draws (from a
grid), the mean over the seeds with its standard error; that of 200 exact draws is in the last row.
Each row of the picture is a rule.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from numpyro_ext.particles import GFSD, GFSF, SVGD, Blob
from numpyro_ext.scores import RBF

PARTICLES, STEPS, DRAWS = 200, 400, 20_000
FIELDS = {"SVGD": (SVGD, 0.3, {}), "Blob": (Blob, 0.01, {}), "GFSD": (GFSD, 0.01, {})}
FIELDS["GFSF"] = (GFSF, 0.01, {"eta": 0.01})


def log_density(z: Array) -> Array:
    ring = -0.5 * ((jnp.sqrt(jnp.sum(z**2) + 1e-12) - 3) / 0.5) ** 2
    return ring + jnp.logaddexp(*(-0.5 * ((z[0] + side) / 0.5) ** 2 for side in (-3.0, 3.0)))


def exact_draws(rng: np.random.Generator, number: int) -> np.ndarray:
    axis = np.linspace(-6, 6, 1201)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    log_p = np.asarray(jax.vmap(log_density)(jnp.asarray(grid)), float)
    p = np.exp(log_p - log_p.max())
    width = axis[1] - axis[0]
    return (
        grid[rng.choice(len(grid), number, p=p / p.sum())]
        + rng.uniform(-0.5, 0.5, (number, 2)) * width
    )


def mean_distance(x: np.ndarray, y: np.ndarray) -> float:
    totals = [
        np.linalg.norm(part[:, None] - y[None], axis=-1).sum()
        for part in np.array_split(x, 1 + len(x) // 200)
    ]
    return float(np.sum(totals) / (len(x) * len(y)))


def final(field: Any, step_size: float, start: Array) -> tuple[Array, Array]:
    """Particles and the last bandwidth."""
    score = jax.vmap(jax.grad(log_density))

    def step(carry: tuple[Array, Array], _: Array) -> tuple[tuple[Array, Array], None]:
        x, bandwidth = carry
        v, bandwidth = field.velocity_and_bandwidth(x, score(x), bandwidth=bandwidth)
        return (x + step_size * v, bandwidth), None

    _, first = field.velocity_and_bandwidth(start, score(start))
    return lax.scan(step, (start, first), jnp.arange(STEPS))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("out/particles/toy.png"))
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    exact = exact_draws(rng, DRAWS)
    within = mean_distance(exact[:4000], exact[4000:8000])
    starts = jax.vmap(lambda key: random.normal(key, (PARTICLES, 2)))(
        random.split(random.key(0), args.seeds)
    )

    def energy(x: np.ndarray) -> float:
        return 2 * mean_distance(x, exact) - mean_distance(x, x) - within

    rows: dict[tuple[str, str], np.ndarray] = {}
    print("| field | rule | energy distance | last bandwidth |\n|---|---|---|---|")
    for name, (make, step_size, options) in FIELDS.items():
        for rule in ("median", "he"):
            field = make(RBF(rule), **options)
            run = jax.jit(jax.vmap(lambda x, f=field, e=step_size: final(f, e, x)))
            x, bandwidth = (np.asarray(a) for a in run(starts))
            values = np.array([energy(one) for one in x])
            rows[name, rule] = x[0]
            error = values.std(ddof=1) / len(values) ** 0.5
            print(
                f"| {name} | {rule} | {values.mean():.4f} +- {error:.4f} |"
                f" {bandwidth.mean():.3f} |",
                flush=True,
            )
    values = np.array([energy(exact_draws(rng, PARTICLES)) for _ in range(args.seeds)])
    error = values.std(ddof=1) / len(values) ** 0.5
    print(f"| exact draws | | {values.mean():.4f} +- {error:.4f} | |")

    fig, axes = plt.subplots(2, len(FIELDS), figsize=(3.2 * len(FIELDS), 6.4), layout="constrained")
    z = np.stack(np.meshgrid(np.linspace(-5, 5, 200), np.linspace(-5, 5, 200)), -1)
    p = np.exp(np.asarray(jax.vmap(jax.vmap(log_density))(jnp.asarray(z))))
    for (name, rule), x in rows.items():
        ax = axes[int(rule == "he"), list(FIELDS).index(name)]
        ax.contourf(z[..., 0], z[..., 1], p, 12, cmap="Blues")
        ax.plot(*x.T, ".", color="tab:red", ms=4)
        ax.set(title=f"{name}, {rule}", xticks=[], yticks=[], xlim=(-5, 5), ylim=(-5, 5))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.out, dpi=100)
    print(f"\nPicture: {args.out}")


if __name__ == "__main__":
    main()
