"""A kernel whose chains visit given draws, for what is said of draws whose law is known."""

from collections import namedtuple

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.mcmc import MCMCKernel
import optax

State = namedtuple("State", "i z sampling kinetic_temperature rng_key")


class Drawn(MCMCKernel):
    """Visits ``draws``, ``{site: (draw, *site)}``, as a kernel with a bias."""

    sample_field = "z"
    steps_per_sample = 1
    settings = None
    if_hot = "take a smaller step"
    default_fields = ("z",)

    def __init__(self, model, draws, *, T=1.0, sampling=None, method="sgmcmc"):
        self.model, self.draws, self.temperature = model, draws, T
        self.size = len(next(iter(draws.values())))
        self.sampling = jnp.ones(self.size, bool) if sampling is None else sampling
        self.inference_method = method
        self.default_fields = ("z",) if sampling is None else ("z", "sampling")

    def temperature_at(self, i):
        return self.temperature(i) if callable(self.temperature) else jnp.array(self.temperature)

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return self._at(jnp.array(0), jnp.array(0), rng_key)

    def sample(self, state, model_args, model_kwargs):
        return self._at(state.i, state.i + 1, state.rng_key)

    def _at(self, k, i, rng_key):
        z = {name: jnp.asarray(x)[k] for name, x in self.draws.items()}
        return State(i, z, self.sampling[k], jnp.ones(()), rng_key)


def visited(model, draws, *args, fields=(), **kwargs):
    """An ``MCMC`` that holds these draws."""
    kernel = Drawn(model, draws, **kwargs)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=kernel.size, progress_bar=False)
    mcmc.run(random.key(0), *args, extra_fields=fields)
    return mcmc


LOCS = np.array([[3.0, -200.0], [5.0, -170.0]])
SDS = np.array([[0.1, 2.0], [0.3, 1.0]])


def two_modes(share):
    """Normals of shares 1 - share and share, 20 deviations of the first apart."""
    z = numpyro.sample("z", dist.Normal(0.0, 1e3).expand([2]).to_event(1))
    logs = dist.Normal(jnp.asarray(LOCS), jnp.asarray(SDS)).to_event(1).log_prob(z)
    logs = logs + jnp.log(jnp.array([1.0 - share, share]))
    numpyro.factor("modes", jax.nn.logsumexp(logs))


def drawing(model, sites):
    """An SVI whose guide draws these normal sites, ``{site: (loc, scale)}``; its result is {}."""

    def guide(*args):
        for name, (loc, scale) in sites.items():
            numpyro.sample(name, dist.Normal(loc, scale).to_event())

    return SVI(model, guide, optax.sgd(0.1), Trace_ELBO())


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


def wrong(diagnosis):
    return [row.quantity for row in diagnosis.rows if row.ok is False]
