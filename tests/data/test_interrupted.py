"""A pass over rows in a file that stops in the middle: what is said, and what is kept."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.potential import Program
from numpyro_ext.data import HostArray
from numpyro_ext.objectives import taylor_proxy

N = 2000
ROWS = np.random.default_rng(0).normal(2.0, 1.0, N)


def model(x):
    loc = numpyro.sample("loc", dist.Normal(0, 10))
    with numpyro.plate("rows", len(x), subsample_size=50) as i:
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[i])


def expand(x):
    return taylor_proxy(model, x, center={"loc": 2.0})


def test_a_file_that_is_cut_short_in_a_pass_stops_it_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(Program, "piece_size", 100)
    path = tmp_path / "x.npy"
    np.save(path, ROWS)
    read = []

    def cut(rows):
        read.append(len(rows))
        if sum(read) > N / 2:
            os.truncate(path, 4000)
        return rows

    with pytest.raises(Exception, match=r"rows \d+ to \d+ of the file .*x\.npy could not be read"):
        expand(HostArray(np.load(path, mmap_mode="r"), transform=cut))
    assert sum(read) < N
    np.save(path, ROWS)
    whole = expand(HostArray(np.load(path, mmap_mode="r")))
    np.testing.assert_allclose(whole.rows, expand(jax.numpy.asarray(ROWS)).rows, rtol=1e-5)


KILLED = """
import sys, time
import numpy as np
sys.path.insert(0, {folder!r})
from test_interrupted import HostArray, expand

def slow(rows):
    if len(rows) > 50:
        print("passing", flush=True)
        time.sleep(0.2)
    return rows

expand(HostArray(np.load(sys.argv[1], mmap_mode="r"), transform=slow))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_in_a_pass_ends_and_leaves_the_file(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, ROWS)
    code = KILLED.format(folder=os.path.dirname(__file__))
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "passing\n"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        process.wait(30)
    assert process.returncode == -signal.SIGTERM and time.monotonic() - began < 10
    np.testing.assert_array_equal(np.load(path), ROWS)
