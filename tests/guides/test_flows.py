"""The flow guides beyond RealNVP: where they start, what they fit exactly, and their errors."""

import equinox
import jax
from jax import random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.tree_util import Partial
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
import pytest

from numpyro_ext.guides import (
    AutoHouseholderNormal,
    AutoMAFNormal,
    AutoNICENormal,
    AutoRealNVPNormal,
)
from numpyro_ext.guides.base import _draw
from numpyro_ext.guides.flows import AutoFlowNormal, RowsOfFactor, SkewTransform, other_halves
from numpyro_ext.transforms import AdditiveCoupling, VectorTransform

GUIDES = {"NICE": AutoNICENormal, "MAF": AutoMAFNormal, "Householder": AutoHouseholderNormal}

LOC = jnp.array([3.0, -20.0, 0.5])
FACTOR = jnp.array([[0.1, 0.0, 0.0], [3.0, 4.0, 0.0], [-0.2, 0.3, 0.4]])


def correlated():
    """A normal posterior off the origin, of unequal scales and strong correlations."""
    numpyro.sample("z", dist.MultivariateNormal(LOC, scale_tril=FACTOR))


def start(guide):
    svi = SVI(guide.model, guide, optax.adam(1e-2), Trace_ELBO())
    return svi.get_params(svi.init(random.key(0)))


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_starts_exactly_at_the_normal_of_init_from(name):
    normal = AutoMultivariateNormal(correlated)
    fitted = start(normal) | {"auto_loc": LOC, "auto_scale_tril": FACTOR}
    # An odd number of reflections turns a standard normal, which stays one.
    num_flows = 3 if name == "Householder" else 2
    guide = GUIDES[name](correlated, num_flows=num_flows, init_from=(normal, fitted))
    params = start(guide)
    z = LOC + jnp.array([[0.1, 2.0, -0.3], [-0.2, 1.0, 0.9]])
    log_q = jax.jit(lambda p: guide.get_posterior(p).log_prob(z))(params)
    expected = dist.MultivariateNormal(LOC, scale_tril=FACTOR).log_prob(z)
    assert jnp.allclose(log_q, expected, rtol=2e-5, atol=2e-5)


def test_draws_are_one_program_that_holds_nothing_of_a_fit():
    guide = AutoNICENormal(correlated, num_flows=2, init_from=None)
    params = start(guide)
    programs = _draw(False)
    before = programs._cache_size()
    for scale in (1.0, 3.0):
        scaled = params | {"auto_scale": scale * params["auto_scale"]}
        z = guide.sample_latent(random.key(1), scaled, 5)
        key = random.split(random.key(1))[1]  # of the handler `seed`
        expected = guide.get_posterior(scaled).sample(key, (5,))
        np.testing.assert_allclose(z, expected, rtol=1e-6, atol=1e-6)
    assert programs._cache_size() == before + 1


def test_draws_of_a_module_that_is_no_argument_of_a_program():
    linear = equinox.nn.Linear(1, 4, key=random.key(0))
    guide = AutoRealNVPNormal(correlated, num_flows=2, network=linear, init_from=None)
    params = start(guide)
    z = guide.sample_latent(random.key(1), params, 5)
    key = random.split(random.key(1))[1]
    np.testing.assert_array_equal(z, guide.get_posterior(params).sample(key, (5,)))


class Times(VectorTransform):
    """A user's transform of which JAX does not see the number."""

    factor = 2.0

    def call_with_intermediates(self, x):
        return self.factor * x, jnp.full(x.shape[:-1], x.shape[-1] * jnp.log(self.factor))

    def _inverse(self, y):
        return y / self.factor


class AutoTimes(AutoFlowNormal):
    def flow(self, i):
        return Times()


class AutoCoupled(AutoFlowNormal):
    """A user's network that reads a number of the guide."""

    factor = 2.0

    def shift(self, a):
        return jnp.full((*a.shape[:-1], 2), self.factor)

    def flow(self, i):
        return AdditiveCoupling(self.shift, 1)


def shift(_, a, **kwargs):
    return jnp.full((*a.shape[:-1], 2), Times.factor)


CLOSED = Partial(stax.serial((None, shift))[1], ((),))


class AutoClosed(AutoFlowNormal):
    """A user's network inside of a function of JAX."""

    def flow(self, i):
        return AdditiveCoupling(CLOSED, 1)


@pytest.mark.parametrize("kind", [AutoTimes, AutoCoupled, AutoClosed])
def test_draws_see_what_code_of_a_user_reads(kind, monkeypatch):
    guide = kind(correlated, num_flows=1, init_from=None)
    params = start(guide)
    eps = random.normal(random.split(random.key(1))[1], (5, 3))
    for factor in (2.0, 3.0):
        monkeypatch.setattr(Times, "factor", factor)
        guide.factor = factor
        shift = jnp.array([0, factor, factor])
        x = factor * eps if kind is AutoTimes else eps + shift
        z = guide.sample_latent(random.key(1), params, 5)
        expected = params["auto_loc"] + params["auto_scale"] * x
        np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-6)


def test_a_row_of_the_factor_moves_by_about_the_step_of_its_numbers():
    rows = dist.biject_to(RowsOfFactor())
    x = rows.inv(FACTOR)
    below = jnp.arange(6) < 3
    moved = rows(x + 0.01 * below) - FACTOR
    steps = 0.01 * jnp.diagonal(FACTOR) * jnp.sqrt(jnp.arange(3) / 3)
    np.testing.assert_allclose(jnp.linalg.norm(moved, axis=1), steps, atol=1e-6)
    plain = dist.biject_to(dist.constraints.scaled_unit_lower_cholesky)
    difference = rows.log_abs_det_jacobian(x, FACTOR) - plain.log_abs_det_jacobian(x, FACTOR)
    assert difference == pytest.approx(-1.5 * np.log(3), rel=1e-5)


@pytest.mark.slow
def test_masked_network_is_autoregressive_in_both_directions():
    guide = AutoMAFNormal(correlated, num_flows=1, hidden_dims=(7, 5), init_scale=5.0)
    flat, unravel = ravel_pytree(start(guide))
    params = unravel(flat + random.normal(random.key(3), flat.shape))
    x = jnp.array([0.4, -1.2, 0.8])
    slopes = jax.jit(lambda p: jax.jacobian(guide.get_transform(p))(x))(params)
    assert jnp.allclose(slopes, jnp.tril(slopes), atol=1e-6)
    assert (jnp.abs(slopes[jnp.tril_indices(3)]) > 1e-4).all()


@pytest.mark.parametrize("num_flows", [3, 6])
def test_couplings_separate_coordinates_that_share_a_half(num_flows):
    for dim in range(2, 2 ** (num_flows - 1) + 1):
        order, stays = np.arange(dim), []
        for i in range(num_flows):
            stays.append(set(order[: dim // 2].tolist()))
            order = order[other_halves(dim, i)]
        everyone = set(range(dim))
        assert not stays[0] & stays[1]  # each coordinate is moved by the first two
        apart = [{frozenset((a, b)) for a in half for b in everyone - half} for half in stays]
        assert len(set.union(*apart)) == dim * (dim - 1) / 2


def test_skew_is_a_bijection_with_its_log_determinant(tol):
    x = jnp.array([-30.0, -3.0, -1e-3, 0.0, 1e-4, 2.0, 40.0])
    skew = SkewTransform(jnp.array([0.7, -2.0, 1.5, 1.0, -0.5, 2.0, 0.0]))
    y = skew(x)
    np.testing.assert_allclose(skew.inv(y), x, rtol=tol(2e-5, 1e-12), atol=tol(1e-6, 1e-12))
    expected = jnp.linalg.slogdet(jax.jacfwd(skew)(x))[1]
    np.testing.assert_allclose(skew.log_abs_det_jacobian(x, y), expected, rtol=tol(2e-5, 1e-12))
    # The slopes far out are 1 - tanh a and 1 + tanh a.
    slopes = jax.vmap(jax.grad(lambda v: SkewTransform(jnp.array([0.7]))(v[None])[0]))
    far = 1 + np.tanh(0.7) * np.array([-1, 1])
    np.testing.assert_allclose(slopes(jnp.array([-1e3, 1e3])), far, rtol=1e-5)


def test_networks_begin_in_the_precision_of_their_call():
    """After a guide of the same network in the other precision."""
    for on in (False, True, False):
        with jax.enable_x64(on):
            params = start(AutoRealNVPNormal(correlated, hidden_dims=[3], init_from=None))
        assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float64" if on else "float32"}


def test_weights_are_drawn_by_what_a_network_reads_at_the_call():
    """Its ``init_fn`` is the same function with another scale."""
    scale = [0.0]

    def init_fn(rng_key, shape):
        return (*shape[:-1], 4), scale[0] * jnp.ones((shape[-1], 4))

    network = init_fn, lambda weights, x: x @ weights
    for scale[0] in (1.0, 2.0):
        params = start(AutoRealNVPNormal(correlated, network=network, init_from=None))
        assert jnp.all(params["auto_net__0$params"] == scale[0])
