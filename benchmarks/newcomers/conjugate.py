"""Conjugate models by coordinate ascent and natural gradients on a factorised q, with the truth by
quadrature or a Gibbs sampler; rows of `systems.py`."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
import sys
import time
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO
import optax
from scipy.stats import wishart

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.expfam import (
    Gamma,
    GammaNatural,
    Gaussian,
    GaussianNatural,
    InverseGamma,
    InverseGammaNatural,
    Poisson,
    Wishart,
    WishartNatural,
    multiply,
    straight_through_kl,
    straight_through_mean,
)
from numpyro_ext.optim import natural_gradient

sys.path.append(str(Path(__file__).parents[1]))
from _shared.methods import GUIDE_DRAWS, Fit
from _shared.unseen_models import table
from _shared.verdicts import Truth, moments

Found = tuple[Fit, Truth]
DRAWS = 41_000


def by_naturals(model: Any, guide: Any, q: Any, data: tuple[Any, ...], began: float) -> Fit:
    """A factorised q as the guide of the model that it belongs to."""
    svi = SVI(model, guide, optax.adam(5e-3), Trace_ELBO())
    draws = Predictive(guide, params={"q": q}, num_samples=GUIDE_DRAWS)(random.key(1), *data)
    draws = jax.device_get(draws)
    seconds = time.perf_counter() - began
    return Fit(draws, diagnose(svi, result={"q": q}, model_args=data), seconds)


def swept(step: Callable[[Any], Any], q: Any, sweeps: int = 200) -> Any:
    return jax.jit(lambda q: jax.lax.fori_loop(0, sweeps, lambda _, q: step(q), q))(q)


PUMPS = """
5 1 5 14 3 19 1 1 4 22
94.32 15.72 62.88 125.76 5.24 31.44 1.048 1.048 2.096 10.48
"""


def pumps(by_gradient: bool, out: Path) -> Found:
    """Failures of ten pumps (Gaver and O'Muircheartaigh 1987)."""
    x, t = jnp.asarray(table(PUMPS))
    prior, shape = Gamma.from_standard(0.1, 1.0), 0.8

    def model(x: Any, t: Any) -> None:
        beta = numpyro.sample("beta", dist.Gamma(0.1, 1.0))
        with numpyro.plate("pumps", len(t)):
            theta = numpyro.sample("theta", dist.Gamma(shape, beta))
            numpyro.sample("x", dist.Poisson(theta * t), obs=x)

    def guide(x: Any, t: Any) -> None:
        q: Any = numpyro.param("q", q0)
        numpyro.sample("beta", Gamma.to_distribution(q["beta"]))
        with numpyro.plate("pumps", len(t)):
            numpyro.sample("theta", Gamma.to_distribution(q["theta"]))

    def step(q: Any) -> Any:
        rate = -Gamma.mean(q["beta"]).neg_value
        theta = GammaNatural(shape + x, rate + t)
        mean = -Gamma.mean(theta).neg_value
        beta = multiply(prior, GammaNatural(shape * len(x), mean.sum()))
        return {"beta": beta, "theta": theta}

    def loss(q: Any) -> Any:
        beta, theta = (straight_through_mean(Gamma, q[name]) for name in ("beta", "theta"))
        kl = straight_through_kl(Gamma, q["beta"], prior, beta)
        # The entropy of theta, and its expected prior and likelihood, linear in each mean.
        kl += jnp.sum(straight_through_kl(Gamma, q["theta"], flat, theta))
        prior_theta = shape * beta.log_value + (shape - 1) * theta.log_value
        prior_theta += beta.neg_value * -theta.neg_value
        lik = Poisson.log_base_measure(x) + x * (theta.log_value + jnp.log(t))
        lik += t * theta.neg_value
        return kl - jnp.sum(prior_theta + lik - Gamma.inner(flat, theta) + theta.log_value)

    began = time.perf_counter()
    flat = GammaNatural(jnp.ones(10), jnp.ones(10))
    q0 = {"beta": prior, "theta": flat}
    if by_gradient:
        optim = natural_gradient(0.5)

        def move(carry: Any) -> Any:
            q, state = carry
            moves, state = optim.update(jax.grad(loss)(q), state, q)
            return jax.tree.map(jnp.add, q, moves), state

        q = swept(move, (q0, optim.init(q0)), 300)[0]
    else:
        q = swept(step, q0)
    fit = by_naturals(model, guide, q, (x, t), began)
    x, t = table(PUMPS)
    beta = np.exp(np.linspace(-6, 4, 20001))
    log_p = (0.1 + shape * 10) * np.log(beta) - beta  # times beta, for the grid in its log
    log_p -= np.sum((shape + x) * np.log(beta[:, None] + t), 1)
    w = np.exp(log_p - log_p.max())
    w /= w.sum()
    mean = (shape + x) / (beta[:, None] + t)
    second = mean**2 + mean / (beta[:, None] + t)
    mean, second = w @ mean, w @ second
    m = w @ beta
    truth = {
        "theta": (mean, np.sqrt(second - mean**2)),
        "beta": (m, np.sqrt(w @ (beta - m) ** 2)),
    }
    return fit, truth


DYESTUFF = """
1545 1440 1440 1520 1580
1540 1555 1490 1560 1495
1595 1550 1605 1510 1560
1445 1440 1595 1465 1545
1595 1630 1515 1635 1625
1520 1455 1450 1480 1445
"""


def dyestuff(out: Path) -> Found:
    """Yields of six batches (Davies 1949), in units of 50 grams."""
    rows = (table(DYESTUFF) - 1527.5) / 50
    y, (J, n) = jnp.asarray(rows), rows.shape
    prior = InverseGamma.from_standard(2.0, 1.0)

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        between = numpyro.sample("between", dist.InverseGamma(2.0, 1.0))
        within = numpyro.sample("within", dist.InverseGamma(2.0, 1.0))
        with numpyro.plate("batches", J):
            m = numpyro.sample("m", dist.Normal(mu, jnp.sqrt(between)))
        numpyro.sample("y", dist.Normal(m[:, None], jnp.sqrt(within)), obs=y)

    def normal(q: GaussianNatural) -> Any:
        loc, covariance = Gaussian.to_standard(q)
        return loc[..., 0], covariance[..., 0, 0]

    def guide(y: Any) -> None:
        q: Any = numpyro.param("q", q0)
        for name in ("mu", "m"):
            loc, variance = normal(q[name])
            with numpyro.plate("batches", J) if name == "m" else nullcontext():
                numpyro.sample(name, dist.Normal(loc, jnp.sqrt(variance)))
        for name in ("between", "within"):
            numpyro.sample(name, InverseGamma.to_distribution(q[name]))

    def of(h: Any, precision: Any) -> GaussianNatural:
        return GaussianNatural(h[..., None], -precision[..., None, None] / 2)

    def step(q: Any) -> Any:
        a, b = (-InverseGamma.mean(q[name]).neg_inverse for name in ("between", "within"))
        loc, variance = normal(q["m"])
        mu = of(a * loc.sum(), a * J + 0.01)
        m_mu, v_mu = normal(mu)
        m = of(a * m_mu + b * y.sum(1), jnp.broadcast_to(a + b * n, (J,)))
        loc, variance = normal(m)
        squares = jnp.sum((loc - m_mu) ** 2 + variance + v_mu)
        errors = jnp.sum((y - loc[:, None]) ** 2 + variance[:, None])
        between = multiply(prior, InverseGammaNatural(J / 2, squares / 2))
        within = multiply(prior, InverseGammaNatural(J * n / 2, errors / 2))
        return {"mu": mu, "m": m, "between": between, "within": within}

    began = time.perf_counter()
    unit = GaussianNatural(jnp.zeros(1), -jnp.eye(1) / 2)
    several = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (J, *leaf.shape)), unit)
    q0 = {"mu": unit, "m": several, "between": prior, "within": prior}
    fit = by_naturals(model, guide, swept(step, q0), (y,), began)
    rng, mu, between, within, kept_draws = np.random.default_rng(0), 0.0, 1.0, 1.0, []
    for _ in range(DRAWS):
        precision = 1 / between + n / within
        m = (mu / between + rows.sum(1) / within) / precision
        m += rng.standard_normal(J) / precision**0.5
        precision = J / between + 0.01
        mu = m.sum() / between / precision + rng.standard_normal() / precision**0.5
        between = (1 + np.sum((m - mu) ** 2) / 2) / rng.gamma(2 + J / 2)
        within = (1 + np.sum((rows - m[:, None]) ** 2) / 2) / rng.gamma(2 + J * n / 2)
        kept_draws.append((mu, between, within, *m))
    draws = np.array(kept_draws[DRAWS // 41 :])
    named = {"mu": draws[:, 0], "between": draws[:, 1], "within": draws[:, 2], "m": draws[:, 3:]}
    return fit, moments(named)


HEADS_OF_BROTHERS = """
191 195 181 183 176 208 189 197 188 192 179 183 174 190 188 163 195 186 181 175 192 174 176 197 190
155 149 148 153 144 157 150 159 152 150 158 147 150 159 151 137 155 153 145 140 154 143 139 167 163
179 201 185 188 171 192 190 189 197 187 186 174 185 195 187 161 183 173 182 165 185 178 176 200 187
145 152 149 149 142 152 149 152 159 151 148 147 152 157 158 130 158 148 146 137 152 147 143 158 150
"""


def heads(out: Path) -> Found:
    """Length and breadth of the heads of first and second sons (Frets 1921), less 170, by 10."""
    rows = (table(HEADS_OF_BROTHERS).T - 170) / 10
    y, (n, d) = jnp.asarray(rows), rows.shape
    prior = Wishart.from_standard(df=6.0, rate_matrix=3 * jnp.eye(d))

    def model(y: Any) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 3).expand([d]).to_event(1))
        precision = numpyro.sample("precision", dist.Wishart(6.0, rate_matrix=3 * jnp.eye(d)))
        normal = dist.MultivariateNormal(mu, precision_matrix=precision)
        with numpyro.plate("rows", n):
            numpyro.sample("y", normal, obs=y)

    def guide(y: Any) -> None:
        q: Any = numpyro.param("q", q0)
        numpyro.sample("mu", Gaussian.to_distribution(q["mu"]))
        numpyro.sample("precision", Wishart.to_distribution(q["precision"]))

    def step(q: Any) -> Any:
        P = -2 * Wishart.mean(q["precision"]).neg_half_precision
        mu = GaussianNatural(P @ y.sum(0), -(n * P + jnp.eye(d) / 9) / 2)
        mean = Gaussian.mean(mu)
        cross = jnp.outer(y.sum(0), mean.x)
        squares = y.T @ y - cross - cross.T + n * mean.xx
        return {"mu": mu, "precision": multiply(prior, WishartNatural(squares, 1.0 * n))}

    began = time.perf_counter()
    q0 = {"mu": GaussianNatural(jnp.zeros(d), -jnp.eye(d) / 2), "precision": prior}
    fit = by_naturals(model, guide, swept(step, q0), (y,), began)
    rng, mu, found = np.random.default_rng(0), rows.mean(0), []
    P_prior = np.eye(d) / 9
    for _ in range(DRAWS):
        scale = np.linalg.inv(3 * np.eye(d) + (rows - mu).T @ (rows - mu))
        P = wishart.rvs(6 + n, scale, random_state=rng)
        C = np.linalg.inv(n * P + P_prior)
        mu = C @ P @ rows.sum(0) + np.linalg.cholesky(C) @ rng.standard_normal(d)
        found.append((mu, P))
    named = {"mu": np.array([f[0] for f in found[DRAWS // 41 :]])}
    named["precision"] = np.array([f[1] for f in found[DRAWS // 41 :]])
    return fit, moments(named)
