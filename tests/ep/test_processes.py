"""A fit does not depend on how many processes have the rows."""

import numpy as np
import pytest

from tests.ep.spread import fit, rows
from tests.mcmc.test_devices import finish, free_address, start


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the result of 12 steps is noisy")
def test_two_processes_with_rows_of_their_own(tmp_path):
    """As arrays and as rows on the host, up to the order of summation."""
    address = free_address()
    paths = [tmp_path / f"fit{rank}.npz" for rank in range(2)]
    processes = [
        start(1, path, address, rank, module="tests.ep.spread") for rank, path in enumerate(paths)
    ]
    try:
        expected = fit(*rows())
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    for path in paths:
        with np.load(path) as found:
            assert len(found) == 2 * len(expected)
            for run in ("host", "arrays"):
                for name, value in expected.items():
                    np.testing.assert_allclose(found[f"{run}/{name}"], value, rtol=1e-4, atol=1e-5)
