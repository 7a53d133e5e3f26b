"""Where particles begin: at the modes of their posterior, each of which keeps its share of them."""

from functools import cache
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, init_to_sample
import pytest
from scipy import stats

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.optim import find_modes
from numpyro_ext.particles import AutoParticles, ParVI, RegularizedSVGD, particle_step
from numpyro_ext.scores import RBF
from tests.two_modes import LOCS, SDS, two_modes

M, STEPS = 50, 200


@cache
def modes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_modes(two_modes, starts=16)  # most points lead to the wider one


@cache
def fitted():
    guide = AutoParticles(two_modes, M, init_from=modes())
    svi = SVI(two_modes, guide, particle_step(STEPS), loss=RegularizedSVGD())
    return svi, svi.run(random.key(0), STEPS, progress_bar=False)


@pytest.mark.slow
def test_each_mode_keeps_its_share_of_the_particles():
    """33 of 50; moved by one field in units of all, a fifth of those change sides."""
    svi, result = fitted()
    sites = {name: np.asarray(x) for name, x in svi.guide.particles(result.params).items()}
    left = sites["z"] < 0
    assert np.sum(left) == 33
    for here, loc, sd in ((left, LOCS[0], SDS[0]), (~left, LOCS[1], SDS[1])):
        assert np.mean(sites["z"][here]) == pytest.approx(loc, abs=0.1 * sd)
        assert np.std(sites["z"][here]) == pytest.approx(sd, rel=0.1)
        assert np.std((sites["a"] - 3 * sites["z"])[here]) == pytest.approx(0.5, rel=0.15)


@pytest.mark.slow
def test_a_run_goes_on_with_its_modes_and_pickles():
    svi, result = fitted()
    groups = np.asarray(result.params["auto_modes"])
    np.testing.assert_array_equal(groups.sum(0), [33, 17])
    states = (
        svi.run(random.key(1), 2, init_state=result.state, progress_bar=False).state,
        svi.init(random.key(1), init_params=result.params),
        pickle.loads(pickle.dumps(result.state)),
    )
    for state in states:
        np.testing.assert_array_equal(svi.get_params(state)["auto_modes"], groups)
    # Particles of no search have no modes.
    moved = {"auto_particles": result.params["auto_particles"] + 1.0}
    params = svi.get_params(svi.init(random.key(1), init_params=moved))
    assert params["auto_modes"].shape == (M, 0)


@pytest.mark.slow
def test_particles_of_each_mode_move_as_if_alone_and_one_of_few_rests():
    """With a step of at most 1 in units of their own spread, and the gradient of the logarithm of
    their part: by Bayes' rule for two normals with the means of the groups and one covariance."""
    keys = random.split(random.key(0), 2)
    x = random.normal(keys[0], (40, 2)) * jnp.array([0.1, 30.0])
    x = x.at[20:].multiply(5.0).at[20:].add(jnp.array([0.2, 3.0]))
    g = 3.0 * random.normal(keys[1], (40, 2)) / jnp.array([0.1, 30.0])
    field = RegularizedSVGD(RBF(0.7))
    which = np.repeat([0, 1, 2], [19, 19, 2])
    v = jax.jit(field.velocity_and_bandwidth)(x, g, groups=jnp.eye(3)[which])[0]
    alone_of = jax.jit(field.velocity)
    y = np.asarray(x, float)
    parts = [y[which == k] for k in range(2)]
    covs = [np.cov(part.T, bias=True) for part in parts]
    covs = [19 / 21 * c + 2 / 21 * np.diag(np.diag(c)) for c in covs]
    residuals = np.concatenate([part - part.mean(0) for part in parts])
    within = residuals.T @ residuals / 38
    within = 38 / 40 * within + 2 / 40 * np.diag(np.diag(within))
    slopes = np.stack([(p.mean(0) - y) @ np.linalg.inv(within) for p in parts], 1)
    q = np.stack([stats.multivariate_normal(p.mean(0), within).pdf(y) for p in parts], 1)
    common = np.einsum("ik,ikd->id", q / q.sum(1, keepdims=True), slopes)
    for k in range(2):
        here, shrunk = which == k, covs[k]
        own = g[here] + jnp.asarray(slopes[here, k] - common[here])
        alone, c = np.asarray(alone_of(x[here], own.astype(g.dtype))), np.diag(np.diag(shrunk))
        speed = np.sqrt(np.mean(np.linalg.solve(np.linalg.cholesky(shrunk), alone.T) ** 2, 0))
        limited = alone / np.maximum(1, speed)[:, None]
        assert np.max(speed) > 1.2
        np.testing.assert_allclose((v[here] - limited) / np.sqrt(np.diag(c)), 0, atol=2e-3)
    np.testing.assert_array_equal(v[which == 2], 0)


def mean_of(x):
    w = numpyro.sample("w", dist.Normal(0.0, 1e6).expand([2]).to_event(1))
    numpyro.sample("x", dist.Normal(w, 1e-3).expand(x.shape).to_event(2), obs=x)


def by_default(model, num, **options):
    guide = AutoParticles(model, num, **options)
    return SVI(model, guide, particle_step(1), loss=RegularizedSVGD())


def plain():
    numpyro.sample("z", dist.Normal(300.0, 1.0))


def wide():
    numpyro.sample("z", dist.Normal().expand([513]).to_event(1))


@pytest.mark.filterwarnings("ignore:4 particles for 513 latent dimensions")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (plain, {"init_from": None}),
        (plain, {"init_scale": 0.1}),
        (plain, {"init_loc_fn": init_to_sample}),
        (wide, {}),
    ],
)
def test_without_a_search_particles_begin_as_numpyro_has_it(model, options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferenceWarning)
        warnings.filterwarnings("ignore", "4 particles for 513")
        svi = by_default(model, 4, **options)
        params = svi.get_params(svi.init(random.key(0)))
    assert list(params) == ["auto_particles"]
    z = np.asarray(params["auto_particles"])
    assert np.all(np.abs(z - 300) < 6) if "init_loc_fn" in options else np.all(np.abs(z) < 3)


def test_traced_arguments_warn_and_begin_as_numpyro_has_it():
    svi = by_default(mean_of, 5)
    with pytest.warns(InferenceWarning, match=r"particles begin at NumPyro's start.*is traced"):
        state = jax.jit(svi.init)(random.key(0), jnp.full((4, 2), 7.0))
    assert np.all(np.abs(svi.get_params(state)["auto_particles"]) < 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("make", [AutoParticles, ParVI])
def test_what_was_found_once_starts_particles_and_is_compared_with_the_model(make):
    def start(model):
        given = make(model, init_from=modes())
        if make is ParVI:
            return given.init(random.split(random.key(0), 10), 5).modes
        svi = SVI(model, given, particle_step(1), loss=RegularizedSVGD())
        return svi.get_params(svi.init(random.key(0)))["auto_modes"]

    groups = np.asarray(start(two_modes))
    assert groups.sum(0)[0] == round(0.66 * len(groups))
    with pytest.raises(ValueError, match="init_from has the unconstrained latent sites"):
        start(plain)
    with pytest.raises(TypeError, match="init_from is str; it must be a pair"):
        make(plain, init_from="mode")


def test_a_mode_of_few_particles_is_no_group():
    """Of 4 particles in 2 dimensions all move together."""
    svi = by_default(two_modes, 4, init_from=modes())
    assert svi.get_params(svi.init(random.key(0)))["auto_modes"].shape == (4, 1)


def near_modes():
    """Two modes four of their standard deviations apart, of which particles reach the other one."""
    parts = dist.Normal(jnp.array([1.0, -1.0]), jnp.array([0.5, 0.55]))
    share = dist.Categorical(jnp.array([0.88, 0.12]))
    numpyro.sample("z", dist.MixtureSameFamily(share, parts))
    numpyro.sample("a", dist.Normal(0.0, 1.0))


@pytest.mark.slow
def test_particles_of_near_modes_keep_their_shares_at_eight_keys():
    """Means are within 0.01, and standard deviations within 0.01 of the right ones; where each
    particle moves in all of the posterior, they are off by up to 0.1 and 0.11."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        at = find_modes(near_modes, starts=16)
    guide = AutoParticles(near_modes, 100, init_from=at)
    svi = SVI(near_modes, guide, particle_step(300), loss=RegularizedSVGD())
    mean = 0.88 - 0.12
    sd = (0.88 * 0.5**2 + 0.12 * 0.55**2 + 1 - mean**2) ** 0.5
    for seed in range(8):
        result = svi.run(random.key(seed), 300, progress_bar=False)
        z = np.asarray(guide.particles(result.params)["z"])
        assert np.mean(z) == pytest.approx(mean, abs=0.025)
        assert np.std(z) == pytest.approx(sd, abs=0.025)
