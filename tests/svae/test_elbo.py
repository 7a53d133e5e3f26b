"""SVAEELBO: its mean, its natural gradients, its draws, and what it refuses."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.handlers import seed_plates
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.expfam import Gaussian, multiply
from numpyro_ext.svae import (
    GMMEP,
    SVAEELBO,
    FixedGaussian,
    GaussianPotential,
    GMMMeanField,
    SVAEGuide,
    global_statistics,
)
from tests.svae.models import (
    RULES,
    B,
    D,
    N,
    Y,
    decoded,
    guide_of,
    mixture,
    params_of,
    program,
)


def loss_of(loss, rule, key, params, *args):
    model, _ = program(rule)
    return loss.loss(key, params, model, guide_of(rule), *args)


@pytest.mark.slow
def test_it_has_the_mean_of_trace_elbo():
    """Same parameters, same minibatches; within 4 standard errors of 600 pairs of draws."""
    rule = RULES["mixture"]
    params, (_, y) = params_of("mixture"), program(rule)
    keys = random.split(random.key(1), 600)

    @jax.jit
    def both(params, keys):
        def theirs(key):
            guide_key = random.split(key)[1]
            parts = (seed_plates(fn, guide_key) for fn in (program(rule)[0], guide_of(rule)))
            return Trace_ELBO().loss(key, params, *parts, y, B)

        ours = jax.vmap(lambda key: loss_of(SVAEELBO(), rule, key, params, y, B))(keys)
        return ours, jax.vmap(theirs)(keys)

    ours, theirs = both(params, keys)
    difference = ours - theirs
    error = difference.std() / len(keys) ** 0.5
    assert error < 1
    assert abs(difference.mean()) < 4 * error
    assert ours.std() < theirs.std()


@pytest.mark.x64
@pytest.mark.parametrize("name", ["mixture", "cycle", "lds"])
def test_its_gradient_is_the_slope_of_its_value(name, needs_x64):
    """Along a direction in all parameters, against a difference of the value for the same key.

    The slope in natural parameters is the Fisher matrix times the natural gradient. What mean field
    and message passing do with the global factors is part of it. The value has the mean of
    ``Trace_ELBO``, so this is the gradient of that mean, also where z is discrete.
    """
    rule = GMMMeanField() if name == "mixture" else RULES[name]
    params, (_, y) = params_of(name), program(rule)
    along = jax.tree.map(jnp.cos, params)

    @jax.jit
    def value_and_slope(params):
        def loss(p):
            return loss_of(SVAEELBO(), rule, random.key(2), p, y, B)

        value, result = jax.value_and_grad(loss)(params)
        change = dict(along)
        if rule.families:
            change["svae_natural"] = {
                key: jax.jvp(family.mean, *((p["svae_natural"][key],) for p in (params, along)))[1]
                for key, family in rule.families.items()
            }
        pairs = zip(*map(jax.tree.leaves, (result, change)), strict=True)
        return value, sum(jnp.sum(a * b) for a, b in pairs)

    def at(step):
        return value_and_slope(jax.tree.map(lambda p, v: p + step * v, params, along))

    step = 1e-5
    np.testing.assert_allclose(at(0.0)[1], (at(step)[0] - at(-step)[0]) / (2 * step), rtol=1e-5)


@partial(jax.jit, static_argnums=(0, 1))
def gradient(implicit, rule, params, key, y):
    return jax.grad(lambda p: loss_of(SVAEELBO(implicit), rule, key, p, y, B))(params)


@pytest.mark.slow
def test_a_natural_step_of_size_one_is_the_conjugate_update():
    """prior + N / B times the expected statistics of the minibatch, for the explicit part."""
    rule = RULES["mixture"]
    params, (_, y) = params_of("mixture"), program(rule)
    guide = guide_of(rule)
    result = gradient("explicit_only", rule, params, random.key(2), y)["svae_natural"]

    @jax.jit
    def statistics(params, y):
        key = random.split(random.key(2))[1]
        seeded = substitute(seed(seed_plates(guide, key), key), data=params)
        rows = y[trace(seeded).get_trace(y, B)["data"]["value"]]
        local = guide.local_posterior(params, rows)
        return global_statistics(rule, guide.global_mean(params), local)

    added = statistics(params, y)
    for key, natural in guide.global_natural(params).items():
        scaled = jax.tree.map(lambda s: N / B * s, added[key])
        expected = multiply(guide.prior[key], scaled)
        for x, g, update in zip(natural, result[key], expected, strict=True):
            np.testing.assert_allclose(x - g, update, rtol=2e-4, atol=2e-3)


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


def with_a_learnt_prior(y, B=None):
    scale = numpyro.param("scale", 1.0)
    with numpyro.plate("data", N):
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), scale * jnp.eye(D)))
        decoded("y", x, y)


def with_another_plate(y, B=None):
    with numpyro.plate("rows", N, subsample_size=B) as idx:
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(D), jnp.eye(D)))
        decoded("y", x, y[idx])


@pytest.mark.slow
def test_programs_that_do_not_fit_are_refused():
    def evaluate(params, *args):
        """Tracing is enough to meet what does not fit."""
        jax.eval_shape(lambda: SVAEELBO().loss(random.key(0), params, *args))

    params, guide = params_of("mixture"), guide_of(GMMEP())
    with pytest.raises(ValueError, match=r"'y' depends directly on '(mu|z)'.* Trace_ELBO"):
        evaluate(params, data_on_z, guide, Y)
    with pytest.raises(ValueError, match="the model has the latent site 'extra'"):
        evaluate(params, with_another, guide, Y)
    with pytest.raises(TypeError, match="SVAEELBO requires an SVAEGuide"):
        evaluate(params, mixture, lambda y: numpyro.sample("z", dist.Normal()), Y)
    plain, params = guide_of(RULES["plain"]), {**params_of("plain"), "scale": jnp.array(1.0)}
    with pytest.raises(ValueError, match="site 'x' depends on the parameter 'scale', which would"):
        evaluate(params, with_a_learnt_prior, plain, Y)
    with pytest.raises(ValueError, match="in the plate 'rows', which takes 5 of 12 rows;"):
        evaluate(params, with_another_plate, plain, Y, B)


@pytest.mark.x64
def test_exact_potential_is_tight_in_trace_elbo(needs_x64):
    """Every draw of x has the log evidence as log p - log q."""

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


def tempered(beta):
    """A model of x alone whose likelihood is a constant, and its guide, both with x to beta."""

    def model(y):
        with numpyro.plate("data", 1):
            with handlers.scale(scale=beta):
                numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(1), jnp.eye(1)))
            numpyro.sample("y", dist.Normal(jnp.zeros(1), 1).to_event(1), obs=y)

    def potential(params, y):
        return GaussianPotential.from_diagonal(2 * y, jnp.full_like(y, 3.0))

    prior = Gaussian.from_standard(jnp.zeros(1), jnp.eye(1))
    network = (lambda key, shape: (shape, {"unused": jnp.zeros(())}), potential)
    return model, SVAEGuide({}, network, FixedGaussian(prior))


def scaled_x(guide, beta):
    """The scale of x alone, not of the parameters."""
    return handlers.scale(guide, scale=beta)


@pytest.mark.slow
def test_a_scale_of_local_sites_multiplies_their_divergence():
    """q is N(2y / 4, 1/4): beta KL(q | N(0, 1)) - log N(y | 0, 1), also of a traced beta."""
    y, params = jnp.array([[1.5]]), {"svae_recognition$params": {"unused": jnp.zeros(())}}
    kl = 0.5 * (0.25 + 0.75**2 - 1 - np.log(0.25))
    log_lik = dist.Normal().log_prob(1.5)

    def loss(ours, theirs):
        model, guide = tempered(ours)[0], scaled_x(tempered(1.0)[1], theirs)
        return SVAEELBO().loss(random.key(0), params, model, guide, y)

    np.testing.assert_allclose(loss(3.0, 3.0), 3 * kl - log_lik, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(loss)(3.0, 3.0), 3 * kl - log_lik, rtol=1e-5)
    assert np.isnan(jax.jit(loss)(3.0, 2.0))
    words = "the model scales the latent site 'x' by 3.0 and the guide by 1.0"
    with pytest.raises(ValueError, match=words):
        loss(3.0, 1.0)
    model, guide = tempered(3.0)
    with pytest.raises(ValueError, match=words):
        guide.check(model, random.key(0), y)
    with pytest.raises(ValueError, match="the model masks the latent site 'x'"):
        guide.check(handlers.mask(tempered(1.0)[0], mask=jnp.array([True])), random.key(0), y)


@pytest.mark.slow
def test_a_step_that_is_not_finite_leaves_the_parameters():
    """Data of NaN give a gradient of zero, in natural parameters and networks, and a warning."""
    where = "explicit_only", RULES["mixture"], params_of("mixture"), random.key(2)
    with pytest.warns(InferenceWarning, match="gradient not finite in a step"):
        result = jax.block_until_ready(gradient(*where, jnp.full_like(Y, jnp.nan)))
    assert not any(jnp.any(x) for x in jax.tree.leaves(result))
