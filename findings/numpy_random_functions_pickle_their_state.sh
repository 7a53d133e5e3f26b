#!/usr/bin/env bash
# Draws that `np.random.normal` makes in a pool of processes are all the same number.
#
# Guess: `np.random.normal` is a function of a module, pickled by its name, so that each worker draws from
#   its own stream (or all from a copy of the parent's, with `fork`, and then one number after the other).
# Behaviour: it is a bound method of the hidden global generator and pickles by value, 5,615 bytes with the
#   whole state of the parent. Each task has a new copy of it: `pool.map(np.random.normal, [0] * 1000)` is
#   1,000 times one number, with spawn as with fork, and in joblib with batches of one. Seeding a worker
#   has no effect, and the parent's stream does not move, so that the next call gives the same number
#   again. A method of `default_rng(0)` repeats in the same way. A function of one's own that calls
#   `np.random.normal` is pickled by name, and its draws differ.
# Versions: numpy 2.5.5, joblib 1.6.0, Python 3.12.
# Seen: a mean of 1,000 draws with a standard deviation of 0; by a function of one's own 1.0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpy==2.5.5 joblib==1.6.0
cat > "$folder/pool.py" <<'PY'
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
import pickle

from joblib import Parallel, delayed
import numpy as np


def own(loc):
    return np.random.normal(loc)


def sd(draws):
    draws = np.asarray(draws)
    return float(np.std(draws - draws[0]))


def main():
    print(f"{len(pickle.dumps(np.random.normal))} bytes, and {len(pickle.dumps(own))} of one's own")
    for method in ("spawn", "fork"):
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
            first = list(pool.map(np.random.normal, [0.0] * 1000, chunksize=1))
            again = list(pool.map(np.random.normal, [0.0] * 10, chunksize=1))
            mine = list(pool.map(own, [0.0] * 1000))
        print(f"{method}: sd {sd(first)}, by a function of one's own {sd(mine):.2f}")
        assert sd(first) == 0.0 and again[0] == first[0]
        assert 0.8 < sd(mine) < 1.2
    with_joblib = Parallel(n_jobs=2, batch_size=1)(delayed(np.random.normal)(0.0) for _ in range(100))
    assert sd(with_joblib) == 0.0
    rng = np.random.default_rng(0)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        of_generator = list(pool.map(rng.normal, [0.0] * 100, chunksize=1))
    assert sd(of_generator) == 0.0 and of_generator[0] == rng.normal(0.0)


if __name__ == "__main__":
    main()
PY
"$folder/venv/bin/python" "$folder/pool.py"
