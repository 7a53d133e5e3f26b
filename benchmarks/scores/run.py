"""Score estimators on one dimension, power of the kernel Stein discrepancy, and cost.

Four tables: the error of score curves of N(0, 1) against a second implementation; the power of the
Stein discrepancy with the kernels IMQ and RBF against the tails of a t-distribution; its value for
points that move away from the target; the time of ``SteinScore`` and ``KDEScore`` against the same
formulas with a (K, K, d) array and as a loop over samples. A picture of the curves. With
``--large``, the solve in blocks for 10,000 samples instead.

    python benchmarks/scores/run.py --out out/score_curves.png
"""

import argparse
from collections.abc import Callable
import itertools
from pathlib import Path
import resource
import sys
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from _shared.figures import figures

from numpyro_ext.diagnostics import kernel_stein_discrepancy
from numpyro_ext.scores import (
    IMQ,
    RBF,
    KDEScore,
    ScoreMatchingScore,
    SpectralScore,
    SteinScore,
    stein_kernel_matrix,
)

CURVES: dict[str, Any] = {
    "SpectralScore(6)": SpectralScore(6),
    "SteinScore(0.01)": SteinScore(0.01),
    "SteinScore(0.1)": SteinScore(0.1),
    "KDEScore()": KDEScore(),
    "SteinScore(0.1), parametric": SteinScore(0.1, form="parametric"),
    "ScoreMatchingScore(0.1)": ScoreMatchingScore(0.1),
}
SAMPLES, SEEDS = 100, 60
BAND = 0.25
DEGREES, TEST_SAMPLES, TRIALS = 5.0, 100, 500


def score_curves(path: Path) -> list[str]:
    """RMSE against -x on 31 points in [-1.5, 1.5], over 60 seeds; the picture goes to [-4, 4]."""
    inner = np.linspace(-1.5, 1.5, 31)
    grid = jnp.concatenate([jnp.asarray(inner), jnp.linspace(-4, 4, 81)])[:, None]
    draws = random.normal(random.key(0), (SEEDS, SAMPLES, 1))
    print(f"{'estimator':<30}{'median RMSE':>12}{'90 %':>7}{'re-run':>14}")
    complaints, curves, rerun = [], {}, figures("re-run")
    for name, estimator in CURVES.items():
        fit = jax.jit(lambda xs, e=estimator: lax.map(lambda x: e.fit(x)(grid)[:, 0], xs))
        values = np.asarray(fit(draws))
        errors = np.sqrt(np.mean((values[:, :31] + inner) ** 2, axis=1))
        median, high = np.median(errors), np.quantile(errors, 0.9)
        words = rerun.get(name, "")
        print(f"{name:<30}{median:>12.2f}{high:>7.2f}{words:>14}")
        if words and abs(median / float(words.split()[0]) - 1) > BAND:
            complaints.append(f"{name}: the median {median:.2f} is not within 25 % of {words}.")
        curves[name] = values[:, 31:]
    draw_curves(np.linspace(-4, 4, 81), curves, path)
    return complaints


def draw_curves(x: np.ndarray, curves: dict[str, np.ndarray], path: Path) -> None:
    fig, axes = plt.subplots(
        2, 3, figsize=(13, 7.5), sharex=True, sharey=True, layout="constrained"
    )
    for ax, (name, values) in zip(axes.flat, curves.items(), strict=True):
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9], axis=0)
        ax.axvspan(-1.5, 1.5, color="0.93", label="where the error is measured")
        ax.fill_between(x, low, high, color="C0", alpha=0.3, label="10 % to 90 % of 60 seeds")
        ax.plot(x, middle, color="C0", label="median")
        ax.plot(x, values[0], color="C1", lw=1, label="one seed")
        ax.plot(x, -x, color="black", ls="--", lw=1, label="score of N(0, 1)")
        ax.set(title=name, ylim=(-5, 5), xlim=(-4, 4))
    for ax in axes[1]:
        ax.set_xlabel("x")
    for ax in axes[:, 0]:
        ax.set_ylabel("score, 1/length")
    axes[0, 0].legend(frameon=False, fontsize=8, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    print(f"\nPicture: {path}")


def power_of_the_discrepancy() -> None:
    """Draws of t-distributions, target N(0, I): how often the U-statistic is above its 95 %."""
    print(
        f"\nTarget N(0, I), {TEST_SAMPLES} draws with covariance I and tails of t({DEGREES:g}), in"
        f" each coordinate or of the radius; level 5 %, {TRIALS} trials"
    )
    print(f"{'d':>4}{'tails':>12}{'IMQ':>8}{'RBF':>8}")
    for d, tails in itertools.product((1, 5, 20), ("coordinate", "radius")):
        if (d, tails) != (1, "radius"):
            row = [power(kernel, d, tails) for kernel in (IMQ, RBF)]
            print(f"{d:>4}{tails:>12}" + "".join(f"{value:>8.2f}" for value in row))


def sequence_off_the_target() -> None:
    """Points in a ball that grows with their number, target N(0, I), with a fixed bandwidth."""
    d = 5
    print(f"\nV-statistic at K points in a ball of radius 4 K^(1/{d}) in {d} dimensions, h = 1")
    print(f"{'K':>6}{'IMQ':>8}{'RBF':>8}")
    for num in (100, 400, 1600, 6400):
        key_direction, key_radius = random.split(random.key(5))
        direction = random.normal(key_direction, (num, d))
        direction /= jnp.linalg.norm(direction, axis=1, keepdims=True)
        x = 4.0 * (num * random.uniform(key_radius, (num, 1))) ** (1 / d) * direction
        row = (
            kernel_stein_discrepancy(x, -x, kernel(1.0), statistic="v", block_size=400)
            for kernel in (IMQ, RBF)
        )
        print(f"{num:>6}" + "".join(f"{float(value):>8.2f}" for value in row))


@jax.jit
def statistics(kernel: Any, draws: Array) -> Array:
    """U-statistics of ``(trials, K, d)`` draws, for the target N(0, I)."""

    def statistic(x: Array) -> Array:
        k0 = stein_kernel_matrix(x, -x, kernel)
        return (k0.sum() - jnp.trace(k0)) / (len(x) * (len(x) - 1))

    return lax.map(statistic, draws)


def power(kernel: Any, d: int, tails: str) -> float:
    key_null, key_normal, key_gamma = random.split(random.key(1), 3)
    shape = (TRIALS, TEST_SAMPLES)
    chi2 = 2.0 * random.gamma(key_gamma, DEGREES / 2, (*shape, d if tails == "coordinate" else 1))
    off_target = random.normal(key_normal, (*shape, d)) * jnp.sqrt((DEGREES - 2.0) / chi2)
    null = statistics(kernel("median_distance"), random.normal(key_null, (*shape, d)))
    values = statistics(kernel("median_distance"), off_target)
    return float(np.mean(np.asarray(values) > np.quantile(null, 0.95)))


def shortest(fn: Callable[[], Any], repeats: int = 7) -> float:
    jax.block_until_ready(fn())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(fn())
        times.append(time.perf_counter() - begin)
    return min(times)


def cost(num: int = 1000, d: int = 50) -> None:
    """The same numbers three ways, in float32 and in milliseconds."""
    x = random.normal(random.key(3), (num, d))
    kernel = RBF("median_distance").resolve(x)
    eta = 1e-2

    def stein(k: Array, b: Array) -> Array:
        return -cho_solve((jnp.linalg.cholesky(k + eta * jnp.eye(num)), True), b)

    def kde(k: Array, b: Array) -> Array:
        return -b / k.sum(1)[:, None]

    def with_array(x: Array) -> tuple[Array, Array]:
        k = kernel(x, x)
        gradients = k[:, :, None] * (x[:, None] - x[None]) / kernel.length**2
        return k, lax.optimization_barrier(gradients).sum(1)

    def by_loop(x: Array) -> tuple[Array, Array]:
        def row(xi: Array) -> tuple[Array, Array]:
            k = kernel(xi[None], x)[0]
            return k, jnp.sum(k[:, None] * (xi - x), 0) / kernel.length**2

        return lax.map(row, x)

    print(f"\nK = {num}, d = {d}, ms (ratio to ours)")
    print(f"{'estimator':<12}{'ours':>8}{'(K, K, d) array':>18}{'loop over samples':>20}")
    for ours, formula in ((SteinScore(eta, kernel), stein), (KDEScore(kernel), kde)):
        slow = [jax.jit(lambda x, f=f, g=formula: g(*f(x))) for f in (with_array, by_loop)]
        fns = [jax.jit(ours), *slow]
        np.testing.assert_allclose(fns[0](x), fns[1](x), atol=2e-2)
        mine, array, loop = (1e3 * shortest(lambda fn=fn: fn(x)) for fn in fns)
        others = (f"{value:.1f} ({value / mine:.1f})" for value in (array, loop))
        print(f"{type(ours).__name__:<12}{mine:>8.1f}{next(others):>18}{next(others):>20}")


def large(num: int = 10_000, d: int = 50) -> None:
    x = random.normal(random.key(4), (num, d))
    begin = time.perf_counter()
    _, residual = jax.block_until_ready(jax.jit(SteinScore().with_residual)(x))
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(
        f"\nSteinScore() at {num} samples of {d} dimensions: {seconds:.0f} s with compilation,"
        f" relative residual {float(residual):.1e}, peak memory of the process {peak:.1f} GiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/score_curves.png"))
    parser.add_argument("--large", action="store_true", help="only the solve in blocks")
    options = parser.parse_args()
    if options.large:
        large()
        return 0
    complaints = score_curves(options.out)
    power_of_the_discrepancy()
    sequence_off_the_target()
    cost()
    print("\n".join(complaints), end="\n" if complaints else "")
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
