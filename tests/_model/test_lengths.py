"""A plate never takes its rows from an array that has fewer."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.arguments import indexed
from numpyro_ext._model.read import shape_trace

X, Y = jnp.ones(200), jnp.zeros(400)
SHORT = r"rows of the plate 'rows', which has 400, from an array of shape \(.*200"


def model(x, y=Y, take=lambda x, i: x[i], batch=None):
    slope = numpyro.sample("slope", dist.Normal())
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        numpyro.sample("y", dist.Normal(slope * take(x, i)), obs=y[i])


def run(*args):
    shape_trace(handlers.seed(model, random.key(0)), args)


WIDE = jnp.ones((200, 3))
SHORTER = {
    "a vector": lambda x, i: x[i],
    "NumPy": lambda x, i: indexed(np.ones(200))[i],
    "rows": lambda x, i: WIDE[i, :2].sum(-1),
    "an entry": lambda x, i: WIDE[i, 0],
    "an entry by another index": lambda x, i: WIDE[i, jnp.arange(len(i)) % 3],
    "the second axis": lambda x, i: WIDE.T[:, i].sum(0),
    "as an index": lambda x, i: jnp.ones(5)[jnp.arange(200)[i] % 5],
    "jitted": lambda x, i: jax.jit(lambda x, i: x[i])(x, i),
    "computed": lambda x, i: (2 * x)[i],
    "in vmap": lambda x, i: jax.vmap(lambda i: x[i])(i),
    "in map": lambda x, i: jax.lax.map(lambda i: x[i], i),
    "in cond": lambda x, i: jax.lax.cond(x[0] > 0, lambda: x[i], lambda: jnp.zeros(len(i))),
}


@pytest.mark.parametrize("take", SHORTER)
@pytest.mark.parametrize("batch", [None, 50])
def test_an_array_that_is_shorter_than_its_plate_is_an_error(take, batch):
    with pytest.raises(ValueError, match=SHORT):
        run(X, Y, SHORTER[take], batch)


FITTING = {
    "as many rows": lambda x, i: Y[i],
    "more rows": lambda x, i: jnp.ones(500)[i],
    "groups": lambda x, i: x[(jnp.arange(400) // 2)[i]],
    "an index that is computed": lambda x, i: x[i % 200] + x[i // 2],
    "an index with a guard": lambda x, i: jnp.where(i < 200, x[jnp.where(i < 200, i, 0)], 0.0),
    "a mode of its own": lambda x, i: x.at[i].get(mode="clip"),
    "the row after": lambda x, i: x[jnp.where(i >= 199, i + -199, i + 1) % 200],
    "no index": lambda x, i: jnp.ones(len(i)),
}


@pytest.mark.parametrize("take", FITTING)
def test_an_array_that_is_indexed_rightly_passes(take):
    run(X, Y, FITTING[take], 50)
    run(X, Y, FITTING[take])
