"""Every pair of coordinates: each flow guide can correlate it from where it starts."""

from functools import partial

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.guides import (
    AutoMAFNormal,
    AutoNICENormal,
    AutoPlanarNormal,
)

D = 6
PAIRS = np.triu_indices(D, 1)


def normal():
    numpyro.sample("z", dist.Normal(jnp.arange(1.0, D + 1), 1.0).to_event(1))


small = {"hidden_dims": (8,)}  # the number of flows is the default
# RealNVP and the splines have the couplings of NICE, and the gated flow the network of MAF.
GUIDES = {
    "NICE": partial(AutoNICENormal, **small, init_from=None),
    "MAF": partial(AutoMAFNormal, **small, init_from=None),
    "planar": partial(AutoPlanarNormal, init_from=None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_every_correlation_has_a_gradient_at_the_start(name):
    """The covariance of the linearised flow, J J^T, changes in all directions with the parameters.

    Where a pair of coordinates never meets in a layer, its entry does not change to first order, so
    that the start is a saddle point which training may never leave.
    """
    guide = GUIDES[name](normal)
    svi = SVI(guide.model, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0)))
    flat, unravel = ravel_pytree(params)
    e = random.normal(random.key(1), (D,))

    def covariances(flat):
        J = jax.jacfwd(guide.get_transform(unravel(flat)))(e)
        return (J @ J.T)[PAIRS]

    # In so many directions that all of the slopes are seen.
    directions = random.normal(random.key(2), (2 * len(PAIRS[0]), len(flat)))
    slopes = jax.jit(jax.vmap(lambda v: jax.jvp(covariances, (flat,), (v,))[1]))(directions)
    sizes = np.linalg.svd(np.asarray(slopes, float), compute_uv=False)
    assert sizes[-1] > 1e-4 * sizes[0]
