"""
Comparing variational and MCMC results
======================================

Two regressions on scikit-learn's diabetes data, with normal and with Student-t noise, are fitted by
``NUTS`` and by guides, one of which is stopped far too early. Leave-one-out cross-validation of
draws from a guide has to correct for the guide as well as for the row that is left out, which
``az.loo_approximate_posterior`` does and plain ``az.loo`` does not. The script fails if a converged
guide is more than 0.5 nats from NUTS, or if the correction does not detect that the other has
stopped too early. ::

    python examples/comparing_variational_and_mcmc.py
"""

# sphinx_gallery_thumbnail_path = "pictures/comparing_variational_and_mcmc.png"

from functools import partial
from pathlib import Path
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
from sklearn.datasets import load_diabetes

from numpyro_ext.diagnostics import pareto_khat, to_arviz

x, y = load_diabetes(return_X_y=True)
x, y = (jnp.asarray((a - a.mean(0)) / a.std(0), float) for a in (x, y))


def model(x, y, heavy=False):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(x)):
        noise = dist.StudentT(4, x @ w, sigma) if heavy else dist.Normal(x @ w, sigma)
        numpyro.sample("y", noise, obs=y)


# %%
# Each fit becomes a ``DataTree`` with log likelihoods; one of a guide has ``lp`` and ``log_q`` too.


def by_nuts(model):
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=1000, **options)
    mcmc.run(jax.random.key(0), x, y)
    return to_arviz(mcmc)


def by_guide(model, steps):
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, 5000)), Trace_ELBO(4))
    result = svi.run(jax.random.key(1), steps, x, y, progress_bar=False)
    return to_arviz(svi, result=result, model_args=(x, y), num_samples=2000)


student = partial(model, heavy=True)
trees = {
    ("normal", "NUTS"): by_nuts(model),
    ("normal", "guide, 5,000 steps"): by_guide(model, 5000),
    ("normal", "guide, 200 steps"): by_guide(model, 200),
    ("Student-t", "NUTS"): by_nuts(student),
    ("Student-t", "guide, 5,000 steps"): by_guide(student, 5000),
}

# %%
# Plain LOO, and LOO with the weights of the guide.


def loo(tree):
    """The LOO to quote for any fit."""
    stats = tree["sample_stats"]
    if "log_q" not in stats:
        return az.loo(tree, pointwise=True)
    return az.loo_approximate_posterior(tree, log_p=stats.lp, log_q=stats.log_q, pointwise=True)


warnings.simplefilter("ignore", UserWarning)  # of a large k, which the table shows
plain = {name: az.loo(tree, pointwise=True) for name, tree in trees.items()}
right = {name: loo(tree) for name, tree in trees.items()}
print(f"{'noise':<11}{'fit':<20}{'k-hat':>6}{'plain':>9}{'k > 0.7':>9}{'elpd':>9}{'k > 0.7':>9}")
bad = {}
for (noise, fit), tree in trees.items():
    khat = "-" if fit == "NUTS" else f"{pareto_khat(tree).khat:.2f}"
    both = plain[noise, fit], right[noise, fit]
    bad[noise, fit] = [int(np.sum(one.pareto_k.values > 0.7)) for one in both]
    cells = "".join(f"{e.elpd:>9.2f}{k:>9}" for e, k in zip(both, bad[noise, fit], strict=True))
    print(f"{noise:<11}{fit:<20}{khat:>6}{cells}")

# %%
# Two models are compared by one method, with the corrected estimates in place of the fits.

fits = ("NUTS", "guide, 5,000 steps")
for fit in fits:
    ranks = az.compare({noise: right[noise, fit] for noise in ("normal", "Student-t")})
    print(f"\n{fit}\n{ranks[['rank', 'elpd_diff', 'dse']]}")

# %%
# The correction does not repair a bad guide, but reports it; plain LOO is silently wrong.

fig, (left, ax) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
truth, guides = right["normal", "NUTS"].elpd, ("guide, 200 steps", "guide, 5,000 steps")
for k, (one, label) in enumerate([(plain, "az.loo"), (right, "az.loo_approximate_posterior")]):
    errors = [one["normal", fit].elpd - truth for fit in guides]
    left.plot(np.arange(2) + 0.2 * k - 0.1, errors, "o", color=f"C{1 - k}", ms=8, label=label)
    for place, (fit, error) in enumerate(zip(guides, errors, strict=True)):
        text, side = f"{bad['normal', fit][k]} rows\nk > 0.7", ("right", "left")[k]
        at = (place + 0.3 * k - 0.15, error)
        left.annotate(text, at, va="center", ha=side)
left.axhline(0, color="black", lw=1)
left.margins(x=0.5, y=0.3)
left.set_xticks([0, 1], guides)
left.set(ylabel="elpd - elpd of NUTS (nats)", title="One model, two guides")
left.legend(frameon=False, loc="lower right")
by_row = [
    np.ravel(right["normal", fit].elpd_i.values - right["Student-t", fit].elpd_i.values)
    for fit in fits
]
ax.plot(*by_row, ".", color="C0", ms=4)
ax.axline((0, 0), slope=1, color="black", lw=1)
ax.set(xlabel="NUTS", ylabel="guide, 5,000 steps")
ax.set(title="elpd of each row, normal - Student-t noise (nats)")
Path("out").mkdir(exist_ok=True)
fig.savefig("out/comparing_variational_and_mcmc.png", dpi=120)

for noise in ("normal", "Student-t"):
    error = right[noise, fits[1]].elpd - right[noise, "NUTS"].elpd
    assert abs(error) < 0.5, f"{noise}: the guide's elpd is {error:.2f} nats from NUTS's"
assert bad["normal", "guide, 200 steps"][1] > 200, "the correction does not detect the bad guide"
assert bad["normal", "guide, 200 steps"][0] == 0, "plain LOO detects the bad guide"
