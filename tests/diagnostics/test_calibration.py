"""Calibration of regression against closed forms, and of predictions that are right."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from numpyro_ext.diagnostics import regression_calibration

Z = ndtri((np.arange(20_000) + 0.5) / 20_000)
Y = np.array([1.0, 3.0, -2.0])


@pytest.mark.parametrize(
    ("c", "coverage", "central", "cdf"),
    [
        (0.5, [0.264068, 0.589166, 0.672905], 0.0549658, 0.0125357),
        (2.0, [0.822656, 0.998997, 0.999911], 0.0576181, 0.0144053),
    ],
)
def test_a_width_that_is_wrong_by_a_factor(c, coverage, central, cdf):
    """Truth N(m, s^2), predicted N(m, (c s)^2): u = Phi(z / c)."""
    y = 3.0 + 0.7 * Z
    found = regression_calibration(y, loc=3.0, scale=0.7 * c, levels=[0.5, 0.9, 0.95])
    np.testing.assert_allclose(found.empirical, coverage, atol=2e-4)
    assert found.sharpness == pytest.approx((0.7 * c) ** 2)
    for kind, error in (("central", central), ("cdf", cdf)):
        assert regression_calibration(pit=ndtr(Z / c), kind=kind).error == pytest.approx(
            error, abs=2e-5
        )


def test_each_source_gives_the_same_transform():
    """Ten thousand draws at equal steps of the cdf are the normal itself, up to 1e-4."""
    y = np.array([0.3, 1.9, -1.0, 0.8])
    loc, scale = np.array([0.0, 2.0, -0.5, 0.1]), np.array([1.0, 0.5, 2.0, 0.3])
    samples = loc + scale * Z[::2, None]
    u = ndtr((y - loc) / scale)
    levels = np.array([0.05, 0.33, 0.5, 0.71, 0.95])
    for kind in ("central", "cdf"):
        forms = [{"pit": u}, {"loc": loc, "scale": scale}, {"samples": samples}]
        found = [regression_calibration(y, **one, levels=levels, kind=kind) for one in forms]
        for one in found[1:]:
            np.testing.assert_array_equal(one.empirical, found[0].empirical)
    assert np.isnan(found[0].sharpness)
    assert found[2].sharpness == pytest.approx(np.mean(scale**2), rel=1e-3)


def test_draws_that_equal_the_observation_count_half():
    samples = np.array([[0.0], [1.0], [1.0], [2.0]])
    found = regression_calibration(np.array([1.0]), samples=samples, levels=[0.01])
    assert found.empirical == 1  # u is exactly one half


def test_error_of_a_perfect_model_is_that_of_the_noise_of_its_observations():
    """400 data sets of 50 rows; the standard error of the mean is measured."""
    u = np.random.default_rng(0).uniform(size=(400, 50))
    for kind in ("central", "cdf"):
        all_found = [regression_calibration(pit=one, kind=kind) for one in u]
        errors = np.array([one.error for one in all_found])
        assert abs(errors.mean() - 0.183333 / 50) < 4 * errors.std() / 20
        assert all_found[0].perfect_error == pytest.approx(0.1833333 / 50, rel=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({}, "give exactly one of samples=, pit=, or loc= with scale="),
        ({"pit": [0.5], "samples": [[1.0]]}, "give exactly one of"),
        ({"loc": 1.0}, "give exactly one of"),
        ({"loc": 1.0, "scale": 0.0}, "scale finite and positive"),
        ({"loc": np.inf, "scale": 1.0}, "loc must be finite"),
        ({"loc": 1.0, "scale": np.inf}, "scale finite and positive"),
        ({"loc": 1.0, "scale": 1.0, "model_args": (1,)}, "model_args belongs to a fit, and y is"),
        ({"pit": []}, "probabilities in .*, at least one, and no NaN"),
        ({"samples": np.zeros((5, 2))}, r"samples has shape \(5, 2\) and y \(3,\)"),
        ({"samples": np.full((5, 3), np.nan)}, "no NaN"),
        ({"pit": [0.5, 1.2]}, r"probabilities in \[0, 1\]"),
        ({"pit": [0.5], "levels": [0.5, 1.0]}, "levels is .* between 0 and 1"),
    ],
)
def test_bad_input(kwargs, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        regression_calibration(Y, **kwargs)


def test_an_observation_that_is_not_finite_is_named():
    y = np.array([1.0, np.inf, -np.inf])
    for source in ({"loc": 0.0, "scale": 1.0}, {"samples": np.zeros((4, 3))}):
        with pytest.raises(ValueError, match=r"y has 2 numbers among 3 .* the first at place 1"):
            regression_calibration(y, **source)
