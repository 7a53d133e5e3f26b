"""A backward pass of one's own: one for all arrays, in each transformation, and at no cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext._model.cotangents import change_cotangents

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

    expected, found = grads(plain, 2.0), grads(changed, 1.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), expected, found)


def test_the_change_sees_all_cotangents():
    def largest(cts):
        top = jnp.max(jnp.array([jnp.max(jnp.abs(ct)) for ct in jax.tree.leaves(cts)]))
        return jax.tree.map(lambda ct: jnp.full_like(ct, top), cts)

    found = jax.grad(lambda tree: plain(change_cotangents(tree, largest)))(TREE)
    top = max(float(jnp.max(jnp.abs(ct))) for ct in jax.tree.leaves(jax.grad(plain)(TREE)))
    jax.tree.map(lambda ct: np.testing.assert_allclose(ct, top, rtol=1e-6), found)


def test_nothing_is_left_of_it_in_the_compiled_program():
    """The arrays are tied to one another while JAX differentiates, and the compiler unties them."""

    def num_reductions(fn):
        grad = jax.jit(jax.grad(lambda tree: fn(change_cotangents(tree, lambda cts: cts))))
        return grad.lower(TREE).compile().as_text().count(" reduce("), jax.make_jaxpr(grad)(TREE)

    count, traced = num_reductions(lambda tree: jnp.sum(jnp.exp(tree["a"]) * tree["b"]))
    assert count == 1  # the gradient of b
    assert str(traced).count("reduce_sum") > 5
