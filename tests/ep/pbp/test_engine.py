"""Probabilistic backpropagation: exact posteriors, laws, the hand-over to NumPyro, errors."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import substitute, trace
from numpyro.infer import SVI, Predictive, Trace_ELBO
import optax
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import PBP
from numpyro_ext.ep.pbp.epochs import Belief, start_sites

N = 40
METHODS = ["adf", "ep", "sep"]


def data():
    """Columns of unequal scales, the last of which is constant, away from zero."""
    rng = np.random.default_rng(1)
    X = np.column_stack([rng.normal(20, 3, N), rng.normal(-0.4, 0.01, N), np.full(N, 0.1)])
    y = 100 + 5 * np.abs(X[:, 0] - 20) - 300 * X[:, 1] + rng.normal(0, 1, N)
    return X, y


X, Y = data()


@pytest.fixture(scope="module", params=METHODS)
def fitted(request):
    pbp = PBP([3, 8, 1], method=request.param)
    return pbp, pbp.run(random.key(0), 20, X, Y, progress_bar=False)


@pytest.fixture(scope="module")
def filtered():
    pbp = PBP([3, 8, 1])
    return pbp, pbp.run(random.key(0), 20, X, Y, progress_bar=False)


SLOPE_X, SLOPE_Y = jnp.array([0.7, -1.2, 2.0, 0.3, -0.5, 1.1]), jnp.array([1, -2, 3.1, 0, -1, 2])
P0, TAU = 0.5, 3.0


def one_weight(method):
    """f = w x without a constant: an engine, and its state with q = N(0, 1 / P0)."""
    pbp = PBP([1, 1], method=method, weight_precision=P0, noise_precision=TAU, normalise=False)
    state = pbp.init(random.key(0), SLOPE_X[:, None], SLOPE_Y)
    q = Belief([jnp.zeros((1, 1))], [jnp.full((1, 1), 1 / P0)], None)
    return pbp, state._replace(q=q, site=start_sites(method, q, len(SLOPE_X)))


@pytest.mark.x64
@pytest.mark.parametrize("method", ["adf", "ep"])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_weight_is_exact(method, num_steps, tol):
    """A regression: ADF counts each row in each epoch; EP counts it once, and does not move
    again."""
    pbp, state = one_weight(method)
    for _ in range(num_steps):
        state, _ = pbp.update(state, SLOPE_X[:, None], SLOPE_Y)
    times = num_steps if method == "adf" else 1
    precision = P0 + times * TAU * jnp.sum(SLOPE_X**2)
    mean = times * TAU * jnp.sum(SLOPE_X * SLOPE_Y) / precision
    np.testing.assert_allclose(state.q.means[0], [[mean]], rtol=tol(1e-5, 1e-13))
    np.testing.assert_allclose(state.q.variances[0], [[1 / precision]], rtol=tol(1e-5, 1e-13))


@pytest.mark.x64
def test_the_mean_of_seps_site_is_exact_for_one_weight(tol):
    """The site is SEP's: F goes to (1 - 1/N) F + g_n with exact g_n = (tau x_n^2, tau x_n y_n), in
    the order of the run's key. So is the fixed point of its mean, the sum of all g_n; a state
    wanders about it."""
    N, epochs = len(SLOPE_X), 5
    pbp, state = one_weight("sep")
    F = np.zeros(2)
    g = TAU * np.stack([SLOPE_X**2, SLOPE_X * SLOPE_Y], 1)
    key = state.rng_key
    for _ in range(epochs):
        order_key, key = random.split(key)
        for n in random.permutation(order_key, N):
            F = (1 - 1 / N) * F + g[n]
    for _ in range(epochs):
        state, _ = pbp.update(state, SLOPE_X[:, None], SLOPE_Y)
    precision = P0 + F[0]
    np.testing.assert_allclose(state.q.variances[0], [[1 / precision]], rtol=tol(1e-5, 1e-12))
    np.testing.assert_allclose(state.q.means[0], [[F[1] / precision]], rtol=tol(1e-5, 1e-12))


def test_the_start(tol):
    """EP and SEP hold the random means in their sites, with the prior's precision around them."""
    precision = 5 / 6
    for method in METHODS:
        pbp = PBP([3, 8, 1], method=method)
        state = pbp.init(random.key(3), X, Y)
        for v in state.q.variances:
            np.testing.assert_allclose(v, 1 / precision, rtol=1e-6)
        np.testing.assert_allclose(state.prior.precision, precision, rtol=1e-6)
        assert [m.shape for m in state.q.means] == [(8, 4), (1, 9)]
        if method != "adf":
            total = [x.sum(0) if method == "ep" else x for x in state.site.shift]
            for m, shift in zip(state.q.means, total, strict=True):
                np.testing.assert_allclose(m * precision, shift, rtol=tol(1e-5, 1e-12))
    wide = PBP([3, 2000, 1]).init(random.key(3), X, Y).q.means
    for m, fan_in in zip(wide, (4, 2001), strict=True):  # standard errors .8 and 1.6 %
        assert abs(float(m.std()) * fan_in**0.5 - 1) < 0.08


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ep", "sep"])
def test_q_is_the_product_of_its_factors(method, tol):
    """Of the prior of each weight, the sites of the data, and the Gamma priors."""
    pbp = PBP([3, 4, 1], method=method)
    state = pbp.run(random.key(0), 6, X, Y, progress_bar=False).state
    total = jax.tree.map(lambda x: x.sum(0) if method == "ep" else x, state.site)
    flat = [jnp.concatenate([x.ravel() for x in xs]) for xs in (*total[:2], *state.q[:2])]
    shift, precision, m, v = flat
    rtol = tol(2e-3, 1e-9)
    np.testing.assert_allclose(1 / v, state.prior.precision + precision, rtol=rtol)
    np.testing.assert_allclose(m / v, shift, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(state.q.noise.shape, 6 + total.noise.shape, rtol=rtol)
    np.testing.assert_allclose(state.q.noise.rate, 6 + total.noise.rate, rtol=rtol)
    np.testing.assert_allclose(state.weight.shape, 6 + state.prior.weight.shape.sum(), rtol=rtol)
    np.testing.assert_allclose(state.weight.rate, 6 + state.prior.weight.rate.sum(), rtol=rtol)


@pytest.mark.slow
def test_predictive_has_the_moments_of_predict(fitted):
    """One hidden layer is exact. 20,000 draws: errors of .7 % of a sd and 1 % of a variance, some
    times as much for the tails of a Gamma."""
    pbp, result = fitted
    rows = jnp.array([[22.0, -0.41, 0.1], [17.0, -0.39, 0.1]])
    draws = Predictive(pbp.model, guide=pbp.guide, params=result.params, num_samples=20_000)(
        random.key(1), rows
    )
    mean, variance = pbp.predict(result.params, rows)
    assert draws["f"].shape == draws["y"].shape == (20_000, 2)
    for name in ("f", "y"):
        assert np.all(np.abs(draws[name].mean(0) - mean) < 0.04 * np.sqrt(variance))
    np.testing.assert_allclose(draws["y"].var(0), variance, rtol=0.1)


def test_the_density_of_the_model(filtered):
    """The sites of the model and the arithmetic of the units."""
    pbp, result = filtered

    @jax.jit
    def at_a_draw(params):
        w = pbp.guide.sample_posterior(random.key(0), params)
        sites = trace(substitute(substitute(pbp.model, params), w)).get_trace(X, Y)
        fn = {name: sites[name]["fn"] for name in ("y", "w0")}
        return w, fn["y"].mean, *(fn[name].variance for name in fn)

    w, mean, *variances = jax.device_get(at_a_draw(result.params))
    z = (X - X.mean(0)) / np.where(X.std(0) > 1e-9, X.std(0), 1)
    one = np.ones((N, 1))
    z = np.maximum(np.concatenate([z, one], 1) @ w["w0"].T / 2, 0)
    f = (np.concatenate([z, one], 1) @ w["w1"].T)[:, 0] / 3
    np.testing.assert_allclose(mean, f * Y.std() + Y.mean(), rtol=1e-4)
    expected = Y.var() / w["noise_precision"], 1 / w["weight_precision"]
    for variance, right in zip(variances, expected, strict=True):
        np.testing.assert_allclose(variance, np.full_like(variance, right), rtol=1e-5)


@pytest.mark.slow
def test_an_optimiser_does_not_move_the_scaling(filtered):
    pbp, result = filtered
    svi = SVI(pbp.model, pbp.guide, optax.adam(1e-3), Trace_ELBO())
    data = jnp.asarray(X), jnp.asarray(Y)
    fit = svi.run(random.key(0), 3, *data, progress_bar=False, init_params=result.params)
    for name in ("auto_X_mean", "auto_X_sd", "auto_y_mean", "auto_y_sd"):
        np.testing.assert_array_equal(fit.params[name], result.params[name])
    assert np.all(fit.params["auto_loc"] != result.params["auto_loc"])


def test_a_row_without_a_cavity_is_left_out():
    """Its site has more precision than q: it and all weights stay, with a warning."""
    pbp = PBP([3, 4, 1], method="ep", weight_precision=1.0)
    state = pbp.init(random.key(0), X[:1], Y[:1])
    wrong = [x + 1e3 for x in state.site.precision]
    state = state._replace(site=state.site._replace(precision=wrong))
    with pytest.warns(InferenceWarning, match="100.0% of the rows were left out"):
        result = pbp.run(random.key(0), 1, X[:1], Y[:1], progress_bar=False, init_state=state)
    jax.tree.map(np.testing.assert_array_equal, result.state.q, state.q)
    jax.tree.map(np.testing.assert_array_equal, result.state.site, state.site)
    assert pbp.convergence(result.state)["skipped"] == 1


def test_a_row_far_from_the_rest_leaves_the_noise_alone():
    """Fifty standard deviations: no Gamma with a mean variance has these moments."""
    pbp = PBP([1, 1], normalise=False, weight_precision=1.0)
    with pytest.warns(InferenceWarning, match="100.0% of the rows were left out"):
        result = pbp.run(random.key(0), 1, [[0.0]], [50.0], progress_bar=False)
    assert tuple(map(float, result.state.q.noise)) == (6.0, 6.0)


@pytest.mark.slow
def test_a_known_precision_is_not_learnt():
    pbp = PBP([3, 4, 1], weight_precision=2.0, noise_precision=9.0)
    state = pbp.init(random.key(0), X, Y)
    np.testing.assert_allclose(state.q.variances[0], 0.5)
    params = pbp.get_params(pbp.update(state, X, Y)[0])
    names = {"loc", "scale", "X_mean", "X_sd", "y_mean", "y_sd"}
    assert set(params) == {f"auto_{x}" for x in names}
    draws = pbp.guide.sample_posterior(random.key(0), params)
    assert set(draws) == {"w0", "w1"}
    assert np.all(pbp.predict(params, X)[1] > Y.var() / 9)


@pytest.mark.parametrize(
    ("X", "y", "words"),
    [
        (X[:, :2], Y, r"X has shape \(40, 2\); it must be \(N, 3\)"),
        (np.where(X == X[3, 1], np.nan, X), Y, "X has 1 entries that are not finite, .* in row 3;"),
        (X, np.where(np.arange(40) == 7, np.inf, Y), "y has 1 entries .* the first in row 7;"),
        (X, Y[:, None], r"y has shape \(40, 1\) and X \(40, 3\); y must be \(40,\)"),
    ],
)
def test_bad_data(X, y, words):
    with pytest.raises(ValueError, match=words):
        PBP([3, 8, 1]).run(random.key(0), 1, X, y, progress_bar=False)


def test_one_row_alone_is_refused():
    pbp = PBP([3, 8, 1])
    params = pbp.get_params(pbp.init(random.key(0), X, Y))
    with pytest.raises(ValueError, match=r"X has shape \(3,\); it must be \(N, 3\)"):
        pbp.predict(params, X[0])


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"layer_sizes": [3, 0, 1]}, r"layer_sizes\[1\] is 0; it must be an integer"),
        ({"layer_sizes": [3, 1], "weight_precision": -1.0}, "weight_precision is -1.0; it must"),
        ({"layer_sizes": [3, 1], "noise_precision": 0.0}, "noise_precision is 0.0; it must"),
    ],
)
def test_sizes_and_precisions_are_positive(arguments, match):
    with pytest.raises(ValueError, match=match):
        PBP(**arguments)


def test_sites_of_other_rows_are_refused():
    ep = PBP([3, 8, 1], method="ep")
    state = ep.init(random.key(0), X, Y)
    with pytest.raises(ValueError, match="X has 13 rows, and the state has sites of 40"):
        ep.update(state, X[:13], Y[:13])
