"""Every pair of coordinates: each flow guide can correlate it from where it starts."""

from functools import partial

import jax
from jax import random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.guides import (
    AutoMAFNormal,
    AutoNICENormal,
    AutoPlanarNormal,
    FlowGuide,
)

D = 6
PAIRS = np.triu_indices(D, 1)


def normal(factor):
    numpyro.sample("z", dist.MultivariateNormal(jnp.arange(1.0, D + 1), scale_tril=factor))


def normal_in_a_row(factor):
    with numpyro.plate("rows", 1):
        normal(factor)


def flow_guide(model, **kwargs):
    net = stax.serial(stax.Dense(2 * D + 3))
    features = lambda factor: jnp.ones((1, 1))  # noqa: E731
    return FlowGuide(normal_in_a_row, net, plate="rows", features=features, **kwargs)


small = {"hidden_dims": (8,)}  # the number of flows is the default
# RealNVP and the splines have the couplings of NICE, and the gated flow the network of MAF.
GUIDES = {
    "NICE": partial(AutoNICENormal, **small, init_from=None),
    "MAF": partial(AutoMAFNormal, **small, init_from=None),
    "planar": partial(AutoPlanarNormal, init_from=None),
    "FlowGuide": partial(flow_guide, **small),
}


def posterior(guide, params):
    if isinstance(guide, FlowGuide):
        with handlers.block(), handlers.substitute(data=params):
            return guide.local_distribution(jnp.ones((1, 1)))
    return guide.get_posterior(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_every_correlation_has_a_gradient_at_the_start(name):
    """The covariance of the linearised flow, J J^T, changes in all directions with the parameters.

    Where a pair of coordinates never meets in a layer, its entry does not change to first order, so
    that the start is a saddle point which training may never leave.
    """
    guide = GUIDES[name](normal)
    svi = SVI(guide.model, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), jnp.eye(D)))
    flat, unravel = ravel_pytree(params)
    e = random.normal(random.key(1), (D,))

    def covariances(flat):
        transforms = posterior(guide, unravel(flat)).transforms

        def flow(e):
            z = e[None] if isinstance(guide, FlowGuide) else e
            for transform in transforms:
                z = transform(z)
            return z.reshape(D)

        J = jax.jacfwd(flow)(e)
        return (J @ J.T)[PAIRS]

    # In so many directions that all of the slopes are seen.
    directions = random.normal(random.key(2), (2 * len(PAIRS[0]), len(flat)))
    slopes = jax.jit(jax.vmap(lambda v: jax.jvp(covariances, (flat,), (v,))[1]))(directions)
    sizes = np.linalg.svd(np.asarray(slopes, float), compute_uv=False)
    assert sizes[-1] > 1e-4 * sizes[0]
