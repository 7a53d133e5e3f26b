"""
Large data
==========

``SGHMC`` samples a logistic regression with 2,000 to 200,000 simulated rows and ten correlated
columns of unequal scale, 256 rows at a time and with the settings that it finds; ``SVI`` fits it
with and without a ``taylor_proxy``. The script shows which costs and which noise grow with the
number of rows. The script fails if a standard deviation is more than 10 % off, or if the noise of
the corrected gradient grows with the rows. ::

    python examples/large_data.py
"""

# sphinx_gallery_thumbnail_path = "pictures/large_data.png"

from pathlib import Path
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO, taylor_proxy
from numpyro_ext.optim import whitened

SCALES = np.geomspace(0.1, 10, 10)
rng = np.random.default_rng(0)
root = np.linalg.cholesky(0.9 * np.ones((10, 10)) + 0.1 * np.eye(10))
features = (rng.standard_normal((200_000, 10)) @ root.T * SCALES).astype(np.float32)
weights = rng.standard_normal(10) / SCALES
labels = (rng.random(200_000) < 1 / (1 + np.exp(-features @ weights))).astype(np.float32)


def model(x, y, batch=256):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([10]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def all_rows(x, y):
    model(x, y, batch=None)


# %%
# The cost of a transition and of a gradient of all rows, and the noise of gradients, by rows.


def milliseconds(function, *args):
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready([function(*args) for _ in range(100)])
    return 10 * (time.perf_counter() - start)


table = []
print(f"{'rows':>8}{'transition':>14}{'all rows':>12}{'noise':>9}{'corrected':>11}")
for rows in (2_000, 20_000, 200_000):
    data = jnp.asarray(features[:rows]), jnp.asarray(labels[:rows])
    kernel = SGHMC(model, steps_per_sample=20)
    state = kernel.init(jax.random.key(0), 0, None, data)
    transition = milliseconds(jax.jit(kernel.sample), state, data) / 20
    full = jax.jit(SGHMC(all_rows).estimate_gradient)
    gradient = milliseconds(full, jax.random.key(0), {"w": weights}, data)
    noise, corrected = kernel.settings.noise, kernel.settings.noise_control_variate
    table.append((rows, transition, gradient, noise, corrected))
    print(f"{rows:>8,}{transition:>11.3f} ms{gradient:>9.3f} ms{noise:>9.1f}{corrected:>11.3f}")

# %%
# 2,000 draws of all 200,000 rows; the last kernel already has its settings.

options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
mcmc = MCMC(kernel, num_warmup=100, num_samples=1000, **options)
mcmc.run(jax.random.key(1), *data)
draws = np.asarray(mcmc.get_samples()["w"])
print(f"\n{kernel.settings}")
assert diagnose(mcmc).ok

# %%
# The posterior of so many rows is normal, with the curvature at its mode.

w = weights.copy()
for _ in range(20):
    p = 1 / (1 + np.exp(-features @ w))
    hessian = (features * (p * (1 - p))[:, None]).T @ features + np.eye(10) / 100
    w += np.linalg.solve(hessian, features.T @ (labels - p) - w / 100)
sd = np.sqrt(np.diag(np.linalg.inv(hessian)))
ratio, error = draws.std(0) / sd, np.abs(draws.mean(0) - w) / sd
print(f"\nsd ratio {ratio.min():.2f} to {ratio.max():.2f}, worst mean error {error.max():.2f} sd")

# %%
# The log likelihoods of all draws and rows would take 1.6 GB, so they raise an error.

try:
    to_arviz(mcmc)
except ValueError as refusal:
    print(f"\n{refusal}")
to_arviz(mcmc, log_likelihood=False)

# %%
# Variational fits of the same rows, 256 at a time, all from the mode with the covariance there, and
# with steps in its units. Plain minibatches leave it; with the proxy every order stays.

proxy = taylor_proxy(model, *data)
guide = AutoMultivariateNormal(model)
start = proxy.init_params(guide, *data)
fits = {}
for name, loss in {
    "Trace_ELBO": Trace_ELBO(),
    "VRELBO(1.) with the proxy": VRELBO(1.0, 4, proxy=proxy),
    "VRELBO(0.5) with the proxy": VRELBO(0.5, 4, gradient="dreg", proxy=proxy),
}.items():
    adam = optax.adam(optax.cosine_decay_schedule(0.01, 1000))
    svi = SVI(model, guide, whitened(adam, start), loss)
    fit = svi.run(jax.random.key(2), 1000, *data, init_params=start, progress_bar=False)
    q = guide.get_posterior(fit.params)
    q_sd = np.sqrt(np.diag(q.covariance_matrix))
    fits[name] = np.abs(q.mean - w) / sd, q_sd / sd
    print(
        f"{name:<28}worst mean error {fits[name][0].max():.2f} sd,"
        f" sd ratio {fits[name][1].min():.2f} to {fits[name][1].max():.2f}"
    )

# %%
# The cost of a gradient of all rows and the noise of a plain batch grow with the rows.

rows, batch, full, plain, corrected = np.array(table).T
fig, (left, right, far_right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
left.plot(rows, full, "o-", color="C1", label="a gradient of all rows")
left.plot(rows, batch, "o-", color="C0", label="a transition on 256 rows, corrected")
left.set(ylabel="milliseconds", title="Cost")
right.plot(rows, plain, "o-", color="C1", label="plain minibatch")
right.plot(rows, corrected, "o-", color="C0", label="ControlVariate at the mode")
right.set(ylabel="variance of the gradient (whitened)", title="Noise")
for ax in (left, right):
    ax.set(xscale="log", yscale="log", xlabel="rows")
    ax.legend(frameon=False)
for (name, (shift, wide)), marker in zip(fits.items(), "s^o", strict=True):
    far_right.plot(np.maximum(shift, 1e-3), wide, marker, alpha=0.6, label=name)
far_right.axhline(1, color="0.7", zorder=0)
far_right.set(xscale="log", xlabel="error of a mean in sds", ylabel="sd over the exact sd")
far_right.set(title="Ten coefficients, fitted on 256 rows a step")
far_right.legend(frameon=False)
Path("out").mkdir(exist_ok=True)
fig.savefig("out/large_data.png", dpi=120)

assert np.all(np.abs(ratio - 1) < 0.1), "a standard deviation is more than 10 % off"
assert error.max() < 0.15, "a mean is more than 0.15 standard deviations off"
for shift, wide in list(fits.values())[1:]:
    assert shift.max() < 0.1 and np.all(np.abs(wide - 1) < 0.05), "a fit with the proxy is off"
assert corrected[-1] < 4 * corrected[0], "the noise of the corrected gradient grows with the rows"
