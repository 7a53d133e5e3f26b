"""A linear system that is learnt from its data, compared with a Kalman smoother at the truth.

The data are twenty series of 200 steps in three columns. They are observations, through a random
matrix and unequal noise, of a rotation in the plane by half a radian a step that keeps 0.97 of its
length. `SVAEGuide` with `LDS` and the default networks learns everything from its default start.
The latent plane is found up to a linear map, so the smoothed means are mapped to those of the
smoother by least squares: `R2` is the share of their variance, `error` the root mean square
difference in posterior standard deviations of the smoother, and `variance` the mapped posterior
variance over the smoother's, of each coordinate. `loss` is the mean of 100 steps, above minus the
log likelihood at the true parameters.

    python benchmarks/svae/system.py
"""

import argparse
import time
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax

from numpyro_ext.expfam import MNIW, NIW, GaussianChain
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import (
    LDS,
    SVAEELBO,
    GaussianPotential,
    SVAEGuide,
    decoder_network,
    recognition_network,
    surrogate_elbo,
)

D, P, T, N = 2, 3, 200, 20
ANGLE, LENGTH = 0.5, 0.97
A = LENGTH * np.array([[np.cos(ANGLE), -np.sin(ANGLE)], [np.sin(ANGLE), np.cos(ANGLE)]])
Q, R = np.diag([0.1, 0.05]), np.diag([0.1, 0.2, 0.4])
EYE, WIDTH = jnp.eye(D), 0.1
DECODER = decoder_network(P)


def simulated(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The data ``(N, T, P)`` and the matrix through which they are seen."""
    rng = np.random.default_rng(seed)
    C = rng.normal(size=(P, D))
    x, rows = rng.normal(size=(N, D)), []
    for _ in range(T):
        rows.append(x @ C.T + rng.multivariate_normal(np.zeros(P), R, N))
        x = x @ A.T + rng.multivariate_normal(np.zeros(D), Q, N)
    return np.stack(rows, 1), C


def moments(mean: Any) -> tuple[np.ndarray, np.ndarray]:
    x, xx = np.asarray(mean.x), np.asarray(mean.xx)
    return x, xx - x[..., :, None] * x[..., None, :]


def smoother(y: np.ndarray, C: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Means, covariances and log likelihood at the true parameters: exact potentials in `LDS`."""
    known = {
        "initial": NIW.statistics((jnp.zeros(D), EYE)),
        "dynamics": MNIW.statistics((jnp.asarray(A), jnp.asarray(Q))),
    }
    precision = np.linalg.inv(R)
    W = jnp.broadcast_to(jnp.asarray(-C.T @ precision @ C / 2), (N, T, D, D))
    psi = GaussianPotential(jnp.asarray(y @ precision @ C), W)
    local = LDS().infer(known, psi)
    # The potential leaves out what does not depend on x.
    constant = N * T * np.linalg.slogdet(2 * np.pi * R)[1]
    constant += np.einsum("nti,ij,ntj->", y, precision, y)
    log_lik = float(surrogate_elbo(LDS(), known, psi, local).sum()) - constant / 2
    return *moments(local.mean["x"]), log_lik


def model(y: Array) -> None:
    Sigma = numpyro.sample("Sigma_1", dist.InverseWishart(D + 2.0, scale_matrix=EYE))
    mu = numpyro.sample("mu_1", dist.MultivariateNormal(jnp.zeros(D), Sigma))
    noise = numpyro.sample("Q", dist.InverseWishart(D + 2.0, scale_matrix=WIDTH * EYE))
    rows, columns = jnp.linalg.cholesky(noise), EYE / WIDTH**0.5
    weight = numpyro.sample("A", dist.MatrixNormal(jnp.zeros((D, D)), rows, columns))
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", len(y)):
        chain = GaussianChain.from_standard(mu, Sigma, weight, noise, T)
        x = numpyro.sample("x", GaussianChain.to_distribution(chain))
        numpyro.sample("y", dist.Normal(*decode(x)).to_event(2), obs=y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the data and of the start")
    seed = parser.parse_args().seed
    data, C = simulated(seed)
    y = jnp.asarray(data, jnp.float32)
    exact, covariance, log_lik = smoother(data, C)
    dynamics = {"precision": WIDTH * EYE, "df": D + 2.0, "scale_matrix": WIDTH * EYE}
    prior = {
        "initial": NIW.from_standard(jnp.zeros(D), 1.0, D + 2.0, EYE),
        "dynamics": MNIW.from_standard(jnp.zeros((D, D)), **dynamics),
    }
    guide = SVAEGuide(prior, recognition_network(D), LDS())
    groups = {"natural": natural_gradient(0.05, guide.domain), "network": optax.adam(3e-3)}
    optim = optax.multi_transform(groups, guide.param_labels)
    svi = SVI(model, guide, optim, SVAEELBO("explicit_only"))

    @jax.jit
    def train(state: Any) -> tuple[Any, Array]:
        return lax.scan(lambda s, _: svi.update(s, y), state, length=500)

    state, began = svi.init(random.key(seed), y), time.perf_counter()
    print(f"minus the log likelihood at the true parameters: {-log_lik:.1f}")
    for done in (500, 1000, 1500):
        state, losses = train(state)
        params = svi.get_params(state)
        x, spread = moments(guide.local_posterior(params, y).mean["x"])
        inputs = np.concatenate([x.reshape(-1, D), np.ones((N * T, 1))], axis=1)
        found, *_ = np.linalg.lstsq(inputs, exact.reshape(-1, D))
        away = exact.reshape(-1, D) - inputs @ found
        share = 1 - (away**2).sum() / ((exact - exact.mean((0, 1))) ** 2).sum()
        variance = covariance.mean((0, 1)).diagonal()
        mapped = found[:D].T @ spread.mean((0, 1)) @ found[:D]
        weight = MNIW.to_standard(guide.global_natural(params)["dynamics"]).weight
        turn = np.linalg.eigvals(np.asarray(weight))[0]
        print(
            f"{done} steps, {time.perf_counter() - began:.0f} s: loss {losses[-100:].mean():.1f},"
            f" eigenvalues of length {abs(turn):.3f} and angle {abs(np.angle(turn)):.3f},"
            f" R2 {share:.4f}, error {np.round(np.sqrt((away**2).mean(0) / variance), 2)},"
            f" variance {np.round(mapped.diagonal() / variance, 2)}"
        )


if __name__ == "__main__":
    main()
