"""VIMCO: its mean over every draw against finite differences, and its baselines in float32."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import VIMCO, VRELBO, ThermodynamicELBO
from numpyro_ext.objectives.vimco import _without_each
from tests.objectives.compare import assert_same
from tests.objectives.enumeration import (
    combinations,
    finite_difference,
    log_normal,
    log_softmax,
    mean_gradients,
    renyi,
)
from tests.objectives.models import (
    LOCAL_PARAMS,
    local_guide,
    local_model,
    value_and_grad,
)

S = 3
PRIOR = np.log([0.2, 0.5, 0.3])
MEANS = np.array([-1.0, 0.4, 2.0])
X = 0.9
ALPHAS = [-1.0, 0.0, 0.5, 1.0]
BASELINES = ["arithmetic", "geometric"]
PARAMS = {"logits": np.array([0.3, -0.4, 0.1]), "theta": np.array(0.8)}


def expected_bound(params, alpha, z, scale):
    """Over the combinations ``z`` of the particles' states, of ``scale`` copies of the whole."""
    log_q = log_softmax(params["logits"])
    lw = log_normal(X, MEANS, params["theta"]) + log_softmax(PRIOR) - log_q
    return scale * np.sum(np.exp(log_q[z].sum(1)) * renyi(lw[z], alpha))


def assert_is_minus(grads, expected, tol):
    for name, value in expected.items():
        np.testing.assert_allclose(-grads[name], value, rtol=tol, atol=tol)


def covariance_of_the_elbo(alpha, num_particles, **kwargs):
    return ThermodynamicELBO(1, num_particles, **kwargs)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("make", "num_particles", "alphas", "scale"),
    [
        (VIMCO, 2, ALPHAS, 0.3),
        (partial(VIMCO, baseline="geometric"), 2, ALPHAS, 1.0),
        pytest.param(partial(VIMCO, baseline="geometric"), 3, ALPHAS, 1.0, marks=pytest.mark.slow),
        (covariance_of_the_elbo, 2, [1.0], 0.3),
    ],
    ids=["arithmetic", "geometric", "geometric of three", "ThermodynamicELBO"],
)
def test_unbiased_over_every_draw(make, num_particles, alphas, scale, tol):
    """Under a scale too: what is drawn follows q and not q to the power of the scale."""

    def model():
        theta = numpyro.param("theta", 0.8)
        with handlers.scale(scale=scale):
            z = numpyro.sample("z", dist.Categorical(logits=jnp.asarray(PRIOR, float)))
            numpyro.sample("x", dist.Normal(jnp.asarray(MEANS, float)[z], theta), obs=X)

    def guide():
        with handlers.scale(scale=scale):
            numpyro.sample("z", dist.Categorical(logits=numpyro.param("logits", jnp.zeros(S))))

    z = combinations(S, num_particles)
    grads = mean_gradients(
        lambda alpha, each: make(alpha, num_particles, vectorize_particles=each),
        alphas,
        model,
        guide,
        PARAMS,
        {"z": z},
        np.exp(log_softmax(PARAMS["logits"])[z].sum(1)),
    )
    for alpha in alphas:
        expected = finite_difference(lambda p, a=alpha: expected_bound(p, a, z, scale), PARAMS)
        assert_is_minus(grads[alpha], expected, tol(2e-5, 1e-8))


MIXED = {
    "m": np.array(0.3),
    "s": np.array(0.7),
    "slope": np.array([0.8, -0.5, 0.2]),
    "loc": np.array([-0.6, 0.5, 1.1]),
    "theta": np.array(0.8),
}
EPS = np.array([[0.4, -1.1], [-0.7, 0.2]])  # noise of u and v for each particle


@pytest.mark.slow
def test_unbiased_in_a_mixed_guide(tol):
    """u is reparameterised and d depends on it, v is reparameterised and depends on d."""

    def model():
        theta = numpyro.param("theta", 0.8)
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        d = numpyro.sample("d", dist.Categorical(logits=u * jnp.arange(S)))
        v = numpyro.sample("v", dist.Normal(jnp.asarray(MEANS, float)[d], 1.0))
        numpyro.sample("x", dist.Normal(u + v, theta), obs=X)

    def guide():
        m, s = numpyro.param("m", 0.0), numpyro.param("s", 1.0)
        slope, loc = numpyro.param("slope", jnp.zeros(S)), numpyro.param("loc", jnp.zeros(S))
        # The noise enters as sites of its own, without a density.
        with handlers.mask(mask=False):
            noise = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
            e = numpyro.sample("e", noise, infer={"is_auxiliary": True})
        with handlers.substitute(data={"u": m + s * e[0]}):
            u = numpyro.sample("u", dist.Normal(m, s))
        d = numpyro.sample("d", dist.Categorical(logits=slope * u))
        with handlers.substitute(data={"v": loc[d] + 0.6 * e[1]}):
            numpyro.sample("v", dist.Normal(loc[d], 0.6))

    def per_state(params):
        """``(K, S)``: log q(d | u_k) and the log weight of each state for each particle."""
        u = params["m"] + params["s"] * EPS[:, :1]
        v = params["loc"] + 0.6 * EPS[:, 1:]
        log_q = log_softmax(params["slope"] * u)
        lw = log_normal(u, 0.0, 1.0) + log_softmax(u * np.arange(S)) + log_normal(v, MEANS, 1.0)
        lw = lw + log_normal(X, u + v, params["theta"]) - log_q
        lw = lw - log_normal(u, params["m"], params["s"]) - log_normal(v, params["loc"], 0.6)
        return log_q, lw

    d = combinations(S, 2)
    pick = (np.arange(2), d)

    def bound(params, alpha):
        log_q, lw = per_state(params)
        return np.sum(np.exp(log_q[pick].sum(1)) * renyi(lw[pick], alpha))

    grads = mean_gradients(
        lambda alpha, each: VIMCO(alpha, 2, vectorize_particles=each),
        ALPHAS,
        model,
        guide,
        MIXED,
        {"d": d, "e": np.broadcast_to(np.asarray(EPS, float), (len(d), 2, 2))},
        np.exp(per_state(MIXED)[0][pick].sum(1)),
    )
    for alpha in ALPHAS:
        expected = finite_difference(lambda p, a=alpha: bound(p, a), MIXED)
        assert_is_minus(grads[alpha], expected, tol(5e-5, 1e-8))


def plate_model(x=(0.9, -0.5), batch=None):
    theta = numpyro.param("theta", 0.8)
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(jnp.asarray(x), event_dim=0)
        z = numpyro.sample("z", dist.Categorical(logits=jnp.asarray(PRIOR, float)))
        numpyro.sample("x", dist.Normal(jnp.asarray(MEANS, float)[z], theta), obs=x)


def plate_guide(x=(0.9, -0.5), batch=None):
    w = numpyro.param("logits", jnp.zeros(S))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(jnp.asarray(x), event_dim=0)
        numpyro.sample("z", dist.Categorical(logits=w * x[:, None]))


def test_each_unit_has_its_own_bound_and_baseline(tol):
    x = np.array([0.9, -0.5])
    combos = combinations(S, 4).reshape(-1, 2, 2)  # (C, K, units)

    def terms(params):
        log_q = log_softmax(params["logits"] * x[:, None])  # (units, S)
        lw = log_normal(x[:, None], MEANS, params["theta"]) + log_softmax(PRIOR) - log_q
        pick = (np.arange(2), combos)
        return np.exp(log_q[pick].sum((1, 2))), renyi(lw[pick], 0.0, axis=1).sum(1)

    grads = mean_gradients(
        lambda alpha, each: VIMCO(alpha, 2, vectorize_particles=each),
        [0.0],
        plate_model,
        plate_guide,
        PARAMS,
        {"z": combos},
        terms(PARAMS)[0],
    )
    expected = finite_difference(lambda p: np.prod(terms(p), 0).sum(), PARAMS)
    assert_is_minus(grads[0.0], expected, tol(2e-5, 1e-8))


def test_reparameterised_guide_gives_vrelbo(tol):
    vimco, renyi = value_and_grad(
        [VIMCO(0.3, 4), VRELBO(0.3, 4)], LOCAL_PARAMS, local_model, local_guide
    )
    assert_same(vimco, renyi, tol(2e-5, 1e-12))


@pytest.mark.parametrize("a", [2.0, 1.0, 0.5, 0.0])
def test_baselines_keep_their_digits_when_one_weight_dominates(a):
    lw = np.array([-3.0, 200.0, 1.5, 0.25])
    for name in BASELINES:
        expected = []
        for j in range(4):
            others = np.delete(np.longdouble(lw), j)
            if name == "geometric":
                others = np.append(others, others.mean())
            top = others.max()
            mean = np.log(np.mean(np.exp(a * (others - top)))) / a + top if a else others.mean()
            expected.append(float(mean))
        got = _without_each(jnp.asarray(lw, jnp.float32), a, name)
        np.testing.assert_allclose(got, expected, rtol=2e-6)
