"""Results beside each other, and models that an objective must refuse."""

import jax
from jax import random
import numpy as np
from numpyro.distributions.transforms import ExpTransform
import pytest


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
