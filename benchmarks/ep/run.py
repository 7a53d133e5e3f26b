"""Expectation propagation: what it reproduces, how it compares, and what it costs.

- `probit`: error and log likelihood on the test rows of the probit sets of Li et al. (2015), over
  their splits, mean and standard error. Features are standardised on the training rows, with an
  intercept, and the prior is N(0, 1). The index files are taken as they are, to compare with the
  published table; not all of their columns mean something (see the data's own README).
- `synthetic`: KL of the normal distribution with the moments of the posterior from q, for probit
  regression with 4 coefficients. The moments are those of importance sampling from EP's own q.
  In (a) the inputs are N(0, I), in (b) they come from 5 clusters, which are the parts of DSEP.
- `batches`: the same in (a), by minibatches of stochastic EP, and in 20 random parts by DSEP; with
  the moments of 40,000 draws of NUTS.
- `xor`: kernel probit regression on four clusters, the parts of DSEP; with `--flipped`, a share of
  the training rows has the other class.
- `digits`: probit regression of odd against even digits (8 x 8), which are the ten parts of DSEP.
- `parts`: logistic regression with 4 coefficients in 20 random parts, whose moments are found by
  NUTS; KL as in `synthetic`, from the moments of 40,000 draws of NUTS.
- `mixture`: the means of a mixture of four normal distributions (see `mixture.py`).
- `hierarchy`: regressions of 20 groups, which are the parts of DEP (see `hierarchy.py`).
- `compare`: EP, a normal guide by SVI, Laplace's approximation and NUTS on a regression and on the
  centred eight schools, of which NUTS samples the form that is not centred. Errors are in standard
  deviations of NUTS; seconds include compilation.
- `cost`: the time of a compiled parallel sweep and of a fit from nothing, logistic regression.

SEP is DSEP with one part. SEP and DSEP are averaged over the last half of their passes, unless it
says `last`.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import sys
import time
from typing import Any
import warnings

from fits import Moments, Table, fit, of_draws, of_params, passes
from hierarchy import run_hierarchy
import jax
from jax import Array, random
import jax.numpy as jnp
from jax.scipy.special import log_ndtr
from mixture import run_mixture
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoMultivariateNormal
from numpyro.infer.reparam import LocScaleReparam
import optax
from sklearn.datasets import load_digits

sys.path.append(str(Path(__file__).parents[1]))
from _shared.figures import figures

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import (
    ADF,
    DSEP,
    EP,
    DistributedEP,
    NUTSProjection,
    StochasticDistributedEP,
    StochasticEP,
)


def probit(X: Array, y: Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.factor("y", log_ndtr(y[idx] * (X[idx] @ w)))


def logistic(X: Array, y: Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=X[idx] @ w), obs=y[idx])


def eight_schools(y: Array, sd: Array) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]))
    with numpyro.plate("schools", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], sd[idx]), obs=y[idx])


def test_scores(q: Moments, X: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Error and mean log likelihood of a probit regression at new rows."""
    m, V = q
    z = X @ m / np.sqrt(1 + np.einsum("nd,de,ne->n", X, V, X))
    return float(np.mean(y * z <= 0)), float(jnp.mean(log_ndtr(y * z)))


def probit_split(folder: Path, k: int) -> tuple[np.ndarray, ...]:
    data = np.loadtxt(folder / "data.txt")
    features, target, train, test = (
        np.loadtxt(folder / f"index_{name}.txt", dtype=int, ndmin=1)
        for name in ("features", "target", f"train_{k}", f"test_{k}")
    )
    X, y = data[:, features], data[:, target].ravel()
    y = np.where(y == y.max(), 1.0, -1.0)
    mean, sd = X[train].mean(0), X[train].std(0)
    X = (X - mean) / np.where(sd > 0, sd, 1)
    X = np.concatenate([X, np.ones((len(X), 1))], 1)
    return X[train], y[train], X[test], y[test]


def run_probit(args: argparse.Namespace) -> None:
    published = figures("published")
    header = (
        "set",
        "method",
        "splits",
        "error",
        "log likelihood",
        "published",
        "log Z, split 0",
        "s",
    )
    rows = Table(*header)
    for name in args.sets:
        folder = args.data_dir / "probit" / name
        if not folder.exists():
            print(f"{folder} is not there; give --data-dir.")
            return
        found: dict[str, list[tuple[float, float]]] = {}
        took: dict[str, list[float]] = {"EP": [], "ADF": []}
        ep, adf = EP(probit, schedule="parallel"), ADF(probit)
        sep = DSEP(probit, 1)
        first = None
        for k in range(args.splits):
            X, y, X_test, y_test = probit_split(folder, k)
            data = jnp.asarray(X), jnp.asarray(y)
            fits = {}
            for method, engine, steps in (("EP", ep, 100), ("ADF", adf, 1)):
                began = time.perf_counter()
                result = fit(engine, steps, *data)
                fits[method] = of_params(result.params)
                took[method].append(time.perf_counter() - began)
                if method == "EP" and k == 0:
                    first = -float(result.losses[-1])
            if k < args.sep_splits:
                fits["SEP"], fits["SEP, last"] = passes(sep, 20 * len(y), *data)
            for method, q in fits.items():
                found.setdefault(method, []).append(test_scores(q, X_test, y_test))
        for method, scores in found.items():
            error, ll = np.mean(scores, 0)
            of = np.std(scores, 0, ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else [0, 0]
            rows.append(
                [
                    name,
                    method,
                    len(scores),
                    f"{error:.3f} +- {of[0]:.3f}",
                    f"{ll:.3f} +- {of[1]:.3f}",
                    published.get(f"{name} / {method}", ""),
                    f"{first:.3f}" if method == "EP" else "",
                    f"{np.median(took[method]):.2f}" if method in took else "",
                ]
            )


def kl(p: Moments, q: Moments) -> float:
    (m, V), (a, B) = p, q
    inner = np.trace(np.linalg.solve(B, V)) + (a - m) @ np.linalg.solve(B, a - m) - len(m)
    return float(inner + np.linalg.slogdet(B)[1] - np.linalg.slogdet(V)[1]) / 2


def exact_moments(q: Moments, X: Array, y: Array) -> Moments:
    """By 20,000 draws of q, with their weights."""
    m, V = q
    L = np.linalg.cholesky(V)
    z = np.asarray(random.normal(random.key(9), (20_000, len(m))))
    w = m + z @ L.T
    log_lik = jax.lax.map(lambda w: jnp.sum(log_ndtr(y * (X @ w))), jnp.asarray(w), batch_size=500)
    log_w = np.asarray(log_lik, float) - (w**2).sum(1) / 2 + (z**2).sum(1) / 2
    p = np.exp(log_w - log_w.max())
    p /= p.sum()
    mean = p @ w
    return mean, (w - mean).T @ (p[:, None] * (w - mean))


def synthetic(case: str, seed: int, N: int) -> tuple[Array, Array, np.ndarray]:
    """Inputs, classes and the labels of the clusters, which are five."""
    keys = random.split(random.key(seed), 5)
    theta = random.normal(keys[0], (4,))
    X, labels = random.normal(keys[1], (N, 4)), np.arange(N) % 5
    if case == "b":
        X = 2 * random.normal(keys[2], (5, 4))[labels] + 0.5 * X
    y = jnp.where(X @ theta + random.normal(keys[3], (N,)) > 0, 1.0, -1.0)
    return X, y, labels


def run_synthetic(args: argparse.Namespace) -> None:
    N = args.rows
    rows = Table("case", "key", "EP", "SEP", "SEP, last", "DSEP", "ADF, 10 passes")
    for case in ("a", "b"):
        for seed in range(args.repeats):
            X, y, labels = synthetic(case, seed, N)
            ep = of_params(fit(EP(probit, tol=1e-12), 5, X, y).params)
            exact = exact_moments(ep, X, y)
            sep, last = passes(DSEP(probit, 1), 20 * N, X, y)
            dsep, _ = passes(DSEP(probit, labels), 20 * N // 5, X, y)
            adf = of_params(fit(ADF(probit), 10, X, y).params)
            found = [kl(exact, q) for q in (ep, sep, last, dsep, adf)]
            rows.append([case, seed, *(f"{x:.4f}" for x in found)])


def run_batches(args: argparse.Namespace) -> None:
    N = args.rows
    rows = Table("method", "rows in a step", "steps", *(f"key {i}" for i in range(args.repeats)))
    parts = np.random.default_rng(0).permutation(np.arange(N) % 20)
    stochastic = {
        ("SEP", M): (StochasticEP(probit, batch_size=M), 20 * N // M) for M in (1, 10, 100, 1000)
    }
    engines = {**stochastic, ("DSEP, 20 random parts", 20): (DSEP(probit, parts), N)}
    sets = [synthetic("a", seed, N)[:2] for seed in range(args.repeats)]
    mcmc = MCMC(NUTS(probit), num_warmup=500, num_samples=40_000, progress_bar=False)
    exact = []
    for X, y in sets:
        mcmc.run(random.key(0), X, y)
        exact.append(of_draws(mcmc.get_samples()["w"]))

    def append(*head: Any, found: list[Moments]) -> None:
        rows.append([*head, *(f"{kl(p, q):.4f}" for p, q in zip(exact, found, strict=True))])

    ep = EP(probit, tol=1e-12)
    append("EP", "", 5, found=[of_params(fit(ep, 5, *data).params) for data in sets])
    append("ADF", "", 1, found=[of_params(fit(ADF(probit), 1, *data).params) for data in sets])
    for (name, M), (engine, steps) in engines.items():
        found = [passes(engine, steps, *data) for data in sets]
        append(name, M, f"{steps:,}", found=[mean for mean, _ in found])
        append(f"{name}, last", M, f"{steps:,}", found=[last for _, last in found])
    averaged = StochasticEP(probit, batch_size=N)
    append(
        "averaged EP", N, 200, found=[of_params(fit(averaged, 200, *data).params) for data in sets]
    )


def run_xor(args: argparse.Namespace) -> None:
    rows = Table("training rows", "method", "error", "log likelihood", "published")
    published = figures("published")
    centres = jnp.array([[3.0, 3], [-3, -3], [3, -3], [-3, 3]])
    for n in args.xor_sizes:
        found: dict[str, list[tuple[float, float]]] = {}
        labels, labels_test = np.repeat(np.arange(4), n), np.repeat(np.arange(4), 50)
        engines = DSEP(probit, 1), DSEP(probit, labels), EP(probit, schedule="parallel")
        for seed in range(args.repeats):
            keys = random.split(random.key(seed))
            x = centres[labels] + random.normal(keys[0], (4 * n, 2))
            x_test = centres[labels_test] + random.normal(keys[1], (200, 2))

            def features(points: Array, x: Array = x) -> Array:
                return jnp.exp(-jnp.sum((points[:, None] - x) ** 2, -1) / 2)

            flipped = random.bernoulli(random.key(seed + 1000), args.flipped, (4 * n,))
            X, y = features(x), jnp.where((labels < 2) ^ flipped, -1.0, 1.0)
            X_test, y_test = np.asarray(features(x_test)), np.where(labels_test < 2, -1.0, 1.0)
            sep, dsep, ep = engines
            fits = {
                "SEP": passes(sep, 20 * 4 * n, X, y)[0],
                "DSEP": passes(dsep, 20 * n, X, y)[0],
                "EP": of_params(fit(ep, 100, X, y).params),
            }
            for method, q in fits.items():
                found.setdefault(method, []).append(test_scores(q, X_test, y_test))
        for method, scores in found.items():
            error, ll = np.mean(scores, 0)
            paper = "" if args.flipped else published.get(f"{n} x 4 / {method}", "")
            rows.append([f"{n} x 4", method, f"{error:.4f}", f"{ll:.3f}", paper])


def run_digits(args: argparse.Namespace) -> None:
    """A part of DSEP is one digit, in which all rows have one class."""
    rows = Table("method", "error", "log likelihood", "from EP, nats", "seconds")
    images, labels = load_digits(return_X_y=True)
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(args.repeats):
        order = np.random.default_rng(seed).permutation(len(labels))
        x, digit = images[order] / 16, labels[order]
        X = np.concatenate([x - x.mean(0), np.ones((len(x), 1))], 1)
        y = np.where(digit % 2 == 1, 1.0, -1.0)
        data = jnp.asarray(X[:1200]), jnp.asarray(y[:1200])
        runs = {
            "EP": lambda data=data: of_params(
                fit(EP(probit, schedule="parallel"), 100, *data).params
            ),
            "DSEP, a part for each digit": lambda data=data, digit=digit: passes(
                DSEP(probit, digit[:1200]), 20 * 120, *data
            )[0],
            "SEP": lambda data=data: passes(DSEP(probit, 1), 20 * 1200, *data)[0],
        }
        ep = None
        for method, run in runs.items():
            began = time.perf_counter()
            q = run()
            seconds = time.perf_counter() - began
            ep = q if ep is None else ep
            scores = *test_scores(q, X[1200:], y[1200:]), kl(ep, q), seconds
            found.setdefault(method, []).append(scores)
    for method, scores in found.items():
        error, ll, apart, seconds = np.mean(scores, 0)
        rows.append([method, f"{error:.4f}", f"{ll:.4f}", f"{apart:.2f}", f"{seconds:.1f}"])


def run_parts(args: argparse.Namespace) -> None:
    rows = Table("method", "passes", "seconds", *(f"key {i}" for i in range(args.repeats)))
    N, J = args.rows, 20
    parts = np.random.default_rng(0).permutation(np.arange(N) % J)
    by_nuts = NUTSProjection(num_warmup=200, num_samples=args.part_draws)
    stochastic = partial(StochasticDistributedEP, logistic, parts, projection=by_nuts)
    engines = {
        "DEP": (DistributedEP(logistic, parts, projection=by_nuts), 8),
        "AEP": (stochastic(schedule="parallel"), 8),
        "SDEP": (stochastic(schedule="serial"), 8),
    }
    found: dict[str, list[float]] = {name: [] for name in ("NUTS, its two halves", "EP", *engines)}
    took = dict.fromkeys(found, 0.0)
    for seed in range(args.repeats):
        keys = random.split(random.key(seed), 3)
        X = random.normal(keys[0], (N, 4))
        y = random.bernoulli(keys[1], jax.nn.sigmoid(X @ random.normal(keys[2], (4,)))).astype(
            float
        )
        mcmc = MCMC(NUTS(logistic), num_warmup=500, num_samples=40_000, progress_bar=False)
        mcmc.run(random.key(0), X, y)
        draws = mcmc.get_samples()["w"]
        exact = of_draws(draws)
        found["NUTS, its two halves"].append(kl(*map(of_draws, np.split(np.asarray(draws), 2))))
        for name, (engine, steps) in {"EP": (EP(logistic), 8), **engines}.items():
            began = time.perf_counter()
            with warnings.catch_warnings():
                # Sites by NUTS do not settle below their noise.
                warnings.filterwarnings("ignore", ".*has not converged", InferenceWarning)
                q = of_params(fit(engine, steps, X, y).params)
            took[name] = time.perf_counter() - began
            found[name].append(kl(exact, q))
    for name, values in found.items():
        cells = ["", ""] if name.startswith("NUTS") else [8, f"{took[name]:.1f}"]
        rows.append([name, *cells, *(f"{x:.4f}" for x in values)])


SITES = ("w", "mu", "tau", "theta")


def run_compare(args: argparse.Namespace) -> None:
    keys = random.split(random.key(0), 3)
    X = random.normal(keys[0], (500, 10)) * jnp.linspace(0.5, 2, 10)
    y = random.bernoulli(keys[1], jax.nn.sigmoid(X @ jnp.linspace(-1, 1, 10))).astype(float)
    schools = (
        jnp.array([28.0, 8, -3, 7, -1, 1, 18, 12]),
        jnp.array([15.0, 10, 16, 11, 9, 11, 10, 18]),
    )
    rows = Table("model", "method", "largest mean error", "sd ratio", "seconds")
    for name, model, data in (
        ("logistic, 500 x 10", logistic, (X, y)),
        ("eight schools, centred", eight_schools, schools),
    ):
        draws: dict[str, dict[str, Array]] = {}
        seconds: dict[str, float] = {}

        def timed(
            method: str, make: Callable[[], dict[str, Array]], into: Any = draws, t: Any = seconds
        ) -> None:
            start = time.perf_counter()
            into[method] = jax.block_until_ready(make())
            t[method] = time.perf_counter() - start

        def nuts(model: Any = model, data: Any = data) -> dict[str, Array]:
            # Centred chains hardly enter the neck of the funnel: log tau would come out too narrow.
            kernel = NUTS(reparam(model, {"theta": LocScaleReparam(0)}), target_accept_prob=0.95)
            mcmc = MCMC(kernel, num_warmup=1000, num_samples=args.draws, progress_bar=False)
            mcmc.run(random.key(1), *data)
            return {name: x for name, x in mcmc.get_samples().items() if name in SITES}

        def by_ep(model: Any = model, data: Any = data) -> dict[str, Array]:
            ep = EP(model, schedule="parallel")
            params = fit(ep, 100, *data).params
            return ep.guide.sample_posterior(random.key(2), params, sample_shape=(20_000,))

        def by_svi(guide: Any, model: Any = model, data: Any = data) -> dict[str, Array]:
            rate = optax.cosine_decay_schedule(1e-2, 5000)
            svi = SVI(model, guide, optax.adam(rate), Trace_ELBO(10))
            params = svi.run(random.key(3), 5000, *data, progress_bar=False).params
            return guide.sample_posterior(random.key(4), params, sample_shape=(20_000,))

        timed("NUTS", nuts)
        timed("EP", by_ep)
        timed("SVI, AutoMultivariateNormal", lambda f=by_svi, m=model: f(AutoMultivariateNormal(m)))
        timed("Laplace", lambda f=by_svi, m=model: f(AutoLaplaceApproximation(m)))

        def moments(found: dict[str, Array]) -> tuple[np.ndarray, np.ndarray]:
            flat = []
            for site in sorted(found):
                values = np.asarray(found[site], float).reshape(len(found[site]), -1)
                flat.append(np.log(values) if site == "tau" else values)
            x = np.concatenate(flat, 1)
            return x.mean(0), x.std(0)

        m, sd = moments(draws["NUTS"])
        for method in ("EP", "SVI, AutoMultivariateNormal", "Laplace", "NUTS"):
            a, b = moments(draws[method])
            ratio = b / sd
            rows.append(
                [
                    name,
                    method,
                    f"{np.max(np.abs(a - m) / sd):.2f} sd",
                    f"{ratio.min():.2f} to {ratio.max():.2f}",
                    f"{seconds[method]:.1f}",
                ]
            )


def robust(X: Array, y: Array) -> None:
    """Rows of rank 2: a direction of w, and the scale."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(X)) as idx:
        numpyro.sample("y", dist.StudentT(4, X[idx] @ w, scale), obs=y[idx])


def run_cost(args: argparse.Namespace) -> None:
    header = "N", "s per sweep", "us per row", "sweeps", "s in all", "bytes of sites per row"
    rows = Table("model", *header)
    for model, name in ((logistic, "logistic"), (robust, "Student's t")):
        for N in args.sizes:
            keys = random.split(random.key(N), 2)
            X = random.normal(keys[0], (N, 20))
            f = X @ jnp.linspace(-1, 1, 20)
            if model is logistic:
                y = random.bernoulli(keys[1], jax.nn.sigmoid(f)).astype(float)
            else:
                y = f + 0.5 * random.t(keys[1], 4, (N,))
            rows.append([name, *_cost(model, X, y)])


def _cost(model: Callable[..., None], X: Array, y: Array) -> list[Any]:
    ep, N = EP(model, schedule="parallel"), len(X)
    start = time.perf_counter()
    result = fit(ep, 100, X, y)
    total = time.perf_counter() - start
    state = result.state
    sweeps = []
    for _ in range(5):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(ep.update(state, X, y))
        sweeps.append(time.perf_counter() - start)
    numbers = [*jax.tree.leaves(state.sites), *(g.basis for g in state.table.groups)]
    size = sum(x.nbytes for x in numbers) / N
    cells = [f"{min(sweeps):.3f}", f"{1e6 * min(sweeps) / N:.1f}", len(result.losses)]
    return [N, *cells, f"{total:.1f}", f"{size:.0f}"]


PARTS = {
    "probit": run_probit,
    "synthetic": run_synthetic,
    "batches": run_batches,
    "xor": run_xor,
    "digits": run_digits,
    "parts": run_parts,
    "mixture": run_mixture,
    "hierarchy": run_hierarchy,
    "compare": run_compare,
    "cost": run_cost,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, help="one part; all of them by default")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    sets = ["crabs", "sonar", "breast", "australian"]
    parser.add_argument("--sets", nargs="*", default=sets, help="probit sets")
    parser.add_argument("--splits", type=int, default=20, help="splits of a probit set")
    parser.add_argument("--sep-splits", type=int, default=3, help="those on which SEP is run too")
    parser.add_argument("--rows", type=int, default=5000, help="rows of the synthetic sets")
    parser.add_argument("--repeats", type=int, default=3, help="random sets, synthetic and xor")
    parser.add_argument("--xor-sizes", type=int, nargs="*", default=[10, 20])
    parser.add_argument("--flipped", type=float, default=0.0, help="share of labels, xor")
    parser.add_argument("--draws", type=int, default=4000, help="draws of NUTS")
    parser.add_argument("--part-draws", type=int, default=2000, help="of NUTS in a part of DEP")
    parser.add_argument("--sizes", type=int, nargs="*", default=[5_000, 10_000, 20_000, 40_000])
    arguments = parser.parse_args()
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            print(f"## {name}\n")
            part(arguments)
