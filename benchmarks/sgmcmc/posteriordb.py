"""Bias of the kernels and of NUTS on four posteriors of posteriordb, against its reference draws.

`blr`, `kidscore_momiq` and `arK` are linear regressions y ~ N(X beta, sigma), taken in minibatches
drawn with replacement; the non-centred eight schools have 8 rows and are taken whole. For each
parameter of the reference, `|bias| / sd` is the distance between the means of the draws and of the
reference in standard deviations of the reference, and `sd ratio` the standard deviation of the
draws over that of the reference. The 2000 reference draws themselves are known to 0.02 sd in a mean
and to 2 % in an sd.

The regressions are sampled on one scale: with N rows, X = QR and the least-squares fit b with
residual standard deviation s, `beta = b + sqrt(2 N) s R^-1 theta` and `sigma = s tau`, so that
theta and log(tau) are nearly uncorrelated and all have a standard deviation near 1 / sqrt(2 N);
`beta` and `sigma` are deterministic sites. The rows `unscaled` sample beta and sigma as they stand,
from the same start. Step sizes are fixed in `KERNELS`, in units of that scale (squared for SGLD),
or unscaled of the finest scale of a direction, except SGHMC, whose mass is set from the columns of
X. SGRLD moves the standard deviation tau by its expanded-mean rule; RecipeKernel is SGHMC without
splitting; KernelHMC takes the score of the Gaussian that the scale stands for, and one transition
with all rows for as many gradients of the others as read the same number of rows.
"""

import argparse
from collections.abc import Callable
import json
from pathlib import Path
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, init_to_uniform, init_to_value
from numpyro.infer.reparam import LocScaleReparam
from tqdm import tqdm
from unsplit import unsplit_sghmc

from numpyro_ext.mcmc import (
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    ControlVariate,
    ExpandedMean,
    KernelHMC,
    RecipeKernel,
)

BURN_IN = 0.1  # of the steps
THIN = 20


class Posterior(NamedTuple):
    """
    A model of ``data`` in minibatches, or of ``whole`` without; where it starts; the scale of its
    latents (a standard deviation) and the finest of their scales, if they differ; the draws of its
    reference; for the control variate a point in the middle of the posterior; the masses that bring
    the latents to the one scale; and the part of the rows that is a minibatch.
    """

    model: Callable[..., None]
    data: tuple[Any, ...]
    whole: tuple[Any, ...]
    start: Callable[..., Any]
    scale: float
    finest: float
    reference: dict[str, np.ndarray]
    center: dict[str, Any] | None = None
    mass: dict[str, Any] | float = 1.0
    part: float = 1.0


def regression(
    x: np.ndarray,
    y: np.ndarray,
    batch: int,
    prior: float | None,
    noise: dist.Distribution,
    reference: dict[str, np.ndarray],
    scaled: bool,
) -> Posterior:
    """``prior`` is the standard deviation of the coefficients, None for a flat one; ``noise`` the
    prior of sigma.
    """
    rows, dim = x.shape
    b, _, _, _ = np.linalg.lstsq(x, y, rcond=None)
    s = float(np.sqrt(np.sum((y - x @ b) ** 2) / (rows - dim)))
    scale = 1 / np.sqrt(2 * rows)
    to_beta = jnp.asarray(s / scale * np.linalg.inv(np.linalg.qr(x)[1]))

    def model(x: Any, y: Any, batch: int | None) -> None:
        flat = dist.ImproperUniform(constraints.real_vector, (), (dim,))
        if scaled:
            theta = numpyro.sample("theta", flat)
            beta = numpyro.deterministic("beta", b + to_beta @ theta)
            tau = numpyro.sample("tau", dist.ImproperUniform(constraints.positive, (), ()))
            sigma = numpyro.deterministic("sigma", s * tau)
            numpyro.factor("prior of sigma", noise.log_prob(sigma))
        else:
            beta, sigma = numpyro.sample("beta", flat), numpyro.sample("sigma", noise)
        if prior is not None:
            numpyro.factor("prior of beta", dist.Normal(0, prior).log_prob(beta).sum())
        with numpyro.plate("data", rows, subsample_size=batch) as idx:
            numpyro.sample("y", dist.Normal(x[idx] @ beta, sigma), obs=y[idx])

    center = {"theta": jnp.zeros(dim), "tau": 1.0} if scaled else {"beta": b, "sigma": s}
    # As a user would read them off the single columns of X.
    mass = 1.0 if scaled else {"beta": scale**2 * np.sum(x**2, 0) / s**2, "sigma": 1.0}
    finest = scale if scaled else min(scale, s / np.linalg.norm(x, 2))
    data = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    start = init_to_value(values=center)
    whole = (*data, None)
    return Posterior(
        model, (*data, batch), whole, start, scale, finest, reference, center, mass, batch / rows
    )


def read(folder: Path, name: str, data: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    draws = np.load(folder / f"{name}.npz")
    values = json.loads((folder / f"{data}.json").read_text())
    return values, {key: np.asarray(draws[key], float) for key in draws.files}


def blr(folder: Path, scaled: bool) -> Posterior:
    data, reference = read(folder, "sblrc-blr", "sblrc")
    x, y = np.array(data["X"], float), np.array(data["y"], float)
    return regression(x, y, 20, 10.0, dist.HalfNormal(10.0), reference, scaled)


def kidscore_momiq(folder: Path, scaled: bool) -> Posterior:
    data, reference = read(folder, "kidiq-kidscore_momiq", "kidiq")
    y = np.array(data["kid_score"], float)
    x = np.column_stack([np.ones(len(y)), np.array(data["mom_iq"], float)])
    return regression(x, y, 50, None, dist.HalfCauchy(2.5), reference, scaled)


def arK(folder: Path, scaled: bool) -> Posterior:
    data, reference = read(folder, "arK-arK", "arK")
    series, lags = np.array(data["y"], float), data["K"]
    columns = [series[lags - k : len(series) - k] for k in range(1, lags + 1)]
    x = np.column_stack([np.ones(len(series) - lags), *columns])
    return regression(x, series[lags:], 40, 10.0, dist.HalfCauchy(2.5), reference, scaled)


def eight_schools(folder: Path, scaled: bool) -> Posterior:
    data, reference = read(folder, "eight_schools-eight_schools_noncentered", "eight_schools")
    y, sigma = jnp.array(data["y"], float), jnp.array(data["sigma"], float)

    def model(y: Any, sigma: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        trans = numpyro.sample("theta_trans", dist.Normal(0, 1).expand([len(y)]).to_event(1))
        theta = numpyro.deterministic("theta", mu + tau * trans)
        numpyro.sample("y", dist.Normal(theta, sigma).to_event(1), obs=y)

    if scaled:
        model = reparam(model, config={"mu": LocScaleReparam(0)})
    data = (y, sigma)
    return Posterior(model, data, data, init_to_uniform, 1.0, 1.0, reference)


POSTERIORS = {
    "blr": blr,
    "kidscore_momiq": kidscore_momiq,
    "arK": arK,
    "eight schools": eight_schools,
}


def sgld(p: Posterior, factor: float, **kw: Any) -> SGLD:
    return SGLD(p.model, factor * p.finest**2, **kw)


def sghmc(p: Posterior, factor: float, **kw: Any) -> SGHMC:
    return SGHMC(p.model, factor * p.scale, friction=2 / p.scale, mass=p.mass, **kw)


def sgnht(p: Posterior, factor: float, **kw: Any) -> SGNHT:
    # A thermostat settles in thermal_mass * friction units of time; the default mass is for latents
    # of scale 1.
    return SGNHT(
        p.model, factor * p.finest, friction=2 / p.finest, thermal_mass=10 * p.finest**2, **kw
    )


def recipe(p: Posterior, factor: float, **kw: Any) -> RecipeKernel:
    return RecipeKernel(p.model, factor * p.scale, **unsplit_sghmc(2 / p.scale), **kw)


def kernel_hmc(p: Posterior, factor: float, *, steps_per_sample: int, **kw: Any) -> KernelHMC:
    steps = max(1, round(steps_per_sample * p.part))
    return KernelHMC(
        p.model,
        factor * p.scale,
        score=lambda z: -z / p.scale**2,
        steps_per_sample=steps,
        **kw,
    )


KERNELS = {
    "SGLD": lambda p, **kw: sgld(p, 0.005, **kw),
    "SGLD, control variate": lambda p, **kw: sgld(p, 0.02, gradient=ControlVariate(p.center), **kw),
    "PSGLD": lambda p, **kw: PSGLD(p.model, 0.015 * p.finest, **kw),
    "SGRLD": lambda p, **kw: SGRLD(p.model, 0.005 * p.scale**2, metric=ExpandedMean(["tau"]), **kw),
    "SGHMC": lambda p, **kw: sghmc(p, 0.025, **kw),
    "SGHMC, baoab": lambda p, **kw: sghmc(p, 0.025, integrator="baoab", **kw),
    "SGHMC, noise estimate": lambda p, **kw: sghmc(p, 0.1, noise_variance="warmup", **kw),
    "SGNHT": lambda p, **kw: sgnht(p, 0.1, **kw),
    "SGNHT, per coordinate": lambda p, **kw: sgnht(p, 0.1, thermostat="per_parameter", **kw),
    "RecipeKernel": lambda p, **kw: recipe(p, 0.025, **kw),
    "KernelHMC": lambda p, **kw: kernel_hmc(p, 0.2, **kw),
}
UNSCALED = ("SGLD", "PSGLD", "SGHMC", "SGNHT")


def run(posterior: Posterior, name: str, args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The draws of all chains together, and whether a chain diverged."""
    keywords = {"num_chains": args.chains, "progress_bar": False}
    if name == "NUTS":
        kernel = NUTS(posterior.model, init_strategy=posterior.start)
        mcmc = MCMC(
            kernel, num_warmup=1000, num_samples=1000, chain_method="sequential", **keywords
        )
        mcmc.run(random.key(0), *posterior.whole)
        return mcmc.get_samples(), False
    kernel = KERNELS[name](posterior, steps_per_sample=THIN, init_strategy=posterior.start)
    warmup = int(args.steps * BURN_IN) // THIN
    samples = args.steps // THIN - warmup
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=samples, chain_method="vectorized", **keywords
    )
    data = posterior.whole if name == "KernelHMC" else posterior.data
    mcmc.run(random.key(0), *data, extra_fields=("diverging",))
    return mcmc.get_samples(), bool(np.any(mcmc.get_extra_fields()["diverging"]))


def judge(draws: dict[str, Any], reference: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """``|bias| / sd`` and the ratio of standard deviations, of each parameter of the reference."""
    biases, ratios = [], []
    for name, exact in reference.items():
        site, _, k = name.rstrip("]").partition("[")
        if site == "alpha":  # the intercept of the autoregression is its first coefficient
            site, k = "beta", "1"
        elif k and "alpha" in reference:
            k = str(int(k) + 1)
        values = np.asarray(draws[site], np.float64)
        values = values[:, int(k) - 1] if k else values
        biases.append(abs(values.mean() - exact.mean()) / exact.std())
        ratios.append(values.std() / exact.std())
    return np.array(biases), np.array(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=100_000, help="gradients to a chain")
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=POSTERIORS, default=list(POSTERIORS))
    kernels = [*KERNELS, "NUTS"]
    parser.add_argument("--kernels", nargs="+", choices=kernels, default=kernels)
    parser.add_argument("--target", type=float, default=0.1, help="largest |bias| / sd that counts")
    args = parser.parse_args()
    folder = args.data_dir / "posteriordb"
    if not folder.is_dir():
        sys.exit(f"There is no folder {folder}; give its parent as --data-dir.")
    print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {args.chains} chains of"
        f" {args.steps:,} steps,"
        f" the first {BURN_IN:.0%} left out\n"
    )
    print(
        "| posterior | kernel | max of abs(bias) / sd | mean | sd ratio, min to max | seconds |"
        " reached |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = [(name, kernel, True) for name in args.only for kernel in args.kernels]
    rows += [
        (name, kernel, False) for name in args.only for kernel in UNSCALED if kernel in args.kernels
    ]
    reached = {}
    for name, kernel, scaled in (
        bar := tqdm(sorted(rows, key=lambda row: args.only.index(row[0])))
    ):
        posterior = POSTERIORS[name](folder, scaled)
        if posterior.center is None and "control" in kernel:
            continue
        title = kernel if scaled else f"{kernel}, unscaled"
        bar.set_description(f"{name}, {title}")
        start = time.perf_counter()
        draws, diverged = run(posterior, kernel, args)
        seconds = time.perf_counter() - start
        bias, ratio = judge(draws, posterior.reference)
        good = bool(bias.max() <= args.target and np.all(abs(ratio - 1) <= args.target))
        reached.setdefault(title, []).append(good and not diverged)
        tqdm.write(
            f"| {name} | {title} | {bias.max():.3f} | {bias.mean():.3f} |"
            f" {ratio.min():.3f} to {ratio.max():.3f} |"
            f" {seconds:.1f} | {'diverged' if diverged else 'yes' if good else 'no'} |"
        )
    print(
        f"\nReached: every abs(bias) / sd at most {args.target:g} and every sd ratio within"
        f" {args.target:.0%} of 1."
    )
    for title, found in reached.items():
        print(f"- {title}: {sum(found)} of {len(found)} posteriors")


if __name__ == "__main__":
    main()
