"""A row that is NaN is named before the first step, whichever engine reads it."""

import re

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext.ep import ADF, DSEP, EP, StochasticEP

X, Y = jnp.arange(5.0), jnp.array([1.0, 3.0, 2.0, 0.5, 4.0])
IN_X = "the log density of the observed site 'y' is NaN in 1 of 5 rows, the first of them row 2"
IN_Y = "'y' have 1 NaN among 5 numbers, the first in row 3"


def slope(x, y):
    b = numpyro.sample("b", dist.Normal())
    with numpyro.plate("N", len(y)):
        numpyro.sample("y", dist.StudentT(4.0, b * x), obs=y)


@pytest.mark.parametrize("engine", [EP(slope), StochasticEP(slope), DSEP(slope, 2), ADF(slope)])
def test_a_row_that_is_nan_is_named(engine):
    with pytest.raises(ValueError, match=re.escape(IN_X)):
        engine.init(random.key(0), X.at[2].set(jnp.nan), Y)
    with pytest.raises(ValueError, match=re.escape(IN_Y)):
        engine.init(random.key(0), X, Y.at[3].set(jnp.nan))
