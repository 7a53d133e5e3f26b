#!/usr/bin/env bash
# Where a latent site is the condition of a flow of flowjax, variational inference in NumPyro gives the prior back.
#
# Guess: `sample("x", flow, condition=theta, obs=x)` of `flowjax.experimental.numpyro` is a site like any other: the log density of
#   x depends on theta, and its derivative with it. So a learnt likelihood p(x | theta) can be put in a model, and `AutoNormal`
#   and NUTS find the posterior of theta, as they do with `numpyro.distributions.Normal(theta, .5)`.
# Behaviour: the wrapper puts `stop_gradient` around the condition wherever it uses it. The log density is right, and its
#   derivative in theta is the prior's alone: the mode is the mode of the prior, and `AutoNormal` ends at the prior, whatever
#   the data. NUTS, which accepts by the density, comes to the posterior, with 300 times the steps. The docstrings do not say so, and
#   there is no warning. `numpyro.factor("x", flow.log_prob(x, theta).sum())` has the derivative.
# Versions: flowjax 19.1.2 (experimental/numpyro.py: `condition`, twice), numpyro 0.22.0, jax and jaxlib 0.12.0.1, equinox 0.13.8,
#   paramax 0.0.5, numpy 2.5.5.
# Seen (20 rows of a flow that is N(theta, .5), prior N(0, 1); by the flow, by Normal, right): log density at 1 -46.18 -46.18, its
#   derivative -1.0 71.7 71.7; mode .000 1.885 1.885; AutoNormal .002 and .982, 1.878 and .108, 1.885 and .111; NUTS 1.883
#   with 938 steps a draw, 1.887 with 3.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check flowjax==19.1.2 equinox==0.13.8 paramax==0.0.5 packaging==26.4 \
  numpyro==0.22.0 jax==0.12.0.1 jaxlib==0.12.0.1 numpy==2.5.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flowjax.bijections import AdditiveCondition
from flowjax.distributions import Normal, Transformed
from flowjax.experimental.numpyro import sample
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.util import log_density

X = jnp.asarray(np.random.default_rng(0).normal(2.0, 0.5, (20, 1)), jnp.float32)
VARIANCE = 1 / (1 + len(X) / 0.25)
MEAN = float(X.sum()) / 0.25 * VARIANCE
# a flow of which the density is known: x given the condition is N(condition, .5)
flow = Transformed(Normal(jnp.zeros(1), jnp.full(1, 0.5)), AdditiveCondition(lambda c: c, (1,), (1,)))


def by_flow(rows):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("rows", len(rows)):
        sample("x", flow, condition=jnp.broadcast_to(theta, rows.shape), obs=rows)


def by_normal(rows):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with numpyro.plate("rows", len(rows)):
        numpyro.sample("x", dist.Normal(theta, 0.5).to_event(1), obs=rows)


def fit(model, guide, *args):
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO(10))
    return svi.run(jax.random.key(0), 3_000, *args, progress_bar=False)


found = {}
for model in (by_flow, by_normal):
    name = model.__name__
    value, slope = jax.value_and_grad(lambda t, m=model: log_density(m, (X,), {}, {"theta": t})[0])(jnp.ones(1))
    mode, normal = AutoDelta(model), AutoNormal(model)
    at = float(mode.median(fit(model, mode, X).params)["theta"][0])
    params = fit(model, normal, X).params
    mean, sd = float(params["theta_auto_loc"][0]), float(params["theta_auto_scale"][0])
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=2_000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, extra_fields=("num_steps",))
    draws = mcmc.get_samples()["theta"]
    steps = float(mcmc.get_extra_fields()["num_steps"].mean())
    found[name] = value, slope[0], at, mean, sd
    print(f"{name}: log density at 1 {value:.3f}, its derivative {slope[0]:.1f}; mode {at:.3f};", end=" ")
    print(f"AutoNormal {mean:.3f} {sd:.3f}; NUTS {draws.mean():.3f} {draws.std():.3f}, {steps:.0f} steps a draw")
print(f"right: derivative {(MEAN - 1) / VARIANCE:.1f}, mean and mode {MEAN:.3f}, sd {VARIANCE**0.5:.3f}")

assert abs(found["by_flow"][0] - found["by_normal"][0]) < 1e-3
np.testing.assert_allclose(found["by_normal"][1:], ((MEAN - 1) / VARIANCE, MEAN, MEAN, VARIANCE**0.5), rtol=0.1)
np.testing.assert_allclose(found["by_flow"][1:], (-1.0, 0.0, 0.0, 1.0), atol=0.1)
PY
