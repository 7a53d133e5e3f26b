"""`MixtureELBO`: reference values of both entropies, closed-form gradients, modes, errors."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
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
def test_entropies_are_the_reference_values(tol):
    guide = guide_of(flat, num_components=2)
    bound, _ = lower(MixtureELBO(entropy="gershman"), guide, REFERENCE)
    assert jnp.abs(bound - 1.6462804826) < tol(1e-6, 1e-9)
    exact, _ = lower(MixtureELBO(100_000), guide, REFERENCE)
    # The standard deviation of log q is .7 within each component.
    assert jnp.abs(exact - 1.7591030179) < 5 * 0.7 / 100_000**0.5


def normal(loc, scale_tril):
    numpyro.sample("z", dist.MultivariateNormal(loc, scale_tril=scale_tril))


LOC = jnp.array([3.0, -20.0, 0.5])
TRIL = jnp.array([[0.5, 0.0, 0.0], [3.0, 4.0, 0.0], [-0.2, 0.3, 0.4]])
three_dimensional = partial(normal, LOC, TRIL)
PARAMS = {
    "auto_logits": jnp.array([0.3, -0.4, 0.9]),
    "auto_loc": jnp.array([[3.0, -20.0, 0.4], [3.3, -17.0, 0.5], [2.8, -24.0, 0.1]]),
    "auto_scale": jnp.array([[0.4, 2.0, 0.1], [0.2, 4.0, 0.3], [0.5, 3.0, 0.2]]),
}
FULL = {
    "auto_logits": PARAMS["auto_logits"],
    "auto_loc": PARAMS["auto_loc"],
    "auto_scale_tril": PARAMS["auto_scale"][:, :, None]
    * jnp.array([[1.0, 0.0, 0.0], [0.7, 1.0, 0.0], [-0.4, 0.3, 1.0]]),
}


def closed_form(params):
    """The bound with Gershman's entropy for a normal posterior, written out."""
    w = jax.nn.softmax(params["auto_logits"])
    m = params["auto_loc"]
    S = params["auto_scale_tril"] @ params["auto_scale_tril"].mT
    precision = jnp.linalg.inv(TRIL @ TRIL.T)
    r = m - LOC
    quadratic = jnp.einsum("ci,ij,cj->c", r, precision, r)
    quadratic = quadratic + jnp.einsum("ij,cij->c", precision, S)
    log_p = -quadratic / 2 - jnp.linalg.slogdet(2 * jnp.pi * TRIL @ TRIL.T)[1] / 2
    q = sum(w[b] * jnp.exp(_log_normal(m - m[b], S + S[b])) for b in range(3))
    return (w * (log_p - jnp.log(q))).sum()


def _log_normal(r, S):
    quadratic = jnp.einsum("ci,cij,cj->c", r, jnp.linalg.inv(S), r)
    return -(quadratic + jnp.linalg.slogdet(2 * jnp.pi * S)[1]) / 2


@pytest.mark.slow
def test_gradients_of_the_gershman_bound_are_the_closed_form():
    params = FULL
    guide = guide_of(three_dimensional, num_components=3, covariance="full")
    objective = MixtureELBO(entropy="gershman")

    @jax.jit
    def moments(p):
        def one(key):
            return jax.value_and_grad(lambda p: -objective.loss(key, p, guide.model, guide))(p)

        found = jax.vmap(one)(random.split(random.key(1), 20_000))
        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / 20_000**0.5), found)

    expected = jax.value_and_grad(closed_form)(params)
    (value, error), grads = moments(params)
    assert jnp.abs(value - expected[0]) < 5 * error
    for name, (mean, error) in grads.items():
        if name == "auto_scale_tril":  # above the diagonal it is no parameter
            mean, expected[1][name] = jnp.tril(mean), jnp.tril(expected[1][name])
        atol = 5 * error + 1e-3 * jnp.abs(expected[1][name])
        assert (jnp.abs(mean - expected[1][name]) <= atol).all(), name
        assert jnp.median(jnp.abs(expected[1][name]) / (error + 1e-9)) > 5 or name != "auto_logits"


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


def test_a_guide_of_the_user_needs_its_components_alone():
    normal = dist.Normal(jnp.array([[0.3, -1.0]]), jnp.array([[0.5, 2.0]])).to_event(1)
    objective = MixtureELBO(20_000)
    guide = with_components(normal)
    loss = jax.jit(lambda: objective.loss(random.key(0), {}, two_sites, guide))()
    kl = dist.kl_divergence(normal, dist.Normal(jnp.zeros((1, 2)), 1.0).to_event(1))[0]
    assert jnp.abs(loss - kl) < 5 * 3 / 20_000**0.5  # log q - log p has a standard deviation of 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "kwargs", "error", "match"),
    [
        (
            handlers.scale(count_steps(AutoMixtureNormal(two_sites, init_from=None)), scale=2.0),
            {},
            ValueError,
            "lies under a subsampled plate or handlers.scale",
        ),
        (
            with_components(dist.Normal(jnp.zeros((1, 3)), 1.0).to_event(1)),
            {},
            ValueError,
            r"event shape \(\(1,\), \(3,\)\); they must have \(\(1,\), \(2,\)\)",
        ),
        (
            with_components(dist.Laplace(jnp.zeros((1, 2)), 1.0).to_event(1)),
            {"entropy": "gershman"},
            TypeError,
            'the components are Laplace, and .* use entropy="stratified"',
        ),
    ],
)
def test_guides_that_are_no_mixtures_are_named(guide, kwargs, error, match):
    svi = SVI(two_sites, guide, optax.adam(1e-2), MixtureELBO(**kwargs))
    state = svi.init(random.key(0))
    with pytest.raises(error, match=match):
        svi.update(state)
