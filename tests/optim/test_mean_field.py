"""Optimisers of mean-field normals: steps by hand, limits, exact steps, and use in SVI."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import ExpTransform
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
import optax
import pytest

from numpyro_ext.optim import ivon, vadam, von

ALL = {"ivon": ivon, "von": lambda **kw: von(0.1, **kw), "vadam": lambda **kw: adam_of(**kw)}


def adam_of(**kwargs):
    return vadam(0.01, num_data=10, prior_precision=1e-3, **kwargs)


def params_of(mean, sd):
    """A normal whose scale leaf is log sd."""
    return {"w_loc": jnp.asarray(mean, float), "w_scale": jnp.log(jnp.asarray(sd, float))}


def gradient_of(of_mean, of_variance, sd):
    """The gradient by the leaves, from that by mean and variance: d sd^2 / d log sd = 2 sd^2."""
    of_mean, sd = jnp.asarray(of_mean, float), jnp.asarray(sd, float)
    return {"w_loc": of_mean, "w_scale": 2 * sd**2 * jnp.asarray(of_variance, float)}


def normal_of(params):
    return params["w_loc"], jnp.exp(params["w_scale"])


def step(optim, gradient, state, params):
    steps, state = jax.jit(optim.update)(gradient, state, params)
    return optax.apply_updates(params, steps), state


@pytest.mark.x64
def test_four_steps_of_vadam_by_hand(tol):
    """Mean gradient 3 (w - 1) of 10 rows at w = mu + eps sd, by hand."""
    num_data, lam = 10, 0.5
    optim = vadam(0.1, num_data=num_data, prior_precision=lam, scale_transform=ExpTransform())
    params = params_of(0.0, lam**-0.5)
    state, means = optim.init(params), []
    for eps in (0.5, -1.0, 0.25, 0.0):
        mu, sd = normal_of(params)
        gradient = gradient_of(num_data * 3 * (mu + eps * sd - 1) + lam * mu, 0.0, sd)
        params, state = step(optim, gradient, state, params)
        means.append(params["w_loc"])
    close = {"rtol": tol(1e-5, 1e-9)}
    np.testing.assert_allclose(
        means, [0.0946160121, 0.1760592347, 0.2551011372, 0.3340851592], **close
    )
    np.testing.assert_allclose(state.normals["w_loc"].square, 0.5380065359, **close)
    np.testing.assert_allclose(normal_of(params)[1], 0.4123907575, **close)


def test_two_steps_of_ivon_by_hand(tol):
    """P' = P + p C + (p C)^2 / 2 P, m' = b m + (1 - b) G, mu' = mu - r m' / (1 - b^t) P'."""
    optim = ivon(0.2, b1=0.5, precision_rate=0.1, scale_transform=ExpTransform())
    params, mu, P, m = params_of(1.0, 0.5), 1.0, 4.0, 0.0
    state = optim.init(params)
    for t, (G, C) in enumerate([(3.0, 20.0), (-1.0, -30.0)], 1):
        params, state = step(optim, gradient_of(G, C / 2, P**-0.5), state, params)
        P, m = P + 0.1 * C + (0.1 * C) ** 2 / (2 * P), 0.5 * m + 0.5 * G
        mu -= 0.2 * m / (1 - 0.5**t) / P
    np.testing.assert_allclose(normal_of(params), [mu, P**-0.5], rtol=tol(1e-5, 1e-9))


def test_two_steps_of_von_by_hand(tol):
    """P' = P + r C + (r C)^2 / 2 P, mu' = mu - r G / P' + g P (mu - mu_before) / P'."""
    optim = von(0.2, momentum=0.5, scale_transform=ExpTransform())
    params, mu, before, P = params_of(1.0, 0.5), 1.0, 1.0, 4.0
    state = optim.init(params)
    for G, C in ((3.0, 20.0), (-1.0, -30.0)):
        params, state = step(optim, gradient_of(G, C / 2, P**-0.5), state, params)
        old, P = P, P + 0.2 * C + (0.2 * C) ** 2 / (2 * P)
        mu, before = mu + (0.5 * old * (mu - before) - 0.2 * G) / P, mu
    np.testing.assert_allclose(normal_of(params), [mu, P**-0.5], rtol=tol(1e-5, 1e-9))


PRECISION = jnp.array([[4.0, 1.5, 0.0], [1.5, 9.0, -2.0], [0.0, -2.0, 1.0]])
MODE = jnp.array([1.0, -2.0, 30.0])


def exact(params):
    """The gradient of the loss of a mean-field normal for the target N(MODE, PRECISION^-1)."""
    mu, sd = normal_of(params)
    return gradient_of(PRECISION @ (mu - MODE), (jnp.diag(PRECISION) - sd**-2) / 2, sd)


@pytest.mark.parametrize(
    "optim",
    [
        ivon(0.2, precision_rate=0.1, scale_transform=ExpTransform()),
        von(0.1, scale_transform=ExpTransform()),
        von(0.1, momentum=0.5, scale_transform=ExpTransform()),
    ],
)
def test_exact_gradients_lead_to_the_best_mean_field_normal(optim, tol):
    """Its means are the target's, its precisions the diagonal of the target's."""

    def advance(carry, _):
        params, state = carry
        steps, state = optim.update(exact(params), state, params)
        return (optax.apply_updates(params, steps), state), None

    params = params_of([5.0, 5.0, 5.0], [0.1, 3.0, 10.0])
    start = params, optim.init(params)
    (params, _), _ = jax.jit(lambda s: jax.lax.scan(advance, s, length=2000))(start)
    mu, sd = normal_of(params)
    np.testing.assert_allclose(mu, MODE, rtol=tol(1e-4, 1e-8))
    np.testing.assert_allclose(sd**-2, jnp.diag(PRECISION), rtol=tol(1e-4, 1e-8))


@pytest.mark.parametrize("size", [1e6, 1e19, np.inf])
def test_ivon_limits_a_gradient_of_any_size(size):
    """To 30 nats a sd, of which all steps after it make 30 r sd, and to 10 times the precision:
    1 + 10 + 10^2 / 2 = 61 of it, or 1 - 10 + 10^2 / 2 = 41."""
    optim, signs = ivon(0.01, scale_transform=ExpTransform()), jnp.array([1.0, -1.0])
    params = params_of([0.0, 0.0], [0.1, 3.0])
    state = optim.init(params)._replace(count=jnp.asarray(1000))
    after, state = step(optim, {"w_loc": size * signs, "w_scale": size * signs}, state, params)
    ratio = (normal_of(params)[1] / normal_of(after)[1]) ** 2
    np.testing.assert_allclose(ratio, [61, 41], rtol=1e-5)
    for _ in range(200):
        after, state = step(optim, gradient_of([0.0, 0.0], 0.0, [1.0, 1.0]), state, after)
    moved = normal_of(after)[0] / normal_of(params)[1] * ratio
    np.testing.assert_allclose(moved, -0.3 * signs, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.3, 1.0, 30.0])
def test_the_retraction_keeps_half_of_a_precision_at_least(rate):
    params = params_of(jnp.zeros(3), [0.1, 1.0, 10.0])
    noise = gradient_of(jnp.zeros(3), [-300.0, -2.0, 1.0], [0.1, 1.0, 10.0])
    for optim in (von(rate, scale_transform=ExpTransform()), ivon(scale_transform=ExpTransform())):
        new, _ = step(optim, noise, optim.init(params), params)
        ratio = (normal_of(params)[1] / normal_of(new)[1]) ** 2
        assert jnp.all(ratio > 0.4999)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_step_of_ivon_is_one_standard_deviation_at_most(sign):
    """Of many rows: the gradient is 1e6 times what the start of the precision is meant for."""
    optim = ivon(0.5, scale_transform=ExpTransform())
    params = params_of([2.0, 3.0], [0.1, 0.5])
    new, _ = step(
        optim, gradient_of([sign * 1e6, 0.1], [7.0, -2.0], [0.1, 0.5]), optim.init(params), params
    )
    (mu, _), (mean, sd) = normal_of(params), normal_of(new)
    np.testing.assert_allclose(mean[0] - mu[0], -sign * sd[0], rtol=1e-5)
    np.testing.assert_allclose(mean[1] - mu[1], -0.5 * 0.1 * sd[1] ** 2, rtol=1e-4)


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_other_leaves_go_to_the_other_optimiser(make):
    """Among them a network's dict, a scale without a mean, and a pair of two shapes."""
    others = {
        "nn$params": {"kernel": jnp.ones((2, 2))},
        "noise_scale": jnp.array(1.0),
        "b_loc": jnp.ones(2),
        "b_scale": jnp.array(1.0),
    }
    params = {**params_of(0.5, 0.1), **others}
    optim = make(scale_transform=ExpTransform(), other=optax.sgd(0.25))
    gradient = jax.tree.map(jnp.ones_like, params)
    new, _ = step(optim, gradient, optim.init(params), params)
    for name, leaf in others.items():
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b - 0.25), new[name], leaf)
    assert abs(new["w_loc"] - (0.5 - 0.25)) > 1e-3


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_gradient_that_is_not_finite_is_passed_on(make):
    params = params_of(0.5, 0.1)
    optim = make()
    new, _ = step(optim, jax.tree.map(lambda x: x * jnp.nan, params), optim.init(params), params)
    assert all(jnp.isnan(leaf) for leaf in new.values())


X = np.random.RandomState(0).normal(size=(40, 2)) @ [[1.0, 0.6], [0.0, 0.8]]
Y = X @ [1.0, -2.0] + 0.5


def regression(batch=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("data", 40, subsample_size=batch) as idx:
        numpyro.sample("y", dist.Normal(jnp.asarray(X)[idx] @ w, 1.0), obs=jnp.asarray(Y)[idx])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "batch"), [(AutoNormal, None), (AutoDiagonalNormal, 10)])
def test_svi_ends_at_the_best_mean_field_normal(family, batch):
    """Rates fall to 0, so that what is left is noise: of the mean some per cent of an sd."""
    falling = optax.cosine_decay_schedule(0.1, 3000)
    guide = family(regression, init_scale=0.02)
    svi = SVI(regression, guide, ivon(falling), Trace_ELBO(8))
    params = svi.run(random.key(0), 3000, batch, progress_bar=False, stable_update=True).params
    precision = X.T @ X + np.eye(2)
    mean = np.linalg.solve(precision, X.T @ Y)
    loc, scale = (next(v for n, v in params.items() if n.endswith(x)) for x in ("_loc", "_scale"))
    sd = np.diag(precision) ** -0.5
    np.testing.assert_allclose((loc - mean) / sd, 0, atol=0.1)
    np.testing.assert_allclose(scale, sd, rtol=0.1)


def test_what_cannot_be_read_off_the_parameters_is_said():
    svi = SVI(regression, AutoDelta(regression), ivon(), Trace_ELBO())
    with pytest.raises(ValueError, match="use AutoNormal or AutoDiagonalNormal"):
        svi.init(random.key(0))
    with pytest.raises(ValueError, match="starts wider than its prior"):
        vadam(0.1, num_data=5, prior_precision=4.0).init(
            {"w_loc": jnp.zeros(1), "w_scale": jnp.ones(1)}
        )
    with pytest.raises(ValueError, match="precisions must be positive"):
        vadam(0.1, num_data=5, prior_precision={"w_loc": -1.0})
    with pytest.raises(ValueError, match="squares is 'both'"):
        vadam(0.1, num_data=5, squares="both")
