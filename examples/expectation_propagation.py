"""
Expectation propagation on the eight schools
============================================

The effects theta of eight schools share a mean mu and a spread tau. In the centred form, in which
one would write the model, the posterior is a funnel: a normal guide that is fitted by the ELBO
finds the neck of the funnel and reports an effect that is the same in all schools. Expectation
propagation matches the moments of each factor instead, and so covers the funnel.

The same compiled sweep then fits the model without each of the schools, for the predictive density
of the school that is left out: leave-one-group-out cross-validation at the price of one
compilation. NUTS runs on each of the eight data sets as well.

The script prints a table and saves a picture. The exit code is 1 if a mean of EP is further than
0.35 standard deviations from NUTS's, if a standard deviation is off by more than 30 %,
or if a density that was left out is off by more than 0.1.
::

    python examples/expectation_propagation.py --out out/expectation_propagation.png

.. image:: /recorded/expectation_propagation.png
   :alt: EP, SVI and NUTS: the pair of a school's effect and log tau, and all effects.

.. literalinclude:: /recorded/expectation_propagation.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/expectation_propagation.png"

import argparse
from pathlib import Path
import sys
import time

from jax import random
import jax.numpy as jnp
from jax.scipy.special import logsumexp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax

from numpyro_ext.ep import EP

Y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
SD = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
NAMES = "ABCDEFGH"


def schools(y, sd):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]))
    with numpyro.plate("schools", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], sd[idx]), obs=y[idx])


def not_centred(y, sd):
    """The same distribution, in the form in which NUTS is at ease."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    z = numpyro.sample("z", dist.Normal().expand([len(y)]).to_event(1))
    theta = numpyro.deterministic("theta", mu + tau * z)
    with numpyro.plate("schools", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], sd[idx]), obs=y[idx])


def held_out(draws, y, sd):
    """log p(y) of a new school, whose effect comes from N(mu, tau)."""
    scale = jnp.sqrt(draws["tau"] ** 2 + sd**2)
    log_p = dist.Normal(draws["mu"], scale).log_prob(y)
    return float(logsumexp(log_p) - jnp.log(len(log_p)))


def nuts(num_samples):
    """Compiled once for all data of one shape."""
    kernel = NUTS(not_centred, target_accept_prob=0.95)
    return MCMC(
        kernel,
        num_warmup=1000,
        num_samples=num_samples,
        progress_bar=False,
        jit_model_args=True,
    )


def draws_of(mcmc, y, sd):
    mcmc.run(random.key(0), y, sd)
    return mcmc.get_samples()


def main(out, num_samples):
    start = time.perf_counter()
    ep = EP(schools, schedule="parallel")
    result = ep.run(random.key(1), 60, Y, SD, progress_bar=False)
    print(f"EP: {len(result.losses)} sweeps, {time.perf_counter() - start:.0f} s,", end=" ")
    print(f"log evidence {-result.losses[-1]:.2f}, residual {result.state.report.residual:.1e}")

    draws = {"NUTS": draws_of(nuts(num_samples), Y, SD)}
    shape = (num_samples,)
    draws["EP"] = ep.guide.sample_posterior(random.key(2), result.params, sample_shape=shape)
    guide = AutoMultivariateNormal(schools)
    rate = optax.cosine_decay_schedule(1e-2, 5000)
    svi = SVI(schools, guide, optax.adam(rate), Trace_ELBO(10))
    params = svi.run(random.key(3), 5000, Y, SD, progress_bar=False).params
    draws["SVI"] = guide.sample_posterior(random.key(4), params, sample_shape=shape)

    def moments(found):
        x = jnp.column_stack([found["mu"], jnp.log(found["tau"]), found["theta"]])
        return np.asarray(x.mean(0)), np.asarray(x.std(0))

    m, sd = moments(draws["NUTS"])
    print(f"{'':5} {'largest mean error':>20} {'sd ratio':>16}")
    errors = {}
    for name in ("EP", "SVI"):
        a, b = moments(draws[name])
        errors[name] = (
            float(np.max(np.abs(a - m) / sd)),
            float(np.min(b / sd)),
            float(np.max(b / sd)),
        )
        print(
            f"{name:5} {errors[name][0]:17.2f} sd {errors[name][1]:8.2f} to {errors[name][2]:.2f}"
        )

    # Every data set of seven schools has the same shapes, so one compiled sweep fits them all.
    found, seconds = {"EP": [], "NUTS": []}, []
    mcmc = nuts(num_samples // 4)
    for j in range(len(Y)):
        rest = jnp.delete(Y, j), jnp.delete(SD, j)
        start = time.perf_counter()
        result = ep.run(random.key(1), 60, *rest, progress_bar=False)
        sample = ep.guide.sample_posterior(random.key(5), result.params, sample_shape=shape)
        found["EP"].append(held_out(sample, Y[j], SD[j]))
        seconds.append(time.perf_counter() - start)
        found["NUTS"].append(held_out(draws_of(mcmc, *rest), Y[j], SD[j]))
    for name, values in found.items():
        print(
            f"{name:5} log density of the school left out: {np.round(values, 3)}, {sum(values):.2f}"
        )
    print(
        f"seconds of EP per fit: {seconds[0]:.1f} the first, {np.mean(seconds[1:]):.2f} the others"
    )

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    theta = np.asarray(draws["NUTS"]["theta"][:2000, 0])
    left.plot(theta, np.log(draws["NUTS"]["tau"][:2000]), ".", ms=2, color="0.7", label="NUTS")
    for name, colour in (("EP", "C0"), ("SVI", "C3")):
        x = np.column_stack([draws[name]["theta"][:, 0], np.log(draws[name]["tau"])])
        values, axes = np.linalg.eigh(np.cov(x.T))
        t = np.linspace(0, 2 * np.pi, 100)
        for k in (1, 2):
            ring = x.mean(0) + k * (np.column_stack([np.cos(t), np.sin(t)]) * values**0.5) @ axes.T
            left.plot(*ring.T, color=colour, lw=1.5, label=name if k == 1 else None)
    left.set(xlabel="effect of school A", ylabel="log tau", xlim=(-15, 40), ylim=(-3, 4.5))
    left.set_title("One and two standard deviations")
    left.legend(loc="lower right")
    place = np.arange(len(Y))
    for shift, (name, colour) in enumerate((("NUTS", "0.5"), ("EP", "C0"), ("SVI", "C3"))):
        low, mid, high = np.quantile(np.asarray(draws[name]["theta"]), [0.05, 0.5, 0.95], axis=0)
        at = place + 0.22 * (shift - 1)
        right.errorbar(at, mid, [mid - low, high - mid], fmt="o", ms=4, color=colour, label=name)
    right.plot(place, Y, "kx", label="observed")
    right.set_xticks(place, NAMES)
    right.set(xlabel="school", title="Effects, median and 90 % interval")
    right.legend(fontsize=8)
    fig.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)
    mean, low, high = errors["EP"]
    left_out = np.max(np.abs(np.subtract(found["EP"], found["NUTS"])))
    return mean < 0.35 and 0.7 < low and high < 1.3 and left_out < 0.1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--out", type=Path, default=Path("out/expectation_propagation.png"))
    parser.add_argument("--num-samples", type=int, default=20_000)
    args = parser.parse_args()
    sys.exit(0 if main(args.out, args.num_samples) else 1)
