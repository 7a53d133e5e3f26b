"""`ImplicitELBO`: gradients in closed form, by explicit loops, and what it refuses."""

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import ImplicitELBO
from numpyro_ext.objectives.base import Draws
from numpyro_ext.scores import DenoisingScore, SteinScore
from tests.objectives.models import guide_draws

LOC = jnp.array([3.0, -20.0])
FACTOR = jnp.array([[0.5, 0.0], [2.0, 3.0]])
PRECISION = jnp.linalg.inv(FACTOR @ FACTOR.T)
NOISE = {"is_auxiliary": True}


def normal():
    shift = numpyro.param("shift", 0.0)
    numpyro.sample("z", dist.MultivariateNormal(LOC + shift, scale_tril=FACTOR))


def linear_guide():
    m, L = numpyro.param("m", jnp.zeros(2)), numpyro.param("L", jnp.eye(2))
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
    numpyro.sample("z", Implicit(m + L @ e, event_dim=1))


def gradient(loss, params, key, model=normal, guide=linear_guide, *args):
    return jax.grad(lambda p: loss.loss(key, p, model, guide, *args))(params)


def test_with_the_exact_score_the_gradient_at_the_posterior_is_zero_for_every_draw():
    exact = ImplicitELBO(2, lambda z: -(z - LOC) @ PRECISION)
    params = {"m": LOC, "L": FACTOR, "shift": jnp.zeros(())}
    run = jax.jit(lambda key: gradient(exact, params, key))
    for key in random.split(random.key(0), 3):
        grads = run(key)
        assert jnp.abs(grads["m"]).max() < 1e-4 and jnp.abs(grads["L"]).max() < 1e-4
        assert jnp.abs(grads["shift"]) > 1e-3  # theta's is zero on average only


@pytest.mark.slow
def test_stein_gradient_is_that_of_the_closed_form():
    params = {"m": LOC + 1.0, "L": jnp.array([[0.8, 0.0], [-1.0, 2.0]]), "shift": jnp.zeros(())}
    keys = random.split(random.key(1), 40)
    grads = jax.jit(jax.vmap(lambda key: gradient(ImplicitELBO(200), params, key)))(keys)
    expected = PRECISION @ params["L"] - jnp.linalg.inv(params["L"]).T
    error = grads["L"].std(0) / 40**0.5
    # Monte Carlo of 40 x 200 draws, and 2 % of the entropy's force for the ridge.
    bias = 0.02 * jnp.abs(jnp.linalg.inv(params["L"])).max()
    assert (jnp.abs(grads["L"].mean(0) - expected) < 4 * error + bias).all()
    error = grads["m"].std(0) / 40**0.5
    assert (jnp.abs(grads["m"].mean(0) - PRECISION @ (params["m"] - LOC)) < 4 * error).all()


def test_value_is_the_energy_and_parameters_of_the_model_get_its_gradient():
    params = {"m": LOC + 1.0, "L": jnp.eye(2), "shift": jnp.array(0.3)}
    key = random.key(2)
    value, grads = jax.jit(
        jax.value_and_grad(lambda p: ImplicitELBO(3).loss(key, p, normal, linear_guide))
    )(params)

    z = guide_draws(key, 3, linear_guide, params)["z"]

    def energy(shift):
        return -dist.MultivariateNormal(LOC + shift, scale_tril=FACTOR).log_prob(z).mean()

    assert jnp.allclose(value, energy(0.3), rtol=1e-5)
    assert jnp.allclose(grads["shift"], jax.grad(energy)(0.3), rtol=1e-4)


X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


def local_model(x):
    with numpyro.plate("N", len(x), subsample_size=4) as i:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("x", dist.Normal(z.sum(-1), 0.5), obs=x[i])


def local_guide(x):
    a = numpyro.param("a", jnp.array([[1.0, 0.2], [0.3, 0.7]]))
    with numpyro.plate("N", len(x), subsample_size=4) as i:
        e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
        z = jnp.tanh(e @ a + x[i][:, None])
        numpyro.sample("z", Implicit(z, event_dim=1))


@pytest.mark.slow
def test_estimates_per_datum_are_those_of_an_explicit_loop():
    loss, key = ImplicitELBO(5), random.key(3)
    a = jnp.array([[1.0, 0.2], [0.3, 0.7]])
    value, grad = jax.jit(
        jax.value_and_grad(lambda a: loss.loss(key, {"a": a}, local_model, local_guide, X))
    )(a)

    drawn = guide_draws(key, 5, local_guide, {"a": a}, X)
    x, noise = X[drawn["N"][0]], drawn["e"]

    def by_hand(a):
        def datum(x, e):
            z = jnp.tanh(e @ a + x)
            log_p = dist.Normal().log_prob(z).sum(1) + dist.Normal(z.sum(1), 0.5).log_prob(x)
            force = (jax.lax.stop_gradient(SteinScore()(z)) * z).sum() / 5
            return -log_p.mean() + force - jax.lax.stop_gradient(force)

        return sum(1.5 * jax.lax.map(lambda xe: datum(*xe), (x, jnp.moveaxis(noise, 1, 0))))

    expected, expected_grad = jax.jit(jax.value_and_grad(by_hand))(a)
    assert jnp.allclose(value, expected, rtol=1e-5)
    assert jnp.allclose(grad, expected_grad, rtol=1e-3, atol=1e-4)


def state(t, e, s):
    return 2.0 * s * e + t * jnp.sin(s + e)


def path_guide():
    s = numpyro.param("s", 0.7)
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
    path = jnp.stack([state(t, e, s) for t in (1.0, 2.0, 3.0)])
    numpyro.sample("z", Implicit(path[-1], event_dim=1, trajectory=path))


def one_state(t):
    def guide():
        s = numpyro.param("s", 0.7)
        e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
        numpyro.sample("z", Implicit(state(t, e, s), event_dim=1))

    return guide


@pytest.mark.slow
def test_of_a_trajectory_it_is_the_mean_over_the_states():
    guides = [path_guide, *(one_state(t) for t in (1.0, 2.0, 3.0))]

    def losses(s):
        params = {"s": s, "shift": 0.0}
        return jnp.stack(
            [ImplicitELBO(5).loss(random.key(5), params, normal, guide) for guide in guides]
        )

    values, grads = jax.jit(lambda s: (losses(s), jax.jacfwd(losses)(s)))(0.7)
    assert jnp.allclose(values[0], jnp.mean(values[1:]), rtol=1e-5)
    assert jnp.allclose(grads[0], jnp.mean(grads[1:]), rtol=1e-3)


@pytest.mark.slow
def test_denoising_score_is_that_of_the_critic_and_trains_it():
    sigma, key = 0.5, random.key(6)
    network = (lambda key, shape: ((2,), jnp.zeros((2, 2))), lambda P, z: z @ P)
    guide = with_critic(linear_guide, network, output_dim=2)
    L, P = jnp.array([[0.8, 0.0], [-1.0, 2.0]]), jnp.array([[-0.3, 0.1], [0.2, -0.6]])
    params = {"m": LOC, "L": L, "shift": 0.0}

    def ours(L, P):
        loss = ImplicitELBO(4, DenoisingScore(sigma))
        return loss.loss(key, {**params, "L": L, "critic$params": P.ravel()}, normal, guide)

    drawn = guide_draws(key, 4, linear_guide, params)["e"]
    extra_key = Draws(ImplicitELBO(4), key, params, normal, linear_guide, (), {}).extra_key

    def theirs(L, P):
        z = LOC + drawn @ L.T
        fixed = jax.lax.stop_gradient(z)
        noise = sigma * random.normal(extra_key, z.shape)
        energy = -dist.MultivariateNormal(LOC, scale_tril=FACTOR).log_prob(z).mean()
        force = jax.lax.stop_gradient(fixed @ P) / sigma
        training = ((sigma * (fixed + noise) @ P + noise) ** 2).sum(1).mean()
        return energy + (force * z).sum() / 4 + training

    grads = [jax.jit(jax.grad(fn, (0, 1)))(L, P) for fn in (ours, theirs)]
    for mine, reference in zip(*grads, strict=True):
        assert jnp.allclose(mine, reference, rtol=1e-3, atol=1e-3)


@pytest.mark.nightly
def test_a_trained_denoising_score_widens_a_guide_to_the_posterior():
    """The optimal score is that of q with the variance sigma^2 more: so q has sigma^2 less."""
    guide = with_critic(linear_guide, hidden_dims=(16,), output_dim=2)

    def unit():
        numpyro.sample("z", dist.Normal().expand([2]).to_event(1))

    def rates(params):
        return {name: "critic" if name == "critic$params" else "guide" for name in params}

    optim = optax.multi_transform({"critic": optax.adam(1e-2), "guide": optax.adam(3e-3)}, rates)
    svi = SVI(unit, guide, optim, ImplicitELBO(200, DenoisingScore(0.3)))
    start = {"L": 0.5 * jnp.eye(2), "m": jnp.array([0.5, -0.5])}
    result = svi.run(random.key(0), 4000, init_params=start, progress_bar=False)
    L = result.params["L"]
    np.testing.assert_allclose(L @ L.T, (1 - 0.3**2) * jnp.eye(2), atol=0.12)


def test_what_a_denoising_score_lacks_is_named():
    params, score = {"m": LOC, "L": jnp.eye(2), "shift": 0.0}, DenoisingScore(0.5)
    with pytest.raises(ValueError, match="trains a critic, and the guide has none"):
        ImplicitELBO(4, score).loss(random.key(0), params, normal, linear_guide)
    with pytest.raises(ValueError, match="give the network to with_critic"):
        ImplicitELBO(4, DenoisingScore(0.5, stax.Dense(2)))
