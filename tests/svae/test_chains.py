"""Local inference on chains against reference values, dense algebra and sums over all states."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import MNIW, NIW, Dirichlet, Gaussian, GaussianChain, MarkovChain
from numpyro_ext.svae import (
    HMMEP,
    LDS,
    GaussianPotential,
    HMMMeanField,
    SLDSMeanField,
    surrogate_elbo,
)
from numpyro_ext.svae.local_inference.lds import chain_given

F32 = 5e-5
PI, P = jnp.array([0.6, 0.4]), jnp.array([[0.9, 0.1], [0.2, 0.8]])
EMISSION = (jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))
INITIAL_X = (jnp.array([[0.5, -1.0], [2.0, 1.0]]), jnp.array([[1.0, 0.3], [0.3, 0.8]]))
WEIGHTS = jnp.array([[[0.8, 0.2], [-0.1, 0.6]], [[-0.5, 0.0], [0.3, 0.9]]])
NOISE = jnp.array([[[0.3, 0.1], [0.1, 0.4]], [[0.9, 0.0], [0.0, 0.2]]])


def hmm_statistics():
    return {
        "initial": Dirichlet.statistics(PI),
        "transition": Dirichlet.statistics(P),
        "emission": NIW.statistics(EMISSION),
    }


def slds_statistics():
    loc, covariance = INITIAL_X
    return {
        "initial": Dirichlet.statistics(PI),
        "transition": Dirichlet.statistics(P),
        "initial_x": NIW.statistics((loc, jnp.stack([covariance, 2 * covariance]))),
        "dynamics": MNIW.statistics((WEIGHTS, NOISE)),
    }


def system(k):
    """The linear system of one state."""
    mean = slds_statistics()
    return {
        "initial": jax.tree.map(lambda leaf: leaf[k], mean["initial_x"]),
        "dynamics": jax.tree.map(lambda leaf: leaf[k], mean["dynamics"]),
    }


def potential(T, d, batch=2):
    """Of precisions between 1 and 3, and of means up to 3; the second step is not observed."""
    h = 3 * jnp.sin(jnp.arange(batch * T * d)).reshape(batch, T, d)
    precision = (2 + jnp.cos(jnp.arange(batch * T * d))).reshape(batch, T, d)
    seen = (jnp.arange(T) != 1)[:, None]
    return GaussianPotential.from_diagonal(h * seen, precision * seen)


@partial(jax.jit, static_argnums=0)
def inferred(rule, mean, psi):
    local = rule.infer(mean, psi)
    return local, surrogate_elbo(rule, mean, psi, local)


def exact_slds(psi):
    """Log normaliser of one datum: the sum over all sequences of states."""
    initial, dynamics = slds_statistics()["initial_x"], slds_statistics()["dynamics"]

    def log_weight(states):
        chain = chain_given(initial, dynamics, psi, jax.nn.one_hot(states, 2))
        first, later = states[0], states[1:]
        constant = initial.neg_half_quad[first] + initial.half_logdet[first]
        constant += dynamics.half_logdet[later].sum() + jnp.log(PI[first])
        log_p = jnp.log(P[states[:-1], later]).sum()
        return log_p + constant + GaussianChain.log_partition(chain)

    states = jnp.array(list(product(range(2), repeat=psi.h.shape[0])))
    return jax.nn.logsumexp(jax.vmap(log_weight)(states))


def exact_hmm(psi):
    """Log normaliser of one datum."""
    log_weights = psi.log_partition_ratio(_gaussians())
    chain = MarkovChain.from_standard(PI, P, log_weights.shape[0])
    return MarkovChain.log_partition(chain._replace(unary=chain.unary + log_weights))


def _gaussians():
    return Gaussian.from_standard(*EMISSION)


MEAN_FIELD = {
    "HMM": (HMMMeanField, hmm_statistics, 1, exact_hmm),
    "SLDS": (SLDSMeanField, slds_statistics, 2, exact_slds),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HMM", pytest.param("SLDS", marks=pytest.mark.nightly)])
def test_sweeps_of_mean_field_raise_the_bound_towards_the_log_normaliser(name):
    rule, make, d, exact = MEAN_FIELD[name]
    psi, mean = potential(3, d), make()
    bounds = []
    for sweeps in (1, 100):
        one = rule(max_iter=sweeps)
        local, bound = inferred(one, mean, psi)
        bounds.append(bound)
    assert local.info.converged.all()
    assert (bounds[0] <= bounds[1] + F32).all()
    top = jax.jit(jax.vmap(exact))(psi)
    assert (bounds[1] < top).all() and (bounds[1] > top - 2).all()


@pytest.mark.nightly
def test_a_switching_system_whose_states_are_alike_is_the_linear_system():
    psi, mean = potential(4, 2), slds_statistics()
    for name in ("initial_x", "dynamics"):
        mean[name] = jax.tree.map(lambda leaf: leaf[jnp.array([0, 0])], mean[name])
    local, bound = inferred(SLDSMeanField(), mean, psi)
    other, top = inferred(LDS(), system(0), psi)
    assert jnp.allclose(local.mean["x"].xx_next, other.mean["x"].xx_next, rtol=F32, atol=F32)
    assert jnp.allclose(bound, top, rtol=F32, atol=F32)


def test_states_and_starts_of_the_wrong_shape_are_refused():
    flat = {**hmm_statistics(), "transition": Dirichlet.statistics(PI)}
    with pytest.raises(ValueError, match=r"'transition' has batch shape \(\); it must be \(2,\)"):
        HMMEP().infer(flat, potential(3, 1))
    with pytest.raises(ValueError, match=r"must be \(3, 2\) or \(2, 3, 2\)"):
        HMMMeanField(np.ones(2)).infer(hmm_statistics(), potential(3, 1))
    with pytest.raises(ValueError, match="init is 'potential'; it must be 'prior', or an array"):
        SLDSMeanField("potential")


def test_a_transition_that_grows_makes_a_distribution_of_a_long_chain():
    """A draw from a wide prior, when SVI is initialised; only its shape counts there."""
    weight, eye = jnp.array([[2.5, 0.3], [-1.0, 1.8]]), jnp.eye(2)
    natural = GaussianChain.from_standard(jnp.zeros(2), eye, weight, 1e-3 * eye, 300)
    assert GaussianChain.to_distribution(natural).event_shape == (300, 2)
