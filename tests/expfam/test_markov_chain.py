"""Chains of discrete states against sums over all sequences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import MarkovChain, MarkovChainNatural
from tests.expfam.families import quick_jit

T, K = 5, 3


def chain(num_steps):
    """Two chains with log weights that are far from normalised."""
    rng = np.random.default_rng(0)
    unary = rng.normal(size=(2, num_steps, K)) * 2 - 7
    return MarkovChainNatural(unary, rng.normal(size=(2, num_steps - 1, K, K)) * 2 + 4)


@functools.cache
def computed():
    @quick_jit
    def compute(natural):
        return {
            "log_partition": MarkovChain.log_partition(natural),
            "mean": MarkovChain.mean(natural),
            "entropy": MarkovChain.entropy(natural),
        }

    return compute(jax.tree.map(lambda leaf: jnp.asarray(leaf, float), chain(T)))


@functools.cache
def enumerated(which):
    unary, pair = (leaf[which] for leaf in chain(T))
    sequences = np.array(list(itertools.product(range(K), repeat=T)))
    steps = np.arange(T)
    score = unary[steps, sequences].sum(1)
    score += pair[steps[:-1], sequences[:, :-1], sequences[:, 1:]].sum(1)
    A = np.log(np.exp(score - score.max()).sum()) + score.max()
    return sequences, score - A, A


@pytest.mark.slow
@pytest.mark.x64
def test_marginals_are_sums_over_all_sequences(tol):
    result = computed()
    close = functools.partial(
        np.testing.assert_allclose, rtol=tol(1e-4, 1e-9), atol=tol(1e-6, 1e-12)
    )
    one = np.eye(K)
    for which in range(2):
        sequences, log_prob, A = enumerated(which)
        p = np.exp(log_prob)
        probs = np.einsum("n,ntk->tk", p, one[sequences])
        pair_probs = np.einsum("n,nti,ntj->tij", p, one[sequences[:, :-1]], one[sequences[:, 1:]])
        close(result["log_partition"][which], A)
        close(result["entropy"][which], -(p * log_prob).sum())
        close(result["mean"].probs[which], probs)
        close(result["mean"].pair_probs[which], pair_probs)


def test_a_chain_of_probabilities_is_normalised():
    natural = MarkovChain.from_standard([0.6, 0.4], [[0.9, 0.1], [0.2, 0.8]], 3)
    np.testing.assert_allclose(MarkovChain.log_partition(natural), 0.0, atol=1e-6)
    mean = MarkovChain.mean(natural)
    np.testing.assert_allclose(mean.probs, [[0.6, 0.4], [0.62, 0.38], [0.634, 0.366]], rtol=1e-5)
    np.testing.assert_allclose(mean.pair_probs[0], [[0.54, 0.06], [0.08, 0.32]], rtol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"transition_probs": [[1.0, 0.0], [0.2, 0.8]]}, "positive transition_probs"),
        ({"transition_probs": [[0.5, 0.4], [0.2, 0.8]]}, "rows sum to 1"),
    ],
)
def test_what_is_no_chain_is_refused(changed, message):
    given = {
        "initial_probs": [0.6, 0.4],
        "transition_probs": [[0.9, 0.1], [0.2, 0.8]],
        "num_steps": 3,
    }
    with pytest.raises(ValueError, match=message):
        MarkovChain.from_standard(**{**given, **changed})


@pytest.mark.slow
def test_large_log_weights_of_all_states_cost_no_digits():
    """Data 100 standard deviations away have log weights of -5,000; here in 64 steps."""
    unary = jnp.asarray(np.round(64 * np.sin(np.arange(128.0))).reshape(64, 2) / 64)
    pair = jnp.broadcast_to(jnp.log(jnp.array([[0.9, 0.1], [0.2, 0.8]])), (63, 2, 2))

    @jax.jit
    def numbers(shift):
        n = MarkovChainNatural(unary + shift, pair)
        return MarkovChain.entropy(n), MarkovChain.log_prob(n, jnp.arange(64) % 3 // 2)

    np.testing.assert_allclose(numbers(-5000.0), numbers(0.0), rtol=1e-4)
