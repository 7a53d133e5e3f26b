"""How long until a posterior of many rows is right?

Right: the means are within 0.05 standard deviations and the standard deviations within 5 % of the
exact ones, in unconstrained space, for every coordinate. Each line is a regression, a number of
rows and a method, by its best rate:

* SVI with a full-covariance normal, four particles unless the loss says otherwise, Adam, and 256
  rows a step. The steps are the fewest of ``BUDGETS`` after which the fit is right. ``Trace_ELBO``
  is tried with constant and with falling rates, the others with falling ones; from NumPyro's
  default start or, where the line says so, from the mode with the covariance there. ``whitened``
  is Adam in the units of that start.
* MCMC, in pieces of 500 draws until the draws so far are right; NUTS on all rows from the mode.
* ``EP``, in sweeps over all rows until it says that it has converged, at 100,000 rows at most.

Seconds are those of one process from its data to the result, with the search for the mode where the
method needs it, and with compilation. Published numbers and commands: README.md.

``--steps`` times a step of ``VRELBO(1.)`` with the proxy alone, at 10,000 to 1,000,000 rows in
turns, and what of it is the reading of 256 rows at random from all of them.
"""

import argparse
from functools import partial
import time
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.util import potential_energy
import optax

from numpyro_ext.ep import EP
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import IWELBO, VRELBO, taylor_proxy
from numpyro_ext.optim import whitened

BUDGETS = (250, 1_000, 4_000, 16_000, 64_000)
RATES = (0.01, 0.003)
PIECE = 500
COLUMNS = {
    "logistic": np.geomspace(0.1, 10.0, 8),
    "Student": np.ones(4),
    "Poisson": np.array([1.0, 10.0, 100.0, 300.0]),
}


def data_of(name, rows):
    """Columns and outcomes; the Poisson regression has raw columns with means, and an intercept."""
    rng, scales = np.random.default_rng(0), COLUMNS[name]
    d = len(scales)
    x = rng.standard_normal((rows, d)) @ np.linalg.cholesky(0.5 * np.eye(d) + 0.5).T
    w = rng.standard_normal(d) / scales / d**0.5
    if name == "Poisson":
        x, w = np.column_stack([np.ones(rows), (1 + x) * scales]), np.append(0.5, 0.3 * w)
    else:
        x = x * scales
    eta = x @ w
    if name == "logistic":
        y = rng.random(rows) < 1 / (1 + np.exp(-eta))
    elif name == "Student":
        y = eta + 0.7 * rng.standard_t(4, rows)
    else:
        y = rng.poisson(np.exp(eta))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def model_of(name):
    def model(x, y, batch=256):
        w = numpyro.sample("w", dist.Normal(0.0, 10.0).expand([x.shape[1]]).to_event(1))
        scale = numpyro.sample("z", dist.HalfNormal(2.0)) if name == "Student" else 1.0
        with numpyro.plate("rows", len(x), subsample_size=batch) as i:
            eta = x[i] @ w
            if name == "logistic":
                row = dist.Bernoulli(logits=eta)
            elif name == "Student":
                row = dist.StudentT(4.0, eta, scale)
            else:
                row = dist.Poisson(jnp.exp(eta))
            numpyro.sample("y", row, obs=y[i])

    return model


def exact(model, data, proxy, num=2000):
    """Means and sds by importance sampling around the mode, in double precision. The normal
    approximation's own moments are known, so the error is that of the weights alone."""
    d = proxy.normal.center.size
    half = np.random.default_rng(1).standard_normal((num // 2, d))
    xi = np.concatenate([half, -half])
    loc, root = (
        np.asarray(proxy.normal.center, np.float64),
        np.asarray(proxy.normal.factor, np.float64),
    )
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in data]

        @jax.jit
        def energies(points):
            def at(t):
                return potential_energy(model, wide, {"batch": None}, proxy.unravel(t))

            return lax.map(at, points)

        log_w = -np.asarray(energies(jnp.asarray(loc + xi @ root.T))) + np.sum(xi**2, 1) / 2
    w = np.exp(log_w - log_w.max())
    w = w / w.mean() - 1
    mean = w @ xi / num
    second = np.eye(d) + (w[:, None] * xi).T @ xi / num
    cov = root @ (second - np.outer(mean, mean)) @ root.T
    return loc + root @ mean, np.sqrt(np.diag(cov))


def is_right(mean, sd, truth):
    shift, ratio = np.abs(mean - truth[0]) / truth[1], sd / truth[1]
    return bool(np.max(shift) < 0.05 and np.max(np.abs(ratio - 1)) < 0.05)


def by_svi(model, data, truth, budgets, loss, start, schedules, units=False):
    """``(steps, seconds, seconds per step)`` of the best rate; no steps if it was never right."""
    began = time.perf_counter()
    # NumPyro's guides look for a start of their own, which most raw columns do not have.
    at = {"init_loc_fn": init_to_value(values=start.center)} if start else {}
    guide = AutoMultivariateNormal(model, **at)

    def optimiser(rate, steps, falls):
        fall = lambda i: 0.5 * (1 + jnp.cos(jnp.pi * i / steps))  # noqa: E731
        adam = optax.adam(lambda i: rate * jnp.where(falls, fall(i), 1.0))
        return whitened(adam, init) if units else adam

    init = start.init_params(guide) if start else None
    first = SVI(model, guide, optimiser(1.0, 1, True), loss)
    try:
        state = first.init(random.key(1), *data, init_params=init)
    except (RuntimeError, ValueError):  # no start at which the density is finite
        return None, np.nan, np.nan

    @jax.jit
    def train(state, rate, steps, falls, data):
        svi = SVI(model, guide, optimiser(rate, steps, falls), loss)
        svi.constrain_fn = first.constrain_fn
        state = lax.fori_loop(0, steps, lambda _, s: svi.update(s, *data)[0], state)
        return svi.get_params(state)

    jax.block_until_ready(train(state, 0.0, 1, True, data))
    compiled = time.perf_counter() - began
    seconds = np.inf
    for steps in budgets:
        for rate in RATES:
            for falls in schedules:
                began = time.perf_counter()
                params = jax.block_until_ready(train(state, rate, steps, falls, data))
                seconds = time.perf_counter() - began
                if not all(np.all(np.isfinite(x)) for x in params.values()):
                    continue
                q = guide.get_posterior(params)
                sd = np.sqrt(np.diag(np.asarray(q.covariance_matrix)))
                if is_right(np.asarray(q.mean), sd, truth):
                    return steps, compiled + seconds, seconds / steps
    return None, compiled + seconds, seconds / steps


def by_mcmc(model, data, truth, kernel, kwargs, warmup, limit):
    """``(draws, seconds, seconds per draw)``; no draws if it was not right before the limit."""
    began = time.perf_counter()
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=PIECE, progress_bar=False)
    kept = []
    while time.perf_counter() - began < limit:
        if kept:
            mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(random.key(1 + len(kept)), *data, **kwargs)
        sites = mcmc.get_samples()
        z = [np.log(sites["z"])[:, None]] if "z" in sites else []
        kept.append(np.concatenate([sites["w"], *z], 1).astype(np.float64))
        draws = np.concatenate(kept)
        seconds = time.perf_counter() - began
        if is_right(draws.mean(0), draws.std(0), truth):
            return len(draws), seconds, seconds / len(draws)
    return None, time.perf_counter() - began, np.nan


def by_ep(model, data, truth):
    """``(sweeps, seconds, seconds per sweep)``."""
    began = time.perf_counter()
    ep = EP(model)
    fit = ep.run(random.key(1), 50, *data, batch=None, progress_bar=False)
    q = jax.device_get(ep.guide.get_posterior(fit.params))
    seconds, sweeps = time.perf_counter() - began, len(fit.losses)
    right = is_right(q.mean, np.sqrt(np.diag(q.covariance_matrix)), truth)
    return sweeps if right else None, seconds, seconds / sweeps


def lines_of(name, rows, only, limit, most):
    """The lines of the table of one regression on so many rows."""
    model, data = model_of(name), jax.block_until_ready(data_of(name, rows))
    began = time.perf_counter()
    proxy = jax.block_until_ready(taylor_proxy(model, *data))
    search = time.perf_counter() - began
    truth = exact(model, data, proxy)
    numbers = sum(np.size(leaf) for leaf in jax.tree.leaves(proxy))
    print(f"\n{name}, {rows:,} rows: the proxy took {search:.1f} s and holds {numbers} numbers.\n")
    mode, falling, both = proxy, (True,), (True, False)
    svi = partial(by_svi, model, data, truth, [steps for steps in BUDGETS if steps <= most])
    # At the posterior the noise of a path gradient is that of the minibatch alone, which is gone.
    ours = {
        "VRELBO(1.)": VRELBO(1.0, 4, gradient="stl", proxy=proxy),
        "VRELBO(0.5)": VRELBO(0.5, 4, gradient="dreg", proxy=proxy),
        "VRELBO(0.)": VRELBO(0.0, 4, gradient="dreg", proxy=proxy),
        "IWELBO(10)": IWELBO(10, gradient="dreg", proxy=proxy),
    }
    methods = {
        "Trace_ELBO": lambda: svi(Trace_ELBO(4), None, both),
        "Trace_ELBO, from the mode": lambda: svi(Trace_ELBO(4), mode, both),
        "Trace_ELBO, whitened from the mode": lambda: svi(Trace_ELBO(4), mode, both, units=True),
        "VRELBO(1.) with the proxy, default start": lambda: svi(ours["VRELBO(1.)"], None, falling),
    }
    for title, loss in ours.items():
        line = partial(svi, loss, mode, falling)
        methods[f"{title} with the proxy, from the mode"] = line
        methods[f"{title} with the proxy, whitened from the mode"] = partial(line, units=True)
    methods["SGHMC, settings found"] = lambda: by_mcmc(
        model, data, truth, SGHMC(model, steps_per_sample=10), {}, 100, limit
    )
    near = init_to_value(values=proxy.center)
    methods["NUTS, from the mode"] = lambda: by_mcmc(
        model, data, truth, NUTS(model, init_strategy=near), {"batch": None}, 500, limit
    )
    if rows <= 100_000:
        methods["EP"] = lambda: by_ep(model, data, truth)
    print("| method | steps, draws or sweeps | seconds | ms each |\n|---|---|---|---|", flush=True)
    for title, method in methods.items():
        if only and not any(word in title for word in only):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            steps, seconds, each = method()
        if "proxy" in title or "mode" in title:
            seconds += search
        reached = f"{steps:,}" if steps else "not right"
        took = "-" if np.isnan(seconds) else f"{seconds:.1f}" if steps else f"({seconds:.0f})"
        print(f"| {title} | {reached} | {took} | {1000 * each:.3g} |", flush=True)


def step_times(name, all_rows=(10_000, 100_000, 1_000_000), steps=2_000, repeats=9):
    """A line of microseconds for each number of rows, the shortest of the repeats."""
    model, runs = model_of(name), {}
    for rows in all_rows:
        data = data_of(name, rows)
        proxy = taylor_proxy(model, *data)
        guide = AutoMultivariateNormal(model, init_loc_fn=init_to_value(values=proxy.center))
        svi = SVI(model, guide, optax.adam(1e-4), VRELBO(1.0, 4, gradient="stl", proxy=proxy))
        state = svi.init(random.key(1), *data, init_params=proxy.init_params(guide, *data))

        def train(state, data, svi=svi):
            return lax.fori_loop(0, steps, lambda _, s: svi.update(s, *data)[0], state)

        def gather(data, rows=rows):
            """The rows of as many batches, and nothing else."""

            def one(i, total):
                at = random.randint(random.fold_in(random.key(0), i), (256,), 0, rows)
                return total + sum(jnp.sum(x[at]) for x in data)

            return lax.fori_loop(0, steps, one, 0.0)

        runs[rows] = partial(jax.jit(train), state, data), partial(jax.jit(gather), data)
    times = {rows: [[], []] for rows in all_rows}
    for turn in range(repeats + 1):
        for rows, both in runs.items():
            for kept, run in zip(times[rows], both, strict=True):
                began = time.perf_counter()
                jax.block_until_ready(run())
                kept += [1e6 * (time.perf_counter() - began) / steps] if turn else []
    for rows, (whole, reading) in times.items():
        print(f"| {name} | {rows:,} | {min(whole):.1f} | {min(reading):.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--models", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--only", nargs="+", help="methods that hold one of these words")
    parser.add_argument("--most", type=int, default=16_000, help="steps of SVI")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a line of MCMC")
    parser.add_argument("--steps", action="store_true", help="times of a step alone")
    args = parser.parse_args()
    if args.steps:
        print("| model | rows | microseconds of a step | of reading its rows |\n|---|---|---|---|")
        for name in args.models:
            step_times(name)
        return
    for name in args.models:
        for rows in args.rows:
            lines_of(name, rows, args.only, args.limit, args.most)


if __name__ == "__main__":
    main()
