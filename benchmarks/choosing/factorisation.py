"""Ratings of items by users, as a product of factors of each: which method predicts best?

6,000 simulated ratings of 200 items by 300 users, with three factors, a level of each user and item
and noise of 0.7; 4,800 are of the fit, and four factors are fitted. The spreads of levels and
factors are latent (``--fixed``: 1). Factors rotate, so what is compared is the prediction of the
1,200 ratings that were left out: the error (RMSE) and the log density in nats a rating. The first
row has the levels alone. NUTS is one chain of 300 + 300 draws; the others make 3,000 steps.

    python benchmarks/choosing/factorisation.py
    python benchmarks/choosing/factorisation.py --fixed
"""

import argparse
from collections.abc import Callable
from functools import partial
import time
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
from methods import falling
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax

from numpyro_ext.diagnostics import predictive_scores, restarts
from numpyro_ext.guides import init_to_fan_in
from numpyro_ext.optim import ivon

USERS, ITEMS, RATINGS, FIT = 300, 200, 6000, 4800
Data = tuple[Array, Array, Array]


def ratings() -> tuple[Data, Data]:
    """User, item and rating: those of the fit, and those left out."""
    rng = np.random.default_rng(0)
    p, q = 0.7 * rng.normal(size=(USERS, 3)), 0.7 * rng.normal(size=(ITEMS, 3))
    a, b = 0.4 * rng.normal(size=USERS), 0.5 * rng.normal(size=ITEMS)
    user, item = np.divmod(rng.choice(USERS * ITEMS, RATINGS, replace=False), ITEMS)
    mean = 3.5 + a[user] + b[item] + (p[user] * q[item]).sum(1)
    columns = user, item, mean + 0.7 * rng.normal(size=RATINGS)
    fit, out = ([jnp.asarray(x[part]) for x in columns] for part in (slice(FIT), slice(FIT, None)))
    return tuple(fit), tuple(out)


def factors(size: int, fixed: bool) -> Callable[..., None]:
    """The model with so many factors."""

    def spread(name: str) -> Any:
        return 1.0 if fixed else numpyro.sample(name, dist.HalfNormal(1))

    def model(user: Array, item: Array, y: Array, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(3, 2))
        noise = numpyro.sample("noise", dist.HalfNormal(1))
        of_a, of_b = dist.Normal(0, spread("spread_a")), dist.Normal(0, spread("spread_b"))
        of_p = spread("spread_p") if size else 1.0
        with numpyro.plate("users", USERS):
            a = numpyro.sample("a", of_a)
            p = numpyro.sample("p", dist.Normal(0, of_p).expand([size]).to_event(1)) if size else 0
        with numpyro.plate("items", ITEMS):
            b = numpyro.sample("b", of_b)
            q = numpyro.sample("q", dist.Normal(0, 1).expand([size]).to_event(1)) if size else 0
        with numpyro.plate("ratings", len(y), subsample_size=batch) as n:
            u, i = user[n], item[n]
            product = jnp.sum(p[u] * q[i], -1) if size else 0.0
            numpyro.sample("y", dist.Normal(mean + a[u] + b[i] + product, noise), obs=y[n])

    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--fixed", action="store_true", help="spreads of 1 in place of latent ones")
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    fit, out = ratings()
    model, levels = factors(4, args.fixed), factors(0, args.fixed)
    narrow = {"init_loc_fn": init_to_fan_in(), "init_scale": 0.05}

    def by_nuts(model: Any) -> tuple[Any, None]:
        mcmc = MCMC(NUTS(model), num_warmup=300, num_samples=300, progress_bar=False)
        mcmc.run(random.key(0), *fit)
        return mcmc, None

    def by_svi(guide: Callable[[], Any], optim: Any, num: int = 1, **options: Any) -> Any:
        def make() -> SVI:
            return SVI(model, guide(), optim, Trace_ELBO(4))

        runs = restarts(make, random.key(0), num, args.steps, *fit, progress_bar=False, **options)
        return make(), runs if num > 1 else runs[0]

    adam = falling(1e-2, args.steps)
    natural = ivon(optax.cosine_decay_schedule(0.1, args.steps))
    normal, from_fan_in = partial(AutoNormal, model), partial(AutoNormal, model, **narrow)
    mode = partial(AutoDelta, model, init_loc_fn=init_to_fan_in())
    methods: dict[str, Callable[[], tuple[Any, Any]]] = {
        "NUTS, levels alone": lambda: by_nuts(levels),
        "NUTS": lambda: by_nuts(model),
        "AutoNormal, Adam": lambda: by_svi(normal, adam),
        "AutoNormal, Adam, batches of 500": lambda: by_svi(normal, adam, batch=500),
        "AutoNormal, ivon": lambda: by_svi(normal, natural),
        "AutoNormal, ivon, init_to_fan_in": lambda: by_svi(from_fan_in, natural),
        "one mode": lambda: by_svi(mode, adam),
        "five modes": lambda: by_svi(mode, adam, 5),
    }
    print("| method | RMSE | log density | seconds |\n|---|---|---|---|")
    for name, run in methods.items():
        began = time.perf_counter()
        obj, result = jax.block_until_ready(run())
        seconds = time.perf_counter() - began
        found = predictive_scores(obj, result, model_args=out, num_samples=300)
        rmse = f"{found.rmse:.3f}"
        density = f"{found.log_density:.3f} +- {found.log_density_error:.3f}"
        print(f"| {name} | {rmse} | {density} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
