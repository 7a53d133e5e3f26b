"""What the libraries beneath this package give, what is right, and what the package gives.

python benchmarks/libraries/run.py    # the table of docs/libraries_beneath.md, in a minute
"""

from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, cast

import arviz as az
import arviz_base
import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
from numpyro.infer import SVI, RenyiELBO, Trace_ELBO, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDAIS, AutoMultivariateNormal
from numpyro.infer.util import potential_energy
import optax
from scipy import special, stats

from numpyro_ext._model.exact import exact
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.data import HostArray
from numpyro_ext.guides import AutoLangevinDiffusion
from numpyro_ext.objectives import IWELBO, VIMCO

Row = tuple[str, Any, Any, Any]
N, B = 40, 4


def special_functions() -> Iterator[Row]:
    for a, x in ((1e6, 1.001e6), (1e7, 1e7)):
        ours = exact(dist.Gamma(a, 1.0)).cdf(x)
        there = jax.scipy.special.gammainc(a, x)
        yield f"`gammainc({a:.0e}, {x:.4g})`", there, special.gammainc(a, x), ours
    there = jax.scipy.special.betainc(1e5, 1e5, 0.499)
    right = special.betainc(1e5, 1e5, np.float32(0.499))
    yield "`betainc(1e5, 1e5, 0.499)`", there, right, exact(dist.Beta(1e5, 1e5)).cdf(0.499)


def draws_of_counts() -> Iterator[Row]:
    for name, fn in (("Poisson(1e8)", dist.Poisson(1e8)), ("Binomial", dist.Binomial(10**8, 0.3))):
        both = (np.asarray(d.sample(random.key(0), (20_000,)), float) for d in (fn, exact(fn)))
        there, ours = (x.var() / float(fn.variance) for x in both)
        yield f"variance of `{name}`, of its own", there, 1.0, ours


def densities() -> Iterator[Row]:
    of_counts, normal = dist.NegativeBinomial2(5.0, 1e8), dist.StudentT(1e8)
    right = stats.poisson.logpmf(3, 5)
    yield (
        "`NegativeBinomial2(5, 1e8).log_prob(3)`",
        of_counts.log_prob(3),
        right,
        exact(of_counts).log_prob(3),
    )
    right = stats.norm.logpdf(0)
    yield "`StudentT(1e8).log_prob(0)`", normal.log_prob(0.0), right, exact(normal).log_prob(0.0)


def a_scale_of_a_sum() -> Iterator[Row]:
    """Ten copies of a row of two kinds."""

    def model(x: Any) -> None:
        loc = numpyro.sample("loc", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 1), scale(scale=10.0):
            k = numpyro.sample("k", dist.Bernoulli(0.35), infer={"enumerate": "parallel"})
            numpyro.sample("x", dist.Normal(loc + 2.5 * k, 1.0), obs=x)

    from numpyro.contrib.funsor import enum

    x, z = jnp.array([1.0]), {"loc": jnp.array(0.4)}
    prior = dist.Normal(0.0, 1.0).log_prob(0.4)
    seeded = numpyro.handlers.seed(model, 0)
    there = -potential_energy(enum(seeded, -2), (x,), {}, z, enum=True) - prior
    each = dist.Normal(jnp.array([0.4, 2.9]), 1.0).log_prob(1.0)
    right = 10 * special.logsumexp(np.log([0.65, 0.35]) + np.asarray(each))
    ours = -Potential(model, read_model(model, (x,), sums=True), {}, (x,), {})(z, {}) - prior
    yield "ten copies of a row of two kinds, by `handlers.scale`, in `NUTS`", there, right, ours


def a_scale_in_a_bound() -> Iterator[Row]:
    """Fifty rows with a latent number each, ten times: a bound is at least minus their evidence."""
    x = jnp.linspace(-2.0, 3.0, 50)

    def model(x: Any) -> None:
        with numpyro.plate("rows", 50), scale(scale=10.0):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x)

    def guide(x: Any) -> None:
        with numpyro.plate("rows", 50), scale(scale=10.0):
            numpyro.sample("z", dist.Normal(0.0, 1.0))

    right = -10 * float(dist.Normal(0.0, 2**0.5).log_prob(x).sum())
    there, ours = (
        loss.loss(random.key(0), {}, model, guide, x) for loss in (RenyiELBO(0.0, 100), IWELBO(100))
    )
    yield "`RenyiELBO(0)` of ten copies of 50 rows, at least", there, right, ours


def gradient_of_a_minibatch() -> Iterator[Row]:
    """Of the ELBO, of rows that are all the same."""
    x = jnp.full(N, 0.7)

    def model(x: Any) -> None:
        with numpyro.plate("rows", N, subsample_size=B) as i:
            k = numpyro.sample("k", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(1.5 * k, 1.0), obs=x[i])

    def guide(x: Any) -> None:
        logit = numpyro.param("logit", 0.4)
        with numpyro.plate("rows", N, subsample_size=B):
            numpyro.sample("k", dist.Bernoulli(logits=logit))

    def exact_loss(logit: Any) -> Any:
        q = jax.nn.sigmoid(jnp.array([-1.0, 1.0]) * logit)
        log_p = jnp.log(jnp.array([0.7, 0.3])) + dist.Normal(jnp.array([0.0, 1.5])).log_prob(0.7)
        return -N * jnp.sum(q * (log_p - jnp.log(q)))

    def mean(loss: Any) -> Any:
        def one(key: Any) -> Any:
            return jax.grad(lambda p: loss.loss(key, {"logit": p}, model, guide, x))(0.4)

        return jnp.mean(jax.jit(jax.vmap(one))(random.split(random.key(0), 20_000)))

    there, ours = mean(TraceGraph_ELBO()), mean(VIMCO(1.0, 2))
    yield (
        f"gradient of `TraceGraph_ELBO` on {B} of {N} rows",
        there,
        jax.grad(exact_loss)(0.4),
        ours,
    )


def small_concentrations() -> Iterator[Row]:
    keys = random.split(random.key(0), 20_000)
    grads = jax.vmap(jax.grad(random.loggamma, 1), (0, None))(keys, 0.01)
    right = special.polygamma(1, 0.01)
    yield "mean gradient of a log gamma draw of concentration 0.01", grads.mean(), right, "said"
    share = np.mean(np.asarray(random.beta(random.key(0), 0.1, 0.1, (20_000,))) == 1)
    yield "share of `random.beta(key, 0.1, 0.1)` that is 1", share, 0.0, "NumPyro clips"
    zeros = np.mean(np.asarray(dist.Gamma(0.01).sample(random.key(0), (20_000,))) == 0)
    yield "share of `Gamma(0.01)` that is 0", zeros, 0.0, "refused"


def rows_by_weights() -> Iterator[Row]:
    """Ten million rows of equal weight, looked up by each of the 2^23 numbers that may be drawn."""
    n = 10**7
    total = jnp.cumsum(jnp.full(n, 1 / n))
    rows = jnp.searchsorted(total, total[-1] * (1 - jnp.arange(2**23) / 2**23))
    reached = jnp.zeros(n, bool).at[rows].set(True)
    there = jnp.mean(reached.astype(jnp.float32))
    yield "share of 10^7 rows that `random.choice(p=...)` can draw", there, 1.0, "no weights"


def reads() -> Iterator[Row]:
    """Five steps of a loop whose rows do not depend on the step, and five whose rows do."""
    calls = []

    def read(i: Any) -> np.ndarray:
        calls.append(i)
        return np.ones((), np.float32)

    shape = jax.ShapeDtypeStruct((), jnp.float32)
    call = partial(jax.pure_callback, read, shape)
    for what, index, here in (
        ("the same rows", lambda i, j: j, "documented"),
        ("other rows", lambda i, j: i + j, "as there"),
    ):

        def run(j: Any, index: Any = index) -> Any:
            return lax.fori_loop(0, 5, lambda i, s: s + call(index(i, j)), 0.0)

        calls.clear()
        jax.block_until_ready(jax.jit(run)(0))
        yield f"reads by a `pure_callback` of {what} in 5 steps", len(calls), 5, here
    try:
        there = jnp.asarray(np.ones(2, ">f4"))
    except Exception as error:
        there = type(error).__name__
    yield "`jnp.asarray` of bytes in the other order", there, 1.0, HostArray(np.ones(2, ">f4"))[0]


def loo() -> Iterator[Row]:
    log_lik = np.random.default_rng(0).normal(size=(4, 100, 3))
    log_lik[..., 1] = 0.0
    tree = arviz_base.from_dict(
        {"posterior": {"z": log_lik[..., 0]}, "log_likelihood": {"y": log_lik}}
    )
    try:
        there = float(cast(Any, az.loo(tree)).elpd)
    except ValueError as error:
        there = f"ValueError: {error}"
    yield "`loo` with a masked row", there, "a number", "left out"


def a_second_fit() -> Iterator[Row]:
    """Two columns of correlation -.95, after a fit of the same guide on columns of +.95."""

    def model(x: Any, y: Any) -> None:
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ b, 1).to_event(1), obs=y)

    def data(rho: float, seed: int) -> tuple[Any, Any]:
        of_x, of_y = random.split(random.key(seed))
        e = random.normal(of_x, (50, 2))
        x = jnp.stack([e[:, 0], rho * e[:, 0] + (1 - rho**2) ** 0.5 * e[:, 1]], 1)
        return x, x @ jnp.array([1.0, -1.0]) + random.normal(of_y, (50,))

    def correlation(guide: Any) -> Any:
        svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO(8))
        first, second = data(0.95, 0), data(-0.95, 1)
        svi.run(random.key(0), 10, *first, progress_bar=False)
        params = svi.run(random.key(0), 4000, *second, progress_bar=False).params
        b = guide.sample_posterior(random.key(1), params, *second, sample_shape=(4000,))["b"]
        return jnp.corrcoef(b.T)[0, 1]

    x, _ = data(-0.95, 1)
    cov = jnp.linalg.inv(x.T @ x + jnp.eye(2))
    right = cov[0, 1] / (cov[0, 0] * cov[1, 1]) ** 0.5
    ours = correlation(AutoLangevinDiffusion(model, num_steps=8, init_from=None))
    yield (
        "correlation by `AutoDAIS` in its second fit",
        correlation(AutoDAIS(model, K=8)),
        right,
        ours,
    )


def bounds_of_the_first_data() -> Iterator[Row]:
    """A shift of 50 times, at most the least of them: a second fit of one guide, to times from 5
    on, after a fit to times from 2 on."""

    def model(y):
        shift = numpyro.sample("shift", dist.Uniform(0.0, y.min()))
        numpyro.sample("y", dist.Exponential(1.0), obs=y - shift)

    times = np.random.default_rng(0).exponential(size=50)
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    for y in (2 + times, 5 + times):
        params = svi.run(random.key(0), 3000, y, progress_bar=False).params
    there = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))["shift"].mean()
    # The density is proportional to exp(50 shift) below the least datum.
    right = (5 + times).min() - 1 / 50
    yield "mean of a shift below the least datum, in the second fit", there, right, "refused"


def shown(x: Any) -> str:
    return x if isinstance(x, str) else f"{float(x):.3g}"


def main() -> None:
    print(f"NumPyro {numpyro.__version__}, JAX {jax.__version__}, ", end="")
    print(f"arviz-stats {version('arviz-stats')}, single precision, CPU\n")
    print("| | there | right | here |\n|---|---|---|---|")
    groups = (
        special_functions,
        draws_of_counts,
        densities,
        a_scale_of_a_sum,
        a_scale_in_a_bound,
        gradient_of_a_minibatch,
        small_concentrations,
        rows_by_weights,
        reads,
        loo,
        a_second_fit,
        bounds_of_the_first_data,
    )
    for group in groups:
        for what, *values in group():
            print(f"| {what} | {' | '.join(map(shown, values))} |", flush=True)


if __name__ == "__main__":
    main()
