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
from numpyro.infer import SVI, Predictive, Trace_ELBO
import optax
import pytest

from numpyro_ext._networks import as_pair
from numpyro_ext.expfam import Gaussian
from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoHVI,
    AutoImplicit,
    AutoRealNVPNormal,
    AutoSemiImplicit,
    FlowGuide,
    ImplicitGuide,
    with_critic,
)
from numpyro_ext.objectives import DensityRatioELBO, ImplicitELBO, SemiImplicitELBO
from numpyro_ext.scores import DenoisingScore
from numpyro_ext.svae import SVAEELBO, FixedGaussian, GaussianPotential, SVAEGuide, allow_missing

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


class LinenPotential(Linen):
    def __call__(self, y):
        return potential(super().__call__(y))


class NnxPotential(Nnx):
    def __call__(self, y):
        return potential(super().__call__(y))


class EquinoxPotential(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, y):
        return potential(self.net(y))


def potential_net(net):
    """The network of potentials; ``net`` makes one of numbers."""
    if net is stax_net:
        init, apply = net(3, 4)
        return init, lambda params, y: potential(apply(params, y))
    if net is equinox_net:
        return EquinoxPotential(net(3, 4))
    return (LinenPotential if net is Linen else NnxPotential)(3, 4)


def svae(net, wrap=lambda network: network):
    rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(2), jnp.eye(2)))
    return SVAEGuide({}, wrap(potential_net(net)), rule)


PLACES = {
    "FlowGuide": lambda net: (local, flow(net(3, 5), num_flows=1), Trace_ELBO()),
    "SVAEGuide": lambda net: (local_x, svae(net), SVAEELBO()),
    "with_critic": lambda net: (
        joint,
        with_critic(AutoImplicit(joint, hidden_dims=(2,), init_from=None), net(2, 1)),
        DensityRatioELBO(3),
    ),
    "with_critic of rows": lambda net: (
        local,
        with_critic(
            ImplicitGuide(local, stax.Dense(2), plate="rows", features=features), net(5, 1)
        ),
        DensityRatioELBO(3),
    ),
    "ImplicitGuide": lambda net: (
        local,
        ImplicitGuide(local, net(5, 2), plate="rows", features=features),
        ImplicitELBO(3),
    ),
    "AutoImplicit": lambda net: (
        joint,
        AutoImplicit(joint, network=net(2, 2), init_from=None),
        ImplicitELBO(3),
    ),
    "AutoSemiImplicit": lambda net: (
        joint,
        AutoSemiImplicit(joint, network=net(2, 4), covariance="conditional", init_from=None),
        SemiImplicitELBO(2),
    ),
    "AutoAuxiliary": lambda net: (
        joint,
        AutoAuxiliary(joint, network=net(2, 4), reverse_network=net(2, 4), init_from=None),
        Trace_ELBO(2),
    ),
    "AutoHVI": lambda net: (
        joint,
        AutoHVI(joint, num_steps=1, reverse_network=net(3, 4), init_from=None),
        Trace_ELBO(2),
    ),
    "AutoRealNVPNormal": lambda net: (
        joint,
        AutoRealNVPNormal(joint, num_flows=2, network=net(1, 2), init_from=None),
        Trace_ELBO(2),
    ),
}
EVERY = ("FlowGuide", "SVAEGuide", "with_critic")


@pytest.fixture(scope="module")
def losses():
    """Losses of three steps of gradient descent, by place and network; each is computed once."""
    done = {}

    def of(place, net):
        if (place, net) not in done:
            model, guide, loss = PLACES[place](net)
            descent = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
            svi, data = SVI(model, guide, descent, loss), X
            if model is joint:
                data = X[:, 0]
            state = svi.init(random.key(2), data)
            step = jax.jit(lambda state: svi.update(state, data))
            found = []
            for _ in range(3):
                state, value = step(state)
                found.append(float(value))
            done[place, net] = np.array(found)
        return done[place, net]

    return of


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "library"),
    # The rows of other guides have the same adapter; an Equinox module alone sees one at a time.
    [(p, library) for p in PLACES for library in (NETS if p in EVERY else ("equinox",))],
)
def test_modules_descend_as_a_stax_pair_of_the_same_weights(losses, place, library):
    expected = losses(place, stax_net)
    assert len(set(expected)) == 3 and np.all(np.isfinite(expected))
    np.testing.assert_allclose(losses(place, NETS[library]), expected, rtol=1e-4)


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


@pytest.mark.parametrize("library", NETS)
def test_denoising_score_takes_a_module(library):
    own, pair = (DenoisingScore(0.5, net(3, 3)) for net in (NETS[library], stax_net))
    found, expected = (one.score(one.init(random.key(0), 3), X) for one in (own, pair))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_missing_entries_and_a_module():
    y = X.at[1, 2].set(jnp.nan)
    network = allow_missing(EquinoxPotential(equinox_net(6, 4)))
    rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(2), jnp.eye(2)))
    guide = SVAEGuide({}, network, rule)
    params = {"svae_recognition$params": network.init(random.key(0), (1, 3))[1]}
    found = guide.local_posterior(params, y).mean["x"].x
    inputs = jnp.concatenate([jnp.nan_to_num(y), jnp.isnan(y)], axis=-1)
    out = jax.vmap(equinox_net(6, 4))(inputs)
    precision = jax.nn.softplus(out[:, 2:])
    np.testing.assert_allclose(found, out[:, :2] / (1 + precision), rtol=1e-5)


# The encoder of NumPyro's example of an auto-encoder: two heads, the second a standard deviation.


def numpyro_encoder(hidden_dim, z_dim):
    return stax.serial(
        stax.Dense(hidden_dim, W_init=stax.randn()),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(
            stax.Dense(z_dim, W_init=stax.randn()),
            stax.serial(stax.Dense(z_dim, W_init=stax.randn()), stax.Exp),
        ),
    )


def concatenated(hidden_dim, z_dim):
    return stax.serial(
        stax.Dense(hidden_dim, W_init=stax.randn()),
        stax.Softplus,
        stax.FanOut(2),
        stax.parallel(
            stax.Dense(z_dim, W_init=stax.randn()),
            stax.serial(stax.Dense(z_dim, W_init=stax.randn()), stax.Identity),
        ),
        stax.FanInConcat(),
    )


@pytest.mark.slow
def test_the_encoder_of_numpyros_auto_encoder_trains():
    runs = []
    for net in (numpyro_encoder(8, 2), concatenated(8, 2)):
        svi = SVI(local, flow(net, num_flows=0), optax.adam(0.02), Trace_ELBO(4))
        runs.append(svi.run(random.key(0), 200, X, progress_bar=False))
    # A pair is the same guide as means and log-scales in one array, with the same weights.
    np.testing.assert_allclose(runs[0].losses[:3], runs[1].losses[:3], rtol=1e-4)
    first, last = runs[0].losses[:10].mean(), runs[0].losses[-50:].mean()
    assert last < first - 1
    draws = Predictive(flow(net, num_flows=0), params=runs[1].params, num_samples=5)
    assert draws(random.key(1), X[:4])["z"].shape == (5, 4, 2)


def test_a_pair_with_a_context_is_the_concatenation():
    def heads(out):
        return out[:, :2], jnp.exp(out[:, 2:4]), out[:, 4:]

    init, apply = stax_net(3, 5)
    one = flow((init, apply), num_flows=1)
    three = flow((init, lambda w, x: heads(apply(w, x))), num_flows=1)
    params = SVI(local, one, optax.sgd(1.0), Trace_ELBO()).init(random.key(0), X)[0][1][0]
    z = random.normal(random.key(1), (N, 2))
    found, expected = (g.get_posterior(params, X).log_prob(z) for g in (three, one))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def stax_images():
    convolve = stax.Conv(2, (3, 3), (2, 2)), stax.Relu, stax.AvgPool((2, 2)), stax.Flatten
    return stax.serial(*convolve, stax.Dense(4))


class LinenImages(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Conv(2, (3, 3), (2, 2))(x))
        return linen.Dense(4)(x.reshape(len(x), -1))


class NnxImages(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.convolve = nnx.Conv(1, 2, (3, 3), (2, 2), rngs=rngs)
        self.last = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.convolve(x)).reshape(len(x), -1))


class EquinoxImages(eqx.Module):
    convolve: eqx.nn.Conv2d
    last: eqx.nn.Linear

    def __call__(self, image):
        channels_first = jnp.moveaxis(image, -1, 0)
        return self.last(jax.nn.relu(self.convolve(channels_first)).ravel())


def equinox_images():
    key = random.key(0)
    return EquinoxImages(
        eqx.nn.Conv2d(1, 2, 3, 2, key=key), eqx.nn.Linear(18, 4, use_bias=False, key=key)
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [stax_images, LinenImages, NnxImages, equinox_images])
def test_convolutional_encoders_read_each_image_alone(make):
    guide = flow(make(), num_flows=0)
    svi = SVI(local, guide, optax.adam(1e-2), Trace_ELBO())
    state, loss = svi.stable_update(svi.init(random.key(0), IMAGES), IMAGES)
    assert jnp.isfinite(loss)
    params = svi.get_params(state)
    q, of_two = (guide.get_posterior(params, images) for images in (IMAGES, IMAGES[2:4]))
    assert q.mean.shape == (N, 2)
    assert len(set(np.asarray(q.mean[:, 0]).round(6))) == N
    np.testing.assert_allclose(q.mean[2:4], of_two.mean, rtol=1e-4, atol=1e-6)


class Words(linen.Module):
    """The numbers of words, which must be integers from the start."""

    @linen.compact
    def __call__(self, words):
        return linen.Dense(4)(linen.Embed(7, 3)(words).sum(1))


def test_features_of_integers():
    guide = flow(Words(), num_flows=0)
    words = jnp.arange(12).reshape(N, 2) % 7
    svi = SVI(local, guide, optax.adam(1e-2), Trace_ELBO())
    assert jnp.isfinite(svi.evaluate(svi.init(random.key(0), words), words))


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


@pytest.mark.parametrize("library", NETS)
def test_posteriors_cross_jit_without_tracing_again(library):
    guide = AutoRealNVPNormal(joint, num_flows=1, network=NETS[library](1, 2), init_from=None)
    params = SVI(joint, guide, optax.sgd(1.0), Trace_ELBO()).init(random.key(0), X[:, 0])[0][1][0]
    calls = []

    @jax.jit
    def density(q, z):
        calls.append(1)
        return q.log_prob(z)

    found = [density(guide.get_posterior(params), jnp.full(2, z)) for z in (0.1, 0.2)]
    assert len(calls) == 1
    assert found[0] != found[1]


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


def nnx_norm():
    return NnxState(lambda rngs: nnx.BatchNorm(4, rngs=rngs))


def nnx_dropout():
    return NnxState(lambda rngs: nnx.Dropout(0.5, rngs=rngs))


def equinox_layers(layer):
    return eqx.nn.Sequential([eqx.nn.Linear(3, 4, key=random.key(0)), layer])


class Single(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(x).sum(0)


STATE = r"changes state besides its weights \({}\).*must be a function of weights and rows"
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
    "no rows": (Single, ValueError, r"turns shape \(6, 3\) into \(4,\); .* that of the 6 rows"),
    "width": (
        lambda: Linen(3, 3),
        ValueError,
        r"into \(6, 3\), but a row has 2 latent numbers; .* at least 4 numbers",
    ),
    "width of a pair": (
        lambda: numpyro_encoder(4, 3),
        ValueError,
        r"into \[\(6, 3\), \(6, 3\)\], but a row has 2 .* a pair of arrays \(6, 2\)",
    ),
    "log-scales for standard deviations": (
        lambda: (stax_net(3, 2)[0], lambda w, x: (x[:, :2], 0 * x[:, :2] - 1)),
        ValueError,
        "has the entry -1, but it is the standard deviations",
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
    still = eqx.nn.inference_mode(equinox_layers(eqx.nn.Dropout(0.5)))
    seed(flow(still, num_flows=0), random.key(0))(X)


def test_other_places_say_their_width():
    guide = ImplicitGuide(local, Linen(5, 2), plate="rows", features=features)
    with pytest.raises(ValueError, match=r"shape \(6, 8, 8, 1\), .* cannot put noise; .*\(M, f\)"):
        seed(guide, random.key(0))(IMAGES)
    two = numpyro_encoder(4, 1)
    flows = AutoRealNVPNormal(joint, num_flows=1, network=two, init_from=None)
    with pytest.raises(ValueError, match=r"into \[.*\]; with split 1 of 2 .* must give \(2,\)"):
        seed(flows, random.key(0))(X[:, 0])
    auxiliary = AutoAuxiliary(joint, network=two, init_from=None)
    with pytest.raises(ValueError, match=r"length 4: 2 means and 2 log-scales; or give a pair"):
        seed(auxiliary, random.key(0))(X[:, 0])


def test_a_pair_of_heads_in_a_conditional_normal():
    guide = AutoAuxiliary(joint, network=numpyro_encoder(4, 2), init_from=None)
    svi = SVI(joint, guide, optax.sgd(1e-2), Trace_ELBO())
    state = svi.init(random.key(0), X[:, 0])
    assert jnp.isfinite(svi.evaluate(state, X[:, 0]))
