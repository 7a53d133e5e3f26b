"""Guides on a regression with several outputs, whose posterior is a matrix normal.

    python benchmarks/guides/matrix_normal.py

200 rows, 20 correlated columns, and 10 outputs whose noise has correlations of 0.8 and scales from
0.1 to 3; the prior of the coefficients is MN(0, I, V) with V the covariance of the noise. 2,000
steps of 8 particles with Adam at 0.01 along a cosine. Printed are KL(q || p), by 2,000 draws and
the evidence in closed form, and the range of the standard deviations over the right ones.
"""

import time
from typing import Any

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax
from scipy.stats import multivariate_normal

from numpyro_ext.guides import AutoMatrixNormal

ROWS, COLUMNS, OUTPUTS, STEPS = 200, 20, 10, 2000


def main() -> None:
    rng = np.random.default_rng(0)
    shared = rng.normal(size=(ROWS, 1))
    X = 0.8 * shared + 0.6 * rng.normal(size=(ROWS, COLUMNS))
    scales = np.geomspace(0.1, 3.0, OUTPUTS)
    V = np.outer(scales, scales) * (0.2 * np.eye(OUTPUTS) + 0.8)
    root = np.linalg.cholesky(V)
    W = rng.normal(size=(COLUMNS, OUTPUTS)) @ root.T
    Y = X @ W + rng.normal(size=(ROWS, OUTPUTS)) @ root.T
    # The rows of Y root^-T are independent between outputs.
    whitened = np.linalg.solve(root, Y.T)
    spread: Any = np.eye(ROWS) + X @ X.T
    marginal = multivariate_normal(np.zeros(ROWS), spread)
    evidence = marginal.logpdf(whitened).sum() - ROWS * np.linalg.slogdet(root)[1]
    U = np.linalg.inv(X.T @ X + np.eye(COLUMNS))
    sds = np.sqrt(np.outer(np.diag(U), np.diag(V)))

    def model(x: Any, y: Any) -> None:
        prior = dist.MatrixNormal(jnp.zeros(W.shape), jnp.eye(COLUMNS), jnp.array(root))
        w: Any = numpyro.sample("w", prior)
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.MultivariateNormal(x @ w, scale_tril=jnp.array(root)), obs=y)

    print("| guide | steps | numbers | KL, nats | sd ratio | seconds |\n|---|---|---|---|---|---|")
    rate = optax.cosine_decay_schedule(1e-2, STEPS)
    args = jnp.array(X), jnp.array(Y)
    for make, steps in (
        (AutoNormal, STEPS),
        (AutoMultivariateNormal, STEPS),
        (AutoMatrixNormal, 0),
        (AutoMatrixNormal, STEPS),
    ):
        began = time.perf_counter()
        guide: Any = make(model)
        svi = SVI(model, guide, optax.adam(rate), Trace_ELBO(num_particles=8))
        state = svi.init(random.key(0), *args)
        if steps:
            state = svi.run(random.key(0), steps, *args, progress_bar=False).state
        params, seconds = svi.get_params(state), time.perf_counter() - began
        kl = evidence + Trace_ELBO(2000).loss(random.key(1), params, model, guide, *args)
        draws = guide.sample_posterior(random.key(2), params, sample_shape=(10_000,))["w"]
        ratio = np.asarray(draws.std(0)) / sds
        fixed = ("auto_center", "auto_root")
        numbers = sum(x.size for name, x in params.items() if name not in fixed)
        print(
            f"| `{make.__name__}` | {steps:,} | {numbers:,} | {kl:.3f} |"
            f" {ratio.min():.2f} to {ratio.max():.2f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
