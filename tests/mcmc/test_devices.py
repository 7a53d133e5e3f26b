"""Draws and fits do not depend on how many devices and processes hold the data and the chains."""

from functools import cache
import os
from pathlib import Path
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.mcmc.models import linear_data
from tests.mcmc.spread import chain_keys, draws, fit

ROOT = Path(__file__).parents[2]


@cache
def expected():
    """Both chains, and the fit, on one device; computed while the other processes are at work."""
    return draws(chain_keys(), linear_data()), fit(linear_data())


def start(devices, *arguments, module="tests.mcmc.spread"):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def finish(process):
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output


def same(path):
    """Every run saved has the values expected, up to the order of summation; their names."""
    chains, fitted = expected()
    assert np.all(np.diff(fitted["losses"]) != 0)
    assert all(x.shape[:2] == (2, 10) and np.std(x) > 0 for x in chains.values())
    with np.load(path) as found:
        runs = {name.split("/")[0] for name in found}
        for run in runs:
            for site, x in (fitted if run == "fit" else chains).items():
                np.testing.assert_allclose(found[f"{run}/{site}"], x, rtol=1e-3, atol=1e-4)
    return runs


@pytest.mark.nightly
def test_two_processes_with_half_of_the_data_each(tmp_path):
    address = free_address()
    paths = [tmp_path / f"draws{rank}.npz" for rank in range(2)]
    processes = [start(1, path, address, rank) for rank, path in enumerate(paths)]
    expected()
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    for path in paths:
        assert same(path) == {"arrays", "rows on the host", "fit"}


@pytest.mark.slow
def test_eight_devices_that_read_an_eighth_of_the_rows_each(tmp_path):
    process = start(8, tmp_path / "draws.npz", 8)
    expected()
    finish(process)
    assert same(tmp_path / "draws.npz") == {"rows on the host", "fit"}
