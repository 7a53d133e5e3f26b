"""How far effects are to be centred: the closed form of normal models, and what rows say."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam, seed, trace
from numpyro.infer.reparam import LocScaleReparam
import pytest

from numpyro_ext.optim import find_centering

ROWS = np.array([1, 4, 25, 400])
GROUP = jnp.asarray(np.repeat(np.arange(4), ROWS))


def crossed(group, other, y, spread):
    """Two effects in raw units, of which one is nested in a mean and one is a vector."""
    mean = numpyro.sample("mean", dist.Normal(2000, 300))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(mean, spread))
    of_other = numpyro.sample("other", dist.Normal(0, spread).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(level[group] + of_other[other], 60.0), obs=y)


def data():
    other = jnp.arange(len(GROUP)) % 2
    y = 2000 + 30.0 * jnp.asarray([-1, 1, 0.5, -0.5])[GROUP] + 60 * jnp.sin(jnp.arange(len(GROUP)))
    return GROUP, other, y


@pytest.mark.slow
def test_of_a_normal_model_it_is_the_share_of_the_rows_in_what_is_known():
    """With rows of variance 60^2 and a known spread of 30 the information is n / 60^2. The other
    effect has no other latent site in its prior, so it is none."""
    centering = find_centering(crossed, *data(), spread=30.0)
    assert list(centering) == ["level"]
    np.testing.assert_allclose(centering["level"], ROWS / (ROWS + 4), atol=2e-3)


@pytest.mark.slow
def test_an_unknown_spread_centres_groups_of_many_rows_and_decentres_those_of_few():
    def model(*args):
        crossed(*args, numpyro.sample("spread", dist.LogNormal(3.4, 0.3)))

    centering = find_centering(model, *data())
    assert list(centering) == ["level", "other"]
    assert {name: c.shape for name, c in centering.items()} == {"level": (4,), "other": (2,)}
    assert np.all(np.diff(centering["level"]) > 0)
    assert centering["level"][0] < 0.4 and centering["level"][-1] > 0.97
    assert np.all(centering["other"] > 0.95)  # 215 rows each
    config = {name: LocScaleReparam(c) for name, c in centering.items()}
    sites = trace(seed(reparam(model, config=config), 0)).get_trace(*data())
    assert sites["level_decentered"]["value"].shape == (4,)


def test_a_model_without_effects_is_refused():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)

    with pytest.raises(ValueError, match=r"no latent site of \['z'\] is a Normal whose mean"):
        find_centering(model, 1.0)
