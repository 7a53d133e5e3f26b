"""Objectives beside each other: one compilation, one key; and models that they must refuse."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.transforms import ExpTransform
import pytest


def together(losses, params, model, guide, *args, seed=0, **kwargs):
    """``(value, gradient)`` of several objectives for one key."""
    params = {name: jnp.asarray(value, float) for name, value in params.items()}

    @jax.jit
    def fn(params, key):
        return [
            jax.value_and_grad(
                lambda p, loss=loss: loss.loss(key, p, model, guide, *args, **kwargs)
            )(params)
            for loss in losses
        ]

    return fn(params, random.key(seed))


def assert_same(a, b, tol):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


def assert_refuses(sentence, loss, params, model, guide, *args, error=ValueError, **kwargs):
    """The objective fails with ``sentence`` when it is traced."""
    with pytest.raises(error, match=sentence):
        jax.eval_shape(
            lambda key: loss.loss(key, params, model, guide, *args, **kwargs), random.key(0)
        )


class NoInverse(ExpTransform):
    """A transform of which only the forward direction is known."""

    def _inverse(self, y):
        raise NotImplementedError
