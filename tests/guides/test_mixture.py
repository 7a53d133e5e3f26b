"""`AutoMixtureNormal`: density and gradient of draws against explicit formulas, modes, errors."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import ndtr
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.reparam import NeuTraReparam
import optax
import pytest

from numpyro_ext.guides import AutoMixtureNormal
from numpyro_ext.guides.normal_mixture import DiagonalNormalMixture

# Off the origin, overlapping, of unequal weights and scales.
PARAMS = {
    "auto_logits": jnp.array([0.3, -0.4, 0.9]),
    "auto_loc": jnp.array([[3.0, -20.0, 0.4], [3.3, -17.0, 0.5], [2.8, -24.0, 0.1]]),
    "auto_scale": jnp.array([[0.4, 2.0, 0.1], [0.2, 4.0, 0.3], [0.5, 3.0, 0.2]]),
}


def three_dimensional():
    numpyro.sample("b", dist.Normal(3.0, 1.0))
    numpyro.sample("a", dist.Normal(jnp.array([-20.0, 0.0]), jnp.array([3.0, 0.5])).to_event(1))


@cache
def guide_of(covariance="diag", num_components=3):
    guide = AutoMixtureNormal(
        three_dimensional, num_components=num_components, covariance=covariance, init_from=None
    )
    svi = SVI(three_dimensional, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, svi, svi.init(random.key(0))


def full_params():
    tril = jnp.tril(jnp.array([[1.0, 0.0, 0.0], [0.7, 1.0, 0.0], [-0.4, 0.3, 1.0]]))
    scale_tril = PARAMS["auto_scale"][:, :, None] * tril
    return {**PARAMS, "auto_scale_tril": scale_tril}


@pytest.mark.slow
@pytest.mark.x64
@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_density_is_that_of_the_mixture(covariance, tol):
    guide = guide_of(covariance)[0]
    params = PARAMS if covariance == "diag" else full_params()
    z = jnp.array([[3.1, -19.0, 0.2], [2.0, -25.0, 0.9], [6.0, -10.0, -1.0]])
    if covariance == "diag":
        S = jax.vmap(jnp.diag)(params["auto_scale"] ** 2)
    else:
        S = jnp.einsum("cij,ckj->cik", params["auto_scale_tril"], params["auto_scale_tril"])
    r = z[:, None] - params["auto_loc"]
    quadratic = jnp.einsum("nci,cij,ncj->nc", r, jnp.linalg.inv(S), r)
    log_normal = -(quadratic + jnp.linalg.slogdet(2 * jnp.pi * S)[1]) / 2
    w = jax.nn.softmax(params["auto_logits"])
    expected = jnp.log((w * jnp.exp(log_normal)).sum(1))
    assert jnp.allclose(guide.get_posterior(params).log_prob(z), expected, rtol=tol(2e-4, 1e-10))
    weights, components = guide.components(params)
    assert hasattr(guide, "components") and hasattr(guide, "sample_latent")
    assert components.batch_shape == (3,) and components.event_shape == (3,)
    by_parts = jax.nn.logsumexp(jnp.log(weights) + components.log_prob(z[:, None]), axis=1)
    assert jnp.allclose(by_parts, expected, rtol=tol(2e-4, 1e-10))


def test_draws_move_at_a_constant_distribution_function(tol):
    """Against the explicit matrix: (dF/dz) dz + dF = 0, F a function of all of z."""

    def F(z, p):
        x = (z - p["auto_loc"]) / p["auto_scale"]
        log_normal = -(x**2) / 2 - jnp.log(p["auto_scale"])
        before = jnp.cumsum(log_normal, 1) - log_normal
        w = jax.nn.softmax(p["auto_logits"][:, None] + before, axis=0)
        return (w * ndtr(x)).sum(0)

    z = jnp.array([2.9, -21.0, 0.25])

    def attached(p):
        mixture = DiagonalNormalMixture(p["auto_logits"], p["auto_loc"], p["auto_scale"])
        return mixture.with_gradient(z)

    @jax.jit
    def both(p):
        return attached(p), jax.jacobian(attached)(p), jax.jacobian(F, (0, 1))(z, p)

    value, moved, (S, dF) = both(PARAMS)
    assert (value == z).all()
    for name, J in moved.items():
        expected = -jnp.linalg.solve(S, dF[name].reshape(3, -1))
        assert jnp.allclose(J.reshape(3, -1), expected, rtol=tol(2e-3, 1e-9), atol=tol(1e-4, 1e-9))


@pytest.mark.slow
def test_gradient_of_an_expectation_is_the_closed_form_in_every_parameter():
    guide, a, num = guide_of()[0], jnp.array([1.1, -0.2, 2.0]), 200_000

    def closed(p):  # E sin(a.z) of a normal is sin(a.m) exp(-a.S.a / 2)
        w = jax.nn.softmax(p["auto_logits"])
        damping = jnp.exp(-((a * p["auto_scale"]) ** 2).sum(1) / 2)
        return (w * jnp.sin(p["auto_loc"] @ a) * damping).sum()

    @jax.jit
    def moments(p):
        def one(key):
            return jax.grad(lambda p: jnp.sin(guide.sample_latent(key, p, 1)[0] @ a))(p)

        grads = jax.vmap(one)(random.split(random.key(1), num))
        return jax.tree.map(lambda g: (g.mean(0), g.std(0) / num**0.5), grads)

    expected = jax.grad(closed)(PARAMS)
    for name, (mean, error) in moments(PARAMS).items():
        assert (jnp.abs(mean - expected[name]) < 4.5 * error).all(), name
        # The test can fail: most entries differ from zero by many standard errors.
        assert jnp.median(jnp.abs(expected[name]) / error) > 10, name


def test_draws_far_in_the_tails_have_finite_gradients_of_the_right_size():
    z = jnp.array([[3.0 + 8 * 0.5, -20.0, 0.4], [80.0, 500.0, -40.0], [-1e6, 1e6, 1e6]])

    def shifted(delta):
        mixture = DiagonalNormalMixture(
            PARAMS["auto_logits"], PARAMS["auto_loc"] + delta, PARAMS["auto_scale"]
        )
        return mixture.with_gradient(z).sum(1)

    def tilted(delta):
        logits = PARAMS["auto_logits"] + jnp.array([0.0, delta, 0.0])
        mixture = DiagonalNormalMixture(logits, PARAMS["auto_loc"], PARAMS["auto_scale"])
        return mixture.with_gradient(z).sum(1)

    by_shift, by_weight = jax.jit(lambda: (jax.jacobian(shifted)(0.0), jax.jacobian(tilted)(0.0)))()
    assert jnp.isfinite(by_shift).all() and jnp.isfinite(by_weight).all()
    # A draw moves as all centres move, in each of three coordinates; beyond the smallest density
    # of float32 it stays.
    assert jnp.abs(by_shift[0] - 3.0) < 0.01 and (jnp.abs(by_shift[1:]) < 10.0).all()


@pytest.mark.slow
def test_full_covariances_have_draws_but_no_loss_that_differentiates_them():
    guide, svi, state = guide_of("full")
    params = svi.get_params(state)
    assert params["auto_scale_tril"].shape == (3, 3, 3)
    draws = jax.eval_shape(Predictive(guide, params=params, num_samples=4), random.key(1))
    assert draws["a"].shape == (4, 2)
    with pytest.raises(ValueError, match=r"use numpyro_ext.objectives.MixtureELBO, or cov"):
        svi.update(state)

    @jax.jit
    def loss_and_draws(params):
        loss = Trace_ELBO(5).loss(random.key(2), params, three_dimensional, guide)
        return loss, guide.sample_latent(random.key(3), params, 20_000)

    loss, z = loss_and_draws(full_params())
    assert jnp.isfinite(loss)
    q = guide.get_posterior(full_params())
    # Monte Carlo error of a mean: sd / sqrt(20000).
    assert (jnp.abs(z.mean(0) - q.mean) < 5 * jnp.sqrt(q.variance / 20_000)).all()
    assert jnp.allclose(z.var(0), q.variance, rtol=0.05)


def test_a_mixture_is_no_transform_of_a_normal():
    guide, svi, state = guide_of()
    with pytest.raises(ValueError, match="use a flow, such as AutoRealNVPNormal"):
        NeuTraReparam(guide, svi.get_params(state)).reparam(three_dimensional)


def test_components_that_start_at_one_point_are_refused():
    with pytest.raises(ValueError, match="start at one point never part"):
        AutoMixtureNormal(three_dimensional, init_spread=0.0, init_from=None)
