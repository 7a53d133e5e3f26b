"""AutoDropout: the objective of dropout with its constants, its masks, and what it refuses."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.minibatch import plate_indices
from numpyro_ext.diagnostics import pareto_khat, to_arviz
from numpyro_ext.guides import AutoDropout, IntractableDensityError
from numpyro_ext.objectives import BBAlphaELBO

N, K, TAU = 8, 6, 2.5
X = random.normal(random.key(0), (N, 3)) * jnp.array([1.0, 2.0, 0.5]) + 0.3
Y = random.normal(random.key(1), (N, 2))
KEEP = {"w0": 0.7, "w1": 0.8}
PRECISION = {"w0": 4.0, "w1": 0.25}
AXES = {"w0": {"in_axis": -2}, "w1": {"in_axis": -1}}


def model(X, y=None, batch=None):
    """Two layers without a bias at the output, with unequal priors."""
    w0 = numpyro.sample("w0", dist.Normal(0, 0.5).expand([3, 4]).to_event(2), infer=AXES["w0"])
    b0 = numpyro.sample("b0", dist.Normal(0.1, 2.0).expand([4]).to_event(1))
    w1 = numpyro.sample("w1", dist.Normal(0, 2.0).expand([2, 4]).to_event(2), infer=AXES["w1"])
    f = numpyro.deterministic("f", jnp.tanh(X @ w0 + b0) @ w1.T)
    with numpyro.plate("data", N, subsample_size=batch) as rows:
        obs = None if y is None else y[rows]
        numpyro.sample("y", dist.Normal(f[rows], TAU**-0.5).to_event(1), obs=obs)


def new_guide(**kwargs):
    return AutoDropout(model, **{"keep_prob": KEEP, **kwargs})


@pytest.fixture(scope="module")
def fitted():
    guide = new_guide()
    svi = SVI(model, guide, optax.adam(1e-2), BBAlphaELBO(0.5, K))
    return svi, svi.run(random.key(2), 20, X, Y, progress_bar=False)


def kl_of(params):
    norms = {name: jnp.sum(params[f"{name}_auto_loc"] ** 2) for name in KEEP}
    return sum(p * PRECISION[name] / 2 * norms[name] for name, p in KEEP.items())


def by_hand(guide, params, key, alpha, rows):
    """The displayed formula, on the masks of the K particles of a loss; alpha 0 is its limit."""
    particles = random.split(random.split(key)[1], K)
    squares = []
    for one in particles:
        seeded = handlers.seed(guide, random.split(one)[1])
        values = handlers.trace(handlers.substitute(seeded, params)).get_trace(X, Y)
        w0, b0, w1 = (values[name]["value"] for name in ("w0", "b0", "w1"))
        f = jnp.tanh(X @ w0 + b0) @ w1.T
        squares.append(jnp.sum((Y - f)[rows] ** 2, axis=1))
    squares, D, M = jnp.stack(squares), Y.shape[1], len(rows)
    constant = -N * D / 2 * jnp.log(TAU) + N * D / 2 * jnp.log(2 * jnp.pi)
    prior_b0 = -dist.Normal(0.1, 2.0).log_prob(params["b0_auto_loc"]).sum()
    total = kl_of(params) + constant + prior_b0
    if alpha == 0:
        return total + N / M * jnp.sum(jnp.mean(TAU / 2 * squares, axis=0))
    inner = logsumexp(-alpha * TAU / 2 * squares, axis=0)
    return total - N / M / alpha * jnp.sum(inner) + N / alpha * jnp.log(K)


@pytest.mark.nightly
def test_black_box_alpha_of_it_is_dropout_with_alpha_divergences(fitted, tol):
    svi, run = fitted
    guide, key, batch = svi.guide, random.key(3), 3
    rows = plate_indices(random.split(key)[0], "data", N, batch)

    @jax.jit
    def loss(alpha, params):
        return BBAlphaELBO(alpha, K).loss(key, params, model, guide, X, Y, batch)

    for alpha in (0.4, 1.0):
        expected = by_hand(guide, run.params, key, alpha, rows)
        assert jnp.allclose(loss(alpha, run.params), expected, rtol=tol(1e-5, 1e-12))
    usual = by_hand(guide, run.params, key, 0, rows)
    zero = BBAlphaELBO(0.0, K).loss(key, run.params, model, guide, X, Y, batch)
    assert jnp.allclose(zero, usual, rtol=tol(1e-5, 1e-12))
    assert jnp.allclose(loss(1e-4, run.params), usual, rtol=tol(1e-3, 1e-3))


@pytest.mark.slow
@pytest.mark.x64
def test_without_dropout_it_is_the_mode_with_the_weights_prior_up_to_a_constant(tol):
    guide, point = new_guide(keep_prob=1.0), AutoDelta(model)
    params = new_params()
    ours, theirs = (
        Trace_ELBO().loss(random.key(0), params, model, one, X, Y) for one in (guide, point)
    )
    constant = sum(n / 2 * np.log(2 * np.pi / PRECISION[w]) for w, n in (("w0", 12), ("w1", 8)))
    assert jnp.allclose(theirs - ours, constant, rtol=tol(1e-5, 1e-12))


def new_params():
    keys = random.split(random.key(5), 3)
    shapes = {"w0": (3, 4), "b0": (4,), "w1": (2, 4)}
    return {f"{n}_auto_loc": random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}


@pytest.mark.slow
def test_whole_inputs_are_dropped_with_their_probability(fitted):
    svi, _ = fitted
    params = new_params()
    draws = svi.guide.sample_posterior(random.key(6), params, sample_shape=(3000,))
    for name, out in (("w0", 2), ("w1", 1)):
        kept = draws[name] != 0
        kept_inputs = kept.any(out)
        assert (kept == jnp.expand_dims(kept_inputs, out)).all()  # all of an input or nothing
        p = KEEP[name]
        error = (p * (1 - p) / 3000) ** 0.5
        assert (jnp.abs(kept_inputs.mean(0) - p) < 5 * error).all()
        whole = jnp.where(kept, params[f"{name}_auto_loc"], 0.0)
        assert jnp.allclose(draws[name], whole)
    f = jnp.tanh(X @ draws["w0"][7] + draws["b0"][7]) @ draws["w1"][7].T
    assert jnp.allclose(draws["f"][7], f, atol=1e-5)


@pytest.mark.slow
def test_diagnostics_take_its_draws_and_refuse_its_density(fitted):
    svi, run = fitted
    assert not svi.guide.has_density
    tree = to_arviz(svi, run, model_args=(X, Y))
    assert float(tree.posterior["w0"].std(("chain", "draw")).max()) > 0
    with pytest.raises(IntractableDensityError, match="without a density"):
        pareto_khat(svi, run, model_args=(X, Y))


def one_matrix(name, shape, prior=None, infer=None):
    def model(scale=None):
        fn = (dist.Normal(0, 1) if prior is None else prior()).expand(shape).to_event(len(shape))
        numpyro.sample(name, fn, infer=infer)

    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "infer", "in_axis", "axis"),
    [
        ("nn/Dense_0.kernel", (3, 4), None, None, -2),
        ("nn/layers[0].weight", (4, 3), None, None, -1),
        ("w", (3, 4), {"in_axis": -2}, None, -2),
        ("w", (3, 4), {"in_axis": -2}, -1, -1),
        ("nn/Conv_0.kernel", (2, 2, 3, 4), None, -2, -2),
        ("nn/conv.weight", (4, 3, 2, 2), None, -3, -3),
    ],
)
def test_the_axis_of_the_inputs(name, shape, infer, in_axis, axis):
    guide = AutoDropout(one_matrix(name, shape, infer=infer), keep_prob=0.5, in_axis=in_axis)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferenceWarning)
        handlers.seed(guide, 0)()
    draws = guide.sample_posterior(random.key(1), params_of(guide, name, shape), sample_shape=(64,))
    kept = jnp.moveaxis(draws[name] != 0, axis, 1).reshape(64, shape[axis], -1)
    assert (kept == kept[..., :1]).all() and len(jnp.unique(kept.sum((1, 2)))) > 1


def params_of(guide, name, shape):
    return {f"{name}_auto_loc": jnp.ones(shape)}


def test_a_matrix_of_unknown_layout_warns():
    with pytest.warns(InferenceWarning, match=r"takes 'w' as \(out, in\).*in_axis=-2"):
        handlers.seed(AutoDropout(one_matrix("w", (3, 4))), 0)()


def hierarchical():
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("w.kernel", dist.Normal(0, scale).expand([2, 3]).to_event(2))


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (one_matrix("w.kernel", (2, 3)), {"keep_prob": 0.0}, r"keep_prob is 0.0; .* \(0, 1\]"),
        (one_matrix("w.kernel", (2, 3)), {"keep_prob": {"w.kernel": 1.5}}, "keep_prob is 1.5"),
        (one_matrix("w.kernel", (2, 3)), {"in_axis": 0}, "in_axis is 0; it is counted from the"),
        (one_matrix("w.kernel", (2, 3)), {"keep_prob": {"v": 0.5}}, "'v' is named; the weight mat"),
        (one_matrix("w.kernel", (2, 3)), {"sites": ["v"]}, "'v' is named; the weight matrices"),
        (one_matrix("w.kernel", (2, 2, 3, 3)), {}, "4 event dimensions; say which one"),
        (one_matrix("w.kernel", (2, 3), lambda: dist.Laplace()), {}, "prior of .* is Laplace"),
        (one_matrix("w.kernel", (2, 3), lambda: dist.Normal(1.0)), {}, "a mean that is not 0"),
        (hierarchical, {}, "depends on other sites or on parameters"),
    ],
)
def test_what_it_refuses(model, kwargs, message):
    with pytest.raises(ValueError, match=message):
        handlers.seed(AutoDropout(model, **kwargs), 0)()
