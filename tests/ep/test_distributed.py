"""Engines on parts of the data, against fixed points by quadrature, and laws."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.ep import (
    DAEP,
    DSEP,
    DistributedEP,
    StochasticDistributedEP,
)
from tests.ep.models import (
    LOGISTIC,
    fit,
    logistic,
    moments_of,
)

PARTS = np.array([0, 0, 0, 1, 1, 2, 2])


def normal_rows(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)) as idx:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[idx])


# What the moment equations give in double precision, by quadrature on fine grids.
FIXED_POINTS = {
    "DEP": (
        DistributedEP(logistic, PARTS, tol=1e-9),
        [0.60064541, 0.31364559],
        [0.60552821, -0.11734533, 0.71766543],
    ),
    "ADEP": (
        StochasticDistributedEP(logistic, PARTS, tol=1e-9),
        [0.53772788, 0.31852293],
        [0.58740168, -0.12480952, 0.76597092],
    ),
    "ADEP, .5": (
        StochasticDistributedEP(logistic, PARTS, power=0.5, tol=1e-9),
        [0.5761764055, 0.3117941276],
        [0.5792308123, -0.1191356562, 0.7290156562],
    ),
    "DAEP": (
        DAEP(logistic, PARTS, tol=1e-9),
        [0.57131632, 0.30282359],
        [0.56370641, -0.10616179, 0.72923217],
    ),
    "DAEP, a part to each row, as EP": (
        DAEP(logistic, len(PARTS), tol=1e-9),
        [0.5992165598, 0.3129476696],
        [0.6022079936, -0.1191776423, 0.7163568844],
    ),
    "DAEP by moments, a part to each row, as EP": (
        DAEP(logistic, len(PARTS), mean="moments", tol=1e-9),
        [0.5992165598, 0.3129476696],
        [0.6022079936, -0.1191776423, 0.7163568844],
    ),
    "AEP": (
        DAEP(logistic, 1, tol=1e-9),
        [0.5584846227, 0.3097543779],
        [0.5620673913, -0.113558247, 0.7381184485],
    ),
}


@pytest.mark.x64
@pytest.mark.parametrize("name", FIXED_POINTS)
def test_fixed_points(name, needs_x64):
    engine, mean, second = FIXED_POINTS[name]
    result = fit(engine, *LOGISTIC, num_steps=150)
    m, V = moments_of(result.params)
    np.testing.assert_allclose(m, mean, atol=2e-8)
    np.testing.assert_allclose(V, second, atol=2e-8)
    report = result.state.report
    assert report.converged and report.num_skipped == 0
    if name == "DEP":
        np.testing.assert_allclose(-result.losses[-1], -6.1879831444, rtol=1e-9)


@pytest.mark.x64
def test_two_updates_of_dsep(needs_x64):
    engine = DSEP(logistic, PARTS)
    state = engine.init(random.key(0), *LOGISTIC)
    for indices in ([1, 4, 5], [0, 3, 6]):
        state, _ = engine.update(state, *LOGISTIC, indices=jnp.array(indices))
    m, V = moments_of(engine.get_params(state))
    np.testing.assert_allclose(m, [0.0963010751, -0.0696259003], atol=1e-9)
    expected = [0.8418443301, -0.0486572143, 1.1882411645]
    np.testing.assert_allclose(V, expected, atol=1e-9)


def test_shared_sites_have_no_evidence():
    with pytest.raises(NotImplementedError, match=r"DSEP has no .* use EP\(model\).log_evidence"):
        DSEP(logistic, PARTS).log_evidence(None, *LOGISTIC)


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (0, "partition is 0; it must be an integer of at least 1"),
        ([0, 2, 2, 2, 0, 0, 2], "labels 0, ..., J - 1, one for each row"),
        ([0.5, 1.0, 0, 0, 0, 0, 0], "a vector of integer labels"),
        ([0, 1], r"partition is \[0, 1\], and there are 7 rows"),
    ],
)
def test_bad_partition(partition, words):
    with pytest.raises(ValueError, match=words):
        DAEP(logistic, partition).init(random.key(0), *LOGISTIC)


def test_rows_of_another_part_are_refused():
    engine = DSEP(logistic, PARTS)
    state = engine.init(random.key(0), *LOGISTIC)
    for indices in ([0, 1], [0, 1, 5], [0, -1, 5]):
        with pytest.raises(ValueError, match="must be a row of each of the 3 parts"):
            engine.update(state, *LOGISTIC, indices=jnp.array(indices))


@pytest.mark.slow
def test_one_part_by_moments_is_black_box_alpha():
    """Prior N(0, 1), data -1 and 1 of unit noise, q = N(0, 1/p): the tilted precision is P = p +
    alpha (1 - (p - 1) / 2), and 1/P + (alpha / P)^2 = 1/p, as at the optimum of BBAlphaELBO."""
    y = jnp.array([-1.0, 1.0])
    for power, family, precision in ((0.5, "full", 2.09717), (1.0, "diagonal", 1.60555)):
        engine = DAEP(normal_rows, 1, power=power, mean="moments", family=family)
        result = fit(engine, y)
        np.testing.assert_allclose(result.params["auto_loc"], [0.0], atol=1e-4)
        np.testing.assert_allclose(result.state.total.precision.ravel(), precision, rtol=1e-3)
