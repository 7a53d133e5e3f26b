"""KernelHMC is exact whatever its score; the score only decides how fast it moves."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC
import pytest

from numpyro_ext.mcmc import KernelHMC, KernelHMCState
from tests.mcmc.laws import average, mean_and_error, start
from tests.mcmc.models import from_potential, gaussian_mean, gaussian_mean_data

LOC, COVARIANCE = np.array([1.0, -2.0]), np.array([[1.0, 0.6], [0.6, 2.0]])
PRECISION = np.linalg.inv(COVARIANCE)
CHAINS = 2000


def correlated():
    numpyro.sample("z", dist.MultivariateNormal(jnp.asarray(LOC), jnp.asarray(COVARIANCE)))


def half(z):
    return -0.5 * jnp.asarray(PRECISION, z.dtype) @ (z - jnp.asarray(LOC, z.dtype))


def whirl(z):
    """Not the gradient of anything."""
    return half(z) + jnp.array([z[1], -z[0]]) / 2


@pytest.mark.slow
def test_any_score_keeps_the_law():
    """Started far off; 2000 chains, each averaged over 150 draws."""
    kernel = KernelHMC(correlated, 0.5, score=whirl, num_leapfrog=3)
    far = {"z": jnp.asarray(LOC + 3 * np.ones((CHAINS, 2)))}

    def products(state):
        d = state.z["z"] - jnp.asarray(LOC)
        return d[:, :, None] * d[:, None, :]

    fns = {"z": lambda s: s.z["z"], "dd": products, "accept": lambda s: s.accept_prob}
    out, state = average(kernel, fns, 150, 80, chains=CHAINS, init_params=far)
    for name, expected in (("z", LOC), ("dd", COVARIANCE)):
        mean, error = out[name].mean(0), out[name].std(0) / CHAINS**0.5
        assert np.all(error < 0.03)
        assert np.all(np.abs(mean - expected) < 4 * error), (name, mean, error)
    # The probabilities of acceptance are those of the acceptances.
    accepted = np.mean(state.num_accepted) / 230
    assert accepted == pytest.approx(out["accept"].mean(), abs=0.03)
    assert 0.3 < accepted < 0.99


@pytest.mark.x64
def test_transition_is_the_formula(tol):
    kernel = KernelHMC(correlated, 0.4, score=whirl, num_leapfrog=2)
    z = jnp.array([0.3, -0.6])
    state, step = start(kernel, z=z)
    new = step(state)
    key_momentum, key_accept = random.split(random.split(state.rng_key, 3)[2])
    r = r0 = np.asarray(random.normal(key_momentum, (2,)))
    at = np.asarray(z)
    for _ in range(2):
        r = r + 0.2 * np.asarray(whirl(at))
        at = at + 0.4 * r
        r = r + 0.2 * np.asarray(whirl(at))

    def u(z):
        return (z - LOC) @ PRECISION @ (z - LOC) / 2

    log_ratio = u(np.asarray(z)) - u(at) + (r0 @ r0 - r @ r) / 2
    probability = min(1.0, np.exp(log_ratio))
    assert 0 < probability
    assert new.accept_prob == pytest.approx(probability, rel=tol(1e-4, 1e-10))
    accepted = random.uniform(key_accept) < probability
    assert new.num_accepted == int(accepted)
    np.testing.assert_allclose(new.z["z"], at if accepted else z, rtol=tol(1e-5, 1e-12))
    constant = np.log(2 * np.pi) + np.linalg.slogdet(COVARIANCE)[1] / 2
    expected = u(at if accepted else np.asarray(z)) + constant
    assert new.potential_energy == pytest.approx(expected, rel=tol(1e-5, 1e-12))
    assert isinstance(new, KernelHMCState)


class Fit:
    """A Gaussian fitted to samples, counting how often."""

    def __init__(self):
        self.fits = []

    def fit(self, x):
        self.fits.append(x.shape)
        mean, precision = x.mean(0), jnp.linalg.inv(jnp.cov(x.T).reshape(x.shape[1], x.shape[1]))
        return lambda points: -(points - mean) @ precision


def positive():
    numpyro.sample("a", dist.Gamma(4.0, 2.0))
    numpyro.sample("b", dist.Normal(jnp.array([1.0, -1.0]), 0.5).to_event(1))


def test_other_data_for_a_chain_that_goes_on_are_refused_and_a_new_state_is_of_them():
    """Else a proposal would be judged by the data of the last run."""

    def model(x):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    kernel = KernelHMC(model, 1e-6, score=jnp.zeros_like, num_leapfrog=1)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=2, progress_bar=False, jit_model_args=True)
    mcmc.run(random.key(0), jnp.array(0.0))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(random.key(1), jnp.array(0.0))
    with pytest.raises(ValueError, match="goes on with other data, of which its state has no sums"):
        mcmc.run(random.key(1), jnp.array(9.0))
    new = kernel.refresh(mcmc.last_state, (jnp.array(9.0),), {})
    z = new.z["z"]
    exact = z**2 / 2 + (9.0 - z) ** 2 / 2 + jnp.log(2 * jnp.pi)
    assert new.potential_energy == pytest.approx(float(exact), rel=1e-5)


def test_no_gradient_of_the_model_is_taken():
    """The potential comes from a host function, which JAX cannot differentiate."""

    def model():
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))
        shape = jax.ShapeDtypeStruct((), z.dtype)
        numpyro.factor("u", jax.pure_callback(lambda z: np.asarray(-(z**2) / 2), shape, z))

    kernel = KernelHMC(model, 0.5, score=lambda z: -z)
    state, step = start(kernel, z=3.0)
    for _ in range(3):
        state = step(state)
    assert state.potential_energy == pytest.approx(float(state.z["z"]) ** 2 / 2, rel=1e-5)
    assert state.num_accepted > 0


def test_potential_that_is_not_finite_is_rejected():
    """``U = z^2/2 - log z`` is NaN for z < 0: mean sqrt(pi/2), second moment 2."""
    kernel = KernelHMC(
        from_potential(lambda z: jnp.sum(z**2 / 2 - jnp.log(z)), 1),
        0.7,
        score=lambda z: -z,
        num_leapfrog=2,
    )
    fns = {"z": lambda s: s.z["z"], "zz": lambda s: s.z["z"] ** 2}
    out, _ = average(kernel, fns, 100, 30, chains=2000, init_params={"z": jnp.ones((2000, 1))})
    for name, expected in (("z", np.sqrt(np.pi / 2)), ("zz", 2.0)):
        mean, error = mean_and_error(out[name])
        assert error < 0.02
        assert abs(mean - expected) < 4 * error


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"score": Fit()}, "training_samples is None"),
        ({"score": jnp.negative, "training_samples": {}}, "training_samples is given, but score"),
        ({"score": jnp.negative, "num_leapfrog": 0}, "num_leapfrog is 0"),
    ],
)
def test_bad_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        KernelHMC(positive, 0.1, **arguments)


A, B = np.ones(5), np.ones((5, 2))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"score": Fit(), "training_samples": {"a": A}}, r"training_samples has \['a'\]"),
        ({"score": Fit(), "training_samples": {"a": A[:3], "b": B}}, "at site 'b'"),
        ({"score": Fit(), "training_samples": {"a": A, "b": A}}, "at site 'b'"),
        ({"score": lambda z: z[:1]}, r"score returns shape \(1,\) for a vector of 3 numbers"),
    ],
)
def test_bad_score_or_samples(arguments, match):
    with pytest.raises(ValueError, match=match):
        KernelHMC(positive, 0.1, **arguments).init(random.key(0), 0, None, (), {})


def test_subsampled_plate_is_refused():
    kernel = KernelHMC(gaussian_mean, 0.1, score=jnp.negative)
    with pytest.raises(ValueError, match="plate 'data' has a subsample_size"):
        kernel.init(random.key(0), 0, None, (gaussian_mean_data(),), {})
