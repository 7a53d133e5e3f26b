"""Which rows a plate takes, and which plates are refused."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.density import log_density
from numpyro_ext._model.handlers import (
    at_rows,
    every_row,
    inside_plates,
    on_first_rows,
    refuse_mutable,
    seed_plates,
    subsampled_plates,
    valid_plates,
)
from numpyro_ext._model.read import read_model, trace_of
from numpyro_ext.mcmc import SGLD
from tests._model.models import ROWS, crossed, data, straight

PLATES = {"rows": (ROWS, 2)}


def on_rows(fn, subsample_size=2):
    """The trace of ``straight`` at fixed latents."""
    fixed = handlers.substitute(fn, data={"slope": jnp.float32(0.4), "noise": jnp.float32(0.8)})
    return trace_of(handlers.seed(fixed, 0), (data(),), {"subsample_size": subsample_size})


def test_first_rows_are_taken_without_a_draw():
    trace = on_rows(on_first_rows(straight))
    assert jnp.array_equal(trace["x"]["value"], data()[:2])
    assert trace["x"]["scale"] == ROWS / 2


@pytest.mark.parametrize("idx", [[4, 1], [5], [0, 3, 3, 2, 1]])
def test_chosen_rows_may_be_of_any_number(idx):
    """Their scale is the number of all rows over that of the chosen ones."""
    trace = on_rows(at_rows(straight, {"rows": jnp.array(idx)}, PLATES))
    assert jnp.array_equal(trace["x"]["value"], data()[jnp.array(idx)])
    assert trace["x"]["scale"] == pytest.approx(ROWS / len(idx))


def test_rows_of_other_data_are_refused():
    chosen = at_rows(straight, {"rows": jnp.arange(2)}, {"rows": (ROWS + 1, 2)})
    with pytest.raises(ValueError, match="plate 'rows' has 6 rows, but 7"):
        on_rows(chosen)
    with pytest.raises(ValueError, match="plate 'rows' has 6 rows, but None"):
        on_rows(at_rows(straight, {}, {}))


def test_every_row_is_the_model_without_a_minibatch():
    """Two plates; and without NumPyro's warning that the index is too long, an error here."""
    x = jnp.sin(jnp.arange(12.0)).reshape(3, 4)
    fixed = handlers.substitute(crossed, data={"loc": jnp.float32(0.3)})
    full = log_density(trace_of(handlers.seed(fixed, 0), (x, (3, 4))))
    every = trace_of(handlers.seed(every_row(fixed), 0), (x,))
    assert jnp.allclose(log_density(every), full)
    assert subsampled_plates(every) == {}


def test_particles_share_the_minibatch_of_seeded_plates():
    """The key of the plates alone decides the rows; the latents have a key of their own."""

    def draw(key_plates, key):
        trace = trace_of(handlers.seed(seed_plates(straight, key_plates), key), *given)
        return trace["rows"]["value"], trace["slope"]["value"]

    given = (data(),), {"subsample_size": 3}

    @jax.jit
    def draws(here, there):
        return jax.vmap(draw, (None, 0))(here, random.split(there, 5)), draw(there, here)[0]

    (idx, slope), other = jax.device_get(draws(*random.split(random.key(0))))
    assert np.all(idx == idx[0])
    assert len(np.unique(slope)) == 5
    assert not np.array_equal(idx[0], other)


def test_seeded_plates_are_the_same_in_any_order_and_cost_nothing_for_rows_that_they_leave_out():
    size = 2**31 - 1

    def draw(key, names):
        def fn():
            for name in names:
                numpyro.plate(name, size, subsample_size=5)

        trace = trace_of(seed_plates(fn, key))
        return [trace[name]["value"] for name in sorted(names)]

    first, second = draw(random.key(0), "ab"), draw(random.key(0), "ba")
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) == 10 and np.min(first) >= 0


def test_a_minibatch_larger_than_its_plate_is_refused():
    with pytest.raises(ValueError, match="'rows' has subsample_size 7 but only 6 rows"):
        on_rows(valid_plates(straight), subsample_size=7)


def looped(kind, subsample_size):
    """A plate in the body of a loop, of a branch, or of a loop in a loop or a branch."""

    def step(z, _):
        z = numpyro.sample("z", dist.Normal(z, 1.0))
        with numpyro.plate("inner", 4, subsample_size=subsample_size) as idx:
            numpyro.sample("y", dist.Normal(z, 1.0), obs=data()[idx])
        return z, None

    def loop(z):
        return scan(step, z, None, length=3)[0]

    def model():
        start = numpyro.sample("start", dist.Normal())
        if kind == "scan":
            loop(start)
        elif kind == "cond":
            cond(True, lambda z: step(z, None)[0], lambda z: step(z, None)[0], start)
        elif kind == "scan in scan":
            scan(lambda z, _: (loop(z), None), start, None, length=2)
        else:
            cond(True, loop, loop, start)

    return model


@pytest.mark.parametrize("kind", ["scan", "cond", "scan in scan", "scan in cond"])
def test_a_minibatch_inside_control_flow_is_refused(kind):
    with pytest.raises(ValueError, match="'inner' takes a minibatch of 2 of 4 rows inside scan"):
        read_model(looped(kind, 2))


@pytest.mark.parametrize("kind", ["scan", "cond"])
def test_a_full_plate_inside_control_flow_is_fine(kind):
    info = read_model(looped(kind, None))
    assert tuple(info.latents) == ("start", "z")
    assert info.plates == {}


def test_mutable_state_is_refused_by_name():
    def model():
        numpyro.primitives.mutable("count", jnp.zeros(()))
        numpyro.sample("z", dist.Normal())

    with pytest.raises(ValueError, match="mutable site 'count'"):
        trace_of(handlers.seed(refuse_mutable(model), 0))


def test_plates_are_entered_again_on_their_rows_and_unseen():
    def model(x):
        with numpyro.plate("rows", 6, subsample_size=3, dim=-2):
            with numpyro.plate("columns", 2, dim=-1):
                return numpyro.sample("x", dist.Normal(0.0, 1.0))

    x = jnp.arange(12.0).reshape(6, 2)
    trace = trace_of(handlers.seed(model, 0), (x,))
    with handlers.trace() as outer, inside_plates(trace, ["rows", "columns"]):
        batch = numpyro.subsample(x, event_dim=0)
    assert not outer and jnp.array_equal(batch, x[trace["rows"]["value"]])


def few(y, batch):
    r = numpyro.sample("r", dist.Normal(0.0, 1.0))
    with numpyro.plate("d", len(y), subsample_size=batch) as idx:
        numpyro.sample("y", dist.Normal(r, 1.0), obs=y[idx])


def test_a_minibatch_without_rows_is_refused_and_is_not_the_prior():
    for batch in (0, -2):
        with pytest.raises(ValueError, match=f"'d' has subsample_size {batch}, a minibatch with"):
            SGLD(few, 0.1).init(random.key(0), 1, None, (jnp.ones(5), batch))
