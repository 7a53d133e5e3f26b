"""`ImplicitGuide` and `FlowGuide`: closed forms of a linear model, new data, plates, errors."""

from functools import cache, partial
import pickle

import jax
from jax import random
from jax.example_libraries import stax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
import pytest

from numpyro_ext.guides import FlowGuide, ImplicitGuide
from numpyro_ext.objectives import ImplicitELBO

# z ~ N(PRIOR, I), x ~ N(z W, .7^2 I): two latents and three numbers per row.
W = jnp.array([[1.0, 0.5, 0.3], [0.9, 0.8, -0.2]])
PRIOR = jnp.array([2.0, -3.0])
N = 40


@jax.jit
def made():
    """The covariance of the posterior, and data."""
    noise = random.normal(random.key(1), (N, 3))
    x = (PRIOR + random.normal(random.key(0), (N, 2))) @ W + 0.7 * noise
    return jnp.linalg.inv(jnp.eye(2) + W @ W.T / 0.49), x


S, X = made()


def linear(x, batch=None):
    with numpyro.plate("rows", len(x), subsample_size=batch):
        z = numpyro.sample("z", dist.Normal(PRIOR, 1.0).to_event(1))
        numpyro.deterministic("sum", z.sum(-1))
        x = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", dist.Normal(z @ W, 0.7).to_event(1), obs=x)


def features(x, batch=None):
    return numpyro.subsample(x, event_dim=1)


def posterior_mean(x):
    return (x @ W.T / 0.49 + PRIOR) @ S


def log_evidence(x):
    return dist.MultivariateNormal(PRIOR @ W, W.T @ W + 0.49 * jnp.eye(3)).log_prob(x)


def run(guide, loss, num_steps, *args, rate=1e-2):
    optim = optax.adam(optax.cosine_decay_schedule(rate, num_steps))
    svi = SVI(guide.model, guide, optim, loss)
    return svi.run(random.key(2), num_steps, *args, progress_bar=False).params


@cache
def implicit():
    guide = ImplicitGuide(linear, stax.Dense(2), plate="rows", features=features)
    return guide, run(guide, ImplicitELBO(50), 1500, X, 8, rate=3e-2)


@pytest.mark.nightly
def test_implicit_guide_finds_the_posterior_of_every_row_from_minibatches():
    _, params = implicit()
    assert set(params) == {"auto_net$params"}
    weights = params["auto_net$params"][:10].reshape(5, 2)  # three features, then two of noise
    bias = params["auto_net$params"][10:]
    assert jnp.allclose(X @ weights[:3] + bias, posterior_mean(X), atol=0.1)
    # The ridge of the score estimate narrows by some per cent.
    assert jnp.allclose(weights[3:].T @ weights[3:], S, atol=0.12 * S.max())


@pytest.mark.slow
def test_draws_are_for_all_rows_of_any_data():
    guide, params = implicit()
    # Fewer rows than a minibatch of the training has.
    draws = guide.sample_posterior(random.key(3), params, X[:7], 8, sample_shape=(3, 4))
    assert draws["z"].shape == (3, 4, 7, 2) and draws["sum"].shape == (3, 4, 7)
    assert jnp.allclose(draws["sum"], draws["z"].sum(-1), atol=1e-5)
    one = guide.sample_posterior(random.key(3), params, X)
    assert one["z"].shape == (N, 2)
    new = 2.0 * X[:5]
    predictive = Predictive(linear, guide=guide, params=params, num_samples=2000)
    assert predictive(random.key(4), new, 3)["sum"].shape == (2000, 3)  # a minibatch
    many = guide.sample_posterior(random.key(5), params, new, sample_shape=(4000,))["z"]
    assert jnp.allclose(many.mean(0), posterior_mean(new), atol=0.25)
    assert jnp.allclose(many.std(0), jnp.sqrt(jnp.diagonal(S)), rtol=0.15)


MEAN_FIELD = jax.jit(lambda: 1 / jnp.diagonal(jnp.linalg.inv(S)))()  # conditional variances
# What a diagonal normal loses in each row.
LOST = jax.jit(lambda: (jnp.linalg.slogdet(S)[1] - jnp.log(MEAN_FIELD).sum()) / 2)()


@pytest.mark.nightly
def test_normal_of_the_network_is_the_best_diagonal_one():
    """Where it is that one, the loss is its own, and no gradient is left in the mean."""
    guide = FlowGuide(linear, stax.Dense(4), plate="rows", features=features, num_flows=0)
    handlers.seed(guide, 0)(X, 20)
    slope = jnp.concatenate([W.T @ S / 0.49, jnp.zeros((3, 2))], axis=1)
    best = jnp.concatenate([slope.ravel(), PRIOR @ S, jnp.log(MEAN_FIELD) / 2])
    q = guide.get_posterior({"auto_net$params": best}, X)
    assert jnp.allclose(q.mean, posterior_mean(X), rtol=1e-4, atol=1e-4)
    assert jnp.allclose(q.variance, MEAN_FIELD, rtol=1e-4)

    @jax.jit
    def moments(net):
        def one(key):
            loss = lambda net: Trace_ELBO().loss(  # noqa: E731
                key, {"auto_net$params": net}, linear, guide, X, 20
            )
            return jax.value_and_grad(loss)(net)

        result = jax.vmap(one)(random.split(random.key(2), 4000))
        return jax.tree.map(lambda x: (x.mean(0), x.std(0) / 4000**0.5), result)

    (loss, error), (gradient, gradient_error) = moments(best)
    assert jnp.abs(loss - (N * LOST - log_evidence(X).sum())) < 4 * error
    assert (jnp.abs(gradient) < 4.5 * gradient_error).all()
    # The test can fail: a twentieth away there is one in most weights.
    _, (gradient, gradient_error) = moments(best + 0.05)
    assert (jnp.abs(gradient) > 4.5 * gradient_error).mean() > 0.5


def mixed(x):
    """Global latents, one of them positive, and two local sites, one of them positive."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x), dim=-2):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        m = numpyro.sample("m", dist.Normal(b, 1.0).expand([1]).to_event(1))
        numpyro.sample("x", dist.Normal(m[..., 0] + rate, scale), obs=x[:, :1])


def whole(x):
    return x


def net_init(rng_key, input_shape):
    return (7,), 0.3 * random.normal(rng_key, (input_shape[-1], 7))


def net_apply(weights, x):
    return jnp.tanh(x @ weights)


@pytest.mark.slow
@pytest.mark.x64
def test_density_is_that_of_autodiff_with_constrained_sites_and_a_plate_elsewhere(tol):
    guide = FlowGuide(mixed, (net_init, net_apply), plate="rows", features=lambda x: x)
    svi = SVI(mixed, guide, optax.adam(1e-2), Trace_ELBO())
    x = X[:4]
    flat, unravel = ravel_pytree(svi.get_params(svi.init(random.key(0), x)))
    params = unravel(flat + 0.1 * jnp.abs(random.normal(random.key(8), flat.shape)))

    @jax.jit
    def densities(params):
        seeded = handlers.seed(handlers.substitute(guide, params), 1)
        trace = handlers.trace(seeded).get_trace(x)
        names = ("_auto_local", "rate", "m")
        by_site = sum(trace[name]["fn"].log_prob(trace[name]["value"]).ravel() for name in names)
        z = trace["_auto_local"]["value"].reshape(4, 2)
        q = guide.get_posterior(params, x)
        base = q.transforms
        e = z
        for transform in reversed(base):
            e = transform.inv(e)

        def one_row(e, i):
            z = jnp.zeros((4, 2)).at[i].set(e)
            for transform in base:
                z = transform(z)
            return z[i]

        J = jax.vmap(jax.jacobian(one_row))(e, jnp.arange(4))
        expected = dist.Normal().log_prob(e).sum(1) - jnp.linalg.slogdet(J)[1]
        rate, m = trace["rate"]["value"], trace["m"]["value"]
        return by_site, q.log_prob(z), expected, z, rate, m

    by_site, log_q, expected, z, rate, m = densities(params)
    assert rate.shape == (4, 1) and m.shape == (4, 1, 1)
    assert jnp.allclose(jnp.log(rate[:, 0]), z[:, 0], atol=1e-5)
    assert jnp.allclose(m[:, 0, 0], z[:, 1])
    assert jnp.allclose(log_q, expected, atol=tol(2e-4, 1e-10))
    # The positive site is exp of its coordinate.
    assert jnp.allclose(by_site, expected - z[:, 0], atol=tol(2e-4, 1e-10))


flow = partial(FlowGuide, plate="rows", features=whole)
implicit_guide = partial(ImplicitGuide, plate="rows", features=whole)


@pytest.mark.nightly
def test_latents_outside_the_plate_are_those_of_another_guide():
    guide = flow(mixed, (net_init, net_apply), num_flows=0, global_guide=AutoMultivariateNormal)
    svi = SVI(mixed, guide, optax.adam(1e-2), Trace_ELBO())
    x = X[:4]  # as in the test above, which has compiled the model's operations
    state, loss = jax.jit(svi.update)(svi.init(random.key(0), x), x)
    assert jnp.isfinite(loss)
    params = svi.get_params(state)
    assert params["auto_scale_tril"].shape == (2, 2)
    again = pickle.loads(pickle.dumps(guide))
    draw = jax.jit(lambda p: guide.sample_posterior(random.key(1), p, X[:6], sample_shape=(5,)))
    draws = draw(params)
    assert jax.tree.map(jnp.shape, draws) == {
        "scale": (5,),
        "b": (5,),
        "rate": (5, 6, 1),
        "m": (5, 6, 1, 1),
    }
    assert again.get_posterior(params, X[:6]).batch_shape == (6,)
    assert (draws["scale"] > 0).all() and (draws["rate"] > 0).all()


def by_entry(x):
    with numpyro.plate("rows", len(x)):
        numpyro.sample("z", dist.Uniform(0.0, jnp.arange(1.0, len(x) + 1)))


def nested(x):
    with numpyro.plate("columns", 3), numpyro.plate("rows", len(x)):
        numpyro.sample("z", dist.Normal())


def scalar(x):
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal())
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: flow(linear, None), TypeError, "must be a stax pair"),
        (
            lambda: implicit_guide(linear, stax.Dense(3)),
            ValueError,
            r"turns shape \(40, 5\) into \(40, 3\); it must give \(40, 2\), the 2 latent numbers",
        ),
        (
            lambda: FlowGuide(linear, stax.Dense(4), plate="rows", features=lambda x: x[:30]),
            ValueError,
            r"shape \(30, 3\), but the plate 'rows' has 40 of 40 rows; the shape must be \(40, n",
        ),
        (
            lambda: FlowGuide(linear, stax.Dense(4), plate="data", features=whole),
            ValueError,
            r"in the plate 'data'; the plates of the model are \['rows'\]",
        ),
        (lambda: flow(scalar, stax.Dense(3)), ValueError, "use num_flows=0"),
        (lambda: flow(by_entry, stax.Dense(2)), ValueError, "support of latent site 'z' differs"),
        (
            lambda: flow(nested, stax.Dense(2)),
            ValueError,
            r"plates \['columns'\] beside 'rows'",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, error, match):
    with pytest.raises(error, match=match):
        handlers.seed(make(), 0)(X)
