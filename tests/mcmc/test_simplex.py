"""Simplex steps: the terms are those of the densities, and the draws are Dirichlet."""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import reparam, seed, trace
import pytest

from numpyro_ext.mcmc import GammaSimplexReparam, simplex_langevin_step
from numpyro_ext.mcmc.geometry import recipe_correction
from numpyro_ext.mcmc.simplex import _TERMS, _project

COUNTS, ALPHA = np.array([5.0, 2.0, 0.0]), np.array([6.0, 4.0, 2.5])
N = (COUNTS + ALPHA).sum()


def extended(theta):
    return jnp.append(theta, 1 - theta.sum())


def log_odds(theta):
    return jax.nn.softmax(jnp.append(theta, 0.0))


# The densities in their own coordinates (Dirichlet posterior with the Jacobian, or Gamma priors
# with the multinomial likelihood), and the matrices of the table.
REFERENCE = {
    "reduced-mean": (
        jnp.array([0.5, 0.2]),
        extended,
        lambda t: jnp.sum((COUNTS + ALPHA - 1) * jnp.log(extended(t))),
        lambda t: (jnp.diag(t) - jnp.outer(t, t)) / N,
    ),
    "reduced-natural": (
        jnp.array([0.7, -0.4]),
        log_odds,
        lambda t: jnp.sum((COUNTS + ALPHA) * jnp.log(log_odds(t))),
        lambda t, most=jnp.inf: (
            (
                jnp.diag(jnp.minimum(1 / log_odds(t)[:-1], most * N))
                + jnp.minimum(1 / log_odds(t)[-1], most * N)
            )
            / N
        ),
    ),
    "expanded-mean": (
        jnp.array([7.0, 3.0, 1.5]),
        lambda t: t / t.sum(),
        lambda t: jnp.sum((ALPHA - 1) * jnp.log(t) - t + COUNTS * jnp.log(t / t.sum())),
        jnp.diag,
    ),
    "expanded-natural": (
        jnp.array([1.9, 1.1, 0.4]),
        jax.nn.softmax,
        lambda t: jnp.sum(ALPHA * t - jnp.exp(t) + COUNTS * jax.nn.log_softmax(t)),
        lambda t, most=jnp.inf: jnp.diag(jnp.minimum(jnp.exp(-t), most)),
    ),
}
FORMS = pytest.mark.parametrize("form", list(REFERENCE))


@pytest.mark.parametrize(
    ("form", "bound"),
    [*((form, None) for form in REFERENCE), ("reduced-natural", 0.15), ("expanded-natural", 0.5)],
)
@pytest.mark.x64
def test_terms_are_those_of_the_density(form, bound, tol):
    """``A grad log p``, ``div A`` by autodiff, and a square root of A, the natural ones also where
    the bound holds for some of the categories: 1 / (N pi) are .09, .28 and .19 there, exp(-theta)
    .15, .33 and .67."""
    theta, _, log_density, A = REFERENCE[form]
    A, most = (A, jnp.inf) if bound is None else (partial(A, most=bound), bound)
    theta = jnp.asarray(theta, float)
    counts, alpha = jnp.asarray(COUNTS), jnp.asarray(ALPHA)

    @jax.jit
    def terms(zeta):
        return _TERMS[form](theta, counts, alpha, zeta, most)

    gradient, correction, _ = terms(jnp.zeros(3))
    root = np.stack([terms(jnp.eye(3)[k])[2] for k in range(3)], 1)
    close = {"rtol": tol(2e-5, 1e-12), "atol": tol(1e-6, 1e-13)}
    np.testing.assert_allclose(gradient, A(theta) @ jax.grad(log_density)(theta), **close)
    np.testing.assert_allclose(correction, recipe_correction(A, None, theta), **close)
    np.testing.assert_allclose(root @ root.T, A(theta), **close)


def moments_of(form, eps, steps, alpha=ALPHA):
    """Mean and second moments of pi over 800 chains, with standard errors."""
    theta, to_simplex, _, _ = REFERENCE[form]
    chains = jnp.broadcast_to(theta, (800, *theta.shape))
    pi = jax.vmap(to_simplex)

    def body(carry, key):
        theta, total = carry
        theta = simplex_langevin_step(key, theta, COUNTS, alpha, eps, parameterization=form)
        p = pi(theta)
        return (theta, total + jnp.concatenate([p, p**2], -1)), None

    def run(theta, keys):
        return lax.scan(body, (theta, jnp.zeros((800, 6))), keys)[0]

    keys = random.split(random.key(1), 2 * steps)
    theta, _ = jax.jit(run)(chains, keys[:steps])
    _, total = jax.jit(run)(theta, keys[steps:])
    mean = np.asarray(total, float) / steps
    return mean.mean(0), mean.std(0) / 800**0.5


@pytest.mark.parametrize(
    ("form", "eps"),
    [
        ("reduced-mean", 0.01),
        ("reduced-natural", 0.005),
        ("expanded-mean", 0.01),
        ("expanded-natural", 0.005),
    ],
)
def test_draws_are_dirichlet(form, eps):
    """Posterior Dirichlet(11, 6, 2.5); a small step leaves 1 % of bias in the moments."""
    got, error = moments_of(form, eps, 1200)
    a = COUNTS + ALPHA
    mean = a / N
    second = a * (a + 1) / (N * (N + 1))
    expected = np.concatenate([mean, second])
    assert np.all(error < 0.025 * expected)
    assert np.all(np.abs(got - expected) < 4 * error + 0.01 * expected), (got / expected, error)
    variance, expected = got[3:] - got[:3] ** 2, mean * (1 - mean) / (N + 1)
    # Chains as long as these know a variance to about 2 %, and the step leaves 1 % of bias.
    np.testing.assert_allclose(variance, expected, rtol=0.09)


@pytest.mark.parametrize(("form", "eps"), [("reduced-natural", 0.04), ("expanded-natural", 0.005)])
def test_a_category_without_counts_keeps_its_share(form, eps):
    """Dirichlet(5.5, 2.5, .5), whose last share is near 0 at most times."""
    got, error = moments_of(form, eps, 1500, 0.5)
    a = COUNTS + 0.5
    mean = a / a.sum()
    sd = np.sqrt(mean * (1 - mean) / (a.sum() + 1))
    # Of the step, whose bias falls with it: .1 sd and 12 %.
    np.testing.assert_array_less(np.abs(got[:3] - mean), 4 * error[:3] + 0.15 * sd)
    np.testing.assert_allclose(np.sqrt(got[3:] - got[:3] ** 2), sd, rtol=0.18)


def test_reduced_mean_is_put_back_at_the_nearest_point_of_the_simplex():
    """The sum constraint alone moves all coordinates alike."""
    for theta, nearest in (([0.8, 0.7], [0.55, 0.45]), ([1.5, -0.2], [1.0, 0.0])):
        np.testing.assert_allclose(_project(jnp.array(theta)), nearest, atol=1e-6)
    np.testing.assert_allclose(_project(jnp.array([0.2, 0.3])), [0.2, 0.3], rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step_size": 0.0}, "step_size is 0.0"),
        ({"alpha": 0.0}, "alpha is 0.0; it must be positive"),
        ({"counts": np.ones(4)}, r"counts has shape \(4,\).*must be 3"),
        ({"parameterization": "reduced-mean"}, r"counts has shape \(3,\).*must be 4"),
    ],
)
def test_bad_input(change, match):
    arguments = {"counts": COUNTS, "alpha": 1.0, "step_size": 0.1} | change
    with pytest.raises(ValueError, match=match):
        simplex_langevin_step(random.key(0), jnp.ones(3), **arguments)


def test_reparameterised_prior_is_dirichlet():
    """``p`` is deterministic, with the mean and the variances of the prior."""

    def prior():
        with numpyro.plate("topics", 20_000):
            numpyro.sample("p", dist.Dirichlet(jnp.array([6.0, 4.0, 2.5])))

    model = reparam(prior, config={"p": GammaSimplexReparam()})
    sites = trace(seed(model, random.key(0))).get_trace()
    assert sites["p"]["type"] == "deterministic"
    assert sites["p_gamma"]["fn"].event_shape == (3,)
    p = np.asarray(sites["p"]["value"], float)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
    mean = ALPHA / ALPHA.sum()
    variance = mean * (1 - mean) / (ALPHA.sum() + 1)
    assert np.all(np.abs(p.mean(0) - mean) < 4 * np.sqrt(variance / 20_000))
    np.testing.assert_allclose(p.var(0), variance, rtol=0.05)


def test_reparam_of_other_sites():
    def not_dirichlet():
        numpyro.sample("p", dist.Normal(0, 1))

    def observed():
        numpyro.sample("p", dist.Dirichlet(jnp.ones(2)), obs=jnp.array([0.3, 0.7]))

    for model, match in ((not_dirichlet, "is a Normal"), (observed, "is observed")):
        with pytest.raises(ValueError, match=match):
            seed(reparam(model, config={"p": GammaSimplexReparam()}), random.key(0))()
