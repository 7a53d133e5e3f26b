"""What a guide promises to SVI, shown on one structured guide with its own optimiser and loss."""

from functools import cache
import pickle

import jax
from jax import random
import numpy as np
from numpyro.infer import SVI, Predictive
import optax
import pytest

from numpyro_ext.diagnostics import diagnose, to_arviz
from numpyro_ext.optim import natural_gradient
from numpyro_ext.svae import SVAEELBO
from tests.svae.models import RULES, B, D, K, N, Y, guide_of, mixture, params_of

pytestmark = pytest.mark.slow

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


def assert_close(found, expected, rtol=1e-4):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-5)


def test_scan_progress_bar_stable_update_and_resuming_agree_without_tracing_again():
    before = len(TRACES)
    start = engine().run(random.key(0), 5, Y, B, progress_bar=True, stable_update=True)
    rest = engine().run(random.key(9), STEPS - 5, Y, B, progress_bar=False, init_state=start.state)
    assert len(TRACES) - before < STEPS
    assert_close(np.concatenate([start.losses, rest.losses]), fitted().losses)
    assert_close(rest.params, fitted().params, rtol=1e-3)


def test_init_params_are_honoured_and_keys_of_the_old_style_accepted():
    params = params_of("mixture")
    for key in (random.key(5), random.PRNGKey(5)):
        state = engine().init(key, Y, B, init_params=params)
        assert_close(engine().get_params(state), params)
    new, old = (
        SVAEELBO().loss(key, params, mixture, guide_of(RULES["mixture"]), Y, B)
        for key in (random.key(5), random.PRNGKey(5))
    )
    np.testing.assert_allclose(new, old, rtol=1e-6)


def test_a_pickled_guide_draws_the_same():
    params, guide = params_of("mixture"), engine().guide
    again = pickle.loads(pickle.dumps(guide))
    draw = jax.jit(lambda key, g=guide: g.sample_posterior(key, params, Y, B))
    other = jax.jit(lambda key: again.sample_posterior(key, params, Y, B))
    assert_close(other(random.key(3)), draw(random.key(3)), rtol=1e-6)


def test_a_fit_becomes_a_tree_and_is_diagnosed():
    svi, result = engine(), fitted()
    tree = to_arviz(svi, result=result, model_args=(Y,), num_samples=30)
    assert dict(tree.posterior["x"].sizes)["draw"] == 30
    assert tree.posterior["z"].shape == (1, 30, N)
    assert np.all(np.isfinite(tree.sample_stats["log_weight"]))
    rows = {row.quantity: row for row in diagnose(svi, result=result, model_args=(Y,)).rows}
    assert rows["local inference not converged"].ok
    assert 1 / K < rows["largest share of 'z'"].value <= 1


def test_new_data_go_through_predictive():
    result = fitted()
    new = Y[:4] + 0.1
    guide = guide_of(RULES["mixture"], create_plates=None)
    draws = Predictive(guide, params=result.params, num_samples=400)(random.key(0), new)
    r = guide.local_posterior(result.params, new).mean["z"].probs
    shares = jax.nn.one_hot(draws["z"], K).mean(0)
    np.testing.assert_allclose(shares, r, atol=5 * 0.5 / 400**0.5)

    simulate = Predictive(mixture, guide=engine().guide, params=result.params, num_samples=3)
    assert simulate(random.key(0), Y)["y"].shape == (3, N, D)
