"""AutoLaplaceGGN against exact posteriors, Hessians and Jacobians by hand."""

from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.util import potential_energy
import optax
import pytest

from numpyro_ext.diagnostics import predictive_scores
from numpyro_ext.guides import AutoLaplaceGGN

N = 12
X = random.normal(random.key(0), (N, 2)) * jnp.array([1.0, 0.4]) + jnp.array([0.2, -0.5])
NEW = random.normal(random.key(1), (5, 2)) + 1.0
Y = {
    "normal": X @ jnp.array([1.0, -2.0]) + 0.5 * random.normal(random.key(2), (N,)),
    "bernoulli": (X[:, 0] > X[:, 1]).astype(int).at[0].set(0),
    "binomial": jnp.arange(N) % 5,
    "categorical": jnp.arange(N) % 3,
    "poisson": jnp.arange(N) % 4,
}
COUNT = 4


def likelihood(kind, f, scale=0.7):
    """Of a linear predictor ``f``, in various parametrisations."""
    return {
        "normal": lambda: dist.Normal(f, scale),
        "bernoulli": lambda: dist.Bernoulli(logits=f),
        "binomial": lambda: dist.Binomial(COUNT, probs=jax.nn.sigmoid(f)),
        "categorical": lambda: dist.Categorical(logits=f),
        "poisson": lambda: dist.Poisson(jnp.exp(f)),
    }[kind]()


def linear_predictor(kind, x, w):
    f = x @ w
    return jnp.stack([f, -0.5 * f, f**2], axis=-1) if kind == "categorical" else f


def glm(kind, X, y=None, batch=None):
    w = numpyro.sample("w", dist.Normal(0.1, jnp.array([2.0, 0.5])).to_event(1))
    with numpyro.plate("data", len(X), subsample_size=batch):
        x = numpyro.subsample(X, event_dim=1)
        obs = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", likelihood(kind, linear_predictor(kind, x, w)), obs=obs)


def set_up(model, *args, guide=None, **kwargs):
    """A guide that has seen its model."""
    guide = AutoLaplaceGGN(model) if guide is None else guide(model)
    handlers.seed(guide, 0)(*args, **kwargs)
    return guide


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.x64)
        if kind == "poisson"
        else pytest.param(kind, marks=pytest.mark.nightly)
        for kind in Y
    ],
)
def test_precision_is_the_hessian_of_a_generalised_linear_model(kind, tol):
    """For canonical links, at any point; for three logits of one predictor the curved one is not
    counted, so that J'FJ is taken by hand."""
    guide = set_up(glm, kind, X, Y[kind], 5)
    w = jnp.array([0.4, -0.3])
    params = {"auto_loc": w}

    def hessian(w):
        return jax.hessian(lambda w: potential_energy(glm, (kind, X, Y[kind]), {}, {"w": w}))(w)

    expected = hessian(w)
    if kind == "categorical":
        J = jax.jacobian(lambda w: linear_predictor(kind, X, w))(w)
        p = jax.nn.softmax(linear_predictor(kind, X, w))
        F = jax.vmap(jnp.diag)(p) - p[:, :, None] * p[:, None, :]
        expected = jnp.einsum("nki,nkl,nlj->ij", J, F, J) + jnp.diag(jnp.array([0.25, 4.0]))
    q = guide.get_posterior(params)
    assert jnp.allclose(jnp.linalg.inv(q.covariance_matrix), expected, rtol=tol(2e-4, 1e-9))
    assert jnp.allclose(q.mean, w)
    # The linearised predictive, J S J', at other rows.
    J = jax.jacobian(lambda w: linear_predictor(kind, NEW, w))(w)
    S = jnp.linalg.inv(expected)
    f = guide.linearised_predictive(params, kind, NEW)
    assert jnp.allclose(f.mean, linear_predictor(kind, NEW, w), rtol=tol(1e-4, 1e-9))
    assert f.variance.shape == J.shape[:-1]
    assert jnp.allclose(f.variance, ((J @ S) * J).sum(-1), rtol=tol(1e-3, 1e-8))


@pytest.mark.nightly
def test_linear_model_with_normal_noise_has_its_posterior(tol):
    guide = set_up(glm, "normal", X, Y["normal"], 5)  # the curvature is that of all rows
    P0 = jnp.diag(jnp.array([0.25, 4.0]))
    P = X.T @ X / 0.49 + P0
    mean = jnp.linalg.solve(P, X.T @ Y["normal"] / 0.49 + P0 @ jnp.full(2, 0.1))
    params = {"auto_loc": mean}
    # In training it is a point, whose loss is least at the mode.
    loss = lambda p: Trace_ELBO().loss(random.key(0), p, glm, guide, "normal", X, Y["normal"])  # noqa: E731
    assert jnp.abs(jax.jit(jax.grad(loss))(params)["auto_loc"]).max() < tol(1e-3, 1e-10)
    q = guide.get_posterior(params)
    assert jnp.allclose(q.covariance_matrix, jnp.linalg.inv(P), rtol=tol(1e-4, 1e-10))
    # Other data have another curvature.
    other = guide.get_posterior(params, "normal", X[:7], Y["normal"][:7])
    assert jnp.allclose(other.precision_matrix, X[:7].T @ X[:7] / 0.49 + P0, rtol=tol(1e-3, 1e-9))
    quantiles = guide.quantiles(params, [0.5, 0.9])["w"]
    sd = jnp.diag(q.covariance_matrix) ** 0.5
    assert jnp.allclose(quantiles, q.mean + jnp.array([[0.0], [1.2815516]]) * sd, atol=1e-4)
    assert jnp.allclose(guide.median(params)["w"], q.mean)


NET = {"w0": (2, 3), "b0": (3,), "w1": (3, 1), "b1": (1,)}


def net(z, X):
    return (jnp.tanh(X @ z["w0"] + z["b0"]) @ z["w1"] + z["b1"])[:, 0]


def network(X, y=None, batch=None):
    """Two layers, a latent noise precision, and a parameter of the model."""
    z = {
        name: numpyro.sample(name, dist.Normal(0, 1.5).expand(shape).to_event(len(shape)))
        for name, shape in NET.items()
    }
    precision = numpyro.sample("precision", dist.Gamma(6.0, 3.0))
    shift = numpyro.param("shift", 0.3)
    with numpyro.plate("data", len(X), subsample_size=batch) as rows:
        obs = None if y is None else y[rows]
        numpyro.sample("y", dist.Normal(net(z, X[rows]) + shift, precision**-0.5), obs=obs)


@pytest.fixture(scope="module")
def net_params():
    keys = random.split(random.key(4), 2)
    loc = 0.8 * random.normal(keys[0], (14,))
    return {"auto_loc": loc, "shift": jnp.array(0.3)}


def by_hand(params):
    """The precision of the flat vector: z and the log of the noise precision."""
    z = {name: jnp.zeros(shape) for name, shape in NET.items()}
    order = list(NET)

    def unpack(v):
        result, start = {}, 0
        for name in order:
            result[name] = v[start : start + z[name].size].reshape(z[name].shape)
            start += z[name].size
        return result, v[13]

    def outputs(v, X=X):
        sites, log_precision = unpack(v)
        return jnp.stack([net(sites, X) + params["shift"], jnp.full(len(X), log_precision)], 1)

    v = params["auto_loc"]
    J, tau = jax.jacobian(outputs)(v), jnp.exp(v[13])
    # In (mean, log precision) the Fisher information of a normal is diag(tau, 1/2).
    GGN = jnp.einsum("nki,k,nkj->ij", J, jnp.array([tau, 0.5]), J)
    prior = jnp.append(jnp.full(13, 1.5**-2), 3.0 * tau)  # of Gamma(6, 3) in log space
    return GGN + jnp.diag(prior), jax.jacobian(lambda v: outputs(v, NEW)[:, 0])(v)


@pytest.mark.slow
def test_network_against_its_jacobian(net_params, tol):
    P, J = jax.jit(by_hand)(net_params)
    full, diag, last = (
        set_up(network, X, Y["normal"], 4, guide=lambda m, kind=kind: AutoLaplaceGGN(m, **kind))
        for kind in ({}, {"structure": "diag"}, {"structure": "last_layer"})
    )

    @jax.jit  # all of them in one program
    def everything(params):
        normals = [guide.get_posterior(params) for guide in (full, last)]
        predicted = [guide.linearised_predictive(params, NEW) for guide in (full, last, diag)]
        covariances = [q.covariance_matrix for q in normals]
        return covariances, diag.get_posterior(params).variance, [f.variance for f in predicted]

    covariances, variance, of_f = everything(net_params)
    rtol, rtol_of_f = tol(2e-3, 1e-8), tol(5e-3, 1e-8)
    S, d = np.linalg.inv(P), 1 / np.diag(P)
    assert jnp.allclose(variance, d, rtol=rtol)
    assert jnp.allclose(of_f[2], J**2 @ d, rtol=rtol)
    of_last = np.arange(9, 13)
    parts = (np.arange(14), S), (of_last, np.linalg.inv(P[np.ix_(of_last, of_last)]))
    for (coords, part), covariance, f in zip(parts, covariances, of_f, strict=False):
        assert jnp.allclose(covariance, part, rtol=rtol, atol=tol(1e-4, 0))
        assert jnp.allclose(f, np.diag(J[:, coords] @ part @ J[:, coords].T), rtol=rtol_of_f)
    draws = last.sample_posterior(random.key(5), net_params, sample_shape=(50,))
    assert {name for name in NET if draws[name].std(0).max() > 1e-3} == {"w1", "b1"}


@pytest.mark.nightly
def test_linearised_draws_have_these_moments_and_one_network_for_all_rows(net_params):
    guide = set_up(network, X, Y["normal"])
    f = guide.linearised_predictive(net_params, NEW)
    S = 4000
    draws = guide.linearised_draws(random.key(6), net_params, NEW, num_samples=S)["y"]
    variance = f.variance + jnp.exp(-net_params["auto_loc"][13])
    assert draws.shape == (S, 5)
    assert (jnp.abs(draws.mean(0) - f.mean) < 5 * (variance / S) ** 0.5).all()
    assert (jnp.abs(draws.var(0) / variance - 1) < 5 * (2 / S) ** 0.5).all()
    P, J = by_hand(net_params)
    off = (J @ jnp.linalg.inv(P) @ J.T)[0, 1]
    error = (variance[0] * variance[1] / S) ** 0.5
    assert abs(jnp.cov(draws[:, :2].T)[0, 1] - off) < 5 * error


def scores_of(guide, params, data, new):
    svi = SVI(guide.model, guide, optax.adam(0.1), Trace_ELBO())
    svi.init(random.key(0), *data)
    return predictive_scores(svi, params, model_args=new, num_samples=4000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("poisson", marks=pytest.mark.nightly),
        "categorical",
    ],
)
def test_scores_of_every_family_by_quadrature(kind):
    """Of a predictor that is linear in w, each row integrated over its normal; draws' error .01."""
    guide = set_up(glm, kind, X, Y[kind])
    params = {"auto_loc": jnp.array([0.4, -0.3])}
    y = Y[kind][:5]
    scores = scores_of(guide, params, (kind, X, Y[kind]), (kind, NEW, y))
    root = jnp.linalg.cholesky(guide.get_posterior(params).covariance_matrix)
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    grid = jnp.stack(jnp.meshgrid(jnp.array(nodes), jnp.array(nodes)), -1).reshape(-1, 2)
    moves = grid @ root.T
    w = params["auto_loc"]

    def eta(w):
        return linear_predictor(kind, NEW, w)

    at, J = eta(w), jax.jacobian(eta)(w)
    f = at + jnp.einsum("...i,pi->p...", J, moves)
    density = jnp.exp(likelihood(kind, f).log_prob(y))
    share = jnp.outer(jnp.array(weights), jnp.array(weights)).ravel() / (2 * np.pi)
    exact = jnp.log(share @ density).mean()
    np.testing.assert_allclose(scores.log_density, exact, atol=0.03)


@pytest.mark.slow
def test_predictive_draws_from_the_normal_and_the_guide_pickles(net_params):
    guide = set_up(network, X, Y["normal"], 4)
    again = pickle.loads(pickle.dumps(guide))
    predictive = Predictive(
        network, guide=again, params=net_params, num_samples=400, return_sites=["b1", "y"]
    )
    drawn = predictive(random.key(7), NEW)
    assert drawn["y"].shape == (400, 5)
    sd = guide.get_posterior(net_params).variance[12] ** 0.5
    assert abs(drawn["b1"].std() / sd - 1) < 5 / (2 * 400) ** 0.5
    # In training, with the data, it is the mode.
    trace = handlers.trace(handlers.substitute(handlers.seed(guide, 1), net_params))
    b1 = trace.get_trace(X, Y["normal"])["b1"]["value"]
    assert jnp.allclose(b1, net_params["auto_loc"][12])


@pytest.mark.nightly
def test_two_observed_sites_masked_rows_and_a_scale(tol):
    mask = jnp.arange(N) > 3

    def model(X, y=None, z=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("data", len(X)) as rows, handlers.scale(scale=3.0):
            f = X[rows] @ w
            with handlers.mask(mask=True if y is None else mask[rows]):
                numpyro.sample("y", dist.Normal(f, 0.5), obs=None if y is None else y[rows])
            both = jnp.stack([f, 2 * f], -1)
            obs = None if z is None else z[rows]
            numpyro.sample("z", dist.Normal(both, 2.0).to_event(1), obs=obs)

    Z = jnp.ones((N, 2))
    guide = set_up(model, X, Y["normal"], Z)
    params = {"auto_loc": jnp.array([0.3, 0.4])}
    kept = X[4:]
    expected = 3 * kept.T @ kept / 0.25 + 3 * 5 * X.T @ X / 4 + jnp.eye(2)
    q = guide.get_posterior(params)
    assert jnp.allclose(jnp.linalg.inv(q.covariance_matrix), expected, rtol=1e-3)
    result = guide.linearised_predictive(params, NEW)
    assert result["y"].mean.shape == (5,) and result["z"].variance.shape == (5, 2)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    scored = {
        site: predictive_scores(svi, params, model_args=(X, Y["normal"], Z), site=site)
        for site in ("y", "z")
    }
    assert scored["y"].count == N - 4 and scored["z"].count == 2 * N
    rows = guide.linearised_predictive(params, X)["z"]
    cov = rows.variance[:, :1, None] * jnp.array([[1.0, 2.0], [2.0, 4.0]]) + 4 * jnp.eye(2)
    exact = dist.MultivariateNormal(rows.mean, cov).log_prob(Z).mean()
    np.testing.assert_allclose(scored["z"].log_density, exact, atol=0.03)
    assert jnp.allclose(result["z"].variance[:, 1], 4 * result["y"].variance, rtol=1e-4)


def test_correlated_prior_has_the_diagonal_of_its_hessian():
    L = jnp.array([[1.0, 0.0], [0.8, 0.5]])

    def model(X, y):
        w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), scale_tril=L))
        with numpyro.plate("data", len(X)) as rows:
            numpyro.sample("y", dist.Normal(X[rows] @ w, 1.0), obs=y[rows])

    guide = set_up(model, X, Y["normal"], guide=lambda m: AutoLaplaceGGN(m, structure="diag"))
    variance = guide.get_posterior({"auto_loc": jnp.zeros(2)}).variance
    expected = jnp.diag(jnp.linalg.inv(L @ L.T)) + (X**2).sum(0)
    assert jnp.allclose(1 / variance, expected, rtol=1e-3)


def observed(fn, *, plate=True):
    def model(y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("data", len(y)) if plate else handlers.block(hide=[]):
            numpyro.sample("y", fn(w * jnp.ones(len(y))), obs=y)

    return model


def dropping(y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("data", len(y)):
        noise = random.normal(numpyro.prng_key(), y.shape)
        numpyro.sample("y", dist.Normal(w * noise, 1.0), obs=y)


def local(y):
    with numpyro.plate("data", len(y)):
        w = numpyro.sample("w", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)


def convex(y):
    w = numpyro.sample("w", dist.Cauchy(0.0, 0.1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(0.01 * w * jnp.ones(len(y)), 1.0), obs=y)


def deep_and_linear(y):
    a, b = (numpyro.sample(name, dist.Normal(0, 1)) for name in "ab")
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(a * b * jnp.ones(len(y)), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "kwargs", "message"),
    [
        (observed(lambda f: dist.StudentT(3.0, f, 1.0)), {}, "'y' is StudentT.*AutoLaplaceApprox"),
        (observed(lambda f: dist.Normal(f, 1.0), plate=False), {}, "in no numpyro.plate"),
        (dropping, {}, "draws noise by numpyro.prng_key"),
        (local, {}, r"\['w'\] lie in the data plate"),
        (convex, {}, "precision of AutoLaplaceGGN is not positive"),
        (deep_and_linear, {"structure": "last_layer"}, r"name it by sites=\[...\]"),
    ],
)
def test_models_that_it_refuses(model, kwargs, message):
    y = jnp.arange(4.0)
    guide = set_up(model, y, guide=lambda m: AutoLaplaceGGN(m, **kwargs))
    size = 4 if model is local else 2 if model is deep_and_linear else 1
    with pytest.raises(ValueError, match=message):
        guide.get_posterior({"auto_loc": jnp.full(size, 1.0)})


def test_wrong_arguments_are_sentences():
    with pytest.raises(ValueError, match="structure is 'kron'; it must be one of 'full'"):
        AutoLaplaceGGN(glm, structure="kron")
    with pytest.raises(ValueError, match=r"sites names 'v'; the latent sites are \['w'\]"):
        set_up(glm, "normal", X, Y["normal"], guide=lambda m: AutoLaplaceGGN(m, sites=["v"]))
    guide = AutoLaplaceGGN(glm)
    jax.jit(lambda x: handlers.seed(guide, 0)("normal", x, Y["normal"])["w"])(X)
    with pytest.raises(ValueError, match=r"outside jax\.jit"):
        guide.get_posterior({"auto_loc": jnp.zeros(2)})


def test_after_a_loop_over_batches_a_new_guide_has_the_curvature_of_all_rows(tol):
    """A linear model with unit noise: the precision is that of the prior and X'X."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(X), subsample_size=len(x)):
            numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    def made():
        return SVI(model, AutoLaplaceGGN(model), numpyro.optim.Adam(0.01), Trace_ELBO())

    y, svi = Y["normal"], made()
    state = svi.init(random.key(0), X[:5], y[:5])
    state, _ = svi.update(state, X[5:10], y[5:10])
    params = svi.get_params(state)
    with pytest.raises(ValueError, match=r"given 5 of the .* make the guide and its SVI anew"):
        svi.guide.sample_posterior(random.key(0), params)
    anew = made()
    anew.init(random.key(0), X, y)
    precision = jnp.linalg.inv(anew.guide.get_posterior(params).covariance_matrix)
    assert jnp.allclose(precision, jnp.eye(2) + X.T @ X, rtol=tol(1e-4, 1e-10))


def test_the_curvature_is_of_what_the_model_reads_at_the_call():
    """From outside, in a list that has changed since the first draws."""
    scale = [1.0]

    def model(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(x * w, scale[0]), obs=jnp.zeros(N))

    x = X[:, 0]
    guide = set_up(model, x)
    params = {"auto_loc": jnp.zeros(1)}
    for scale[0] in (1.0, 0.1):
        sd = guide.get_posterior(params).scale_tril[0, 0]
        assert jnp.allclose(sd, (1 + jnp.sum(x**2) / scale[0] ** 2) ** -0.5, rtol=1e-5)


def test_a_fit_to_other_rows_has_no_curvature_without_them():
    def model(x):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Normal(x * w, 1.0), obs=jnp.zeros(N))

    x, params = X[:, 0], {"auto_loc": jnp.zeros(1)}
    guide = set_up(model, x)
    handlers.seed(guide, 0)(x + 0)  # the same numbers
    assert guide.get_posterior(params).scale_tril.shape == (1, 1)
    handlers.seed(guide, 0)(3 * x)
    for ask in (guide.get_posterior, partial(guide.sample_posterior, random.key(0))):
        with pytest.raises(ValueError, match="begun on two sets of arguments, with which its"):
            ask(params)
    for rows in (x, 3 * x):
        sd = guide.get_posterior(params, rows).scale_tril[0, 0]
        assert jnp.allclose(sd, (1 + jnp.sum(rows**2)) ** -0.5, rtol=1e-5)
