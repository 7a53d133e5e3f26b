"""
Yesterday's posterior as today's prior
======================================

Rows arrive every day, and the posterior of all rows so far is wanted each evening, without reading
the old rows again. Three ways, on a logistic regression with 500 new rows a day:

* **StochasticEP**: the normal distribution of yesterday is the prior of today, by ``prior=fit``,
  and only today's rows are read, all of them in each of 12 steps. (Steps on 50 of them leave
  a little noise in every evening's mean, which 20 days add up to 0.4 standard deviations.) From the
  third day on nothing is compiled.
* **SVI** with ``AutoMultivariateNormal``: the same by ``posterior_as_prior(model, (svi, fit))``,
  which is a model as any other, from yesterday's parameters. ``SVI.run`` compiles its steps anew
  every day.
* **Importance resampling with rejuvenation**: 2,000 draws are weighted by the likelihood of today's
  rows, and resampled where the effective number of draws falls below a half. Copies are then moved
  apart by 20 random-walk steps, which have to read all rows so far, in proposals of the size of the
  draws' own covariance.

The stream of the first table does not change, so that ``NUTS`` on all rows knows the answer. On the
second the weights drift, and a posterior of all rows is sure of an average that holds on no day.
*Forgetting* multiplies yesterday's precision by a factor below 1 (``forgetting_factor``). What it
costs where nothing drifts, and what it gains where something does, is the log density of tomorrow's
rows, predicted today.

``--margin`` asks for a margin in place of a likelihood (online Bayesian passive-aggressive
learning; Shi and Zhu, 2014): the prior of today is yesterday's guide, and the loss is
``PosteriorRegularizedELBO`` with a hinge of E_q[y w . x] for each of today's rows. The answer of a
day is known: the mean moves to the solution of a support vector machine around yesterday's mean,
and the standard deviations stay those of the prior.

The exit code is 1 if on the last day a mean is further than 0.2 standard deviations from the one by
NUTS, or a standard deviation off by more than 15 %; or if forgetting does not gain where the
weights drift.
::

    python examples/streaming_updates.py --out out/streaming_updates.png
    python examples/streaming_updates.py --margin

.. image:: /recorded/streaming_updates.png
   :alt: Left: evening posteriors of two weights by StochasticEP and by resampling, which
         end at NUTS's. Right: weights that drift, followed with forgetting and
         lost without.

.. literalinclude:: /recorded/streaming_updates.txt
   :language: text
"""

# sphinx_gallery_thumbnail_path = "recorded/streaming_updates.png"

import argparse
from pathlib import Path
import sys
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI
from numpyro.infer.autoguide import AutoMultivariateNormal
import optax
from scipy.optimize import minimize

from numpyro_ext.ep import StochasticEP
from numpyro_ext.guides import posterior_as_prior
from numpyro_ext.objectives import VRELBO, PosteriorRegularizedELBO

D, ROWS = 4, 500


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("rows", len(x)) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def stream(rng_key, days, drift):
    """Rows of each day, ``(days, ROWS, D)``, and the weights, which move by ``drift`` a day."""
    keys = random.split(rng_key, 3)
    steps = drift * random.normal(keys[0], (days, D))
    w = jnp.array([1.0, -0.5, 0.2, 0.0]) + jnp.cumsum(steps, 0)
    x = random.normal(keys[1], (days, ROWS, D)) * jnp.array([1.0, 1.0, 2.0, 0.5])
    y = random.bernoulli(keys[2], jax.nn.sigmoid(jnp.einsum("tnd,td->tn", x, w)))
    return x, y.astype(float), w


@jax.jit
def density_of_tomorrow(draws, x, y):
    """Log density of a row under the mean prediction of the draws, in nats."""
    p = jax.nn.sigmoid(draws @ x.T).mean(0)
    return jnp.mean(jnp.log(jnp.where(y > 0, p, 1 - p)))


def normal_of(params):
    return params["auto_loc"], params["auto_scale_tril"]


def by_ep(rng_key, x, y, keep=1.0, steps=12):
    """A normal for each evening, and the seconds of each day; ``keep`` is the share of yesterday's
    precision that is kept."""
    fit, found, clock = None, [], [time.perf_counter()]
    for t, key in enumerate(random.split(rng_key, len(x))):
        # All of today in a step: averaged EP.
        engine = StochasticEP(model, batch_size=ROWS, prior=fit, forgetting_factor=keep)
        result = engine.run(key, steps, x[t], y[t], progress_bar=False)
        fit = engine, result
        found.append(normal_of(result.params))
        clock.append(time.perf_counter())
    return found, np.diff(clock)


def by_svi(rng_key, x, y, steps=500):
    """A normal for each evening, and the seconds of each day."""
    today, params, found, clock = model, None, [], [time.perf_counter()]
    adam = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    for t, key in enumerate(random.split(rng_key, len(x))):
        svi = SVI(today, AutoMultivariateNormal(today), adam, VRELBO(1.0, 8, gradient="stl"))
        result = svi.run(key, steps, x[t], y[t], init_params=params, progress_bar=False)
        today, params = posterior_as_prior(model, (svi, result)), result.params
        found.append(normal_of(params))
        clock.append(time.perf_counter())
    return found, np.diff(clock)


def by_resampling(rng_key, x, y, num=2000, moves=20):
    """Draws for each evening, and the days on which they were moved."""
    days = len(x)
    draws, log_w = random.normal(rng_key, (num, D)), jnp.zeros(num)

    @jax.jit
    def log_lik(draws, x, y):
        return jnp.sum(jax.nn.log_sigmoid((2 * y - 1) * (draws @ x.T)), -1)

    @jax.jit
    def move(rng_key, draws, x, y, seen):
        """Random-walk steps of all draws; rows after today count 0."""
        root = jnp.linalg.cholesky(jnp.cov(draws.T))

        def log_p(w):
            rows = jax.nn.log_sigmoid((2 * y - 1) * jnp.einsum("nd,trd->ntr", w, x))
            return jnp.einsum("ntr,t->n", rows, seen) - jnp.sum(w**2, -1) / 2

        def step(state, key):
            w, at = state
            key_u, key_w = random.split(key)
            new = w + 2.4 / D**0.5 * random.normal(key_w, w.shape) @ root.T
            there = log_p(new)
            ok = jnp.log(random.uniform(key_u, at.shape)) < there - at
            return (jnp.where(ok[:, None], new, w), jnp.where(ok, there, at)), None

        start = draws, log_p(draws)
        return lax.scan(step, start, random.split(rng_key, moves))[0][0]

    found, moved = [], []
    for t, key in enumerate(random.split(random.fold_in(rng_key, 1), days)):
        log_w += log_lik(draws, x[t], y[t])
        w = jax.nn.softmax(log_w)
        if 1 / jnp.sum(w**2) < num / 2:
            key_resample, key_move = random.split(key)
            draws = draws[random.choice(key_resample, num, (num,), p=w)]
            draws = move(key_move, draws, x, y, (jnp.arange(days) <= t).astype(float))
            log_w, w = jnp.zeros(num), jnp.ones(num) / num
            moved.append(t)
        mean = w @ draws
        found.append((mean, jnp.sqrt(w @ (draws - mean) ** 2)))
    return found, moved


def by_nuts(rng_key, x, y, num_samples):
    """All rows so far, again from the start."""
    rows = x.reshape(-1, D), y.reshape(-1)
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=num_samples, progress_bar=False)
    mcmc.run(rng_key, *rows)
    w = mcmc.get_samples()["w"]
    return w.mean(0), w.std(0)


def unlabelled(x, y):
    """The prior, and the margin of each row."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.deterministic("margin", (2 * y - 1) * (x @ w))


def by_margin(x, y, strength=0.02, steps=3000):
    """Each day's largest distance of a mean from the exact one, and the range of the sds."""
    penalty = {"margin": lambda mean: strength * jax.nn.relu(1.0 - mean)}
    today, exact = unlabelled, np.zeros(D)
    for t in range(len(x)):
        loss = PosteriorRegularizedELBO(VRELBO(1.0, 8), penalty, 128)
        adam = optax.adam(optax.cosine_decay_schedule(0.02, steps))
        svi = SVI(today, AutoMultivariateNormal(today), adam, loss)
        result = svi.run(random.key(t), steps, x[t], y[t], progress_bar=False)
        today = posterior_as_prior(unlabelled, (svi, result))
        ((mean, sd),) = moments([normal_of(result.params)])
        # min |w - exact|^2 / 2 + strength sum hinge, by its dual: a box for each row.
        signed = np.asarray((2 * y[t] - 1)[:, None] * x[t], float)
        short = 1 - signed @ exact

        def dual(a, signed=signed, short=short):
            step = signed.T @ a
            return step @ step / 2 - a @ short, signed @ step - short

        box = [(0, strength)] * len(signed)
        a = minimize(dual, np.zeros(len(signed)), jac=True, bounds=box, tol=1e-12).x
        exact = exact + signed.T @ a
        off = np.max(np.abs(np.asarray(mean) - exact) / np.asarray(sd))
        print(
            f"day {t + 1}: worst mean {off:.3f} sd, sds {sd.min():.3f} to {sd.max():.3f}, exact 1"
        )
    return off


def moments(normals):
    return [(loc, jnp.linalg.norm(tril, axis=1)) for loc, tril in normals]


def forgetting(rng_key, x, y, shares):
    """Log density of tomorrow's rows for each share, and the normals."""
    found = {}
    for keep in shares:
        normals, _ = by_ep(rng_key, x, y, keep)
        scores = [
            density_of_tomorrow(
                loc + random.normal(random.key(9), (1000, D)) @ tril.T, x[t + 1], y[t + 1]
            )
            for t, (loc, tril) in enumerate(normals[:-1])
        ]
        found[keep] = np.array(scores), moments(normals)
    return found


def main(out, days, num_samples, seed):
    x, y, _ = stream(random.key(seed), days, 0.0)
    seconds, evenings = {}, {}
    a_day = {}
    for name, run, key in (("StochasticEP", by_ep, 1), ("SVI", by_svi, 6)):
        normals, of_days = run(random.key(key), x, y)
        evenings[name] = moments(normals)
        seconds[name] = of_days.sum()
        a_day[name] = f"{np.median(of_days[days // 2 :]):9.2f}"
    began = time.perf_counter()
    evenings["resampling"], moved = by_resampling(random.key(2), x, y)
    seconds["resampling"] = time.perf_counter() - began
    began = time.perf_counter()
    mean, sd = (np.asarray(a) for a in by_nuts(random.key(3), x, y, num_samples))
    seconds["NUTS, the last day"] = time.perf_counter() - began
    print(f"{days} days of {ROWS} rows; the draws were moved on {len(moved)} of them.")
    print("Seconds are those of all days, and the median of a day of the second half.\n")
    print(f"{'':20}{'worst mean':>12}{'sd ratio':>16}{'seconds':>9}{'a day':>9}")
    errors = {}
    for name, all_days in evenings.items():
        m, s = (np.asarray(a) for a in all_days[-1])
        errors[name] = np.max(np.abs(m - mean) / sd), s / sd
        low, high = errors[name][1].min(), errors[name][1].max()
        print(
            f"{name:20}{errors[name][0]:9.2f} sd{low:8.2f} to {high:.2f}{seconds[name]:9.1f}"
            + a_day.get(name, "")
        )
    print(f"{'NUTS, the last day':20}{'':28}{seconds['NUTS, the last day']:9.1f}")

    shares, drift = (1.0, 0.95, 0.8, 0.5), 0.15
    x_drift, y_drift, w_drift = stream(random.key(seed + 100), days, drift)
    tables = {
        "nothing drifts": forgetting(random.key(4), x, y, shares),
        f"a drift of {drift} a day": forgetting(random.key(5), x_drift, y_drift, shares),
    }
    print(f"\nlog density of a row of tomorrow, nats{'':7}" + "".join(f"{k:>9}" for k in shares))
    gains = {}
    for name, table in tables.items():
        base = table[1.0][0]
        print(f"{name:45}" + "".join(f"{table[k][0].mean():9.4f}" for k in shares))
        gains[name] = {k: (table[k][0] - base).mean() for k in shares}
        error = {k: (table[k][0] - base).std() / len(base) ** 0.5 for k in shares[1:]}
        print(
            f"{'  gained by forgetting':45}{'':9}"
            + "".join(f"{gains[name][k]:+9.4f}" for k in shares[1:])
        )
        print(f"{'  error of the gain':45}{'':9}" + "".join(f"{error[k]:9.4f}" for k in shares[1:]))

    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    day = np.arange(1, days + 1)
    for j, colour in ((0, "C0"), (1, "C1")):
        for name, style in (("StochasticEP", "-"), ("resampling", ":")):
            m, s = (np.array([one[k][j] for one in evenings[name]]) for k in (0, 1))
            left.plot(day, m, style, color=colour, label=f"{name}, weight {j + 1}")
            left.fill_between(day, m - 2 * s, m + 2 * s, color=colour, alpha=0.12, lw=0)
        left.errorbar(days + 0.7, mean[j], 2 * sd[j], fmt="ko", ms=4, capsize=3)
    left.plot([], [], "ko", ms=4, label="NUTS on all rows")
    left.set(xlabel="day", ylabel="weight", title="Nothing drifts: mean and two sds each evening")
    left.legend(fontsize=8, frameon=False)
    drifting = f"a drift of {drift} a day"
    table = tables[drifting]
    right.plot(day, w_drift[:, 0], "k.-", lw=1, label="weight 1 of the day")
    for keep, colour in ((1.0, "C3"), (0.5, "C2")):
        m, s = (np.array([one[k][0] for one in table[keep][1]]) for k in (0, 1))
        what = "all days alike" if keep == 1 else f"forgetting, {keep} of the precision kept"
        right.plot(day, m, color=colour, label=what)
        right.fill_between(day, m - 2 * s, m + 2 * s, color=colour, alpha=0.2, lw=0)
    right.set(xlabel="day", title="The weights drift")
    right.legend(fontsize=8, frameon=False)
    for ax in (left, right):
        ax.xaxis.get_major_locator().set_params(integer=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(out, dpi=120)

    right_answers = all(
        error < 0.2 and np.all(np.abs(ratio - 1) < 0.15) for error, ratio in errors.values()
    )
    return 0 if right_answers and gains[drifting][0.5] > 0 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--out", type=Path, default=Path("out/streaming_updates.png"))
    parser.add_argument("--days", type=int, default=20)
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--margin", action="store_true", help="margins in place of likelihoods")
    args = parser.parse_args()
    if args.margin:
        x, y, _ = stream(random.key(args.seed), 4, 0.0)
        sys.exit(0 if by_margin(x, y) < 0.2 else 1)
    sys.exit(main(args.out, args.days, args.num_samples, args.seed))
