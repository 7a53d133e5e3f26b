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
    assert report.converged and report.num_improper == report.num_skipped == 0
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


@pytest.mark.slow
def test_the_evidence_of_shared_sites_is_eps():
    """-6.18940 by EP and -6.18347 exactly, where a shared site for each row is 1 to 5 nats off;
    the state of DSEP scatters by .1 standard deviations, and its evidence by the square of that."""
    engine = DSEP(logistic, PARTS)
    result = engine.run(random.key(0), 600, *LOGISTIC, progress_bar=False)
    computed = engine.log_evidence(result.state, *LOGISTIC)
    assert abs(computed + 6.1894) < 0.02
    assert abs(result.losses[-1] - 6.1894) > 0.5


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        (0, "partition is 0; it must be an integer of at least 1"),
        (8, "partition is 8, and there are only 7 rows"),
        ([0, 2, 2, 2, 0, 0, 2], "labels, one for each row, which are 0, 1"),
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


def on_a_grid(result, parts, power):
    """The mean of the moments of the tilted distributions of each part, the moments of q, and L: on
    a grid of the fixture's two coefficients, in double precision."""
    state = result.state
    eta, Lam = np.asarray(state.shift, float), np.asarray(state.precision, float)
    X, y = (np.asarray(x, float) for x in LOGISTIC)
    cov = np.linalg.inv(Lam)
    m, sd = cov @ eta, np.sqrt(np.diag(cov))
    axes = [np.linspace(m[k] - 9 * sd[k], m[k] + 9 * sd[k], 401) for k in range(2)]
    w = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    area = np.prod([axis[1] - axis[0] for axis in axes])

    def log_normal(eta, Lam):
        """Without its normaliser."""
        return w @ eta - np.einsum("wi,ij,wj->w", w, Lam, w) / 2

    q = np.exp(log_normal(eta, Lam) - log_normal(eta, Lam).max())
    log_lik = -np.logaddexp(0, np.where(y > 0, -1, 1)[:, None] * (X @ w.T))
    t = np.concatenate([w, (w[:, :, None] * w[:, None]).reshape(-1, 4)], 1)
    computed, energy = [], 0.0
    shifts, precisions = np.asarray(state.site_shift[0]), np.asarray(state.site_precision[0])
    for j in range(max(parts) + 1):
        site = log_normal(shifts[j].astype(float), precisions[j].astype(float))
        tilted = [q * np.exp(power * (log_lik[n] - site)) for n in np.flatnonzero(parts == j)]
        computed.append(np.mean([(p @ t) / p.sum() for p in tilted], 0))
        energy += sum(np.log(p.sum() / q.sum()) for p in tilted) / power
    energy += np.log(np.sum(np.exp(log_normal(eta, Lam))) * area)
    of_prior = np.asarray(state.prior_shift, float)
    wide = np.linalg.inv(np.asarray(state.prior_precision, float))
    energy -= of_prior @ wide @ of_prior / 2 + np.linalg.slogdet(2 * np.pi * wide)[1] / 2
    return np.stack(computed), (q @ t) / q.sum(), energy


@pytest.mark.slow
def test_distributed_black_box_alpha_has_the_moments_of_each_part():
    """The moments of q are the mean of the tilted ones in every part, which is what its energy is
    stationary at; minus the energy is the loss."""
    result = fit(DAEP(logistic, PARTS, power=0.5, mean="moments"), *LOGISTIC)
    assert result.state.report.converged
    computed, q, energy = on_a_grid(result, PARTS, 0.5)
    np.testing.assert_allclose(computed, np.broadcast_to(q, computed.shape), atol=2e-3)
    np.testing.assert_allclose(-result.losses[-1], energy, atol=1e-3)


@pytest.mark.nightly
def test_one_part_by_moments_is_black_box_alpha():
    """Prior N(0, 1), data -1 and 1 of unit noise, q = N(0, 1/p): the tilted precision is P = p +
    alpha (1 - (p - 1) / 2), and 1/P + (alpha / P)^2 = 1/p, as at the optimum of BBAlphaELBO."""
    y = jnp.array([-1.0, 1.0])
    for power, family, precision in ((0.5, "full", 2.09717), (1.0, "diagonal", 1.60555)):
        engine = DAEP(normal_rows, 1, power=power, mean="moments", family=family)
        result = fit(engine, y)
        np.testing.assert_allclose(result.params["auto_loc"], [0.0], atol=1e-4)
        np.testing.assert_allclose(result.state.precision.ravel(), precision, rtol=1e-3)
