#!/usr/bin/env bash
# The program of NumPyro's Trace_ELBO depends on Python's hash seed, so JAX's persistent cache misses.
#
# Guess: a script that runs twice, with the same key and with jax_compilation_cache_dir set, lowers the
#   same program twice, so that the second process finds what the first has compiled.
# Behaviour: Trace_ELBO adds the log densities of the sites in the order of a Python set of their
#   names, and that order follows the hash seed of the process. With six latent sites, six processes
#   lower up to six different programs of one `svi.update`. TraceMeanField_ELBO and RenyiELBO lower the
#   same one. Sums in another order differ in their last digits too, so that losses of Trace_ELBO are
#   not equal to the bit from one process to the next.
# Versions: numpyro 0.22.0, jax and jaxlib 0.12.0.1, Python 3.12. Source: numpyro/infer/elbo.py,
#   `union = set(model_log_probs).union(guide_log_probs)`.
# Seen: Trace_ELBO {6 programs of 6 hash seeds}, TraceMeanField_ELBO 1, RenyiELBO 1.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1
cat > "$folder/programs.py" <<'PY'
import hashlib

import jax
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal


def model():
    mean = sum(numpyro.sample(f"site_{i}", dist.Normal(i, 1)) for i in range(6))
    numpyro.sample("y", dist.Normal(mean, 1), obs=jax.numpy.arange(5.0))


for loss in (Trace_ELBO(), TraceMeanField_ELBO(), RenyiELBO(0.5, num_particles=2)):
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), loss)
    text = jax.jit(svi.update).lower(svi.init(jax.random.key(0))).as_text()
    print(type(loss).__name__, hashlib.sha256(text.encode()).hexdigest()[:8])
PY
for seed in 1 2 3 4 5 6; do
    JAX_PLATFORMS=cpu PYTHONHASHSEED=$seed "$folder/venv/bin/python" "$folder/programs.py"
done | sort | uniq | cut -d' ' -f1 | uniq -c | tee "$folder/counts"
awk '{n[$2] = $1} END {exit !(n["Trace_ELBO"] > 1 && n["TraceMeanField_ELBO"] == 1 && n["RenyiELBO"] == 1)}' "$folder/counts"
