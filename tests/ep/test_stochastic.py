"""One site for all rows: values by quadrature, identities, and the law of its noise."""

import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.data import HostArray
from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import StochasticEP
from numpyro_ext.ep.normal import moments_of as moments_of_site
from numpyro_ext.ep.stochastic import scale_of_error
from numpyro_ext.objectives import taylor_proxy
from tests.ep.models import LOGISTIC, PROBIT, fit, logistic, moments_of, probit


@pytest.mark.x64
@pytest.mark.parametrize(
    ("model", "data", "power", "mean", "cov"),
    [
        (probit, PROBIT, 1.0, [0.8314655351], [0.2117336913]),
        (probit, PROBIT, 0.0, [0.8274601803], [0.1826260856]),
        (
            logistic,
            LOGISTIC,
            0.5,
            [0.5766225645, 0.3102125713],
            [0.565646755, -0.1151341252, 0.7216081808],
        ),
    ],
)
def test_all_rows_at_once_are_averaged_ep(model, data, power, mean, cov, needs_x64):
    sep = StochasticEP(model, batch_size=len(data[1]), power=power)
    m, V = moments_of(fit(sep, *data, num_steps=150).params)
    np.testing.assert_allclose(m, mean, rtol=1e-8)
    np.testing.assert_allclose(V, cov, rtol=1e-7)


@pytest.mark.x64
def test_steps_on_given_rows(needs_x64):
    """From a zero site: the precision, and the shift, that they leave."""
    sep = StochasticEP(probit, batch_size=2)
    start = sep.init(random.key(0), *PROBIT)
    state, _ = sep.update(start, *PROBIT, indices=[0, 3])
    of_rows, _ = jax.jit(lambda rows: sep.update(start, *PROBIT, indices=rows))(jnp.array([0, 3]))
    for new in (state, of_rows):
        np.testing.assert_allclose(new.sites[0].precision, [[[0.0613054718]]], rtol=1e-8)
        np.testing.assert_allclose(new.sites[0].shift, [[0.1724242599]], rtol=1e-8)

    sep = StochasticEP(logistic)
    state = sep.init(random.key(0), *LOGISTIC)
    for rows, precision, shift in [
        ([2], [0.02157276, 0.01797730, 0.01498108], [0.07566253, 0.06305211]),
        ([5, 1, 0], [0.04856236, 0.02698726, 0.05659385], [0.12332292, 0.20999946]),
    ]:
        state, _ = sep.update(state, *LOGISTIC, indices=rows)
        computed = state.sites[0].precision[0][np.triu_indices(2)]
        np.testing.assert_allclose(computed, precision, rtol=1e-6)
        np.testing.assert_allclose(state.sites[0].shift[0], shift, rtol=1e-6)


@pytest.mark.x64
def test_power_0_is_variational_inference_by_natural_gradients(needs_x64):
    """A step of rate eps is the mean of q and of the prior with N times the gradient of a row."""
    eps, n = 0.3, 2
    sep = StochasticEP(probit, power=0.0, step=eps)
    state = sep.init(random.key(0), *PROBIT)
    state, _ = sep.update(state, *PROBIT, indices=[5])
    q = moments_of_site(state.total)
    state_new, _ = sep.update(state, *PROBIT, indices=[n])
    z, w = np.polynomial.hermite_e.hermegauss(80)
    theta = float(q.mean[0]) + float(q.cov[0, 0]) ** 0.5 * z
    x, y = (float(a[n]) for a in PROBIT)
    grad = jax.grad(lambda t: jax.scipy.stats.norm.logcdf(x * y * t))
    hess = np.asarray(jax.vmap(jax.grad(grad))(theta))
    g = np.asarray(jax.vmap(grad)(theta))
    E = w / w.sum()
    T = -np.sum(E * hess)
    v = np.sum(E * g) + T * float(q.mean[0])
    shift = (1 - eps) * state.total.shift + eps * (state.prior.shift + 8 * v)
    precision = (1 - eps) * state.total.precision + eps * (state.prior.precision + 8 * T)
    np.testing.assert_allclose(state_new.total.shift, shift, rtol=1e-9)
    np.testing.assert_allclose(state_new.total.precision, precision, rtol=1e-9)


@jax.jit
def labelled_rows():
    rows = jnp.stack([jnp.sin(3.0 * jnp.arange(32)), jnp.ones(32)], -1)
    return rows, (jnp.cos(7.0 * jnp.arange(32) ** 2) + rows[:, 0] > 0).astype(int)


ROWS, LABELS = labelled_rows()


@pytest.mark.slow
def test_a_noisy_result_warns_and_one_of_all_rows_does_not():
    engine = StochasticEP(logistic)
    with pytest.warns(InferenceWarning, match="the result of 320 steps is noisy: its standard"):
        result = fit(engine, ROWS, LABELS, num_steps=320)
    assert engine.convergence(result.state)["noise"] > 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(StochasticEP(logistic, batch_size=32), ROWS, LABELS, num_steps=60)
    assert np.isnan(result.state.report.noise)


def test_the_error_of_a_mean_of_a_chain():
    """Of autoregressions with the rate of the steps, of which 50 times the rate are averaged."""
    rate, steps = 0.1, 500
    noise = np.random.default_rng(0).standard_normal((4000, steps + 200))
    x = np.zeros(4000)
    chain = []
    for e in noise.T:
        x = (1 - rate) * x + e
        chain.append(x)
    chain = np.array(chain[200:])
    parts = [np.mean(part, 0) for part in np.array_split(chain, 16)]
    scatter = np.sqrt(np.mean(np.var(parts, 0, ddof=1)))
    computed = scatter * scale_of_error(rate, steps, 16)
    assert abs(computed / np.std(chain.mean(0)) - 1) < 0.05


def on_minibatches(X, y):
    w = numpyro.sample("w", dist.Normal(jnp.array([0.5, -0.5]), jnp.array([2.0, 1.5])).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=4) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ w), obs=y[idx])


@pytest.fixture(scope="module")
def proxy():
    return taylor_proxy(on_minibatches, ROWS, LABELS)


def without_proxy(state):
    return state._replace(table=state.table._replace(taylor=None))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"power": 0.0, "family": "diagonal"}])
def test_a_proxy_changes_the_noise_of_a_step_and_not_its_mean(proxy, options):
    """Steps on each row alone have the mean of the step on all rows, which the proxy leaves as it
    is: so the fixed point is that without it."""
    engine = StochasticEP(on_minibatches, step=0.3, proxy=proxy, **options)
    state = engine.init(random.key(0), ROWS, LABELS)
    plain = StochasticEP(on_minibatches, step=0.3, **options)
    plain.init(random.key(0), ROWS, LABELS)

    def after(engine, state):
        def on(state, rows):
            new, _ = engine.update(state, ROWS, LABELS, indices=rows)
            return new.total.shift, new.total.precision

        each = jax.jit(jax.vmap(on, (None, 0)))(state, jnp.arange(32)[:, None])
        return jax.jit(on)(state, jnp.arange(32)), each

    with_it, without_it = after(engine, state), after(plain, without_proxy(state))
    for a, rows, b, plain_rows in zip(*with_it, *without_it, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
        np.testing.assert_allclose(np.mean(rows, 0), b, rtol=2e-5, atol=1e-5)
        assert np.all(np.std(rows, 0) < 0.7 * np.std(plain_rows, 0) + 1e-5)


@pytest.mark.slow
def test_a_run_with_a_proxy_ends_where_all_rows_do(proxy):
    """Far from the Laplace approximation where it begins, and as noisy as its report says."""
    averaged = fit(StochasticEP(logistic, batch_size=32), ROWS, LABELS, num_steps=60)
    exact, V = moments_of(averaged.params)
    sd = jnp.sqrt(V[jnp.array([0, 2])])
    engine = StochasticEP(on_minibatches, batch_size=4, proxy=proxy)
    start = engine.get_params(engine.init(random.key(0), ROWS, LABELS))
    assert jnp.max(jnp.abs(start["auto_loc"] - exact) / sd) > 0.1
    result = fit(engine, ROWS, LABELS, num_steps=1000)
    off = jnp.max(jnp.abs(result.params["auto_loc"] - exact) / sd)
    assert off < 4 * result.state.report.noise
    assert off < 0.05
    on_host = fit(engine, HostArray(np.asarray(ROWS)), HostArray(np.asarray(LABELS)), num_steps=64)
    in_memory = fit(engine, ROWS, LABELS, num_steps=64)
    for name, value in in_memory.params.items():
        np.testing.assert_allclose(on_host.params[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_proxy_of_something_else(proxy):
    rough = taylor_proxy(on_minibatches, ROWS, LABELS, center=proxy.center, degree=1)
    with pytest.raises(ValueError, match="no Hessian as a matrix; make it by taylor_proxy"):
        StochasticEP(on_minibatches, proxy=rough)
    with pytest.raises(TypeError, match="proxy is a dict"):
        StochasticEP(on_minibatches, proxy={})
    engine = StochasticEP(on_minibatches, proxy=proxy)
    with pytest.raises(ValueError, match="hold other data than those of which the proxy"):
        engine.init(random.key(0), ROWS, 1 - LABELS)
    state = engine.init(random.key(0), ROWS, LABELS)
    with pytest.raises(ValueError, match="the arguments of the model are traced"):
        jax.jit(engine.update)(state, ROWS, LABELS)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"step": 1.5}])
def test_bad_arguments(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        StochasticEP(probit, **options)


@pytest.mark.slow
def test_bad_batches():
    with pytest.raises(ValueError, match="batch_size is 9; it must be at most the number of rows"):
        StochasticEP(probit, batch_size=9).init(random.key(0), *PROBIT)
    sep = StochasticEP(probit)
    state = sep.init(random.key(0), *PROBIT)
    with pytest.raises(ValueError, match="the rows are 0 to 7"):
        sep.update(state, *PROBIT, indices=[0, 8])
    fewer = [x[:7] for x in PROBIT]
    sep.init(random.key(0), *fewer)
    with pytest.raises(ValueError, match="the state belongs to other data"):
        sep.update(state, *fewer)


def test_a_proxy_far_from_a_mode_is_refused():
    """At a = .05 the log likelihood of a^2 is convex."""
    y = jnp.array([3.0, 5.0, 4.0, 6.0, 2.0, 4.0])

    def square_of_a(y):
        a = numpyro.sample("a", dist.Normal(0.0, 5.0))
        with numpyro.plate("rows", len(y), subsample_size=2) as idx:
            numpyro.sample("y", dist.Normal(a**2, 1.0), obs=y[idx])

    with pytest.warns(InferenceWarning, match="not that of a mode"):
        bent = taylor_proxy(square_of_a, y, center={"a": jnp.array(0.05)})
    with pytest.raises(ValueError, match="the proxy and the prior make no normal distribution"):
        StochasticEP(square_of_a, proxy=bent).init(random.key(0), y)
