"""`AutoLangevinDiffusion`: its weights, its bound as steps become many, and its gradients."""

from functools import cache

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.guides import AutoLangevinDiffusion
from numpyro_ext.objectives import log_weights
from tests.guides.moved import moved

LOG_Z = 1.3
LOC, SCALE = jnp.array([2.0, -0.5]), jnp.array([0.7, 1.5])


def normal():
    """A normal of evidence e^1.3, off the origin, of unequal scales."""
    numpyro.sample("z", dist.Normal(LOC, SCALE).to_event(1))
    numpyro.factor("evidence", LOG_Z)


def curved():
    u = numpyro.sample("u", dist.Normal(1.0, 0.7))
    numpyro.sample("s", dist.LogNormal(0.3 * u, 0.5))


@cache
def perturbed(backward, model=curved):
    """Far from the start, also in the schedule and the network."""
    options = {"step_size": 0.15, "init_scale": 1.0, "hidden_dims": (4,), "init_from": None}
    guide = AutoLangevinDiffusion(model, num_steps=3, backward=backward, **options)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, svi, moved(svi, 0.2)


def by_hand(params, z, noise):
    """The last state and the log weight without log p*, one density after the other."""

    def mean(z, beta, eps):
        to_start = (params["auto_loc"] - z) / params["auto_scale"] ** 2
        slope = (1 - beta) * to_start + beta * (LOC - z) / SCALE**2
        x = jnp.sqrt(eps / 2) * slope  # in standard deviations of the noise
        return z + jnp.sqrt(2 * eps) * 10.0 * jnp.tanh(x / 10.0)

    log_w = -dist.Normal(params["auto_loc"], params["auto_scale"]).log_prob(z).sum()
    for t, beta in enumerate(np.cumsum(params["auto_annealing"])):
        eps = params["auto_step_size"][t] / params["auto_mass"]
        before, sd = z, jnp.sqrt(2 * eps)
        z = mean(before, beta, eps) + sd * noise[t]
        log_w += dist.Normal(mean(z, beta, eps), sd).log_prob(before).sum()
        log_w -= dist.Normal(mean(before, beta, eps), sd).log_prob(z).sum()
    return z, log_w


@pytest.mark.slow
def test_a_draw_and_its_weight_are_those_of_the_kernels_one_after_the_other(tol):
    guide, _, params = perturbed("ula", normal)
    sites = trace(seed(substitute(guide, params), 3)).get_trace()
    start, noise = sites["_auto_start"], sites["_auto_noise"]
    z, log_w = by_hand(params, start["value"], noise["value"])
    log_q = sum(jnp.sum(x["fn"].log_prob(x["value"])) for x in (start, noise))
    assert jnp.allclose(sites["z"]["value"], z, rtol=tol(1e-4, 1e-10))
    log_q += sites["auto_reverse"]["fn"].log_factor
    assert jnp.allclose(-log_q, log_w, rtol=tol(1e-4, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["ula", "learnt"])
def test_weights_average_to_the_evidence_at_any_parameters(backward):
    guide, _, params = perturbed(backward)
    weights = jnp.exp(log_weights(random.key(2), params, curved, guide, num_samples=100_000))
    error = weights.std() / 100_000**0.5
    assert error < 0.02 and abs(weights.mean() - 1.0) < 4 * error


@pytest.mark.slow
@pytest.mark.x64
def test_the_bound_of_a_normal_rises_to_its_evidence_with_the_number_of_steps():
    """From N(0, 1), untrained, in steps of 0.1."""
    bounds = []
    for T in (8, 256):
        options = {"num_steps": T, "step_size": 0.1, "init_scale": 1.0}
        guide = AutoLangevinDiffusion(normal, backward="ula", init_from=None, **options)
        svi = SVI(normal, guide, optax.adam(1e-2), Trace_ELBO())
        state = svi.init(random.key(0), init_params={"auto_loc": jnp.zeros(2)})
        lw = log_weights(random.key(2), svi.get_params(state), normal, guide, num_samples=4000)
        bounds.append(float(lw.mean()))
    # The same kernels in NumPy: gaps of 2.54 and 0.17, with errors of .05 and .01.
    assert abs(bounds[0] - (LOG_Z - 2.54)) < 0.3 and abs(bounds[1] - (LOG_Z - 0.17)) < 0.06


@pytest.mark.x64
@pytest.mark.parametrize("backward", ["ula", "learnt"])
def test_gradient_is_the_one_of_differences(backward, needs_x64):
    """Of all parameters together, through the gradient of the model."""
    guide, _, params = perturbed(backward)

    @jax.jit
    def loss(h):
        other = {
            name: x * (1 + h * jnp.cos(jnp.arange(x.size)).reshape(x.shape))
            for name, x in params.items()
        }
        return Trace_ELBO(3).loss(random.key(4), other, curved, guide)

    h = 1e-5
    assert jnp.allclose(jax.grad(loss)(0.0), (loss(h) - loss(-h)) / (2 * h), rtol=1e-6)


def test_mistakes_are_refused():
    network = stax.Dense(3)
    with pytest.raises(ValueError, match="backward"):
        AutoLangevinDiffusion(curved, backward="mcd")
    with pytest.raises(ValueError, match="backward='ula' has no network"):
        AutoLangevinDiffusion(curved, backward="ula", reverse_network=network)
    guide = AutoLangevinDiffusion(curved, reverse_network=network, init_from=None)
    with pytest.raises(ValueError, match=r"output of shape \(3,\); it must be \(2,\)"):
        seed(guide, 0)()


@pytest.mark.slow
def test_draws_take_the_cut_of_a_circle_from_the_parameters():
    """Which may be of a guide that began elsewhere."""

    def angle():
        numpyro.sample("a", dist.VonMises(2.8, 6.0))

    options = {"num_steps": 1, "step_size": 0.1, "backward": "ula", "init_from": None}
    guide, there = (AutoLangevinDiffusion(angle, **options) for _ in range(2))
    svi = SVI(angle, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0)))
    params = {**params, "auto_cut": params["auto_cut"] + 2.0}
    sites = trace(seed(substitute(there, params), 3)).get_trace()  # begins at this cut
    drawn, right = (
        guide.sample_posterior(random.key(1), params, sample_shape=(4,))["a"]
        for guide in (guide, there)
    )
    np.testing.assert_allclose(drawn, right, rtol=1e-4, atol=1e-5)
    log_r = guide.reverse_log_prob(params, sites_of_noise(sites), {})
    np.testing.assert_allclose(log_r, -sites["auto_reverse"]["fn"].log_factor, rtol=1e-4)


def sites_of_noise(sites):
    return {name: sites[name]["value"] for name in ("_auto_start", "_auto_noise")}


def test_a_first_call_under_jit_leaves_no_data_for_draws():
    def model(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("z", dist.Normal()), 1.0), obs=y)

    options = {"num_steps": 1, "backward": "ula", "init_from": None}
    guide = AutoLangevinDiffusion(model, **options)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(jax.jit(svi.init)(random.key(0), 1.0))
    with pytest.raises(ValueError, match="pass the model's arguments here"):
        guide.sample_posterior(random.key(1), params)
    assert jnp.isfinite(guide.sample_posterior(random.key(1), params, 1.0)["z"])


def test_a_second_fit_follows_the_gradient_of_its_own_data():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 2).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(z[0] - z[1], 0.5).expand([3]).to_event(1), obs=y)

    first, second = jnp.array([3.0, 4.0, 5.0]), jnp.array([-2.0, -1.0, -3.0])
    kept, new = (
        AutoLangevinDiffusion(model, num_steps=3, step_size=0.1, init_from=None) for _ in range(2)
    )
    SVI(model, kept, optax.adam(1e-2), Trace_ELBO()).init(random.key(0), first)
    svi = SVI(model, new, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), second))
    losses = [svi.loss.loss(random.key(1), params, model, g, second) for g in (kept, new)]
    np.testing.assert_array_equal(*losses)
    other = svi.loss.loss(random.key(1), params, model, kept, first)
    assert abs(other - losses[0]) > 1
