"""A penalty of expectations under q, around any loss: closed forms of normal guides."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

from numpyro_ext.objectives import (
    VRELBO,
    BBAlphaELBO,
    PosteriorRegularizedELBO,
    count_steps,
)

PARAMS = {"m": jnp.array(0.4), "s": jnp.array(0.7)}
S = 4


def model(factor=None):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    f = numpyro.deterministic("f", 2.0 * z - 1.0)  # N(-0.2, 1.4^2) under the guide
    if factor is not None:
        numpyro.factor("penalty", -factor(f))


def guide(factor=None):
    m = numpyro.param("m", 0.0)
    numpyro.sample("z", dist.Normal(m, numpyro.param("s", 1.0)))


MEAN, SD = -0.2, 1.4


class Nothing(Trace_ELBO):
    """A base of 0, so that the penalty is seen alone."""

    def loss_with_mutable_state(self, *args, **kwargs):
        return {"loss": jnp.zeros(()), "mutable_state": None}


@partial(jax.jit, static_argnums=(0, 1))
def values(loss, factor=None):
    """Mean and standard error of the loss and of its gradient in m and s, over 20,000 keys."""

    def one(key):
        value, grad = jax.value_and_grad(
            lambda p: loss.loss(key, p, model, guide, **({"factor": factor} if factor else {}))
        )(PARAMS)
        return jnp.stack([value, grad["m"], grad["s"]])

    found = jax.vmap(one)(random.split(random.key(0), 20_000))
    return found.mean(0), found.std(0) / 20_000**0.5


def is_near(found, expected):
    """Within 5 standard errors."""
    mean, error = map(np.asarray, found)
    assert np.all(np.abs(mean - expected) < 5 * error + 1e-5), (mean, expected, error)


def square(e):
    return 3.0 * e**2


def hinge(e):
    return 3.0 * jax.nn.relu(0.5 - e)


def test_a_quadratic_penalty_has_the_gradient_of_the_mean_alone():
    """d/dm 3 (2 m - 1)^2, and 0 in s; the value is too large by 3 Var f / S."""
    found = values(PosteriorRegularizedELBO(Nothing(), {"f": square}, S))
    is_near(found, [3 * MEAN**2 + 3 * SD**2 / S, 6 * MEAN * 2, 0.0])


def test_a_hinge_has_the_bias_that_is_stated():
    """Mean and slope of 3 relu(.5 - e) at e ~ N(-.2, 1.4^2 / S), which is a hinge that is rounded
    by the noise of the mean; the slope is that at the mean of the S - 1 other draws."""
    found = values(PosteriorRegularizedELBO(Nothing(), {"f": hinge}, S))
    normal = dist.Normal(0.0, 1.0)
    noise = SD / S**0.5
    u = (0.5 - MEAN) / noise
    value = 3 * noise * (jnp.exp(normal.log_prob(u)) + u * normal.cdf(u))
    assert value - 3 * (0.5 - MEAN) < 0.4 * 3 * noise
    slope = -3 * 2 * normal.cdf((0.5 - MEAN) / (SD / (S - 1) ** 0.5))
    is_near(found, [value, slope, 0.0])


def test_a_penalty_of_zero_is_the_base():
    """Value and gradient, of the same key and minibatch."""
    base = BBAlphaELBO(0.5, 3)

    def rows(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=2):
            numpyro.sample("y", dist.Normal(z, 1.0), obs=numpyro.subsample(y, 0))

    def q(y):
        return guide()

    @jax.jit
    def both(params, y):
        loss = PosteriorRegularizedELBO(base, {"z": lambda e: 0.0 * e}, 2)
        return [
            jax.value_and_grad(lambda p, x=x: x.loss(random.key(3), p, rows, q, y))(params)
            for x in (base, loss)
        ]

    found = both(PARAMS, jnp.arange(6.0))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *found)


@pytest.mark.slow
def test_rows_of_a_minibatch_stand_for_all():
    """Of constants per row, the same in all minibatches; of others, on average (5 errors)."""
    y = jnp.array([0.3, -1.0, 2.0, 0.1, 1.3, -0.4])

    def rows(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 6, subsample_size=4):
            batch = numpyro.subsample(y, 0)
            numpyro.deterministic("one", z + 0 * batch)
            numpyro.deterministic("margin", z * batch)
            numpyro.sample("y", dist.Normal(z, 1.0), obs=batch)

    def q(y):
        numpyro.sample("z", dist.Delta(numpyro.param("m", 1.0)))

    loss = PosteriorRegularizedELBO(Nothing(), {"one": jnp.square, "margin": hinge}, 2)
    keys = random.split(random.key(0), 4000)
    found = jax.vmap(lambda key: loss.loss(key, {"m": jnp.array(0.7)}, rows, q, y))(keys)
    expected = 6 * 0.7**2 + jnp.sum(hinge(0.7 * y))
    is_near((found.mean(), found.std() / 4000**0.5), expected)
    one = PosteriorRegularizedELBO(Nothing(), {"one": jnp.square}, 2)
    value = one.loss(random.key(1), {"m": jnp.array(0.7)}, rows, q, y)
    assert value == pytest.approx(6 * 0.7**2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss is NaN")
def test_the_state_is_that_of_the_base_and_a_step_is_none_as_a_whole():
    loss = PosteriorRegularizedELBO(
        VRELBO(lambda i: jnp.minimum(i / 10, 1.0), 3), {"f": lambda e: jnp.nan * e}, 3
    )
    svi = SVI(model, count_steps(guide), optax.adam(0.1), loss)
    state = svi.init(random.key(0))
    state, value = svi.update(state)
    assert jnp.isnan(value)
    assert svi.get_params(state)["m"] == 0.0
    fine = PosteriorRegularizedELBO(loss.base, {"f": square}, 3)
    svi = SVI(model, count_steps(guide), optax.adam(0.1), fine)
    state = svi.init(random.key(0))
    for _ in range(2):
        state, value = svi.update(state)
    assert state.mutable_state["_objective_step"]["step"] == 2


def test_wrong_calls_are_sentences():
    def one_for_all(y):
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("rows", 6, subsample_size=2):
            numpyro.deterministic("f", z)
            numpyro.sample("y", dist.Normal(z), obs=numpyro.subsample(y, 0))

    auto = AutoDelta(one_for_all)
    svi = SVI(
        one_for_all, auto, optax.adam(0.1), PosteriorRegularizedELBO(Trace_ELBO(), {"f": square})
    )
    state = svi.init(random.key(0), jnp.zeros(6))
    with pytest.raises(ValueError, match="must have a number for each row"):
        svi.update(state, jnp.zeros(6))
