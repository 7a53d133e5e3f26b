"""`AutoMarkov`: density against a dense precision, exact posteriors, cost in T, errors."""

from functools import cache, partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_value
import optax
import pytest

from numpyro_ext.guides import AutoMarkov
from tests.guides.moved import moved

OBSERVED = jnp.array([0.5, 1.2, 0.3, -0.4])


def state_space(y=OBSERVED):
    """z_1 ~ N(0, 1), z_t ~ N(.9 z_{t-1}, .5^2), y_t ~ N(z_t, .4^2)."""

    def step(carry, y):
        z, scale = carry
        z = numpyro.sample("z", dist.Normal(0.9 * z, scale))
        numpyro.sample("y", dist.Normal(z, 0.4), obs=y)
        return (z, 0.5), None

    scan(step, (0.0, 1.0), y)


def exact():
    """Posterior mean and covariance of the same, by linear algebra."""
    T = len(OBSERVED)
    innovations = jnp.eye(T) - 0.9 * jnp.eye(T, k=-1)
    precision = innovations.T @ jnp.diag(jnp.array([1.0] + [1 / 0.25] * (T - 1))) @ innovations
    cov = jnp.linalg.inv(precision + jnp.eye(T) / 0.16)
    return cov @ OBSERVED / 0.16, cov


T = 5


def several_sites():
    """Two sites of the chain, of widths 1 and 2, between and after sites that are none."""
    numpyro.sample("first", dist.Normal(1.0, 2.0))
    with numpyro.plate("time", T):
        numpyro.sample("z", dist.HalfNormal(3.0))
        numpyro.sample("other", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    numpyro.sample("b", dist.Normal(jnp.zeros((T, 2)), 1.0).to_event(2))


@cache
def perturbed(order):
    guide = AutoMarkov(several_sites, sites=("z", "b"), order=order, init_scale=0.4)
    svi = SVI(several_sites, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, moved(svi, 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, pytest.param(3, marks=pytest.mark.x64)])
def test_density_is_that_of_the_dense_normal(order, tol):
    """B of the docstring, written out: B^T (z - m) = e on the chain's coordinates."""
    guide, params = perturbed(order)
    D, d = 3, guide.latent_dim
    names = [*["first"], *[f"z{t}" for t in range(T)]]
    names += [f"other{t}{i}" for t in range(T) for i in range(3)]
    names += [f"b{t}{i}" for t in range(T) for i in range(2)]
    chain = [names.index(x) for t in range(T) for x in (f"z{t}", f"b{t}0", f"b{t}1")]
    L = np.asarray(params["auto_scale_tril"], np.float64)
    B = np.zeros((T * D, T * D))
    block = lambda t: slice(t * D, (t + 1) * D)  # noqa: E731
    for t in range(T):
        B[block(t), block(t)] = np.linalg.inv(L[t]).T
        for j in range(1, min(order, T - 1 - t) + 1):
            A = np.asarray(params["auto_weights"][t, j - 1], np.float64)
            B[block(t + j), block(t)] = -A.T @ np.linalg.inv(L[t]).T
    precision = np.zeros((d, d))
    precision[np.ix_(chain, chain)] = B @ B.T
    others = [i for i in range(d) if i not in chain]
    precision[others, others] = 1 / np.asarray(params["auto_scale"], np.float64) ** 2
    bands = [(B @ B.T)[block(0), block(t)] for t in range(T)]
    assert all((np.abs(band).max() > 0) == (t <= order) for t, band in enumerate(bands))

    @jax.jit
    def densities(params):
        q = guide.get_posterior(params)
        z, cached = q.sample_with_intermediates(random.key(3), (2, 4))
        transform = guide.get_transform(params)
        base = transform.inv(z)
        return z, q.log_prob(z, cached), q.log_prob(z), transform(base)

    z, own, foreign, again = densities(params)
    r = np.asarray(z - params["auto_loc"], np.float64)
    quadratic = np.einsum("...i,ij,...j->...", r, precision, r)
    expected = (np.linalg.slogdet(precision / (2 * np.pi))[1] - quadratic) / 2
    assert own.shape == (2, 4)
    assert np.allclose(own, expected, atol=tol(5e-4, 1e-9))
    assert np.allclose(foreign, expected, atol=tol(5e-4, 1e-9))
    assert jnp.allclose(again, z, atol=tol(1e-5, 1e-9))


@pytest.mark.slow
def test_starts_at_a_normal_around_init_loc():
    values = {
        "first": 3.0,
        "z": jnp.exp(jnp.arange(5.0)),
        "other": jnp.zeros((T, 3)),
        "b": jnp.arange(10.0).reshape(T, 2),
    }
    guide = AutoMarkov(several_sites, init_scale=0.25, init_loc_fn=init_to_value(values=values))
    svi = SVI(several_sites, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0)))
    loc = jnp.concatenate([jnp.array([3.0]), jnp.arange(5.0), jnp.zeros(15), jnp.arange(10.0)])
    z = loc + jnp.linspace(-0.5, 0.5, 31)
    log_q = jax.jit(lambda p: guide.get_posterior(p).log_prob(z))(params)
    assert jnp.allclose(log_q, dist.Normal(loc, 0.25).log_prob(z).sum(), rtol=1e-5)
    # By default everything of the leading length that is most frequent is in the chain.
    assert guide.prepared.length == T and guide.prepared.width == 6


def scalars():
    numpyro.sample("a", dist.Normal())
    numpyro.sample("b", dist.Normal(jnp.zeros((1, 3)), 1.0).to_event(2))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(AutoMarkov, state_space, order=4), "order is 4 and the sequence has length 4"),
        (partial(AutoMarkov, state_space, sites=["w"]), r"sites are {'w': None}"),
        (partial(AutoMarkov, scalars), "no latent site has a leading axis of time"),
        (partial(AutoMarkov, scalars, sites=["b"]), r"{'b': 1}, in unconstrained space; they must"),
        (
            partial(AutoMarkov, several_sites, sites=["first", "z"]),
            r"{'first': 1, 'z': 5}, in unconstrained",
        ),
    ],
)
def test_what_does_not_fit_is_named(make, match):
    with pytest.raises(ValueError, match=match):
        handlers.seed(make(), 0)()
