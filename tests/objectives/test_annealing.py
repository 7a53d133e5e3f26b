"""Orders that follow the step, and the counter."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.objectives import VRELBO, BBAlphaELBO, count_steps
from tests.objectives.models import X_LOCAL, global_model, normal_guide


def schedule(step):
    return jnp.minimum(step / 4.0, 1.0)


@pytest.mark.slow
def test_schedule_is_followed():
    """Each update has the loss of the static order of its step, with the same draws."""
    svi = SVI(global_model, count_steps(normal_guide), optax.sgd(0.01), BBAlphaELBO(schedule, 3))
    state = svi.init(random.key(0), X_LOCAL)
    update = jax.jit(lambda state: svi.update(state, X_LOCAL))
    static = jax.jit(
        lambda alpha, key, params: BBAlphaELBO(alpha, 3).loss(
            key, params, global_model, normal_guide, X_LOCAL
        )
    )
    for step in range(6):
        assert state.mutable_state["_objective_step"]["step"] == step
        _, key = random.split(state.rng_key)
        expected = static(min(step / 4, 1.0), key, svi.get_params(state))
        state, loss = update(state)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_static_orders_count_too_and_other_losses_do_not_mind():
    for loss, steps in ((VRELBO(0.5, 2, gradient="dreg"), 3), (Trace_ELBO(), 0)):
        svi = SVI(global_model, count_steps(normal_guide), optax.sgd(0.01), loss)
        result = svi.run(random.key(0), 3, X_LOCAL, progress_bar=False)
        assert result.state.mutable_state["_objective_step"]["step"] == steps


def test_missing_counter():
    svi = SVI(global_model, normal_guide, optax.sgd(0.01), VRELBO(schedule))
    state = svi.init(random.key(0), X_LOCAL)
    with pytest.raises(ValueError, match=r"count_steps\(guide\)"):
        jax.eval_shape(lambda: svi.update(state, X_LOCAL))
