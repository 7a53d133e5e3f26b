"""Restarts begin at starts of their own, and identical ones are said to be so."""

from concurrent.futures import ThreadPoolExecutor

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
import optax
import pytest

from numpyro_ext.diagnostics import (
    InferenceWarning,
    diagnose,
    held_out_log_likelihood,
    restarts,
    to_arviz,
)

X = jnp.array([0.5, -1.0, 2.0])


def model(x):
    z = numpyro.sample("z", dist.Normal())
    with numpyro.plate("N", len(x)):
        numpyro.sample("x", dist.Normal(z), obs=x)


def make(guide, rate=0.0):
    return lambda: SVI(model, guide(model), optax.sgd(rate), Trace_ELBO())


def quantities(*args):
    return {row.quantity: row for row in diagnose(*args, model_args=(X,), num_moves=0).rows}


@pytest.mark.slow
def test_each_run_is_that_of_a_new_svi_with_its_own_key():
    """A step of size 0 leaves every run at its start."""
    make_svi, keys = make(AutoNormal), random.split(random.key(0), 3)
    fits = restarts(make_svi, random.key(0), 3, 1, X, progress_bar=False)
    alone = [make_svi().run(key, 1, X, progress_bar=False) for key in keys]
    starts = [float(fit.params["z_auto_loc"]) for fit in fits]
    assert starts == [float(fit.params["z_auto_loc"]) for fit in alone]
    assert len(set(starts)) == 3
    # Starts of +-2 and draws of sd .1 around them are no chains of one posterior.
    assert quantities(make_svi(), fits)["largest R-hat"].ok is False


def test_points_find_the_mode_from_every_start_and_are_an_ensemble():
    """The mode is 0.375; the gradient has the slope 4, so a step of 1/4 of it ends there."""
    make_svi = make(AutoDelta, 0.25)
    fits = restarts(make_svi, random.key(1), 3, 1, X, progress_bar=False)
    for fit in fits:
        np.testing.assert_allclose(fit.params["z_auto_loc"], 0.375, atol=1e-5)
    ensemble = [{"z_auto_loc": jnp.array(z)} for z in (-1.0, 0.5, 2.0)]
    found = held_out_log_likelihood(make_svi(), ensemble, model_args=(X,), num_samples=1)
    each = dist.Normal(jnp.array([[-1.0], [0.5], [2.0]])).log_prob(X)
    np.testing.assert_allclose(found, jax.nn.logsumexp(each, 0) - jnp.log(3.0), rtol=1e-5)
    # There is no spread within a point with which R-hat could compare.
    assert "largest R-hat" not in quantities(make_svi(), ensemble)


@pytest.mark.slow
def test_runs_together_are_the_runs_one_after_the_other():
    """In minibatches, whose rows every run draws by its own key."""

    def minibatch(x):
        z, scale = numpyro.sample("z", dist.Normal()), numpyro.sample("s", dist.LogNormal())
        with numpyro.plate("N", len(x), subsample_size=2):
            numpyro.sample("x", dist.Normal(z, scale), obs=numpyro.subsample(x, 0))

    def make_svi():
        return SVI(minibatch, AutoNormal(minibatch), optax.adam(0.1), Trace_ELBO())

    alone, together = (
        restarts(make_svi, random.key(4), 3, 7, X, vectorized=vectorized, progress_bar=bar)
        for vectorized, bar in ((False, False), (True, True))
    )
    for a, b in zip(alone, together, strict=True):
        assert a.losses.shape == b.losses.shape == (7,)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
            (a.params, a.losses, a.state.optim_state),
            (b.params, b.losses, b.state.optim_state),
        )
    # A result is the state of a run, which goes on alone.
    svi = make_svi()
    svi.init(random.key(0), X)
    assert np.isfinite(svi.update(together[1].state, X)[1])


def test_runs_of_different_programs_are_not_run_together():
    class KeepsItsStart(AutoNormal):
        def __call__(self, *args, **kwargs):
            latents = super().__call__(*args, **kwargs)
            numpyro.factor("start", self._init_locs["z"])
            return latents

    make_svi = make(lambda model: KeepsItsStart(model))
    with pytest.raises(ValueError, match="keeps its start outside of its parameters"):
        restarts(make_svi, random.key(0), 2, 1, X, vectorized=True, progress_bar=False)


@pytest.mark.slow
def test_runs_of_one_svi_begin_at_one_point_and_this_is_said():
    svi = make(AutoNormal)()
    fits = [svi.run(random.key(k), 1, X, progress_bar=False) for k in range(3)]
    assert len({float(fit.params["z_auto_loc"]) for fit in fits}) == 1
    words = r"only 1 of 3 restarts have parameters of their own.*_ext\.diagnostics\.restarts"
    with pytest.warns(InferenceWarning, match=words):
        to_arviz(svi, fits, model_args=(X,), num_samples=50)
    with pytest.warns(InferenceWarning, match=words):
        assert "largest R-hat" not in quantities(svi, fits)


def test_what_makes_no_restarts():
    svi = make(AutoNormal)()
    with pytest.raises(ValueError, match="same AutoNormal"):
        restarts(lambda: svi, random.key(0), 2, 1, X, progress_bar=False)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="leave out the executor"):
        restarts(make(AutoNormal), random.key(0), 2, 1, X, vectorized=True, executor=pool)
    with pytest.raises(ValueError, match="num_restarts is 0"):
        restarts(make(AutoNormal), random.key(0), 0, 1, X)
