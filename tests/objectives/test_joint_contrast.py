"""`DensityRatioELBO(contrast="joint")` and `SymmetricKL` on linear normal models of rows."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.guides import with_critic
from numpyro_ext.objectives import DensityRatioELBO, SymmetricKL, density_ratio
from numpyro_ext.scores import LogisticRatio
from tests.objectives.compare import assert_refuses

A = jnp.array([[1.0, 0.5], [-0.3, 0.8]])
PRIOR = jnp.array([1.5, 0.7])
NOISE = jnp.array([0.4, 1.2])
X = jnp.array([[1.5, -0.4], [3.0, 0.2], [-1.0, 2.0], [0.3, 0.1], [2.0, -2.0], [0.9, 1.1]])
N, M, KEYS = len(X), 5, 64
# The density of which the data are taken to come.
COV = np.array([[2.5, -0.4], [-0.4, 1.8]])
DATA = jax.jit(lambda: dist.MultivariateNormal(jnp.array([1.0, 0.3]), COV))()


class Simulator(dist.Normal):
    """Whose density nobody knows."""

    def log_prob(self, value):
        raise NotImplementedError


def model(x, batch=None, loc=0.4, noise=Simulator):
    with numpyro.plate("N", len(x), subsample_size=batch):
        rows = numpyro.subsample(x, event_dim=1)
        z = numpyro.sample("z", dist.Normal(loc, PRIOR).to_event(1))
        numpyro.sample("x", noise(z @ A.T, NOISE).to_event(1), obs=rows)


def trained_model(x, batch=None):
    model(x, batch, numpyro.param("loc", 0.4))


def guide(x, batch=None):
    c, B = numpyro.param("c", jnp.array([0.3, -0.2])), numpyro.param("B", 0.3 * jnp.eye(2))
    L = numpyro.param("L", jnp.array([[0.6, 0.0], [0.4, 0.5]]))
    with numpyro.plate("N", len(x), subsample_size=batch):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.sample("z", dist.MultivariateNormal(c + rows @ B.T, scale_tril=L))


PARAMS = {
    "c": jnp.array([0.3, -0.2]),
    "B": jnp.array([[0.5, -0.1], [0.2, 0.4]]),
    "L": jnp.array([[0.6, 0.0], [0.4, 0.5]]),
}


def joints(params):
    """The normals of (z, x) by the guide, with DATA, and by the model."""
    c, B, L = params["c"], params["B"], params["L"]
    m, S = DATA.mean, DATA.covariance_matrix
    q = normal(c + B @ m, L @ L.T + B @ S @ B.T, B @ S, m, S)
    loc, P = jnp.full(2, params.get("loc", 0.4)), jnp.diag(PRIOR**2)
    p = normal(loc, P, P @ A.T, A @ loc, A @ P @ A.T + jnp.diag(NOISE**2))
    return q, p


def normal(z, zz, zx, x, xx):
    return dist.MultivariateNormal(jnp.concatenate([z, x]), jnp.block([[zz, zx], [zx.T, xx]]))


class WithOptimalCritic:
    """The guide with the critic that the ratio converges to."""

    def __call__(self, x, batch=None):
        guide(x, batch)

    def critic(self, params, pair):
        q, p = joints(jax.lax.stop_gradient(params))  # as if they were the critic's own
        return q.log_prob(pair) - p.log_prob(pair)


def forward(params):
    """The sum over the rows of E_q T: the mean of a quadratic under a normal."""
    q, p = joints(params)

    def of_row(x):
        m, L = params["c"] + params["B"] @ x, params["L"]
        T = lambda z: (lambda pair: q.log_prob(pair) - p.log_prob(pair))(jnp.append(z, x))  # noqa: E731
        return T(m) + jnp.trace(jax.hessian(T)(m) @ L @ L.T) / 2

    return jnp.sum(jax.vmap(of_row)(X))


def backward(params):
    """N KL(p || q)."""
    q, p = joints(params)
    return N * dist.kl_divergence(p, q)


def check(loss, the_model, params, expected, expected_grad):
    """Over 64 keys, each of 40 draws of 5 of the 6 rows."""
    one = WithOptimalCritic()

    @jax.jit
    def each(params):
        def value(params, key):
            return loss.loss(key, params, the_model, one, X, M)

        keys = random.split(random.key(0), KEYS)
        return jax.vmap(jax.value_and_grad(value), (None, 0))(params, keys)

    values, grads = each(params)
    for name, ours, theirs, limit in (
        ("value", values, expected, 0.4),
        *((name, grads[name], expected_grad[name], 1.5) for name in params),
    ):
        error = np.asarray(ours.std(0)) / KEYS**0.5
        assert np.all(error < limit), (name, error)  # so that it can fail
        assert np.all(np.abs(ours.mean(0) - theirs) <= 5 * error + 1e-6), name


@pytest.mark.slow
@pytest.mark.x64
def test_value_is_the_divergence_and_gradient_is_of_the_elbo_without_a_likelihood():
    """E_q T - log of the data's density is minus the ELBO, so that gradients are equal."""

    def minus_elbo(params):
        def of_row(x):
            m, L = params["c"] + params["B"] @ x, params["L"]

            def log_p(z):
                return (
                    dist.Normal(0.4, PRIOR).log_prob(z).sum()
                    + dist.Normal(A @ z, NOISE).log_prob(x).sum()
                )

            entropy = 1 + jnp.log(2 * jnp.pi) + jnp.linalg.slogdet(L)[1]
            return log_p(m) + jnp.trace(jax.hessian(log_p)(m) @ L @ L.T) / 2 + entropy

        return -jnp.sum(jax.vmap(of_row)(X))

    elbo, grad = jax.jit(jax.value_and_grad(minus_elbo))(PARAMS)
    expected = forward(PARAMS)
    assert expected == pytest.approx(float(elbo + DATA.log_prob(X).sum()), rel=1e-4)
    check(DensityRatioELBO(40, "joint"), model, PARAMS, expected, grad)


@pytest.mark.slow
@pytest.mark.x64
def test_symmetric_value_is_both_divergences_and_each_player_descends_one():
    params = {**PARAMS, "loc": jnp.array(0.9)}
    both = jax.jit(lambda p: [jax.value_and_grad(f)(p) for f in (forward, backward)])(params)
    (one, _), (other, of_model) = both
    # The guide's T is frozen: the gradient of the ELBO, without the part of q's own density.
    q_frozen = {**params}

    def through_draws(p):
        q, model_of = joints(q_frozen)
        fixed = lambda pair: q.log_prob(pair) - model_of.log_prob(pair)  # noqa: E731

        def of_row(x):
            m, L = p["c"] + p["B"] @ x, p["L"]
            T = lambda z: fixed(jnp.append(z, x))  # noqa: E731
            return T(m) + jnp.trace(jax.hessian(T)(m) @ L @ L.T) / 2

        return jnp.sum(jax.vmap(of_row)(X))

    grad = jax.grad(through_draws)(params)
    grad["loc"] = of_model["loc"]
    check(SymmetricKL(40), trained_model, params, one + other, grad)


@pytest.mark.slow
@pytest.mark.x64
def test_both_divergences_are_0_at_the_optimum_and_not_beside_it():
    """By a fitted ratio, on 2,000 rows of the model itself; 15 monomials fit 2,000 pairs each to
    about 15 / 2000 nats."""
    P, S = jnp.diag(PRIOR**2), A @ jnp.diag(PRIOR**2) @ A.T + jnp.diag(NOISE**2)
    B = P @ A.T @ jnp.linalg.inv(S)
    L = jnp.linalg.cholesky(P - B @ A @ P)
    loc = jnp.full(2, 0.4)
    x = dist.MultivariateNormal(A @ loc, S).sample(random.key(3), (2000,))
    optimum = {"c": loc - B @ A @ loc, "B": B, "L": L}
    wide = {**optimum, "L": 1.5 * L}
    losses = (
        DensityRatioELBO(1, "joint", ratio=LogisticRatio(l2=1e-6)),
        SymmetricKL(2, ratio=LogisticRatio(l2=1e-6)),
    )

    @jax.jit
    def values(params):
        return [loss.loss(random.key(0), params, model, guide, x) / len(x) for loss in losses]

    assert all(abs(value) < 0.03 for value in values(optimum))
    # KL of a normal in 2 dimensions with sds 1.5 times as large, and the same reversed.
    one, other = (2 * (r**2 / 2 - 0.5 - np.log(r)) for r in (1.5, 1 / 1.5))
    found = values(wide)
    assert found[0] == pytest.approx(one, abs=0.08)
    assert found[1] == pytest.approx(one + other, abs=0.15)


def value_of(loss, params, the_model, the_guide, x):
    return loss.loss(random.key(0), params, the_model, the_guide, x, M)


@pytest.mark.slow
def test_the_critic_sees_latents_and_data_and_what_does_not_fit_is_named():
    loss, symmetric = DensityRatioELBO(3, "joint"), SymmetricKL(3)
    amortised, wrong = (with_critic(guide, features=f, hidden_dims=(4,)) for f in (2, 3))
    params, of_wrong = (
        {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        for trace in (
            numpyro.handlers.trace(numpyro.handlers.seed(one, 0)).get_trace(X, M)
            for one in (amortised, wrong)
        )
    )
    full = {**params, "loc": 0.4}
    for args in ((loss, params, model), (symmetric, full, trained_model)):
        value = jax.eval_shape(lambda x, args=args: value_of(*args, amortised, x), X)
        assert value.shape == ()
    sentence = r"2 observed numbers of a row; make it by with_critic\(guide, features=2\)"
    assert_refuses(sentence, loss, of_wrong, model, wrong, X, M)
    sentence = r"SymmetricKL trains a critic, .* give SVI with_critic\(guide, features=2\)"
    assert_refuses(sentence, symmetric, full, trained_model, guide, X, M)
    sentence, known = (
        r"beside which only DensityRatioELBO\(contrast='joint'\) and SymmetricKL ask it",
        partial(model, noise=dist.Normal),
    )
    assert_refuses(sentence, DensityRatioELBO(3), params, known, amortised, X)
    sentence = "no gradient for the parameter 'loc' of the model; use SymmetricKL"
    assert_refuses(sentence, loss, {**params, "loc": 0.4}, trained_model, amortised, X)
    counts = jnp.ones((6, 2), int)

    def discrete(x, batch=None):
        rate = numpyro.param("loc", 0.4)
        with numpyro.plate("N", len(x)):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            numpyro.sample("x", dist.Poisson(jnp.exp(rate + z)).to_event(1), obs=counts)

    sentence = "no gradient for the parameters of the model through its site 'x', a"
    assert_refuses(sentence, symmetric, {**params, "loc": 0.4}, discrete, amortised, X)

    def shared(x, batch=None):
        numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("x", dist.Normal(0.0, 1.0), obs=x[:, 0])

    def of_shared(x, batch=None):
        numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    sentence = "every latent and observed site must be in it without a mask, and 'z' is not"
    assert_refuses(sentence, loss, params, shared, of_shared, X)

    def weighted(x, batch=None):
        model(x, batch)
        with numpyro.plate("N2", len(x)):
            numpyro.factor("weight", -(x[:, 0] ** 2))

    sentence = "draws of the model do not follow the factor 'weight'"
    assert_refuses(
        sentence, DensityRatioELBO(3, "joint", ratio=LogisticRatio()), params, weighted, guide, X
    )


def regression(x, c, batch=None, as_site=False):
    """Rows with a covariate, of which a guide that takes c for -c has the same joint of (z, x)."""
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        c = c[i]
        if as_site:
            c = numpyro.sample("c", dist.Normal(0.0, 1.0), obs=c)
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("x", Simulator(c * z, 0.5), obs=x[i])


def closes_over(x, c, batch=None):
    regression(x, C, batch)


def trend(x, c, batch=None):
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        z = numpyro.sample("z", dist.Normal(0.1 * i, 1.0))
        numpyro.sample("x", Simulator(z, 0.5), obs=x[i])


def of_regression(x, c, batch=None, as_site=False):
    slope = numpyro.param("slope", 0.5)
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("z", dist.Normal(slope * c[i] * x[i], 0.5))


C = jnp.array([0.3, -1.2, 0.8, 1.5, -0.4, 0.9])


@pytest.mark.parametrize(
    "loss",
    [DensityRatioELBO(3, "joint", ratio=LogisticRatio()), SymmetricKL(3, ratio=LogisticRatio())],
)
def test_a_covariate_that_the_ratio_does_not_see_is_an_error(loss):
    """Among the arguments, whole or in a minibatch, or outside, or the number of the row; an
    observed site is none."""
    of_array, of_index = r"an array of shape \(6,\)", "the indices of its plate"
    for one, batch, what in (
        (regression, None, of_array),
        (regression, 4, of_array),
        (closes_over, 4, of_array),
        (trend, None, of_index),
        (trend, 4, of_index),
    ):
        sentence = f"in a row depend on {what}, which .* numpyro.sample"
        assert_refuses(sentence, loss, {"slope": 0.5}, one, of_regression, X[:, 0], C, batch)
    seen = loss.loss(random.key(0), {"slope": 0.5}, regression, of_regression, X[:, 0], C, 4, True)
    assert np.isfinite(seen)


def test_covariates_are_looked_for_once_and_again_where_the_data_have_changed(monkeypatch):
    loss, looked = DensityRatioELBO(3, "joint", ratio=LogisticRatio()), []
    look = density_ratio._check_alike
    monkeypatch.setattr(
        density_ratio, "_check_alike", lambda *args: looked.append(args) or look(*args)
    )
    held, x = {"c": jnp.zeros(())}, X[:, 0]

    def one(x):
        with numpyro.plate("N", len(x)):
            z = numpyro.sample("z", dist.Normal(held["c"], 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def of_rows(x):
        with numpyro.plate("N", len(x)):
            numpyro.sample("z", dist.Normal(numpyro.param("slope", 0.5) * x, 0.5))

    def call():
        loss.loss(random.key(0), {"slope": 0.5}, one, of_rows, x)

    call()
    call()
    assert len(looked) == 1
    held["c"] = C
    for _ in range(2):  # it is an error in the next call too
        with pytest.raises(ValueError, match=r"depend on an array of shape \(6,\)"):
            call()
