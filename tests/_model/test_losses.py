"""Steps whose loss or gradient is not finite are skipped with a warning; changed cotangents."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.losses import change_cotangents
from numpyro_ext.objectives import VRELBO, count_steps
from numpyro_ext.particles import SVGD, AutoParticles

Y = jnp.asarray(np.linspace(1.0, 3.0, 6))


@jax.custom_jvp
def without_slope(x, where):
    """x, with a derivative that is not finite at some rows."""
    return x


@without_slope.defjvp
def slope(primals, tangents):
    return primals[0], tangents[0] * jnp.where(primals[1], jnp.nan, 1.0)


def model(lost, batch=1):
    """Row 3 has a log density of NaN, or a gradient of NaN; the other rows are normal."""
    z = numpyro.sample("z", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", 6, subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(z, 1.0), obs=Y[i])
        if lost == "loss":
            numpyro.factor("lost", jnp.where(i == 3, jnp.nan, 0.0))
        elif lost == "gradient":
            numpyro.factor("lost", without_slope(jnp.broadcast_to(z, i.shape), i == 3) - z)


def guide(lost, batch=1):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("z", dist.Normal(numpyro.param("loc", 0.0), scale))


def fit(lost, steps=600):
    adam = optax.adam(optax.cosine_decay_schedule(0.1, steps))
    svi = SVI(model, count_steps(guide), adam, VRELBO(1.0, 4))
    return svi.run(random.key(0), steps, lost, progress_bar=False)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["loss", "gradient"])
def test_the_fit_goes_on_without_the_steps_that_are_not_finite(lost):
    """It is that of the other five rows; the loss of a minibatch of one row moves the mean by 0.1
    of its 0.4, and the sixth of the steps that is skipped shows in the losses of NaN."""
    with pytest.warns(
        InferenceWarning, match="gradient not finite in a step, which leaves the parameters"
    ):
        result = fit(lost)
    steps = result.state.mutable_state["_objective_step"]["step"]
    assert int(steps) == 600
    share = np.mean(np.isnan(result.losses))
    if lost == "loss":
        assert 0.1 < share < 0.25  # a sixth, 3.5 standard errors
    mean = float(jnp.delete(Y, 3).mean())
    assert abs(result.params["loc"] - mean) < 0.4
    assert 0.3 < result.params["scale"] < 0.5


def test_finite_steps_are_what_they_were():
    """Forward mode has no guard, and the same gradient."""
    loss, params = VRELBO(0.5, 3), {"loc": 1.5, "scale": 0.7}

    def at(params):
        return loss.loss(random.key(1), params, model, guide, "", 6)

    backward, forward = jax.jit(lambda p: (jax.grad(at)(p), jax.jacfwd(at)(p)))(params)
    for name in params:
        np.testing.assert_allclose(backward[name], forward[name], rtol=1e-4)


@pytest.mark.parametrize("loss", [VRELBO(1.0, 3), SVGD()], ids=["VRELBO", "SVGD"])
def test_a_compiled_update_has_no_effects(loss):
    """Not for the warning either: JAX calls a program with effects from Python, which takes longer
    than a step of a small model."""
    its_guide = AutoParticles(model, 5, init_from=None) if isinstance(loss, SVGD) else guide
    svi = SVI(model, its_guide, optax.sgd(0.1), loss)
    state = svi.init(random.key(0), None)
    update = jax.make_jaxpr(lambda state: svi.update(state, None))(state)
    assert "pure_callback" in str(update) and not update.effects


TREE = {"a": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array(2.0), "unused": jnp.ones(2)}


def twice(cts):
    return jax.tree.map(lambda ct: 2.0 * ct, cts)


def plain(tree):
    return jnp.sum(tree["a"] ** 2) * tree["b"]


def changed(tree):
    return plain(change_cotangents(tree, twice))


@pytest.mark.parametrize("names", [["a"], ["unused"], ["a", "b", "unused"]])
def test_gradients_are_changed_and_tangents_are_not(names):
    """Of any part of the tree, once, under vmap, and differentiated again in forward mode."""
    part = {n: TREE[n] for n in names}

    def grads(fn, factor):
        def at(part):
            return fn({**TREE, **part})

        def slope(part):
            return jax.tree.map(lambda x: factor * x, jax.grad(at)(part))

        three = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x, x + 1.0]), part)
        return slope(part), jax.vmap(slope)(three), jax.jacfwd(slope)(part), jax.jacfwd(at)(part)

    expected, found = jax.jit(lambda: (grads(plain, 2.0), grads(changed, 1.0)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, found)
