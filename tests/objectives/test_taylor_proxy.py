"""The proxy of all rows: unbiased, exact where it should be, cheap, and refused elsewhere."""

from functools import cache
from itertools import combinations
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import SVI
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model import taylor
from numpyro_ext._model.modes import given_modes
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext.mcmc import ControlVariate
from numpyro_ext.objectives import (
    IWELBO,
    VRELBO,
    BBAlphaELBO,
    Objective,
    taylor_proxy,
)
from numpyro_ext.optim import find_modes
from tests.objectives.compare import assert_refuses, assert_same
from tests.objectives.models import NONE, mixed_model

pytestmark = pytest.mark.slow

BATCHES = jnp.array(list(combinations(range(6), 2)))  # every minibatch of 2 of 6 rows
X = jnp.array([[1.0, 0.3], [1.0, -0.8], [1.0, 1.6], [1.0, 0.1], [1.0, -1.4], [1.0, 0.9]])
COUNTS = jnp.array([2.0, 0.0, 7.0, 1.0, 1.0, 4.0])
PARAMS = {"m": jnp.array([0.4, 0.6]), "s": jnp.array(0.3)}


def counts(batch=None):
    """Poisson rows at half weight, a positive site, and an observation outside the rows."""
    w = numpyro.sample("w", dist.Normal(0.3, 1.0).expand([2]).to_event(1))
    rate = numpyro.sample("rate", dist.Gamma(3.0, 2.0))
    numpyro.sample("z", dist.Normal(w[0], 1.0), obs=0.7)
    with numpyro.plate("rows", 6, subsample_size=batch) as i:
        with handlers.scale(scale=0.5):
            numpyro.sample("y", dist.Poisson(rate * jnp.exp(X[i] @ w)), obs=COUNTS[i])


def counts_guide(batch=None):
    s = numpyro.param("s", 0.3, constraint=constraints.positive)
    numpyro.sample("w", dist.Normal(numpyro.param("m", jnp.zeros(2)), s).to_event(1))
    numpyro.sample("rate", dist.LogNormal(0.2, s))


SD = jnp.array([0.5, 1.0, 2.0, 1.0, 0.7, 1.5])


def linear(batch=None):
    """Normal rows of unequal noise: quadratic in w."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 6, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(X[i] @ w, SD[i]), obs=COUNTS[i])


def linear_guide(batch=None):
    s = numpyro.param("s", 0.3, constraint=constraints.positive)
    numpyro.sample("w", dist.Normal(numpyro.param("m", jnp.zeros(2)), s).to_event(1))


def on_every_minibatch(losses, model, guide):
    """Losses and the gradient of their sum on all rows, and on each of ``BATCHES``."""

    def values(params, model, batch):
        found = [loss.loss(random.key(3), params, model, guide, batch) for loss in losses]
        return jnp.sum(jnp.array(found)), jnp.array(found)

    def of(model, batch):
        grad, found = jax.grad(values, has_aux=True)(PARAMS, model, batch)
        return {"losses": found, **grad}

    def at(idx):
        return of(handlers.substitute(model, data={"rows": idx}), 2)

    return jax.jit(lambda: (of(model, None), jax.vmap(at)(BATCHES)))()


def assert_every_one_is(whole, each, tol):
    assert_same(each, jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), whole, each), tol)


@pytest.mark.filterwarnings("ignore:with the proxy")
def test_the_mean_over_all_minibatches_is_the_loss_of_all_rows():
    """Value and gradient of order 1, at both degrees."""
    center = {"w": jnp.array([0.5, 0.7]), "rate": 1.2}
    losses = [
        VRELBO(1.0, 3, proxy=taylor_proxy(counts, 2, center=center, degree=degree))
        for degree in (1, 2)
    ]
    whole, each = on_every_minibatch(losses, counts, counts_guide)
    assert_same(jax.tree.map(lambda x: x.mean(0), each), whole, 1e-4)


def test_a_normal_likelihood_is_exact_whatever_the_center():
    """Each order and gradient has on each minibatch the loss and the gradient of all rows."""
    proxy = taylor_proxy(linear, 2, center={"w": jnp.array([3.0, -4.0])})
    losses = [
        IWELBO(3, proxy=proxy),
        VRELBO(0.5, 3, gradient="dreg", proxy=proxy),
        VRELBO(-1.0, 3, gradient="single", proxy=proxy),
    ]
    whole, each = on_every_minibatch(losses, linear, linear_guide)
    assert_every_one_is(whole, each, 2e-3)


@pytest.mark.x64
def test_a_likelihood_that_is_linear_is_exact_by_degree_1(tol):
    def model(batch=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", 6, subsample_size=batch) as i:
            numpyro.factor("y", X[i] @ w)

    proxy = taylor_proxy(model, 2, center={"w": jnp.array([1.0, -0.5])}, degree=1)
    whole, each = on_every_minibatch([VRELBO(0.5, 3, proxy=proxy)], model, linear_guide)
    assert_same(
        each, jax.tree.map(lambda x, y: jnp.broadcast_to(x, y.shape), whole, each), tol(1e-4, 1e-10)
    )


def test_at_the_posterior_no_minibatch_moves_the_guide():
    """A normal mean: at q = posterior the path gradient of every order is 0 for each draw."""
    x = 3 + random.normal(random.key(0), (100,))

    def model(batch=None):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0))
        with numpyro.plate("rows", 100, subsample_size=batch) as i:
            numpyro.sample("x", dist.Normal(w, 1.0), obs=x[i])

    def guide(batch=None):
        numpyro.sample("w", dist.Normal(numpyro.param("m", 0.0), numpyro.param("s", 1.0)))

    proxy = taylor_proxy(model, 5)
    assert proxy.center["w"] == pytest.approx(float(x.sum() / 100.01), abs=0.005)
    assert proxy.normal.factor[0, 0] == pytest.approx(100.01**-0.5, rel=1e-4)
    posterior = {"m": x.sum() / 100.01, "s": jnp.array(100.01**-0.5)}

    def gradients(loss):
        grad = jax.grad(lambda p, key: loss.loss(key, p, model, guide, 5))
        return jax.vmap(grad, (None, 0))(posterior, random.split(random.key(1), 8))

    good, plain = jax.jit(
        lambda: [
            gradients(VRELBO(0.5, 4, gradient="stl", proxy=proxy)),
            gradients(VRELBO(1.0, 4, gradient="stl")),
        ]
    )()
    for name in ("m", "s"):
        assert np.max(np.abs(good[name])) < 1e-3 * np.median(np.abs(plain[name]))


def far_mean(x, batch=100):
    """A mean far from zero, of many rows."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 1e4))
    with numpyro.plate("rows", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(mean, 1.0), obs=x[i])


@cache
def rows_of_far_mean(num_rows):
    return jnp.asarray(1000 + np.random.default_rng(0).standard_normal(num_rows), jnp.float32)


def test_float32_resolves_the_log_likelihood_of_many_rows():
    """200,000 of them, whose sum of -283,000 nats float32 holds to 0.03 and adds up to less."""
    x = rows_of_far_mean(200_000)
    proxy = taylor_proxy(far_mean, x, center={"mean": 1000.0})
    exact = np.asarray(x, np.float64) - 1000
    log_lik = -0.5 * np.sum(exact**2) - len(x) / 2 * np.log(2 * np.pi)
    assert float(proxy.value) == pytest.approx(log_lik, abs=0.02)
    v = np.linspace(-3, 3, 7) * len(x) ** -0.5
    t = jnp.asarray(1000 + v, jnp.float32)[:, None]
    v = np.asarray(t[:, 0], np.float64) - 1000

    def rows_at(t):
        return dist.Normal(t, 1.0).log_prob(x[:100])

    found = jax.vmap(lambda t: proxy.change(t, rows_at(t), rows_at)[0])(t)
    np.testing.assert_allclose(found, exact.sum() * v - len(x) * v**2 / 2, atol=2e-2)


def slope(batch=30):
    """Poisson counts of 300 rows with one coefficient, whose posterior sd is about 0.04."""
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    with numpyro.plate("rows", 300, subsample_size=batch) as i:
        size = 0.5 * (1 + i % 3)
        numpyro.sample("y", dist.Poisson(jnp.exp(b * size)), obs=jnp.round(jnp.exp(0.5 * size)))


def test_a_center_that_is_too_far_warns_and_moves_to_the_mean_of_a_guide():
    """25 posterior sds off; the guide's mean is that of 1,000 of its draws."""

    def guide(batch=30):
        numpyro.sample("b", dist.Normal(numpyro.param("m", 0.0), 0.04))

    with pytest.warns(InferenceWarning, match=r"30 of 300 rows.*center=\(guide, params\)"):
        far = taylor_proxy(slope, center={"b": 1.5})
    near = taylor_proxy(slope, center=(guide, {"m": 0.5}))
    assert near.center["b"] == pytest.approx(0.5, abs=0.01)
    assert near.noise < 0.05 < 5 < far.noise
    assert repr(near) == "TaylorProxy(degree=2, 300 rows of 'rows', 1 dimensions)"
    ControlVariate(near.center)


def test_the_noise_adds_nothing_to_the_mean_of_weights():
    """6.5 sds from the center of the 300 counts, by 4,000 minibatches: the log of the mean weight
    is that of all rows, to third order; the noise of half a nat would add half its variance. The
    Monte Carlo error is .01. The ELBO is left alone, and so is the mean of one weight."""
    proxy = taylor_proxy(slope, center={"b": 0.5})
    every = jnp.arange(300)
    size, t = 0.5 * (1 + every % 3), 0.5 + 6.5 * proxy.normal.factor[0]

    def rows_at(t, i):
        counts = jnp.round(jnp.exp(0.5 * size[i]))
        return dist.Poisson(jnp.exp(t[0] * size[i])).log_prob(counts)

    def on_minibatch(key):
        i = random.permutation(key, 300)[:30]
        log_p, residuals = proxy.change(t, rows_at(t, i), lambda t: rows_at(t, i))
        runs = [taylor.ProxyOfRun(proxy, False, a, K) for a, K in ((1.0, 10**6), (1.0, 1))]
        runs.append(taylor.ProxyOfRun(proxy, False, 0.0, 10**6))
        return log_p, *(run.without_noise(log_p, residuals) for run in runs)

    noisy, corrected, *same = jax.jit(jax.vmap(on_minibatch))(random.split(random.key(0), 4000))
    exact = float(rows_at(t, every).sum() - proxy.value)
    noise = float(noisy.std())
    assert 0.3 < noise < 0.7

    def log_mean(x):
        return float(jax.nn.logsumexp(x) - np.log(len(x))) - exact

    assert log_mean(noisy) > 0.3 * noise**2
    assert abs(log_mean(corrected)) < 0.1 * noise**2 + 0.03
    for other in same:
        np.testing.assert_allclose(other, noisy)


@pytest.mark.filterwarnings("ignore:with the proxy")
def test_guides_start_at_the_center_with_its_covariance():
    """The sites of the model are not in the order of the alphabet."""
    proxy = taylor_proxy(counts, 2, center={"w": jnp.array([0.5, 0.7]), "rate": 1.2})
    precision = np.linalg.inv(proxy.normal.factor @ proxy.normal.factor.T)
    for make in (AutoMultivariateNormal, AutoDiagonalNormal, AutoNormal):
        guide = make(counts)
        loc, scale = normal_of_guide(guide, proxy.init_params(guide))
        np.testing.assert_allclose(loc, proxy.normal.center, rtol=1e-6)
        given_others = np.diag(precision) ** -0.5
        expected = proxy.normal.factor if scale.ndim == 2 else given_others
        np.testing.assert_allclose(scale, expected, rtol=1e-3, atol=1e-4)
    modes = given_modes(proxy)
    assert modes.shapes == (("w", (2,)), ("rate", ()))
    np.testing.assert_allclose(modes.heaviest.factor, proxy.normal.factor)
    with pytest.raises(TypeError, match="guide is a AutoDelta; it must be one of AutoMulti"):
        proxy.init_params(AutoDelta(counts))


def plain_rows(size):
    """Normal rows of one latent site."""

    def model(batch=2):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", size, subsample_size=batch) as i:
            numpyro.sample("y", dist.Normal(w, 1.0), obs=COUNTS[i % 6])

    return model


def mean_of(x, s=1.0, *, family=dist.Normal):
    """A mean of 1,000 rows of which a minibatch is 50; their data may be NumPy's."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(x), subsample_size=50) as i:
        numpyro.sample("x", family(mean, s), obs=x[i])


def by_logistic(x, s=1.0):
    mean_of(x, s, family=dist.Logistic)


def mean_guide(*args):
    numpyro.sample("mean", dist.Normal(numpyro.param("m", 3.0), 0.03))


MEANS = 3 + np.random.default_rng(0).standard_normal(1000).astype(np.float32)


def run_of(model, loss, *args):
    """Three steps, of which the first is compiled."""
    svi = SVI(model, mean_guide, optax.sgd(0.0), loss)
    return svi.run(random.key(0), 3, *args, progress_bar=False).losses


@cache
def proxy_of_means():
    return taylor_proxy(mean_of, jnp.asarray(MEANS), 1.0, center={"mean": 3.0})


def test_modes_found_once_are_a_center():
    """The posterior of the mean is N(mean, 1 / 1000) but for a prior of scale 10."""
    modes = find_modes(mean_of, jnp.asarray(MEANS), 1.0)
    proxy = taylor_proxy(mean_of, jnp.asarray(MEANS), 1.0, center=modes)
    exact = MEANS.mean(dtype=float) / (1 + 1 / 1e5)
    assert abs(float(proxy.normal.center[0]) - exact) < 0.1 * 1000**-0.5
    assert float(proxy.normal.factor[0, 0]) == pytest.approx(1000**-0.5, rel=1e-3)
    with pytest.raises(ValueError, match="center has the unconstrained latent sites"):
        taylor_proxy(slope, center=modes)


@pytest.mark.parametrize(
    ("model", "args", "number"),
    [
        (mean_of, (jnp.asarray(MEANS).at[517].add(1.0), 1.0), "1 of"),
        # Of some rows another value differs by chance by less than the tolerance.
        (mean_of, (jnp.asarray(MEANS), 2.0), "99[0-9] of"),
        (by_logistic, (jnp.asarray(MEANS), 1.0), "99[0-9] of"),
    ],
    ids=["one row", "scalar", "likelihood"],
)
def test_a_run_on_other_rows_arguments_or_likelihood_is_refused(model, args, number):
    """By a proxy that went through a file."""
    sentence = rf"hold other data than .* log likelihood of {number} 1,000 rows is another"
    proxy = pickle.loads(pickle.dumps(proxy_of_means()))
    with pytest.raises(ValueError, match=sentence):
        run_of(model, VRELBO(0.5, 3, proxy=proxy), *args)


def test_data_that_are_changed_in_place_or_are_no_argument_are_refused():
    x, box = MEANS.copy(), {"x": jnp.asarray(MEANS)}

    def closed():
        mean_of(box["x"])

    in_place = VRELBO(0.5, 3, proxy=taylor_proxy(mean_of, x, 1.0, center={"mean": 3.0}))
    inside = VRELBO(0.5, 3, proxy=taylor_proxy(closed, center={"mean": 3.0}))
    run_of(mean_of, in_place, x, 1.0)
    run_of(closed, inside)
    x[5] += 2.0
    box["x"] = box["x"] + 1.0
    with pytest.raises(ValueError, match="of 1 of 1,000 rows is another"):
        run_of(mean_of, in_place, x, 1.0)
    with pytest.raises(ValueError, match="hold other data than"):
        run_of(closed, inside)


def test_a_loss_that_is_called_again_sees_other_rows_in_what_its_model_closes_over():
    box = {"x": jnp.asarray(MEANS)}

    def closed():
        mean_of(box["x"])

    loss = VRELBO(0.5, 3, proxy=taylor_proxy(closed, center={"mean": 3.0}))

    def evaluate():
        return loss.loss(random.key(0), {"m": 3.0}, closed, mean_guide)

    assert evaluate() == evaluate()
    box["x"] = box["x"] + 1.0
    with pytest.raises(ValueError, match="hold other data than"):
        evaluate()


def test_a_compiled_step_on_traced_arguments_is_nan_on_other_data():
    """Each step compares its own rows, whose log likelihood at the center it has anyway."""
    loss = VRELBO(0.5, 3, proxy=proxy_of_means())

    @jax.jit
    def step(x, s):
        return loss.loss(random.key(0), {"m": 3.0}, mean_of, mean_guide, x, s)

    x = jnp.asarray(MEANS)
    known = loss.loss(random.key(0), {"m": 3.0}, mean_of, mean_guide, x, 1.0)
    assert float(step(x, 1.0)) == pytest.approx(float(known), rel=1e-6)
    assert np.all(np.isnan([step(x + 0.1, 1.0), step(x, 1.1)]))


class PerDatum(Objective):
    per_datum = True

    def estimate(self, draws):
        raise AssertionError


def test_a_proxy_of_other_rows_or_sites_is_refused():
    def guide(*args):
        numpyro.sample("w", dist.Normal(0.0, 1.0))

    proxy = taylor_proxy(plain_rows(6), 2, center={"w": 1.0})
    loss = VRELBO(0.5, 3, proxy=proxy)
    assert_refuses(
        r"7 rows of 'rows', but the proxy is one of 6 rows", loss, NONE, plain_rows(7), guide
    )
    wide = {"s": 1.0, "m": jnp.zeros(2)}
    assert_refuses(r"latent sites.*'w': \(2,\).*the proxy", loss, wide, linear, linear_guide, 2)
    loss = PerDatum(3, proxy=proxy)
    assert_refuses("a term for each row of 'rows'", loss, NONE, plain_rows(6), guide)
    with pytest.raises(TypeError, match="proxy is a float; it must be the result of taylor_proxy"):
        VRELBO(0.5, 3, proxy=1.0)
    with pytest.raises(TypeError, match=r"BBAlphaELBO.*unexpected keyword argument 'proxy'"):
        BBAlphaELBO(0.5, 3, proxy=proxy)
    with pytest.raises(ValueError, match="latent site 'z' lies in the plate 'data'"):
        taylor_proxy(mixed_model, batch=2)
