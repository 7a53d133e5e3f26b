"""ChiUpperBound: closed forms, its relation to VRELBO, and where it is refused."""

import jax
import jax.numpy as jnp
import pytest

from numpyro_ext.objectives import VRELBO, ChiUpperBound
from tests.objectives.compare import assert_same
from tests.objectives.models import (
    linear_gaussian,
    normal_guide,
    value_and_grad,
)


@pytest.mark.parametrize("gradient", ["standard", "dreg"])
def test_is_plus_the_renyi_bound_of_order_one_minus_n(gradient, tol):
    losses = [ChiUpperBound(2.5, 4, gradient=gradient), VRELBO(-1.5, 4, gradient=gradient)]
    params = {"m": 0.3, "s": 0.9}
    chi, renyi = value_and_grad(losses, params, linear_gaussian, normal_guide, 1.5)
    assert_same(chi, jax.tree.map(jnp.negative, renyi), tol(1e-5, 1e-12))
