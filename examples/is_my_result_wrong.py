"""
Is my result wrong?
===================

``diagnose`` judges fits that look right but are wrong, and fits of the same models that are right.
The first are by ``SGHMC`` on the mean of 1,000 rows, 50 at a time, whose posterior is known. The
others are two guides for a linear regression on scikit-learn's diabetes data. The script fails if
``diagnose`` does not distinguish right from wrong. ::

    python examples/is_my_result_wrong.py
"""

# sphinx_gallery_thumbnail_path = "pictures/is_my_result_wrong.png"

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from numpyro.infer.initialization import init_to_median, init_to_value
import optax
from sklearn.datasets import load_diabetes

from numpyro_ext.diagnostics import diagnose, plot_diagnosis
from numpyro_ext.mcmc import SGHMC, ControlVariate


def model(x, batch=50):
    mean = numpyro.sample("mean", dist.Normal(0, 10))
    with numpyro.plate("rows", len(x), subsample_size=batch):
        numpyro.sample("x", dist.Normal(mean, 1), obs=numpyro.subsample(x, event_dim=0))


x = 3 + jax.random.normal(jax.random.key(0), (1000,))
exact_sd = 1000.01**-0.5


def run(kernel):
    options = {"num_chains": 2, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=100, num_samples=2000, **options)
    mcmc.run(jax.random.key(3), x)
    return mcmc


def sd_ratio(mcmc):
    return float(mcmc.get_samples()["mean"].std() / exact_sd)


# %%
# A step that looks small: R-hat and the effective sample size are good, and the temperature is not.

bad = run(SGHMC(model, 0.02, steps_per_sample=10))
diagnosis = diagnose(bad)
print(diagnosis)
assert not diagnosis.ok

# %%
# The settings that ``SGHMC`` finds.

good = run(SGHMC(model, steps_per_sample=10))
print(diagnose(good))
assert diagnose(good).ok

# %%
# Halve the step: if the standard deviation changes, it comes from the step, not from the model.

halved = {0.02: sd_ratio(bad)}
halved |= {eps: sd_ratio(run(SGHMC(model, eps, steps_per_sample=10))) for eps in (0.01, 0.005)}
found = good.sampler.settings
half = SGHMC(
    model,
    found.step_size / 2,
    friction=found.friction,
    whitening=found.whitening,
    gradient=ControlVariate(found.center),
    init_strategy=init_to_value(values=found.center),
    steps_per_sample=20,
)
settled = {found.step_size: sd_ratio(good), found.step_size / 2: sd_ratio(run(half))}
for eps, ratio in (halved | settled).items():
    print(f"step {eps:<6g} sd / exact {ratio:6.2f}")
assert all(abs(ratio - 1) < 0.05 for ratio in settled.values())

# %%
# Two guides for one posterior: the moved draws show which is right, and the ELBO does not.

COLUMNS = ["bmi", "s1", "s2"]  # s1 and s2 have a correlation of 0.9


def linear(x, y):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("feature", len(COLUMNS)):
        weights = numpyro.sample("weights", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)


table = load_diabetes(as_frame=True, scaled=False).frame[[*COLUMNS, "target"]]
table = jnp.asarray((table - table.mean()) / table.std(), jnp.float32)
data = table[:, :-1], table[:, -1]
fits, pictures = {}, {}
for guide_class in (AutoNormal, AutoMultivariateNormal):
    guide = guide_class(linear, init_loc_fn=init_to_median)
    optim = optax.adam(optax.cosine_decay_schedule(0.02, 5000))
    svi = SVI(linear, guide, optim, Trace_ELBO(num_particles=4))
    result = svi.run(jax.random.key(1), 5000, *data, progress_bar=False)
    diagnosis = diagnose(svi, result=result, model_args=data)
    print(f"{diagnosis}\nELBO {-np.mean(result.losses[-1000:]):.1f} nats\n")
    pictures["right" if diagnosis.ok else "wrong"] = plot_diagnosis(diagnosis)["means"].figure
    draws = guide.sample_posterior(jax.random.key(2), result.params, sample_shape=(2000,))
    moved = diagnosis.to_frame().loc["sd ratio, worst"]
    fits[guide_class.__name__] = np.asarray(draws["weights"]), moved
assert not fits["AutoNormal"][1]["ok"] and fits["AutoMultivariateNormal"][1]["ok"]

# %%
# The first guide is too narrow along the ridge of two correlated weights.

fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
left.plot(*zip(*halved.items(), strict=True), "o-", color="C1", label="step given, halved twice")
left.plot(*zip(*settled.items(), strict=True), "o-", color="C0", label="step found, halved once")
left.axhline(1, color="black", lw=1)
left.set(xscale="log", yscale="log", ylim=(0.5, 40), title="SGHMC: halve the step")
left.set(xlabel="step size (found: whitened units)", ylabel="standard deviation / exact")
left.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
left.legend(frameon=False)
for (name, (weights, moved)), colour in zip(fits.items(), ("C1", "C0"), strict=True):
    label = f"{name}: sd ratio {moved['value']:.2f}"
    right.plot(*weights[:, 1:].T, ".", color=colour, ms=2, label=label)
right.set(xlabel="weight of s1", ylabel="weight of s2")
right.set(title="SVI: two guides", ylim=(-0.55, 0.25))
right.legend(frameon=False, markerscale=4, loc="upper right")
Path("out").mkdir(exist_ok=True)
fig.savefig("out/is_my_result_wrong.png", dpi=120)
for name, shown in pictures.items():
    shown.savefig(f"out/is_my_result_wrong_{name}.png", dpi=120)
