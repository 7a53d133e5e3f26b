#!/usr/bin/env bash
# A sixth of ten million rows is never drawn by `jax.random.choice` with weights, whatever the key.
#
# Guess: `jax.random.choice(key, n, shape, p=p)` draws row i with probability p[i], up to the rounding of
#   a sum in single precision, some percent at most. `jax.random.randint` and `choice` without `p` do, and
#   so does NumPy's `choice`.
# Behaviour: the row is looked up in the cumulative sum of `p` by one uniform number, which has 2^23 values
#   in single precision. A row has as many chances as multiples of 2^-23 fall into its piece: at ten
#   million rows of equal weight these are 0 or 1, and which rows have none is the same for every key. At a
#   million rows the probabilities are wrong by up to an eighth. A batch that is drawn by weights never
#   contains those rows, and weights of 1 / (n p) do not make it unbiased. Without `p` all rows come.
# Versions: jax and jaxlib 0.12.0.1 (jax/_src/random/core.py: `searchsorted(p_cuml, r)`), numpy 2.5.5.
# Seen (rows of equal weight, by counting all 2^23 numbers): 16.2 % of ten million
#   rows have no chance; of a million all have one, with errors of their probabilities of 6 %. In three
#   draws a row, NumPy, and JAX without `p`, miss exp(-3), 5.0 %.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

grid = np.arange(2**23, dtype=np.float32) / np.float32(2**23)
uniform = np.asarray(jax.random.uniform(jax.random.key(1), (1_000_000,)))
assert np.isin(uniform, grid).all()  # these are all the numbers that it draws

for n, never in ((1_000_000, 0.0), (10_000_000, 0.1)):
    p = jnp.full(n, 1 / n)
    total = jnp.cumsum(p)
    rows = np.asarray(jnp.searchsorted(total, total[-1] * (1 - jnp.asarray(grid))))
    chances = np.bincount(rows, minlength=n)
    error = chances * (n / 2**23) - 1
    print(f"{n:10,} rows: without a chance {(chances == 0).mean():.3f}, ", end="")
    print(f"error of a probability {np.sqrt((error**2).mean()):.2f}")
    assert (chances == 0).mean() >= never and np.sqrt((error**2).mean()) > 0.05
    # Three draws a row, with three keys, find none of them.
    seen = np.zeros(n, bool)
    for seed in range(3):
        seen[np.asarray(jax.random.choice(jax.random.key(seed), n, (n,), p=p))] = True
    print(f"{'':10} missed in 3 n draws: {(~seen).mean():.3f}")
    assert not (seen & (chances == 0)).any()
# NumPy misses exp(-3) of the rows in as many draws, and JAX without weights does so too.
n = 10_000_000
jax_seen, seen = np.zeros(n, bool), np.zeros(n, bool)
for seed in range(3):
    jax_seen[np.asarray(jax.random.choice(jax.random.key(seed), n, (n,)))] = True
    seen[np.random.default_rng(seed).choice(n, n, p=np.full(n, 1 / n))] = True
missed, without_p = (~seen).mean(), (~jax_seen).mean()
print(f"{'':10} by NumPy {missed:.3f}, by JAX without p {without_p:.3f}, exp(-3) {np.exp(-3):.3f}")
assert abs(missed - np.exp(-3)) < 0.002 and abs(without_p - np.exp(-3)) < 0.002
PY
