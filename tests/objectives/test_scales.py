"""``handlers.scale`` in bounds: copies of a unit around all of it, and of data around these."""

from functools import partial

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import scale
import pytest

from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    BBAlphaELBO,
    ChiUpperBound,
    FDivergence,
    NestedVRELBO,
    ReweightedWakeSleep,
    ThermodynamicELBO,
)

X = jnp.array([0.3, -1.2, 2.1, 0.7])
OBJECTIVES = {
    "IWELBO": IWELBO(3),
    "order 2": VRELBO(2.0, 3),
    "dreg": VRELBO(0.5, 3, gradient="dreg"),
    "single": VRELBO(0.5, 3, gradient="single"),
    "black box": BBAlphaELBO(0.5, 3),
    "approximate KL": BBAlphaELBO(0.5, 3, approximate_kl=True),
    "nested": NestedVRELBO(0.0, 2, num_inner=3),
    "VIMCO": VIMCO(0.0, 3),
    "chi": ChiUpperBound(2.0, 3),
    "thermodynamic": ThermodynamicELBO(3, 3),
    "wake-sleep": ReweightedWakeSleep(3),
    "f": FDivergence("chi2", 3),
}


def local(x, s, in_guide=True):
    with numpyro.plate("rows", len(x)), scale(scale=s):
        z = numpyro.sample("z", dist.Normal(0.2, 1.0))
        numpyro.sample("x", dist.Normal(z, 0.8), obs=x)


def local_guide(x, s, in_guide=True):
    with numpyro.plate("rows", len(x)), scale(scale=s if in_guide else 1.0):
        numpyro.sample("z", dist.Normal(0.3 * x, 0.6))


QUICK = "order 2", "black box"
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OBJECTIVES]


@pytest.mark.parametrize("name", EACH)
def test_a_scale_around_whole_rows_counts_them_as_copies(name, tol):
    """Of one number, and of one of each row, whose bounds add up."""
    loss = partial(OBJECTIVES[name].loss, random.key(0), {}, local, local_guide, X)
    one = loss(1.0)
    np.testing.assert_allclose(loss(10.0), 10 * one, rtol=tol(1e-5, 1e-12))
    counts = jnp.array([1.0, 3.0, 2.0, 1.0])
    each = [loss(jnp.ones(4).at[i].set(2.0)) - one for i in range(4)]
    np.testing.assert_allclose(loss(counts), counts @ jnp.stack(each), rtol=tol(1e-4, 1e-11))


def shared(x, N=None, M=None, s=1.0):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x) if N is None else N, subsample_size=M), scale(scale=s):
        numpyro.sample("x", dist.Normal(w, 0.8), obs=x)


def shared_guide(x, *args):
    numpyro.sample("w", dist.Normal(0.4, 0.3))


@pytest.mark.parametrize("loss", [BBAlphaELBO(0.5, 3), BBAlphaELBO(0.5, 3, approximate_kl=True)])
def test_a_scale_of_n_over_m_is_a_plate_of_n_rows(loss, tol):
    of_plate, of_scale = (
        loss.loss(random.key(1), {}, shared, shared_guide, X, *args)
        for args in ((12, 4), (None, None, 3.0))
    )
    np.testing.assert_allclose(of_scale, of_plate, rtol=tol(1e-6, 1e-12))


def test_a_scale_around_data_that_share_a_latent_site_is_a_power_of_their_likelihood(tol):
    loss = IWELBO(5)
    repeated = loss.loss(random.key(2), {}, shared, shared_guide, jnp.repeat(X, 3))
    scaled = loss.loss(random.key(2), {}, shared, shared_guide, X, None, None, 3.0)
    np.testing.assert_allclose(scaled, repeated, rtol=tol(1e-6, 1e-12))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_scale_of_local_latent_sites_is_refused(name):
    args = random.key(0), {}, local, local_guide, X, 10.0, False
    with pytest.raises(ValueError, match=r"'z' is under a numpyro.handlers.scale that not every"):
        OBJECTIVES[name].loss(*args)


@pytest.mark.slow
def test_the_linear_orders_take_any_scale():
    args = random.key(0), {}, local, local_guide, X, 10.0, False
    for loss in (VRELBO(1.0, 3), BBAlphaELBO(0.0, 3), NestedVRELBO(1.0, 3), VIMCO(1.0, 3)):
        assert np.isfinite(loss.loss(*args))
