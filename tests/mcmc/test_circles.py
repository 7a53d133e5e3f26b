"""Chains of angles whose posterior is where NumPyro cuts the circle."""

from functools import cache
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC
import pytest

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.mcmc import SGHMC, SGLD
from tests.turned import ANGLES, posterior, turned, wrapped

DATA = np.pi, ANGLES


@cache
def run():
    mcmc = MCMC(SGHMC(turned), num_warmup=500, num_samples=8000, progress_bar=False)
    mcmc.run(random.key(0), *DATA)
    return mcmc


def check(angles, error):
    """The circular mean, in standard deviations, and the circular standard deviation."""
    loc, concentration = posterior(*DATA)
    m, sd = np.exp(1j * np.asarray(angles)).mean(), concentration**-0.5
    assert abs(wrapped(np.angle(m) - loc)) < error * sd
    assert np.sqrt(-2 * np.log(abs(m))) == pytest.approx(sd, rel=error)


@pytest.mark.slow
def test_draws_are_right_at_the_cut_of_numpyro():
    """8,000 draws have an error of the mean of about 0.02 sd, and a bias of 5 % of the variance is
    allowed."""
    mcmc = run()
    samples = mcmc.get_samples()
    check(samples["mu"], 0.12)
    assert np.all(constraints.circular(samples["mu"]))
    np.testing.assert_allclose(samples["east"], np.cos(samples["mu"]), atol=1e-5)


@pytest.mark.slow
def test_a_chain_goes_on_in_its_coordinates():
    """Also where the kernel was pickled, which keeps no data."""
    mcmc = pickle.loads(pickle.dumps(run()))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.post_warmup_state.rng_key, *DATA)
    check(mcmc.get_samples()["mu"], 0.12)


@pytest.mark.slow
def test_a_diagnosis_and_arviz_have_angles_near_each_other():
    """The linear mean and standard deviation of what ArviZ gets are those of the circle."""
    mcmc = run()
    assert diagnose(mcmc).ok
    tree = to_arviz(mcmc)
    x = tree["posterior"]["mu"].values
    loc, concentration = posterior(*DATA)
    assert abs(wrapped(x.mean() - loc)) < 0.12 * concentration**-0.5
    assert x.std() == pytest.approx(concentration**-0.5, rel=0.12)
    assert list(tree.attrs["circular"]) == ["mu"]


@pytest.mark.slow
def test_a_start_that_is_given_is_in_the_coordinates_of_numpyro():
    angle = jnp.array(3.0)
    z = biject_to(constraints.circular).inv(angle)
    kernel = SGLD(turned, 1e-3)
    state = kernel.init(random.key(0), 0, {"mu": z}, DATA)
    sites = jax.jit(kernel.postprocess_fn(DATA, {}))(state.z)
    assert float(sites["mu"]) == pytest.approx(float(angle), abs=1e-4)
    assert abs(float(state.z["mu"])) < 1.0  # and not 3.8
