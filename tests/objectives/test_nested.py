"""NestedVRELBO: its limits for the same key, quadrature, and the minibatch by enumeration."""

import itertools

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import pytest

from numpyro_ext.objectives import VRELBO, NestedVRELBO
from tests.objectives.compare import assert_same
from tests.objectives.enumeration import log_normal
from tests.objectives.models import (
    X_LOCAL,
    mixed_guide,
    mixed_model,
    value_and_grad,
)


def test_one_inner_draw_is_the_elbo(tol):
    losses = [NestedVRELBO(-1.0, 3, num_inner=1), VRELBO(1.0, 3, gradient="standard")]
    nested, elbo = value_and_grad(losses, {"c": 0.4}, mixed_model, mixed_guide)
    assert_same(nested, elbo, tol(2e-5, 1e-12))


def exact_bound(alpha, c=0.4):
    """The bound of ``mixed_model`` and ``mixed_guide`` by quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    w, weights = c + 0.6 * nodes, weights / weights.sum()
    log_q = log_normal(w, c, 0.6)
    total = np.sum(weights * (log_normal(w, 0.2, 1.0) - log_q))
    z = np.linspace(-12, 12, 4001)
    for xn in np.float64(X_LOCAL):
        log_qz = log_normal(z, c * xn, 0.7)
        lw = log_normal(z, w[:, None], 1.0) + log_normal(xn, z, 0.8) - log_qz
        a = 1 - alpha
        f = lw if a == 0 else np.exp(a * lw)
        inner = np.trapezoid(np.exp(log_qz) * f, z, axis=1)
        total += np.sum(weights * (inner if a == 0 else np.log(inner) / a))
    return total


@pytest.mark.slow
def test_matches_quadrature():
    alphas = (0.0, 0.5, 1.0, 1.3)

    def bound(alpha, key):
        loss = NestedVRELBO(alpha, 100, num_inner=300)
        return -loss.loss(key, {"c": 0.4}, mixed_model, mixed_guide)

    @jax.jit
    def bounds(keys):
        return jax.lax.map(lambda key: jax.vmap(bound, (0, None))(jnp.array(alphas), key), keys)

    estimates = np.array(bounds(random.split(random.key(2), 48)))
    error = estimates.std(0, ddof=1) / 48**0.5
    # Finite L pulls by about var(w) / (2 L) for each datum.
    for i, alpha in enumerate(alphas):
        bias = 0.0 if alpha == 1 else 0.02
        expected = exact_bound(alpha)
        assert abs(estimates[:, i].mean() - expected) < 4 * error[i] + bias
    assert np.all(error < 0.045)  # .03 for the largest order, whose weights have the heaviest tails


def posterior_guide(x=X_LOCAL, batch=None):
    """The exact conditional of each z given w, so that the inner weights are constant."""
    c = numpyro.param("c", 0.4)
    w = numpyro.sample("w", dist.Normal(c, 0.6))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        precision = 1 + 0.8**-2
        numpyro.sample("z", dist.Normal((w + x * 0.8**-2) / precision, precision**-0.5))


@pytest.mark.slow
def test_unbiased_in_the_minibatch(tol):
    """The mean over all minibatches of the same draws is the loss of all data, for every order."""
    minibatches = jnp.array(list(itertools.combinations(range(len(X_LOCAL)), 2)))
    params = {"c": jnp.asarray(0.4, float)}

    def loss(p, alpha, key, rows=None):
        model, guide = mixed_model, posterior_guide
        if rows is not None:
            model, guide = (handlers.substitute(fn, data={"data": rows}) for fn in (model, guide))
        objective = NestedVRELBO(alpha, 3, num_inner=4)
        return objective.loss(key, p, model, guide, batch=None if rows is None else 2)

    @jax.jit
    def values(key, alpha):
        full = jax.value_and_grad(loss)(params, alpha, key)
        part = lambda rows: jax.value_and_grad(loss)(params, alpha, key, rows)  # noqa: E731
        return full, jax.vmap(part)(minibatches)

    for alpha in (-1.0, 0.5):
        full, parts = values(random.key(1), alpha)
        assert_same(jax.tree.map(lambda x: x.mean(0), parts), full, tol(2e-5, 1e-12))
        assert np.std(parts[0]) > 1
