"""The curvature of a hierarchy by terms: against the Hessian, and the sites it cannot take."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.checks import read_global
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.row_curvature import RowCurvature

RNG = np.random.default_rng(0)
N, FIRMS, WEEKS, PATIENTS = 400, 18, 20, 40
FIRM, WEEK = (jnp.asarray(RNG.integers(0, size, N)) for size in (FIRMS, WEEKS))
PATIENT = jnp.asarray(RNG.integers(0, PATIENTS - 1, N))  # the last one has no row
T, Y = jnp.asarray(RNG.normal(size=N), float), RNG.poisson(2.0, N)


def model(y, batch=None):
    """A crossed effect, a walk, and pairs of correlated effects, of counts with a minibatch."""
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("patients", PATIENTS):
        law = dist.MultivariateNormal(jnp.zeros(2), scale_tril=tau[:, None] * root)
        own = numpyro.sample("own", law)
    s = numpyro.sample("s", dist.HalfNormal(1))
    # No plate, and one event.
    firm = numpyro.sample("firm", dist.Normal(mean, s).expand([FIRMS]).to_event(1))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(0.3, WEEKS))
    with numpyro.plate("rows", len(y), subsample_size=batch) as idx:
        i = PATIENT[idx]
        eta = firm[FIRM[idx]] + own[i, 0] + own[i, 1] * T[idx] + walk[WEEK[idx]]
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y[idx])


def of(batch: int | None) -> tuple[RowCurvature, Potential, np.ndarray]:
    y = jnp.asarray(Y)
    info = read_global(model, (y,), {"batch": batch}, because="")
    potential = Potential(model, info, {}, (y,), {"batch": batch})
    x = np.random.default_rng(1).normal(size=info.size) / 3
    return RowCurvature(potential, x), potential, x


@pytest.mark.slow
def test_curvature_is_the_hessian():
    """Each number of the Hessian, in the layout in which pairs are leaves, and 0 elsewhere."""
    curvature, potential, x = of(None)
    assert curvature.arrow and curvature.leaves.shape == (PATIENTS, 2)
    assert {color.site for color in curvature.colors} == {"own", "firm"}  # a row sees all steps
    precision = curvature.precision((x[None], x[None]))
    z = jnp.asarray(x, jnp.result_type(float))
    H = np.asarray(jax.jit(jax.hessian(lambda z: potential(potential.info.unravel(z), {})))(z))
    core, leaves = curvature.core, curvature.leaves
    close = {"rtol": 2e-4, "atol": 2e-4}
    np.testing.assert_allclose(precision.between, H[np.ix_(core, core)], **close)
    np.testing.assert_allclose(precision.across, H[leaves][:, :, core], **close)
    within = H[leaves[:, :, None], leaves[:, None, :]]
    np.testing.assert_allclose(precision.within, within, **close)
    value, grad = curvature.value_and_grad((x[None], x[None]))
    exact = jax.jit(lambda z: potential.value_and_grad_flat(z, {}))(z)
    np.testing.assert_allclose(value, exact[0], rtol=1e-5)
    np.testing.assert_allclose(grad, exact[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pieces_of_a_minibatch_sum_to_all_rows(monkeypatch):
    """In pieces of 64 rows, the last of them shorter."""
    whole, _, x = of(None)
    monkeypatch.setattr("numpyro_ext._model.potential.ROWS", 64)
    pieces, _, _ = of(50)
    assert len(pieces.parts[0].pieces) == 7
    points = np.stack([x, x + 0.1]), x[None]
    one, other = whole.precision(points), pieces.precision(points)
    for name in ("between", "across", "within"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-4)


def test_one_factor_under_two_names_and_effects_without_rows_are_said():
    def twice(y):
        own = {}
        for name, size in (("firm", FIRMS), ("shop", FIRMS), ("week", WEEKS), ("idle", 30)):
            with numpyro.plate(f"levels of {name}", size):
                own[name] = numpyro.sample(name, dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", N):
            eta = own["firm"][FIRM] + own["shop"][(FIRM + 3) % FIRMS] + own["week"][WEEK]
            numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)

    y = jnp.asarray(Y)
    info = read_global(twice, (y,), {}, because="")
    curvature = RowCurvature(Potential(twice, info, {}, (y,), {}), np.zeros(info.size))
    idle, aliases = curvature.problems()
    assert idle.kind == "no rows" and "'idle', which keeps its prior" in idle
    assert aliases.kind == "one factor twice" and "'firm' and 'shop'" in aliases


def test_effects_that_are_means_of_others_have_rows():
    """No row names a region, but the prior of its firms does."""

    def nested(y):
        with numpyro.plate("regions", 17):
            region = numpyro.sample("region", dist.Normal(0.0, 1.0))
        with numpyro.plate("firms", FIRMS):
            own = numpyro.sample("own", dist.Normal(region[np.arange(FIRMS) % 17], 1.0))
        with numpyro.plate("rows", N):
            numpyro.sample("y", dist.Poisson(jnp.exp(own[FIRM])), obs=y)

    y = jnp.asarray(Y)
    info = read_global(nested, (y,), {}, because="")
    assert not RowCurvature(Potential(nested, info, {}, (y,), {}), np.zeros(info.size)).problems()
