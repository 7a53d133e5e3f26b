"""NumPyro's private parts: each does in the installed version what the package takes it for."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation
import optax
import pytest

from numpyro_ext._model.handlers import every_row
from numpyro_ext._numpyro import mcmc_arguments, posterior_guide


def narrow(x=0.0):
    """A posterior that is Normal, with standard deviations 0.1 and 4."""
    numpyro.sample("wide", dist.Normal(x, 4.0))
    numpyro.sample("small", dist.Normal(1.0, 0.1))


def test_arguments_of_a_run_are_found():
    mcmc = MCMC(NUTS(narrow), num_warmup=1, num_samples=1, progress_bar=False)
    mcmc.run(random.key(0), 0.5)
    assert mcmc_arguments(mcmc) == ((0.5,), {})


def test_laplace_guide_is_drawn_from_its_normal_and_left_as_it_was():
    guide = AutoLaplaceApproximation(narrow)
    svi = SVI(narrow, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.run(random.key(0), 500, progress_bar=False).params
    normal, (more,) = posterior_guide(guide, [params], (), {}, every_row)
    draws = [
        handlers.trace(
            handlers.substitute(handlers.seed(normal, random.key(i)), data=more)
        ).get_trace()["_auto_latent"]["value"]
        for i in range(2)
    ]
    assert not jnp.array_equal(*draws)
    tril = more["auto_scale_tril"]
    assert np.allclose(np.sqrt(np.diag(tril @ tril.T)), [4.0, 0.1], rtol=1e-3)
    assert "auto_scale_tril" not in params


def test_a_laplace_guide_without_curvature_is_refused():
    def flat():
        numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), ()))

    guide = AutoLaplaceApproximation(flat)
    params = {"auto_loc": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"Hessian .* use AutoNormal"):
        posterior_guide(guide, [params], (), {}, every_row)
