"""The law, the cost and a picture of `EnsembleLangevin`, beside fields.

`--law`: a normal in 100 dimensions whose covariance has a condition number of 10^4 and random
directions, 200 particles, 20 keys, of fields 4. All begin at draws of a normal that is two standard
deviations off in each direction and twice as wide. Fields take 500 steps of `particle_step`, the
dynamics 600, and the particles are looked at once. Means and covariances are over all particles of
all keys in the coordinates in which the posterior is N(0, I), over the Monte Carlo errors of as
many exact draws: `mean` and `covariance` are the root mean square of these ratios (1 for exact
draws) and the largest of 100 and of 5,050. `sd` is the [least, largest] of the 100 standard
deviations.

`--cost`: seconds of a step, and the largest memory of the process, for 10,000 particles of 100
numbers on a normal, each in a process of its own, of one core.

`--picture`: a funnel, v ~ N(0, 3) and nine numbers N(0, e^v), with 300 particles from the modes:
`RegularizedSVGD` after 1,000 steps, and the ensemble at the last time and at 50 times, over exact
draws. Writes `docs/pictures/particles_on_a_funnel.png`.
"""

import argparse
from collections.abc import Callable
from functools import partial
import json
from pathlib import Path
import resource
import subprocess
import sys
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI

from numpyro_ext.optim import find_modes
from numpyro_ext.particles import (
    GFSD,
    GFSF,
    SVGD,
    AutoParticles,
    Blob,
    EnsembleLangevin,
    ParVI,
    RegularizedSVGD,
    particle_step,
)

DIMENSIONS, PARTICLES, KEYS, KEYS_OF_FIELDS, CONDITION = 100, 200, 20, 4, 1e4
FIELDS = {
    "RegularizedSVGD": RegularizedSVGD(),
    "GFSF": GFSF(precondition="covariance"),
    "GFSD": GFSD(precondition="covariance"),
    "SVGD": SVGD(precondition="covariance"),
    "Blob": Blob(precondition="covariance"),
}
LANGEVIN = "EnsembleLangevin"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "particles_on_a_funnel.png"


def by_field(field: Any, grad: Callable[[Array], Array], steps: int, x: Array) -> Array:
    optim = particle_step(steps)

    def step(carry: Any, _: Any) -> Any:
        x, state = carry
        move, state = optim.update(-field.velocity(x, grad(x)), state, x)
        return (x + move, state), None

    return lax.scan(step, (x, optim.init(x)), None, steps)[0][0]


def by_dynamics(
    modes: Any, grad: Callable[[Array], Array], steps: int, x: Array, rng_key: Array
) -> Array:
    dynamics = EnsembleLangevin()

    def step(carry: Any, progress: Array) -> Any:
        x, state = carry
        return dynamics.step(x, state, grad(x), progress), None

    start = x, dynamics.init(rng_key, x, modes)
    return lax.scan(step, start, jnp.arange(steps) / steps)[0][0]


def law() -> None:
    d, m = DIMENSIONS, PARTICLES
    rotation = jnp.linalg.qr(random.normal(random.key(7), (d, d)))[0]
    root = jnp.linalg.cholesky(rotation * jnp.geomspace(1 / CONDITION, 1.0, d) @ rotation.T)

    def model() -> None:
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(d), scale_tril=root))

    def whitened(x: Array) -> Array:
        return solve_triangular(root, x.T, lower=True).T

    def grad(x: Array) -> Array:
        return -solve_triangular(root, whitened(x).T, lower=True, trans=1).T

    modes = find_modes(model)
    print("| method | mean | covariance | sd |\n|---|---|---|---|")
    for name in [LANGEVIN, *FIELDS]:

        def one(rng_key: Array, name: str = name) -> Array:
            key_start, key_run = random.split(rng_key)
            x = (2.0 + 2.0 * random.normal(key_start, (m, d))) @ root.T
            if name == LANGEVIN:
                return whitened(by_dynamics(modes, grad, 600, x, key_run))
            return whitened(by_field(FIELDS[name], grad, 500, x))

        keys = random.split(random.key(0), KEYS if name == LANGEVIN else KEYS_OF_FIELDS)
        y = np.asarray(jax.jit(partial(lax.map, one))(keys), float).reshape(-1, d)
        of_mean = np.abs(y.mean(0)) * len(y) ** 0.5
        error = np.where(np.eye(d) > 0, 2.0, 1.0) ** 0.5 * len(y) ** -0.5
        of_square = (np.abs(y.T @ y / len(y) - np.eye(d)) / error)[np.triu_indices(d)]
        sds = y.std(0)
        cells = [f"{np.mean(x**2) ** 0.5:.3g}, {x.max():.3g}" for x in (of_mean, of_square)]
        print(f"| {name} | {' | '.join(cells)} | [{sds.min():.3g}, {sds.max():.3g}] |", flush=True)


def cost(name: str) -> list[float]:
    """Seconds of a step, and the largest memory of the process in MB."""
    m, d = 10_000, 100
    scale = jnp.geomspace(0.1, 10.0, d)
    x = random.normal(random.key(0), (m, d)) * scale
    steps = 1 if name in FIELDS else 50

    def run(x: Array) -> Array:
        def grad(x: Array) -> Array:
            return -x / scale**2

        if name in FIELDS:
            return by_field(FIELDS[name], grad, steps, x)
        return by_dynamics(None, grad, steps, x, random.key(1))

    compiled = jax.jit(run).lower(x).compile()
    began = time.process_time()
    jax.block_until_ready(compiled(x))
    seconds = (time.process_time() - began) / steps
    return [seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]


def costs() -> None:
    print("| method | seconds a step | memory, MB |\n|---|---|---|")
    for name in (LANGEVIN, "RegularizedSVGD"):
        command = [sys.executable, __file__, "--one", name]
        seconds, memory = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
        print(f"| {name} | {seconds:.3g} | {memory:,.0f} |", flush=True)


def funnel() -> None:
    v = numpyro.sample("v", dist.Normal(0.0, 3.0**0.5))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]).to_event(1))


def picture() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    m = 300
    svi = SVI(funnel, AutoParticles(funnel, m), particle_step(1000), RegularizedSVGD())
    fit = svi.run(random.key(0), 1000, progress_bar=False)
    mcmc = MCMC(
        ParVI(funnel, optim=EnsembleLangevin(), steps_per_sample=10),
        num_warmup=100,
        num_samples=50,
        num_chains=m,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    draws: Any = mcmc.get_samples(group_by_chain=True)
    last = {name: x[:, -1] for name, x in draws.items()}
    every = {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}
    rng = np.random.default_rng(0)
    v = 3.0**0.5 * rng.normal(size=20_000)
    x = np.exp(v / 2) * rng.normal(size=v.shape)
    shown = {
        "RegularizedSVGD": svi.guide.particles(fit.params),
        "EnsembleLangevin, last time": last,
        "EnsembleLangevin, 50 times": every,
    }
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.6), sharey=True, layout="constrained")
    for ax, (title, points) in zip(axes, shown.items(), strict=True):
        ax.plot(x, v, ".", color="0.85", markersize=2, rasterized=True)
        few = len(points["v"]) == m
        style = {"markersize": 4} if few else {"markersize": 1.5, "alpha": 0.3}
        ax.plot(points["x"][:, 0], points["v"], ".", **style, rasterized=True)
        ax.set(title=title, xlabel="first of nine numbers", xlim=(-12, 12), ylim=(-7, 7))
        v_of = np.asarray(points["v"])
        print(f"{title}: v has mean {v_of.mean():.2f} and sd {v_of.std():.2f} (0, 1.73)")
    axes[0].set_ylabel("v")
    figure.savefig(PICTURE, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for what in ("law", "cost", "picture"):
        parser.add_argument(f"--{what}", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(cost(args.one)))
        return
    for asked, fn in ((args.law, law), (args.cost, costs), (args.picture, picture)):
        if asked:
            fn()


if __name__ == "__main__":
    main()
