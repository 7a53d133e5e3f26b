"""Latent sites inside the plate of the data are integrated out of their row."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
import pytest

from numpyro_ext.ep import EP
from tests.ep.models import MEANS, VARIANCES, WEIGHTS

Y = jnp.array([0.3, 2.5, -1.0, 4.0])


def labelled():
    """Fixture B with its labels as sites."""
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("rows", 2) as idx:
        k = numpyro.sample("k", dist.Categorical(probs=WEIGHTS[idx]))
        at = idx, k
        numpyro.factor("f", dist.Normal(MEANS[at], jnp.sqrt(VARIANCES[at])).log_prob(theta))


def effects(y, num=1):
    """A local effect in each row, or several."""
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", len(y)) as idx:
        z = numpyro.sample("z", dist.Normal(theta, 1.5))
        for k in range(num - 1):
            z = z + numpyro.sample(f"extra_{k}", dist.Normal())
        numpyro.sample("y", dist.Normal(z, 0.6), obs=y[idx])


def test_discrete_local_sites_are_summed_out():
    result = EP(labelled).run(random.key(0), 60, progress_bar=False)
    sd = result.params["auto_scale_tril"][0, 0]
    np.testing.assert_allclose(result.params["auto_loc"], 0.5623159697, rtol=1e-4)
    np.testing.assert_allclose(sd**2, 0.5521639916, rtol=1e-4)
    np.testing.assert_allclose(-result.losses[-1], -3.3044138541, rtol=1e-4)


def test_a_continuous_local_site_is_integrated_out():
    """The posterior and the evidence of y ~ N(theta, 1.5^2 + .6^2)."""
    ep = EP(effects)
    result = ep.run(random.key(0), 20, Y, progress_bar=False)
    v, y = 1.5**2 + 0.6**2, np.asarray(Y, float)
    precision = 0.25 + 4 / v
    np.testing.assert_allclose(
        result.params["auto_loc"], (0.1 + y.sum() / v) / precision, rtol=1e-3
    )
    sd = result.params["auto_scale_tril"][0, 0]
    np.testing.assert_allclose(sd, precision**-0.5, rtol=1e-3)
    S = v * np.eye(4) + 4.0
    r = y - 0.4
    log_z = -0.5 * (r @ np.linalg.solve(S, r) + np.linalg.slogdet(2 * np.pi * S)[1])
    np.testing.assert_allclose(-result.losses[-1], log_z, rtol=1e-4)
    draws = Predictive(effects, guide=ep.guide, params=result.params, num_samples=5)(
        random.key(1), Y
    )
    assert draws["z"].shape == (5, 4)
    assert set(ep.guide.median(result.params)) == {"theta"}


def test_several_coordinates_in_a_row_are_refused():
    words = "a row has 2 coordinates of the local latent sites"
    with pytest.raises(ValueError, match=words):
        EP(effects).init(random.key(0), Y, 2)
