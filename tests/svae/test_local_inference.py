"""Rules of local inference against reference values, brute force, and their laws."""

from functools import cache, partial
import itertools

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import NIW, Beta, Dirichlet
from numpyro_ext.svae import (
    GMMEP,
    CycleEP,
    CycleMeanField,
    FixedGaussian,
    GaussianPotential,
    GMMMeanField,
    cycle_bp,
    surrogate_elbo,
)
from numpyro_ext.svae.local_inference.base import plug_in
from tests.svae.models import BETA, CONCENTRATION, PARTS, PARTS_CYCLE, PLAIN

GMM = (jnp.array([0.3, 0.7]), jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))
LINE = (jnp.array([[0.8]]), jnp.array([[[-1.0]]]))
RULES = {
    "GMMEP": GMMEP(),
    "GMMMeanField": GMMMeanField(),
    "GMMMeanField prior": GMMMeanField("prior"),
    "CycleEP": CycleEP(),
    "CycleMeanField": CycleMeanField(),
    "FixedGaussian": FixedGaussian(PLAIN),
}


def statistics_of_mixture(pi, loc, covariance):
    return {"pi": Dirichlet.statistics(pi), "components": NIW.statistics((loc, covariance))}


@partial(jax.jit, static_argnums=0)
def inferred(rule, global_mean, potential):
    local = rule.infer(global_mean, potential)
    return local, surrogate_elbo(rule, global_mean, potential, local)


@cache
def uncertain(rule):
    """Expected statistics of uncertain global variables, and potentials of 3 data."""
    h = jnp.array([[0.8, -1.0], [2.0, 0.3], [-0.5, 0.6]])
    precision = jnp.array([[1.0, 0.4], [0.7, 2.0], [1.5, 0.9]])
    if isinstance(rule, CycleEP | CycleMeanField):
        mean = {
            "pi": Beta.mean(Beta.from_standard(**BETA)),
            "components": NIW.mean(NIW.from_standard(**{**PARTS_CYCLE, "df": 45.0})),
        }
        h, precision = jnp.stack([h, h[::-1], h + 0.3]), jnp.stack([precision] * 3)
    else:
        mean = {
            "pi": Dirichlet.mean(Dirichlet.from_standard(CONCENTRATION)),
            "components": NIW.mean(NIW.from_standard(**{**PARTS, "df": 45.0})),
        }
    mean = mean if rule.families else {}
    return mean, GaussianPotential.from_diagonal(h, precision)


@pytest.mark.x64
def test_mixture_reference_values(tol):
    mean, psi = statistics_of_mixture(*GMM), GaussianPotential(*LINE)
    close = partial(np.testing.assert_allclose, atol=tol(2e-5, 1e-8))
    ep, bound = inferred(GMMEP(), mean, psi)
    close(ep.mean["z"].probs[0], [0.3957121157, 0.6042878843])
    close(ep.mean["x"].x, [[0.6987646535]])
    close(ep.mean["x"].xx[0, 0, 0] - ep.mean["x"].x[0, 0] ** 2, 0.6666372426)
    close(jax.nn.logsumexp(ep.natural["z"].logits), -1.3195439693)
    close(bound, [-2.2388488691])
    assert ep.info.num_iter[0] == 0 and ep.info.converged[0]
    mf, bound = inferred(GMMMeanField(), mean, psi)
    close(mf.mean["z"].probs[0], [0.0699597419, 0.9300402581])
    close(mf.mean["x"].x, [[1.132355141]])
    close(mf.mean["x"].xx[0, 0, 0] - mf.mean["x"].x[0, 0] ** 2, 0.2544503197)
    close(bound, [-1.7599510763])
    assert mf.info.num_iter[0] > 3 and mf.info.converged[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GMMMeanField", "CycleEP"])
def test_gradients_are_finite_where_a_probability_underflows(name):
    """At a distance of 40 standard deviations, a probability is e^-800, which float32 has not."""
    rule = RULES[name]
    mean, psi = uncertain(rule)
    far = {**mean, "components": NIW.statistics((40 * _loc(rule), _unit(rule)))}

    def kl(mean, psi):
        local = rule.infer(mean, psi)
        return jnp.sum(rule.local_kl(mean, local)), local.mean["z"][0]

    gradient, probabilities = jax.jit(jax.grad(kl, (0, 1), has_aux=True))(far, psi)
    assert float(jnp.min(jnp.minimum(probabilities, 1 - probabilities))) == 0
    for leaf in jax.tree.leaves(gradient):
        assert bool(jnp.all(jnp.isfinite(leaf)))


def _loc(rule):
    return PARTS_CYCLE["loc"] if name_of(rule).startswith("Cycle") else PARTS["loc"]


def _unit(rule):
    return jnp.broadcast_to(jnp.eye(2), (*_loc(rule).shape, 2))


def name_of(rule):
    return type(rule).__name__


@pytest.mark.parametrize(("size", "shift"), [(1.0, -1e4), (30.0, 0.0), (1e4, 0.0), (1e4, -1e4)])
def test_belief_propagation_of_huge_potentials_is_right_in_single_precision(size, shift):
    """In float32 a sum of eight potentials of 1e4 is rounded by 0.01."""
    rng = np.random.default_rng(0)
    odds = rng.normal(size=8).astype(np.float32)
    pair = (size * rng.normal(size=(8, 2, 2)) + shift).astype(np.float32)
    result, gradients = huge()(odds, pair)
    odds, pair = odds.astype(np.float64), pair.astype(np.float64)
    a, b = np.zeros(8), np.zeros(8)
    add = np.logaddexp
    for _ in range(100):
        for i in range(8):
            r, left = odds[(i + 1) % 8] + a[(i + 1) % 8], odds[i] + b[i - 1]
            one, zero = pair[i, 1], pair[i, 0]
            a[i] = add(one[0], one[1] + r) - add(zero[0], zero[1] + r)
            b[i] = add(zero[1], one[1] + left) - add(zero[0], one[0] + left)
    expected = np.clip(odds + a + np.roll(b, 1), -50, 50)
    np.testing.assert_allclose(result.prob, 1 / (1 + np.exp(-expected)), atol=5e-3)
    assert all(np.all(np.isfinite(x)) for x in gradients)


@cache
def huge():
    def loss(odds, pair):
        result = cycle_bp(odds, pair)
        return jnp.arange(8.0) @ result.prob + result.log_z, result

    both = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return jax.jit(lambda *args: ((out := both(*args))[0][1], out[1]))


def brute_force(odds, pair):
    """Exact marginals and log normaliser, by all states."""
    K = len(odds)
    states = np.array(list(itertools.product((0, 1), repeat=K)))
    after = np.roll(states, -1, axis=1)
    log_p = states @ odds + sum(pair[i, states[:, i], after[:, i]] for i in range(K))
    log_z = np.logaddexp.reduce(log_p)
    return np.exp(log_p - log_z) @ states, log_z


def eigenvalues(odds, pair):
    product = np.eye(2)
    for one, phi in zip(odds, pair, strict=True):
        product = product @ (np.array([[1.0], [np.exp(one)]]) * np.exp(phi))
    return np.sort(np.linalg.eigvals(product).real)[::-1]


@pytest.mark.x64
@pytest.mark.parametrize("K", [2, 3, 8])
def test_belief_propagation_against_the_exact_answer(K, tol):
    """Its marginals and normaliser are functions of the exact ones and two eigenvalues, and lie on
    the same side of 1/2."""
    keys = random.split(random.key(K))
    odds, pair = random.normal(keys[0], (K,)), 1.5 * random.normal(keys[1], (K, 2, 2))
    result = jax.jit(cycle_bp)(odds, pair)
    exact, log_z = brute_force(np.asarray(odds), np.asarray(pair))
    large, small = eigenvalues(np.asarray(odds), np.asarray(pair))
    np.testing.assert_allclose(result.log_z, np.log(large), rtol=tol(1e-5, 1e-10))
    np.testing.assert_allclose(log_z, np.log(large + small), rtol=tol(1e-5, 1e-10))
    mixed = (large * result.prob + small * (1 - result.prob)) / (large + small)
    np.testing.assert_allclose(exact, mixed, atol=tol(1e-5, 1e-10))
    assert np.all((exact - 0.5) * (result.prob - 0.5) > 0)


CROSSHAIR = jnp.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [-1.0, 0.0]]])
LONG, FLAT = jnp.diag(jnp.array([0.1125, 0.0075])), jnp.diag(jnp.array([0.0075, 0.1125]))


@cache
def crosshair():
    cov = jnp.stack([jnp.stack([LONG, FLAT]), jnp.stack([FLAT, LONG])])
    odds = jnp.array([0.2, -0.1, 0.3])
    mean = {
        "pi": Beta.statistics(jax.nn.sigmoid(odds)),
        "components": NIW.statistics((CROSSHAIR, cov)),
    }
    y = jnp.array([[[0.6, 0.3], [-0.2, 0.5], [0.1, -0.7]]])
    return mean, GaussianPotential.from_diagonal(2 * y, jnp.full_like(y, 2.0))


@pytest.mark.slow
@pytest.mark.x64
def test_cycle_reference_values(tol):
    mean, psi = crosshair()
    eta = plug_in(mean["components"])
    phi = psi.log_partition_ratio(eta)[0]
    expected = [[0.1218030761, -0.4135945312], [-1.3931863679, -1.8373805974]]
    np.testing.assert_allclose(phi[0], expected, atol=tol(1e-5, 1e-9))
    ep, _ = inferred(CycleEP(), mean, psi)
    q = [[0.0649755863, 0.2406380313, 0.924859852]]
    np.testing.assert_allclose(ep.mean["z"].prob, q, atol=tol(2e-5, 1e-8))
    np.testing.assert_allclose(
        cycle_bp(jnp.array([0.2, -0.1, 0.3]), phi).log_z, 1.0841383334396, atol=tol(1e-5, 1e-9)
    )
    mf, bound = inferred(CycleMeanField(), mean, psi)
    np.testing.assert_allclose(mf.mean["z"].prob, [[0, 0, 1]], atol=1e-4)
    np.testing.assert_allclose(bound, [-1.6297292584482], atol=tol(1e-4, 1e-8))


def short_cycle():
    mean, psi = crosshair()
    return mean, GaussianPotential(psi.h[:, :2], psi.W[:, :2])


def test_bad_arguments_are_refused():
    mean, psi = statistics_of_mixture(*GMM), GaussianPotential(*LINE)
    single = {**mean, "components": jax.tree.map(lambda leaf: leaf[0], mean["components"])}
    for call, words in [
        (lambda: GMMMeanField(jnp.ones(3) / 3).infer(mean, psi), r"must be \(2,\) or \(1, 2\)"),
        (lambda: GMMEP().infer(single, psi), "'components' has batch shape"),
        (lambda: CycleEP().infer(crosshair()[0], psi), r"CycleEP has h of shape \(1, 1\)"),
        (lambda: CycleEP().infer(*short_cycle()), "a cycle needs"),
        (lambda: cycle_bp(jnp.zeros(1), jnp.zeros((1, 2, 2))), "K at least 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
