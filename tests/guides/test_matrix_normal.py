"""`AutoMatrixNormal` on a regression with several outputs, whose posterior is Kronecker.

For y = X W + noise, noise of covariance V between outputs, and W ~ MN(M0, U0, V), the posterior is
MN(U (X^T y + U0^-1 M0), U, V) with U^-1 = X^T X + U0^-1, and y is normal given X.
"""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest
from scipy.stats import multivariate_normal

from numpyro_ext.guides import AutoMatrixNormal
from numpyro_ext.guides.matrix_normal import nearest
from tests.guides.moved import moved

P, Q, N = 3, 2, 8
X = np.random.default_rng(0).normal(1.0, 1.0, (N, P)) * [1.0, 3.0, 0.2]
V = np.array([[4.0, 0.3], [0.3, 0.05]])  # scales of 2 and 0.22
M0 = np.array([[5.0, -1.0], [0.0, 2.0], [30.0, 0.5]])
U0 = np.diag([1.0, 4.0, 9.0])
Y = X @ (M0 + 1.0) + np.random.default_rng(1).normal(size=(N, Q)) @ np.linalg.cholesky(V).T
U = np.linalg.inv(X.T @ X + np.linalg.inv(U0))
M = U @ (X.T @ Y + np.linalg.inv(U0) @ M0)
ROOT_V = np.linalg.cholesky(V)


def model(x, y):
    """With a positive number beside the weights, its data apart."""
    prior = dist.MatrixNormal(jnp.array(M0), jnp.sqrt(jnp.array(U0)), jnp.array(ROOT_V))
    w = numpyro.sample("w", prior)
    shift = numpyro.sample("shift", dist.Normal(2.0, 0.5))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.MultivariateNormal(x @ w, scale_tril=ROOT_V), obs=y)
    numpyro.sample("other", dist.Normal(shift, 0.5), obs=3.0)


DATA = jnp.array(X), jnp.array(Y)
# Of the vector of w and shift: precision, mean and log evidence.
PRECISION = np.zeros((P * Q + 1, P * Q + 1))
PRECISION[:-1, :-1] = np.linalg.inv(np.kron(U, V))
PRECISION[-1, -1] = 2 / 0.25
MEAN = np.append(M.ravel(), 2.5)
EVIDENCE = multivariate_normal((X @ M0).ravel(), np.kron(np.eye(N) + X @ U0 @ X.T, V)).logpdf(
    Y.ravel()
) + multivariate_normal(2.0, 0.5).logpdf(3.0)
ENTROPY = (len(MEAN) * (1 + np.log(2 * np.pi)) - np.linalg.slogdet(PRECISION)[1]) / 2


def svi_of(optim=None, num_particles=1, **kwargs):
    guide = AutoMatrixNormal(model, **kwargs)
    optim = optim or guide.natural_gradient(lambda i: 0.5 / (1 + 0.05 * i))
    return guide, SVI(model, guide, optim, Trace_ELBO(num_particles))


def off_start(svi, amount, *args):
    """The parameters with noise in all but the fixed map."""
    start = svi.get_params(svi.init(random.key(0), *args))
    fixed = {name: start[name] for name in ("auto_center", "auto_root") if name in start}
    return {**moved(svi, amount, *args), **fixed}


def is_posterior(guide, params, tol):
    q = guide.matrix_normal(params, "w")
    row = q.scale_tril_row @ q.scale_tril_row.T
    column = q.scale_tril_column @ q.scale_tril_column.T
    size = np.linalg.det(V) ** 0.5
    sds = np.sqrt(np.outer(np.diag(U), np.diag(V)))
    np.testing.assert_allclose((q.loc - M) / sds, 0, atol=tol)
    for found, expected in ((row, U * size), (column, V / size)):
        units = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
        np.testing.assert_allclose(found / units, expected / units, atol=tol)


@pytest.mark.slow
@pytest.mark.x64
def test_begins_at_the_kronecker_posterior_with_its_entropy_and_evidence(tol):
    guide, svi = svi_of()
    state = svi.init(random.key(0), *DATA)
    params = svi.get_params(state)
    is_posterior(guide, params, tol(2e-3, 1e-6))
    # At a draw of the posterior log p - log q is the evidence, whatever the draw.
    np.testing.assert_allclose(svi.evaluate(state, *DATA), -EVIDENCE, atol=tol(0.01, 1e-6))
    posterior = guide.get_posterior(params)
    z, cached = posterior.sample_with_intermediates(random.key(1), (1,))
    of_noise = guide.get_base_dist().log_prob(guide.get_transform(params).inv(z))
    log_volume = of_noise - posterior.log_prob(z, cached)
    entropy = len(MEAN) * (1 + np.log(2 * np.pi)) / 2 + log_volume
    np.testing.assert_allclose(entropy, ENTROPY, atol=tol(0.01, 1e-6))


@pytest.mark.slow
@pytest.mark.x64
def test_exact_natural_gradients_end_at_the_posterior_in_a_few_steps(tol):
    """KL(q || p) in closed form, from NumPyro's start: 12 steps of size 1."""
    guide, svi = svi_of(init_from=None)
    params = svi.optim.get_params(svi.init(random.key(0), *DATA).optim_state)
    optim = guide.natural_gradient(1.0)

    def kl(params):
        f = guide.get_transform(svi.constrain_fn(params))
        zero = jnp.zeros(len(MEAN))
        A, away = jax.jacfwd(f)(zero), f(zero) - MEAN
        fit = jnp.sum(A * (PRECISION @ A)) + away @ PRECISION @ away - len(MEAN)
        return fit / 2 - jnp.linalg.slogdet(A)[1] - np.linalg.slogdet(PRECISION)[1] / 2

    @jax.jit
    def run(params):
        def step(_, carry):
            params, state = carry
            steps, state = optim.update(jax.grad(kl)(params), state, params)
            return optax.apply_updates(params, steps), state

        return jax.lax.fori_loop(0, 12, step, (params, optim.init(params)))[0]

    assert kl(params) > 100
    params = run(params)
    assert abs(kl(params)) < tol(1e-3, 1e-9)
    is_posterior(guide, svi.constrain_fn(params), tol(2e-3, 1e-6))


@pytest.mark.slow
def test_natural_gradients_of_draws_end_near_the_posterior():
    """From 0.5 off. At the last rate of 0.02 with 16 draws a root has an error of about .04."""
    guide, svi = svi_of(num_particles=16)
    start = off_start(svi, 0.5, *DATA)
    with pytest.raises(AssertionError):
        is_posterior(guide, start, 0.2)
    run = svi.run(random.key(0), 500, *DATA, progress_bar=False, init_params=start)
    is_posterior(guide, run.params, 0.2)


@pytest.mark.slow
@pytest.mark.x64
def test_density_is_that_of_the_matrix_normals_and_normals(tol):
    """Off the start: a plate of matrices, one of a site of vectors in a plate, numbers between."""

    def model():
        numpyro.sample("a", dist.Normal(jnp.zeros(2), 3.0).to_event(1))
        numpyro.sample("w", dist.Normal(1.0, 2.0).expand([2, 3, 2]).to_event(2))
        numpyro.sample("b", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 4):
            numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))

    for kwargs in ({"init_from": None}, {"sites": ["w", "p"]}):
        guide = AutoMatrixNormal(model, **kwargs)
        svi = SVI(model, guide, guide.natural_gradient(0.1), Trace_ELBO())
        params = off_start(svi, 0.3)
        z = guide.sample_latent(random.key(2), params, 5)
        w, p = guide.matrix_normal(params, "w"), guide.matrix_normal(params, "p")
        assert w.batch_shape == (2,) and p.event_shape == (4, 2)
        np.testing.assert_allclose(np.linalg.det(w.scale_tril_column), 1, rtol=1e-4)
        expected = w.log_prob(z[:, 2:14].reshape(5, 2, 3, 2)).sum(1)
        expected += p.log_prob(z[:, 15:].reshape(5, 4, 2))
        f = guide.get_transform(params)
        centre = f(jnp.zeros(23))
        sds = f(jnp.ones(23)) - centre
        for k in (0, 1, 14):
            expected += dist.Normal(centre[k], sds[k]).log_prob(z[:, k])
        log_q = guide.get_posterior(params).log_prob(z)
        np.testing.assert_allclose(log_q, expected, rtol=tol(1e-4, 1e-10))


def test_nearest_matrix_normal_has_no_lower_kl_beside_it():
    root = np.random.default_rng(3).normal(size=(12, 12))
    precision = (root @ root.T + np.eye(12)).reshape(3, 4, 3, 4)

    def kl(R, C):
        A = np.kron(R, C)
        return np.sum(A * (precision.reshape(12, 12) @ A)) / 2 - np.linalg.slogdet(A)[1]

    R, C = nearest(precision)
    assert np.linalg.det(C) == pytest.approx(1)
    rng = np.random.default_rng(4)
    for _ in range(20):
        move = np.tril(rng.normal(size=(3, 3))) * 0.03, np.tril(rng.normal(size=(4, 4))) * 0.03
        slope = kl(R + 1e-4 * move[0], C + 1e-4 * move[1]) - kl(R, C)
        assert kl(R + move[0], C + move[1]) > kl(R, C) and abs(slope) < 1e-8
    diagonal = np.arange(1.0, 13.0).reshape(3, 4)
    full = np.diag(diagonal.ravel()).reshape(3, 4, 3, 4)
    for one, other in zip(nearest(diagonal), nearest(full), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)


def test_wrong_arguments_are_named():
    def flat():
        numpyro.sample("a", dist.Normal(jnp.zeros(2), 3.0).to_event(1))

    def start(model, *args, **kwargs):
        guide = AutoMatrixNormal(model, **kwargs)
        SVI(model, guide, optax.adam(0.1), Trace_ELBO()).init(random.key(0), *args)

    with pytest.raises(ValueError, match="no latent site of two axes for a matrix normal"):
        start(flat)
    with pytest.raises(ValueError, match=r"sites has 'shift'.*these are \['w'\]"):
        start(model, *DATA, sites=["shift"])
    with pytest.raises(ValueError, match=r"sites is empty; name some of \['w'\]"):
        start(model, *DATA, sites=[])
    with pytest.raises(TypeError, match="sites is 'w'; it must be a list"):
        AutoMatrixNormal(model, sites="w")
    with pytest.raises(ValueError, match=r"step_size is 2\.0; it must be in"):
        AutoMatrixNormal(model).natural_gradient(2.0)
    guide, svi = svi_of(init_from=None)
    params = svi.get_params(svi.init(random.key(0), *DATA))
    with pytest.raises(ValueError, match=r"site is 'shift'; it must be one of \['w'\]"):
        guide.matrix_normal(params, "shift")
