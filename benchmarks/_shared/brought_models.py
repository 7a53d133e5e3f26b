"""Five kinds of models that people ask about, with simulated data, where the standard deviations of
untuned fits are off. What is simulated hangs on fixed seeds.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

sys.path.append(str(Path(__file__).parents[1]))
from _shared.unseen_models import Unseen
from _shared.verdicts import Truth


def effects(name: str, loc: Any, scale: Any, size: int, centred: bool) -> Any:
    """One for each group, in a plate."""
    with numpyro.plate(f"groups of {name}", size):
        if centred:
            return numpyro.sample(name, dist.Normal(loc, scale))
        z = numpyro.sample(f"{name}_z", dist.Normal(0, 1))
        return numpyro.deterministic(name, loc + scale * z)


def survival() -> Unseen:
    """Times to an event of 60 patients in ten clinics, some of them censored: Weibull, with a
    centred effect of each clinic."""
    rng = np.random.default_rng(21)
    clinic = np.repeat(np.arange(10), 6)
    effect = 1.5 + 0.3 * rng.standard_normal(10)
    time, end = np.exp(effect[clinic]) * rng.weibull(1.4, 60), rng.uniform(2, 10, 60)

    def model(clinic: Any, time: Any, seen: Any, centred: bool = True) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        shape = numpyro.sample("shape", dist.HalfNormal(3))
        effect = effects("effect", mu, tau, 10, centred)
        log_ratio = shape * (jnp.log(time) - effect[clinic])
        log_hazard = jnp.log(shape) - jnp.log(time) + log_ratio
        with numpyro.plate("patients", len(time)):
            numpyro.factor("log_lik", seen * log_hazard - jnp.exp(log_ratio))

    data = clinic, np.minimum(time, end), (time < end) * 1.0
    same = partial(model, centred=False), data
    return Unseen(model, data, ("mu", "tau", "shape", "effect"), same=same)


def growth() -> Unseen:
    """Heights of 14 children at ages 8 to 14, raw: an intercept and a slope of each, centred."""
    rng = np.random.default_rng(22)
    age = np.array([8.0, 10, 12, 14])
    intercept, slope = 77 + 4 * rng.standard_normal(14), 5.7 + 0.25 * rng.standard_normal(14)
    height = intercept[:, None] + slope[:, None] * age + 1.5 * rng.standard_normal((14, 4))

    def model(age: Any, height: Any, centred: bool = True) -> None:
        mu = numpyro.sample("mu", dist.Normal(jnp.array([80.0, 5.0]), jnp.array([30.0, 5.0])))
        tau = numpyro.sample("tau", dist.HalfNormal(jnp.array([10.0, 1.0])))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        a = effects("a", mu[0], tau[0], 14, centred)
        b = effects("b", mu[1], tau[1], 14, centred)
        mean = a[:, None] + b[:, None] * age
        numpyro.sample("height", dist.Normal(mean, sigma), obs=height)

    same = partial(model, centred=False), (age, height)
    return Unseen(model, (age, height), ("mu", "tau", "sigma", "a", "b"), same=same)


def items() -> Unseen:
    """Answers of 15 persons to six items: correlations with an LKJ prior."""
    rng = np.random.default_rng(23)
    cov = 0.5 + 0.5 * np.eye(6)
    scales = np.array([0.5, 0.7, 1.0, 1.2, 1.5, 2.0])
    y = rng.multivariate_normal(np.zeros(6), cov, 15) * scales + np.arange(6)

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5).expand([6]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(3).expand([6]).to_event(1))
        L = numpyro.sample("L", dist.LKJCholesky(6, 1.0))
        numpyro.deterministic("correlation", (L @ L.T)[jnp.tril_indices(6, -1)])
        with numpyro.plate("persons", len(y)):
            normal = dist.MultivariateNormal(mu, scale_tril=scale[:, None] * L)
            numpyro.sample("y", normal, obs=y)

    return Unseen(model, (y,), ("mu", "scale", "correlation"))


def cells() -> Unseen:
    """Shares of 30 cells with 24 counts among them, most of them 0: Dirichlet(1)."""
    rng = np.random.default_rng(24)
    counts = rng.multinomial(24, rng.dirichlet(np.full(30, 0.5)))

    def model(counts: Any) -> None:
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(30)))
        numpyro.sample("counts", dist.Multinomial(24, p), obs=counts)

    def truth() -> Truth:
        a, total = counts + 1.0, counts.sum() + 30.0
        mean = a / total
        return {"p": (mean, np.sqrt(mean * (1 - mean) / (total + 1)))}

    return Unseen(model, (counts,), ("p",), exact=truth)


def contrasts() -> Unseen:
    """Four conditions seen by each of eight persons, whose effects sum to 0 in each person."""
    rng = np.random.default_rng(25)
    effect = 0.8 * rng.standard_normal((8, 4))
    effect -= effect.mean(1, keepdims=True)
    y = 3.0 + effect[:, :, None] + rng.standard_normal((8, 4, 3))

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with numpyro.plate("persons", 8):
            effect = numpyro.sample("effect", dist.ZeroSumNormal(scale, event_shape=(4,)))
        numpyro.sample("y", dist.Normal(mu + effect[..., None], sigma), obs=y)

    return Unseen(model, (y,), ("mu", "scale", "sigma", "effect"))


BROUGHT: dict[str, Callable[[], Unseen]] = {
    "survival": survival,
    "growth": growth,
    "items": items,
    "cells": cells,
    "contrasts": contrasts,
}
