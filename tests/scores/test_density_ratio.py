"""Density ratios equal their reference values, their optimality conditions and known ratios."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import (
    IMQ,
    RBF,
    Epanechnikov,
    KernelRatio,
    LogisticRatio,
    logistic_loss,
    whiten,
)

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])
LOC, SCALE = 0.6, 0.8


def log_ratio_of_normals(z):
    """N(0.6, 0.8^2) over N(0, 1), the product over coordinates."""
    return jnp.sum(-jnp.log(SCALE) - (z - LOC) ** 2 / (2 * SCALE**2) + z**2 / 2, axis=-1)


@pytest.mark.x64
def test_kernel_ratio_matches_reference_values(tol):
    ratio = KernelRatio(0.1, RBF(1.5)).fit(jnp.array(X), jnp.array(Y))
    expected = [0.6530659329, 0.5619389614, 1.3308612436]
    np.testing.assert_allclose(ratio(jnp.array(X[:3])), expected, rtol=tol(1e-4, 1e-9))


@pytest.mark.x64
@pytest.mark.parametrize(
    ("kernel", "lam"), [(IMQ(0.7), 0.05), (Epanechnikov(1.9), 1.3)], ids=["IMQ", "Epan."]
)
def test_kernel_ratio_is_the_minimiser_of_its_objective(kernel, lam, needs_x64):
    """Its derivative in function space: mean_d r k(d, z) - mean_n k(n, z) + lam r(z) = 0."""
    num, den, z = jnp.array(X) + 1.0, jnp.array(Y) - 0.5, jnp.array(X[:3]) * 2.0
    ratio = KernelRatio(lam, kernel).fit(num, den)
    for point in z:
        loss = lam * ratio(point[None])[0]
        for d in den:
            loss += ratio(d[None])[0] * kernel(d[None], point[None])[0, 0] / len(den)
        for n in num:
            loss -= kernel(n[None], point[None])[0, 0] / len(num)
        assert abs(loss) < 1e-12


def test_log_of_a_kernel_ratio_has_a_floor_without_a_gradient():
    ratio = KernelRatio(0.1, RBF(0.5)).fit(jnp.array(X), jnp.array(Y))
    far, near = jnp.array([[50.0, 0.0]]), jnp.array(X[:1])
    np.testing.assert_allclose(ratio.log_ratio(far), np.log(1e-6), rtol=1e-6)
    slope = jax.grad(lambda z: ratio.log_ratio(z)[0])
    assert jnp.all(slope(far) == 0.0)
    expected = jax.grad(lambda z: jnp.log(ratio(z)[0]))(near)
    np.testing.assert_allclose(slope(near), expected, rtol=1e-5)
    assert jnp.abs(expected).max() > 0.1


@pytest.mark.slow
def test_ratios_of_two_normals():
    """Within 0.4 (kernel, 2000 samples) and 0.25 (polynomial, 4000) where both have mass: at 24
    keys the largest errors are 0.26 and 0.14."""
    e, offset = random.normal(random.key(1), (2, 4000, 1)), 1e4
    num, den = offset + LOC + SCALE * e[0], offset + e[1]
    z = jnp.linspace(-0.8, 1.8, 14)[:, None]
    expected = log_ratio_of_normals(z)
    ours = LogisticRatio().fit(num, den).log_ratio(offset + z)
    np.testing.assert_allclose(ours, expected, atol=0.25)
    ours = KernelRatio(1e-3).fit(num[:2000], den[:2000]).log_ratio(offset + z)
    np.testing.assert_allclose(ours, expected, atol=0.4)


@pytest.mark.x64
@pytest.mark.parametrize("degree", [1, 2])
def test_logistic_ratio_is_the_minimiser_of_the_penalised_loss(degree, needs_x64):
    num, den = jnp.array(X) * 3.0, jnp.array(X[::-1]) - 1.0
    fitted = LogisticRatio(degree, l2=0.03).fit(num, den)

    def objective(w):
        object.__setattr__(fitted, "coefficients", w)
        loss = logistic_loss(fitted.log_ratio(num), fitted.log_ratio(den))
        return loss + 0.5 * 0.03 * jnp.sum(w[1:] ** 2)

    w = fitted.coefficients
    assert w.shape == ((3,) if degree == 1 else (6,))
    assert jnp.abs(w).max() > 0.3
    assert jnp.abs(jax.grad(objective)(w)).max() < 1e-9


def test_logistic_ratio_does_not_depend_on_units_and_origin():
    num, den, z = jnp.array(X), jnp.array(X[:3]) + 0.4, jnp.array(Y)
    estimator = LogisticRatio(l2=0.1)
    expected = estimator.fit(num, den).log_ratio(z)
    unit, origin = jnp.array([100.0, 0.01]), jnp.array([-7.0, 3.0])
    move = lambda x: origin + unit * x  # noqa: E731
    ours = estimator.fit(move(num), move(den)).log_ratio(move(z))
    np.testing.assert_allclose(ours, expected, atol=2e-2)
    assert jnp.abs(expected).max() > 0.3


def test_samples_that_can_be_told_apart_have_a_finite_log_ratio():
    x = jnp.array(X)
    ours = LogisticRatio().fit(x + 100.0, x).log_ratio(jnp.concatenate([x + 100.0, x]))
    assert jnp.all(jnp.isfinite(ours))
    assert ours[:5].min() > 2.0
    assert ours[5:].max() < -2.0


def test_whitening_gives_unit_moments_and_lets_a_gradient_through_the_samples_only():
    x = 1e4 + random.normal(random.key(3), (500, 3)) * jnp.array([0.5, 1.0, 300.0])
    x = x.at[:, 1].set(7.0)
    u, loc, scale = whiten(x)
    np.testing.assert_allclose(u.mean(0), jnp.zeros(3), atol=2e-3)  # loc is rounded to 1e-3
    np.testing.assert_allclose(u.std(0), [1.0, 0.0, 1.0], rtol=1e-4)
    np.testing.assert_allclose([loc[1], scale[1]], [7.0, 1e-6], rtol=1e-6)
    slope = jax.grad(lambda x: jnp.sum(jnp.sin(whiten(x)[0])))(x)
    np.testing.assert_allclose(slope[:, 0], jnp.cos(u[:, 0]) / scale[0], rtol=1e-4)


@pytest.mark.parametrize("estimator", [KernelRatio(0.1), LogisticRatio()], ids=repr)
def test_crosses_jit_vmap_and_pickle(estimator):
    num, den, z = jnp.array(X), jnp.array(X[:3]) + 0.4, jnp.array(Y)
    fitted = estimator.fit(num, den)
    expected = fitted.log_ratio(z)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4)  # noqa: E731
    close(pickle.loads(pickle.dumps(fitted)).log_ratio(z), expected)
    several = jax.jit(jax.vmap(estimator.fit))(jnp.stack([num, 2 * num]), jnp.stack([den, den]))
    close(jax.jit(jax.vmap(lambda one: one.log_ratio(z)))(several)[0], expected)
    spoilt = num.at[0, 0].set(jnp.nan)
    bad = jax.jit(pickle.loads(pickle.dumps(estimator)).fit)(spoilt, den)
    assert jnp.isnan(jax.jit(lambda one, z: one(z))(bad, z)).all()
    with pytest.raises(ValueError, match=rf"x_num has 1 of {len(X)} rows that are not finite"):
        estimator.fit(spoilt, den)


def test_bad_input_is_one_clear_sentence():
    with pytest.raises(ValueError, match=r"lam is 0.0"):
        KernelRatio(0.0)
    with pytest.raises(ValueError, match="x_den of dimension 1"):
        KernelRatio().fit(jnp.array(X), jnp.array(X[:, :1]))
    with pytest.raises(ValueError, match="degree is 3; it must be 1 or 2"):
        LogisticRatio(3)
