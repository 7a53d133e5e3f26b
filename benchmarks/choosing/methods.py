"""The methods of the table, each with the lines of its page in `docs/choose`."""

from collections.abc import Callable
from functools import partial
import time
from typing import Any, NamedTuple

import jax
from jax import Array, random
import numpy as np
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax

from numpyro_ext.diagnostics import Diagnosis, EvidenceBounds, diagnose, evidence_bounds
from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoImplicit, AutoMarkov, AutoMixtureNormal, AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, ImplicitELBO, MixtureELBO, NestedVRELBO, taylor_proxy
from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step

Model = Callable[..., None]


class Fit(NamedTuple):
    draws: dict[str, np.ndarray]
    found: Callable[[], Diagnosis]
    seconds: float
    evidence: Callable[..., EvidenceBounds] | None = None


def of_guide(began: float, obj: Any, fit: Any, data: tuple, options: dict) -> Fit:
    guide = obj.guide
    draw = partial(guide.sample_posterior, random.key(2), fit.params, *data, sample_shape=(4000,))
    draws = jax.device_get(draw())
    seconds = time.perf_counter() - began
    about = {"model_args": data, "model_kwargs": options}
    judge, bounds = (partial(of, obj, fit, **about) for of in (diagnose, evidence_bounds))
    return Fit(draws, judge, seconds, bounds)


def proxy(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
    began = time.perf_counter()
    near = taylor_proxy(model, *data, **batch)
    guide = AutoRealNVPNormal(model, init_from=near)
    svi = SVI(model, guide, falling(2e-3, 1000), VRELBO(1.0, 4, proxy=near))
    fit = svi.run(key, 1000, *data, progress_bar=False, **batch)
    found = of_guide(began, svi, fit, data, batch)
    return found._replace(evidence=partial(found.evidence, proxy=near))


def ep(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
    began = time.perf_counter()
    engine = EP(model)
    fit = engine.run(key, 60, *data, progress_bar=False)
    return of_guide(began, engine, fit, data, batch)


def by_svi(Guide: Any, rate: float, loss: Any, steps: int = 5000) -> Callable[..., Fit]:
    def method(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
        began = time.perf_counter()
        svi = SVI(model, Guide(model), falling(rate, steps), loss)
        fit = svi.run(key, steps, *data, progress_bar=False, **batch)
        return of_guide(began, svi, fit, data, batch)

    return method


def particles(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
    began = time.perf_counter()
    guide = AutoParticles(model, 100)
    svi = SVI(model, guide, particle_step(500), RegularizedSVGD())
    fit = svi.run(key, 500, *data, progress_bar=False)
    draws = jax.device_get(guide.particles(fit.params))
    seconds = time.perf_counter() - began
    return Fit(draws, partial(diagnose, svi, fit, model_args=data), seconds)


def sghmc(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
    return of_kernel(SGHMC(model, steps_per_sample=20), 50, 2000, key, data, batch)


def nuts(key: Array, model: Model, data: tuple, batch: dict) -> Fit:
    return of_kernel(NUTS(model), 500, 1000, key, data, {})


def of_kernel(
    kernel: Any, num_warmup: int, num_samples: int, key: Array, data: tuple, options: dict
) -> Fit:
    began = time.perf_counter()
    chains = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **chains)
    mcmc.run(key, *data, **options)
    draws = jax.device_get(mcmc.get_samples())
    return Fit(draws, partial(diagnose, mcmc), time.perf_counter() - began)


def falling(rate: float, num_steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(rate, num_steps))


METHODS: dict[str, Callable[..., Fit]] = {
    "proxy": proxy,
    "flow": by_svi(AutoRealNVPNormal, 2e-3, VRELBO(1.0, 4)),
    "flow, 16 draws, 10,000 steps": by_svi(AutoRealNVPNormal, 2e-3, VRELBO(1.0, 16), 10_000),
    "EP": ep,
    "mixture": by_svi(AutoMixtureNormal, 5e-3, MixtureELBO()),
    "nested": by_svi(AutoNormal, 1e-2, NestedVRELBO(0.0, num_inner=10)),
    "banded": by_svi(AutoMarkov, 1e-2, VRELBO(1.0, 4)),
    "only draws": by_svi(AutoImplicit, 1e-2, ImplicitELBO(200)),
    "particles": particles,
    "SGHMC": sghmc,
    "AutoNormal": by_svi(AutoNormal, 5e-3, Trace_ELBO()),
    "AutoMultivariateNormal": by_svi(AutoMultivariateNormal, 5e-3, Trace_ELBO()),
    "NUTS": nuts,
}
