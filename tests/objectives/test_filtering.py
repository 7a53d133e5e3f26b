"""The bound of a particle filter: its mean, its gradients, and what it refuses."""

from functools import cache, partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpy.polynomial.hermite_e import hermegauss
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal
import pytest
from scipy.stats import multivariate_normal

from numpyro_ext.objectives import IWELBO, VRELBO, FilteringELBO
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.filtering import shared_sites
from tests.objectives.models import floats, value_and_grad

Y = jnp.array([1.2, 1.9, 0.3, -0.4, 0.6])
SHIFT, START, NOISE = jnp.array([0.4, -0.2]), jnp.array([0.3, 1.0]), jnp.array([0.5, 0.9])
A = jnp.array([[0.8, 0.2], [0.0, 0.6]])
PARAMS = {"lag": 0.7, "gain": 0.4, "m": 0.2}


def model(y=Y):
    """A state of two numbers of unequal scales, of which the sum is observed."""
    lag = numpyro.param("lag", 0.7)
    x = numpyro.sample("start", dist.Normal(START, 1.2).to_event(1))

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(lag * A @ x + SHIFT, NOISE).to_event(1))
        return x, numpyro.sample("y", dist.Normal(x.sum(), 0.6), obs=y)

    scan(step, x, y)


def guide(y=Y):
    gain, m = numpyro.param("gain", 0.4), numpyro.param("m", 0.2)
    x = numpyro.sample("start", dist.Normal(START + m, 1.0).to_event(1))

    def step(x, y):
        loc = 0.6 * A @ x + SHIFT
        x = numpyro.sample("x", dist.Normal(loc + gain * (y - loc.sum()), 0.8).to_event(1))
        return x, None

    scan(step, x, y)


def log_evidence(lag=PARAMS["lag"]):
    """Of the same, by the joint normal of the data: each is linear in the start and the noise."""
    T, A_ = len(Y), lag * np.asarray(A)
    mean, root = np.asarray(START), 1.2 * np.eye(2, 2 * T + 2)
    means, rows = [], []
    for t in range(T):
        mean, root = A_ @ mean + np.asarray(SHIFT), A_ @ root
        root[:, 2 * t + 2 : 2 * t + 4] = np.diag(NOISE)
        means.append(mean.sum())
        rows.append(root.sum(0))
    cov = np.stack(rows) @ np.stack(rows).T + 0.36 * np.eye(T)
    return multivariate_normal(means, cov).logpdf(Y)


@partial(jax.jit, static_argnums=(0, 1))
def bounds(loss, num_keys, params):
    keys = random.split(random.key(0), num_keys)
    return -jax.vmap(lambda key: loss.loss(key, params, model, guide, Y))(keys)


@pytest.mark.slow
@pytest.mark.x64
def test_the_mean_of_exp_is_the_evidence_of_the_kalman_filter():
    """And the mean of the bound is below it, and rises with the number of particles."""
    losses = [FilteringELBO(2), FilteringELBO(16), FilteringELBO(16, ess_threshold=1.0)]
    few, *many = (np.asarray(bounds(loss, 4000, PARAMS), float) for loss in losses)
    for found in many:
        weights = np.exp(found - log_evidence())
        error = weights.std() / len(weights) ** 0.5
        assert abs(weights.mean() - 1) < 5 * error < 0.1
        assert few.mean() < found.mean() - 0.3 < log_evidence() - 0.3


def with_parameter(y=Y):
    """Drawn before the loop: a parameter of the sequence, and what the start is drawn from."""
    width = numpyro.sample("width", dist.LogNormal(0.1, 0.3))
    drift = numpyro.sample("drift", dist.Normal(0.3, width))
    mean = numpyro.sample("mean", dist.Normal(0.5, 0.4))
    x = numpyro.sample("start", dist.Normal(mean, 1.0))

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(0.7 * x + drift, 0.5))
        return x, numpyro.sample("y", dist.Normal(x, 0.6), obs=y)

    scan(step, x, y)


def guide_with_parameter(y=Y):
    gain = numpyro.param("gain", 0.4)
    width = numpyro.sample("width", dist.LogNormal(gain - 0.2, 0.3))
    drift = numpyro.sample("drift", dist.Normal(0.4 * width, 0.2))
    mean = numpyro.sample("mean", dist.Normal(0.6, 0.4))
    x = numpyro.sample("start", dist.Normal(drift, 0.9))

    def step(x, y):
        return numpyro.sample("x", dist.Normal(0.3 * x + gain * y + drift, 0.5)), None

    scan(step, x, y)
    return mean


@pytest.mark.slow
def test_one_particle_is_the_elbo():
    """Draw for draw, also with sites before the loop that all particles share."""
    losses = [FilteringELBO(1), VRELBO(1.0, 1, gradient="standard")]
    ours, elbo = value_and_grad(losses, {"gain": 0.4}, with_parameter, guide_with_parameter)
    np.testing.assert_allclose(jax.tree.leaves(ours), jax.tree.leaves(elbo), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.x64
def test_never_resampled_is_the_importance_weighted_bound():
    losses = [FilteringELBO(5, ess_threshold=0.0, gradient="score"), IWELBO(5)]
    ours, bound = value_and_grad(losses, PARAMS, model, guide)
    np.testing.assert_allclose(jax.tree.leaves(ours), jax.tree.leaves(bound), rtol=1e-4)


def test_a_site_that_only_begins_the_loop_is_drawn_by_each_particle():
    """The parameters of the sequence, and what the guide draws them from, once."""
    args = random.key(0), {"gain": 0.4}, with_parameter, guide_with_parameter, (Y,), {}
    assert shared_sites(Draws(FilteringELBO(3), *args)) == {"drift", "width"}


STEPS = {"lag": 0.7, "gain": 0.3, "spread": 0.8}
TWO = jnp.array([2.0, -1.5])


def two_steps():
    lag = numpyro.param("lag", 0.7)

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(lag * x + 0.1, 0.6))
        return x, numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    scan(step, 0.5, TWO)


def guide_of_two():
    gain, spread = numpyro.param("gain", 0.3), numpyro.param("spread", 0.8)

    def step(x, y):
        return numpyro.sample("x", dist.Normal(0.3 * x + gain * y, spread)), None

    scan(step, 0.5, TWO)


@cache
def gradient_by_quadrature():
    """Of the mean bound of two particles over two steps: the four draws by Gauss and Hermite, the
    ancestors summed out."""
    nodes, mass = hermegauss(16)
    e = jnp.stack(jnp.meshgrid(*[jnp.asarray(nodes)] * 4, indexing="ij"), -1).reshape(-1, 4)
    mass = mass / mass.sum()
    mass = jnp.asarray(np.einsum("i,j,k,l->ijkl", *[mass] * 4).ravel())

    def move(p, x, e, y):
        loc = 0.3 * x + p["gain"] * y
        new = loc + p["spread"] * e
        lw = dist.Normal(p["lag"] * x + 0.1, 0.6).log_prob(new)
        lw = lw + dist.Normal(new, 1.0).log_prob(y)
        return new, lw - dist.Normal(loc, p["spread"]).log_prob(new)

    def mean_bound(p):
        x, lw = move(p, 0.5, e[:, :2], TWO[0])
        mean = jax.scipy.special.logsumexp(lw, 1) - jnp.log(2.0)
        chance, total = jax.nn.softmax(lw, 1), mean
        for i in (0, 1):
            for j in (0, 1):
                _, lw = move(p, x[:, jnp.array([i, j])], e[:, 2:], TWO[1])
                second = jax.scipy.special.logsumexp(lw, 1) - jnp.log(2.0)
                total = total + chance[:, i] * chance[:, j] * second
        return jnp.sum(mass * total)

    return jax.jit(jax.grad(mean_bound))(floats(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", ["score", "pathwise"])
def test_the_gradient_with_scores_is_the_derivative_of_the_mean_bound(gradient):
    """And the pathwise one is not."""
    loss = FilteringELBO(2, gradient=gradient, ess_threshold=1.0)

    def bound(p, key):
        return -loss.loss(key, p, two_steps, guide_of_two)

    keys = random.split(random.key(0), 40_000)
    found = jax.jit(jax.vmap(jax.grad(bound), (None, 0)))(floats(STEPS), keys)
    errors = {n: (x.mean() - gradient_by_quadrature()[n]) / x.std() * 200 for n, x in found.items()}
    worst = max(abs(float(x)) for x in errors.values())
    assert worst < 5 if gradient == "score" else worst > 20


def walk(y=Y, *, observed=True, reverse=False):
    """A random walk, or without its observed sites a guide of it."""

    def step(x, y):
        x = numpyro.sample("x", dist.Normal(0.8 * x, 0.7))
        return x, numpyro.sample("y", dist.Normal(x, 0.4), obs=y) if observed else None

    return scan(step, 0.3, y, reverse=reverse)


proposal = partial(walk, observed=False)


def value(model, guide):
    return FilteringELBO(1).loss(random.key(0), {}, model, guide)


def test_backwards_in_time_is_the_reversed_sequence():
    backwards = value(partial(walk, reverse=True), partial(proposal, reverse=True))
    forward = value(partial(walk, Y[::-1]), partial(proposal, Y[::-1]))
    np.testing.assert_allclose(backwards, forward, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss is NaN")
def test_particles_of_weight_zero_leave_finite_gradients():
    """Some of them, and all."""

    def bounded(width):
        def step(x, y):
            x = numpyro.sample("x", dist.Normal(0.8 * x, 0.7))
            numpyro.factor("near", jnp.where(abs(x - y) < width, 0.0, -jnp.inf))
            return x, None

        scan(step, 0.3, Y)

    def guide(width):
        b = numpyro.param("b", 0.8)
        step = lambda x, y: (numpyro.sample("x", dist.Normal(b * x, 0.7)), None)  # noqa: E731
        scan(step, 0.3, Y)

    def loss(b, width):
        loss = FilteringELBO(6)
        return loss.loss(random.key(0), {"b": b}, bounded, guide, width)

    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(loss), (None, 0)))(
        0.8, jnp.array([1.5, 0.0])
    )
    assert np.isfinite(values).tolist() == [True, False] and values[1] == np.inf
    assert np.all(np.isfinite(slopes))


def latents_before(y=Y):
    numpyro.sample("x", dist.Normal(jnp.zeros(len(y)), 1.0))
    scan(lambda x, y: (x, None), 0.0, y)


def data_after(y=Y):
    last, _ = walk(y)
    numpyro.sample("last", dist.Normal(last, 1.0), obs=0.3)


def param_inside(y=Y):
    def step(x, y):
        scale = numpyro.param("s", 0.5)
        x = numpyro.sample("x", dist.Normal(x, 0.7))
        return x, numpyro.sample("y", dist.Normal(x, scale), obs=y)

    scan(step, 0.3, y)


def padded(y=Y):
    def step(x, y):
        with numpyro.handlers.mask(mask=y > 0):
            x = numpyro.sample("x", dist.Normal(x, 0.7))
            return x, numpyro.sample("y", dist.Normal(x, 0.4), obs=y)

    scan(step, 0.3, y)


def rows_before(y=Y):
    with numpyro.plate("rows", 10, subsample_size=5):
        numpyro.sample("r", dist.Normal(0.0, 1.0), obs=jnp.zeros(5))
    walk(y)


def no_loop(y=Y):
    numpyro.sample("x", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("model", "guide", "match"),
    [
        (walk, AutoNormal(walk), "the guide has no numpyro.contrib.control_flow.scan"),
        (no_loop, no_loop, "the guide has no numpyro.contrib.control_flow.scan"),
        (
            partial(walk, Y[:0]),
            partial(proposal, Y[:0]),
            "a scan of model or guide has no time steps",
        ),
        (walk, partial(proposal, reverse=True), r"the guide has 5 time steps \(reverse=True\)"),
        (walk, latents_before, "'x' is in the scan of the model and not in the guide's"),
        (data_after, proposal, "the site 'last' comes after scan"),
        (param_inside, proposal, "param\\('s'\\) is inside the body of scan"),
        (padded, proposal, "'x' is masked in the scan of the model and not in the guide's"),
        (rows_before, proposal, "'rows' takes a minibatch of 5 of 10 rows"),
        (numpyro.handlers.scale(walk, 0.5), proposal, "handler .* around scan acts on its site"),
        (numpyro.handlers.mask(walk, mask=False), proposal, "handler .* around scan acts on"),
        (numpyro.handlers.condition(walk, {"y": Y}), proposal, "may give a value to the site 'y'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch", "ignore:Site")
def test_what_the_filter_cannot_see_is_an_error(model, guide, match):
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: value(model, guide))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ess_threshold": 1.5}, "ess_threshold is 1.5; it must be a share of the particles"),
        ({"ess_threshold": 0.5, "gradient": "score"}, "use ess_threshold=1"),
        ({"gradient": "dreg"}, "gradient"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        FilteringELBO(4, **arguments)
