"""Models of NumPyro's own examples, with data that need no download."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions.transforms import AffineTransform
from numpyro.infer.reparam import TransformReparam
from sklearn.datasets import load_iris

from numpyro_ext.targets import breast_cancer


class Problem(NamedTuple):
    """`compared` are the sites, latent or deterministic, whose means and sds are compared."""

    model: Callable[..., None]
    args: tuple
    compared: tuple[str, ...]


def logistic() -> Problem:
    """The model of `examples/covtype.py`, on ten features of the breast cancer data."""

    def model(x: Array, y: Array) -> None:
        coefs = numpyro.sample("coefs", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
        numpyro.sample("y", dist.Bernoulli(logits=x @ coefs), obs=y)

    data = breast_cancer()
    x = jnp.column_stack([data.x_train, jnp.ones(len(data.x_train))])
    return Problem(model, (x, data.y_train), ("coefs",))


def eight_schools(*, centred: bool) -> Problem:
    """NumPyro's README, with and without its reparametrisation; both compare theta."""
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])

    def model(sigma: Array, y: Array) -> None:
        mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("schools", len(y)):
            if centred:
                theta = numpyro.sample("theta", dist.Normal(mu, tau))
            else:
                base = dist.TransformedDistribution(dist.Normal(0.0, 1.0), AffineTransform(mu, tau))
                with numpyro.handlers.reparam(config={"theta": TransformReparam()}):
                    theta = numpyro.sample("theta", base)
            numpyro.sample("obs", dist.Normal(theta, sigma), obs=y)

    return Problem(model, (sigma, y), ("mu", "tau", "theta"))


def baseball() -> Problem:
    """`partially_pooled` of `examples/baseball.py`: 18 players, 45 times at bat each."""
    hits = jnp.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7])

    def model(at_bats: Array, hits: Array) -> None:
        m = numpyro.sample("m", dist.Uniform(0, 1))
        kappa = numpyro.sample("kappa", dist.Pareto(1, 1.5))
        with numpyro.plate("num_players", len(hits)):
            phi = numpyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
            numpyro.sample("obs", dist.Binomial(at_bats, probs=phi), obs=hits)

    return Problem(model, (jnp.full(18, 45), hits), ("m", "phi"))


def correlations() -> Problem:
    """The example of `LKJCholesky`'s docstring, on the four measurements of the iris setosa."""

    def model(y: Array) -> None:
        d = y.shape[1]
        theta = numpyro.sample("theta", dist.HalfCauchy(jnp.ones(d)))
        factor = numpyro.sample("L_omega", dist.LKJCholesky(d, concentration=1.0))
        below = np.tril_indices(d, -1)
        numpyro.deterministic("correlations", (factor @ factor.T)[below])
        with numpyro.plate("observations", len(y)):
            scale = theta[:, None] * factor
            numpyro.sample("obs", dist.MultivariateNormal(jnp.zeros(d), scale_tril=scale), obs=y)

    x: Any = load_iris().data[:50]  # type: ignore[attr-defined]
    y = jnp.asarray((x - x.mean(0)) / x.std(0), jnp.float32)
    return Problem(model, (y,), ("theta", "correlations"))


def zero_inflated_poisson() -> Problem:
    """`examples/zero_inflated_poisson.py`, on 250 rows drawn from its model."""

    def model(x: Array, y: Array) -> None:
        b1 = numpyro.sample("b1", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        b2 = numpyro.sample("b2", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
        gate, rate = jax.nn.sigmoid(x @ b1), jnp.exp(x @ b2)
        with numpyro.plate("obs", len(x)):
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate=gate, rate=rate), obs=y)

    rng = np.random.default_rng(0)
    livebait, camper = rng.binomial(1, 0.85, 250), rng.binomial(1, 0.6, 250)
    persons, child = rng.integers(1, 5, 250), rng.integers(0, 3, 250)
    x = np.column_stack([livebait, camper, persons, child, np.ones(250)]).astype(np.float32)
    gate = 1 / (1 + np.exp(-x @ np.array([0.3, -0.8, -0.8, 1.5, 0.8])))
    y = rng.poisson(np.exp(x @ np.array([0.8, 0.6, 0.8, -1.1, -1.6]))) * (rng.random(250) > gate)
    return Problem(model, (jnp.asarray(x), jnp.asarray(y)), ("b1", "b2"))


def network() -> Problem:
    """`examples/bnn.py`: two layers of 5 tanh units, 50 rows; the function is compared.

    The weights are not: their posterior is a sum of many permuted copies.
    """

    def model(x: Array, y: Array, width: int) -> None:
        w1 = numpyro.sample("w1", dist.Normal(0, 1).expand([x.shape[1], width]).to_event(2))
        w2 = numpyro.sample("w2", dist.Normal(0, 1).expand([width, width]).to_event(2))
        w3 = numpyro.sample("w3", dist.Normal(0, 1).expand([width]).to_event(1))
        f = numpyro.deterministic("f", jnp.tanh(jnp.tanh(x @ w1) @ w2) @ w3)
        precision = numpyro.sample("prec_obs", dist.Gamma(3.0, 1.0))
        numpyro.sample("y", dist.Normal(f, precision**-0.5), obs=y)

    rng = np.random.RandomState(0)
    x = np.linspace(-1, 1, 50)[:, None] ** np.arange(3)
    y = x @ (0.5 * rng.randn(3)) + 0.5 * (0.5 + x[:, 1]) ** 2 * np.sin(4.0 * x[:, 1])
    y += 0.05 * rng.randn(50)
    y = (y - y.mean()) / y.std()
    return Problem(model, (jnp.asarray(x, float), jnp.asarray(y, float), 5), ("f", "prec_obs"))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "logistic": logistic,
    "eight schools": partial(eight_schools, centred=False),
    "eight schools, centred": partial(eight_schools, centred=True),
    "baseball": baseball,
    "correlations": correlations,
    "zero-inflated Poisson": zero_inflated_poisson,
    "network": network,
}
