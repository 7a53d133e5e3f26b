"""Data with missing entries: potentials that say nothing, and bounds of what was seen."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
import pytest

from numpyro_ext.expfam import Gaussian
from numpyro_ext.svae import (
    GMMEP,
    SVAEELBO,
    MixturePotential,
    allow_missing,
    recognition_network,
)
from tests.svae.models import DECODER, D, N, Y, guide_of, mixture

# A fifth of the entries, and all of row 3.
MISSING = (random.uniform(random.key(5), (N, D)) < 0.2).at[3].set(True).at[0].set(False)
HOLES = jnp.where(MISSING, jnp.nan, Y)
NETWORK = recognition_network(D, hidden=(4,), init_scale=1.0)
MIXTURE_NETWORK = recognition_network(D, num_components=2, hidden=(4,), init_scale=1.0)


def holes(y, fill=0.0):
    """``mixture`` of the entries that were seen."""
    seen = ~jnp.isnan(y)

    mixture(jnp.where(seen, y, fill), seen=seen)


def guide_of_holes(network=NETWORK):
    guide = guide_of(GMMEP(), create_plates=lambda *args: numpyro.plate("data", N))
    guide.recognition = allow_missing(network)
    return guide


@pytest.mark.parametrize("num_components", [None, 2])
def test_the_network_is_given_zeros_and_what_is_missing(num_components):
    network = NETWORK if num_components is None else MIXTURE_NETWORK
    init, apply = allow_missing(network)
    shape, params = init(random.key(1), (D,))
    assert shape == (D,) and params["mlp"][0][0].shape == (2 * D, 4)
    apply, plain = jax.jit(apply), jax.jit(network[1])
    psi = apply(params, HOLES)
    inputs = jnp.concatenate([jnp.where(MISSING, 0, Y), MISSING.astype(float)], axis=-1)
    expected = plain(params, inputs)
    others = ~MISSING.all(axis=1)  # row 3 is missing, and by chance another one
    assert others[0] and not others[3]
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a[others], b[others]), (psi,), (expected,)
    )
    assert not psi.h[3].any() and not psi.W[3].any()
    # In a sequence each step is missing by itself.
    np.testing.assert_array_equal(apply(params, HOLES[None]).W[0], psi.W)
    if num_components is not None:
        np.testing.assert_allclose(jnp.exp(psi.log_weights).sum(-1), jnp.ones(N), rtol=1e-6)
    whole = jnp.arange(6).reshape(3, 2)
    np.testing.assert_allclose(apply(params, whole).h, apply(params, whole.astype(float)).h)


@pytest.mark.slow
def test_a_zero_component_is_the_factor_one():
    """Beside a component that says something: the sum of their integrals."""
    eta = Gaussian.from_standard(jnp.array([1.0, -2.0]), jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    h, W = jnp.array([0.7, 1.0]), -jnp.array([[1.0, 0.2], [0.2, 0.6]])
    log_weights = jnp.log(jnp.array([0.3, 0.7]))
    psi = MixturePotential(
        log_weights, jnp.stack([jnp.zeros(2), h]), jnp.stack([jnp.zeros((2, 2)), W])
    )
    one = MixturePotential(jnp.zeros(1), h[None], W[None])
    log_ratio = jax.jit(lambda psi: psi.log_partition_ratio(eta))
    expected = jnp.log(0.3 + 0.7 * jnp.exp(log_ratio(one)))
    np.testing.assert_allclose(log_ratio(psi), expected, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda psi: jnp.sum(psi.tilted_moments(eta).xx)))(psi)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def params_of_holes():
    guide, result = guide_of_holes(), {}
    for fn in (guide, holes):
        sites = trace(seed(fn, 3)).get_trace(HOLES)
        result |= {name: s["value"] for name, s in sites.items() if s["type"] == "param"}
    return result


@jax.jit
def loss_and_gradient(params, key, y, fill):
    def loss(params):
        return SVAEELBO().loss(key, params, lambda y: holes(y, fill), guide_of_holes(), y)

    return jax.value_and_grad(loss)(params)


@pytest.mark.nightly
def test_the_bound_has_the_entries_that_were_seen():
    params, key = params_of_holes(), random.key(4)
    result, gradient = loss_and_gradient(params, key, HOLES, 0.0)
    sites = substitute(seed(guide_of_holes(), random.split(key)[1]), data=params)
    sites = trace(sites).get_trace(HOLES)
    loc, scale = DECODER[1](params["decoder$params"], sites["x"]["value"])
    expected = sites["svae_kl_global"]["value"] + sites["svae_kl_local"]["value"].sum()
    for n, j in np.argwhere(~np.asarray(MISSING)):
        expected -= dist.Normal(loc[n, j], scale[n, j]).log_prob(Y[n, j])
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    # What stands in the place of NaN does not matter.
    np.testing.assert_allclose(loss_and_gradient(params, key, HOLES, 7.0)[0], result, rtol=1e-6)
