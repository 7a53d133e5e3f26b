"""What every score estimator promises, one line each: a new one joins by a line in the table."""

from collections.abc import Callable
import pickle
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import (
    IMQ,
    RBF,
    Cauchy,
    Epanechnikov,
    KDEScore,
    ScoreMatchingScore,
    SpectralScore,
    SteinScore,
)

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])

# a -> the estimator whose arguments in units of length are a times as large.
ESTIMATORS: dict[str, Callable[[float], Any]] = {
    "stein v": lambda a: SteinScore(0.1, RBF(1.5 * a)),
    "stein v, rule": lambda a: SteinScore(0.1, IMQ("median", factor=1.5)),
    "stein u, parametric": lambda a: SteinScore(
        30 * a**2, RBF(1.5 * a), statistic="u", form="parametric"
    ),
    "stein parametric": lambda a: SteinScore(a**2, RBF(1.5 * a), form="parametric"),
    "stein parametric, Cauchy": lambda a: SteinScore(a**2, Cauchy(1.5 * a), form="parametric"),
    "stein, Epanechnikov": lambda a: SteinScore(30.0, Epanechnikov(2.0 * a)),
    "kde": lambda a: KDEScore(RBF(1.5 * a)),
    "kde, rule": lambda a: KDEScore(IMQ("median", beta=-0.7)),
    "score matching": lambda a: ScoreMatchingScore(3.0 * a**2, RBF(1.5 * a)),
    "score matching, Cauchy": lambda a: ScoreMatchingScore(3.0 * a**2, Cauchy("median_distance")),
    "score matching, Epanechnikov": lambda a: ScoreMatchingScore(a**2, Epanechnikov(2.0 * a)),
    "spectral": lambda a: SpectralScore(3, RBF(1.5 * a)),
    "spectral, rule": lambda a: SpectralScore(4, IMQ("median_distance")),
}
every_estimator = pytest.mark.parametrize("name", ESTIMATORS)
# What comes from the base of estimators and fitted estimates, and not from their formulas.
FORMS = ["stein v", "stein parametric", "kde, rule", "spectral"]
one_of_each_form = pytest.mark.parametrize("name", FORMS)


@every_estimator
def test_moves_turns_and_scales_with_the_samples(name):
    """At the samples, in any order of them, and at other points."""
    x, y, make = jnp.array(X), jnp.array(Y), ESTIMATORS[name]
    own, predicted = make(1.0)(x), make(1.0).fit(x)(y)
    assert jnp.abs(own).max() > 0.1 and jnp.abs(predicted).max() > 0.03
    turn, shift = jnp.array([[0.6, 0.8], [-0.8, 0.6]]), jnp.array([5.0, -3.0])
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4)  # noqa: E731
    close(make(1.0)(x + shift), own)
    close(make(1.0)(x @ turn), own @ turn)
    close(4.0 * make(4.0)(4.0 * x), own)
    close(make(1.0)(x[::-1]), own[::-1])
    close(make(1.0).fit(x + shift)(y + shift), predicted)
    close(make(1.0).fit(x @ turn)(y @ turn), predicted @ turn)
    close(4.0 * make(4.0).fit(4.0 * x)(4.0 * y), predicted)


@pytest.mark.x64
@every_estimator
def test_float32_far_from_the_origin_agrees_with_centred_float64(name, needs_x64):
    """To 2 %: at 1e4 the samples themselves are rounded to 1e-3. The answer has their dtype."""
    e = jax.random.normal(jax.random.key(3), (100, 2), dtype=jnp.float64)
    x, y = e @ jnp.array([[1.2, 0.5], [0.0, 0.8]]), jnp.array(Y)
    estimator = ESTIMATORS[name](1.0)

    def agree(ours, expected):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, expected, atol=0.02 * jnp.abs(expected).max())

    far = jnp.asarray(x + 1e4, jnp.float32)
    agree(estimator(far), estimator(x))
    fitted = estimator.fit(far)
    agree(fitted(y + 1e4), estimator.fit(x)(y))
    # A carry of lax.scan may hold the fitted estimate: no leaf is a Python number.
    floats = {leaf.dtype for leaf in jax.tree.leaves(fitted)} - {jnp.dtype("int32")}
    assert floats == {jnp.dtype("float32")}


@one_of_each_form
def test_crosses_jit_vmap_scan_and_pickle_without_new_traces(name):
    x, estimator = jnp.array(X), ESTIMATORS[name](1.0)
    several = jnp.stack([x, 2.0 * x[::-1], x + 1.0])
    expected = jnp.stack([estimator(one) for one in several])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)  # noqa: E731
    traces = []

    @jax.jit
    def at_samples(estimator, x):
        traces.append(None)
        return estimator(x)

    close(jnp.stack([at_samples(estimator, one) for one in several]), expected)
    close(at_samples(pickle.loads(pickle.dumps(estimator)), x), expected[0])
    assert len(traces) == 1
    for batch in jax.jit(lambda xs: (jax.vmap(estimator)(xs), lax.map(estimator, xs)))(several):
        close(batch, expected)


@one_of_each_form
def test_fitted_estimate_is_a_pytree_that_pickles(name):
    x, y, estimator = jnp.array(X), jnp.array(Y), ESTIMATORS[name](1.0)
    expected = estimator.fit(x)(y)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)  # noqa: E731
    several = jax.jit(jax.vmap(estimator.fit))(jnp.stack([2.0 * x, x]))
    close(jax.jit(jax.vmap(lambda fitted: fitted(y)))(several)[1], expected)
    close(pickle.loads(pickle.dumps(estimator.fit(x)))(y), expected)


@pytest.mark.x64
@every_estimator
def test_gradient_flows_through_the_samples_but_not_through_a_rule(name, needs_x64):
    x, direction = jnp.array(X), jnp.cos(jnp.arange(10.0)).reshape(5, 2)
    estimator = ESTIMATORS[name](1.0)
    fixed = jax.tree.map(lambda leaf: leaf, estimator)
    object.__setattr__(fixed, "kernel", estimator.kernel.resolve(x))
    loss = jax.jit(lambda e, t: jnp.sum(jnp.sin(e(x + t * direction))))
    ours = jax.jit(jax.grad(loss, argnums=1))(estimator, 0.0)
    by_differences = (loss(fixed, 1e-5) - loss(fixed, -1e-5)) / 2e-5
    assert abs(ours) > 1e-3
    np.testing.assert_allclose(ours, by_differences, rtol=1e-5)


@pytest.mark.parametrize("name", ["stein v", "stein parametric", "kde, rule", "score matching"])
def test_one_sample_gives_zeros(name):
    np.testing.assert_array_equal(
        ESTIMATORS[name](1.0)(jnp.array([[3.0, -2.0]])), jnp.zeros((1, 2))
    )


@one_of_each_form
def test_non_finite_samples_are_an_error_and_give_nan_where_they_are_traced(name):
    estimator = ESTIMATORS[name](1.0)
    traced = jax.jit(lambda x: estimator(x))
    for bad in (jnp.nan, jnp.inf):
        x = jnp.array(X).at[1, 0].set(bad)
        assert jnp.isnan(traced(x)).any(axis=1).all()
        with pytest.raises(ValueError, match=rf"x has 1 of {len(X)} rows that are not finite"):
            estimator(x)


def test_bad_samples_are_one_clear_sentence():
    with pytest.raises(ValueError, match=r"pass x\[:, None\]"):
        SteinScore()(jnp.ones(3))
    with pytest.raises(ValueError, match="x has points of dimension 2 and y of dimension 1"):
        SteinScore().fit(X)(jnp.ones((3, 1)))
