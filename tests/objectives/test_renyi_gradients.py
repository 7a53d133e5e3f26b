"""The four gradient estimators against quadrature, and against each other with units."""

from functools import partial

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDelta, AutoIAFNormal, AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.objectives import IWELBO, VRELBO, renyi
from tests.objectives.compare import NoInverse, assert_refuses
from tests.objectives.models import (
    LOCAL_PARAMS,
    X_LOCAL,
    local_guide,
    local_model,
    mean_gradient,
    normal_guide,
    value_and_grad,
)

PARAMS = {"b": 0.8, "m": 0.3, "s": 0.9}
ALPHAS = (-1.0, 0.0, 0.5, 1.0, 1.5)


def one_latent(x=1.2):
    b = numpyro.param("b", 1.0)
    z = numpyro.sample("z", dist.Normal(0.4, 1.3))
    numpyro.sample("x", dist.Normal(b * z, 1.1), obs=x)


def quadrature_gradient(alpha):
    """Gradient of minus the mean of the two-particle estimate, by a 60 x 60 Gauss-Hermite rule."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def log_weight(params, eps):
        b, m, s = params
        z = m + s * eps
        log_p = -0.5 * ((z - 0.4) / 1.3) ** 2 - np.log(1.3) - 0.5 * ((1.2 - b * z) / 1.1) ** 2
        return log_p - np.log(1.1) - np.log(2 * np.pi) / 2 + 0.5 * eps**2 + np.log(s)

    def loss(params):
        lw = log_weight(params, nodes)
        if alpha == 1:
            return -weights @ lw
        bound = (np.logaddexp(*((1 - alpha) * w for w in np.meshgrid(lw, lw))) - np.log(2)) / (
            1 - alpha
        )
        return -weights @ bound @ weights

    center, step = np.array([PARAMS["b"], PARAMS["m"], PARAMS["s"]]), 1e-5
    gradient = [(loss(center + step * e) - loss(center - step * e)) / (2 * step) for e in np.eye(3)]
    return dict(zip(("b", "m", "s"), gradient, strict=True))


@pytest.mark.parametrize("gradient", ["standard", "single", "dreg", "stl"])
def test_mean_is_the_exact_gradient(gradient):
    """For every order; "stl" only at order 1, where it is unbiased."""
    exact = [quadrature_gradient(alpha) for alpha in ALPHAS]
    mean, error = mean_gradient(
        lambda alpha: VRELBO(alpha, 2, gradient=gradient),
        ALPHAS,
        40_000,
        PARAMS,
        one_latent,
        normal_guide,
    )
    for i, alpha in enumerate(ALPHAS):
        for name in PARAMS:
            if gradient == "stl" and alpha != 1 and name != "b":
                continue
            assert abs(mean[name][i] - exact[i][name]) < 4 * error[name][i] + 1e-5, (alpha, name)
    if gradient == "stl":
        bias = abs(mean["s"][1] - exact[1]["s"]) / error["s"][1]
        assert bias > 6  # as the docstring says


@pytest.mark.slow
def test_units_and_minibatches_have_the_same_mean():
    """A chained, amortised guide with a constrained site: scaling a path twice would show."""
    settings = ((0.5,), 2000, LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 3)
    exact, error = mean_gradient(lambda alpha: VRELBO(alpha, 4), *settings, seed=1)
    for i, gradient in enumerate(("single", "dreg")):
        mean, error_2 = mean_gradient(
            lambda alpha, g=gradient: VRELBO(alpha, 4, gradient=g), *settings, seed=2 + i
        )
        for name in LOCAL_PARAMS:
            z = np.abs(mean[name] - exact[name]) / np.hypot(error[name], error_2[name])
            assert np.all(z < 4), (gradient, name)


@pytest.mark.slow
@pytest.mark.x64
def test_single_picks_the_extreme_particle_of_each_unit(tol):
    """An infinite order draws nothing: value and gradient are those of "standard", unit by unit."""
    losses = [VRELBO(-np.inf, 5), VRELBO(-np.inf, 5, gradient="single")]
    a, b = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide, X_LOCAL, 3)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol(1e-5, 1e-12))


def correlated_model():
    cov = jnp.array([[1.0, 0.6], [0.6, 2.0]])
    z = numpyro.sample("z", dist.MultivariateNormal(jnp.array([1.0, -1.0]), cov))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("x", dist.Normal(z[0] * s, 1.0), obs=0.7)


def initial(guide, model=correlated_model):
    svi = SVI(model, guide, optax.adam(0.1), IWELBO())
    return svi.get_params(svi.init(random.key(0)))


@pytest.mark.slow
def test_an_auto_guide_has_the_same_mean_gradient():
    """One joint latent and Delta sites, which dreg must follow and not replace."""
    guide = AutoMultivariateNormal(correlated_model)
    params = initial(guide)

    def gradients(key):
        losses = (IWELBO(3), IWELBO(3, gradient="dreg"))
        return [
            ravel_pytree(
                jax.grad(lambda p, loss=loss: loss.loss(key, p, correlated_model, guide))(params)
            )[0]
            for loss in losses
        ]

    exact, dreg = jax.jit(jax.vmap(gradients))(random.split(random.key(0), 800))
    error = (dreg - exact).std(0) / 800**0.5
    assert np.all(np.abs((dreg - exact).mean(0)) < 4.5 * error + 1e-6)


def shifted_noise():
    mu = numpyro.param("mu", 0.1)
    eps = numpyro.sample(
        "eps", dist.Normal(jnp.zeros(2), 1.0).to_event(1), infer={"is_auxiliary": True}
    )
    numpyro.sample("z", dist.Delta(mu + eps, event_dim=1))
    numpyro.sample("s", dist.LogNormal(0.0, 1.0))


def observed_in_the_guide():
    mu = numpyro.param("mu", 0.1)
    numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=0.3, infer={"is_auxiliary": True})


def flow_without_inverse():
    numpyro.sample("z", dist.Normal(numpyro.param("mu", jnp.zeros(2)), 1.0).to_event(1))
    shift = dist.transforms.AffineTransform(numpyro.param("shift", 0.0), 1.0)
    numpyro.sample("s", dist.TransformedDistribution(dist.Normal(), [shift, NoInverse()]))


def support_from_a_parameter():
    numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("s", dist.Uniform(0.0, numpyro.param("mu", 0.1)))


def factor_in_the_guide():
    mu = numpyro.param("mu", 0.1)
    numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    numpyro.sample("s", dist.LogNormal(0.0, 1.0))
    numpyro.factor("tilt", mu**2)


@pytest.mark.parametrize(
    ("guide", "sentence"),
    [
        (shifted_noise, "'z' of the guide is a Delta and depends on a parameter"),
        (observed_in_the_guide, "'y' of the guide is observed and depends on a parameter"),
        (factor_in_the_guide, "'tilt' of the guide is a factor and depends on a parameter"),
        (AutoDelta(correlated_model), "'s' of the guide is a Delta and depends on a parameter"),
        (support_from_a_parameter, "'s' of the guide has a support that depends on a parameter"),
        (
            flow_without_inverse,
            "'s' cannot be evaluated at a given value, because a transform has",
        ),
    ],
    ids=["shifted noise", "observed", "factor", "AutoDelta", "support", "no inverse"],
)
def test_densities_that_cannot_be_evaluated_at_a_given_value(guide, sentence):
    params = initial(guide)
    for gradient in ("stl", "dreg"):
        loss = VRELBO(0.5, 2, gradient=gradient)
        sentence_and_remedy = f'{sentence}.*use gradient="standard"'
        assert_refuses(sentence_and_remedy, loss, params, correlated_model, guide)
    for gradient in ("standard", "single"):
        loss = VRELBO(0.5, 2, gradient=gradient)
        jax.eval_shape(lambda loss=loss: loss.loss(random.key(0), params, correlated_model, guide))


def shares():
    with numpyro.plate("rows", 3):
        numpyro.sample("share", dist.Dirichlet(jnp.full(4, 0.3)))
        numpyro.sample("chance", dist.Beta(0.5, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["stl", "dreg"])
def test_log_q_of_a_value_on_the_boundary_is_that_of_what_was_drawn(gradient):
    """A share of 1 in float32 has no inverse; its density in unconstrained space is known.

    A path derivative in the location misses the score eps / s, whose mean is zero.
    """
    guide, size = AutoNormal(shares, init_scale=0.5), 2000
    params = initial(guide, shares)
    far = {"share_auto_loc": 35.0, "chance_auto_loc": -30.0}
    params |= {name: jnp.full_like(params[name], x) for name, x in far.items()}

    def of_estimator(gradient):
        loss = VRELBO(1.0, size, gradient=gradient)
        at = jax.value_and_grad(lambda params: loss_of(loss, params, shares, guide))
        return jax.jit(at)(params)

    (path, by_path), (value, by_all) = of_estimator(gradient), of_estimator("standard")
    assert np.isclose(path, value, rtol=1e-5)
    for name in far:
        np.testing.assert_allclose(by_path[name], by_all[name], atol=5 / 0.5 / size**0.5)


@pytest.mark.slow
def test_default_is_the_path_derivative_at_order_1_where_it_is_cheap(monkeypatch):
    """That is where log q of a given draw is to be had, at a cost like that of the draw's own."""
    taken = []
    for name in ("stl", "standard"):
        made = getattr(renyi, name)
        monkeypatch.setattr(renyi, name, lambda *a, n=name, f=made: taken.append(n) or f(*a))

    def wide(d=20):
        numpyro.sample("z", dist.Normal(jnp.zeros(d), 1.0).to_event(1))

    wider = partial(wide, 40)
    narrow = numpyro.handlers.substitute(one_latent, {"b": 1.0})
    iaf = AutoIAFNormal(wide, num_flows=1, hidden_dims=[20])  # 20 passes for one inverse
    for guide, model, expected in (
        (normal_guide, narrow, "stl"),
        (support_from_a_parameter, correlated_model, "standard"),
        (flow_without_inverse, correlated_model, "standard"),
        (AutoDelta(correlated_model), correlated_model, "standard"),
        (iaf, wide, "standard"),
        (AutoRealNVPNormal(wider), wider, "stl"),  # it begins at a mode, with a full factor
    ):
        params = initial(guide, model)
        taken.clear()
        jax.eval_shape(lambda m=model, g=guide, p=params: loss_of(VRELBO(1.0, 2), p, m, g))
        assert taken == [expected]
    assert VRELBO(0.9, 2).gradient == "standard"


def loss_of(loss, params, model, guide):
    return loss.loss(random.key(0), params, model, guide)
