"""What every objective of the room promises: one table of constructors, one test for each promise."""

import math
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    BBAlphaELBO,
    ChiUpperBound,
    FDivergence,
    NestedVRELBO,
    ThermodynamicELBO,
)

OBJECTIVES = {
    "VRELBO": lambda **kwargs: VRELBO(0.5, 3, **kwargs),
    "VRELBO single": lambda **kwargs: VRELBO(-math.inf, 3, gradient="single", **kwargs),
    "VRELBO stl": lambda **kwargs: VRELBO(1.5, 3, gradient="stl", **kwargs),
    "VRELBO dreg": lambda **kwargs: VRELBO(0.5, 3, gradient="dreg", **kwargs),
    "IWELBO": lambda **kwargs: IWELBO(3, **kwargs),
    "BBAlphaELBO": lambda **kwargs: BBAlphaELBO(0.5, 3, **kwargs),
    "NestedVRELBO": lambda **kwargs: NestedVRELBO(0.5, 3, num_inner=2, **kwargs),
    "VIMCO": lambda **kwargs: VIMCO(0.5, 3, **kwargs),
    "ChiUpperBound": lambda **kwargs: ChiUpperBound(2.0, 3, **kwargs),
    "FDivergence": lambda **kwargs: FDivergence("hellinger", 3, **kwargs),
    "ThermodynamicELBO": lambda **kwargs: ThermodynamicELBO(3, 3, **kwargs),
}
X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])
TRACES = []

objectives = pytest.mark.parametrize("make", OBJECTIVES.values(), ids=OBJECTIVES.keys())


def model(x, broken=False):
    """Constrained and deterministic sites, and a minibatch."""
    TRACES.append(1)
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    numpyro.deterministic("ratio", loc / scale)
    with numpyro.plate("data", len(x), subsample_size=4):
        batch = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(jnp.where(broken, jnp.nan, loc), scale), obs=batch)


def svi_of(make):
    return SVI(model, AutoNormal(model), optax.adam(0.05), make())


@objectives
def test_runs_with_and_without_progress_bar_and_resumes(make):
    whole = svi_of(make).run(random.key(0), 6, X, progress_bar=False)
    bar = svi_of(make).run(random.key(0), 6, X, progress_bar=True)
    np.testing.assert_allclose(bar.losses, whole.losses, rtol=2e-5)
    svi = svi_of(make)
    first = svi.run(random.key(0), 3, X, progress_bar=False)
    second = svi.run(random.key(9), 3, X, progress_bar=False, init_state=first.state)
    np.testing.assert_allclose(
        jnp.concatenate([first.losses, second.losses]), whole.losses, rtol=2e-5
    )


@objectives
def test_stable_update_init_params_and_posterior(make):
    svi = svi_of(make)
    state = svi.init(random.key(0), X, init_params={"loc_auto_loc": jnp.array(0.7)})
    assert svi.get_params(state)["loc_auto_loc"] == pytest.approx(0.7)
    step = jax.jit(svi.stable_update)
    kept, loss = step(state, X, broken=True)
    assert jnp.isnan(loss)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, svi.get_params(kept), svi.get_params(state)))
    moved, loss = step(state, X, broken=False)
    assert jnp.isfinite(loss)
    params = svi.get_params(moved)
    assert params["loc_auto_loc"] != jnp.array(0.7)
    draws = Predictive(model, guide=svi.guide, params=params, num_samples=5)(random.key(1), X)
    assert draws["ratio"].shape == (5,)
    posterior = svi.guide.sample_posterior(random.key(2), params, sample_shape=(5,))
    assert jnp.all(posterior["scale"] > 0)


@objectives
def test_pickles_and_does_not_trace_again(make):
    loss = pickle.loads(pickle.dumps(make(vectorize_particles=False)))
    svi = SVI(model, AutoNormal(model), optax.adam(0.05), loss)
    state = svi.init(random.key(0), X)
    update = jax.jit(lambda state: svi.update(state, X))
    state, _ = update(state)
    traced = len(TRACES)
    for _ in range(3):
        state, value = update(state)
    assert len(TRACES) == traced
    assert jnp.isfinite(value)
    same = make()
    params = svi.get_params(state)
    values = [obj.loss(random.key(3), params, model, svi.guide, X) for obj in (loss, same)]
    np.testing.assert_allclose(*values, rtol=1e-5)


@objectives
def test_discrete_latents_are_refused_with_their_name(make):
    if make().can_infer_discrete:
        return

    def discrete():
        with numpyro.plate("data", 2):
            k = numpyro.sample("k", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(1.0 * k, 1.0), obs=jnp.zeros(2))

    def guide():
        with numpyro.plate("data", 2):
            numpyro.sample("k", dist.Bernoulli(numpyro.param("p", 0.4)))

    svi = SVI(discrete, guide, optax.adam(0.1), make())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPyro's own, at init
        state = svi.init(random.key(0))
    with pytest.raises(ValueError, match="'k'"):
        jax.eval_shape(lambda: svi.update(state))
