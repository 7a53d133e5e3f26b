"""Factors of a model: their sum is the potential, and each is right at a point of its own."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_ext._model.factors import Factors
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.guides.gauss_newton import Outputs
from tests._model.models import ROWS, crossed, data, straight, unordered

X = jnp.sin(1.3 * jnp.arange(3.0 * ROWS)).reshape(ROWS, 3)
COUNTS = jnp.array([0.0, 2.0, 1.0, 4.0, 0.0, 1.0])
TREATMENT = jnp.array([2.8, 0.8, -0.3, 0.7, -0.1, 0.1])


def horseshoe(X, y, counts):
    """Scales of scales, two observed sites, and a factor outside the plate; no alphabet."""
    tau = numpyro.sample("tau", dist.HalfCauchy(1.5))
    lam = numpyro.sample("lam", dist.HalfNormal(2.0).expand([3]))
    beta = numpyro.sample("beta", dist.Normal(0.3, tau * lam))
    numpyro.factor("near", -0.7 * jnp.sum(beta**2))
    with numpyro.plate("rows", len(y)) as idx:
        mean = X[idx] @ beta
        numpyro.sample("y", dist.Normal(mean, tau), obs=y[idx])
        numpyro.sample("counts", dist.Poisson(jnp.exp(mean)), obs=counts[idx])


def schools(y):
    """The effects outside the plate, each with a factor of its own."""
    mu = numpyro.sample("mu", dist.Normal(0.5, 2.0))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.7))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([ROWS]))
    with numpyro.plate("schools", ROWS) as idx:
        numpyro.sample("y", dist.Normal(theta[idx], 1.2), obs=y[idx])


def local_schools(y, subsample_size=None):
    """The effects inside the plate, positive, so that their Jacobian counts."""
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.7))
    with numpyro.plate("schools", ROWS, subsample_size) as idx:
        theta = numpyro.sample("theta", dist.HalfNormal(tau))
        numpyro.sample("y", dist.Normal(theta, 1.2), obs=y[idx])


def vectors(X, y):
    """Whole arrays in a plate of a constant size, with a mask and a scale."""
    beta = numpyro.sample("beta", dist.Normal(0.2, 1.5).expand([3]).to_event(1))
    scale = numpyro.sample("a_scale", dist.Gamma(2.0, 1.5))
    with numpyro.plate("rows", ROWS), handlers.scale(scale=1.7), handlers.mask(mask=y > 0):
        numpyro.sample("y", dist.StudentT(4.0, X @ beta, scale), obs=y)


def standardised(y):
    """The scale of a row is that of all rows."""
    loc = numpyro.sample("loc", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", ROWS) as idx:
        numpyro.sample("y", dist.Normal(loc, jnp.std(y[idx])), obs=y[idx])


def two_plates(y, groups):
    """Observed sites in the data plate and in another one, which has a latent site too."""
    with numpyro.plate("groups", 2):
        loc = numpyro.sample("loc", dist.Normal(0.4, 2.0))
        numpyro.sample("known", dist.Normal(loc, 0.5), obs=jnp.array([0.3, 1.1]))
    with numpyro.plate("rows", ROWS) as idx:
        numpyro.sample("y", dist.Normal(loc[groups[idx]], 1.3), obs=y[idx])


ROWS_OF_DATA = {"data_plate": "rows"}
# name -> model, arguments, options, the way to one row.
MODELS = {
    "simplex and matrix": (unordered, (data(),), {}, "plate"),
    "horseshoe": (horseshoe, (X, data(), COUNTS), {}, "plate"),
    "minibatch": (straight, (data(), None, 2), {}, "plate"),
    "schools": (schools, (TREATMENT,), {}, "plate"),
    "local": (local_schools, (TREATMENT,), {}, "plate"),
    "arguments": (vectors, (X, TREATMENT), {}, "arguments"),
    "rows of a table": (crossed, (X, (ROWS, 3)), ROWS_OF_DATA, "plate"),
    "two plates": (two_plates, (data(), jnp.arange(ROWS) % 2), ROWS_OF_DATA, "plate"),
}


def factors_of(name):
    model, args, options, _ = MODELS[name]
    return Factors(model, args, **options)


@pytest.mark.x64
@pytest.mark.parametrize("name", MODELS)
def test_factors_sum_to_minus_the_potential_of_all_rows(name, tol):
    """At three points; ``Potential`` is held against NumPyro's elsewhere."""
    model, args, _, way = MODELS[name]
    factors, info = factors_of(name), read_model(model, args)
    potential = Potential(model, info, {}, args, {})
    every = {plate: jnp.arange(size) for plate, (size, _) in info.plates.items()}

    def both(x):
        z = info.unravel(x)
        local = {name: z[name][:, None] for name in factors.local}
        x, n = factors.info.ravel(z), jnp.arange(factors.size)
        rows = jax.vmap(factors.row, (None, 0, 0))(x, n, local)
        total = sum(jnp.sum(term) for term in factors.terms(x).values())
        return jnp.sum(rows) + total, -potential(z, every)

    ours, expected = jax.jit(jax.vmap(both))(0.7 * random.normal(random.key(1), (3, info.size)))
    np.testing.assert_allclose(ours, expected, rtol=tol(1e-5, 1e-12))
    assert factors.rows_by == way


def test_rows_alone_are_checked_by_one_program_for_all_data():
    """The data are its arguments, so that another process finds it among compiled programs."""
    factors = Factors(schools, (TREATMENT,))
    programs = [factors._is_right_on._cache_size()]
    factors.on((2 * TREATMENT,), {}).check()
    assert [*programs, factors._is_right_on._cache_size()] == [1, 1]


def test_each_row_is_right_at_a_latent_vector_of_its_own(tol):
    """Rows in any order, some of them twice, against SciPy's densities row by row."""
    factors = factors_of("horseshoe")
    n = jnp.array([3, 0, 5, 3, 1, 1, 4])
    x = 0.6 * random.normal(random.key(2), (len(n), factors.info.size))
    found = jax.jit(jax.vmap(factors.row))(x, n)
    for one, row, value in zip(np.asarray(x), np.asarray(n), found, strict=True):
        mean = np.asarray(X)[row] @ one[4:]  # after log tau and the three log lam
        expected = stats.norm.logpdf(np.asarray(data())[row], mean, np.exp(one[0]))
        expected += stats.poisson.logpmf(int(COUNTS[row]), np.exp(mean))
        np.testing.assert_allclose(value, expected, rtol=tol(1e-4, 1e-10))


def test_terms_are_those_of_each_batch_element(tol):
    """The prior of each element with its Jacobian, and the factor outside the plate."""
    factors = factors_of("horseshoe")
    x = 0.6 * random.normal(random.key(3), (factors.info.size,))
    found = jax.jit(factors.terms)(x)
    log_tau, log_lam, beta = np.asarray(x[0]), np.asarray(x[1:4]), np.asarray(x[4:])
    tau, lam = np.exp(log_tau), np.exp(log_lam)
    expected = {
        "tau": stats.halfcauchy.logpdf(tau, scale=1.5) + log_tau,
        "lam": stats.halfnorm.logpdf(lam, scale=2.0) + log_lam,
        "beta": stats.norm.logpdf(beta, 0.3, tau * lam),
        "near": -0.7 * np.sum(beta**2),
    }
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].shape == np.shape(value)
        np.testing.assert_allclose(found[name], value, rtol=tol(1e-4, 1e-10))


def test_local_sites_are_no_part_of_the_flat_vector():
    factors = Factors(local_schools, (TREATMENT, 2))
    assert tuple(factors.info.latents) == ("tau",)
    assert factors.draw_prior(random.key(0), 3).shape == (3, 1)
    assert {name: x.shape for name, x in factors.local.items()} == {"theta": (1,)}
    assert set(factors.terms(jnp.zeros(1))) == {"tau"}


def test_rows_that_depend_on_each_other_are_refused():
    with pytest.raises(ValueError, match="plate 'rows' can"):
        Factors(standardised, (data(),))


LATE = 195


def jump(y, cut=LATE):
    """The last rows have another mean, by an array that the model makes of all rows."""
    a, b = (numpyro.sample(name, dist.Normal(0.0, 10.0)) for name in "ab")
    late = jnp.arange(len(y)) >= cut
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(a + b * late, 1.0), obs=y)


def test_all_rows_are_compared_with_a_pass_over_all():
    """Sliced by its arguments a row is one of the first; eight of 200 rows do not see that."""
    y = jnp.sin(jnp.arange(200.0))
    for make in (Factors, Outputs):
        with pytest.raises(ValueError, match="no row of the plate 'rows' can be computed alone"):
            make(jump, (y,))


def test_all_rows_are_compared_on_other_data_too():
    """Where no row is a late one the arguments may be sliced; on other data they may not."""
    y = jnp.sin(jnp.arange(200.0))
    factors = Factors(jump, (y, jnp.array(1000)))
    factors.on((y + 1, jnp.array(1000)), {}).check()
    with pytest.raises(ValueError, match=r"on these data a row.* as in X\[idx\] .* new engine"):
        factors.on((y, jnp.array(LATE)), {}).check()


def test_programs_without_one_data_plate_are_refused():
    def alone(y=None):
        numpyro.sample("y", dist.Normal(numpyro.sample("loc", dist.Normal()), 1.0), obs=y)

    with pytest.raises(ValueError, match="no observed site"):
        Factors(alone)
    with pytest.raises(ValueError, match="observed sites are in no numpyro"):
        Factors(alone, (1.0,))
    table = X, (ROWS, 3)
    with pytest.raises(ValueError, match=r"plates \['columns', 'rows'\], and data_plate is not"):
        Factors(crossed, table)
    with pytest.raises(ValueError, match="data_plate is 'row'"):
        Factors(crossed, table, data_plate="row")
