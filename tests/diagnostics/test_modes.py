"""Modes that are missing, or that have another share of the draws than of the mass."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI
import optax
import pytest
from scipy.special import ndtri

from numpyro_ext._model.modes import Mode, Modes, Problem
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.diagnostics.checks.chains import AGREEMENT
from numpyro_ext.diagnostics.checks.modes import SHARES_OF_MODES as SHARE
from numpyro_ext.diagnostics.comparison import SD
from numpyro_ext.mcmc import Settings
from numpyro_ext.particles import AutoParticles, RegularizedSVGD
from tests.diagnostics import drawn
from tests.diagnostics.drawn import Drawn, rows_of, wrong

LOCS, SDS, SHARES = np.array([-2.0, 2.0]), np.array([0.3, 0.15]), np.array([0.75, 0.25])
SEVERAL = Problem("searches ended at different modes.", "several modes")


def model(by=0.0):
    """Two normals, 13 standard deviations apart, and a number beside them."""
    logs = jnp.log(SHARES) + dist.Normal(LOCS + by, SDS).log_prob(
        numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), ()))[..., None]
    )
    numpyro.factor("modes", jax.nn.logsumexp(logs))
    numpyro.sample("a", dist.Normal(0.0, 2.0))


def modes(**second):
    """What a search finds."""
    centers = [jnp.array([x, 0.0]) for x in LOCS]
    roots = [jnp.diag(jnp.array([sd, 2.0])) for sd in SDS]
    common = [{"share": p, "departure": 0.0} for p in SHARES.tolist()]
    common[1] |= second
    each = (Mode(x, A, **rest) for x, A, rest in zip(centers, roots, common, strict=True))
    return Modes(tuple(each), (("z", ()), ("a", ())), problems=(SEVERAL,))


class Chains(Drawn):
    """Visits one row of ``(chain, draw)`` numbers in each chain."""

    def __init__(self, z, a, found):
        self.length = z.shape[1]
        super().__init__(model, {"z": z.ravel(), "a": a.ravel()})
        self.modes = found

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        i = jnp.arange(len(rng_key)) * self.length
        return jax.vmap(self._at)(i, i, rng_key)

    def sample(self, state, model_args, model_kwargs):
        return jax.vmap(self._at)(state.i, state.i + 1, state.rng_key)


def of_chains(which, width=1.0, length=2400, num_moves=0, settings=None, **second):
    """The lines of independent draws at the mode of each chain, so much wider; ``which`` may be
    the mode of each draw. R-hat of 1,800 of them is 1.001 +- .001."""
    rng = np.random.default_rng(0)
    which = np.broadcast_to(np.reshape(which, (len(which), -1)), (len(which), length))
    e, a = rng.normal(size=(2, *which.shape))
    kernel = Chains(LOCS[which] + width * SDS[which] * e, 2.0 * a, modes(**second))
    kernel.settings = settings
    how = {"num_chains": len(which), "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=0, num_samples=length, **how)
    mcmc.run(random.key(0))
    return diagnose(mcmc, num_moves=num_moves)


@pytest.mark.nightly
def test_chains_whose_shares_are_those_of_the_evidence_are_right():
    rows = rows_of(of_chains([0, 0, 0, 1], num_moves=None))
    assert AGREEMENT not in rows and rows[SHARE].ok and rows[SD].ok is None
    assert "has 0.75 of the draws" in rows[SHARE].verdict


def test_chains_with_other_shares_are_told_which_and_by_how_much():
    """Half of the draws where a quarter belongs: .25 / sqrt(.75 .25) standard deviations."""
    rows = rows_of(of_chains([0, 0, 1, 1]))
    assert rows[SHARE].ok is False
    assert rows[SHARE].value == pytest.approx(0.577, abs=0.01)
    assert "take more chains" in rows[SHARE].verdict


def test_draws_count_where_they_are_and_not_where_their_chain_began():
    """A chain that crosses once is at both modes."""
    which = np.repeat([[0], [0], [0]], 2400, 1)
    which[0, 600:] = 1
    rows = rows_of(of_chains(which))
    assert rows[SHARE].ok


@pytest.mark.parametrize(
    ("second", "why"),
    [
        ({"departure": 0.5}, "far from normal at a mode"),
        ({"decrement": 1.0}, "has not come to a mode"),
        ({"copy_of": 0}, "copies of each other"),
    ],
)
def test_masses_that_are_not_known_judge_no_shares(second, why):
    row = rows_of(of_chains([0, 0, 1, 1], length=300, **second))[SHARE]
    assert row.ok is None and why in row.verdict


@pytest.mark.parametrize(
    ("which", "second", "ok"),
    [([0, 0], {}, False), ([0, 1], {}, None), ([0, 0], {"departure": 0.5}, None)],
)
def test_a_mode_without_draws_counts_whatever_else_is_not_known(which, second, ok):
    """An eighth of the draws, twice too wide, are at no mode. All are nearest to the first; with
    half of the mass that the other one has, a mean is sqrt(1/8) deviations off. Two halves could
    be right with masses that are off by a factor of 2, and so could a mode of a doubtful mass."""
    row = rows_of(of_chains(which, width=2.0, **second))[SHARE]
    assert row.ok is ok and ("at none of the modes" in row.verdict)
    assert ok is None or row.value == pytest.approx(0.125**0.5, abs=0.01)


def test_several_modes_are_no_problem_where_each_has_its_share():
    settings = Settings(0.1, problems=(SEVERAL,))
    right, other = (of_chains(x, settings=settings) for x in ([0, 0, 0, 1], [0, 0, 1, 1]))
    assert "problems" not in rows_of(right) and "problems" in wrong(other)


def of_particles(counts, width=1.0, num_moves=0):
    m = sum(counts)
    guide = AutoParticles(model, m, init_from=modes())
    svi = SVI(model, guide, optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0)))
    which = np.repeat([0, 1], counts)
    e = np.concatenate([ndtri((np.arange(n) + 0.5) / n) for n in counts])
    rng, (first, second) = np.random.default_rng(1), counts
    # Each group has a mean of 0 in the other number, too.
    order = np.concatenate([rng.permutation(first), first + rng.permutation(second)])
    x = {"z": LOCS[which] + width * SDS[which] * e, "a": 2.0 * e[order]}
    params["auto_particles"] = jnp.stack([jnp.asarray(x[n], float) for n, _ in modes().shapes], 1)
    return diagnose(svi, params, model_args=(), num_moves=num_moves)


def test_particles_have_the_shares_of_the_evidence_or_are_wrong():
    assert rows_of(of_particles([75, 25]))[SHARE].ok
    assert rows_of(of_particles([50, 50]))[SHARE].ok is False


def test_modes_of_another_fit_of_the_guide_judge_no_draws():
    """A guide that has begun a fit to other data since has their modes."""
    guide = AutoParticles(model, 40, init_from=modes())
    svi = SVI(model, guide, optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0)))
    same, other = (
        rows_of(diagnose(svi, params, model_args=(by,), num_moves=0)) for by in (0.0, 1.0)
    )
    assert SHARE in same and SHARE not in other


@pytest.mark.slow
@pytest.mark.parametrize(("width", "ok"), [(1.0, True), (0.5, False)])
def test_particles_are_compared_at_each_mode_by_itself(width, ok):
    """The standard deviation of all of them does not show how wide they are."""
    found = of_particles([75, 25], width=width, num_moves=None)
    rows = rows_of(found)
    assert rows[SHARE].ok and (rows[SD].ok, found.ok) == (ok, ok), found
    assert ok or "(at z = " in rows[SD].verdict


def apart(share):
    """Normals of shares 1 - p and p at (-1, -1) and (1, 1), which a search from 0 finds."""
    z = numpyro.sample("z", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    logs = dist.Normal(jnp.array([[-1.0, -1.0], [1.0, 1.0]]), 0.1).log_prob(z).sum(1)
    numpyro.factor("modes", jax.nn.logsumexp(logs + jnp.log(jnp.array([1 - share, share]))))


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.01])
def test_a_guide_that_did_not_search_is_compared_with_the_modes_of_a_search(share):
    """All of its draws are at one of two modes of shares 1 - p and p: sqrt(p / (1 - p)) sds."""
    first = {"z": (jnp.full(2, -1.0), jnp.full(2, 0.1))}
    found = diagnose(drawn.drawing(apart, first), {}, model_args=(share,))
    row = rows_of(found)[SHARE]
    assert row.value == pytest.approx((share / (1 - share)) ** 0.5, abs=0.02)
    assert row.ok is (share < 0.03) and wrong(found) == ([] if row.ok else [SHARE]), found


@pytest.mark.slow
def test_a_mode_that_no_search_from_near_0_finds_is_told_of():
    """The modes are at (3, -200) and (5, -170); all draws are at the first, as searches from 0."""
    first = {"z": (drawn.LOCS[0], drawn.SDS[0])}
    row = rows_of(diagnose(drawn.drawing(drawn.two_modes, first), {}, model_args=(0.2,)))[SHARE]
    assert row.ok is False and row.value == pytest.approx((0.2 / 0.8) ** 0.5, abs=0.02)
