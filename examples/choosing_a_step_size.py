"""
Choosing a step size
====================

The model is a linear regression on scikit-learn's diabetes data (442 rows, ten correlated columns)
with a known noise, so that the exact posterior is a known normal distribution. ``SGHMC`` takes 40
rows at a time, with steps that look plausible, with the settings that ``step_size=None`` finds, and
with settings that are chosen by hand. The script fails if a standard deviation of the last two is
more than 10 % off. ::

    python examples/choosing_a_step_size.py
"""

# sphinx_gallery_thumbnail_path = "pictures/choosing_a_step_size.png"

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value
import optax
from sklearn.datasets import load_diabetes

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.mcmc import SGHMC, ControlVariate, Whitening

NOISE = 0.7
x, y = load_diabetes(return_X_y=True)
x, y = ((a - a.mean(0)) / a.std(0) for a in (x, y))
exact_sd = np.sqrt(np.diag(np.linalg.inv(x.T @ x / NOISE**2 + np.eye(10))))
x, y = jnp.asarray(x, float), jnp.asarray(y, float)


def model(x, y, batch=40):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([10]).to_event(1))
    with numpyro.plate("rows", len(x), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w, NOISE), obs=y[idx])


# %%
# Two chains of 2,000 draws, 40 transitions apart, with three steps that look plausible.


def run(kernel):
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, **options)
    mcmc.run(jax.random.key(0), x, y)
    ratio = np.asarray(mcmc.get_samples()["w"]).std(0) / exact_sd
    return ratio, diagnose(mcmc).to_frame()["value"]


steps = (0.004, 0.002, 0.001)
given = [run(SGHMC(model, eps, steps_per_sample=40)) for eps in steps]

# %%
# Without a step the kernel finds a whitening, a control variate, a friction and a step.

kernel = SGHMC(model, steps_per_sample=40)
found = run(kernel)
print(kernel.settings)

# %%
# The same by hand: coordinates and center from a fitted guide, then a step for unit scale.

guide = AutoMultivariateNormal(model)
svi = SVI(model, guide, optax.adam(optax.cosine_decay_schedule(0.02, 5000)), Trace_ELBO())
params = svi.run(jax.random.key(1), 5000, x, y, progress_bar=False).params
kernel = SGHMC(
    model,
    0.3,
    friction=2.0,
    whitening=Whitening.from_guide(guide, params),
    gradient=ControlVariate(guide.median(params)),
    init_strategy=init_to_value(values=guide.median(params)),
    steps_per_sample=40,
)
by_hand = run(kernel)

# %%
# Standard deviations divided by the exact ones, beside what a run reports of itself.

names = [*(f"SGHMC(model, {eps:g})" for eps in steps), "SGHMC(model)", "by hand, 0.3"]
print(f"{'':<22}{'sd ratio':>14}{'temperature':>13}{'R-hat':>8}{'ESS':>7}")
for name, (ratio, known) in zip(names, [*given, found, by_hand], strict=True):
    span = f"{ratio.min():.2f} to {ratio.max():.2f}"
    temperature, rhat = known["kinetic temperature"], known["largest R-hat"]
    print(f"{name:<22}{span:>14}{temperature:>13.2f}{rhat:>8.3f}{known['smallest ESS']:>7,.0f}")

# %%
# The temperature shows that the steps are wrong, and R-hat does not.

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
left.plot(steps, [ratio for ratio, _ in given], ".", color="C0")
left.plot([], [], ".", color="C0", label="each of ten coefficients")
heat = [np.sqrt(known["kinetic temperature"]) for _, known in given]
left.plot(steps, heat, color="C1", label=r"$\sqrt{\mathrm{kinetic\ temperature}}$")
for eps, (_, known) in zip(steps, given, strict=True):
    text = f"R-hat {known['largest R-hat']:.2f}"
    left.annotate(text, (eps, 0.6), ha="center", color="grey", fontsize=9)
left.axhline(1, color="black", lw=1)
left.set(xscale="log", yscale="log", xlim=(0.0008, 0.005), ylim=(0.5, 15))
left.set_xticks(steps, [f"{eps:g}" for eps in steps])
left.set_xticks([], minor=True)
left.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
left.set(xlabel="step size", ylabel="standard deviation / exact", title="Steps given, friction 1")
right.axhspan(0.95, 1.05, color="0.9", label="within 5 %")
right.axhline(1, color="black", lw=1)
right.plot(found[0], "o", color="C2", label="step_size=None")
right.plot(by_hand[0], "s", color="C3", ms=4, label="by hand, in whitened coordinates")
right.set_xticks(range(10), load_diabetes().feature_names)
right.set(ylim=(0.8, 1.2), xlabel="coefficient", title="Settings found, and by hand")
for ax in (left, right):
    ax.legend(frameon=False, loc="upper left")
Path("out").mkdir(exist_ok=True)
fig.savefig("out/choosing_a_step_size.png", dpi=120)

assert given[0][0].max() > 3, "a step of 0.004 is not wrong any more"
assert np.all(np.abs(found[0] - 1) < 0.1), "the settings found give wrong standard deviations"
assert np.all(np.abs(by_hand[0] - 1) < 0.1), "the settings by hand give wrong standard deviations"
