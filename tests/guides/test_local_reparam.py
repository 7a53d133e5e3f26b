"""local_reparam: the loss and gradient of one draw of the weights in expectation, less noise."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

from numpyro_ext.guides import linear, local_reparam
from numpyro_ext.objectives import VRELBO

X = random.normal(random.key(0), (40, 3)) + 0.2
Y = jnp.sin(X[:, 0])
HIDDEN = 5


def model(X, y=None, batch=None):
    w0 = numpyro.sample("w0", dist.Normal(0, 1).expand([3, HIDDEN]).to_event(2))
    w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([HIDDEN]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(6, 6))
    with numpyro.plate("data", len(X), subsample_size=batch):
        x = numpyro.subsample(X, event_dim=1)
        f = linear(jnp.tanh(linear(x, w0, site="w0")), w1, site="w1")
        obs = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(f, precision**-0.5), obs=obs)


@pytest.fixture(scope="module")
def guide_and_params():
    guide = AutoNormal(model)
    svi = SVI(local_reparam(model, guide), guide, optax.adam(0.02), TraceMeanField_ELBO())
    start = svi.get_params(svi.init(random.key(1), X, Y))
    keys = random.split(random.key(2), len(start))
    params = {
        name: jnp.exp(-2.0 + 0.3 * random.normal(key, x.shape))
        if name.endswith("scale")
        else 0.5 * random.normal(key, x.shape)
        for (name, x), key in zip(sorted(start.items()), keys, strict=True)
    }
    return guide, params


@pytest.mark.slow
def test_loss_and_gradient_have_the_expectation_of_a_shared_draw(guide_and_params):
    guide, params = guide_and_params
    draws, batch = 4000, 10

    def moments(model):
        def one(key):
            loss = TraceMeanField_ELBO().loss
            value, grad = jax.value_and_grad(lambda p: loss(key, p, model, guide, X, Y, batch))(
                params
            )
            return jnp.append(ravel_pytree(grad)[0], value)

        result = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=500))(
            random.split(random.key(3), draws)
        )
        return result.mean(0), result.var(0)

    (shared, noise), (local, less) = moments(model), moments(local_reparam(model, guide))
    error = jnp.sqrt((noise + less) / draws)
    assert (jnp.abs(shared - local) < 5 * error).all()


def test_variance_of_one_layer_is_that_of_independent_rows():
    """A linear map whose rows are alike: the likelihoods of the shared draw are all the same."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(linear(x, w, site="w"), 1.0), obs=y)

    guide = AutoNormal(model)
    wrapped = local_reparam(model, guide)
    params = {"w_auto_loc": jnp.array([0.5, -1.0]), "w_auto_scale": jnp.array([0.3, 0.6])}
    for rows in (5, 20):
        x, y = jnp.tile(jnp.array([[2.0, 1.0]]), (rows, 1)), jnp.full(rows, 0.7)

        def variance(fn, x=x, y=y):
            one = lambda key: TraceMeanField_ELBO().loss(key, params, fn, guide, x, y)  # noqa: E731
            return jnp.var(jax.vmap(one)(random.split(random.key(4), 20_000)))

        shared, local = jax.jit(lambda: (variance(model), variance(wrapped)))()
        # f ~ N(0, v), v = 4 * .09 + .36 = .72, and a row's loss (f - .7)^2 / 2 has the variance
        # v^2 / 2 + .49 v; the relative error of these estimates is below sqrt(15 / 20000) = .03.
        of_a_row = 0.72**2 / 2 + 0.49 * 0.72
        assert abs(local / (rows * of_a_row) - 1) < 0.15
        assert abs(shared / (rows**2 * of_a_row) - 1) < 0.15


@pytest.mark.nightly
def test_rows_of_zeros_have_a_finite_gradient(guide_and_params):
    guide, params = guide_and_params
    loss = TraceMeanField_ELBO().loss
    wrapped, zeros = local_reparam(model, guide), X.at[:5].set(0.0)
    grad = jax.jit(jax.grad(lambda p: loss(random.key(0), p, wrapped, guide, zeros, Y)))(params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grad))


def test_outside_of_training_it_is_the_plain_model(guide_and_params):
    guide, params = guide_and_params

    def predicted(params, fn):
        return Predictive(fn, guide=guide, params=params, num_samples=3)(random.key(5), X)["y"]

    plain, wrapped = jax.jit(
        lambda params: [predicted(params, fn) for fn in (model, local_reparam(model, guide))]
    )(params)
    assert jnp.allclose(plain, wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO(), VRELBO(0.5, 3)])
def test_a_loss_that_needs_the_density_of_the_weights_is_an_error(guide_and_params, loss):
    guide, _ = guide_and_params
    svi = SVI(local_reparam(model, guide), guide, optax.adam(0.02), loss)
    with pytest.raises(ValueError, match="use TraceMeanField_ELBO"):
        svi.update(svi.init(random.key(0), X, Y), X, Y)


def of_one(call, prior=None):
    def model(x):
        fn = dist.Normal(0, 1) if prior is None else prior
        w = numpyro.sample("w", fn.expand([3]).to_event(1))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", dist.Normal(call(x, w), 1.0), obs=jnp.zeros(len(x)))

    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (of_one(lambda x, w: x @ w), "calls no linear"),
        (of_one(lambda x, w: linear(x, w, site="v")), "site='v', which is no latent site"),
        (of_one(lambda x, w: linear(x, 2 * w, site="w")), "another array than the value"),
        (of_one(lambda x, w: linear(x, w, site="w") + linear(x, w, site="w")), "called twice"),
        (of_one(lambda x, w: linear(x, w, site="w"), dist.Laplace()), "the model draws 'w' from"),
    ],
)
def test_what_the_model_must_not_do(model, message):
    guide = AutoNormal(model)
    svi = SVI(local_reparam(model, guide), guide, optax.adam(0.02), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=message):
        svi.init(random.key(0), X)


def test_guides_whose_sites_are_no_normals_are_errors():
    guide = AutoDelta(model)
    svi = SVI(local_reparam(model, guide), guide, optax.adam(0.02), TraceMeanField_ELBO())
    with pytest.raises(ValueError, match=r"the guide draws '.*' from Delta"):
        svi.init(random.key(0), X)
    with pytest.raises(ValueError, match="give it the plain one"):
        local_reparam(model, AutoNormal(local_reparam(model, AutoNormal(model))))
