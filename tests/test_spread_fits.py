"""Fits do not depend on how many devices hold the rows of the data."""

import numpy as np
import pytest

from tests.mcmc.test_devices import finish, start
from tests.spread_fits import fits, rows


@pytest.mark.nightly
def test_fits_to_rows_on_eight_devices_are_those_of_one(tmp_path):
    path = tmp_path / "fits.npz"
    process = start(8, path, module="tests.spread_fits")
    expected = fits(rows())
    finish(process)
    with np.load(path) as found:
        assert set(found) == set(expected)
        for name, x in expected.items():
            assert np.all(np.isfinite(x)), name
            # The order of summation differs.
            np.testing.assert_allclose(found[name], x, rtol=2e-3, atol=5e-4, err_msg=name)
