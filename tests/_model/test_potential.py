"""The potential at chosen rows, against NumPyro's and against sums over rows."""

from functools import partial
from itertools import combinations

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy
import pytest

from numpyro_ext._model.potential import Potential, Program
from numpyro_ext._model.read import read_model
from numpyro_ext._model.start import draw_params
from numpyro_ext._model.surface import surface_of
from tests._model.models import ORDER, ROWS, crossed, data, straight, unordered


def potential_of(model, *args, params=None, forward_mode=False, **kwargs):
    info = read_model(model, args, kwargs)
    return Potential(model, info, params or {}, args, kwargs, forward_mode=forward_mode)


def somewhere(potential, batch=()):
    x = random.normal(random.key(1), (*batch, potential.info.size))
    return jax.vmap(potential.info.unravel)(x) if batch else potential.info.unravel(x)


def close(a, b, tol):
    return all(
        jnp.allclose(x, y, rtol=tol, atol=tol)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.x64
def test_is_numpyros_at_all_rows(tol):
    potential = potential_of(unordered, data())
    z = somewhere(potential)
    theirs = partial(potential_energy, handlers.seed(unordered, 0), (data(),), {})
    both = jax.jit(lambda z: (potential.value_and_grad(z, {}), jax.value_and_grad(theirs)(z)))
    assert close(*both(z), tol(1e-5, 1e-12))


@pytest.mark.x64
def test_is_numpyros_at_chosen_rows(tol):
    """NumPyro reads the rows from the plate's value; a batch as long as the model's own."""
    potential = potential_of(straight, data(), subsample_size=2)
    z, idx = somewhere(potential), jnp.array([4, 1])
    chosen = handlers.substitute(handlers.seed(straight, 0), data={"rows": idx})
    theirs = partial(potential_energy, chosen, (data(),), {"subsample_size": 2})
    ours, expected = jax.jit(lambda z: (potential(z, {"rows": idx}), theirs(z)))(z)
    assert jnp.allclose(ours, expected, rtol=tol(1e-6, 1e-12))


def test_minibatches_average_to_all_rows(tol):
    """Over the 15 pairs of 6 rows, value and gradient have the mean of the full pass."""
    potential = potential_of(straight, data(), subsample_size=2)
    z = somewhere(potential)
    pairs = jnp.array(list(combinations(range(ROWS), 2)))
    whole = potential_of(straight, data())

    @jax.jit
    def passes(z):
        each = jax.vmap(lambda idx: potential.value_and_grad(z, {"rows": idx}))(pairs)
        mean = jax.tree.map(lambda x: jnp.mean(x, 0), each)
        return mean, potential.full_value_and_grad(z), whole.value_and_grad(z, {})

    mean, full, of_whole = passes(z)
    assert close(mean, full, tol(1e-5, 1e-12))
    assert close(mean, of_whole, tol(1e-5, 1e-12))


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_do_not_change_the_full_pass(chunk_size, tol):
    """Chunks of one row, and chunks that leave a rest."""
    potential = potential_of(straight, data(), subsample_size=2)
    z = somewhere(potential)

    @jax.jit
    def passes(z):
        full = potential.value_and_grad(z, {"rows": jnp.arange(ROWS)})
        return potential.full_value_and_grad(z, chunk_size=chunk_size), full

    assert close(*passes(z), tol(1e-5, 1e-12))


@pytest.mark.slow
def test_a_pass_of_many_pieces_is_as_precise_as_a_piece(monkeypatch):
    """Of 3,000 numbers that are nearly the same, in float32, one by one in a plate or in two:
    within four roundings of the sum in float64."""
    monkeypatch.setattr(Program, "piece_size", 1)
    x = 3 + 0.001 * jnp.abs(random.normal(random.key(0), (3000,)))

    def model(columns):
        z, each = numpyro.sample("z", dist.Normal(0.0, 1.0)), x.reshape(-1, columns)
        with (
            numpyro.plate("rows", len(each), subsample_size=1, dim=-2) as i,
            numpyro.plate("columns", columns, subsample_size=1, dim=-1) as j,
        ):
            numpyro.sample("x", dist.Normal(z, 1.0), obs=each[i][:, j])

    rows, constant = np.asarray(x, np.float64), 0.5 * np.log(2 * np.pi)
    value = np.sum(0.5 * (rows - 0.1) ** 2 + constant) + 0.5 * 0.1**2 + constant
    for columns in (1, 2):
        total, grad = surface_of(potential_of(model, columns)).sums(np.full(1, 0.1, np.float32))
        assert abs(total / value - 1) < 4 * 2.0**-24
        assert abs(grad[0] / (0.1 - np.sum(rows - 0.1)) - 1) < 4 * 2.0**-24


def test_some_rows_of_a_pass_are_evenly_spread(monkeypatch):
    monkeypatch.setattr(Program, "piece_size", 1)
    pieces = list(potential_of(straight, data(), subsample_size=2).pieces(3))
    assert [weight for weight, _ in pieces] == pytest.approx([1 / 3] * 3)
    assert [int(idx["rows"][0]) for _, idx in pieces] == [0, 2, 4]


def test_full_pass_of_two_plates_takes_all_pairs_of_pieces():
    x = jnp.sin(jnp.arange(12.0)).reshape(3, 4)
    potential = potential_of(crossed, x)
    z = somewhere(potential)
    every = {"rows": jnp.arange(3), "columns": jnp.arange(4)}
    whole = potential_of(crossed, x, sizes=(3, 4))

    @jax.jit
    def passes(z):
        chunked = potential.full_value_and_grad(z, chunk_size=2)
        return chunked, potential.value_and_grad(z, every), whole.value_and_grad(z, {})

    chunked, full, of_whole = passes(z)
    assert close(chunked, full, 1e-5)
    assert close(full, of_whole, 1e-5)


def test_forward_mode_gives_the_gradient_of_reverse_mode(tol):
    z = somewhere(potential_of(unordered, data()))
    kinds = [potential_of(unordered, data(), forward_mode=forward) for forward in (True, False)]
    assert close(
        *jax.jit(lambda z: [one.value_and_grad(z, {}) for one in kinds])(z), tol(1e-5, 1e-12)
    )


def test_parameters_of_the_model_are_those_given():
    def model():
        loc = numpyro.param("loc", 5.0)
        numpyro.sample("z", dist.Normal(loc, 1.0))

    z, constant = {"z": jnp.float32(2.0)}, jnp.log(2 * jnp.pi) / 2
    assert jnp.allclose(potential_of(model, params={"loc": 3.0})(z, {}), 0.5 + constant)
    params = draw_params(random.key(0), model, read_model(model), (), {})
    assert jnp.allclose(potential_of(model, params=params)(z, {}), 4.5 + constant)


@pytest.mark.slow
def test_a_start_that_is_nowhere_finite_names_the_site():
    """One start, and the third of several; the square of the row overflows."""
    x = data().at[2].set(jnp.finfo(jnp.result_type(float)).max)
    potential = potential_of(straight, x, subsample_size=2)
    z, idx = somewhere(potential), {"rows": jnp.array([2, 3])}
    value, grad = potential.value_and_grad(z, idx)
    with pytest.raises(ValueError, match="not finite at the initial point: see site 'x'"):
        potential.check_start(z, idx, value, grad)
    z = somewhere(potential, (3,))
    idx = {"rows": jnp.array([[0, 1], [4, 5], [2, 3]])}
    value, grad = jax.vmap(potential.value_and_grad)(z, idx)
    with pytest.raises(ValueError, match="see site 'x'"):
        potential.check_start(z, idx, value, grad)
    good = {"rows": jnp.array([[0, 1], [4, 5], [1, 3]])}
    potential.check_start(z, good, *jax.vmap(potential.value_and_grad)(z, good))


def test_a_gradient_that_is_not_finite_names_the_site():
    def model():
        numpyro.sample("steep", dist.Normal())
        z = numpyro.sample("z", dist.Normal())
        numpyro.factor("corner", jnp.sqrt(z - z))

    potential, z = potential_of(model), {"steep": jnp.float32(0.1), "z": jnp.float32(0.2)}
    value, grad = potential.value_and_grad(z, {})
    assert jnp.isfinite(value)
    with pytest.raises(ValueError, match="see site 'z'"):
        potential.check_start(z, {}, value, grad)


def test_unconstrain_undoes_the_constraints_and_drops_what_is_computed(tol):
    """What ``get_samples`` returns has deterministic sites too."""
    potential = potential_of(unordered, data(), subsample_size=2)
    z = somewhere(potential)
    constrained = potential.postprocess()(z)
    assert set(constrained) == {*ORDER, "mean"}
    assert close(potential.unconstrain("center", constrained), z, tol(1e-5, 1e-11))
    with pytest.raises(ValueError, match=r"center has shape .* at site 'loc'"):
        potential.unconstrain("center", constrained | {"loc": 0.0})
