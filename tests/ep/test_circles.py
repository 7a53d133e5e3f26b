"""Engines cut the circle at pi, and say so where the posterior lies there."""

from concurrent.futures import ThreadPoolExecutor
import warnings

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.ep import EP, DistributedEP
from tests.turned import ANGLES, NOISE, PRIOR, posterior, turned_data


def rows(turn, y):
    mu = numpyro.sample("mu", dist.VonMises(turn, PRIOR))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.VonMises(mu, NOISE), obs=turned_data(turn, y))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Continuous inference", "ignore:EP has not converged")
def test_a_posterior_at_the_cut_is_said_to_be_in_two_pieces():
    """At 0 it is right, up to the normal approximation."""
    engine = EP(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPyro's own, of any circle
        warnings.simplefilter("error", InferenceWarning)
        result = engine.run(random.key(0), 50, 0.0, jnp.asarray(ANGLES), progress_bar=False)
    angles = engine.guide.sample_posterior(random.key(1), result.params, sample_shape=(4000,))
    loc, concentration = posterior(0.0, ANGLES)
    assert np.mean(angles["mu"]) == pytest.approx(loc, abs=0.1 * concentration**-0.5)
    with pytest.warns(InferenceWarning, match="'mu' lies at pi, where EP cuts the circle"):
        engine.run(random.key(0), 50, np.pi, jnp.asarray(ANGLES), progress_bar=False)
    parts = [(np.pi, ANGLES[:2]), (np.pi, ANGLES[2:])]
    with ThreadPoolExecutor(2) as pool:
        engine = DistributedEP(rows, parts, executor=pool)
        with pytest.warns(InferenceWarning, match="'mu' lies at pi, where DistributedEP cuts"):
            engine.run(random.key(0), 20, progress_bar=False)
