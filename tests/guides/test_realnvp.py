"""`AutoRealNVPNormal`: stock guide as a special case, KL on a curved target, NeuTra, errors."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
)
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import potential_energy
import optax
import pytest

from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.targets import banana
from tests.guides.moved import moved


def regression():
    """Three dimensions, an odd number: the halves have unequal lengths."""
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    w = numpyro.sample("w", dist.Normal(1.0, jnp.array([0.5, 3.0])).to_event(1))
    numpyro.sample(
        "y", dist.Normal(w.sum(), scale).expand([4]), obs=jnp.array([1.0, 3.0, 2.0, 7.0])
    )


def start(guide, model=regression):
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    return svi.get_params(svi.init(random.key(0)))


def bent(guide):
    """Parameters away from the start, where every flow does something."""
    flat, unravel = ravel_pytree(start(guide))
    return unravel(flat + 0.2 * jnp.abs(random.normal(random.key(8), flat.shape)))


@pytest.mark.slow
def test_no_flow_is_auto_diagonal_normal():
    ours, stock = (
        AutoRealNVPNormal(regression, num_flows=0, init_from=None),
        AutoDiagonalNormal(regression),
    )
    params, theirs = start(ours), start(stock)
    assert params.keys() == theirs.keys()
    assert all(jnp.allclose(params[name], value, rtol=1e-6) for name, value in theirs.items())
    params = {"auto_loc": params["auto_loc"] + 0.3, "auto_scale": jnp.array([0.2, 0.5, 1.5])}

    @jax.jit
    def losses_and_gradients(params):
        def loss(params, guide):
            return Trace_ELBO().loss(random.key(2), params, regression, guide)

        return [jax.value_and_grad(loss)(params, guide) for guide in (ours, stock)]

    mine, theirs = losses_and_gradients(params)
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, rtol=1e-4), mine, theirs))
    key = random.key(1)
    draws = ours.sample_posterior(key, params, sample_shape=(3,))
    for name, value in stock.sample_posterior(key, params, sample_shape=(3,)).items():
        assert jnp.allclose(draws[name], value, rtol=1e-4)
    quantiles = ours.quantiles(params, [0.1, 0.5])
    for name, value in stock.quantiles(params, [0.1, 0.5]).items():
        # Monte Carlo: standard error at most 1.5 sqrt(.1 * .9 / 10000) / .175 = .026.
        assert jnp.allclose(quantiles[name], value, atol=0.1)


@pytest.mark.slow
def test_neutra_potential_is_the_pull_back_of_the_model():
    guide = AutoRealNVPNormal(regression, num_flows=2, init_from=None)
    params = bent(guide)
    neutra = NeuTraReparam(guide, params)
    model = neutra.reparam(regression)
    transform = guide.get_transform(params)

    def pulled_back(e):
        z = transform(e)
        potential = potential_energy(regression, (), {}, {"scale": z[0], "w": z[1:]})
        return potential - jnp.linalg.slogdet(jax.jacobian(transform)(e))[1]

    def of_neutra(e):
        return potential_energy(model, (), {}, {"auto_shared_latent": e})

    e = jnp.array([0.5, -1.0, 0.3])
    expected, slope = jax.jit(jax.value_and_grad(pulled_back))(e)
    value, gradient = jax.jit(jax.value_and_grad(of_neutra))(e)
    assert jnp.allclose(value, expected, rtol=1e-5)
    assert jnp.allclose(gradient, slope, rtol=1e-3, atol=1e-3)
    draws = neutra.transform_sample(jnp.stack([e, -e]))
    assert draws["w"].shape == (2, 2) and jnp.allclose(draws["w"][0], transform(e)[1:])
    assert jnp.allclose(draws["scale"][0], jnp.exp(transform(e)[0]))


def test_with_one_latent_dimension_it_is_the_normal_without_couplings():
    def scalar():
        x = numpyro.sample("x", dist.Normal(1.0, 2.0))
        numpyro.sample("y", dist.Normal(x, 0.5), obs=3.0)

    guide, evidence = AutoRealNVPNormal(scalar), dist.Normal(1.0, 4.25**0.5).log_prob(3.0)
    params = start(guide, scalar)
    own = {"auto_loc", "auto_scale_tril", "auto_skew"}
    assert params.keys() == {"auto_center", "auto_root", *own}
    # At the start it is the posterior, which is normal, so that every draw has this loss.
    loss = Trace_ELBO().loss(random.key(1), params, scalar, guide)
    assert abs(loss + evidence) < 1e-4


def fitted(stock):
    """A stock guide away from its start."""
    guide = stock(regression)
    svi = SVI(regression, guide, optax.adam(0.05), Trace_ELBO())
    return guide, moved(svi, 0.2)


def test_what_a_flow_cannot_start_from_is_one_sentence():
    guide, params = fitted(AutoDiagonalNormal)
    with pytest.raises(TypeError, match=r"init_from is dict; it must be a pair \(guide, params\)"):
        AutoRealNVPNormal(regression, init_from=params)
    with pytest.raises(TypeError, match="guide is a AutoRealNVPNormal; it must be one of AutoDiag"):
        AutoRealNVPNormal(
            regression, init_from=(AutoRealNVPNormal(regression, init_from=None), params)
        )
    with pytest.raises(ValueError, match=r"has not seen its model; fit it by svi.run first"):
        AutoRealNVPNormal(regression, init_from=(AutoDiagonalNormal(regression), params))
    with pytest.raises(ValueError, match=r"latent sites {'scale'.*the model has {'z1'"):
        start(AutoRealNVPNormal(banana, init_from=(guide, params)), banana)
