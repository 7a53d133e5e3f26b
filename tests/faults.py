"""A process that saves unfinished runs and goes on; ``test_faults.py`` kills it and resumes."""

from pathlib import Path
import pickle
import sys

from jax import random
import numpy as np
from numpyro.infer import MCMC, SVI
import optax

from numpyro_ext.ep import EP
from numpyro_ext.guides import AutoPlanarNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from tests.ep.models import Y_SCALE, unknown_scale
from tests.mcmc.models import linear, linear_data

HALF = 4


def key():
    # The same in every process, also where the keys of the suite are shifted.
    return random.wrap_key_data(np.zeros(2, np.uint32))


def kernel(num_samples, state=None):
    """Draws of two chains, and the state that they leave."""
    sampler = SGHMC(linear, 0.01, friction=5.0, steps_per_sample=2)
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(sampler, num_warmup=0, num_samples=num_samples, **options)
    mcmc.post_warmup_state = state
    mcmc.run(key() if state is None else state.rng_key, *linear_data())
    return np.asarray(mcmc.get_samples(group_by_chain=True)["w"]).swapaxes(0, 1), mcmc.last_state


def objective(num_steps, state=None):
    """The losses of a flow, whose every step draws a minibatch and three particles."""
    svi = SVI(linear, AutoPlanarNormal(linear, init_from=None), optax.adam(0.01), VRELBO(1.0, 3))
    if state is not None:
        svi.init(key(), *linear_data())  # SVI learns the constraints of a model there alone
    run = svi.run(key(), num_steps, *linear_data(), progress_bar=False, init_state=state)
    return np.asarray(run.losses), run.state


def engine(num_steps, state=None):
    """The losses of expectation propagation, whose damping leaves every sweep something to do."""
    run = EP(unknown_scale, schedule="parallel", damping=0.2).run(
        key(), num_steps, Y_SCALE, progress_bar=False, init_state=state
    )
    return np.asarray(run.losses), run.state


RUNS = {"kernel": kernel, "objective": objective, "engine": engine}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    states = {name: run(HALF)[1] for name, run in RUNS.items()}
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(states))
    unfinished.rename(path)
    while True:
        for name, run in RUNS.items():
            states[name] = run(HALF, states[name])[1]
