"""VRELBO and IWELBO: closed forms, laws in alpha and K, and what upstream gets wrong."""

from functools import partial
import math

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO
import optax
import pytest

from numpyro_ext._model.handlers import seed_plates
from numpyro_ext.objectives import IWELBO, VRELBO
from tests.objectives.compare import assert_same
from tests.objectives.models import (
    LOCAL_PARAMS,
    NONE,
    X_LOCAL,
    global_model,
    linear_gaussian,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
    particle_keys,
    value_and_grad,
)

pytestmark = pytest.mark.slow

INF = math.inf
ALPHAS = (-INF, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, INF)
# The mean of the estimate for K = 50.
G2 = (2.1806704, 1.0539071, 0.6475387, -0.0510591, -0.5128264, -1, -1.9489409, -4.1806704)


def g2_bounds(alphas, num_particles, replicates):
    """Mean of the estimate over independent replicates, in one plate around model and guide."""

    def model():
        with numpyro.plate("replicate", replicates):
            numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))

    def guide():
        with numpyro.plate("replicate", replicates):
            numpyro.sample("z", dist.Normal(jnp.ones(2), 1.0).to_event(1))

    def loss(alpha):
        return VRELBO(alpha, num_particles).loss(random.key(num_particles), NONE, model, guide)

    finite = jnp.array([a for a in alphas if math.isfinite(a)])
    values = list(jax.jit(lambda: jax.lax.map(loss, finite))())
    values = [
        values.pop(0) if math.isfinite(a) else jax.jit(loss, static_argnums=0)(a) for a in alphas
    ]
    return -np.array(values) / replicates


def test_g2_table():
    num_particles, replicates = 50, 10_000
    bounds = g2_bounds(ALPHAS, num_particles, replicates)
    # The standard deviation of one estimate is at most that of one log weight, sqrt(2).
    error = math.sqrt(2 / replicates)
    np.testing.assert_allclose(bounds, G2, atol=4 * error)
    # Reflection: the mean at alpha and the one at 2 - alpha add up to -2.
    pairs = [(0, 7), (3, 6)]
    np.testing.assert_allclose([bounds[i] + bounds[j] for i, j in pairs], -2, atol=8 * error)


def test_order_at_which_a_finite_estimate_reaches_the_evidence():
    """alpha_K rises to 0 with K: -4.0848 for 3, -0.9351 for 5, -0.0594 for 50 particles."""
    alpha, replicates = -0.9351, 50_000
    below, at, above = g2_bounds([alpha + 0.05, alpha, alpha - 0.05], 5, replicates)
    assert abs(at) < 4 * math.sqrt(2 / replicates)
    assert below < at < above


def test_monotone_in_alpha_and_in_particles():
    def finite(alpha, num_particles, key):
        loss = VRELBO(alpha, num_particles)
        return -loss.loss(key, LOCAL_PARAMS, local_model, local_guide)

    def along_alpha(key):
        alphas = jnp.array([-1.0, 0.0, 0.999999, 1.0, 1.000001, 3.0])
        between = jax.vmap(lambda alpha: finite(alpha, 7, key))(alphas)
        return jnp.array([finite(-INF, 7, key), *between, finite(INF, 7, key)])

    assert np.all(np.diff(jax.jit(along_alpha)(random.key(3))) <= 1e-5)
    keys = random.split(random.key(0), 2000)
    few, many = (
        jax.jit(jax.vmap(lambda key, k=k: jnp.array([finite(a, k, key) for a in (0.0, 2.0)])))(keys)
        for k in (2, 6)
    )
    assert many[:, 0].mean() > few[:, 0].mean()
    assert many[:, 1].mean() < few[:, 1].mean()


def test_one_particle_is_the_elbo():
    class ParticleZero(Trace_ELBO):
        def loss(self, rng_key, *args):
            return super().loss(particle_keys(rng_key, 1)[0], *args)

    kinds = [(-INF, "standard"), (INF, "single"), (-1.0, "stl"), (2.5, "dreg")]
    losses = [ParticleZero(), *(VRELBO(alpha, 1, gradient=kind) for alpha, kind in kinds)]
    (value, elbo), *ours = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide, seed=4)
    for (got, grad), (_, kind) in zip(ours, kinds, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5)
        for name in elbo if kind in ("standard", "single") else ("b",):
            np.testing.assert_allclose(grad[name], elbo[name], rtol=1e-4)


LG_VALUES = {-1.0: -1.5685916054, 0.0: -1.8280121235, 0.5: -2.0744036413, 1.0: -2.5439385332}


def lg_bound(alpha, x):
    if alpha == 1:
        return -math.log(2 * math.pi) / 2 - (x**2 + 1) / 2
    return (
        -math.log(2 * math.pi) / 2
        - math.log(2 - alpha) / (2 * (1 - alpha))
        - x**2 / (2 * (2 - alpha))
    )


def test_linear_gaussian_bound_with_many_particles():
    num_particles, params = 200_000, {"m": 0.0, "s": 1.0}
    lw = -((1.5 - random.normal(random.key(1), (10_000,))) ** 2) / 2

    def bound(alpha):
        loss = VRELBO(alpha, num_particles)
        return -loss.loss(random.key(0), params, linear_gaussian, normal_guide, 1.5)

    bounds = jax.jit(lambda alphas: jax.lax.map(bound, alphas))(jnp.array(list(LG_VALUES)))
    for (alpha, exact), got in zip(LG_VALUES.items(), bounds, strict=True):
        assert lg_bound(alpha, 1.5) == pytest.approx(exact, abs=1e-9)
        a = 1 - alpha
        r = jax.nn.softmax(a * lw) * len(lw) / a if a else lw
        assert float(got) == pytest.approx(exact, abs=4 * float(r.std()) / num_particles**0.5)


@pytest.mark.x64
def test_posterior_guide_gives_the_evidence_exactly(tol):
    params = {"m": 0.75, "s": math.sqrt(0.5)}
    kinds = [(0.5, "standard"), (-INF, "standard"), (3.0, "single"), (-1.0, "stl"), (0.0, "dreg")]
    losses = [VRELBO(alpha, 3, gradient=kind) for alpha, kind in kinds]
    results = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    for (value, grad), (_, kind) in zip(results, kinds, strict=True):
        np.testing.assert_allclose(-value, -1.8280121235, rtol=tol(1e-6, 1e-10))
        if kind in ("stl", "dreg"):
            np.testing.assert_allclose([grad["m"], grad["s"]], 0, atol=tol(1e-5, 1e-13))


def test_iwelbo_is_order_zero():
    losses = [IWELBO(5, gradient="dreg"), VRELBO(0.0, 5, gradient="dreg")]
    a, b = value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, a, b))


# Mean-field Gaussian on a Gaussian target, precision Lam.
LAM = jnp.array([[2.0, 1.2], [1.2, 1.5]])
R2 = 0.48


def rho(alpha):
    if alpha == 0:
        return 1 - R2
    return ((2 * alpha - 1) + math.sqrt(1 - 4 * alpha * (1 - alpha) * R2)) / (2 * alpha)


def correlated(replicates):
    """The target and a mean-field guide, in a plate of replicates that share the parameters."""

    def model():
        with numpyro.plate("replicate", replicates):
            mean = jnp.array([1.0, -2.0])
            numpyro.sample("z", dist.MultivariateNormal(mean, precision_matrix=LAM))

    def guide():
        m = numpyro.param("m", jnp.array([0.8, -1.7]))
        s = numpyro.param("s", jnp.array([0.6, 0.6]), constraint=dist.constraints.positive)
        with numpyro.plate("replicate", replicates):
            numpyro.sample("z", dist.Normal(m, s).to_event(1))

    return model, guide


def fit_mean_field(alpha):
    optim = optax.adam(optax.exponential_decay(0.05, 50, 0.3))
    svi = SVI(*correlated(1), optim, VRELBO(alpha, 2000))
    params = svi.run(random.key(5), 150, progress_bar=False).params
    return params["m"], params["s"] ** -2 / jnp.diag(LAM)


def test_mean_field_fixed_point():
    """The precisions of the optimum are rho(alpha) times those of the target's diagonal."""
    known = {0.5: 0.721110255, 1.0: 1.0, 2.0: 1.3}
    np.testing.assert_allclose([rho(a) for a in known], list(known.values()), rtol=1e-8)
    means, precisions = jax.jit(jax.vmap(fit_mean_field))(jnp.array(list(known)))
    for mean, precision, exact in zip(means, precisions, known.values(), strict=True):
        np.testing.assert_allclose(precision, exact, rtol=0.03)
        np.testing.assert_allclose(mean, [1.0, -2.0], atol=0.05)


def test_mean_field_stationary_point_below_order_zero():
    """At order -1 the point rho = 0.4 is stationary, but a minimum of the bound: SVI leaves it."""
    assert rho(-1.0) == pytest.approx(0.4)
    params = {"m": jnp.array([1.0, -2.0]), "s": jnp.array((0.4 * np.diag(LAM)) ** -0.5)}

    def gradient(key, factor):
        moved = {"m": params["m"], "s": factor * params["s"]}
        return jax.grad(lambda p: VRELBO(-1.0, 4000).loss(key, p, *correlated(1)))(moved)["s"]

    keys = random.split(random.key(0), 100)
    at, wider = jax.jit(jax.vmap(lambda key: [gradient(key, f) for f in (1.0, 1.15)]))(keys)
    assert np.all(np.abs(at.mean(0)) < 4 * at.std(0) / 10 + 2e-3)
    assert np.all(wider.mean(0) < -4 * wider.std(0) / 10)


def test_few_particles_order_the_mean_field_precision():
    """K = 5, at the optimum of VI: VR-max pulls wider than IWAE, the smallest weight narrower."""
    params = {"m": jnp.array([1.0, -2.0]), "s": jnp.diag(LAM) ** -0.5}
    model, guide = correlated(20_000)

    @jax.jit
    def pulls(key):
        def gradient(alpha):
            loss = VRELBO(alpha, 5)
            grad = jax.grad(lambda p: loss.loss(key, p, model, guide))(params)["s"]
            return -jnp.sum(grad) / 20_000

        return jnp.array([gradient(alpha) for alpha in (-INF, 0.0, 1.0, INF)])

    largest, iwae, vi, smallest = pulls(random.key(5))
    assert largest > iwae + 0.1 > vi + 0.2
    assert abs(vi) < 0.05
    assert smallest < -0.1


def test_gap_of_the_mean_field_optimum():
    num_particles = 200_000
    gaps = {0.5: 0.176785633, 1.0: 0.326963234, 2.0: 0.485507816}

    def model():
        numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), precision_matrix=LAM))

    def guide():
        scale = (numpyro.param("rho", 1.0) * jnp.diag(LAM)) ** -0.5
        numpyro.sample("z", dist.Normal(jnp.zeros(2), scale).to_event(1))

    def loss(x):
        alpha, rho = x
        return VRELBO(alpha, num_particles).loss(random.key(1), {"rho": rho}, model, guide)

    settings = jnp.array(list(gaps)), jnp.array([rho(alpha) for alpha in gaps])
    losses = jax.jit(lambda xs: jax.lax.map(loss, xs))(settings)
    # The sd of the weights is below 2.5 for these orders.
    np.testing.assert_allclose(losses, list(gaps.values()), atol=4 * 2.5 / num_particles**0.5)


BLR_X = np.array([[1, 0.8], [0.5, 0.9], [1.2, 1], [-0.8, -0.6], [0.7, 1.1], [-1, -1.1]])
BLR_Y = np.array([1.6, -0.3, 0.9, 0.2, 2, -1.4])


def blr_optimum(alpha, noise):
    """Exact log evidence, and the optimal mean-field guide and bound."""
    precision = np.eye(2) + BLR_X.T @ BLR_X / noise**2
    mean = np.linalg.solve(precision, BLR_X.T @ BLR_Y / noise**2)
    cov_y = noise**2 * np.eye(6) + BLR_X @ BLR_X.T
    log_z = -0.5 * (BLR_Y @ np.linalg.solve(cov_y, BLR_Y) + np.linalg.slogdet(2 * np.pi * cov_y)[1])
    r2 = precision[0, 1] ** 2 / (precision[0, 0] * precision[1, 1])
    root = math.sqrt(1 - 4 * alpha * (1 - alpha) * r2)
    ratio = ((2 * alpha - 1) + root) / (2 * alpha)
    if alpha == 1:
        gap = -math.log(1 - r2) / 2
    else:
        gap = (
            2 * alpha * math.log(ratio)
            + (1 - alpha) * math.log(1 - r2)
            - math.log((alpha * ratio + 1 - alpha) ** 2 - (1 - alpha) ** 2 * r2)
        ) / (2 * (alpha - 1))
    return log_z, mean, (ratio * np.diag(precision)) ** -0.5, log_z - gap


def test_bayesian_linear_regression():
    """At the optimal guide and noise the bound is the known one, and no gradient is left."""

    def model():
        noise = numpyro.param("noise", 1.0)
        w = numpyro.sample("w", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        with numpyro.plate("data", 6):
            numpyro.sample("y", dist.Normal(BLR_X @ w, noise), obs=BLR_Y)

    def guide():
        m, s = numpyro.param("m", jnp.zeros(2)), numpyro.param("s", jnp.ones(2))
        numpyro.sample("w", dist.Normal(m, s).to_event(1))

    @jax.jit
    @partial(jax.vmap, in_axes=(0, None, None))
    def estimate(key, alpha, params):
        return jax.value_and_grad(lambda p: VRELBO(alpha, 2000).loss(key, p, model, guide))(params)

    for alpha, bound, best_noise in ((0.5, -9.169012131, 0.901506), (1.0, -9.3897886074, 0.922757)):
        log_z, mean, _, exact = blr_optimum(alpha, 1.0)
        assert log_z == pytest.approx(-8.8852627745, abs=1e-9)
        np.testing.assert_allclose(mean, [0.4285703478, 0.5574417866], atol=1e-9)
        assert exact == pytest.approx(bound, abs=1e-8)
        for noise in (1.0, best_noise):
            _, mean, scale, exact = blr_optimum(alpha, noise)
            params = {"m": jnp.array(mean), "s": jnp.array(scale), "noise": jnp.array(noise)}
            losses, grads = estimate(random.split(random.key(2), 100), jnp.array(alpha), params)
            assert -losses.mean() == pytest.approx(exact, abs=float(4 * losses.std() / 10 + 1e-3))
            for name in ("m", "s") if noise == 1 else ("m", "s", "noise"):
                error = 4 * grads[name].std(0) / 10 + 3e-3
                assert np.all(np.abs(grads[name].mean(0)) < error), name


def test_agrees_with_upstream_where_it_is_right():
    # Upstream draws its minibatch from another key.
    rows = partial(handlers.substitute, data={"data": jnp.array([4, 1])})
    cases = [
        ((-1.0, 0.5), rows(local_model), rows(local_guide), LOCAL_PARAMS, 2),
        ((0.5,), mixed_model, mixed_guide, {"c": 0.4}, None),
    ]
    for alphas, model, guide, params, batch in cases:
        losses = [[bound(alpha, 10) for alpha in alphas] for bound in (RenyiELBO, VRELBO)]
        a, b = value_and_grad(losses, params, model, guide, X_LOCAL, batch)
        assert_same(b, a, 2e-5)


# What upstream refuses, or gets wrong without a word.


def elbos_of(rng_key, num_particles, params, model, guide, *args):
    keys = particle_keys(rng_key, num_particles)
    return -jax.jit(jax.vmap(lambda key: Trace_ELBO().loss(key, params, model, guide, *args)))(keys)


def test_upstream_refuses_order_one():
    elbos = elbos_of(random.key(0), 4, LOCAL_PARAMS, local_model, local_guide)
    losses = [VRELBO(alpha, 4) for alpha in (1, 1 + 1e-7, jnp.asarray(1.0))]
    for value, _ in value_and_grad(losses, LOCAL_PARAMS, local_model, local_guide):
        np.testing.assert_allclose(-value, elbos.mean(), rtol=1e-6)


def test_upstream_is_nan_at_infinite_orders():
    params = {"m": 0.2, "s": 0.8}
    elbos = elbos_of(random.key(0), 4, params, linear_gaussian, normal_guide, 1.0)
    losses = [VRELBO(-INF, 4), VRELBO(INF, 4)]
    got = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.0)
    for (value, grad), pick in zip(got, (elbos.max(), elbos.min()), strict=True):
        np.testing.assert_allclose(-value, pick, rtol=1e-5)
        assert np.isfinite(grad["m"]) and grad["m"] != 0


@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch")
def test_upstream_refuses_minibatches_under_global_latents():
    """The energy approximation: log prior + N/M log likelihood of the batch, inside the power."""
    params, key, alpha = {"b": 0.7, "m": 0.2, "s": 0.8}, random.key(7), 0.3
    plate_key, _ = random.split(key)
    batch = seed_plates(lambda: numpyro.plate("data", 6, 2), plate_key)
    x = X_LOCAL[numpyro.handlers.trace(batch).get_trace()["data"]["value"]]
    draws = [
        numpyro.handlers.seed(numpyro.handlers.trace(normal_guide), random.split(k)[1])
        for k in particle_keys(key, 3)
    ]
    lw = []
    for draw in draws:
        with numpyro.handlers.substitute(data=params):
            z = numpyro.handlers.trace(draw).get_trace()["z"]["value"]
        log_lik = dist.Normal(0.7 * z, 0.9).log_prob(x).sum()
        prior, q = dist.Normal(0.5, 1.5).log_prob(z), dist.Normal(0.2, 0.8).log_prob(z)
        lw.append(prior + 6 / 2 * log_lik - q)
    exact = jnp.log(jnp.mean(jnp.exp(0.7 * jnp.array(lw)))) / 0.7
    got, _ = value_and_grad(
        VRELBO(alpha, 3), params, global_model, normal_guide, X_LOCAL, 2, seed=7
    )
    np.testing.assert_allclose(-got, exact, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch")
def test_energy_approximation_is_biased_up_below_order_one():
    params = {"b": 0.7, "m": 0.7, "s": 0.5}
    keys = random.split(random.key(0), 4000)

    @partial(jax.vmap, in_axes=(None, 0))
    def bounds(alpha, key):
        loss = VRELBO(alpha, 5)
        return [
            -loss.loss(key, params, global_model, normal_guide, X_LOCAL, batch)
            for batch in (None, 2)
        ]

    alphas = jnp.array([0.0, 1.0, 2.0])
    full, mini = jax.jit(jax.vmap(bounds, (0, None)))(alphas, keys)
    error = np.sqrt((full.var(1) + mini.var(1)) / len(keys))
    difference = mini.mean(1) - full.mean(1)
    assert difference[0] > 4 * error[0]
    assert abs(difference[1]) < 4 * error[1]
    assert difference[2] < -4 * error[2]


def test_upstream_counts_log_q_of_guides_without_plates_n_times():
    """All latents are local in the model, but the guide has one joint site: one joint bound."""

    def model():
        with numpyro.plate("data", 8):
            z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
            numpyro.sample("x", dist.Normal(z.sum(-1), 1.0), obs=jnp.arange(8.0))

    def guide():  # as AutoContinuous writes it
        normal = dist.Normal(jnp.arange(16.0) / 8, 0.5).to_event(1)
        flat = numpyro.sample("flat", normal, infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Delta(flat.reshape(8, 2), event_dim=1))

    params = {}
    got = value_and_grad(VRELBO(0.5, 3), params, model, guide, seed=1)
    elbos = elbos_of(random.key(1), 3, params, model, guide)
    joint = 2 * (jax.scipy.special.logsumexp(elbos / 2) - jnp.log(3))
    np.testing.assert_allclose(-got[0], joint, rtol=1e-5)


def test_traced_order_equals_static_order():
    def loss(alpha):
        return VRELBO(alpha, 4).loss(random.key(0), LOCAL_PARAMS, local_model, local_guide)

    alphas = (-1.0, 0.0, 0.9999, 1.0, 1.5)
    static = jax.jit(lambda: jnp.array([loss(alpha) for alpha in alphas]))()
    traced = jax.jit(jax.vmap(loss))(jnp.array(alphas))
    np.testing.assert_allclose(traced, static, rtol=1e-6)


PROBIT_X = jnp.array([-2, -1, -0.5, 0.5, 1, 2, 3, -1.5])
PROBIT_Y = jnp.array([-1, -1, 1, 1, -1, 1, 1, -1])


def probit_model():
    z = numpyro.sample("z", dist.Normal(0.0, 2.0))
    with numpyro.plate("data", 8):
        numpyro.factor("y", jax.scipy.special.log_ndtr(PROBIT_Y * PROBIT_X * z))


PROBIT_OPTIMA = {
    1.0: (0.8274602, 0.1826261, -5.1171745238),
    0.5: (0.8309187, 0.1974295, -5.1023171002),
}


def test_probit_optimum():
    @jax.jit
    @partial(jax.vmap, in_axes=(0, None, None))
    def estimate(key, alpha, params):
        return jax.value_and_grad(
            lambda p: VRELBO(alpha, 4000).loss(key, p, probit_model, normal_guide)
        )(params)

    for alpha, (mean, variance, bound) in PROBIT_OPTIMA.items():
        params = {"m": jnp.array(mean), "s": jnp.array(variance**0.5)}
        losses, grads = estimate(random.split(random.key(2), 100), jnp.array(alpha), params)
        assert -losses.mean() == pytest.approx(bound, abs=float(4 * losses.std() / 10 + 1e-5))
        for name in params:
            assert abs(grads[name].mean()) < 4 * grads[name].std() / 10 + 1e-3


def test_bad_arguments():
    for alpha in (math.nan, np.float32("nan")):
        with pytest.raises(ValueError, match="alpha is nan"):
            VRELBO(alpha)
    for alpha in ("1", 1j, None, jnp.ones(2), jnp.asarray(1j), True):
        with pytest.raises(TypeError, match="real number"):
            VRELBO(alpha)
    for num_particles in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="num_particles"):
            VRELBO(0.5, num_particles)
    with pytest.raises(ValueError, match="'dreg', 'single', 'standard', 'stl'"):
        VRELBO(0.5, gradient="score")
    for alpha in (INF, -INF):
        with pytest.raises(ValueError, match="finite"):
            VRELBO(alpha, gradient="dreg")
    for loss in (VRELBO, IWELBO):
        with pytest.raises(ValueError, match="vectorize_particles"):
            loss(vectorize_particles="vmap")


def test_local_and_global_latents_with_a_minibatch():
    def loss(alpha):
        return VRELBO(alpha, 3).loss(
            random.key(0), {"c": 0.4}, mixed_model, mixed_guide, X_LOCAL, 2
        )

    with pytest.raises(ValueError, match=r"'z'.*NestedVRELBO or BBAlphaELBO"):
        jax.jit(lambda: loss(0.5))()
    with pytest.raises(ValueError, match=r"'z'.*NestedVRELBO or BBAlphaELBO"):
        jax.jit(loss)(1.0)
    assert np.isfinite(jax.jit(lambda: loss(1.0))())
