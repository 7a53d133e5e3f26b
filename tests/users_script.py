"""A user's script, which `make wheel` type-checks and runs against the installed wheel."""

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
import optax

from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.objectives import VRELBO
from numpyro_ext.particles import ParVI


def model(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def main() -> None:
    y = jnp.array([0.1, 0.8, -0.3, 0.5])
    svi = SVI(model, AutoRealNVPNormal(model), optax.adam(1e-2), VRELBO(0.5))
    losses = svi.run(random.key(0), 5, y, progress_bar=False).losses
    print(ParVI(model, init_from=None), jnp.isfinite(losses))
    mcmc = MCMC(SGHMC(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(1), y)
    print(mcmc.get_samples()["mean"])


if __name__ == "__main__":
    main()
