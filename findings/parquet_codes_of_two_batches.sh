#!/usr/bin/env bash
# The dictionary codes of two batches of one Parquet file mean different levels.
#
# Guess: a column that is read as a dictionary (`read_dictionary=["brand"]`) has one dictionary for the file,
#   so that code 0 is the same brand in each batch of a loader.
# Behaviour: each row group has a dictionary of its own, in the order in which its rows came. Code 0 is
#   "b" in the first batch and "a" in the second. A loader that hands the indices to a model
#   fits effects of levels that change their meaning at every row group; nothing is out of range.
#   `read_table` of the same file does unify.
# Versions: pyarrow 26.0.1.
# Seen: [0, 1, 0, 2] of ['b', 'a', 'c'], then [0, 0, 1, 2] of ['a', 'c', 'b'].
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pyarrow==26.0.1
cd "$folder"
venv/bin/python - <<'PY'
import pyarrow as pa
import pyarrow.parquet as pq

brands = ["b", "a", "b", "c", "a", "a", "c", "b"]
pq.write_table(pa.table({"brand": brands}), "rows.parquet", row_group_size=4)
file = pq.ParquetFile("rows.parquet", read_dictionary=["brand"])
levels, codes = [], []
for batch in file.iter_batches(batch_size=4):
    column = batch.column("brand")
    levels.append(column.dictionary.to_pylist())
    codes.append(column.indices.to_pylist())
    print(codes[-1], "of", levels[-1])
assert sum(codes, []) != [sorted(set(brands)).index(x) for x in brands]
assert levels[0] != levels[1] and levels[0][0] == "b" and levels[1][0] == "a"
PY
