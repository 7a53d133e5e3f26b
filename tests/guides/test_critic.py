"""`with_critic`: a guide with one parameter more, and everything else as it was."""

from functools import cache
from itertools import pairwise
import pickle

import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
import optax
import pytest

from numpyro_ext.guides import Implicit, with_critic

X = jnp.array([[0.5, 1.0], [-1.0, 2.0], [2.0, 0.3], [0.1, -0.7], [1.3, 0.2]])


def model():
    """A positive site, a simplex of three numbers (two of them free), and a matrix."""
    numpyro.sample("scale", dist.HalfNormal(2.0))
    mix = numpyro.sample("mix", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    b = numpyro.sample("b", dist.Normal(1.0, 3.0).expand([2, 2]).to_event(2))
    numpyro.deterministic("sum", mix[0] + b.sum())


def hand_written():
    loc = numpyro.param("loc", jnp.array([0.5, -1.0, 2.0]))
    noise = numpyro.sample(
        "noise", dist.Normal().expand([5]).to_event(1), infer={"is_auxiliary": True}
    )
    w = numpyro.sample("w", Implicit(loc + noise[:3], event_dim=1))
    numpyro.sample("scale", dist.LogNormal(w[0], 1.0))


def params_of(guide, *args):
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def weights_of(inputs, outputs, hidden=(64, 64)):
    sizes = (inputs, *hidden, outputs)
    return sum(a * b + b for a, b in pairwise(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [AutoNormal, AutoDiagonalNormal])
def test_input_is_the_unconstrained_latent_vector(inner):
    guide = with_critic(inner(model))
    params = params_of(guide)
    assert params.keys() - params_of(inner(model)).keys() == {"critic$params"}
    assert params["critic$params"].shape == (weights_of(1 + 2 + 4, 1),)
    # It starts at zero everywhere, but not at a saddle: its last layer learns at once.
    of_params = jax.value_and_grad(lambda p: guide.critic(p, jnp.arange(7.0)))
    value, gradient = jax.jit(of_params)(params)
    assert value == 0.0 and jnp.abs(gradient["critic$params"]).max() > 0.1


def test_noise_of_a_hand_written_guide_is_no_input():
    guide = with_critic(hand_written, hidden_dims=(8,), output_dim=4, name="field")
    params = params_of(guide)
    assert params["field$params"].shape == (weights_of(3 + 1, 4, (8,)),)
    assert guide.critic(params, jnp.ones((2, 3, 4))).shape == (2, 3, 4)
    assert not hasattr(guide, "sample_latent")
    assert guide.__name__ == "hand_written"


def two_sites():
    numpyro.sample("a", dist.HalfNormal(2.0))
    numpyro.sample("b", dist.Normal(2.0, 0.5))


@cache
def fitted():
    guide = with_critic(AutoDiagonalNormal(two_sites), hidden_dims=(4,))
    svi = SVI(two_sites, guide, optax.adam(3e-2), Trace_ELBO())
    return guide, svi.run(random.key(0), 20, progress_bar=False)


def test_everything_else_is_that_of_the_guide():
    guide, result = fitted()
    inner = AutoDiagonalNormal(two_sites)
    alone = SVI(two_sites, inner, optax.adam(3e-2), Trace_ELBO())
    # The critic's weights take a key, after all that the guide draws.
    assert jnp.allclose(alone.run(random.key(0), 20, progress_bar=False).losses, result.losses)
    key, params = random.key(1), result.params
    draws = guide.sample_posterior(key, params, sample_shape=(3,))
    same = inner.sample_posterior(key, params, sample_shape=(3,))
    assert draws.keys() == {"a", "b"} and all(jnp.array_equal(draws[k], same[k]) for k in draws)
    assert guide.latent_dim == 2 and guide.median(params) == inner.median(params)
    assert guide.quantiles(params, [0.1, 0.9])["a"].shape == (2,)
    predicted = Predictive(guide, params=params, num_samples=4)(key)
    assert predicted["a"].shape == (4,) and "critic$params" not in predicted
    again = pickle.loads(pickle.dumps(guide))
    assert again.median(params) == guide.median(params)
    assert jnp.array_equal(again.critic(params, jnp.ones(2)), guide.critic(params, jnp.ones(2)))


def amortised(x, subsample_size=None):
    with numpyro.plate("rows", len(x), subsample_size=subsample_size):
        batch = numpyro.subsample(x, event_dim=1)
        noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
        numpyro.sample("z", Implicit(jnp.stack([batch[:, 0] + noise, noise**2], -1), event_dim=1))


def rows_and_squares(x, subsample_size=None):
    batch = numpyro.subsample(x, event_dim=1)
    return jnp.concatenate([batch, batch[:, :1] ** 2], -1)


@pytest.mark.parametrize("subsample_size", [None, 3])
def test_an_amortised_critic_sees_the_latents_of_a_datum_beside_its_features(subsample_size):
    seen = []

    def features(x, subsample_size=None):
        seen.append(rows_and_squares(x, subsample_size))
        return seen[-1]

    guide = with_critic(amortised, stax.Dense(1), features=features)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(X, subsample_size)
    rows = trace["rows"]["value"]
    assert jnp.array_equal(seen[-1][:, :2], X[rows]) and len(rows) == (subsample_size or 5)
    params = {"critic$params": jnp.arange(6.0)}
    assert trace["critic$params"]["value"].shape == (2 + 3 + 1,)
    z = jnp.ones((4, len(rows), 2))
    expected = 1.0 + seen[-1] @ jnp.arange(2.0, 5.0) + 5.0
    assert jnp.allclose(guide.critic(params, z, seen[-1]), jnp.tile(expected, (4, 1)))


def test_what_does_not_fit_is_named():
    with pytest.raises(TypeError, match="wraps a guide, not its class"):
        with_critic(AutoNormal)
    twice = with_critic(with_critic(hand_written))
    with pytest.raises(ValueError, match=r"parameter 'critic\$params' already; give .* name"):
        params_of(twice)
    wrong = with_critic(hand_written, stax.Dense(3))
    with pytest.raises(ValueError, match=r"into \(2, 3\); it must give \(2, 1\)"):
        wrong.critic(params_of(wrong), jnp.ones((2, 4)))
    all_rows = with_critic(amortised, features=lambda x, subsample_size=None: x)
    with pytest.raises(ValueError, match=r"shape \(5, 2\), .* have 3 rows in the minibatch"):
        params_of(all_rows, X, 3)
    for features in (True, 0):
        with pytest.raises(ValueError, match=r"features, unless it is a function, .* an integer"):
            with_critic(hand_written, features=features)
    with pytest.raises(AttributeError, match="has no attribute 'median'"):
        _ = with_critic(hand_written).median
