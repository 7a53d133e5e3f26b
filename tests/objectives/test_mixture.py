"""`MixtureELBO`: reference values, the gradients of the integral, and what it refuses."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.guides import AutoMixtureNormal
from numpyro_ext.objectives import MixtureELBO, count_steps


def flat():
    """A log joint of 0: the ELBO is the entropy of the guide."""
    numpyro.sample("z", dist.ImproperUniform(constraints.real, (), ()))


def guide_of(model, **kwargs):
    guide = AutoMixtureNormal(model, **kwargs, init_from=None)
    handlers.seed(guide, 0)()
    return guide


def lower(objective, guide, params, key=0):
    """The bound and its gradient in the parameters."""

    @jax.jit
    def both(p):
        return jax.value_and_grad(
            lambda p: -objective.loss(random.key(key), p, guide.model, guide)
        )(p)

    return both(params)


# Weights, means and standard deviations of the reference values.
REFERENCE = {
    "auto_logits": jnp.log(jnp.array([0.3, 0.7])),
    "auto_loc": jnp.array([[-1.0], [2.0]]),
    "auto_scale": jnp.array([[0.5], [1.0]]),
}


@pytest.mark.slow
@pytest.mark.x64
def test_entropies_of_two_normals_are_the_reference_values(tol):
    guide = guide_of(flat, num_components=2)
    bound, _ = lower(MixtureELBO(entropy="gershman"), guide, REFERENCE)
    assert jnp.abs(bound - 1.6462804826) < tol(1e-6, 1e-9)
    exact, _ = lower(MixtureELBO(100_000), guide, REFERENCE)
    # The standard deviation of log q is .7 within each component.
    assert jnp.abs(exact - 1.7591030179) < 5 * 0.7 / 100_000**0.5


LOC = jnp.array([3.0, -20.0, 0.5])
TRIL = jnp.array([[0.5, 0.0, 0.0], [3.0, 4.0, 0.0], [-0.2, 0.3, 0.4]])
FULL = {
    "auto_logits": jnp.array([0.3, -0.4, 0.9]),
    "auto_loc": jnp.array([[3.0, -20.0, 0.4], [3.3, -17.0, 0.5], [2.8, -24.0, 0.1]]),
    "auto_scale_tril": jnp.asarray(
        np.array([[0.4, 2.0, 0.1], [0.2, 4.0, 0.3], [0.5, 3.0, 0.2]])[:, :, None]
        * np.array([[1.0, 0.0, 0.0], [0.7, 1.0, 0.0], [-0.4, 0.3, 1.0]])
    ),
}


def three_dimensional():
    numpyro.sample("z", dist.MultivariateNormal(LOC, scale_tril=TRIL))


def closed_form(params):
    """The bound with the entropy of Gershman et al. for a normal posterior, written out."""
    w, m = jax.nn.softmax(params["auto_logits"]), params["auto_loc"]
    S, C = params["auto_scale_tril"] @ params["auto_scale_tril"].mT, TRIL @ TRIL.T

    def log_normal(r, S):
        quadratic = jnp.einsum("ci,cij,cj->c", r, jnp.linalg.inv(S), r)
        return -(quadratic + jnp.linalg.slogdet(2 * jnp.pi * S)[1]) / 2

    log_p = log_normal(m - LOC, jnp.broadcast_to(C, S.shape))
    log_p -= jnp.einsum("ij,cij->c", jnp.linalg.inv(C), S) / 2
    q = sum(w[b] * jnp.exp(log_normal(m - m[b], S + S[b])) for b in range(3))
    return (w * (log_p - jnp.log(q))).sum()


@pytest.mark.slow
def test_gradients_of_the_bound_of_gershman_are_the_closed_form():
    guide = guide_of(three_dimensional, num_components=3, covariance="full")
    objective = MixtureELBO(entropy="gershman")

    @jax.jit
    def moments(p):
        def one(key):
            return jax.value_and_grad(lambda p: -objective.loss(key, p, guide.model, guide))(p)

        found = jax.vmap(one)(random.split(random.key(1), 20_000))
        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / 20_000**0.5), found)

    value, grads = jax.value_and_grad(closed_form)(FULL)
    (mean, error), found = moments(FULL)
    assert jnp.abs(mean - value) < 5 * error
    for name, (mean, error) in found.items():
        expected = grads[name]
        if name == "auto_scale_tril":  # above the diagonal it is no parameter
            mean, expected = jnp.tril(mean), jnp.tril(expected)
        assert (jnp.abs(mean - expected) <= 5 * error + 1e-3 * jnp.abs(expected)).all(), name
    mean, error = found["auto_logits"]  # the test can fail
    assert jnp.median(jnp.abs(mean) / error) > 5


def test_the_bound_of_gershman_is_for_normals():
    guide = with_components(dist.StudentT(4.0, jnp.zeros((1, 2)), 1.0).to_event(1))
    objective = MixtureELBO(entropy="gershman")
    with pytest.raises(TypeError, match=r'components are StudentT.*use entropy="stratified"'):
        objective.loss(random.key(0), {}, two_sites, guide)


def skewed():
    """log z is not normal under this posterior: z is positive, and the Jacobian counts."""
    numpyro.sample("z", dist.Gamma(3.0, 2.0))


@pytest.mark.slow
def test_value_and_gradients_of_the_stratified_bound_are_those_of_the_integral():
    guide = guide_of(skewed, num_components=2)
    params = {**REFERENCE, "auto_loc": jnp.array([[-0.5], [0.8]])}
    u = jnp.linspace(-9.0, 9.0, 20_001)[:, None]
    log_p = dist.Gamma(3.0, 2.0).log_prob(jnp.exp(u[:, 0])) + u[:, 0]

    def integral(p):
        log_q = guide.get_posterior(p).log_prob(u)
        return (jnp.exp(log_q) * (log_p - log_q)).sum() * (u[1, 0] - u[0, 0])

    value, gradient = lower(MixtureELBO(1_000_000), guide, params)
    expected = jax.jit(jax.value_and_grad(integral))(params)
    # The mean of a million draws, of a standard deviation near 1.
    assert jnp.abs(value - expected[0]) < 0.01
    for name, g in gradient.items():
        assert jnp.allclose(g, expected[1][name], rtol=0.02, atol=0.02), name


def two_sites(x=None):
    numpyro.sample("a", dist.Normal())
    numpyro.sample("b", dist.Normal())


def hand_written(x=None):
    numpyro.sample("a", dist.Normal(0.3, 0.5))
    numpyro.sample("b", dist.Normal(-1.0, 2.0))


def with_components(components):
    def guide():
        return hand_written()

    guide.components = lambda params: (jnp.ones(1), components)
    return guide


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "match"),
    [
        (
            handlers.scale(count_steps(AutoMixtureNormal(two_sites, init_from=None)), scale=2.0),
            "lies under a subsampled plate or handlers.scale",
        ),
        (
            with_components(dist.Normal(np.zeros((1, 3)), 1.0).to_event(1)),
            r"event shape \(\(1,\), \(3,\)\); they must have \(\(1,\), \(2,\)\)",
        ),
    ],
)
def test_guides_that_are_no_mixtures_are_named(guide, match):
    svi = SVI(two_sites, guide, optax.adam(1e-2), MixtureELBO())
    state = svi.init(random.key(0))
    with pytest.raises(ValueError, match=match):
        svi.update(state)
