"""The start of networks: widths by fan-in, on sites as users and modules name them."""

from functools import partial

import equinox as eqx
from flax import linen
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.module import random_eqx_module, random_flax_module
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.guides import init_to_fan_in

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.LayerNorm()(linen.Dense(16)(x)))
        return linen.Dense(1)(x)[..., 0]


class Eqx(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.last = eqx.nn.Linear(3, 16, key=key), eqx.nn.Linear(16, 1, key=key)
        self.norm = eqx.nn.LayerNorm(16)

    def __call__(self, x):
        return jax.vmap(lambda x: self.last(jax.nn.relu(self.norm(self.first(x))))[0])(x)


def linen_net():
    return random_flax_module("nn", Linen(), dist.Normal(0, 1), input_shape=(1, 3))


def eqx_net():
    return random_eqx_module("nn", Eqx(random.key(0)), dist.Normal(0, 1))


NETS = {"linen": linen_net, "Equinox": eqx_net}


def network(make, x, y):
    net = make()
    precision = numpyro.sample("precision", dist.Gamma(6, 6))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(net(x), precision**-0.5), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_modules_start_in_the_width_of_their_fan_in(name):
    """48 weights within 1/sqrt(3) and 16 within 1/4, filling the interval; biases 0, norms 1."""
    model = partial(network, NETS[name])
    guide = AutoNormal(model, init_loc_fn=init_to_fan_in())
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), X, jnp.ones(4)))
    seen = {"matrices": set(), "biases": 0, "norms": 0}
    for site, value in params.items():
        if not site.endswith("_auto_loc") or site.startswith("precision"):
            continue
        if value.ndim == 2:
            fan_in = 3 if value.size == 48 else 16
            assert 0.5 < jnp.max(jnp.abs(value)) * fan_in**0.5 <= 1
            seen["matrices"].add(value.size)
        elif "bias" in site:
            assert not jnp.any(value)
            seen["biases"] += 1
        else:
            np.testing.assert_array_equal(value, 1.0)
            seen["norms"] += 1
    assert seen == {"matrices": {16, 48}, "biases": 3, "norms": 1}
    assert 0.3 < params["precision_auto_loc"] + 1 < 2  # the median of the log, about -.06


def sites(x):
    numpyro.sample("kernel", dist.Normal(0, 9).expand([100, 4]).to_event(2))
    numpyro.sample("weight", dist.Normal(0, 9).expand([100, 4]).to_event(2))
    numpyro.sample("conv.kernel", dist.Normal(0, 9).expand([5, 5, 4, 2]).to_event(4))
    numpyro.sample("conv.weight", dist.Normal(0, 9).expand([2, 4, 5, 5]).to_event(4))
    numpyro.sample("conv.bias", dist.Normal(0, 9).expand([2, 1, 1]).to_event(3))
    numpyro.sample("independent", dist.Normal(0, 9).expand([100, 4]))
    numpyro.sample("told", dist.Normal(0, 9).expand([100, 4]).to_event(2), infer={"in_axis": -1})
    with numpyro.plate("networks", 6):
        numpyro.sample("several", dist.Normal(0, 9).expand([6, 25, 2]).to_event(2))
        numpyro.sample("vectors", dist.Normal(0, 9).expand([6, 5]).to_event(1))
        numpyro.sample("scales", dist.HalfNormal(2))
    numpyro.sample("vector", dist.Normal(3, 1).expand([5]).to_event(1))
    numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("x", dist.Normal(0, 1), obs=x)


def start(**options):
    strategy = init_to_fan_in(**options)
    fn = handlers.substitute(handlers.seed(sites, 1), substitute_fn=strategy)
    return {name: site["value"] for name, site in handlers.trace(fn).get_trace(0.5).items()}


@pytest.mark.slow
def test_the_fan_in_is_that_of_the_layer():
    result = start()
    fan_in = {"kernel": 100, "weight": 4, "conv.kernel": 100, "conv.weight": 100, "told": 4}
    for name, inputs in (fan_in | {"independent": 100, "several": 25}).items():
        assert 0.9 < jnp.max(jnp.abs(result[name])) * inputs**0.5 <= 1, name
    assert 0.6 < jnp.max(jnp.abs(result["vectors"])) * 5**0.5 <= 1  # 30 numbers
    for name in ("conv.bias", "vector"):
        assert not jnp.any(result[name]), name
    assert jnp.all(result["scales"] > 0.1) and float(result["simplex"].sum()) == pytest.approx(1)


@pytest.mark.nightly
def test_in_axis_is_told_for_all_or_by_site():
    everywhere, one = start(in_axis=-1), start(in_axis={"kernel": -1})
    for result, name, inputs in (
        (everywhere, "kernel", 4),
        (everywhere, "weight", 4),
        (one, "kernel", 4),
        (one, "independent", 100),
    ):
        assert 0.9 < jnp.max(jnp.abs(result[name])) * inputs**0.5 <= 1, name
    assert jnp.max(jnp.abs(start(in_axis=-2)["weight"])) <= 0.1
    with pytest.raises(
        ValueError, match=r"in_axis is 3, but site 'kernel' has the shape \(100, 4\)"
    ):
        start(in_axis=3)
