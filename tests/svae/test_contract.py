"""What a guide promises to SVI, shown on one structured guide with its own optimiser and loss."""

from functools import cache
import pickle

import jax
from jax import random
import numpy as np
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import SVAEELBO
from tests.svae.models import RULES, B, K, N, Y, guide_of, mixture, params_of

STEPS = 12
TRACES = []


def counted(y, subsample_size=None):
    TRACES.append(1)
    return mixture(y, subsample_size)


@cache
def engine():
    guide = guide_of(RULES["mixture"])
    optim = optax.multi_transform(
        {"natural": natural_gradient(0.1, guide.domain), "network": optax.adam(1e-3)},
        guide.param_labels,
    )
    return SVI(counted, guide, optim, SVAEELBO("explicit_only"))


@cache
def fitted():
    before = len(TRACES)
    result = engine().run(random.key(0), STEPS, Y, B, progress_bar=False)
    assert len(TRACES) - before < STEPS
    return result


def assert_close(outcome, expected, rtol=1e-4):
    for x, y in zip(*map(jax.tree.leaves, (outcome, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-5)


def test_a_pickled_guide_infers_the_same():
    params, guide = params_of("mixture"), engine().guide
    again = pickle.loads(pickle.dumps(guide))
    local, same = (jax.jit(one.local_posterior)(params, Y) for one in (guide, again))
    assert_close(same, local, rtol=1e-6)


@pytest.mark.nightly
def test_a_fit_becomes_a_tree_and_is_diagnosed():
    svi, result = engine(), fitted()
    tree = to_arviz(svi, result=result, model_args=(Y,), num_samples=30)
    assert dict(tree.posterior["x"].sizes)["draw"] == 30
    assert tree.posterior["z"].shape == (1, 30, N)
    assert np.all(np.isfinite(tree.sample_stats["log_weight"]))
    outcome = diagnose(svi, result=result, model_args=(Y,), num_moves=0)
    rows = {row.quantity: row for row in outcome.rows}
    assert rows["local inference not converged"].ok
    assert 1 <= rows["states in use"].value <= K
