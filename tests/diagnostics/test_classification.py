"""Scores of classes against hand calculations, and of probabilities that are right."""

import numpy as np
import pytest

from numpyro_ext.diagnostics import (
    brier_score,
    expected_calibration_error,
    predictive_uncertainty,
    reliability_bins,
)
from numpyro_ext.diagnostics.classification import perfect_calibration_error

PROBS = np.array([[0.9, 0.1], [0.8, 0.2], [0.35, 0.65], [0.6, 0.4]])
LABELS = np.array([0, 1, 1, 0])


def test_reference_values():
    assert expected_calibration_error(PROBS, LABELS, 10) == pytest.approx(0.4125, abs=1e-12)
    assert expected_calibration_error(PROBS, LABELS, 5) == pytest.approx(0.2375, abs=1e-12)
    assert brier_score(PROBS, LABELS) == pytest.approx(0.46625, abs=1e-12)
    found = predictive_uncertainty([[[0.9, 0.1]], [[0.5, 0.5]]])
    np.testing.assert_allclose(found, np.c_[[0.6108643, 0.5091151, 0.1017492]], atol=1e-7)


def test_bins_are_open_below_and_closed_above():
    """0.8 and 0.6 lie on edges of five bins; in single precision 0.8 is above its edge."""
    bins = reliability_bins(PROBS, LABELS, 5)
    assert bins.count.tolist() == [0, 0, 1, 2, 1]
    np.testing.assert_allclose(bins.confidence[2:], [0.6, 0.725, 0.9])
    np.testing.assert_allclose(bins.accuracy[2:], [1, 0.5, 1])
    assert np.isnan(bins.accuracy[:2]).all()
    assert reliability_bins(PROBS.astype(np.float32), LABELS, 5).count.tolist() == [0, 0, 0, 2, 2]


def test_scores_take_the_mean_of_draws():
    draws = np.stack([PROBS, PROBS[:, ::-1], PROBS])
    mean = draws.mean(0)
    for score in (brier_score, expected_calibration_error):
        assert score(draws, LABELS) == score(mean, LABELS)
    np.testing.assert_array_equal(
        reliability_bins(draws, LABELS).count, reliability_bins(mean, LABELS).count
    )


def test_two_classes_have_twice_the_score_of_one_column():
    one_column = np.mean((PROBS[:, 1] - LABELS) ** 2)
    assert brier_score(PROBS, LABELS) == pytest.approx(2 * one_column, rel=1e-12)
    assert brier_score(np.eye(3), [0, 1, 2]) == 0
    assert brier_score(np.eye(3), [1, 2, 0]) == 2


@pytest.mark.parametrize(("N", "expected"), [(200, 0.074), (1000, 0.034), (10_000, 0.011)])
def test_error_of_a_perfect_model_is_not_zero(N, expected):
    """Labels from the probabilities, uniform on the simplex of three classes.

    The scatter of one data set is a fifth of the mean at N = 200 and at 10,000.
    """
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), N)
    labels = (rng.uniform(size=(N, 1)) > probs.cumsum(1)).sum(1)
    perfect = perfect_calibration_error(probs)
    assert perfect == pytest.approx(expected, rel=0.06)
    assert 0.4 * perfect < expected_calibration_error(probs, labels) < 1.8 * perfect
    wrong = probs**3 / np.sum(probs**3, 1, keepdims=True)  # too confident
    assert expected_calibration_error(wrong, labels) > 1.5 * perfect_calibration_error(wrong)


def test_uncertainty_is_split_into_parts_that_are_not_negative():
    """Draws that agree have no epistemic part; draws that are sure and differ nothing else."""
    rng = np.random.default_rng(2)
    probs = rng.dirichlet(np.ones(4), (30, 5, 2))
    found = predictive_uncertainty(probs)
    assert found.total.shape == (5, 2)
    np.testing.assert_allclose(found.total, found.aleatoric + found.epistemic, rtol=1e-12)
    assert (found.epistemic > 0).all()
    assert (found.total <= np.log(4)).all()
    same = predictive_uncertainty(np.repeat(probs[:1], 7, 0))
    np.testing.assert_allclose(same.epistemic, 0, atol=1e-12)
    sure = predictive_uncertainty(np.eye(3)[:, None])
    np.testing.assert_allclose(sure.total, np.log(3))
    np.testing.assert_array_equal(sure.aleatoric, 0)
    assert (predictive_uncertainty(np.full((9, 1, 2), 0.5, np.float32)).epistemic >= 0).all()


def test_arguments_of_a_fit_are_refused_beside_an_array():
    for score in (brier_score, expected_calibration_error, reliability_bins):
        with pytest.raises(TypeError, match="model_args belongs to a fit, and probs is an array"):
            score(PROBS, LABELS, model_args=(1,))
    with pytest.raises(TypeError, match="result belongs to a fit, and probs is an array"):
        predictive_uncertainty(PROBS[None], LABELS)


@pytest.mark.parametrize(
    ("probs", "labels", "sentence"),
    [
        (PROBS[:, 0], LABELS, r"probs has shape \(4,\).*np.stack\(\[1 - p, p\], -1\)"),
        (PROBS * 2, LABELS, "from 0.2 to 1.8; .*jax.nn.softmax"),
        (PROBS * np.nan, LABELS, "each row must be probabilities"),
        (PROBS, LABELS[:3], r"labels has shape \(3,\); it must be \(4,\)"),
        (PROBS, LABELS + 1, "labels has the value 2; it must hold integers from 0 to 1"),
    ],
)
def test_bad_input(probs, labels, sentence):
    for score in (brier_score, expected_calibration_error, reliability_bins):
        with pytest.raises(ValueError, match=sentence):
            score(probs, labels)
