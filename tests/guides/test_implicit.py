"""`Implicit`: a draw that is differentiable and refuses to have a density."""

import jax
from jax import random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.guides import Implicit, IntractableDensityError


def model():
    numpyro.sample("w", dist.Normal(1.0, 2.0).expand([3]).to_event(1))


def guide():
    loc = numpyro.param("loc", jnp.array([0.5, -1.0, 2.0]))
    noise = numpyro.sample(
        "noise", dist.Normal().expand([3]).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("w", Implicit(loc + 0.1 * noise, event_dim=1))


def test_draw_is_the_value_and_carries_its_gradient():
    def draw(loc):
        with handlers.seed(rng_seed=0), handlers.substitute(data={"loc": loc}):
            return handlers.trace(guide).get_trace()["w"]["value"]

    loc = jnp.array([0.5, -1.0, 2.0])
    assert jnp.allclose(jax.jacobian(draw)(loc), jnp.eye(3))


def test_shapes_and_support():
    d = Implicit(jnp.ones((4, 3)), event_dim=1, support=constraints.positive)
    assert (d.batch_shape, d.event_shape) == ((4,), (3,))
    assert d.has_rsample
    assert d.support.event_dim == 1
    assert d.support(jnp.ones((4, 3))).all() and not d.support(-jnp.ones((4, 3))).any()
    assert d.sample(random.key(0), (2,)).shape == (2, 4, 3)


def test_stock_loss_raises_instead_of_collapsing():
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    with pytest.raises(IntractableDensityError, match="ImplicitELBO"):
        svi.run(random.key(0), 2, progress_bar=False)


def test_survives_jit_and_vmap():
    d = jax.vmap(lambda v: Implicit(v, event_dim=1))(jnp.ones((4, 3)))
    assert jax.jit(lambda d: d.sample(random.key(0)).sum())(d) == 12.0


def test_event_dim_beyond_value_is_an_error():
    with pytest.raises(ValueError, match="event_dim is 2"):
        Implicit(jnp.ones(3), event_dim=2)
