"""`Implicit`: a draw that is differentiable and refuses to have a density."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import (
    RenyiELBO,
    TraceMeanField_ELBO,
)
import pytest

from numpyro_ext._model.implicit import has_density
from numpyro_ext._numpyro import without_rsample_stop_gradient
from numpyro_ext.guides import Implicit, IntractableDensityError


def model():
    w = numpyro.sample("w", dist.Normal(1.0, 2.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(w.sum(), 1.0))


def guide():
    loc = numpyro.param("loc", jnp.array([0.5, -1.0, 2.0]))
    noise = numpyro.sample(
        "noise", dist.Normal().expand([3]).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("w", Implicit(loc + 0.1 * noise, event_dim=1))


def test_draw_is_the_value_and_carries_its_gradient():
    def draw(loc):
        with handlers.seed(rng_seed=0), handlers.substitute(data={"loc": loc}):
            with without_rsample_stop_gradient():
                return handlers.trace(guide).get_trace()["w"]["value"]

    loc = jnp.array([0.5, -1.0, 2.0])
    assert jnp.allclose(jax.jacobian(draw)(loc), jnp.eye(3))
    assert draw(loc).dtype == loc.dtype


def test_shapes_and_support():
    d = Implicit(jnp.ones((4, 3)), event_dim=1, support=constraints.positive)
    assert (d.batch_shape, d.event_shape) == ((4,), (3,))
    assert d.has_rsample
    assert d.support.event_dim == 1 and not d.support.is_discrete
    assert d.support(jnp.ones((4, 3))).all() and not d.support(-jnp.ones((4, 3))).any()
    assert d.sample(random.key(0)).shape == d.rsample(random.key(0)).shape == (4, 3)
    simplex = Implicit(jnp.ones((4, 3)) / 3, event_dim=2, support=constraints.simplex)
    assert simplex.support.event_dim == 2 and simplex.support(simplex.value)


@pytest.mark.parametrize(
    "loss",
    [TraceMeanField_ELBO(), RenyiELBO(alpha=0.5, num_particles=2)],
    ids=lambda loss: type(loss).__name__,
)
def test_stock_loss_raises_instead_of_collapsing(loss):
    hidden = handlers.block(model, hide=["y"])
    with pytest.raises(IntractableDensityError, match="SVGD"):
        loss.loss(random.key(0), {"loc": jnp.ones(3)}, hidden, guide)


WRAPPED = {
    "bare": lambda d: d,
    "to_event": lambda d: d.to_event(1),
    "expand": lambda d: d.expand((1, 4)),
    "mask": lambda d: d.mask(jnp.array([True, True, False, True])),
    "expand, to_event, mask": lambda d: d.expand((1, 4)).to_event(1).mask(jnp.array([True])),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_has_no_density_however_it_is_wrapped(wrap):
    d = wrap(Implicit(jnp.ones((4, 3)), event_dim=1))
    assert not has_density(d)
    assert d.has_rsample
    assert jnp.array_equal(d.sample(random.key(0)).reshape(4, 3), jnp.ones((4, 3)))
    with pytest.raises(IntractableDensityError):
        d.log_prob(jnp.ones((4, 3)))
    stock = wrap(dist.Normal(jnp.zeros((4, 3)), 1).to_event(1))
    assert has_density(stock)


def test_survives_jit_vmap_scan_and_pickle():
    d = jax.vmap(lambda v: Implicit(v, event_dim=1))(jnp.ones((4, 3)))
    assert (d.batch_shape, d.event_shape, d.shape()) == ((4,), (3,), (4, 3))
    assert jax.jit(lambda d: d.sample(random.key(0)).sum())(d) == 12.0
    assert jax.vmap(lambda d: jnp.array(d.batch_shape).size)(d).tolist() == [0, 0, 0, 0]
    assert pickle.loads(pickle.dumps(d)).shape() == (4, 3)

    def chain():
        def step(z, _):
            noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
            z = numpyro.sample("z", Implicit(0.9 * z + noise))
            return z, None

        scan(step, 0.0, None, length=5)

    site = handlers.trace(handlers.seed(chain, 0)).get_trace()["z"]
    assert site["fn"].batch_shape == site["value"].shape == (5,)


def test_plate_takes_a_value_of_its_shape_and_refuses_copies():
    def rows(shape):
        with numpyro.plate("outer", 1, dim=-2), numpyro.plate("N", 5, dim=-1):
            return numpyro.sample("w", Implicit(jnp.ones(shape)))

    assert rows((5,)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"batch shape \(\) is asked for batch shape \(5,\)"):
        rows(())
    with pytest.raises(ValueError, match="but it holds one draw"):
        Implicit(jnp.ones(3), event_dim=1).sample(random.key(0), (2,))
