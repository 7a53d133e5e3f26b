"""Held-out log likelihoods against closed forms of each model."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext.diagnostics import held_out_log_likelihood
from numpyro_ext.expfam import NIW, Dirichlet, Gaussian
from numpyro_ext.guides import FlowGuide
from numpyro_ext.svae import GMMEP, FixedGaussian, GaussianPotential, SVAEGuide, allow_missing

N, D, T = 7, 2, 5
H = jnp.array([[1.0, 0.5], [-0.3, 2.0], [0.7, -1.0]])
SHIFT = jnp.array([1.0, -2.0, 0.5])
NOISE = jnp.array([0.6, 1.0, 0.4])
PLAIN = jax.jit(Gaussian.from_standard)(np.array([0.5, -1.0]), np.array([[2.0, 0.3], [0.3, 0.7]]))
Y = jnp.asarray(SHIFT + 3 * np.sin(1 + 2 * np.arange(3.0 * N).reshape(N, 3) ** 1.5), float)


def linear_network(precision=1.0):
    """The exact potentials of ``H x + SHIFT + NOISE``, with precisions times a factor."""
    R = H.T @ jnp.diag(NOISE**-2) @ H

    def apply(params, y):
        h = (y - SHIFT) @ (H / NOISE[:, None] ** 2)
        W = jnp.broadcast_to(-precision * R / 2, (*h.shape, D))
        return GaussianPotential(precision * h, W)

    return (lambda rng_key, shape: (shape, {})), apply


def svi_of(model, guide):
    return SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())


def log_normal(y, loc, covariance):
    return dist.MultivariateNormal(loc, covariance).log_prob(y)


def plain(y, B=None, seen=None):
    with numpyro.plate("data", len(y), subsample_size=B) as idx:
        x = numpyro.sample("x", Gaussian.to_distribution(PLAIN))
        noise = dist.Normal(x @ H.T + SHIFT, NOISE)
        noise = noise if seen is None else noise.mask(seen)
        numpyro.sample("y", noise.to_event(1), obs=y[idx])


def plate(y, B=None, **kwargs):
    return numpyro.plate("data", len(y), subsample_size=B)


def plain_guide(network):
    return SVAEGuide({}, network, FixedGaussian(PLAIN), create_plates=plate)


PLAIN_PARAMS = {"svae_recognition$params": {}}


def exact_plain():
    loc, V = Gaussian.to_standard(PLAIN)
    return log_normal(Y, H @ loc + SHIFT, H @ V @ H.T + jnp.diag(NOISE**2))


@pytest.mark.slow
def test_exact_potentials_give_the_evidence_without_noise():
    """One draw is enough; a plate that takes minibatches runs on all rows."""
    svi = svi_of(plain, plain_guide(linear_network()))
    found = held_out_log_likelihood(svi, PLAIN_PARAMS, model_args=(Y, 3), num_samples=1)
    np.testing.assert_allclose(found, exact_plain(), rtol=1e-4)


@pytest.mark.slow
def test_entries_that_are_left_out_count_zero():
    """The evidence of the entries that were seen, without noise; a row without any has 0."""
    seen = (random.uniform(random.key(4), Y.shape) < 0.7).at[2].set(False)

    def masked(y):
        plain(jnp.nan_to_num(y), seen=~jnp.isnan(y))

    def exact(params, y):  # the potential of what was seen; y holds the values and what is missing
        precision = (1 - y[:, 3:]) / NOISE**2
        W = -jnp.einsum("nj,ja,jb->nab", precision, H, H) / 2
        return GaussianPotential((precision * (y[:, :3] - SHIFT)) @ H, W)

    network = allow_missing((lambda *args: ((), {}), exact))
    svi = svi_of(masked, plain_guide(network))
    data = jnp.where(seen, Y, jnp.nan)
    found = held_out_log_likelihood(svi, PLAIN_PARAMS, model_args=(data,), num_samples=10)
    loc, V = Gaussian.to_standard(PLAIN)
    for n in range(N):
        j = np.flatnonzero(seen[n])
        expected = 0.0
        if len(j):
            covariance = H[j] @ V @ H[j].T + jnp.diag(NOISE[j] ** 2)
            expected = log_normal(Y[n, j], H[j] @ loc + SHIFT[j], covariance)
        np.testing.assert_allclose(found[n], expected, rtol=2e-4, atol=1e-6)


PROBS, LOC = jnp.array([0.2, 0.5, 0.3]), jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 0.0]])
COVARIANCE = jnp.stack([s * jnp.array([[1.0, 0.3], [0.3, 0.5]]) for s in (0.5, 1.0, 2.0)])
SHARP = 1e6


def mixture_naturals():
    """Globals that are known to a thousandth, and a prior that plays no part."""
    pi = Dirichlet.from_standard(SHARP * PROBS)
    parts = NIW.from_standard(LOC, SHARP, SHARP, SHARP * COVARIANCE)
    return {"pi": pi, "components": parts}


def mixture(y):
    pi = numpyro.sample("pi", dist.Dirichlet(jnp.ones(3)))
    Sigma = numpyro.sample("Sigma", dist.InverseWishart(4.0, scale_matrix=jnp.eye(D)).expand([3]))
    mu = numpyro.sample("mu", dist.MultivariateNormal(jnp.zeros(D), Sigma))
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Categorical(pi))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
        numpyro.sample("y", dist.Normal(x @ H.T + SHIFT, NOISE).to_event(1), obs=y)


@pytest.mark.nightly
def test_a_mixture_of_known_components():
    """log sum_k pi_k N(y | H m_k + shift, H V_k H^T + R); z is summed out."""
    guide = SVAEGuide(mixture_naturals(), linear_network(), GMMEP())
    params = {"svae_natural": mixture_naturals(), **PLAIN_PARAMS}
    svi = svi_of(mixture, guide)
    found = held_out_log_likelihood(svi, params, model_args=(Y,), num_samples=4000)
    parts = [
        log_normal(Y, H @ m + SHIFT, H @ V @ H.T + jnp.diag(NOISE**2))
        for m, V in zip(LOC, COVARIANCE, strict=True)
    ]
    expected = jax.nn.logsumexp(jnp.log(PROBS)[:, None] + jnp.stack(parts), axis=0)
    np.testing.assert_allclose(found, expected, atol=0.1)


def globals_only(y):
    loc = numpyro.sample("loc", dist.Normal(1, 2))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(loc, 0.8), obs=y)


@cache
def mcmc_of(model):
    mcmc = MCMC(NUTS(model), num_warmup=50, num_samples=50, progress_bar=False)
    mcmc.run(random.key(0), Y[:, 0])
    return mcmc


@pytest.mark.nightly
def test_global_variables_alone():
    """The log of the mean likelihood, for guides and for the draws of NUTS."""
    new = jnp.array([0.3, 4.0])
    params = {"loc_auto_loc": jnp.array(1.2), "loc_auto_scale": jnp.array(0.5)}
    svi = svi_of(globals_only, AutoNormal(globals_only))
    svi.init(random.key(0), Y[:, 0])
    found = held_out_log_likelihood(svi, params, model_args=(new,), num_samples=40_000)
    expected = dist.Normal(1.2, (0.5**2 + 0.8**2) ** 0.5).log_prob(new)
    np.testing.assert_allclose(found, expected, atol=0.05)

    mcmc = mcmc_of(globals_only)
    found = held_out_log_likelihood(mcmc, model_args=(new,))
    draws = mcmc.get_samples()["loc"][:, None]
    each = dist.Normal(draws, 0.8).log_prob(new)
    np.testing.assert_allclose(found, jax.nn.logsumexp(each, axis=0) - np.log(50), rtol=1e-5)


def local(y):
    with numpyro.plate("data", len(y)):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)


@pytest.mark.slow
def test_guides_that_cannot_infer_new_rows_are_refused():
    y = Y[:, 0]
    svi = svi_of(local, AutoNormal(local))
    params = svi.get_params(svi.init(random.key(0), y))
    with pytest.raises(ValueError, match="'x' belongs to one row, and AutoNormal has it for"):
        held_out_log_likelihood(svi, params, model_args=(y[:3],))
    with pytest.raises(ValueError, match="'x' belongs to one row, and MCMC has it for"):
        held_out_log_likelihood(mcmc_of(local), model_args=(y[:3],))

    def outside(y):
        numpyro.sample("x", dist.Normal(y, 1).to_event(1))

    def no_density(y):
        with numpyro.plate("data", len(y)):
            numpyro.sample("x", dist.Delta(y))

    with pytest.raises(ValueError, match=r"'x' lies in the plates \['data'\] in the model but not"):
        held_out_log_likelihood(svi_of(local, outside), {}, model_args=(y,))
    with pytest.raises(IntractableDensityError, match=r"gives no density of the sites \['x'\]"):
        held_out_log_likelihood(svi_of(local, no_density), {}, model_args=(y,))

    def no_plate(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("x", dist.Normal()), 1), obs=y)

    svi = svi_of(no_plate, AutoNormal(no_plate))
    params = svi.get_params(svi.init(random.key(0), y))
    with pytest.raises(ValueError, match="no plate encloses all observed sites"):
        held_out_log_likelihood(svi, params, model_args=(y,))
    with pytest.raises(ValueError, match="num_samples is 0"):
        held_out_log_likelihood(svi, params, model_args=(y,), num_samples=0)


def outside(y):
    u = numpyro.sample("u", dist.Normal().expand([len(y)]).to_event(1))
    with numpyro.plate("data", len(y)):
        numpyro.sample("y", dist.Normal(u, 1), obs=y)


def outside_guide(y):
    numpyro.sample("u", dist.Normal(y / 2, 0.5**0.5).to_event(1))


def test_a_latent_variable_of_a_row_outside_the_plate_is_refused():
    """Without log p(u) / q(u) the row y = 3 would have -1.88 in place of log N(3 | 0, 2)."""
    for y in (jnp.array([0.0, 3.0]), jnp.array([3.0])):
        with pytest.raises(ValueError, match=r"'u' is inferred .* outside their plates \['data'\]"):
            held_out_log_likelihood(svi_of(outside, outside_guide), {}, model_args=(y,))
    with pytest.raises(ValueError, match="'u' belongs to one row, and MCMC has it for"):
        held_out_log_likelihood(mcmc_of(outside), model_args=(Y[:, 0] + 1,))


def factors(y, batch=None):
    """Given y, x is normal with mean y / 1.25 and variance 0.2, and s is as in its prior."""
    with numpyro.plate("data", len(y), subsample_size=batch):
        x = numpyro.sample("x", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("s", dist.LogNormal(0.5, 0.3))
        numpyro.sample("y", dist.Normal(x, 0.5).to_event(1), obs=numpyro.subsample(y, event_dim=1))


def features(y, batch=None):
    return numpyro.subsample(y, event_dim=1)


def exact_network(rng_key, shape):
    return (shape[0], 7), jnp.zeros(1)  # a weight that nobody reads


def exact_moments(params, y):
    """Shifts and log-scales of (x, s), and a context."""
    ones = jnp.ones_like(y[:, :1])
    log_scale = jnp.log(jnp.array([0.2**0.5, 0.2**0.5, 0.3]))
    return jnp.concatenate([y / 1.25, 0.5 * ones, ones * log_scale, ones], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("num_flows", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_flow_of_the_rows_that_is_exact_gives_the_evidence_without_noise(num_flows):
    """Flows start at the identity; there are fewer rows than the run's minibatch has."""
    network = exact_network, exact_moments
    options = {"plate": "data", "features": features, "num_flows": num_flows}
    guide = FlowGuide(factors, network, **options)
    svi = SVI(factors, guide, numpyro.optim.Adam(0.01), Trace_ELBO(), batch=5)
    params = svi.get_params(svi.init(random.key(0), Y[:, :2]))
    new = Y[:3, 1:]
    found = held_out_log_likelihood(svi, params, model_args=(new,), num_samples=1)
    np.testing.assert_allclose(found, dist.Normal(0, 1.25**0.5).log_prob(new).sum(1), rtol=1e-4)
