"""Whether a model and its data are those of before, and when that is not known."""

from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext._model.arguments import split_arguments
from numpyro_ext._model.same import SAME, agree, digest, fingerprint, is_of_libraries, mark_of
from numpyro_ext.data import HostArray
from numpyro_ext.objectives import VRELBO, base, count_steps

SIZE = 3


def helper():
    return SIZE


class Config:
    size = 3


class Model:
    def __call__(self, x):
        numpyro.sample("z", dist.Normal())


def model_of(held=1.0):
    def model(x, scale=1.0):
        z = numpyro.sample("z", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", helper()):
            numpyro.sample("x", dist.Normal(z, scale), obs=held)

    return model


def reads_config(x):
    numpyro.sample("z", dist.Normal(jnp.zeros(Config.size)))


X = jnp.arange(3.0)
MODEL = model_of()


@pytest.mark.parametrize(
    "things",
    [
        (MODEL, X),
        (AutoNormal(MODEL), X),
        (count_steps(AutoNormal(MODEL)), {"x": [X, 3, "a", None]}),
        (partial(handlers.scale(MODEL, 0.1), scale=2.0), (np.ones(3), np.float32(1))),
        (jax.jit(lambda x: x), dist.Normal(0, 1), random.key(0)),
    ],
)
def test_what_did_not_change_has_the_same_mark(things):
    mark = mark_of({"a": 1.0}, *things)
    assert mark is not None and mark == mark_of({"a": 2.0}, *things)


def test_params_are_marked_by_their_shapes():
    assert mark_of({"a": jnp.ones(2)}, MODEL) != mark_of({"a": jnp.ones(3)}, MODEL)
    assert mark_of({"a": jnp.ones(2)}, MODEL) != mark_of({"b": jnp.ones(2)}, MODEL)


def test_another_object_has_another_mark_although_it_looks_the_same():
    assert mark_of({}, model_of()) != mark_of({}, model_of())
    assert mark_of({}, jnp.ones(2)) != mark_of({}, jnp.ones(2))  # data may be NaN
    assert mark_of({}, 1) != mark_of({}, 1.0)
    once = model_of()
    assert mark_of({}, once, once) != mark_of({}, once, model_of())


def test_a_change_in_place_changes_the_mark(monkeypatch):
    held, array, guide = [1.0], np.ones(3), AutoNormal(MODEL)
    handler = handlers.substitute(MODEL, data={"z": 1.0})

    def mark():
        return mark_of({}, model_of, MODEL, (held, array), guide, handler, closure)

    closure = model_of(held)
    marks = [mark()]
    held[0] = 2.0
    marks.append(mark())
    array[1] = np.nan
    marks.append(mark())
    handler.data["z"] = 3.0
    marks.append(mark())
    guide.prefix = "other"
    marks.append(mark())
    handlers.seed(guide, 0)(X)
    marks.append(mark())
    monkeypatch.setitem(globals(), "SIZE", 4)  # which a function reads that the model calls
    marks.append(mark())
    monkeypatch.setattr(MODEL, "__defaults__", (2.0,))
    marks.append(mark())
    assert None not in marks
    assert all(a != b for i, a in enumerate(marks) for b in marks[:i])


@jax.custom_jvp
def wrapped(x):
    return SIZE * x


@pytest.mark.parametrize(
    "function",
    [
        wrapped,
        jax.jit(wrapped),
        jax.tree_util.Partial(wrapped),
        jax.grad(partial(wrapped)),
    ],
    ids=["custom_jvp", "jit", "Partial", "grad"],
)
def test_what_jax_wraps_is_seen_inside(function, monkeypatch):
    """A function of JAX's that holds a user's had the same mark whatever that read."""
    before = mark_of({}, function)
    assert before is not None and before == mark_of({}, function)
    assert not is_of_libraries(function) and is_of_libraries(jax.nn.relu)
    monkeypatch.setitem(globals(), "SIZE", 4)
    assert mark_of({}, function) != before


def test_a_fingerprint_has_the_arrays_that_inner_programs_hold():
    """JAX leaves an array over which a function under ``jit`` closes inside its program."""

    def fingerprint_of(held):
        def model(x):
            z = numpyro.sample("z", dist.Normal(0.0, 2.0))
            mean = jax.jit(lambda z: held * z)(z)
            with numpyro.plate("rows", 3) as i:
                numpyro.sample("x", dist.Normal(mean[i], 1.0), obs=x[i])

        arguments, arrays = split_arguments((X,), {})
        return fingerprint(model, arguments, arrays)

    assert fingerprint_of(jnp.ones(3)) == fingerprint_of(jnp.ones(3))
    assert fingerprint_of(jnp.ones(3)) != fingerprint_of(jnp.arange(3.0))


def test_a_fingerprint_has_the_functions_that_run_on_the_host():
    """The text of the operations names none of them, and each trace makes them anew."""

    def fingerprint_of(held, by=lambda x: x):
        def model(x):
            z = numpyro.sample("z", dist.Normal(0.0, 2.0))
            with numpyro.plate("rows", 3) as i:
                rows = jax.pure_callback(
                    lambda i: by(np.asarray(held[0])[i]), jax.ShapeDtypeStruct((3,), X.dtype), i
                )
                numpyro.sample("x", dist.Normal(z, 1.0), obs=rows + HostArray(held[1])[i])

        arguments, arrays = split_arguments((X,), {})
        return fingerprint(model, arguments, arrays)

    def negative(x):
        return -x

    rows, others = np.arange(3.0, dtype=np.float32), np.ones(3, np.float32)
    same = [fingerprint_of([x, rows]) for x in (rows, rows.copy(), jnp.asarray(rows))]
    assert len(set(same)) == 1
    made = [same[0], fingerprint_of([others, rows]), fingerprint_of([rows, others])]
    made += [fingerprint_of([rows, rows], by) for by in (negative, partial(negative))]
    assert len(set(made)) == 5
    assert made[-2] == fingerprint_of([rows, rows], negative)


def test_a_function_may_close_over_what_is_not_there_yet():
    def model():
        return later

    assert mark_of({}, model) is not None
    before = mark_of({}, model)
    later = 1.0
    assert mark_of({}, model) != before


def test_what_may_change_unseen_has_no_mark():
    large = np.zeros(10**5)
    for thing in (large, model_of(large), Model(), reads_config, {1, 2}, object()):
        assert mark_of({}, thing) is None
    with handlers.seed(rng_seed=0):
        assert mark_of({}, MODEL) is None
    jax.jit(lambda x: [] if mark_of({}, x) is None else 1 / 0)(X)


def test_a_loss_reads_its_programs_once_and_again_when_they_have_changed(monkeypatch):
    read, x, find_layout = [], np.array([0.3, -0.2, 1.0], np.float32), base.find_layout

    def counted(*args):
        read.append(args)
        return find_layout(*args)

    def model(x):
        z = numpyro.sample("z", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", SIZE):
            numpyro.sample("x", dist.Normal(z, 1.0), obs=x[:SIZE])

    def guide(x):
        numpyro.sample("z", dist.Normal(0.4, 0.5))

    def evaluate(loss):
        return loss.loss(random.key(0), {}, model, guide, x)

    monkeypatch.setattr(base, "find_layout", counted)
    kept = VRELBO(0.5, 4)
    assert evaluate(kept) == evaluate(kept) and len(read) == 1
    assert pickle.loads(pickle.dumps(kept)).num_particles == 4
    monkeypatch.setitem(globals(), "SIZE", 2)
    assert evaluate(kept) == evaluate(VRELBO(0.5, 4)) and len(read) == 3
    x[0] = np.nan
    with pytest.raises(ValueError, match="the data of the observed site 'x' have 1 NaN"):
        evaluate(kept)


def test_a_digest_is_of_numbers_and_their_places_and_not_of_objects():
    def tree(**changes):
        x = np.arange(6.0)
        return {"x": x, "key": random.key(0), "names": ["a", "b"], "n": 3, **changes}

    assert digest(tree()) == digest(tree())
    others = {"x": jnp.arange(6.0)[::-1]}, {"key": random.key(1)}, {"names": ["a", "c"]}, {"n": 4}
    digests = [digest(tree(**change)) for change in others]
    assert len({digest(tree()), *digests}) == 5


def test_a_digest_of_rows_on_the_host_is_of_some_of_them():
    x = np.random.default_rng(0).normal(size=(1000, 2))
    assert digest(HostArray(x)) == digest(HostArray(x.copy()))
    assert digest(HostArray(x)) != digest(HostArray(x + 1e-3))
    assert digest(HostArray(x)) != digest(HostArray(x[:999]))


def test_numbers_agree_up_to_a_thousandth_of_one_and_of_themselves():
    l = np.array([-3.0, 0.0, 1e6])
    for share, same in ((0.9, True), (1.1, False)):
        now = l + share * SAME * (1 + abs(l))
        assert agree(now, l) == same == agree(jnp.asarray(now, float), jnp.asarray(l, float))
    assert not agree(np.array([np.nan, 0.0]), np.zeros(2))
