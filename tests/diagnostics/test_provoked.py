"""Lines of ``diagnose``, each provoked by a real run that is wrong."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_ext.diagnostics import diagnose
from numpyro_ext.mcmc import PSGLD, SGRLD

MANY = 1.0 + jnp.sin(jnp.arange(200.0))


def normal_mean(x, batch=None):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(z), obs=x[i])


def run(kernel, *args, num_warmup=0, num_samples=500, num_chains=2, fields=(), **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, extra_fields=fields, **kwargs)
    return mcmc


def rows_of(diagnosis):
    return {row.quantity: row for row in diagnosis.rows}


@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kernel", "step"),
    # The step along the coordinate: that of SGRLD times the inverse of its metric.
    [
        (SGRLD(normal_mean, 0.2, metric=lambda z: jnp.full(1, 100.0)), lambda state: 0.002),
        (PSGLD(normal_mean, 0.5), lambda state: 0.5 * float(state.preconditioner.mean())),
    ],
    ids=["SGRLD", "PSGLD"],
)
@pytest.mark.filterwarnings("ignore:the mean of .* times what it should be")
def test_gradients_of_preconditioned_kernels_imply_their_variance(kernel, step):
    mcmc = run(kernel, MANY, 10, num_warmup=500, num_samples=4000)
    row = rows_of(diagnose(mcmc, num_moves=0))["implied variance ratio"]
    assert row.ok is False
    eps, h, s2 = step(mcmc.last_state), 201.0, 200**2 / 10 * float(np.var(MANY))
    law = (2 + eps * s2) / (2 - eps * h)
    # The preconditioners of two chains differ a little.
    assert row.value == pytest.approx(law, abs=5 * row.error, rel=0.02)
    assert h * float(np.var(mcmc.get_samples()["z"])) == pytest.approx(row.value, rel=0.1)
