"""Mixture and Markov guides with nothing tuned, compared with NUTS.

    python benchmarks/guides/structured.py
    python benchmarks/guides/structured.py lengths

Every guide is trained by Adam at 1e-2 with a cosine for 5,000 steps. `mean` is the largest error of
a posterior mean in standard deviations of NUTS, `sd` the smallest and largest ratio of standard
deviations, for the sites of the path (or all sites) and for the scalar ones; `khat` is the Pareto
shape.
"""

from collections.abc import Callable
import sys
import time
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax

from numpyro_ext.diagnostics import pareto_khat
from numpyro_ext.guides import AutoMarkov, AutoMixtureNormal
from numpyro_ext.objectives import MixtureELBO

T = 200
rng = np.random.default_rng(0)
LEVEL = np.cumsum(0.3 * rng.standard_normal(T))
Y = jnp.array(LEVEL + 0.5 * rng.standard_normal(T))
VOLATILITY = np.cumsum(0.15 * rng.standard_normal(T)) - 1.0
RETURNS = jnp.array(np.exp(VOLATILITY / 2) * rng.standard_t(10.0, T))
EIGHT = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SIGMA = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def two_modes():
    """Modes near -2 and 2 with 12 % and 88 % of the mass."""
    z = numpyro.sample("z", dist.Normal(0.5, 1.0))
    numpyro.sample("x", dist.Normal(z**2, 0.5), obs=4.0)


def eight_schools():
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", 8):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * theta, SIGMA), obs=EIGHT)


def level_by_scan():
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))

    def step(z, y):
        z = numpyro.sample("z", dist.Normal(z, sigma))
        numpyro.sample("y", dist.Normal(z, noise), obs=y)
        return z, None

    scan(step, 0.0, Y)


def level_by_cumsum():
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("time", T):
        e = numpyro.sample("e", dist.Normal(0.0, 1.0))
    z = numpyro.deterministic("z", sigma * jnp.cumsum(e))
    with numpyro.plate("time", T):
        numpyro.sample("y", dist.Normal(z, noise), obs=Y)


def stochastic_volatility():
    """NumPyro's example, on 200 returns."""
    sigma = numpyro.sample("sigma", dist.Exponential(50.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(scale=sigma, num_steps=T))
    nu = numpyro.sample("nu", dist.Exponential(0.1))
    numpyro.sample("r", dist.StudentT(nu, 0.0, jnp.exp(s / 2)).to_event(1), obs=RETURNS)


class Case(NamedTuple):
    model: Callable[[], Any]
    path: str | None
    guides: dict[str, tuple[Callable[..., Any], Any]]
    draws: int = 4000
    """Of NUTS, after a quarter of as many for warmup."""


MIXTURES = {
    "AutoNormal": (AutoNormal, Trace_ELBO(4)),
    "AutoMixtureNormal": (AutoMixtureNormal, Trace_ELBO(4)),
    "the same, MixtureELBO": (AutoMixtureNormal, MixtureELBO()),
    "spread 3, MixtureELBO": (
        lambda model: AutoMixtureNormal(model, init_spread=3.0),
        MixtureELBO(),
    ),
    "the same, full": (
        lambda model: AutoMixtureNormal(model, covariance="full"),
        MixtureELBO(),
    ),
}
CHAINS = {
    "AutoNormal": (AutoNormal, Trace_ELBO(4)),
    "AutoMultivariateNormal": (AutoMultivariateNormal, Trace_ELBO(4)),
    "AutoMarkov": (AutoMarkov, Trace_ELBO(4)),
}
CASES = {
    "two modes": Case(two_modes, None, MIXTURES),
    "eight schools": Case(eight_schools, None, MIXTURES),
    "level, scan": Case(level_by_scan, "z", CHAINS),
    "level, cumsum": Case(level_by_cumsum, "z", CHAINS),
    "volatility": Case(stochastic_volatility, "s", CHAINS, draws=2000),
}


def nuts(case):
    """Draws of NUTS."""
    mcmc = MCMC(
        NUTS(case.model),
        num_warmup=case.draws // 4,
        num_samples=case.draws,
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    return mcmc.get_samples()


def compared(draws, exact, sites):
    """The largest error of a mean, and the range of the ratios of standard deviations."""
    errors, ratios = [], []
    for name in sites:
        sd = exact[name].std(0)
        errors.append(np.max(np.abs(draws[name].mean(0) - exact[name].mean(0)) / sd))
        ratios += list(np.ravel(draws[name].std(0) / sd))
    return f"{max(errors):>5.2f}  {min(ratios):>4.2f} to {max(ratios):>5.2f}"


def lengths():
    """Seconds of a step of ``AutoMarkov`` against the length of the sequence."""
    print("T      ms per step")
    for length in (500, 2000, 8000):

        def model(length=length):
            numpyro.sample("z", dist.GaussianRandomWalk(0.3, length))

        svi = SVI(model, AutoMarkov(model), optax.adam(1e-3), Trace_ELBO())
        state = svi.init(random.key(0))
        steps = jax.jit(lambda s: jax.lax.scan(lambda s, _: svi.update(s), s, length=50))  # noqa: B023
        jax.block_until_ready(steps(state))
        began = time.perf_counter()
        jax.block_until_ready(steps(state))
        print(f"{length:<5}  {(time.perf_counter() - began) / 50 * 1e3:>8.2f}", flush=True)


def main():
    if sys.argv[1:] == ["lengths"]:
        return lengths()
    print("model          guide                    loss    khat   path: mean, sd          scalars")
    chosen = sys.argv[1:] or CASES
    for name in chosen:
        case = CASES[name]
        exact = nuts(case)
        if name == "two modes":  # NUTS stays in one
            grid = np.linspace(-5, 5, 20_001)
            log_p = -0.5 * (grid - 0.5) ** 2 - 0.5 * ((4 - grid**2) / 0.5) ** 2
            p = np.exp(log_p - log_p.max())
            exact = {"z": np.random.default_rng(1).choice(grid, 20_000, p=p / p.sum())}
        scalars = [n for n, x in exact.items() if n != case.path and x.ndim == 1]
        for guide_name, (make, loss) in case.guides.items():
            began = time.perf_counter()
            guide = make(case.model)
            optim = optax.adam(optax.cosine_decay_schedule(1e-2, 5000))
            svi = SVI(case.model, guide, optim, loss)
            result = svi.run(random.key(1), 5000, progress_bar=False)
            seconds = time.perf_counter() - began
            key = random.key(2)
            draws = guide.sample_posterior(key, result.params, sample_shape=(4000,))
            value = jax.jit(lambda p: Trace_ELBO(2000).loss(key, p, case.model, guide))(  # noqa: B023
                result.params
            )
            khat = float(pareto_khat(svi, result, num_samples=4000).khat)
            path = compared(draws, exact, [case.path]) if case.path else " " * 20
            print(
                f"{name:<13}  {guide_name:<22} {value:>7.2f}  {khat:>5.2f}   {path}   "
                f"{compared(draws, exact, scalars)}   {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
