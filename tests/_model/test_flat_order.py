"""One flat order in the whole package: that of the model, whatever the alphabet says.

Every public surface that holds a latent vector is given one, or gives one, for a model whose order
the alphabet turns round; coordinate i of each has to be that of each other.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_ext._model.read import read_model
from numpyro_ext.mcmc import SGHMC, KernelHMC

SCALES = {"tilt": 0.5, "mean": np.array([3.0, 7.0]), "curve": np.array([[0.1, 0.2], [11.0, 13.0]])}
"""Standard deviations, which tell the coordinates apart."""
FLAT = np.array([0.5, 3.0, 7.0, 0.1, 0.2, 11.0, 13.0])
ORDER = tuple(SCALES)


def model():
    for name, scale in SCALES.items():
        numpyro.sample(name, dist.Normal(1.0, scale).to_event(np.ndim(scale)))


def draws(num):
    """A different number for each coordinate of each draw."""
    x = 1 + FLAT * random.normal(random.key(0), (num, FLAT.size))
    return jax.vmap(read_model(model).unravel)(x), x


def test_momentum_has_it():
    """A mass for each site is in the vector of momenta where the site is: r ~ N(0, M)."""
    mass = {name: 1 / jnp.asarray(scale) ** 2 for name, scale in SCALES.items()}
    kernel = SGHMC(model, 1e-4, mass=mass)
    keys = random.split(random.key(0), 4_000)
    state = kernel.init(keys, 0, None, (), {})
    assert np.allclose(state.r.std(0) * FLAT, 1, rtol=0.1)


def test_score_of_a_kernel_has_it():
    """The score is given flat vectors: that of the target accepts everything, others do not."""
    kernel = KernelHMC(model, 0.02, score=lambda z: -(z - 1) / FLAT**2, num_leapfrog=5)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=50, progress_bar=False)
    first = jax.tree.map(lambda x: x[0], draws(1)[0])
    mcmc.run(random.key(0), extra_fields=("accept_prob",), init_params=first)
    assert mcmc.get_extra_fields()["accept_prob"].min() > 0.95
