"""A kernel whose chains visit given draws, for what is said of draws whose law is known."""

from collections import namedtuple

from jax import random
import jax.numpy as jnp
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

State = namedtuple("State", "i z sampling kinetic_temperature rng_key")


class Drawn(MCMCKernel):
    """Visits ``draws``, ``{site: (draw, *site)}``, as a kernel with a bias."""

    sample_field = "z"
    steps_per_sample = 1
    settings = None
    default_fields = ("z",)

    def __init__(self, model, draws, *, T=1.0, sampling=None, method="sgmcmc"):
        self.model, self.draws, self.temperature = model, draws, T
        self.size = len(next(iter(draws.values())))
        self.sampling = jnp.ones(self.size, bool) if sampling is None else sampling
        self.inference_method = method
        self.default_fields = ("z",) if sampling is None else ("z", "sampling")

    def gradients_per_transition(self, rows):
        return 1.0

    def noise_share(self, state):
        return None

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
