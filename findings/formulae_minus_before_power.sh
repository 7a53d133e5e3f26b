#!/usr/bin/env bash
# formulae squares the minus: `-x ** 2` in a formula is (-x) ** 2.
#
# Guess: arithmetic inside of a call or of braces, `np.exp(-x ** 2 / 2)` or `{-x ** 2}`, is Python's, as in
#   patsy: a power binds closer than the minus before it, in Python as in R, so that these are a bump of
#   height 1 and a parabola that opens downwards. A chain of powers goes from the right.
# Behaviour: the parser of formulae, which Bambi uses, binds the minus first and takes powers from the
#   left. The bump is exp(+x^2 / 2), the parabola opens upwards, and `2 ** 3 ** 2` is 64. The column has
#   the name `np.exp(-x ** 2 / 2)`, predictions for new rows are computed in the same way, and nothing
#   is said. `-(x ** 2)` is right.
# Versions: formulae 0.9.0, patsy 1.0.3, pandas 3.1.1, numpy 2.5.5.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check formulae==0.9.0 patsy==1.0.3 pandas==3.1.1 numpy==2.5.5
"$folder/venv/bin/python" - <<'PY'
from formulae import design_matrices
import numpy as np
import pandas as pd
import patsy

x = np.arange(4.0)
frame = pd.DataFrame({"x": x, "y": x})
python = {
    "np.exp(-x ** 2 / 2)": np.exp(-(x**2) / 2),
    "I(-x ** 2)": -(x**2),
    "I(x * 2 ** 3 ** 2)": x * 512,
    "I(-(x ** 2))": -(x**2),
}
found = {
    "np.exp(-x ** 2 / 2)": np.exp(x**2 / 2),
    "I(-x ** 2)": x**2,
    "I(x * 2 ** 3 ** 2)": x * 64,
    "I(-(x ** 2))": None,
}
for term, right in python.items():
    common = design_matrices(f"y ~ 0 + {term}", frame).common
    column, again = np.asarray(common)[:, 0], np.asarray(common.evaluate_new_data(frame))[:, 0]
    by_patsy = np.asarray(patsy.dmatrix(f"0 + {term}", frame))[:, 0]
    print(f"{term:<22} Python {right}  patsy {by_patsy}  formulae {column}")
    np.testing.assert_allclose(by_patsy, right)
    np.testing.assert_allclose(column, again)
    np.testing.assert_allclose(column, right if found[term] is None else found[term])
PY
