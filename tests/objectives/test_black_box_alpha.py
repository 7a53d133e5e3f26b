"""BBAlphaELBO: laws that tie it to VRELBO and the ELBO, and its known fixed points."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import VRELBO, BBAlphaELBO
from tests.objectives.compare import assert_same
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    floats,
    guide_draws,
    linear_gaussian,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
    value_and_grad,
)


@pytest.mark.slow
def test_without_global_latents_it_is_the_renyi_bound():
    kinds = [(a, kl) for a in (-0.5, 1.0) for kl in (False, True)]
    ours = [BBAlphaELBO(a, 4, approximate_kl=kl) for a, kl in kinds]
    theirs = [VRELBO(1 - a, 4) for a, _ in kinds]
    args = (LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 3)
    got = value_and_grad(ours + theirs, *args)
    assert_same(got[: len(ours)], got[len(ours) :], 5e-5)


@pytest.mark.slow
def test_order_zero_and_one_particle_are_the_elbo():
    params, stock = {"c": 0.4}, partial(VRELBO, 1.0, gradient="standard")
    zero = [BBAlphaELBO(0.0, 3), BBAlphaELBO(0, 3, approximate_kl=True), stock(3)]
    one = [BBAlphaELBO(-2.0, 1, approximate_kl=kl) for kl in (False, True)]
    got = value_and_grad([*zero, *one, stock(1)], params, mixed_model, mixed_guide, X_LOCAL, 2)
    for i, elbo in ((0, 2), (1, 2), (3, 5), (4, 5)):
        assert_same(got[i], got[elbo], 5e-5)


@pytest.mark.x64
@pytest.mark.parametrize("approximate_kl", [False, True])
def test_global_and_local_latents_by_hand(approximate_kl, tol):
    """The tied energy, from the log densities of the particles that the loss draws."""
    alpha, key = 0.6, random.key(3)
    loss = BBAlphaELBO(alpha, 3, approximate_kl=approximate_kl)
    got = -jax.jit(lambda: loss.loss(key, floats({"c": 0.4}), mixed_model, mixed_guide))()
    drawn = guide_draws(key, 3, mixed_guide, {"c": 0.4})
    w, z = drawn["w"], drawn["z"]
    shared = dist.Normal(0.2, 1.0).log_prob(w) - dist.Normal(0.4, 0.6).log_prob(w)
    local = dist.Normal(w[:, None], 1.0).log_prob(z) + dist.Normal(z, 0.8).log_prob(X_LOCAL)
    local = local - dist.Normal(0.4 * X_LOCAL, 0.7).log_prob(z)
    if not approximate_kl:
        local = local + shared[:, None] / 6
    exact = jnp.sum(jnp.log(jnp.mean(jnp.exp(alpha * local), 0))) / alpha
    exact = exact + (jnp.mean(shared) if approximate_kl else 0.0)
    np.testing.assert_allclose(got, exact, rtol=tol(1e-5, 1e-12))


def test_the_data_plate_must_be_known():
    def pixels():
        with numpyro.plate("image", 3):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            with numpyro.plate("pixel", 4):
                numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.zeros((4, 3)))

    def guide():
        with numpyro.plate("image", 3):
            numpyro.sample("z", dist.Normal(0.1, 1.0))

    def loss(model, guide, *args):
        params = {"m": 0.0, "s": 1.0}
        return jax.eval_shape(
            lambda: BBAlphaELBO().loss(random.key(0), params, model, guide, *args)
        )

    with pytest.raises(ValueError, match=r"'z' only in \['image'\].*to_event"):
        loss(pixels, guide)
    with pytest.raises(ValueError, match=r"no plate encloses all observed sites \['x'\]"):
        loss(linear_gaussian, normal_guide, 1.0)


def seen_in_part(x, seen, batch=None):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch) as idx:
        numpyro.sample("x", dist.Normal(z, 1.0).mask(seen[idx]), obs=x[idx])


@pytest.mark.slow
def test_a_masked_row_is_no_factor():
    """All rows, and the mean of minibatches, whose N is a guess: with 4 of 8 rows and alpha = 1
    that moves the loss by less than the error of 1,000 of them."""
    x, seen = jnp.array([0.3, 1.1, -0.4, 0.9, 5.0, 6.0, 7.0, 8.0]), jnp.arange(8) < 4

    def guide(*args):
        numpyro.sample("z", dist.Normal(0.4, 0.5))

    def values(*args):
        loss = lambda key: BBAlphaELBO(1.0, 4).loss(key, {}, seen_in_part, guide, *args)  # noqa: E731
        return np.asarray(jax.jit(jax.vmap(loss))(random.split(random.key(0), 1000)), float)

    whole, batches = values(x, seen), values(x, seen, 6)
    np.testing.assert_allclose(whole, values(x[:4], seen[:4]), rtol=1e-5)
    assert abs((batches - whole).mean()) < 4 * (batches - whole).std() / 1000**0.5


def with_effects(y, share=1.5**2 / (1.5**2 + 0.6**2)):
    """y ~ N(z, .6^2), z ~ N(theta, 1.5^2), so that y ~ N(theta, 1.5^2 + .6^2)."""
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", 6, subsample_size=len(y)):
        z = numpyro.sample("z", dist.Normal(theta, 1.5))
        numpyro.sample("y", dist.Normal(z, 0.6), obs=y)


def integrated(y, share=0.0):
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", 6, subsample_size=len(y)):
        numpyro.sample("y", dist.Normal(theta, (1.5**2 + 0.6**2) ** 0.5), obs=y)


def of_theta(y, share=0.0):
    m, s = numpyro.param("m", 0.0), numpyro.param("s", 1.0)
    return numpyro.sample("theta", dist.Normal(m, s))


def recognised(y, share=1.5**2 / (1.5**2 + 0.6**2)):
    """A recognition network of row and theta, exact for its default."""
    theta = of_theta(y)
    with numpyro.plate("rows", 6, subsample_size=len(y)):
        loc = share * y + (1 - share) * theta
        numpyro.sample("z", dist.Normal(loc, (1.5**-2 + 0.6**-2) ** -0.5))


GUIDE, ROWS = {"m": 0.9, "s": 0.5}, jnp.array([0.3, 2.5, -1.0])


@pytest.mark.slow
def test_an_exact_recognition_network_is_the_integral_of_local_latents():
    """Value and gradient, draw by draw: the ratio p(x, z) / q(z) is p(x) at every z."""
    losses = [BBAlphaELBO(alpha, 5) for alpha in (-1.0, 0.5, 2.0)]
    ours = value_and_grad(losses, GUIDE, with_effects, recognised, ROWS)
    theirs = value_and_grad(losses, GUIDE, integrated, of_theta, ROWS)
    assert_same(ours, theirs, 1e-4)
