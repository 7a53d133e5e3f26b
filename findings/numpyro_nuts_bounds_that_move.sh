#!/usr/bin/env bash
# Draws of NUTS are on the wrong interval where the upper bound of a site is another latent site.
#
# Guess: `TruncatedNormal(0, 1, high=top)` and `Uniform(0, top).expand([2]).to_event(1)`, with `top` latent, are
#   as right as `Uniform(0, top)`, which is documented: the bound of each draw is the `top` of that draw.
# Behaviour: potential and chain are right, in unconstrained space. To constrain the draws NumPyro runs
#   the model again only if a bound of a support that it knows, the interval or the half-line to the right,
#   depends on a site. It overlooks the half-line to the left, and each support inside of `to_event`, and
#   maps all draws with the bound at the chain's start. R-hat and ESS are good, no warning.
# Versions: numpyro 0.22.0, jax and jaxlib 0.12.0.1. Source: numpyro/infer/util.py, which asks for
#   `constraints._GreaterThan` and `constraints._Interval` alone.
# Seen, means of x from the prior: Uniform .48 (right .50); the event of two .10 (right .50), with 8.5 %
#   of the draws above their `top`; TruncatedNormal -1.24 (right -.40).
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive


def below(site):
    def model():
        top = numpyro.sample("top", dist.Exponential(1.0))
        numpyro.sample("x", site(top))

    return model


CASES = {
    "Uniform": (lambda top: dist.Uniform(0.0, top), True),
    "Uniform, an event of two": (lambda top: dist.Uniform(0.0, top).expand([2]).to_event(1), False),
    "TruncatedNormal": (lambda top: dist.TruncatedNormal(0.0, 1.0, high=top), False),
}
for name, (site, right) in CASES.items():
    mcmc = MCMC(NUTS(below(site)), num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(0))
    draws = {key: np.asarray(x) for key, x in mcmc.get_samples().items()}
    x, top = draws["x"].reshape(4000, -1), draws["top"][:, None]
    prior = np.asarray(Predictive(below(site), num_samples=20_000)(jax.random.key(1))["x"])
    print(f"{name}: mean {x.mean():.2f}, prior {prior.mean():.2f}, above top {(x > top).mean():.3f}")
    error = abs(x.mean() - prior.mean())
    assert error < 0.1 and not (x > top).any() if right else error > 0.25 and (x > top).any()
PY
