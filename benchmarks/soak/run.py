"""A million steps: does memory grow, does anything compile again, do the draws keep their law?

python benchmarks/soak/run.py                 # 10^6 steps of SVI, 10^6 of SGHMC
python benchmarks/soak/run.py --steps 20000   # a quick look, which ends in the same verdicts

Both run on minibatches of a model whose posterior is known. Each step of SVI is a call of the
compiled ``svi.update``, and ten of SGHMC are a call of the compiled ``kernel.sample``.
"""

import argparse
from pathlib import Path
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

from numpyro_ext.guides import AutoPlanarNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO

ROWS, BATCH, PARTS = 1000, 100, 10
compiled = []


def model(x):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", ROWS, subsample_size=BATCH):
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=numpyro.subsample(x, event_dim=0))


def exact(x):
    """Mean and standard deviation of the posterior."""
    precision = 0.01 + ROWS
    return float(x.sum()) / precision, precision**-0.5


def resident():
    """Memory of the process in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def watch(event, duration_secs, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(duration_secs)


def fit(x, steps):
    """After each tenth: draws of the guide, what their mean and sd may be off by, in sds, and the
    sum of the losses."""
    guide = AutoPlanarNormal(model, num_flows=2)
    optimiser = optax.adam(optax.exponential_decay(0.01, steps // PARTS, 0.5))
    svi = SVI(model, guide, optimiser, VRELBO(1.0, 4))
    state = svi.init(random.key(1), x)
    step = jax.jit(svi.update)
    draw = jax.jit(lambda params: guide.sample_latent(random.key(2), params, 10_000))
    for _ in range(PARTS):
        total = 0.0
        for _ in range(steps // PARTS):
            state, loss = step(state, x)
            total = total + loss
        z = np.asarray(draw(svi.get_params(state)))
        yield z, 0.15, 0.1, np.asarray(total)


def sample(x, steps):
    """After each tenth: its draws, and four standard errors of their mean and sd, in sds.

    A twentieth more is allowed for the sd: the minibatch makes the chain 2.5 % too wide.
    """
    kernel = SGHMC(model, 0.002, friction=200.0, steps_per_sample=10)
    state = kernel.init(random.key(3), 0, None, (x,), {})
    step = jax.jit(kernel.sample)
    for _ in range(PARTS):
        draws = []
        for _ in range(steps // PARTS // kernel.steps_per_sample):
            state = step(state, (x,), {})
            draws.append(state.z["loc"])
        z = np.asarray(jnp.stack(draws))
        error = 4 / effective_sample_size(z[None]) ** 0.5
        yield z, error, 0.05 + error / 2**0.5, z


def soak(name, run, x, steps):
    """A line for each tenth; the complaints at the end."""
    mean, sd = exact(x)
    complaints, began, start = [], time.perf_counter(), 0.0
    for part, (z, off, wide, values) in enumerate(run(x, steps), 1):
        if part == 1:  # all that is compiled is compiled in the first tenth
            start = resident()
            compiled.clear()
        shift, ratio = (z.mean() - mean) / sd, z.std() / sd
        print(
            f"{name:<6}{part * steps // PARTS:>10,}{resident() - start:>10.1f}{len(compiled):>10}"
            f"{shift:>+12.3f}{ratio:>10.3f}{time.perf_counter() - began:>9.0f}"
        )
        if not np.isfinite(values).all():
            complaints.append(f"{name}: a value is not finite before step {part * steps // PARTS}")
        if part > PARTS // 2 and not (abs(shift) <= off and abs(ratio - 1) <= wide):
            complaints.append(f"{name}: mean off by {shift:+.2f} sd, sd ratio {ratio:.2f}")
    if (grown := resident() - start) > 20:
        complaints.append(f"{name}: memory has grown by {grown:.1f} MB")
    if compiled:
        complaints.append(f"{name}: {len(compiled)} programs were compiled after the first tenth")
    return complaints


def main():
    parser = argparse.ArgumentParser(description="A million steps.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    jax.monitoring.register_event_duration_secs_listener(watch)
    x = jnp.asarray(2 + np.random.default_rng(0).normal(size=ROWS), float)
    print(
        f"{'':<6}{'steps':>10}{'MB more':>10}{'compiled':>10}{'mean (sd)':>12}{'sd ratio':>10}"
        f"{'seconds':>9}"
    )
    complaints = soak("SVI", fit, x, steps) + soak("SGHMC", sample, x, steps)
    print("\n".join(complaints) or "nothing grows, compiles again, or leaves its law")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
