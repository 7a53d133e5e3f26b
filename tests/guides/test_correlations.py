"""Every pair of coordinates: each flow guide can correlate it from where it starts, and does."""

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
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
import pytest

from numpyro_ext.guides import (
    AutoHouseholderNormal,
    AutoMAFNormal,
    AutoNICENormal,
    AutoPlanarNormal,
    AutoRadialNormal,
    AutoSplineNormal,
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


def from_normal(cls, model):
    """With the factor of a full normal, as its docstring says for correlated posteriors."""
    full = AutoMultivariateNormal(model)
    handlers.seed(full, 0)(jnp.eye(D))
    params = {"auto_loc": jnp.zeros(D), "auto_scale_tril": jnp.eye(D)}
    return cls(model, init_from=(full, params))


small = {"hidden_dims": (8,)}  # the number of flows is the default
# RealNVP has the couplings of NICE, and the gated flow the network of MAF.
GUIDES = {
    "NICE": partial(AutoNICENormal, **small, init_from=None),
    "spline": partial(AutoSplineNormal, num_bins=3, **small, init_from=None),
    "MAF": partial(AutoMAFNormal, **small, init_from=None),
    "planar": partial(AutoPlanarNormal, init_from=None),
    "FlowGuide": partial(flow_guide, **small),
    "radial": partial(from_normal, AutoRadialNormal),
    "Householder": partial(from_normal, AutoHouseholderNormal),
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


@pytest.mark.slow
def test_finds_every_correlation_of_a_normal():
    """With two couplings a pair in one half is not found at all."""
    chain = 0.9 ** np.abs(np.subtract.outer(np.arange(D), np.arange(D)))
    pair = np.eye(D)
    pair[0, 1] = pair[1, 0] = 0.9
    correlations = np.stack([chain, pair])
    scales = np.array([0.3, 1.0, 2.0, 0.5, 1.0, 3.0])[:, None]
    factors = jnp.asarray(scales * np.linalg.cholesky(correlations), jnp.result_type(float))
    guide = flow_guide(normal)
    steps = 3000
    optim = optax.adam(optax.cosine_decay_schedule(1e-2, steps))
    svi = SVI(guide.model, guide, optim, Trace_ELBO(8))
    state = svi.init(random.key(0), factors[0])

    @jax.jit
    @jax.vmap
    def found(factor):
        end = jax.lax.scan(lambda s, _: (svi.update(s, factor)[0], None), state, length=steps)[0]
        q = posterior(guide, svi.get_params(end))
        return jnp.corrcoef(q.sample(random.key(1), (20_000,)).reshape(-1, D).T)

    # Monte Carlo: (1 - .9^2) / sqrt(20000) = .0013, and .007 where there is no correlation.
    assert np.abs(np.asarray(found(factors)) - correlations).max() < 0.08
