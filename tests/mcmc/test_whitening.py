"""Coordinates of unit scale: an affine change of a model is undone by the matching whitening."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.mcmc import PSGLD, SGHMC, SGLD, Whitening

CENTER = jnp.array([3.0, -50.0])
FACTOR = jnp.array([[2.0, 0.0], [-30.0, 0.5]])


def standard():
    """U(xi) = |xi|^2 / 2, in one site."""
    numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


def changed():
    """The same after z = c + A xi."""
    numpyro.sample("z", dist.MultivariateNormal(CENTER, scale_tril=FACTOR))


@pytest.mark.slow
@pytest.mark.parametrize("make", [SGHMC, partial(PSGLD, adapt="always")])
def test_an_affine_change_of_the_model_gives_the_same_draws(make, tol):
    options = {"num_warmup": 0, "num_samples": 40, "progress_bar": False}
    xi = jnp.array([0.7, -1.1])
    plain = MCMC(make(standard, 0.2), **options)
    plain.run(random.key(0), init_params={"z": xi})
    whitened = MCMC(make(changed, 0.2, whitening=Whitening(CENTER, FACTOR)), **options)
    whitened.run(random.key(0), init_params={"z": CENTER + FACTOR @ xi})
    expected = CENTER + plain.get_samples()["z"] @ FACTOR.T
    # Each draw is turned into z and back, which rounds; |z| is about 60.
    np.testing.assert_allclose(whitened.get_samples()["z"], expected, atol=tol(5e-3, 1e-10))


def regression(x, y):
    """Its sites are not in the order of the alphabet."""
    z = numpyro.sample("z_slope", dist.Normal(0.0, 10.0))
    b = numpyro.sample("b_scale", dist.HalfNormal(5.0))
    a = numpyro.sample("a", dist.Normal(0.0, 10.0).expand([2]))
    numpyro.sample("y", dist.Normal(a[0] + a[1] * x**2 + z * x, b).to_event(1), obs=y)


LINE = np.linspace(-1.0, 2.0, 60)
X = jnp.asarray(LINE)
Y = jnp.asarray(1.0 + 2.0 * LINE**2 - 3.0 * LINE + 0.5 * np.sin(37.0 * LINE))
# From random starts some hundreds of steps do not always arrive.
near = init_to_value(values={"a": jnp.array([1.0, 2.0]), "z_slope": -3.0, "b_scale": 0.4})


@pytest.mark.slow
def test_center_and_covariance_are_those_of_a_guide_in_the_order_of_the_model():
    guide = AutoNormal(regression, init_loc_fn=near)
    svi = SVI(regression, guide, optax.adam(0.03), Trace_ELBO())
    params = svi.run(random.key(0), 400, X, Y, progress_bar=False).params
    whitening = Whitening.from_guide(guide, params)
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(20_000,))
    z = np.stack([draws["z_slope"], np.log(draws["b_scale"]), *draws["a"].T], axis=1)
    factor = jnp.diag(whitening.factor)
    # 20,000 draws know a mean to 0.007 sd and a covariance to 1 %.
    sd = z.std(0)
    np.testing.assert_allclose(whitening.center, z.mean(0), atol=0.03 * sd.max())
    error = (factor @ factor.T - np.cov(z.T)) / np.outer(sd, sd)
    assert np.max(np.abs(error)) < 0.05


@pytest.mark.x64
@pytest.mark.parametrize("factor", [FACTOR, jnp.array([2.0, 0.5])])
def test_the_map_and_the_gradient_are_those_of_the_definition(factor, tol):
    whitening, xi = Whitening(CENTER, factor), jnp.array([0.3, -2.0])
    np.testing.assert_allclose(whitening.to_xi(whitening.to_z(xi)), xi, atol=tol(1e-5, 1e-12))

    def potential(z):
        return jnp.sum(jnp.sin(z) * z)

    pulled = whitening.pull(jax.grad(potential)(whitening.to_z(xi)))
    direct = jax.grad(lambda xi: potential(whitening.to_z(xi)))(xi)
    np.testing.assert_allclose(pulled, direct, rtol=tol(1e-4, 1e-12))


@pytest.mark.parametrize(
    ("center", "factor", "words"),
    [
        (jnp.zeros(2), jnp.ones(3), "shapes"),
        (jnp.zeros(2), jnp.ones((2, 2)), "must be lower triangular"),
    ],
)
def test_a_wrong_factor_is_an_error(center, factor, words):
    with pytest.raises(ValueError, match=words):
        Whitening(center, factor)


def test_wrong_whitenings_are_errors():
    kernel = SGLD(standard, 0.1, whitening=Whitening(jnp.zeros(3), jnp.ones(3)))
    with pytest.raises(ValueError, match="3 coordinates, but the model's latent sites have 2"):
        kernel.init(random.key(0), 0, None)
    with pytest.raises(
        TypeError, match="guide is a function; it must be one of AutoDiagonalNormal"
    ):
        Whitening.from_guide(lambda: None, {})
    with pytest.raises(ValueError, match="has not seen its model"):
        Whitening.from_guide(AutoNormal(standard), {})
    other = Whitening(jnp.zeros(3), jnp.ones(3))
    with pytest.raises(ValueError, match="3 coordinates; the guide's model has 2"):
        other.init_params(AutoNormal(standard))
