"""Wake-sleep: the gradients of every draw and every dream, and which programs have dreams."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal
import pytest
from scipy import stats

from numpyro_ext._model.operations import is_part_of
from numpyro_ext.objectives import VIMCO, ReweightedWakeSleep, WakeSleep
from numpyro_ext.objectives.base import Draws
from tests.objectives.compare import assert_refuses
from tests.objectives.enumeration import (
    combinations,
    finite_difference,
    log_softmax,
)

S, X = 3, 1
PARAMS = {
    "prior": np.array([0.2, -0.3, 0.4]),
    "slope": np.array([-1.0, 0.5, 1.5]),
    "logits": np.array([[0.3, -0.4, 0.1], [0.0, 0.6, -0.5]]),
}


def model(x):
    prior = numpyro.param("prior", jnp.zeros(S))
    z = numpyro.sample("z", dist.Categorical(logits=prior))
    numpyro.sample("x", dist.Bernoulli(logits=numpyro.param("slope", jnp.zeros(S))[z]), obs=x)


def guide(x):
    numpyro.sample("z", dist.Categorical(logits=numpyro.param("logits", jnp.zeros((2, S)))[x]))


def log_p(params, x):
    """``(S,)``."""
    sign = 1 if x else -1
    return log_softmax(params["prior"]) - np.log1p(np.exp(-sign * params["slope"]))


def expected_gradients(num_particles, power, wake):
    """Of what the losses maximise, over all draws and all dreams."""
    z = combinations(S, num_particles)
    q = log_softmax(PARAMS["logits"])[X]
    probability = np.exp(q[z].sum(1))
    lw = log_p(PARAMS, X) - q
    weights = np.exp(power * lw[z])
    weights = probability[:, None] * weights / weights.sum(1, keepdims=True)

    def of_model(params):
        return np.sum(weights * log_p({**PARAMS, **params}, X)[z])

    def of_guide(params):
        log_q = log_softmax(params["logits"])
        joint = np.exp([log_p(PARAMS, 0), log_p(PARAMS, 1)])
        return wake * np.sum(weights * log_q[X][z]) + (1 - wake) * np.sum(joint * log_q)

    gradients = finite_difference(of_model, {n: PARAMS[n] for n in ("prior", "slope")})
    return gradients | finite_difference(of_guide, {"logits": PARAMS["logits"]})


@pytest.fixture
def fed(monkeypatch):
    """Latents of the guide and of dreams, and dreamed data, in place of those that are drawn."""
    box = {}
    draw, dream = Draws.values, Draws.dream

    def dreamed(self, rng_key, arguments=None):
        trace = dream(self, rng_key, arguments)
        return {
            n: {**site, "value": box.get(f"dreamed {n}", site["value"])}
            for n, site in trace.items()
        }

    monkeypatch.setattr(Draws, "values", lambda self, key: {**draw(self, key), "z": box["z"]})
    monkeypatch.setattr(Draws, "dream", dreamed)
    return box


def mean_gradients(make_loss, num_particles, fed):
    """The gradients that a loss has, over all draws of the guide and all dreams."""
    draws, dreams = combinations(S, num_particles), np.indices((S, 2)).reshape(2, -1).T
    log_q = log_softmax(PARAMS["logits"])[X][draws].sum(1)
    log_joint = np.stack([log_p(PARAMS, x) for x in (0, 1)], 1)[tuple(dreams.T)]

    def loss(params, draw, dream):
        def each(fn, keys):
            out = []
            for k, key in enumerate(keys):
                fed.update({"z": draw[k], "dreamed z": dream[0], "dreamed x": dream[1]})
                out.append(fn(key))
            return jax.tree.map(lambda *x: jnp.stack(x), *out)

        fed.update({"z": draw[0], "dreamed z": dream[0], "dreamed x": dream[1]})
        return make_loss(vectorize_particles=each).loss(random.key(0), params, model, guide, X)

    over_dreams = jax.vmap(jax.grad(loss), (None, None, 0))
    over_both = jax.jit(jax.vmap(over_dreams, (None, 0, None)))
    params = {name: jnp.asarray(value, float) for name, value in PARAMS.items()}
    share = np.exp(log_q[:, None] + log_joint)
    return {name: np.tensordot(share, g, 2) for name, g in over_both(params, draws, dreams).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_loss", "num_particles", "power", "wake"),
    [
        (lambda **kwargs: WakeSleep(2, **kwargs), 2, 0.0, 0.0),
        (lambda **kwargs: ReweightedWakeSleep(2, **kwargs), 2, 1.0, 1.0),
        (lambda **kwargs: ReweightedWakeSleep(3, guide_update="both", **kwargs), 3, 1.0, 0.5),
        (lambda **kwargs: ReweightedWakeSleep(1, guide_update="sleep", **kwargs), 1, 1.0, 0.0),
    ],
    ids=["WakeSleep", "wake", "both", "sleep"],
)
def test_gradients_over_all_draws_and_dreams(make_loss, num_particles, power, wake, fed, tol):
    grads = mean_gradients(make_loss, num_particles, fed)
    for name, expected in expected_gradients(num_particles, power, wake).items():
        np.testing.assert_allclose(
            -grads[name], expected, rtol=tol(2e-5, 1e-8), atol=tol(2e-6, 1e-8)
        )


def test_values_are_those_of_the_bounds():
    losses = [ReweightedWakeSleep(2), VIMCO(0.0, 2), WakeSleep(2), VIMCO(1.0, 2)]
    values = jax.jit(
        lambda: [loss.loss(random.key(0), PARAMS, model, guide, X) for loss in losses]
    )()
    np.testing.assert_allclose(values[::2], values[1::2], rtol=1e-5)


ROWS = jnp.arange(8.0) * 10


def rows_model(x, batch=None):
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", dist.Normal(z, 1e-3), obs=x[idx])


def rows_guide(x, batch=None):
    shift = numpyro.param("shift", 0.0)
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        numpyro.sample("z", dist.Normal(x[idx] + shift, 0.1))


@pytest.mark.parametrize("batch", [None, 4])
def test_each_dreamed_latent_meets_its_own_data(batch):
    """Which are within 0.001 of it, so that the mean of the guide is right where the shift is 0."""
    loss = ReweightedWakeSleep(50, guide_update="sleep")
    slope = jax.jit(
        jax.grad(
            lambda shift: loss.loss(
                random.key(1), {"shift": shift}, rows_model, rows_guide, ROWS, batch
            )
        )
    )
    # 8 rows, each of which has the slope (shift - error) / 0.1^2.
    assert abs(slope(0.0)) < 8 / 0.1**2 * 6e-3 / (50 * (batch or 8)) ** 0.5
    np.testing.assert_allclose(slope(0.5) - slope(0.0), 8 * 0.5 / 0.1**2, rtol=1e-3)


def test_is_part_of():
    x, idx = jnp.arange(12.0).reshape(4, 3), jnp.array([2, 0])
    moved = [lambda x: x, lambda x: x[idx], lambda x: jnp.take(x, idx, 0), lambda x: x[1:, 0]]
    assert all(is_part_of(fn, x) for fn in [*moved, lambda x: x[idx].astype(int)])
    computed = [lambda x: x / 2, lambda x: jnp.log(x)[idx], lambda x: jnp.ones(4), lambda x: -x]
    assert not any(is_part_of(fn, x) for fn in computed)


def of_argument(y):
    numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0) * y).to_event(1))


def constant(x, batch=None):
    numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0)).expand(x.shape).to_event(1))


def normal_model(x, batch=None):
    z = numpyro.sample("z", dist.Normal().expand(x.shape).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        numpyro.sample("x", dist.Normal(z[idx]), obs=x[idx])


def reads_data(x, batch=None):
    numpyro.sample("z", dist.Normal(numpyro.param("m", 0.0) * x).to_event(1))


def of_logarithm(x):
    numpyro.sample("z", dist.Normal().expand(x.shape).to_event(1))
    numpyro.sample("x", dist.Normal().expand(x.shape).to_event(1), obs=jnp.log(x))


def with_factor(x):
    z = numpyro.sample("z", dist.Normal().expand(x.shape).to_event(1))
    numpyro.factor("x", -jnp.sum((x - z) ** 2))


@pytest.mark.parametrize(
    ("model", "guide", "args", "sentence"),
    [
        (
            rows_model,
            AutoMultivariateNormal(rows_model),
            (ROWS,),
            "the guide draws .*_auto.* and the model",
        ),
        (lambda y: normal_model(y), of_argument, (ROWS,), r"needs an array argument 'x' .*\['y'\]"),
        (normal_model, constant, (ROWS,), r"does not depend on the data of \['x'\]"),
        (normal_model, reads_data, (ROWS, 4), "plate 'rows' does not enclose every site"),
        (of_logarithm, reads_data, (ROWS + 1,), "are computed from the argument 'x'"),
        (with_factor, reads_data, (ROWS,), "do not follow the factor 'x'"),
    ],
)
def test_programs_without_dreams_are_refused(model, guide, args, sentence):
    loss = WakeSleep(2)
    pattern = f"WakeSleep: .*{sentence}.*; use ReweightedWakeSleep"
    assert_refuses(pattern, loss, {"m": 0.5}, model, guide, *args)


SIZE, BATCH, SAME = 12, 3, 0.7


def labelled(x, batch):
    with numpyro.plate("rows", SIZE, subsample_size=batch) as i:
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        numpyro.sample("x", dist.Normal(1.5 * k, 1.0), obs=x[i])


def labels(x, batch):
    logit = numpyro.param("logit", 0.4)
    with numpyro.plate("rows", SIZE, subsample_size=batch) as i:
        numpyro.sample("k", dist.Bernoulli(logits=logit + 0.0 * x[i]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        VIMCO(1.0, 3),
        VIMCO(0.0, 3),
        ReweightedWakeSleep(3),
        ReweightedWakeSleep(3, guide_update="both"),
        WakeSleep(3),
    ],
)
def test_the_gradient_of_a_minibatch_is_that_of_all_rows(loss):
    """NumPyro's TraceGraph_ELBO has N / B times that. All rows are the same, and the gradients of
    8,000 draws each are compared by their standard errors."""
    x = jnp.full(SIZE, SAME)

    def gradients(batch):
        def one(key):
            grad = jax.grad(lambda p: loss.loss(key, {"logit": p}, labelled, labels, x, batch))
            return grad(0.4)

        grads = jax.jit(jax.vmap(one))(random.split(random.key(batch), 8000))
        return float(grads.mean()), float(grads.std()) / 8000**0.5

    (small, error_small), (whole, error) = gradients(BATCH), gradients(SIZE)
    assert abs(small - whole) < 4 * (error_small**2 + error**2) ** 0.5 < 0.25 * abs(whole)
    if isinstance(loss, VIMCO) and loss.alpha == 1:
        q = jax.nn.sigmoid(0.4)
        log_p = np.log([0.7, 0.3]) + stats.norm([0.0, 1.5]).logpdf(SAME)
        exact = -SIZE * q * (1 - q) * (log_p[1] - log_p[0] - 0.4)
        assert abs(small - exact) < 4 * error_small
