"""`DensityRatioELBO`: the ELBO of a guide that can only be sampled."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
import pytest

from numpyro_ext.guides import Implicit, with_critic
from numpyro_ext.objectives import DensityRatioELBO
from numpyro_ext.scores import KernelRatio, LogisticRatio, whiten
from tests.objectives.compare import assert_refuses
from tests.objectives.models import NONE, guide_draws

NOISE = {"is_auxiliary": True}
Y = jnp.array([1.5, -0.4])
A = jnp.array([[1.0, 0.5], [-0.3, 0.8]])
PRIOR_SCALE = jnp.array([1.5, 0.7])


def model(y=Y):
    """Two latents, of which prior and likelihood have a parameter each."""
    loc = numpyro.param("prior_loc", 0.4)
    noise = numpyro.param("noise", 0.9)
    z = numpyro.sample("z", dist.Normal(loc, PRIOR_SCALE).to_event(1))
    numpyro.sample("y", dist.Normal(A @ z, noise).to_event(1), obs=y)


def guide(*args):
    """N(m, L L') without saying so."""
    m = numpyro.param("m", jnp.array([0.3, -0.2]))
    L = numpyro.param("L", jnp.array([[0.6, 0.0], [0.4, 0.5]]))
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
    numpyro.sample("z", Implicit(m + L @ e, event_dim=1))


PARAMS = {
    "prior_loc": jnp.array(0.4),
    "noise": jnp.array(0.9),
    "m": jnp.array([0.3, -0.2]),
    "L": jnp.array([[0.6, 0.0], [0.4, 0.5]]),
}


def elbo(params):
    """In closed form: the log joint is quadratic."""
    m, L = params["m"], params["L"]

    def log_p(z):
        prior = dist.Normal(params["prior_loc"], PRIOR_SCALE).log_prob(z).sum()
        return prior + dist.Normal(A @ z, params["noise"]).log_prob(Y).sum()

    entropy = 1.0 + jnp.log(2.0 * jnp.pi) + jnp.linalg.slogdet(L)[1]
    return log_p(m) + 0.5 * jnp.trace(jax.hessian(log_p)(m) @ L @ L.T) + entropy


class WithOptimalCritic:
    """The guide with the critic that a density ratio converges to, a function of its parameters."""

    def __init__(self, contrast):
        self.contrast = contrast

    def __call__(self, *args):
        guide()

    def critic(self, params, x):
        params = jax.lax.stop_gradient(params)  # as if they were the critic's own
        m, L = params["m"], params["L"]
        if self.contrast == "prior":
            r = dist.Normal(params["prior_loc"], PRIOR_SCALE).to_event(1)
        else:  # it sees u = (z - m) / sd
            scale = jnp.sqrt(jnp.diag(L @ L.T))
            m, L, r = jnp.zeros(2), L / scale[:, None], dist.Normal().expand([2]).to_event(1)
        return dist.MultivariateNormal(m, scale_tril=L).log_prob(x) - r.log_prob(x)


CONTRASTS = "prior", "adaptive"
MANY = 40_000


@cache
def at_optimum():
    losses = {name: (DensityRatioELBO(MANY, name), WithOptimalCritic(name)) for name in CONTRASTS}
    losses["LogisticRatio"] = (DensityRatioELBO(4000, ratio=LogisticRatio()), guide)

    @jax.jit
    def values(params):
        return {
            name: jax.value_and_grad(lambda p, l=loss, g=g: l.loss(random.key(1), p, model, g))(
                params
            )
            for name, (loss, g) in losses.items()
        }

    return values(PARAMS), jax.jit(jax.value_and_grad(lambda p: -elbo(p)))(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CONTRASTS, "LogisticRatio"])
def test_at_the_optimal_critic_value_and_gradient_are_those_of_the_elbo(name):
    values, (expected, expected_grad) = at_optimum()
    value, grad = values[name]
    # The terms of one draw have standard deviations of at most 2 (value) and 6 (gradients): on
    # 40,000 draws .01 and .03, on 4,000 of LogisticRatio .03 and .1.
    wider = 3.2 if name == "LogisticRatio" else 1.0
    assert jnp.abs(value - expected) < 4 * 0.01 * wider
    for site in PARAMS:
        assert jnp.abs(grad[site] - expected_grad[site]).max() < 4 * 0.03 * wider, site


def local_model(x, batch=None):
    loc = numpyro.param("loc", 0.5)
    with numpyro.plate("N", len(x), subsample_size=batch):
        b = numpyro.subsample(x, event_dim=0)
        tau = numpyro.sample("tau", dist.HalfNormal(1.5))
        z = numpyro.sample("z", dist.Normal(loc, 1.0))
        numpyro.sample("x", dist.Normal(z, tau), obs=b)


class Amortised:
    """Two latents for each row, and a critic that sees the row."""

    def __call__(self, x, batch=None):
        c = numpyro.param("c", 0.3)
        with numpyro.plate("N", len(x), subsample_size=batch):
            b = numpyro.subsample(x, event_dim=0)
            e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer=NOISE)
            tau = jnp.exp(0.3 * e[:, 0] + c * b)
            numpyro.sample("tau", Implicit(tau, support=dist.constraints.positive))
            numpyro.sample("z", Implicit(b + 0.5 * jnp.sinh(e[:, 1]) + e[:, 0]))

    def features(self, x, batch=None):
        return numpyro.subsample(x, event_dim=0)[..., None]

    def critic(self, params, z, features):
        assert features.shape == (*z.shape[1:-1], 1)
        return params["w"] * jnp.sin(z[..., 0]) * z[..., 1] + features[..., 0] * z[..., 1] ** 2


X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])
LOCAL = {"loc": jnp.array(0.5), "c": jnp.array(0.3), "w": jnp.array(0.7)}


@cache
def on_rows():
    """Values and gradients of four draws of three rows."""
    losses = {name: DensityRatioELBO(4, name) for name in ("adaptive", "prior")}

    @jax.jit
    def values(params):
        def value(p, loss):
            return loss.loss(random.key(2), p, local_model, Amortised(), X, 3)

        return {name: jax.value_and_grad(value)(params, loss) for name, loss in losses.items()}

    return values(LOCAL)


@pytest.mark.slow
@pytest.mark.parametrize("contrast", ["adaptive", "prior"])
def test_rows_of_a_minibatch_have_a_ratio_each_and_are_scaled(contrast):
    K, M, key = 4, 3, random.key(2)
    drawn = guide_draws(key, K, Amortised(), LOCAL, X, M)
    tau, x = np.asarray(drawn["tau"]), np.asarray(X[drawn["N"][0]])
    z = np.stack([np.log(tau), drawn["z"]], -1)
    total = 0.0
    for n in range(M):
        log_lik = dist.Normal(z[:, n, 1], tau[:, n]).log_prob(x[n])
        prior = dist.HalfNormal(1.5).log_prob(tau[:, n]) + z[:, n, 0]
        prior += dist.Normal(0.5, 1.0).log_prob(z[:, n, 1])
        u, log_r = z[:, n], prior
        if contrast == "adaptive":
            scale = z[:, n].std(0)
            u = (z[:, n] - z[:, n].mean(0)) / scale
            log_r = dist.Normal().log_prob(u).sum(-1) - np.log(scale).sum()
        T = 0.7 * np.sin(u[:, 0]) * u[:, 1] + x[n] * u[:, 1] ** 2
        total += np.mean(log_lik + prior - log_r - T) * 6 / 3
    value, grad = on_rows()[contrast]
    assert value == pytest.approx(-float(total), rel=2e-5)
    # The gradient of the prior's parameter is that of the log joint.
    assert grad["loc"] == pytest.approx(-6.0 * float(np.mean(z[..., 1] - 0.5)), rel=1e-4)


@pytest.mark.slow
def test_kernel_ratio_is_that_of_the_contrast_over_the_guide():
    """Fitted to fixed draws, so that the gradient flows through the point of evaluation alone."""
    ratio, key, K = KernelRatio(0.05), random.key(1), 30
    contrast_key = random.split(random.fold_in(random.split(key)[1], K))[0]
    y = random.normal(random.fold_in(contrast_key, 0), (K, 1))

    def model():
        numpyro.sample("z", dist.Normal(0.4, 1.5))

    def guide():
        m = numpyro.param("m", 0.8)
        e = numpyro.sample("e", dist.Normal(), infer=NOISE)
        numpyro.sample("z", Implicit(m + 0.7 * e))

    e = guide_draws(key, K, guide, {})["e"]

    def by_hand(m):
        z = (m + 0.7 * e)[:, None]
        u, _, scale = whiten(z)
        fitted = ratio.fit(y, jax.lax.stop_gradient(u))
        log_p = dist.Normal(0.4, 1.5).log_prob(z[:, 0])
        log_r = dist.Normal().log_prob(u[:, 0]) - jnp.log(scale[0])
        return -jnp.mean(log_p - log_r + fitted.log_ratio(u))

    loss = DensityRatioELBO(K, ratio=ratio)
    ours = jax.value_and_grad(lambda m: loss.loss(key, {"m": m}, model, guide))
    value, grad = jax.jit(ours)(0.8)
    expected, expected_grad = jax.jit(jax.value_and_grad(by_hand))(0.8)
    assert value == pytest.approx(float(expected), rel=1e-4)
    assert grad == pytest.approx(float(expected_grad), rel=1e-3)


def without_critic(*args):
    return guide()


def rows(x, batch=None):
    Amortised()(x, batch)


def test_what_does_not_fit_is_named():
    loss = DensityRatioELBO(3)
    sentence = r"critic, and the guide has none; .*with_critic\(guide\).*ratio=LogisticRatio\(\)"
    assert_refuses(sentence, loss, PARAMS, model, without_critic)
    field = with_critic(guide, output_dim=2)
    params = {**PARAMS, **params_of(field)}
    assert_refuses(r"must give \(3,\); give it output_dim=1", loss, params, model, field)
    sentence = r"each row of the plates \('N',\).*features=\.\.\."
    assert_refuses(sentence, loss, LOCAL, local_model, with_critic(rows), X)
    outside = Outside()
    assert_refuses("leave features out of with_critic", loss, PARAMS, model, outside)


class Outside(WithOptimalCritic):
    """Its critic asks for features, but its latents are in no plate."""

    def __init__(self):
        super().__init__("adaptive")

    def features(self):
        return Y


def test_prior_draws_are_in_the_order_of_the_guide():
    """The vector of an automatic guide, whichever order of the sites it has."""

    def model():
        numpyro.sample("b", dist.Gamma(3.0, 2.0))
        numpyro.sample("a", dist.Normal(jnp.array([1.0, 5.0]), 0.5).to_event(1))

    class Spy(AutoDiagonalNormal):
        def critic(self, params, z):
            self.seen.append(z)
            return jnp.zeros(z.shape[:-1])

    guide = Spy(model)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    guide._unpack_latent = lambda x: {"a": x[..., :2], "b": x[..., 2]}
    params = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}

    @jax.jit
    def prior_draws(params):
        guide.seen = []
        DensityRatioELBO(4000, "prior").loss(random.key(0), params, model, guide)
        return guide.seen[1]  # the draws of q are the two other calls

    a, c, b = jnp.split(prior_draws(params), 3, -1)
    # Standard errors: .01 of the normals, .6 / 63 = .01 of log b, whose mean is digamma(3) - log 2.
    assert a.mean() == pytest.approx(1.0, abs=0.04) and c.mean() == pytest.approx(5.0, abs=0.04)
    assert b.mean() == pytest.approx(0.9228 - 0.6931, abs=0.04)


def params_of(guide):
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def test_a_vector_of_all_latents_is_not_for_the_rows_of_a_minibatch():
    def model(x):
        w = numpyro.sample("w", dist.Normal())
        with numpyro.plate("N", 6, subsample_size=2):
            numpyro.sample("z", dist.Normal(w, 1.0))

    sentence = "'z' lies in the subsampled plate 'N'.*no subsample_size, or Implicit sites"
    loss = DensityRatioELBO(3, ratio=LogisticRatio())
    assert_refuses(sentence, loss, NONE, model, AutoNormal(model), X)
