"""Masked entries of latent sites, against the model without them and standard normals there."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext._model.masked import Filled
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.diagnostics import to_arviz
from numpyro_ext.guides import AutoRealNVPNormal
from numpyro_ext.objectives import VRELBO

X = np.array([0.4, -1.1, 0.8, 1.9, -0.3])
Y = np.array([1.3, 9.9, -0.2, 2.2, 9.9])
KNOWN = np.array([True, False, True, True, False])


def incomplete(x, y, known):
    a = numpyro.sample("a", dist.Normal(0.3, 2.0))
    s = numpyro.sample("s", dist.HalfNormal(1.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(a * x, s), obs=y, obs_mask=known)


def ragged(y, valid):
    """Rates of groups, each of which has its own number of counts."""
    scale = numpyro.sample("scale", dist.LogNormal(0.2, 0.5))
    with numpyro.plate("items", valid.shape[1], dim=-1), handlers.mask(mask=valid):
        with numpyro.plate("groups", len(valid), dim=-2):
            rate = numpyro.sample("rate", dist.Gamma(2.0, scale))
            numpyro.sample("y", dist.Poisson(rate), obs=y)


def walk(y, valid):
    """A walk whose steps after the last observation are masked, and read one another."""

    def step(x, row):
        y, valid = row
        with handlers.mask(mask=valid):
            x = numpyro.sample("x", dist.Normal(0.9 * x, 0.7))
            numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
        return x, None

    scan(step, 0.0, (y, valid))


COUNTS = np.array([[2, 0, 3], [1, 0, 0]])
VALID = np.array([[True, True, True], [True, False, False]])
CASES = {
    "obs_mask": (incomplete, (X, Y, KNOWN), "y_unobserved", KNOWN),
    "ragged": (ragged, (COUNTS, VALID), "rate", ~VALID),
    "scan": (walk, (Y, np.arange(5) < 3), "x", np.arange(5) >= 3),
}


@pytest.mark.parametrize(
    "case", ["obs_mask", pytest.param("ragged", marks=pytest.mark.slow), "scan"]
)
@pytest.mark.x64
def test_entries_that_nothing_reads_are_standard_normal(case, tol):
    """NumPyro's potential is flat there, in constrained space; ours has z^2 / 2 more, and in the
    other entries the same gradient."""
    model, args, name, masked = CASES[case]
    info = read_model(model, args)
    z = info.unravel(random.normal(random.key(2), (info.size,)))

    def theirs(z):
        u = jnp.where(masked, z[name], 0.0)
        added = jnp.sum(jnp.where(masked, dist.Normal().log_prob(u), 0.0))
        return potential_energy(handlers.seed(model, 0), args, {}, z) - added

    def ours(z, args):
        return Potential(model, info, {}, args, {})(z, {})

    @jax.jit
    def each(z, traced):  # masks may be traced, or known
        return [jax.value_and_grad(ours)(z, x) for x in (args, traced)]

    expected = jax.tree.leaves(jax.jit(jax.value_and_grad(theirs))(z))
    for found in each(z, args):
        for a, b in zip(jax.tree.leaves(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=tol(2e-5, 1e-11), atol=tol(2e-5, 1e-11))


@pytest.mark.parametrize("where", [True, False])
def test_entries_are_filled_only_where_nothing_reads_them(where):
    """A number that a traced program alone knows. Masked entries are N(0, 1) or have no density."""
    base = dist.Normal(3.0, 0.1).expand([4]).mask(jnp.array([True, False, False, True]))
    x, key = jnp.array([3.1, 0.5, -1.0, 2.9]), random.key(0)

    @jax.jit
    def filled(where):
        fn = Filled(base, where)
        return fn.log_prob(x), fn.sample(key)

    log_p, draw = filled(where)
    inside = dist.Normal(3.0, 0.1).log_prob(x) * jnp.array([1, 0, 0, 1])
    outside = dist.Normal().log_prob(x) * jnp.array([0, 1, 1, 0])
    np.testing.assert_allclose(log_p, inside + where * outside, rtol=1e-5)
    far = jnp.abs(draw - 3.0) > 0.6  # six standard deviations; 3 of N(0, 1) is within 0.6 of 3
    np.testing.assert_array_equal(far, [False, where, where, False])


def test_entries_that_are_read_stay_flat():
    """A prior that is flat on purpose in some entries."""

    def model(y):
        with numpyro.plate("rows", 3):
            flat = jnp.array([False, True, True])
            x = numpyro.sample("x", dist.Normal(0.0, 1.0).mask(flat))
            numpyro.sample("y", dist.Normal(x, 0.5), obs=y)

    args = (Y[:3],)
    z = {"x": jnp.array([0.7, -0.2, 1.4])}
    expected = potential_energy(handlers.seed(model, 0), args, {}, z)
    potential = Potential(model, read_model(model, args), {}, args, {})
    np.testing.assert_allclose(potential(z, {}), expected, rtol=1e-6)


def mean(y, known):
    theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=y, obs_mask=known)


def exact():
    """log Z, and mean and sd of theta."""
    y = Y[KNOWN]
    cov = 4.0 + 2.25 * np.eye(len(y))
    log_z = dist.MultivariateNormal(np.full(len(y), 0.4), cov).log_prob(y)
    precision = 0.25 + len(y) / 2.25
    return log_z, (0.4 / 4 + y.sum() / 2.25) / precision, precision**-0.5


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Trace_ELBO(), VRELBO(0.5, 3)], ids=lambda x: type(x).__name__)
def test_a_flow_at_the_mode_has_the_evidence_with_every_loss(loss):
    """The posterior and what stands for masked entries are one normal, at which the guide begins,
    so that every draw has the weight Z; its predictions of the rows without data are exact."""
    guide = AutoRealNVPNormal(mean)
    svi = SVI(mean, guide, numpyro.optim.Adam(1e-3), loss)
    state = svi.init(random.key(0), Y, KNOWN)
    log_z, m, sd = exact()
    np.testing.assert_allclose(svi.evaluate(state, Y, KNOWN), -log_z, atol=2e-3)
    params = svi.get_params(state)
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(10_000,))
    missing = draws["y_unobserved"][:, ~KNOWN]
    assert np.all(np.abs(missing.mean(0) - m) < 0.08)  # five standard errors of 10,000 draws
    np.testing.assert_allclose(missing.std(0), np.sqrt(sd**2 + 2.25), rtol=0.04)
    tree = to_arviz(svi, params, model_args=(Y, KNOWN), num_samples=100)
    assert float(tree["sample_stats"]["log_weight"].std()) < 2e-3


@pytest.mark.slow
def test_a_guide_that_masks_the_same_entries_keeps_the_mask():
    log_z, m, sd = exact()

    def model(y, known):
        theta = numpyro.sample("theta", dist.Normal(0.4, 2.0))
        with numpyro.plate("rows", len(y)), handlers.mask(mask=known):
            noise = numpyro.sample("noise", dist.Normal(0.0, 1.5))
            numpyro.sample("y", dist.Normal(theta + noise, 0.1), obs=y)

    def guide(y, known):
        theta = numpyro.sample("theta", dist.Normal(m, sd))
        with numpyro.plate("rows", len(y)), handlers.mask(mask=known):
            v = 1 / (1 / 0.01 + 1 / 2.25)
            numpyro.sample("noise", dist.Normal(100 * v * (y - theta), v**0.5))

    # With noise of variance 2.26 in place of 2.25 the guide's theta is nearly exact.
    loss = jax.jit(lambda key: VRELBO(0.5, 4).loss(key, {}, model, guide, Y, KNOWN))
    losses = [loss(key) for key in random.split(random.key(3), 3)]
    np.testing.assert_allclose(losses, -log_z, atol=0.02)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), Trace_ELBO())
    tree = to_arviz(svi, {}, model_args=(Y, KNOWN), num_samples=100)
    assert float(tree["sample_stats"]["log_weight"].std()) < 0.02
