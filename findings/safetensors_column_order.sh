#!/usr/bin/env bash
# Eigenvectors and triangular solves of SciPy come back from safetensors as other matrices.
#
# Guess: `safetensors.numpy.save` writes an array as its shape and its entries, in whatever order they lie
#   in memory, or refuses one that is not in row order, as NumPy, HDF5 and Zarr do.
# Behaviour: it writes the bytes as they lie and the shape beside them. LAPACK returns some results in
#   column order (`eigh`, `solve_triangular`, `cho_solve`, any transpose; not `cholesky`), so that a
#   whitening is read back transposed, and an array that is not square scrambled. No error, no warning.
# Versions: safetensors 0.8.0, scipy 1.18.1, numpy 2.5.5. numpy.savez of the same array is right.
# Seen: the whitening [[.5, 0], [-.1667, .3333]] comes back as [[.5, -.1667], [0, .3333]].
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check safetensors==0.8.0 numpy==2.5.5 scipy==1.18.1
"$folder/venv/bin/python" - <<'PY'
import io

import numpy as np
from safetensors.numpy import load, save
from scipy.linalg import cholesky, eigh, solve_triangular

covariance = np.array([[4.0, 2.0], [2.0, 10.0]])
whitening = solve_triangular(cholesky(covariance, lower=True), np.eye(2), lower=True)
again = load(save({"whitening": whitening}))["whitening"]
print(f"saved\n{whitening}\nread\n{again}")
file = io.BytesIO()
np.savez(file, whitening=whitening)
file.seek(0)
assert (np.load(file)["whitening"] == whitening).all()
assert (load(save({"x": np.ascontiguousarray(whitening)}))["x"] == whitening).all()
assert (again == whitening.T).all() and not (again == whitening).all()
vectors = eigh(np.diag([1.0, 2.0, 3.0]) + 0.5)[1]
assert not (load(save({"x": vectors}))["x"] == vectors).all()
PY
