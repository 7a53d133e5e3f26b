"""What the pictures show is what was computed."""

from matplotlib import pyplot as plt
import numpy as np
import pytest

from numpyro_ext.diagnostics import (
    plot_calibration,
    plot_reliability,
    regression_calibration,
    reliability_bins,
)

Y = np.random.default_rng(0).normal(size=60)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_calibration_has_a_line_for_each_model():
    models = [regression_calibration(Y, loc=0.0, scale=s) for s in (1.0, 0.5)]
    before = len(plt.get_fignums())
    _, given = plt.subplots()
    for form, label in (
        (models[0], "error"),
        (models, "model 0,"),
        (dict(zip("ab", models, strict=True)), "a,"),
    ):
        ax = plot_calibration(form, ax=given if form is models else None)
        lines = [line for line in ax.get_lines() if line.get_marker() == "o"]
        assert len(lines) == (1 if form is models[0] else 2)
        np.testing.assert_array_equal(lines[0].get_ydata(), models[0].empirical)
        assert lines[0].get_label().startswith(label)
    assert ax is not given
    assert len(plt.get_fignums()) == before + 3


def test_reliability_has_a_bar_for_each_bin_with_rows():
    probs = np.random.default_rng(2).dirichlet(np.ones(3), 80)
    labels = probs.argmax(1)
    labels[:30] = 0
    ax = plot_reliability(probs, labels, 7)
    bins = reliability_bins(probs, labels, 7)
    some = bins.count > 0
    np.testing.assert_allclose([bar.get_height() for bar in ax.patches], bins.accuracy[some])
    np.testing.assert_allclose([bar.get_x() for bar in ax.patches], np.flatnonzero(some) / 7)
    assert [text.get_text() for text in ax.texts] == [str(n) for n in bins.count[some]]
    assert "80 rows" in ax.get_title()
