"""The posteriors of the table of guides, and what is known of each."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_ext.targets import banana


class Target(NamedTuple):
    """A model of ``args`` and what is known of its posterior."""

    model: Callable[..., None]
    args: tuple[Any, ...] = ()
    log_evidence: float | None = None
    sds: dict[str, Any] | None = None
    """Standard deviations of constrained sites; None: NUTS tells those of unconstrained space."""
    means: dict[str, Any] | None = None


def funnel() -> None:
    """Neal's funnel in ten dimensions."""
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)).expand([9]).to_event(1))


def two_moons() -> None:
    """A ring of radius 2 with two gaps; its log normalising constant is 1.8775."""
    z = numpyro.sample("z", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    ring = -0.5 * ((jnp.linalg.norm(z) - 2) / 0.4) ** 2
    sides = jnp.logaddexp(-0.5 * ((z[0] - 2) / 0.6) ** 2, -0.5 * ((z[0] + 2) / 0.6) ** 2)
    numpyro.factor("moons", ring + sides)


def correlated() -> None:
    """Two coordinates with standard deviation 1 and correlation 0.95."""
    cov = jnp.array([[1.0, 0.95], [0.95, 1.0]])
    numpyro.sample("z", dist.MultivariateNormal(jnp.zeros(2), cov))


def schools(sigma: Array, y: Array) -> None:
    """Eight schools, not centred."""
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", len(y)):
        eta = numpyro.sample("eta", dist.Normal(0, 1))
        numpyro.sample("obs", dist.Normal(mu + tau * eta, sigma), obs=y)


def horseshoe(x: Array, y: Array) -> None:
    """The model of `examples/horseshoe_regression.py`: 42 latent numbers for 20 columns."""
    d = x.shape[1]
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(jnp.ones(d)))
    tau = numpyro.sample("tau", dist.HalfCauchy(jnp.ones(1)))
    unscaled = numpyro.sample("unscaled_betas", dist.Normal(0.0, jnp.ones(d)))
    betas = numpyro.deterministic("betas", tau * lambdas * unscaled)
    precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
    numpyro.sample("Y", dist.Normal(x @ betas, precision**-0.5), obs=y)


def horseshoe_data() -> tuple[Array, Array]:
    """As that example generates it, with noise of standard deviation 1: 3 of 20 columns count."""
    rng = np.random.RandomState(0)
    x = rng.randn(100, 20)
    y = x[:, :3] @ np.array([2.0, -1.0, 0.5])
    y = y - y.mean() + rng.randn(100)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def logistic(x: Array, y: Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def german_credit(folder: Path) -> Target:
    table = np.loadtxt(folder / "german_credit" / "german.data-numeric")
    x = (table[:, :-1] - table[:, :-1].mean(0)) / table[:, :-1].std(0)
    x = np.column_stack([x, np.ones(len(x))]).astype(np.float32)
    moments = folder / "german_credit" / "posterior_mean_sd.csv"
    mean, sd = np.loadtxt(moments, delimiter=",").T
    data = jnp.asarray(x), jnp.asarray(table[:, -1] == 2, jnp.float32)
    return Target(logistic, data, -529.17, {"w": sd}, {"w": mean})


def eight_schools() -> Target:
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return Target(schools, (sigma, jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])))


TARGETS: dict[str, Callable[[Path], Target]] = {
    "banana": lambda _: Target(banana, (), 0.0, {"z1": 1.0, "x2": 19.0**0.5}),
    "funnel": lambda _: Target(funnel, (), 0.0, {"v": 3.0}),
    "two moons": lambda _: Target(
        two_moons, (), 1.8775016261, {"z": np.sqrt([3.3035016, 1.3952778])}
    ),
    "eight schools": lambda _: eight_schools(),
    "horseshoe": lambda _: Target(horseshoe, horseshoe_data()),
    "German credit": german_credit,
}
