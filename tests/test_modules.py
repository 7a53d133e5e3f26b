"""Guides, critics and recognition networks take modules of Flax and Equinox for a stax pair.

The four networks of the table below have the same weights. Losses of three steps of gradient
descent are equal only if values and gradients are.
"""

import pickle

import equinox as eqx
from flax import linen, nnx
import jax
from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext._networks import as_pair
from numpyro_ext.expfam import Gaussian
from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoImplicit,
    AutoRealNVPNormal,
    FlowGuide,
    with_critic,
)
from numpyro_ext.objectives import DensityRatioELBO
from numpyro_ext.svae import SVAEELBO, FixedGaussian, GaussianPotential, SVAEGuide

N, UNITS = 6, 4
X = random.normal(random.key(0), (N, 3)) + jnp.array([1.0, 0.0, -0.5])
IMAGES = random.normal(random.key(1), (N, 8, 8, 1))


def weights(inputs, outputs):
    rng = np.random.RandomState(inputs + 10 * outputs)
    shapes = (inputs, UNITS), (UNITS,), (UNITS, outputs), (outputs,)
    return [jnp.asarray(0.5 * rng.standard_normal(shape)) for shape in shapes]


def given(value):
    return lambda *_, **__: value


class Linen(linen.Module):
    inputs: int
    outputs: int

    @linen.compact
    def __call__(self, x):
        W, b, V, c = map(given, weights(self.inputs, self.outputs))
        hidden = jnp.tanh(linen.Dense(UNITS, kernel_init=W, bias_init=b)(x))
        return linen.Dense(self.outputs, kernel_init=V, bias_init=c)(hidden)


class Nnx(nnx.Module):
    def __init__(self, inputs, outputs):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List(
            [nnx.Linear(inputs, UNITS, rngs=rngs), nnx.Linear(UNITS, outputs, rngs=rngs)]
        )
        W, b, V, c = weights(inputs, outputs)
        for layer, kernel, bias in zip(self.layers, (W, V), (b, c), strict=True):
            layer.kernel, layer.bias = nnx.Param(kernel), nnx.Param(bias)

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def equinox_net(inputs, outputs):
    net = eqx.nn.MLP(inputs, outputs, UNITS, 1, jnp.tanh, key=random.key(0))
    W, b, V, c = weights(inputs, outputs)

    def leaves(net):
        return [array for layer in net.layers for array in (layer.weight, layer.bias)]

    return eqx.tree_at(leaves, net, [W.T, b, V.T, c])


def stax_net(inputs, outputs):
    W, b, V, c = map(given, weights(inputs, outputs))
    last = stax.Dense(outputs, W_init=V, b_init=c)
    return stax.serial(stax.Dense(UNITS, W_init=W, b_init=b), stax.Tanh, last)


NETS = {"linen": Linen, "nnx": Nnx, "equinox": equinox_net}


def local(x):
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        seen = jnp.reshape(x, (len(x), -1))[:, :2]
        numpyro.sample("x", dist.Normal(jnp.tanh(z), 0.5).to_event(1), obs=seen)


def joint(x):
    a = numpyro.sample("a", dist.Normal(0.5, 1))
    b = numpyro.sample("b", dist.Gamma(3.0, 2.0))
    numpyro.sample("x", dist.Normal(a, b), obs=x)


def features(x):
    return x


def flow(net, **kwargs):
    return FlowGuide(local, net, plate="rows", features=features, **kwargs)


def local_x(y):
    with numpyro.plate("data", len(y)):
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
        numpyro.sample("y", dist.Normal(x.sum(-1, keepdims=True), 1.0).to_event(1), obs=y)


def potential(out):
    return GaussianPotential.from_diagonal(out[..., :2], jax.nn.softplus(out[..., 2:]))


class NnxPotential(Nnx):
    def __call__(self, y):
        return potential(super().__call__(y))


def potential_net(net):
    """The network of potentials; ``net`` makes one of numbers."""
    if net is stax_net:
        init, apply = net(3, 4)
        return init, lambda params, y: potential(apply(params, y))
    return NnxPotential(3, 4)


def svae(net):
    rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(2), jnp.eye(2)))
    return SVAEGuide({}, potential_net(net), rule)


# One library each; the adapters are compared with a pair below.
PLACES = {
    "FlowGuide": (Linen, lambda net: (local, flow(net(3, 5), num_flows=1), Trace_ELBO())),
    "SVAEGuide": (Nnx, lambda net: (local_x, svae(net), SVAEELBO())),
    "with_critic": (
        equinox_net,
        lambda net: (
            joint,
            with_critic(AutoImplicit(joint, hidden_dims=(2,), init_from=None), net(2, 1)),
            DensityRatioELBO(3),
        ),
    ),
    "AutoAuxiliary": (
        Linen,
        lambda net: (
            joint,
            AutoAuxiliary(joint, network=net(2, 4), reverse_network=net(2, 4), init_from=None),
            Trace_ELBO(2),
        ),
    ),
    "AutoRealNVPNormal": (
        equinox_net,
        lambda net: (
            joint,
            AutoRealNVPNormal(joint, num_flows=2, network=net(1, 2), init_from=None),
            Trace_ELBO(2),
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_modules_descend_as_a_stax_pair_of_the_same_weights(place):
    own, make = PLACES[place]
    losses = []
    for net in (stax_net, own):
        model, guide, loss = make(net)
        data = X[:, 0] if model is joint else X
        descent = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
        svi = SVI(model, guide, descent, loss)
        state = svi.init(random.key(2), data)
        step = jax.jit(lambda state, svi=svi, data=data: svi.update(state, data))
        for _ in range(3):
            state, value = step(state)
            losses.append(float(value))
    assert len(set(losses[:3])) == 3 and np.all(np.isfinite(losses))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("library", NETS)
def test_values_and_gradients_over_any_batch_axes(library):
    init, apply = as_pair(NETS[library](3, 2)).of_rows(1)
    init_stax, apply_stax = stax_net(3, 2)
    own, pair = init(random.key(0), (1, 3))[1], init_stax(random.key(0), (1, 3))[1]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(own))
    for shape in ((3,), (N, 3), (2, N, 3)):
        x = random.normal(random.key(len(shape)), shape)

        def loss(fn, params, x):
            return jnp.sum(jnp.sin(fn(params, x)))

        np.testing.assert_allclose(apply(own, x), apply_stax(pair, x), rtol=1e-5, atol=1e-6)
        grads = jax.grad(loss, (1, 2))(apply, own, x)
        expected = jax.grad(loss, (1, 2))(apply_stax, pair, x)
        np.testing.assert_allclose(grads[1], expected[1], rtol=1e-4, atol=1e-6)
        sizes = [sum(jnp.sum(g**2) for g in jax.tree.leaves(one)) for one in (grads, expected)]
        np.testing.assert_allclose(*sizes, rtol=1e-4)


class Images(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(2, (3, 3), (2, 2))(x))
        return linen.Dense(4)(x.reshape(len(x), -1))


@pytest.mark.slow
def test_convolutional_encoders_read_each_image_alone():
    guide = flow(Images(), num_flows=0)
    svi = SVI(local, guide, optax.adam(1e-2), Trace_ELBO())
    state, loss = svi.stable_update(svi.init(random.key(0), IMAGES), IMAGES)
    assert jnp.isfinite(loss)
    params = svi.get_params(state)
    q, of_two = (guide.get_posterior(params, images) for images in (IMAGES, IMAGES[2:4]))
    assert q.mean.shape == (N, 2)
    assert len(set(np.asarray(q.mean[:, 0]).round(6))) == N
    np.testing.assert_allclose(q.mean[2:4], of_two.mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make", [lambda: Linen(3, 4), lambda: Nnx(3, 4), lambda: eqx.nn.Linear(3, 4, key=random.key(0))]
)
def test_pickled_guides_draw_the_same(make):
    guide = flow(make(), num_flows=0)
    params = SVI(local, guide, optax.sgd(1.0), Trace_ELBO()).init(random.key(0), X)[0][1][0]
    other = pickle.loads(pickle.dumps(guide))
    for one in (guide, other):
        one.drawn = one.sample_posterior(random.key(1), params, X)["z"]
    np.testing.assert_array_equal(guide.drawn, other.drawn)


# What cannot work is one sentence.


class LinenState(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=False)(linen.Dense(4)(x))


class NnxState(nnx.Module):
    def __init__(self, layer):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.layer = layer(rngs)

    def __call__(self, x):
        return self.layer(self.linear(x))


class Single(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x).sum(0)


def nnx_norm():
    return NnxState(lambda rngs: nnx.BatchNorm(4, rngs=rngs))


def nnx_dropout():
    return NnxState(lambda rngs: nnx.Dropout(0.5, rngs=rngs))


STATE = r"changes state besides its weights \({}\); use layers without state"
BAD = {
    "linen batch norm": (LinenState, ValueError, STATE.format("batch_stats")),
    "nnx batch norm": (nnx_norm, ValueError, STATE.format("BatchStat")),
    "equinox batch norm": (
        lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "rows", mode="batch")[0],
        ValueError,
        STATE.format("StateIndex"),
    ),
    "nnx dropout": (nnx_dropout, ValueError, STATE.format("RngCount, RngKey")),
    "a class": (lambda: Linen, TypeError, r"must be .*an object \(not the class\) of a Flax linen"),
    "no rows": (Single, ValueError, r"turns shape \(6, 3\) into \(4,\); .* have the 6 rows"),
    "width": (
        lambda: Linen(3, 3),
        ValueError,
        r"into \(6, 3\); it must give 6 rows of at least 4 numbers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_sentences(name):
    make, error, match = BAD[name]
    with pytest.raises(error, match=match):
        seed(flow(make(), num_flows=0), random.key(0))(X)


def test_state_that_is_held_constant_is_fine():
    for module in (nnx_norm(), nnx_dropout()):
        module.eval()
        guide = flow(module, num_flows=0)
        params = SVI(local, guide, optax.sgd(1.0), Trace_ELBO()).init(random.key(0), X)[0][1][0]
        np.testing.assert_allclose(guide.get_posterior(params, X).mean, module(X)[:, :2], rtol=1e-5)


def test_other_places_say_their_width():
    net = stax.Dense(3)
    flows = AutoRealNVPNormal(joint, num_flows=1, network=net, init_from=None)
    with pytest.raises(ValueError, match=r"it must give \(2,\), with split 1 of 2 coordinates"):
        seed(flows, random.key(0))(X[:, 0])
    auxiliary = AutoAuxiliary(joint, network=net, init_from=None)
    with pytest.raises(ValueError, match=r"length 4: 2 means and 2 log-scales; or a pair"):
        seed(auxiliary, random.key(0))(X[:, 0])
