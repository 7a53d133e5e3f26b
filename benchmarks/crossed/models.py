"""Small models, each with one thing that a program rarely has, and a name for it.

All have rows in a plate that takes a minibatch where ``batch`` is given, so that engines, kernels,
guides and particles take all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.reparam import LocScaleReparam

Model = Callable[..., None]


class Crossed(NamedTuple):
    model: Model
    data: tuple[Any, ...]
    compared: tuple[str, ...]
    """Sites that say whether an answer is right."""
    same: tuple[Model, tuple[Any, ...]] | None = None
    """The same posterior without latent sites in the rows, for the truth and what needs it."""
    batch: int | None = 20
    truth: tuple[Model, tuple[Any, ...]] | None = None
    """What NUTS runs on, where its chains do not agree on the others."""


def rows(size: int, batch: int | None = None, name: str = "rows") -> Any:
    return numpyro.plate(name, size, subsample_size=batch)


def slopes(scale: float = 2.0, size: int = 2, name: str = "w") -> Any:
    return numpyro.sample(name, dist.Normal(0, scale).expand([size]).to_event(1))


def design(n: int, seed: int = 0, d: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, d)) * np.array([1.0, 3.0])[:d] + 0.5


def vector_local() -> Crossed:
    """Two unknown numbers in each row."""
    rng = np.random.default_rng(1)
    y = np.array([1.0, -2.0]) + rng.normal(size=(40, 2)) @ np.array([[0.8, 0.3], [0.0, 1.0]])

    def model(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
        with rows(len(y), batch) as i:
            z = numpyro.sample("z", dist.Normal(mean, 1).to_event(1))
            numpyro.sample("y", dist.Normal(z, 0.5).to_event(1), obs=y[i])

    def same(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 3).expand([2]).to_event(1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, 1.25**0.5).to_event(1), obs=y[i])

    return Crossed(model, (y,), ("mean",), (same, (y,)))


def categorical_local() -> Crossed:
    """A label of three in each row."""
    rng = np.random.default_rng(2)
    y = np.array([-3.0, 0.0, 4.0])[rng.choice(3, 60, p=[0.2, 0.5, 0.3])] + rng.normal(size=60)
    offsets, shares = jnp.array([-3.0, 0.0, 4.0]), jnp.array([0.2, 0.5, 0.3])

    def model(y: Any, batch: int | None = None) -> None:
        shift = numpyro.sample("shift", dist.Normal(0, 3))
        with rows(len(y), batch) as i:
            k = numpyro.sample("k", dist.Categorical(shares), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(shift + offsets[k], 1), obs=y[i])

    def same(y: Any, batch: int | None = None) -> None:
        shift = numpyro.sample("shift", dist.Normal(0, 3))
        parts = dist.MixtureSameFamily(
            dist.Categorical(shares), dist.Normal(shift + offsets, jnp.ones(3))
        )
        with rows(len(y), batch) as i:
            numpyro.sample("y", parts, obs=y[i])

    return Crossed(model, (y,), ("shift",), (same, (y,)))


def positive_local() -> Crossed:
    """A rate of its own in each row, which is positive."""
    y = np.random.default_rng(3).negative_binomial(3, 0.3, 50)

    def model(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.LogNormal(1, 1))
        with rows(len(y), batch) as i:
            rate = numpyro.sample("rate", dist.Gamma(3.0, 3.0 / mean))
            numpyro.sample("y", dist.Poisson(rate), obs=y[i])

    def same(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.LogNormal(1, 1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.GammaPoisson(3.0, 3.0 / mean), obs=y[i])

    return Crossed(model, (y,), ("mean",), (same, (y,)))


def two_constrained() -> Crossed:
    """A share and a rate."""
    rng = np.random.default_rng(4)
    y = np.where(rng.uniform(size=80) < 0.4, 0, rng.poisson(3.0, 80))

    def model(y: Any, batch: int | None = None) -> None:
        gate = numpyro.sample("gate", dist.Beta(2, 2))
        rate = numpyro.sample("rate", dist.Gamma(2, 1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate, rate), obs=y[i])

    return Crossed(model, (y,), ("gate", "rate"))


def simplex() -> Crossed:
    """Four shares, one of which no row has."""
    y = np.random.default_rng(5).choice(4, 50, p=[0.6, 0.3, 0.1, 0.0])

    def model(y: Any, batch: int | None = None) -> None:
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(4)))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Categorical(shares), obs=y[i])

    return Crossed(model, (y,), ("shares",))


def hierarchy() -> Crossed:
    """Eight groups whose spread is unknown."""
    rng = np.random.default_rng(6)
    group = np.repeat(np.arange(8), 12)
    y = rng.poisson(np.exp(1 + 0.6 * rng.normal(size=8)[group]))

    def model(group: Any, y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        spread = numpyro.sample("spread", dist.LogNormal(-1, 0.7))
        with numpyro.plate("groups", 8):
            level = numpyro.sample("level", dist.Normal(mean, spread))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(level[group[i]])), obs=y[i])

    return Crossed(model, (group, y), ("mean", "spread", "level"))


def cauchy() -> Crossed:
    """Heavy tails of prior and rows."""
    y = 2 + np.random.default_rng(7).standard_cauchy(30)

    def model(y: Any, batch: int | None = None) -> None:
        loc = numpyro.sample("loc", dist.Cauchy(0, 5))
        scale = numpyro.sample("scale", dist.HalfCauchy(2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Cauchy(loc, scale), obs=y[i])

    return Crossed(model, (y,), ("loc", "scale"))


def few_heavy() -> Crossed:
    """A posterior that has heavy tails itself."""

    def model(y: Any, batch: int | None = None) -> None:
        loc = numpyro.sample("loc", dist.StudentT(3, 0, 3))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.StudentT(3, loc, 1), obs=y[i])

    return Crossed(model, (np.array([1.0, 4.0]),), ("loc",), batch=None)


def mode_on_the_bound() -> Crossed:
    """A positive mean of rows that are negative."""
    y = np.random.default_rng(8).normal(-0.3, 1, 30)

    def model(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.HalfNormal(1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    return Crossed(model, (y,), ("mean",))


def all_successes() -> Crossed:
    """A share whose likelihood is largest at 1."""

    def model(y: Any, batch: int | None = None) -> None:
        share = numpyro.sample("share", dist.Uniform(0, 1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Bernoulli(share), obs=y[i])

    return Crossed(model, (np.ones(25, int),), ("share",))


def units(unit: float) -> Crossed:
    """A regression whose response has another unit than its priors are made for."""
    X = design(60, 9)
    y = unit * (X @ np.array([1.0, -0.5]) + np.random.default_rng(10).normal(0, 0.5, 60))

    def model(X: Any, y: Any, batch: int | None = None) -> None:
        w = slopes(10 * unit)
        scale = numpyro.sample("scale", dist.LogNormal(np.log(unit), 2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, scale), obs=y[i])

    def of_one(X: Any, y: Any) -> None:
        w = numpyro.deterministic("w", unit * slopes(10.0, name="w_of_one"))
        scale = numpyro.deterministic("scale", unit * numpyro.sample("s", dist.LogNormal(0, 2)))
        with rows(len(y)):
            numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)

    return Crossed(model, (X, y), ("w", "scale"), truth=(of_one, (X, y)))


def far_from_the_origin() -> Crossed:
    """A mean of a thousand with a spread of a hundredth."""
    y = np.random.default_rng(11).normal(1000.0, 0.05, 40)

    def model(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(900, 200))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, 0.05), obs=y[i])

    return Crossed(model, (y,), ("mean",))


def param() -> Crossed:
    """A ``numpyro.param``, which engines and kernels hold at its first value."""
    y = np.random.default_rng(12).normal(2.0, 1.0, 40)

    def model(y: Any, batch: int | None = None) -> None:
        scale = numpyro.param("scale", 1.5, constraint=dist.constraints.positive)
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, scale), obs=y[i])

    def same(y: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, 1.5), obs=y[i])

    return Crossed(model, (y,), ("mean",), (same, (y,)))


def two_plates() -> Crossed:
    """Two kinds of rows, each in a plate of its own."""
    rng = np.random.default_rng(13)
    y, count = rng.normal(0.7, 1.0, 60), rng.poisson(np.exp(0.7), 40)

    def model(y: Any, count: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with rows(len(y), batch, "normal") as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])
        with rows(len(count), batch, "counted") as i:
            numpyro.sample("count", dist.Poisson(jnp.exp(mean)), obs=count[i])

    return Crossed(model, (y, count), ("mean",))


def masked() -> Crossed:
    """Rows that a mask leaves out."""
    y = np.random.default_rng(14).normal(2.0, 1.0, 40)
    seen = np.arange(40) % 4 != 0
    y = np.where(seen, y, -50.0)

    def model(y: Any, seen: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with rows(len(y), batch) as i, handlers.mask(mask=seen[i]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i])

    return Crossed(model, (y, seen), ("mean",))


def missing() -> Crossed:
    """Rows without an observation, which ``obs_mask`` makes latent."""
    whole = masked()

    def model(y: Any, seen: Any, batch: int | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(0, 2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(mean, 1), obs=y[i], obs_mask=seen[i])

    return Crossed(model, whole.data, ("mean",), (whole.model, whole.data))


def tempered() -> Crossed:
    """A likelihood to the power of a half."""
    X = design(60, 15)
    y = (X @ np.array([0.7, -0.4]) + np.random.default_rng(16).logistic(size=60) > 0).astype(int)

    def model(X: Any, y: Any, batch: int | None = None) -> None:
        w = slopes()
        with rows(len(y), batch) as i, handlers.scale(scale=0.5):
            numpyro.sample("y", dist.Bernoulli(logits=X[i] @ w), obs=y[i])

    return Crossed(model, (X, y), ("w",))


def reparametrised() -> Crossed:
    """A site that a handler takes to the standard normal."""
    whole = hierarchy()
    config = {"level": LocScaleReparam(0)}
    return whole._replace(model=handlers.reparam(whole.model, config=config))


def censored() -> Crossed:
    """Lifetimes of which some are only known to be longer, by a ``numpyro.factor``."""
    rng = np.random.default_rng(17)
    t = rng.exponential(2.0, 60)
    is_known = t < 3.0
    t = np.minimum(t, 3.0)

    def model(t: Any, is_known: Any, batch: int | None = None) -> None:
        rate = numpyro.sample("rate", dist.Gamma(1, 1))
        with rows(len(t), batch) as i:
            log_p = jnp.where(is_known[i], jnp.log(rate), 0.0) - rate * t[i]
            numpyro.factor("t", log_p)

    return Crossed(model, (t, is_known), ("rate",))


def ordered() -> Crossed:
    """Cut points that are in order."""
    rng = np.random.default_rng(18)
    x = rng.normal(size=80)
    y = np.searchsorted([-1.0, 0.5, 2.0], 1.2 * x + rng.logistic(size=80))

    def model(x: Any, y: Any, batch: int | None = None) -> None:
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        prior = dist.TransformedDistribution(
            dist.Normal(0, 3).expand([3]).to_event(1), dist.transforms.OrderedTransform()
        )
        cuts = numpyro.sample("cuts", prior)
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.OrderedLogistic(slope * x[i], cuts), obs=y[i])

    return Crossed(model, (x, y), ("slope", "cuts"))


def from_a_closure() -> Crossed:
    """Data that are no arguments."""
    y = jnp.asarray(np.random.default_rng(19).poisson(4.0, 40))

    def model(batch: int | None = None) -> None:
        log_rate = numpyro.sample("log_rate", dist.Normal(0, 2))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(log_rate)), obs=y[i])

    return Crossed(model, (), ("log_rate",))


def a_column_of_zeros() -> Crossed:
    """A slope of which the rows say nothing."""
    X = design(50, 20) * np.array([1.0, 0.0])
    y = np.random.default_rng(21).poisson(np.exp(0.5 * X[:, 0]))

    def model(X: Any, y: Any, batch: int | None = None) -> None:
        w = slopes()
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Poisson(jnp.exp(X[i] @ w)), obs=y[i])

    return Crossed(model, (X, y), ("w",))


def large_counts() -> Crossed:
    """Successes among a million."""
    p = np.array([0.2, 0.21, 0.19, 0.2] * 5)
    y = np.random.default_rng(22).binomial(1_000_000, 0.2, 20)

    def model(total: Any, y: Any, batch: int | None = None) -> None:
        share = numpyro.sample("share", dist.Beta(1, 1))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Binomial(total[i], share), obs=y[i])

    return Crossed(model, (np.full(len(p), 1_000_000), y), ("share",), batch=None)


def correlated_prior() -> Crossed:
    """Two slopes that the prior ties together."""
    X = design(30, 23)
    y = X @ np.array([1.0, 1.2]) + np.random.default_rng(24).normal(size=30)
    cov = jnp.array([[4.0, 3.96], [3.96, 4.0]])

    def model(X: Any, y: Any, batch: int | None = None) -> None:
        w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), cov))
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(X[i] @ w, 1), obs=y[i])

    return Crossed(model, (X, y), ("w",))


def a_place_in_the_rows() -> Crossed:
    """A level that changes at a row, which the model finds by its place."""
    y = np.random.default_rng(25).normal(size=60) + 4.0 * (np.arange(60) >= 57)

    def model(y: Any, batch: int | None = None) -> None:
        w = slopes(5.0)
        late = jnp.arange(len(y)) >= 57
        with rows(len(y), batch) as i:
            numpyro.sample("y", dist.Normal(w[0] + w[1] * late[i], 1), obs=y[i])

    return Crossed(model, (y,), ("w",))


MODELS: dict[str, Callable[[], Crossed]] = {
    "vector local": vector_local,
    "categorical local": categorical_local,
    "positive local": positive_local,
    "two constrained": two_constrained,
    "simplex": simplex,
    "hierarchy": hierarchy,
    "cauchy": cauchy,
    "few heavy": few_heavy,
    "mode on the bound": mode_on_the_bound,
    "all successes": all_successes,
    "units of 1e-6": lambda: units(1e-6),
    "units of 1e6": lambda: units(1e6),
    "far from the origin": far_from_the_origin,
    "param": param,
    "two plates": two_plates,
    "masked": masked,
    "missing": missing,
    "tempered": tempered,
    "reparametrised": reparametrised,
    "censored": censored,
    "ordered": ordered,
    "from a closure": from_a_closure,
    "a column of zeros": a_column_of_zeros,
    "large counts": large_counts,
    "correlated prior": correlated_prior,
    "a place in the rows": a_place_in_the_rows,
}
