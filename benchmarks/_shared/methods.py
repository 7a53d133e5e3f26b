"""One fit by a guide, by particles or by a kernel, with nothing tuned, and what is said of it."""

from collections.abc import Callable
import time
from typing import Any, NamedTuple
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import ELBO, MCMC, NUTS, SVI
import optax

from numpyro_ext.diagnostics import Diagnosis, InferenceWarning, diagnose
from numpyro_ext.particles import AutoParticles, EnsembleLangevin, ParVI, particle_step

Draws = dict[str, np.ndarray]
GUIDE_STEPS, GUIDE_DRAWS, PARTICLE_STEPS, ENGINE_STEPS = 5000, 4000, 500, 50
WARMUP, DRAWS, STEPS = 200, 2500, 20
"""Of two chains; draws are that many transitions apart."""


class Fit(NamedTuple):
    draws: Draws
    found: Diagnosis
    seconds: float
    """Those until the draws are there, compilation included."""


def by_guide(
    model: Callable[..., None],
    data: tuple[Any, ...],
    guide: Any,
    loss: ELBO,
    optim: Any = None,
    seed: int = 1,
) -> Fit:
    """5,000 steps of Adam at 5e-3, falling along a cosine if there is no ``optim``."""
    optim = optim or optax.adam(optax.cosine_decay_schedule(5e-3, GUIDE_STEPS))
    began = time.perf_counter()
    svi = SVI(model, guide, optim, loss)
    result = svi.run(random.key(seed), GUIDE_STEPS, *data, progress_bar=False)
    return judged(svi, result, data, began)


def judged(obj: Any, result: Any, data: tuple[Any, ...], began: float, seed: int = 2) -> Fit:
    """Draws of the guide of an SVI or an engine, and what is said of what ran since then."""
    guide, shape = obj.guide, (GUIDE_DRAWS,)
    sample = jax.jit(lambda key, p, x: guide.sample_posterior(key, p, *x, sample_shape=shape))
    draws = jax.device_get(sample(random.key(seed), result.params, data))
    seconds = time.perf_counter() - began
    return Fit(draws, diagnose(obj, result=result, model_args=data), seconds)


def by_engine(engine: Any, data: tuple[Any, ...], seed: int = 1, steps: int = ENGINE_STEPS) -> Fit:
    began, data = time.perf_counter(), jax.tree.map(jnp.asarray, data)
    result = engine.run(random.key(seed), steps, *data, progress_bar=False)
    return judged(engine, result, data, began)


def by_particles(
    model: Callable[..., None],
    data: tuple[Any, ...],
    field: Callable[[], Any],
    seed: int = 1,
    num: int = 100,
) -> Fit:
    began = time.perf_counter()
    guide = AutoParticles(model, num)
    svi = SVI(model, guide, particle_step(PARTICLE_STEPS), loss=field())
    result = svi.run(random.key(seed), PARTICLE_STEPS, *data, progress_bar=False)
    draws = jax.device_get(guide.particles(result.params))
    seconds = time.perf_counter() - began
    return Fit(draws, diagnose(svi, result=result, model_args=data), seconds)


def by_ensemble(
    model: Callable[..., None],
    data: tuple[Any, ...],
    dynamics: EnsembleLangevin,
    seed: int = 1,
    num: int = 100,
) -> Fit:
    """1,000 steps, and then the particles at 50 times, 10 steps apart."""
    began = time.perf_counter()
    mcmc = MCMC(
        ParVI(model, optim=dynamics, steps_per_sample=10),
        num_warmup=100,
        num_samples=50,
        num_chains=num,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *data)
    draws = jax.device_get(mcmc.get_samples())
    seconds = time.perf_counter() - began
    return Fit(draws, diagnose(mcmc), seconds)


def by_nuts(model: Callable[..., None], data: tuple[Any, ...], sites: Any, least: float) -> float:
    """Seconds of NUTS at its defaults, one chain, until the least effective sample size of a number
    of ``sites`` is ``least``: 1,000 steps of warmup, and 500 draws at a time, 20 times at most."""
    began, draws = time.perf_counter(), []
    mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=500, progress_bar=False)
    for _ in range(20):
        mcmc.run(random.key(1 + len(draws)), *data)
        mcmc.post_warmup_state = mcmc.last_state
        draws.append(jax.device_get(mcmc.get_samples(group_by_chain=True)))
        so_far = {site: np.concatenate([x[site] for x in draws], 1) for site in sites}
        if smallest_ess(so_far) >= least:
            return time.perf_counter() - began
    return np.inf


class Chains(NamedTuple):
    """What a kernel gave."""

    samples: Draws
    """``(chain, draw, ...)``."""
    found: Diagnosis
    told: str
    """The first warning of the run, short."""
    start: float
    """Seconds of ``kernel.init``, where settings are found, with compilation."""
    seconds: float
    """Those of start and run."""


def by_kernel(kernel: Any, data: tuple[Any, ...], seed: int = 1) -> Chains:
    """Two chains of 200 + 2,500 draws."""
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InferenceWarning)
        keys = random.split(random.key(seed), 2)
        state = kernel.init(keys, WARMUP * STEPS, None, data, {})
        jax.block_until_ready(state.i)
        start = time.perf_counter() - began
        mcmc.run(random.key(seed), *data)
        samples = jax.device_get(mcmc.get_samples(group_by_chain=True))
        seconds = time.perf_counter() - began
        found = diagnose(mcmc)
    return Chains(samples, found, first_warning(seen), start, seconds)


def first_warning(seen: list[warnings.WarningMessage]) -> str:
    """The first clause of the first ``InferenceWarning``, without the numbers that follow it."""
    told = [str(w.message) for w in seen if issubclass(w.category, InferenceWarning)]
    return "".join(f"warning: {text.split(', so ')[0].split(':')[0]}" for text in told[:1])


def merged(samples: Draws) -> Draws:
    """``(chain, draw, ...)`` to ``(draw, ...)``."""
    return {site: np.reshape(x, (-1, *np.shape(x)[2:])) for site, x in samples.items()}


def smallest_ess(samples: dict[str, Any]) -> float:
    """The least effective sample size of a number, from ``(chain, draw, ...)`` arrays."""
    from arviz_stats.base import array_stats

    sizes = []
    for value in samples.values():
        columns = np.asarray(value, float).reshape(*np.shape(value)[:2], -1)
        sizes += [array_stats.ess(columns[..., k]) for k in range(columns.shape[-1])]
    return float(np.min(sizes))
