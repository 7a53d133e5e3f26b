#!/usr/bin/env bash
# An executor of Dask calls a function with the same arguments once, also where it draws.
#
# Guess: `client.get_executor()` is a `concurrent.futures.Executor`, so that `submit` is a call: four of them
#   are four draws, four reads of a file that changes, four restarts.
# Behaviour: `submit` of equal functions and arguments is one task with one result while a future of it is
#   alive (Dask takes functions as pure): four restarts of a sampler agree to the last digit, R-hat finds
#   nothing, and the error of a mean over them is a half too small. `get_executor(pure=False)` makes each
#   a call. ThreadPoolExecutor and ProcessPoolExecutor never do this.
# Versions: distributed 2026.8.0, dask 2026.8.0, Python 3.12.
# Seen: four calls: one number four times; with pure=False four numbers.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check distributed==2026.8.0 dask==2026.8.0
cat > "$folder/draws.py" <<'PY'
from concurrent.futures import Executor, ThreadPoolExecutor
import random

from distributed import Client, LocalCluster


def chain(loc):
    """A mean of 100 draws from fresh entropy."""
    return loc + sum(random.SystemRandom().gauss(0, 1) for _ in range(100)) / 100


def four(pool):
    return [future.result() for future in [pool.submit(chain, 0.0) for _ in range(4)]]


def main():
    options = dict(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        with client.get_executor() as pool:
            assert isinstance(pool, Executor)
            once = four(pool)
        with client.get_executor(pure=False) as pool:
            each = four(pool)
    with ThreadPoolExecutor(2) as pool:
        threads = four(pool)
    print(f"Dask {once}\npure=False {each}\nthreads {threads}")
    assert len(set(once)) == 1
    assert len(set(each)) == 4 and len(set(threads)) == 4


if __name__ == "__main__":
    main()
PY
"$folder/venv/bin/python" "$folder/draws.py"
