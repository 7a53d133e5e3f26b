"""Without a likelihood: what pairs drawn by the model are worth beside it.

    python benchmarks/objectives/joint_contrast.py

500 rows of two numbers, x = A z + noise, with two latents each and the prior mean of z a parameter
m of the model, at first 0 and truly (1, -1). The guide is q(z | x) = N(c + B x, L L^T), which holds
the posterior. 3,000 steps of minibatches of 100 rows with 4 draws for each, with Adam at 0.02 along
a cosine. The joint contrast has the right m, which it cannot train. Printed are the mean KL(q || p)
of a row from the posterior at the m of the model, the distance of a trained m from its maximum
likelihood in standard errors, and the time.
"""

import time
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax

from numpyro_ext.guides import with_critic
from numpyro_ext.objectives import DensityRatioELBO, SymmetricKL
from numpyro_ext.scores import LogisticRatio

ROWS, BATCH, STEPS = 500, 100, 3000
A = jnp.array([[1.0, 0.5], [-0.3, 0.8]])
NOISE = jnp.array([0.5, 0.8])
TRUE = jnp.array([1.0, -1.0])


def of_rows(x: Array, m: Any) -> None:
    with numpyro.plate("rows", ROWS, subsample_size=BATCH):
        batch = numpyro.subsample(x, event_dim=1)
        z: Any = numpyro.sample("z", dist.Normal(m, 1.0).to_event(1))
        numpyro.sample("x", dist.Normal(z @ A.T, NOISE).to_event(1), obs=batch)


def model(x: Array) -> None:
    of_rows(x, numpyro.param("m", jnp.zeros(2)))


def known(x: Array) -> None:
    of_rows(x, TRUE)


def guide(x: Array) -> None:
    c, B = numpyro.param("c", jnp.zeros(2)), jnp.asarray(numpyro.param("B", jnp.zeros((2, 2))))
    lower = dist.constraints.lower_cholesky
    L: Any = numpyro.param("L", jnp.eye(2), constraint=lower)
    with numpyro.plate("rows", ROWS, subsample_size=BATCH):
        batch: Any = numpyro.subsample(x, event_dim=1)
        numpyro.sample("z", dist.MultivariateNormal(c + batch @ B.T, scale_tril=L))


def main() -> None:
    key_z, key_x = random.split(random.key(0))
    z = TRUE + random.normal(key_z, (ROWS, 2))
    x = z @ A.T + NOISE * random.normal(key_x, (ROWS, 2))
    marginal = A @ A.T + jnp.diag(NOISE**2)
    gain = A.T @ jnp.linalg.inv(marginal)
    spread = jnp.linalg.cholesky(jnp.eye(2) - gain @ A)
    information = ROWS * A.T @ jnp.linalg.inv(marginal) @ A
    best = jnp.linalg.solve(information, A.T @ jnp.linalg.solve(marginal, x.sum(0)))
    fitted = LogisticRatio(l2=1e-6)
    with_network = with_critic(guide, features=2)
    joint = DensityRatioELBO(4, "joint", ratio=fitted), DensityRatioELBO(4, "joint")
    rows = (
        ("`Trace_ELBO`", Trace_ELBO(4), guide, known),
        ('`DensityRatioELBO("joint")`, `LogisticRatio`', joint[0], guide, known),
        ('`DensityRatioELBO("joint")`, critic', joint[1], with_network, known),
        ("`Trace_ELBO`", Trace_ELBO(4), guide, model),
        ("`SymmetricKL`, `LogisticRatio`", SymmetricKL(4, ratio=fitted), guide, model),
        ("`SymmetricKL`, critic", SymmetricKL(4), with_network, model),
    )
    print("| loss | m | KL of a row, nats | m from its best, errors | seconds |")
    print("|---|---|---|---|---|")
    rate = optax.cosine_decay_schedule(2e-2, STEPS)
    for name, loss, the_guide, the_model in rows:
        began = time.perf_counter()
        svi = SVI(the_model, the_guide, optax.adam(rate), loss)
        params = svi.run(random.key(1), STEPS, x, progress_bar=False).params
        seconds = time.perf_counter() - began
        m = params.get("m", TRUE)
        q = dist.MultivariateNormal(params["c"] + x @ params["B"].T, scale_tril=params["L"])
        p = dist.MultivariateNormal(m + (x - A @ m) @ gain.T, scale_tril=spread)
        kl = dist.kl_divergence(q, p).mean()
        off = jnp.sqrt((m - best) @ information @ (m - best))
        kind, apart = ("trained", f"{off:.2f}") if the_model is model else ("known", "")
        print(f"| {name} | {kind} | {kl:.4f} | {apart} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
