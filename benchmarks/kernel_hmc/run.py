"""Hamiltonian Monte Carlo with learnt scores on the banana: four estimators against the true score.

The target is x1 ~ N(0, 100), x2 ~ N(0.03 (x1^2 - 100), 1), so that Var x2 = 19. Each estimator is
fitted to 200 draws, with an RBF kernel whose bandwidth is ``"median_distance"`` times 1 to 5; the
factor, the ridge and the step size are those of the largest expected jump of one trajectory from
draws of the target, in units of its standard deviations. Then 200 chains of 2000 iterations of
``KernelHMC`` start at draws of the target plus noise with a standard deviation of 2. The accept
step is exact.

The exit code is 1 if no Stein estimator has a mean of x1 within 3 standard errors of 0, a variance
of x2 within 15 %, an acceptance above 0.3 and a discrepancy of at most 3 times that of the true
score.

    python benchmarks/kernel_hmc/run.py                # or some of: --names stein kde
"""

import argparse
import itertools
from pathlib import Path
import sys
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from kernel_hmc_banana import discrepancy, exact_draws, later, model, pooled, true_score

from numpyro_ext.mcmc import KernelHMC
from numpyro_ext.scores import RBF, KDEScore, ScoreMatchingScore, SteinScore
from numpyro_ext.targets import banana_potential

CHAINS, ITERATIONS, TRAINING, LEAPFROG, THIN = 200, 2000, 200, 10, 10
FACTORS = (1.0, 1.5, 2.0, 3.0, 5.0)
STEPS = 0.1 * 2.0 ** np.arange(0, 4.5, 0.5)
DEVIATIONS = jnp.array([10.0, 19.0**0.5])


def estimator(name: str, factor: Any, ridge: Any) -> Any:
    kernel = RBF("median_distance", factor=factor)
    if name == "stein":
        return SteinScore(ridge, kernel)
    if name == "stein, parametric":
        return SteinScore(ridge, kernel, form="parametric")
    if name == "score matching":
        return ScoreMatchingScore(ridge, kernel)
    return KDEScore(kernel)


# Ridges without units for "stein", in units of length squared for the others.
RIDGES = {
    "stein": (1e-2, 1e-1, 1.0),
    "stein, parametric": (1e-1, 1e1, 1e3),
    "score matching": (1e-1, 1e1, 1e3),
    "kde": (1.0,),
}


@jax.jit
def jump(fitted: Any, eps: Array, z: Array, r: Array) -> tuple[Array, Array]:
    """Expected squared jump, in standard deviations, and acceptance of one trajectory."""
    score = jax.vmap(true_score) if fitted is None else fitted

    def leapfrog(_: Any, at: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        z, r, f = at
        r = r + eps / 2 * f
        z = z + eps * r
        f = score(z)
        return z, r + eps / 2 * f, f

    z_new, r_new, _ = lax.fori_loop(0, LEAPFROG, leapfrog, (z, r, score(z)))
    energy = lambda z, r: jax.vmap(banana_potential)(z) + jnp.sum(r**2, 1) / 2  # noqa: E731
    accept = jnp.exp(jnp.minimum(energy(z, r) - energy(z_new, r_new), 0.0))
    accept = jnp.nan_to_num(accept)
    distance = jnp.sum(((z_new - z) / DEVIATIONS) ** 2, 1)
    return jnp.mean(accept * jnp.nan_to_num(distance)), jnp.mean(accept)


def tune(name: str, training: Array, z: Array, r: Array) -> tuple[Any, float, list[float], str]:
    """The best estimator and step, and its acceptance at half, once and twice the step."""
    if name == "true score":
        candidates = [(None, "")]
    else:
        fit = jax.jit(lambda factor, ridge: estimator(name, factor, ridge).fit(training))
        grid = itertools.product(FACTORS, RIDGES[name])
        candidates = [((f, e), f"factor {f:g}, ridge {e:g}") for f, e in grid]
    best: tuple[float, Any, float, Any, str] | None = None
    for arguments, words in candidates:
        fitted = None if arguments is None else fit(*arguments)
        for eps in STEPS:
            value = float(jump(fitted, eps, z, r)[0])
            if best is None or value > best[0]:
                best = (value, arguments, float(eps), fitted, words)
    assert best is not None
    _, arguments, eps, fitted, words = best
    accepted = [float(jump(fitted, eps * c, z, r)[1]) for c in (0.5, 1.0, 2.0)]
    return (None if arguments is None else estimator(name, *arguments)), eps, accepted, words


def main() -> int:
    names = ["stein", "stein, parametric", "kde", "score matching"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", nargs="+", default=names, choices=names)
    options = parser.parse_args()
    keys = random.split(random.key(0), 6)
    training = exact_draws(keys[0], TRAINING)
    start = exact_draws(keys[1], CHAINS) + 2.0 * random.normal(keys[2], (CHAINS, 2))
    z, r = exact_draws(keys[3], 400), random.normal(keys[4], (400, 2))

    print(
        f"{'score':<20}{'tuned to':<24}{'step':>6}{'accepted at 1/2, 1, 2 steps':>29}"
        f"{'accepted':>10}"
        f"{'E x1':>8}{'s.e.':>7}{'Var x2':>8}{'KSD':>8}{'seconds':>9}"
    )
    passed, reference = [], None
    for name in ["true score", *options.names]:
        begin = time.perf_counter()
        score, eps, accepted, words = tune(name, training, z, r)
        more = {} if score is None else {"training_samples": {"x": training}}
        kernel = KernelHMC(model, eps, score=score or true_score, num_leapfrog=LEAPFROG, **more)
        mcmc = MCMC(
            kernel,
            num_warmup=0,
            num_samples=ITERATIONS,
            num_chains=CHAINS,
            chain_method="vectorized",
            thinning=THIN,
            progress_bar=False,
        )
        mcmc.run(keys[5], init_params={"x": start})
        half = later(np.asarray(mcmc.get_samples(group_by_chain=True)["x"]))
        accept = float(mcmc.get_extra_fields()["accept_prob"].mean())
        mean, variance = half[..., 0].mean(), half[..., 1].var()
        error = half[..., 0].std() / float(np.asarray(effective_sample_size(half[..., 0]))) ** 0.5
        ksd = float(discrepancy(pooled(half, 5000)))
        reference = ksd if reference is None else reference
        good = abs(mean) < 3 * error and abs(variance / 19 - 1) < 0.15 and accept > 0.3
        if name.startswith("stein"):
            passed.append(good and ksd < 3 * reference)
        at = ", ".join(f"{a:.2f}" for a in accepted)
        print(
            f"{name:<20}{words:<24}{eps:>6.2f}{at:>29}{accept:>10.2f}{mean:>8.2f}{error:>7.2f}"
            f"{variance:>8.1f}{ksd:>8.4f}{time.perf_counter() - begin:>9.1f}",
            flush=True,
        )
    print("\nexact: E x1 = 0, Var x2 = 19")
    return 0 if any(passed) or not passed else 1


if __name__ == "__main__":
    sys.exit(main())
