"""What is left when a process is killed or a disk is full."""

import errno
import gc
import os
from pathlib import Path
import pickle
import runpy
import signal
import subprocess
import sys
import time

from matplotlib import pyplot as plt
import numpy as np
import pytest

from tests.faults import HALF, RUNS
from tests.test_examples import TINY

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The states that a process saved before it was killed."""
    path = tmp_path_factory.mktemp("killed") / "states.pickle"
    process = subprocess.Popen([sys.executable, "-m", "tests.faults", str(path)], cwd=ROOT)
    try:
        end = time.monotonic() + 240
        while not path.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    return pickle.loads(path.read_bytes())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:EP has not converged")  # nor is it meant to in so few sweeps
@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_goes_on_as_if_it_had_not_been_killed(saved, name):
    whole, _ = RUNS[name](2 * HALF)
    rest, _ = RUNS[name](HALF, saved[name])
    assert len(whole) == 2 * HALF and len(rest) == HALF
    # Every step moves by much more than the tolerance, so that one too many or too few is seen.
    moves = np.diff(whole.reshape(2 * HALF, -1), axis=0)
    assert np.all(np.linalg.norm(moves, axis=1) > 1e-4 * np.linalg.norm(whole[0]))
    np.testing.assert_allclose(rest, whole[HALF:], rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is full, as Linux has")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_loses_the_picture_alone(tmp_path, monkeypatch, capsys):
    script, picture = ROOT / "examples" / "which_alpha.py", tmp_path / "picture.png"
    picture.symlink_to("/dev/full")
    monkeypatch.setattr(sys, "argv", [str(script), *TINY[script.stem], "--out", str(picture)])
    plt.switch_backend("Agg")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as error:
        runpy.run_path(str(script), run_name="__main__")
    plt.close("all")
    gc.collect()  # the file that could not be written is closed here, and not in another test
    assert error.value.errno == errno.ENOSPC
    assert len(capsys.readouterr().out.splitlines()) > 3
