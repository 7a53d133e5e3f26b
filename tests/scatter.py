"""Monte Carlo errors are tolerances elsewhere, so each of them has a law of its own: it is the
scatter of its estimate over keys."""

import numpy as np

KEYS = 200


def assert_errors_are_the_scatter(estimates, errors, *, within=0.25):
    """``(200, ...)`` estimates with their errors; a standard deviation of 200 is off by 5 %, so a
    quarter is five times that."""
    assert len(estimates) == len(errors) == KEYS
    scatter = np.std(np.asarray(estimates, float), axis=0, ddof=1)
    claimed = np.sqrt(np.mean(np.asarray(errors, float) ** 2, axis=0))
    np.testing.assert_allclose(claimed / scatter, 1.0, atol=within)
