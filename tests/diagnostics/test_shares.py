"""Chains and particles that begin at several modes are judged at each, and so are the shares."""

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
from numpyro_ext.diagnostics.judges.shares import SHARE
from numpyro_ext.particles import AutoParticles, RegularizedSVGD
from tests.diagnostics.drawn import Drawn

LOCS, SDS, SHARES = np.array([-2.0, 2.0]), np.array([0.3, 0.15]), np.array([0.75, 0.25])
RHAT, MOVED, SIDES = "largest R-hat", "sd against exact moves, worst", "crossing rate"


def model():
    """Two normals, 13 standard deviations apart, and a number that is correlated with them."""
    logs = jnp.log(SHARES) + dist.Normal(LOCS, SDS).log_prob(
        numpyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), ()))[..., None]
    )
    numpyro.factor("modes", jax.nn.logsumexp(logs))
    numpyro.sample("a", dist.Normal(0.0, 2.0))


def modes():
    """What a search finds."""
    found = tuple(
        Mode(jnp.array([x, 0.0]), jnp.diag(jnp.array([sd, 2.0])), share=p, departure=0.0)
        for x, sd, p in zip(LOCS, SDS, SHARES.tolist(), strict=True)
    )
    several = Problem("searches ended at different modes.", "several modes")
    return Modes(found, (("z", ()), ("a", ())), problems=(several,))


class Chains(Drawn):
    """Visits one row of ``(chain, draw)`` numbers in each chain."""

    def __init__(self, z, a):
        self.length = z.shape[1]
        super().__init__(model, {"z": z.ravel(), "a": a.ravel()})
        self.modes = modes()

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        i = jnp.arange(len(rng_key)) * self.length
        return jax.vmap(self._at)(i, i, rng_key)

    def sample(self, state, model_args, model_kwargs):
        return jax.vmap(self._at)(state.i, state.i + 1, state.rng_key)


def of_chains(which, width=1.0, length=2400, num_moves=0):
    """The lines of independent draws at the mode of each chain, so much wider; ``which`` may be
    the mode of each draw. R-hat of 1,800 of them is 1.001 +- .001."""
    rng = np.random.default_rng(0)
    which = np.broadcast_to(np.reshape(which, (len(which), -1)), (len(which), length))
    e, a = rng.normal(size=(2, *which.shape))
    kernel = Chains(LOCS[which] + width * SDS[which] * e, 2.0 * a)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=length,
        num_chains=len(which),
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0))
    diagnosis = diagnose(mcmc, num_moves=num_moves)
    return diagnosis, {row.quantity: row for row in diagnosis.rows}


@pytest.mark.nightly
def test_chains_whose_shares_are_those_of_the_evidence_are_right():
    diagnosis, rows = of_chains([0, 0, 0, 1], num_moves=None)
    assert rows[RHAT].ok and rows[SHARE].ok and rows[MOVED].ok and diagnosis.ok
    assert "are the chains 0, 1, 2 with 0.75 of the draws" in rows[SHARE].verdict


def test_chains_with_other_shares_are_told_which_and_by_how_much():
    """Half of the draws where a quarter belongs: .25 / sqrt(.75 .25) standard deviations."""
    _, rows = of_chains([0, 0, 1, 1])
    assert rows[RHAT].ok and rows[SHARE].ok is False
    assert rows[SHARE].value == pytest.approx(0.577, abs=0.01)
    assert "is chain" not in rows[SHARE].verdict and "take more chains" in rows[SHARE].verdict


def test_draws_count_where_they_are_and_not_where_their_chain_began():
    """A chain that crosses once is at both modes."""
    which = np.repeat([[0], [0], [0]], 2400, 1)
    which[0, 600:] = 1
    _, rows = of_chains(which)
    assert rows[RHAT].ok and rows[SHARE].ok
    assert "are the chains 1, 2 with 0.75 of" in rows[SHARE].verdict


@pytest.mark.slow
def test_chains_that_are_too_wide_at_their_modes_are_wrong():
    """The standard deviation of all of the draws does not show it."""
    _, rows = of_chains([0, 0, 0, 1], width=1.3, num_moves=None)
    assert rows[SHARE].ok and rows[MOVED].ok is False
    assert "(at z = " in rows[MOVED].verdict


def of_particles(counts, width=1.0, num_moves=0):
    m = sum(counts)
    guide = AutoParticles(model, m, init_from=modes())
    svi = SVI(model, guide, optax.adam(0.1), RegularizedSVGD())
    params = svi.get_params(svi.init(random.key(0)))
    which = np.repeat([0, 1], counts)
    e = np.concatenate([ndtri((np.arange(n) + 0.5) / n) for n in counts])
    # Each group has a mean of 0 in the other number, too.
    order = np.concatenate(
        [
            np.random.default_rng(1).permutation(n) + i
            for n, i in zip(counts, (0, counts[0]), strict=True)
        ]
    )
    z, a = LOCS[which] + width * SDS[which] * e, 2.0 * e[order]
    x = {"z": z, "a": a}
    params["auto_particles"] = jnp.stack([jnp.asarray(x[n], float) for n, _ in modes().shapes], 1)
    params["auto_modes"] = jnp.asarray(which[:, None] == np.arange(2), float)
    diagnosis = diagnose(svi, params, model_args=(), num_moves=num_moves)
    return diagnosis, {row.quantity: row for row in diagnosis.rows}


@pytest.mark.nightly
def test_particles_whose_shares_are_those_of_the_evidence_are_right():
    diagnosis, rows = of_particles([75, 25], num_moves=None)
    assert rows[SHARE].ok and rows[MOVED].ok and diagnosis.ok
    assert not any(SIDES in name for name in rows)
    assert "are 75 particles" in rows[SHARE].verdict


def test_particles_with_other_shares_are_wrong():
    _, rows = of_particles([50, 50])
    assert rows[SHARE].ok is False and "are 50 particles" in rows[SHARE].verdict


def test_particles_that_are_too_narrow_at_their_modes_are_wrong():
    _, rows = of_particles([75, 25], width=0.6)
    assert rows[SHARE].ok and rows["implied sd ratio, worst"].ok is False
