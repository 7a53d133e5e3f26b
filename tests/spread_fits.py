"""Fits to rows that are spread over eight devices, in a process of their own;
``test_spread_fits.py`` starts it and reads what it saves.
"""

import sys
import warnings

import jax
from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
import optax

from numpyro_ext.ep import DAEP, EP, DistributedEP
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.particles import AutoParticles, ParVI, RegularizedSVGD
from tests.mcmc.spread import along

SWEEPS = 3


def logistic(x, y, subsample_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def of_few(x, y):
    logistic(x, y, 8)


def rows():
    n = np.arange(40.0, dtype=np.float32)
    x = np.stack([np.sin(1.3 * n), 1 + np.cos(0.7 * n)], 1)
    return x, (x @ [1.5, -0.5] + 2 * np.cos(2.1 * n) > 0).astype(np.float32)


def key():
    # The same in every process, also where the keys of the suite are shifted.
    return random.wrap_key_data(np.zeros(2, np.uint32))


def by_engine(engine, data):
    with warnings.catch_warnings():  # of so few sweeps
        warnings.simplefilter("ignore")
        params, _, losses = engine.run(key(), SWEEPS, *data, progress_bar=False)
    return {"losses": losses, **params}


def by_svi(guide, loss, data):
    svi = SVI(of_few, guide, optax.adam(0.02), loss)
    with warnings.catch_warnings():  # of the noise of a minibatch
        warnings.simplefilter("ignore")
        result = svi.run(key(), 10, *data, progress_bar=False)
    return {"losses": result.losses, **result.params}


def by_kernel(data):
    keys = random.split(key(), 8)
    mcmc = MCMC(
        ParVI(of_few, RegularizedSVGD(), init_from=None),
        num_warmup=10,
        num_samples=1,
        num_chains=8,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    with warnings.catch_warnings():  # of so few steps
        warnings.simplefilter("ignore")
        mcmc.run(keys, *data)
    return mcmc.get_samples()


def fits(data):
    """What each fit finds."""
    proxy = taylor_proxy(of_few, *data)
    flow = {"num_flows": 1, "hidden_dims": [3]}
    engines = {
        "EP": EP(logistic, schedule="parallel"),
        "DistributedEP": DistributedEP(logistic, 8),
        "DAEP": DAEP(logistic, 8),
    }
    found = {name: by_engine(engine, data) for name, engine in engines.items()} | {
        "AutoParticles": by_svi(AutoParticles(of_few, 8, init_from=proxy), RegularizedSVGD(), data),
        "ParVI": by_kernel(data),
        "flow": by_svi(AutoRealNVPNormal(of_few, init_from=None, **flow), VRELBO(0.5, 3), data),
        "flow with a proxy": by_svi(
            AutoRealNVPNormal(of_few, init_from=proxy, **flow), VRELBO(0.5, 3, proxy=proxy), data
        ),
    }
    return {
        f"{name}/{site}": np.asarray(x)
        for name, values in found.items()
        for site, x in values.items()
    }


if __name__ == "__main__":
    assert jax.device_count() == 8
    sharding = along("rows", rows=8)
    data = tuple(jax.device_put(x, sharding) for x in rows())
    found = fits(data)
    np.savez(sys.argv[1], **found)
