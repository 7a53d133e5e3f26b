"""Natural gradients against the Fisher matrix, in every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import (
    Dirichlet,
    natural_gradient_of,
    straight_through_kl,
    straight_through_mean,
)
from tests.expfam.families import FAMILIES, every_family, naturals, pair_of, quick_jit

pytestmark = pytest.mark.x64


def f(mean):
    """Neither linear nor symmetric in the entries of a matrix."""
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in mean])
    weight = jnp.arange(1.0, flat.size + 1) / flat.size
    return jnp.sum(jnp.sin(flat) * weight) + 0.3 * flat[0] * flat[-1]


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


@functools.cache
def gradients():
    """name -> three natural gradients of f, and what the Fisher matrix makes of them."""

    @quick_jit
    def compute(naturals):
        result = {}
        for name, (n, p) in naturals.items():
            family = FAMILIES[name][0]
            data = jax.tree.map(jnp.sin, n)

            def loss(q, family=family, p=p, data=data):
                mean = straight_through_mean(family, q)
                return straight_through_kl(family, q, p, mean) - family.inner(data, mean)

            natural = jax.grad(lambda n, fam=family: f(straight_through_mean(fam, n)))(n)
            result[name] = {
                "natural": natural,
                "of": natural_gradient_of(family, f, n),
                "ordinary": jax.grad(lambda n, fam=family: f(fam.mean(n)))(n),
                "loss": jax.value_and_grad(loss)(n),
                "plain loss": family.kl(n, p) - family.inner(data, family.mean(n)),
                "data": data,
                "Fisher times natural": jax.jvp(family.mean, (n,), (natural,))[1],
            }
        return result

    return compute({name: (first(q), p) for name, (q, p) in naturals().items()})


@pytest.mark.parametrize("name", every_family)
def test_the_gradient_of_a_conjugate_loss_is_minus_the_step_to_the_posterior(name, needs_x64):
    """q - p - s for KL(q || p) minus the product of statistics s and the mean."""
    result, (q, p) = gradients()[name], pair_of(name)
    value, gradient = result["loss"]
    np.testing.assert_allclose(value, result["plain loss"], rtol=1e-10)
    for g, a, b, s in zip(gradient, first(q), p, result["data"], strict=True):
        np.testing.assert_allclose(g, a - b - s, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", every_family)
def test_the_fisher_matrix_times_it_is_the_gradient(name, needs_x64):
    """[Hessian A] G = grad g, singular or not: in an overcomplete family both sides are F^T times
    those of a minimal one, and F^T is injective."""
    result = gradients()[name]
    for a, b, c in zip(
        result["Fisher times natural"], result["ordinary"], result["of"], strict=True
    ):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * scale)
        assert c.shape == b.shape
    for a, b in zip(result["of"], result["natural"], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_divergence_is_exact_and_its_gradient_in_the_prior_ordinary(tol):
    q, p = pair_of("Dirichlet")
    kl = lambda q, p: straight_through_kl(  # noqa: E731
        Dirichlet, q, p, straight_through_mean(Dirichlet, q)
    ).sum()
    result, (by_q, by_p) = jax.jit(jax.value_and_grad(kl, (0, 1)))(q, p)
    expected, ordinary = jax.jit(jax.value_and_grad(lambda p: Dirichlet.kl(q, p).sum()))(p)
    np.testing.assert_allclose(result, expected, rtol=tol(1e-5, 1e-12))
    np.testing.assert_allclose(by_p.a, ordinary.a, rtol=tol(1e-4, 1e-10))
    np.testing.assert_allclose(by_q.a, q.a - p.a, rtol=tol(1e-5, 1e-12))
