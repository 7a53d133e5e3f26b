"""Two normal modes 13 standard deviations apart, one twice as narrow, and a site that follows."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

SHARES, LOCS, SDS = np.array([0.66, 0.34]), np.array([-2.0, 2.0]), np.array([0.3, 0.15])


def _two_modes(unit, noise):
    parts = dist.Normal(jnp.array(LOCS), jnp.array(SDS))
    z = numpyro.sample("z", dist.MixtureSameFamily(dist.Categorical(jnp.array(SHARES)), parts))
    numpyro.sample("a", dist.Normal(unit * z, noise))


two_modes = partial(_two_modes, 3, 0.5)
in_raw_units = partial(_two_modes, 300, 50.0)
