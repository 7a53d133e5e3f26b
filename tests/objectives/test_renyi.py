"""VRELBO and IWELBO: closed forms, laws in alpha and K, and what upstream gets wrong."""

from functools import partial
import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import RenyiELBO, Trace_ELBO
import pytest

from numpyro_ext._model.handlers import seed_plates
from numpyro_ext.objectives import VRELBO
from tests.objectives.compare import assert_same
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    global_model,
    guide_draws,
    linear_gaussian,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
    particle_keys,
    value_and_grad,
)

INF = math.inf


@pytest.mark.slow
def test_one_particle_is_the_elbo():
    class ParticleZero(Trace_ELBO):
        def loss(self, rng_key, *args):
            return super().loss(particle_keys(rng_key, 1)[0], *args)

    kinds = [(-INF, "standard"), (INF, "single"), (-1.0, "stl"), (2.5, "dreg")]
    losses = [ParticleZero(), *(VRELBO(alpha, 1, gradient=kind) for alpha, kind in kinds)]
    (value, elbo), *ours = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide, seed=4)
    for (got, grad), (_, kind) in zip(ours, kinds, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5)
        for name in elbo if kind in ("standard", "single") else ("b",):
            np.testing.assert_allclose(grad[name], elbo[name], rtol=1e-4)


LG_VALUES = {-1.0: -1.5685916054, 0.0: -1.8280121235, 0.5: -2.0744036413, 1.0: -2.5439385332}


def lg_bound(alpha, x):
    if alpha == 1:
        return -math.log(2 * math.pi) / 2 - (x**2 + 1) / 2
    return (
        -math.log(2 * math.pi) / 2
        - math.log(2 - alpha) / (2 * (1 - alpha))
        - x**2 / (2 * (2 - alpha))
    )


def test_linear_gaussian_bound_with_many_particles():
    num_particles, params = 200_000, {"m": 0.0, "s": 1.0}
    lw = -((1.5 - random.normal(random.key(1), (10_000,))) ** 2) / 2

    def bound(alpha):
        loss = VRELBO(alpha, num_particles)
        return -loss.loss(random.key(0), params, linear_gaussian, normal_guide, 1.5)

    bounds = jax.jit(lambda alphas: jax.lax.map(bound, alphas))(jnp.array(list(LG_VALUES)))
    for (alpha, exact), got in zip(LG_VALUES.items(), bounds, strict=True):
        assert lg_bound(alpha, 1.5) == pytest.approx(exact, abs=1e-9)
        a = 1 - alpha
        r = jax.nn.softmax(a * lw) * len(lw) / a if a else lw
        assert float(got) == pytest.approx(exact, abs=4 * float(r.std()) / num_particles**0.5)


@pytest.mark.slow
@pytest.mark.x64
def test_posterior_guide_gives_the_evidence_exactly(tol):
    params = {"m": 0.75, "s": math.sqrt(0.5)}
    kinds = [(0.5, "standard"), (-INF, "standard"), (3.0, "single"), (-1.0, "stl"), (0.0, "dreg")]
    losses = [VRELBO(alpha, 3, gradient=kind) for alpha, kind in kinds]
    results = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    for (value, grad), (_, kind) in zip(results, kinds, strict=True):
        np.testing.assert_allclose(-value, -1.8280121235, rtol=tol(1e-6, 1e-10))
        if kind in ("stl", "dreg"):
            np.testing.assert_allclose([grad["m"], grad["s"]], 0, atol=tol(1e-5, 1e-13))


@pytest.mark.nightly
def test_agrees_with_upstream_where_it_is_right():
    # Upstream draws its minibatch from another key.
    rows = partial(handlers.substitute, data={"data": jnp.array([4, 1])})
    cases = [
        ((-1.0, 0.5), rows(local_model), rows(local_guide), LOCAL_PARAMS, 2),
        ((0.5,), mixed_model, mixed_guide, {"c": 0.4}, None),
    ]
    for alphas, model, guide, params, batch in cases:
        losses = [[bound(alpha, 10) for alpha in alphas] for bound in (RenyiELBO, VRELBO)]
        a, b = value_and_grad(losses, params, model, guide, X_LOCAL, batch)
        assert_same(b, a, 2e-5)


def elbos_of(rng_key, num_particles, params, model, guide, *args):
    keys = particle_keys(rng_key, num_particles)
    return -jax.jit(jax.vmap(lambda key: Trace_ELBO().loss(key, params, model, guide, *args)))(keys)


@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch")
def test_a_minibatch_under_global_latents_is_scaled_inside_the_power():
    """The energy approximation: log prior + N/M log likelihood of the batch, inside the power."""
    params, key, alpha = {"b": 0.7, "m": 0.2, "s": 0.8}, random.key(7), 0.3
    # A guide without a plate has the minibatch of the model.
    batch = seed_plates(lambda: numpyro.plate("data", 6, 2), random.split(key)[0])
    x = X_LOCAL[numpyro.handlers.trace(batch).get_trace()["data"]["value"]]
    z = guide_draws(key, 3, normal_guide, params)["z"]
    log_lik = dist.Normal(0.7 * z[:, None], 0.9).log_prob(x).sum(1)
    prior, q = dist.Normal(0.5, 1.5).log_prob(z), dist.Normal(0.2, 0.8).log_prob(z)
    lw = prior + 6 / 2 * log_lik - q
    exact = jnp.log(jnp.mean(jnp.exp(0.7 * lw))) / 0.7
    got, _ = value_and_grad(
        VRELBO(alpha, 3), params, global_model, normal_guide, X_LOCAL, 2, seed=7
    )
    np.testing.assert_allclose(-got, exact, rtol=1e-5)


def test_a_joint_site_of_the_guide_has_one_joint_bound():
    """All latents are local in the model, but the guide has one joint site: one joint bound."""

    def model():
        with numpyro.plate("data", 8):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=jnp.arange(8.0))

    def guide():  # as AutoContinuous writes it
        normal = dist.Normal(jnp.arange(16.0) / 8, 0.5).to_event(1)
        flat = numpyro.sample("flat", normal, infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Delta(flat.reshape(8, 2), event_dim=1))

    params = {}
    got = value_and_grad(VRELBO(0.5, 3), params, model, guide, seed=1)
    elbos = elbos_of(random.key(1), 3, params, model, guide)
    joint = 2 * (jax.scipy.special.logsumexp(elbos / 2) - jnp.log(3))
    np.testing.assert_allclose(-got[0], joint, rtol=1e-5)
