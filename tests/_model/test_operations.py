"""Operations of programs that are known."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
import time

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np

from numpyro_ext._model import operations
from numpyro_ext._model.operations import (
    count_operations,
    jit_on_data,
    on_numbers,
    quick_options,
    traced_once,
)
from numpyro_ext.data import HostArray


def test_counts_of_known_programs():
    x = jnp.ones((7, 5))
    assert count_operations(lambda x: x + x, x) == 35
    assert count_operations(lambda x: x.T @ x, x) >= 2 * 5 * 7 * 5
    assert count_operations(lambda x: x.T @ x, x) <= 2 * 5 * 7 * 5 + 70
    big = jnp.eye(50)
    assert 50**3 <= count_operations(jnp.linalg.cholesky, big) <= 3 * 50**3
    for columns in (1, 7):
        y = jnp.ones((50, columns))
        solve = count_operations(partial(solve_triangular, lower=True), big, y)
        assert columns * 50**2 <= solve <= columns * 50**2 + 2 * 50**2

    def loop(x):
        return lax.scan(lambda x, _: (x + 1, None), x, None, length=100)[0]

    assert 3500 <= count_operations(loop, x) <= 3700
    # Of two branches the longer one.
    branches = count_operations(lambda x: lax.cond(x[0, 0] > 0, loop, lambda x: x, x), x)
    assert 3500 <= branches <= 3700


def test_what_does_not_depend_on_the_point_is_not_counted():
    """As the normaliser of a prior with known parameters, which one program computes once."""

    def energy(concentration, x):
        normaliser = jax.jit(lambda c: jnp.sum(jnp.exp(c * jnp.arange(10_000.0))))(concentration)
        return jnp.sum(concentration * x**2) - normaliser

    gradient = jax.value_and_grad(energy, 1)
    x = jnp.ones(5)
    assert count_operations(gradient, 2.0, x) > 10_000
    assert 10 <= count_operations(gradient, 2.0, x, fixed=1) < 100


def test_on_numbers_computes_in_a_trace_and_leaves_programs_whole():
    data = jnp.arange(3.0)

    def of_data(x):
        return jnp.sum(data < 2.0) + x

    def traced(x):
        with on_numbers():
            assert float(jnp.sum(data)) == 3.0  # a number, in a program that is traced
        return x

    jax.jit(traced)(1.0)
    with on_numbers():
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(of_data)(1.0).eqns]
    assert "lt" in names  # not taken out of the program and compiled by itself


def test_a_function_that_is_traced_once_is_run_once_for_each_shape():
    calls = []

    def cube(x, rows):
        calls.append(x.shape)
        return {"cube": x**3, "rows": rows["plate"] + 1}

    once = traced_once(cube)
    for _ in range(2):
        slope = jax.jit(jax.grad(lambda x: once(x, {"plate": 1})["cube"]))(2.0)
        assert slope == 12.0
        many = jax.vmap(lambda x: once(x, {"plate": 1})["cube"])(jnp.arange(3.0))
        np.testing.assert_array_equal(many, [0.0, 1.0, 8.0])
        assert once(jnp.ones(2), {"plate": 4})["rows"] == 5
    assert calls == [(), (2,)]


def of_data(data, by=jnp.sin):
    return lambda x: (by(data * x), data.sum())


def test_a_function_of_other_data_is_compiled_once(monkeypatch):
    """Its text is the same; other shapes, another function, numbers in the text and other options
    of the compiler make another program."""
    monkeypatch.setattr(operations, "_PROGRAMS", kept := {})
    data, x = jnp.arange(1.0, 4.0), jnp.arange(3.0)
    for k in range(3):
        for got, exact in zip(jit_on_data(of_data(data + k))(x), of_data(data + k)(x), strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-6)
    (program,) = kept.values()
    assert program._cache_size() == 1
    jit_on_data(of_data(data), quick_options())(x)
    jit_on_data(of_data(jnp.ones(4)))(jnp.ones(4))
    np.testing.assert_allclose(
        jit_on_data(of_data(data, jnp.cos))(x)[0], jnp.cos(data * x), rtol=1e-6
    )
    for scale in (2.0, 3.0):
        times = jit_on_data(lambda x, scale=scale: scale * x)
        np.testing.assert_array_equal(times(x), scale * x)
    assert len(kept) == 6


def test_programs_that_do_not_use_an_array_are_not_taken_for_one_another():
    """Of two arrays one uses the first and the other the second."""
    arrays, x = (jnp.arange(3.0), 10 + jnp.arange(3.0)), jnp.ones(3)

    def of(used):
        def fn(x):
            first, second = (x + array for array in arrays)
            return (first, second)[used]

        return jit_on_data(fn)

    for used in (0, 1):
        np.testing.assert_array_equal(of(used)(x), x + arrays[used])
        of_one = jit_on_data(lambda x, used=used: x + arrays[used])
        np.testing.assert_array_equal(of_one(x), x + arrays[used])
        of_none = jit_on_data(lambda x, used=used: (sum(arrays[: used + 1]), jnp.ones(2))[1])
        np.testing.assert_array_equal(of_none(x), [1, 1])


def test_functions_of_the_host_are_not_taken_for_one_another():
    x = jnp.arange(3.0)

    def by_host(shift):
        def fn(x):
            return jax.pure_callback(lambda x: x + np.float32(shift), x, x)

        return jit_on_data(fn), jit_on_data(lambda x: lax.map(fn, x[None])[0])

    for shift in (1.0, 5.0):
        for fn in by_host(shift):
            np.testing.assert_array_equal(fn(x), x + shift)
    for rows in (np.arange(3.0), np.arange(3.0, 6.0)):
        read = HostArray(rows)
        np.testing.assert_array_equal(jit_on_data(lambda i, read=read: read[i])(np.arange(3)), rows)
    seen = []
    for to in (seen.append, lambda x: seen.append(-x)):
        jit_on_data(lambda x, to=to: jax.debug.callback(to, x[1]))(x)
    jax.effects_barrier()
    assert seen == [1.0, -1.0]


def test_rules_of_derivatives_are_not_taken_for_one_another():
    """The text of a program does not have them."""
    x = jnp.arange(3.0)

    def with_slope(slope):
        @jax.custom_jvp
        def sine(x):
            return jnp.sum(jnp.sin(x))

        sine.defjvp(lambda x, dx: (sine(*x), slope * jnp.sum(*dx)))
        return jit_on_data(sine)

    for slope in (1.0, 2.0):
        fn = with_slope(slope)
        np.testing.assert_allclose(fn(x), jnp.sum(jnp.sin(x)), rtol=1e-6)
        np.testing.assert_array_equal(jax.grad(fn)(x), 3 * [slope])


def test_weak_numbers_are_not_taken_for_strong_ones():
    for one, kind in ((1.0, jnp.float16), (np.float32(1.0), jnp.float32)):
        y = jit_on_data(lambda x, one=one: jnp.where(x > 0, one, 0 * one))(jnp.ones(2, jnp.int8))
        assert (y * jnp.float16(1)).dtype == kind


def test_a_function_is_traced_again_under_other_settings():
    x, key = jnp.ones(2, jnp.float32), random.key(0)
    draw, third = (
        jit_on_data(lambda key: random.normal(key, (2,))),
        traced_once(lambda x: x * np.float64(1) / 3),
    )
    for on in (False, True, False):
        with jax.enable_x64(on):
            assert third(x).dtype == (jnp.float64 if on else jnp.float32)
        with jax.threefry_partitionable(on):
            np.testing.assert_array_equal(draw(key), random.normal(key, (2,)))


def test_threads_share_the_programs_that_are_kept(monkeypatch):
    """Another thread makes room for a program while one does."""

    class Slow(dict):
        def __delitem__(self, key):
            time.sleep(0.05)
            super().__delitem__(key)

    monkeypatch.setattr(operations, "_PROGRAMS", Slow())
    monkeypatch.setattr(operations, "_MOST_PROGRAMS", 1)

    def run(k):
        return float(jit_on_data(lambda x: k * x)(1.0))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, map(float, range(8)))) == list(range(8))


def test_few_programs_are_kept(monkeypatch):
    """The ones that were called last."""
    monkeypatch.setattr(operations, "_PROGRAMS", kept := {})
    monkeypatch.setattr(operations, "_MOST_PROGRAMS", 2)
    for scale in (2.0, 3.0, 2.0, 4.0):
        jit_on_data(lambda x, scale=scale: scale * x)(1.0)
    first, last = (program(list(), [1.0])[0] for program in kept.values())
    assert (float(first), float(last)) == (2.0, 4.0)
