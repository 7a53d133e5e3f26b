"""SVAEELBO: its mean, its natural gradients, its draws, and what it refuses."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.expfam import Dirichlet, Gaussian, multiply
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    GMMEP,
    SVAEELBO,
    CycleEP,
    FixedGaussian,
    GaussianPotential,
    GMMMeanField,
    global_statistics,
)
from tests.svae.models import PLAIN, B, D, N, Y, guide_of, mixture, params_of, program

RULES = {"mixture": GMMEP(), "cycle": CycleEP(), "plain": FixedGaussian(PLAIN)}


def loss_of(loss, rule, key, params, *args):
    model, _ = program(rule)
    return loss.loss(key, params, model, guide_of(rule), *args)


@pytest.mark.parametrize("name", RULES)
def test_its_mean_is_that_of_trace_elbo(name):
    """Same parameters, same minibatches; within 4 standard errors of 600 pairs of draws."""
    rule = RULES[name]
    params, (_, y) = params_of(name), program(rule)
    keys = random.split(random.key(1), 600)

    @jax.jit
    def both(params, keys):
        losses = SVAEELBO(), Trace_ELBO()
        return [
            jax.vmap(lambda key, loss=loss: loss_of(loss, rule, key, params, y, B))(keys)
            for loss in losses
        ]

    ours, theirs = both(params, keys)
    difference = ours - theirs
    error = difference.std() / len(keys) ** 0.5
    assert error < 1
    assert abs(difference.mean()) < 4 * error
    if rule.families:
        assert ours.std() < theirs.std()


@partial(jax.jit, static_argnums=(0, 1))
def gradient(implicit, rule, params, key, y):
    return jax.grad(lambda p: loss_of(SVAEELBO(implicit), rule, key, p, y, B))(params)


@pytest.mark.parametrize("name", ["mixture", "cycle"])
def test_a_natural_step_of_size_one_is_the_conjugate_update(name):
    """prior + N / B times the expected statistics of the minibatch, for the explicit part."""
    rule = RULES[name]
    params, (_, y) = params_of(name), program(rule)
    guide = guide_of(rule)
    found = gradient("explicit_only", rule, params, random.key(2), y[:B])["svae_natural"]

    @jax.jit
    def statistics(params, y):
        return global_statistics(rule, guide.global_mean(params), guide.local_posterior(params, y))

    added = statistics(params, y[:B])
    for key, natural in guide.global_natural(params).items():
        scaled = jax.tree.map(lambda s: N / B * s, added[key])
        expected = multiply(guide.prior[key], scaled)
        for x, g, update in zip(natural, found[key], expected, strict=True):
            np.testing.assert_allclose(x - g, update, rtol=2e-4, atol=2e-3)


def test_the_implicit_part_changes_natural_gradients_alone():
    params = params_of("mixture")
    full, explicit = (
        gradient(implicit, GMMEP(), params, random.key(2), Y)
        for implicit in ("full", "explicit_only")
    )
    for name in ("svae_recognition$params", "decoder$params"):
        for x, y in zip(*map(jax.tree.leaves, (full[name], explicit[name])), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    a, b = full["svae_natural"]["pi"].a, explicit["svae_natural"]["pi"].a
    assert float(jnp.max(jnp.abs(a - b))) > 0.01


def test_the_full_gradient_solves_the_fisher_system():
    """For pi, which has a minimal representation, and a likelihood that does not depend on x."""
    rule, params, y = GMMEP(), params_of("mixture"), Y
    guide = guide_of(rule)

    def flat(y, B):
        return mixture(y, B, scale=0.0)

    def by_hand(a, params):
        natural = {**params["svae_natural"], "pi": params["svae_natural"]["pi"]._replace(a=a)}
        params = {**params, "svae_natural": natural}
        kl = Dirichlet.kl(natural["pi"], guide.prior["pi"])
        local = guide.local_posterior(params, y)
        return kl + jnp.sum(rule.local_kl(guide.global_mean(params), local))

    @jax.jit
    def both(params):
        loss = SVAEELBO("full").loss
        found = jax.grad(lambda p: loss(random.key(0), p, flat, guide, y, N))(params)
        a = params["svae_natural"]["pi"].a
        fisher = jax.hessian(lambda a: Dirichlet.log_partition(guide.prior["pi"]._replace(a=a)))(a)
        return found["svae_natural"]["pi"].a, fisher, jax.grad(by_hand)(a, params)

    found, fisher, slope = both(params)
    np.testing.assert_allclose(found, np.linalg.solve(fisher, slope), rtol=5e-3, atol=5e-3)


def test_particles_average_draws_of_x_alone():
    """With more particles the spread between keys on all rows falls as 1 / sqrt(particles)."""
    params = params_of("mixture")

    @jax.jit
    def losses(params, keys):
        return [
            jax.vmap(lambda key, n=n: loss_of(SVAEELBO(num_particles=n), GMMEP(), key, params, Y))(
                keys
            )
            for n in (1, 9)
        ]

    one, nine = losses(params, random.split(random.key(4), 200))
    np.testing.assert_allclose(one.std() / nine.std(), 3, rtol=0.3)
    assert abs(one.mean() - nine.mean()) < 4 * one.std() / 200**0.5


def test_one_compilation_serves_all_minibatches():
    rule = GMMMeanField()
    guide = guide_of(rule)
    optim = optax.multi_transform(
        {"natural": natural_gradient(0.05, guide.domain), "network": optax.adam(1e-3)},
        guide.param_labels,
    )
    svi = SVI(mixture, guide, optim, SVAEELBO("explicit_only"))
    state = svi.init(random.key(0), Y, B)
    update = jax.jit(svi.update, static_argnums=2)
    losses = []
    for step in range(4):
        state, loss = update(state, Y + step, B)
        losses.append(float(loss))
    assert update._cache_size() == 1
    assert np.all(np.isfinite(losses)) and len(set(losses)) == 4
    params = svi.get_params(state)
    assert bool(guide.domain(params))
    before = guide.start["components"].kappa
    assert float(jnp.max(jnp.abs(params["svae_natural"]["components"].kappa - before))) > 0.1


def data_on_z(y, B=None):
    pi = numpyro.sample("pi", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("components", 3):
        Sigma = numpyro.sample("Sigma", dist.InverseWishart(4.0, scale_matrix=jnp.eye(2)))
        mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(2), Sigma))
    with numpyro.plate("data", N):
        z = numpyro.sample("z", dist.Categorical(pi))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
        numpyro.sample("y", dist.Normal(x + mu[z], 1.0).to_event(1), obs=y)


def with_another(y, B=None):
    numpyro.sample("extra", dist.Normal())
    mixture(y)


def without_z(y, B=None):
    with numpyro.plate("data", N):
        numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), jnp.eye(D)))


def test_programs_that_do_not_fit_are_refused():
    params, guide, loss = params_of("mixture"), guide_of(GMMEP()), SVAEELBO()
    evaluate = partial(loss.loss, random.key(0), params)
    with pytest.raises(ValueError, match=r"'y' depends directly on '(mu|z)'.* Trace_ELBO"):
        evaluate(data_on_z, guide, Y)
    with pytest.raises(ValueError, match="the model has the latent site 'extra'"):
        evaluate(with_another, guide, Y)
    with pytest.raises(ValueError, match="the guide has the latent site 'Sigma'"):
        evaluate(without_z, guide, Y)
    with pytest.raises(TypeError, match="SVAEELBO requires an SVAEGuide"):
        evaluate(mixture, lambda y: numpyro.sample("z", dist.Normal()), Y)
    with pytest.raises(ValueError, match="implicit is 'half'"):
        SVAEELBO("half")


@pytest.mark.x64
def test_exact_potential_is_tight_in_trace_elbo(needs_x64):
    """Every draw of x has the log evidence as log p - log q."""
    from numpyro_ext.svae import SVAEGuide

    def model(y):
        with numpyro.plate("data", 1):
            x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(1), jnp.eye(1)))
            numpyro.sample("y", dist.Normal(x, 0.5**0.5).to_event(1), obs=y)

    def exact(params, y):
        return GaussianPotential.from_diagonal(2 * y, jnp.full_like(y, 2.0))

    prior = Gaussian.from_standard(jnp.zeros(1), jnp.eye(1))
    network = (lambda key, shape: (shape, {"unused": jnp.zeros(())}), exact)
    guide = SVAEGuide({}, network, FixedGaussian(prior))
    svi = SVI(model, guide, optax.adam(1e-3), Trace_ELBO())
    y = jnp.array([[1.5]])
    state = svi.init(random.key(0), y)
    np.testing.assert_allclose(svi.evaluate(state, y), 1.871671087258755, atol=1e-8)
