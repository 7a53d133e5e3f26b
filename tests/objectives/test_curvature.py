"""CurvatureELBO: its gradients in closed form, on a linear model with unequal columns."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.module import random_nnx_module
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.objectives import VRELBO, CurvatureELBO
from numpyro_ext.optim import vadam
from tests.objectives.compare import assert_refuses

N, D, NOISE, PRIOR = 12, 3, 0.7, np.array([2.0, 0.5, 1.0])
rng = np.random.default_rng(0)
X = rng.standard_normal((N, D)) * np.array([1.0, 3.0, 0.3]) + np.array([0.5, 0.0, 1.0])
Y = X @ np.array([1.0, -0.5, 2.0]) + NOISE * rng.standard_normal(N)
TAU, LAM = NOISE**-2, PRIOR**-2
MEAN, SD = np.array([0.8, -0.3, 1.5]), np.array([0.4, 0.1, 0.6])
DATA = jnp.asarray(X), jnp.asarray(Y)
PARAMS = {"w_auto_loc": jnp.asarray(MEAN), "w_auto_scale": jnp.asarray(SD)}


def model(x, y, batch=None, inside=True):
    w = numpyro.sample("w", dist.Normal(0.0, PRIOR).to_event(1))
    outside = x @ w
    with numpyro.plate("rows", N, subsample_size=batch) as idx:
        loc = x[idx] @ w if inside else outside[idx]
        numpyro.sample("y", dist.Normal(loc, NOISE), obs=y[idx])


@pytest.fixture(scope="module")
def guide():
    guide = AutoNormal(model)
    SVI(model, guide, optax.adam(1e-3), VRELBO(1.0, 1)).init(random.key(0), *DATA)
    return guide


def of_both(loss, guide, key, batch=None, inside=True, params=PARAMS):
    """What the optimisers read: G, and what natural gradients add to the precision, C."""
    grad = jax.jit(jax.grad(lambda p: loss.loss(key, p, model, guide, *DATA, batch, inside)))(
        params
    )
    return grad["w_auto_loc"], grad["w_auto_scale"] / params["w_auto_scale"]


def expected_squares():
    """E_q of the sum of squared gradients of rows: tau^2 x^2 E (y - x w)^2."""
    second = (Y - X @ MEAN) ** 2 + X**2 @ SD**2
    return TAU**2 * (X**2 * second[:, None]).sum(0)


def expected_square():
    """E_q of the square of the whole gradient, over N."""
    mean = TAU * X.T @ (Y - X @ MEAN)
    return (mean**2 + (TAU * X.T @ X) ** 2 @ SD**2) / N


EXPECTED = {
    "hessian": TAU * (X**2).sum(0),
    "reparam": TAU * (X**2).sum(0),
    "fisher": TAU * (X**2).sum(0),
    "empirical_fisher": expected_squares(),
    "squared_gradient": expected_square(),
}


@pytest.mark.slow
@pytest.mark.parametrize("curvature", EXPECTED)
def test_the_mean_of_both_gradients_is_that_of_the_closed_form(curvature, guide):
    """Within four Monte Carlo errors of 2,000 draws, which the antithetic mean does not have."""
    each = jax.jit(jax.vmap(lambda key: of_both(CurvatureELBO(curvature), guide, key)))
    G, C = (np.asarray(a, float) for a in each(random.split(random.key(0), 2000)))
    exact_G = LAM * MEAN - TAU * X.T @ (Y - X @ MEAN)
    exact_C = EXPECTED[curvature] + LAM - SD**-2
    for found, exact in ((G, exact_G), (C, exact_C)):
        error = found.std(0) / len(found) ** 0.5
        assert np.all(np.abs(found.mean(0) - exact) <= 4 * error + 1e-4 * (1 + np.abs(exact)))


@pytest.mark.slow
def test_a_minibatch_is_scaled_to_all_rows(guide):
    curvature = "empirical_fisher"
    each = jax.jit(jax.vmap(lambda key: of_both(CurvatureELBO(curvature), guide, key, batch=4)))
    C = np.asarray(each(random.split(random.key(0), 4000))[1], float)
    exact = EXPECTED[curvature] + LAM - SD**-2
    assert np.all(np.abs(C.mean(0) - exact) <= 4 * C.std(0) / len(C) ** 0.5)


@pytest.mark.slow
def test_rows_alone_and_passes_over_the_minibatch_agree(guide):
    key, batch = random.key(0), 5
    alone = of_both(CurvatureELBO("empirical_fisher", 2), guide, key, batch)
    whole = of_both(CurvatureELBO("empirical_fisher", 2), guide, key, batch, inside=False)
    for a, b in zip(alone, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3)


def scaled(x, y, scale):
    w = numpyro.sample("w", dist.Normal(0.0, PRIOR).to_event(1))
    with numpyro.plate("rows", len(y)) as idx, numpyro.handlers.scale(scale=scale):
        numpyro.sample("y", dist.Normal(x[idx] @ w, NOISE), obs=y[idx])


@pytest.mark.slow
@pytest.mark.parametrize("curvature", ["fisher", "squared_gradient"])
def test_rows_that_count_twice_have_the_curvature_of_two_rows(curvature, guide):
    """With the labels of "fisher" drawn for each row, within four errors of 500 draws."""
    twice = tuple(jnp.concatenate([x, x]) for x in DATA)

    def of(program, *args):
        def C(key):
            loss = lambda p: CurvatureELBO(curvature).loss(key, p, program, guide, *args)  # noqa: E731
            return jax.grad(loss)(PARAMS)["w_auto_scale"] / PARAMS["w_auto_scale"]

        return np.asarray(jax.jit(jax.vmap(C))(random.split(random.key(0), 500)), float)

    by_scale, by_rows = of(scaled, *DATA, 2.0), of(scaled, *twice, 1.0)
    error = 4 * (by_scale - by_rows).std(0) / 500**0.5
    np.testing.assert_array_less(
        np.abs((by_scale - by_rows).mean(0)), error + 1e-4 * np.abs(by_rows.mean(0))
    )


@pytest.mark.slow
def test_a_scale_around_the_guide_is_that_of_its_entropy(guide):
    lighter = numpyro.handlers.scale(guide, scale=0.3)
    loss = lambda p: CurvatureELBO("hessian").loss(random.key(0), p, model, lighter, *DATA)  # noqa: E731
    C = jax.jit(jax.grad(loss))(PARAMS)["w_auto_scale"] / SD
    np.testing.assert_allclose(C, EXPECTED["hessian"] + LAM - 0.3 * SD**-2, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.x64
def test_value_is_that_of_the_elbo_at_the_same_draws(guide):
    args = random.key(3), PARAMS, model, guide, *DATA, 4
    losses = [VRELBO(1.0, 3), *(CurvatureELBO(curvature, 3) for curvature in EXPECTED)]
    elbo, *values = jax.jit(lambda: [loss.loss(*args) for loss in losses])()
    np.testing.assert_allclose(values, elbo, rtol=1e-5)


def hierarchy(y):
    """Its prior does not factorise, and one site is constrained."""
    tau = numpyro.sample("tau", dist.LogNormal(0.2, 0.5))
    a = numpyro.sample(
        "a", dist.MultivariateNormal(jnp.ones(2), jnp.array([[1.0, 0.6], [0.6, 2.0]]))
    )
    with numpyro.plate("rows", len(y)) as idx:
        numpyro.sample("y", dist.Normal(a[0] + a[1], tau), obs=y[idx])


@pytest.mark.nightly
def test_the_hessian_is_exact_and_signs_are_unbiased_where_the_prior_does_not_factorise():
    guide = AutoDiagonalNormal(hierarchy)
    y = jnp.array([0.3, 2.0, 1.1])
    SVI(hierarchy, guide, optax.adam(1e-3), VRELBO(1.0, 1)).init(random.key(0), y)
    params = {"auto_loc": jnp.array([0.1, 0.7, -0.2]), "auto_scale": jnp.full(3, 1e-3)}
    grad = lambda curvature: jax.jit(  # noqa: E731
        jax.vmap(
            jax.grad(lambda p, k: CurvatureELBO(curvature).loss(k, p, hierarchy, guide, y)),
            (None, 0),
        )
    )(params, random.split(random.key(1), 500))
    exact = np.asarray(grad("hessian")["auto_scale"], float) * 1e3 + 1e6

    def minus_log_joint(u):
        tau, a = jnp.exp(u[0]), u[1:]
        prior = dist.Normal(0.2, 0.5).log_prob(u[0])
        prior += hierarchy_prior.log_prob(a)
        return -prior - dist.Normal(a[0] + a[1], tau).log_prob(y).sum()

    hierarchy_prior = dist.MultivariateNormal(jnp.ones(2), jnp.array([[1.0, 0.6], [0.6, 2.0]]))
    curvature = np.diagonal(jax.hessian(minus_log_joint)(params["auto_loc"]))
    # The precision of a scale of 1e-3 is 1e6, of which float32 keeps a tenth.
    assert np.all(np.abs(exact.mean(0) - curvature) < 0.3)
    found = np.asarray(grad("fisher")["auto_scale"], float) * 1e3 + 1e6
    fisher = np.array([2 * len(y), len(y) * np.exp(-0.2), len(y) * np.exp(-0.2)])
    of_prior = np.array([4.0, *np.diagonal(np.linalg.inv([[1.0, 0.6], [0.6, 2.0]]))])
    error = found.std(0) / len(found) ** 0.5
    assert np.all(np.abs(found.mean(0) - fisher - of_prior) < 4 * error + 0.3)


def test_vadam_by_the_scale_takes_the_mean_of_squares():
    """The square of a step from the same start, of the mean gradient and of its own draws."""
    guide = AutoNormal(model, init_scale=0.3)
    ours = vadam(0.1, num_data=N, prior_precision={"w_auto_loc": jnp.asarray(LAM)}, squares="scale")
    svi = SVI(model, guide, ours, CurvatureELBO("squared_gradient", 3))
    state = svi.init(random.key(0), *DATA)
    start, before = svi.get_params(state), svi.optim.get_params(state.optim_state)
    step_key = random.split(state.rng_key)[1]
    after = svi.get_params(jax.jit(svi.update)(state, *DATA)[0])
    assert set(before) == {"w_auto_loc", "w_auto_scale"}
    keys = random.split(random.split(step_key)[1], 3)
    draws = np.array([draw(guide, start, key) for key in keys])
    of_rows = TAU * (Y - draws @ X.T) @ X
    s = 0.99 * (start["w_auto_scale"] ** -2 - LAM) / N + 0.01 * (of_rows**2).mean(0) / N**2
    np.testing.assert_allclose(after["w_auto_scale"] ** -2, N * s + LAM, rtol=1e-3)


def draw(guide, params, key):
    seeded = numpyro.handlers.seed(
        numpyro.handlers.substitute(guide, data=params), random.split(key)[1]
    )
    return np.asarray(seeded(*DATA)["w"])


def net_of():
    from flax import nnx

    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.l1, self.l2 = nnx.Linear(D, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

        def __call__(self, x):
            return self.l2(jnp.tanh(self.l1(x)))[..., 0]

    return random_nnx_module("nn", Layers(nnx.Rngs(0)), dist.Normal(0, 1))


def network(x, y):
    net = net_of()
    noise = numpyro.param("noise", 0.5, constraint=dist.constraints.positive)
    with numpyro.plate("rows", N, subsample_size=4):
        batch = numpyro.subsample(x, event_dim=1)
        numpyro.sample("y", dist.Normal(net(batch), noise), obs=numpyro.subsample(y, event_dim=0))


def correlated(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x[:, 0], 1.0), obs=y)


def dependent(x, y):
    a = numpyro.sample("a", dist.Normal(numpyro.param("m", 0.0), 1.0))
    numpyro.sample("b", dist.Normal(a, 1.0))


def two(x, y):
    loc = numpyro.sample("a", dist.Normal(0, 1)) + numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", N) as idx:
        numpyro.sample("y", dist.Normal(loc, 1.0), obs=y[idx])


def local(x, y):
    with numpyro.plate("rows", N) as idx:
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y[idx])


def with_a_factor(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", N) as idx:
        numpyro.factor("y", dist.Normal(w, 1.0).log_prob(y[idx]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "make", "curvature", "says"),
    [
        (
            correlated,
            AutoMultivariateNormal,
            "fisher",
            "is a MultivariateNormal; it must be a Normal",
        ),
        (two, lambda _: dependent, "fisher", r"normal of site 'b' of the guide depends on .*a"),
        (local, AutoNormal, "fisher", r"latent sites \['z'\] belong to single rows"),
        (with_a_factor, AutoNormal, "fisher", "numpyro.factor, of which no labels"),
    ],
)
def test_what_it_is_not_made_for_says_so(program, make, curvature, says):
    guide, loss = make(program), CurvatureELBO(curvature)
    svi = SVI(program, guide, optax.adam(0.01), loss)
    params = svi.get_params(svi.init(random.key(0), *DATA))
    assert_refuses(says, loss, params, program, guide, *DATA)
