"""What every rule of local inference promises, one law each; and EP against brute force."""

from functools import cache
from itertools import pairwise, product

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import NIW, Dirichlet, Gaussian
from numpyro_ext.svae import (
    GMMEP,
    HMMEP,
    LDS,
    CycleEP,
    CycleMeanField,
    FixedGaussian,
    GaussianPotential,
    GMMMeanField,
    HMMMeanField,
    LocalInference,
    MixturePotential,
    SLDSMeanField,
    global_statistics,
    surrogate_elbo,
)
from tests.svae.models import PLAIN, RULES, D, K, T, kind_of, naturals, starts

EVERY = {
    "GMMEP": GMMEP(),
    "GMMMeanField": GMMMeanField(),
    "GMMMeanField prior": GMMMeanField("prior"),
    "CycleEP": CycleEP(),
    "CycleMeanField": CycleMeanField(),
    "FixedGaussian": FixedGaussian(PLAIN),
    "HMMEP": HMMEP(),
    "HMMMeanField": HMMMeanField(),
    "LDS": LDS(),
    "SLDSMeanField": SLDSMeanField(),
}
# Most of the time goes into compiling these.
LARGE = "SLDSMeanField", "HMMEP", "HMMMeanField", "CycleMeanField"
every_rule = pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in LARGE else x for x in EVERY]
)
MEAN_FIELD = [name for name in EVERY if name.endswith("MeanField") or name == "LDS"]


def means_of(rule):
    """Expected statistics of the prior, and of the guide's start."""
    name = kind_of(rule)
    return tuple(
        {key: rule.families[key].mean(n) for key, n in given[name].items()}
        for given in (naturals(), starts())
    )


def potential_of(rule):
    """Of three data; precisions between 1 and 3, means up to 3, and matrices not diagonal."""
    extra = {"cycle": (K,), "mixture": (), "plain": ()}.get(kind_of(rule), (T,))
    size = 3 * int(np.prod(extra)) * D
    h = 3 * jnp.sin(jnp.arange(size)).reshape(3, *extra, D)
    psi = GaussianPotential.from_diagonal(h, (2 + jnp.cos(jnp.arange(size))).reshape(h.shape))
    return GaussianPotential(h, psi.W - 0.2)


@cache
def compiled(name):
    """``(two means, potential) -> numbers``: one compilation for all laws of a rule."""
    rule = EVERY[name]

    @jax.jit
    def run(one, two, psi):
        local = rule.infer(one, psi)
        between = jax.tree.map(lambda a, b: 0.3 * a + 0.7 * b, one, two)
        statistics = global_statistics(rule, one, local)
        return {
            "mean": local.mean,
            "info": local.info,
            "kl": [rule.local_kl(mean, local) for mean in (one, two, between)],
            "statistics": statistics,
            "bound": surrogate_elbo(rule, one, psi, local),
        }

    return run


@cache
def at(name, change="none"):
    """The numbers of a rule at its potential, or at one that is changed."""
    rule = EVERY[name]
    psi = potential_of(rule)
    antisymmetric = jnp.array([[0.0, 0.7], [-0.7, 0.0]])
    others = jnp.arange(3).reshape(3, *(1,) * (psi.h.ndim - 1)) > 0
    changed = {
        "none": psi,
        "others": GaussianPotential(jnp.where(others, 2 - psi.h, psi.h), psi.W),
        "asymmetric": GaussianPotential(psi.h, psi.W + antisymmetric),
        "zero": jax.tree.map(jnp.zeros_like, psi),
    }[change]
    return compiled(name)(*means_of(rule), changed)


def assert_close(result, expected, **tolerance):
    for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_allclose(x, y, **tolerance)


@pytest.mark.slow
@every_rule
def test_the_divergence_is_affine_in_global_statistics_with_their_slope(name):
    rule = EVERY[name]
    assert isinstance(rule, LocalInference)
    result, (one, two) = at(name), means_of(rule)
    first, second, between = result["kl"]
    np.testing.assert_allclose(between, 0.3 * first + 0.7 * second, rtol=1e-4, atol=1e-4)
    slope = sum(
        jnp.sum(s * (b - a))
        for key in one
        for s, a, b in zip(result["statistics"][key], one[key], two[key], strict=True)
    )
    np.testing.assert_allclose(jnp.sum(first - second), slope, rtol=2e-3, atol=1e-4)


@every_rule
def test_a_datum_does_not_depend_on_its_batch(name):
    first = lambda change: jax.tree.map(lambda leaf: leaf[0], at(name, change)["mean"])  # noqa: E731
    assert_close(first("others"), first("none"), rtol=1e-5, atol=1e-6)


@every_rule
def test_only_the_symmetric_part_of_a_potential_counts(name):
    assert_close(at(name, "asymmetric"), at(name), rtol=1e-5, atol=1e-5)


@every_rule
def test_without_an_observation_the_answer_is_finite_and_exact_rules_have_the_prior(name):
    result, (one, _) = at(name, "zero"), means_of(EVERY[name])
    assert np.all(np.isfinite(result["bound"])) and np.all(result["info"].converged)
    assert np.all(result["bound"] < 1e-4)  # at most the log integral of the prior
    if name == "GMMEP":
        expected = jax.nn.softmax(one["pi"].log_prob)
        np.testing.assert_allclose(result["mean"]["z"].probs[0], expected, rtol=1e-5)
    if name == "FixedGaussian":
        np.testing.assert_allclose(result["mean"]["x"].x[0], [0.5, -1.0], rtol=1e-5)
        np.testing.assert_allclose(result["bound"], 0.0, atol=1e-5)
    if name == "HMMEP":
        first = jax.nn.softmax(one["initial"].log_prob + _ahead(one, T - 1))
        np.testing.assert_allclose(result["mean"]["z"].probs[0, 0], first, rtol=1e-5)


def _ahead(mean, steps):
    """Log weight of each state of what follows, with the expected log transitions."""
    log_P, ahead = mean["transition"].log_prob, jnp.zeros(K)
    for _ in range(steps):
        ahead = jax.nn.logsumexp(log_P + ahead, axis=1)
    return ahead


@pytest.mark.x64
@pytest.mark.parametrize("name", MEAN_FIELD)
def test_mean_field_is_a_stationary_point_of_its_bound(name, needs_x64):
    """So what the gradient in the global statistics and in the potential has through q is zero."""
    rule = EVERY[name]

    @jax.jit
    def gradients(mean, psi):
        def bound(mean, psi, stop):
            local = rule.infer(mean, psi)
            return jnp.sum(surrogate_elbo(rule, mean, psi, stop(local)))

        return [
            jax.grad(bound, (0, 1))(mean, psi, stop) for stop in (lambda q: q, lax.stop_gradient)
        ]

    through, apart = gradients(means_of(rule)[0], potential_of(rule))
    assert_close(through, apart, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_starts_are_inside_the_domain(name):
    rule, prior = RULES[name], naturals()[name]

    @jax.jit
    def make(prior):
        start = rule.init_natural(random.key(0), prior)
        return start, {k: f.in_domain(start[k]).all() for k, f in rule.families.items()}

    start, inside = make(prior)
    assert all(inside.values())
    assert jax.tree.map(jnp.shape, start) == jax.tree.map(jnp.shape, prior)


@every_rule
def test_potentials_that_do_not_fit_are_named(name):
    rule = EVERY[name]
    mean, psi = means_of(rule)[0], potential_of(rule)
    wrong = GaussianPotential(psi.h[..., :1], psi.W[..., :1, :1])
    with pytest.raises(ValueError, match=r"h of shape \(3, .*with d = 2"):
        rule.infer(mean, wrong)
    flat = GaussianPotential(psi.h.reshape(-1), psi.W.reshape(-1, D))
    with pytest.raises(ValueError, match=r"h of shape \(\d+,\)"):
        rule.infer(mean, flat)


GRID = np.linspace(-20.0, 20.0, 8001)
STATES = {
    "loc": jnp.array([[-1.0], [0.5], [2.5]]),
    "kappa": 2.0,
    "df": 5.0,
    "scale_matrix": jnp.array([[[2.0]], [[1.0]], [[3.0]]]),
}
SEEN = {
    "one": GaussianPotential(
        jnp.array([[0.8], [-1.0], [2.0]]), -jnp.array([1.0, 0.3, 0.6])[:, None, None]
    ),
    "several": MixturePotential(
        jnp.log(jnp.array([[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]])),
        jnp.array([[[0.8], [-2.0]], [[1.0], [0.1]], [[-1.0], [3.0]]]),
        -jnp.array([[1.0, 0.4], [0.3, 2.0], [0.6, 0.9]])[..., None, None],
    ),
}


def tilted(components, psi):
    """Integral, mean and second moment of each component times each potential, on a grid."""
    h, W = (np.asarray(leaf, float) for leaf in (psi.h, psi.W))
    if isinstance(psi, GaussianPotential):
        log_psi = h * GRID + W[..., 0] * GRID**2
    else:
        R = -2 * W[..., 0]
        log_w = np.asarray(psi.log_weights)[..., None] + np.log(R) / 2
        parts = log_w - R * (GRID - h / R) ** 2 / 2
        log_psi = np.logaddexp.reduce(parts, axis=1)
    J, slope = (np.asarray(x, float) for x in (components[0], components[1]))
    J, slope = -2 * J[:, 0], slope
    log_normal = np.log(J) / 2 - J * (GRID - slope / J) ** 2 / 2 - np.log(2 * np.pi) / 2
    weight = np.exp(log_normal[None] + log_psi[:, None]) * (GRID[1] - GRID[0])
    Z = weight.sum(-1)
    return Z, (weight * GRID).sum(-1) / Z, (weight * GRID**2).sum(-1) / Z


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_marginals_of_ep_are_integrals_and_sums_over_all_states(name):
    """With uncertain components: the plug-in normals and the expected log probabilities."""
    psi = SEEN[name]
    pi, P = (Dirichlet.from_standard(jnp.array(c)) for c in ([1.2, 2.0, 1.6], np.eye(3) + 0.5))
    components, log_pi, log_P = jax.jit(
        lambda: (
            NIW.mean(NIW.from_standard(**STATES)),
            Dirichlet.mean(pi).log_prob,
            Dirichlet.mean(P).log_prob,
        )
    )()
    Z, mean, second = tilted(components, psi)

    r = np.exp(log_pi) * Z
    r /= r.sum(1, keepdims=True)
    statistics = {"pi": Dirichlet.Mean(log_pi), "components": components}
    local = jax.jit(GMMEP().infer)(statistics, psi)
    _check_marginals(local, r, mean, second)

    states = np.array(list(product(range(3), repeat=3)))
    log_p = np.array(
        [
            log_pi[z[0]] + sum(log_P[a, b] for a, b in pairwise(z)) + np.log(Z[range(3), z]).sum()
            for z in states
        ]
    )
    p = np.exp(log_p - log_p.max())
    r = np.einsum("n,ntk->tk", p / p.sum(), np.eye(3)[states])
    statistics = {
        "initial": Dirichlet.Mean(log_pi),
        "transition": Dirichlet.Mean(log_P),
        "emission": components,
    }
    series = jax.tree.map(lambda leaf: leaf[None], psi)
    local = jax.jit(HMMEP().infer)(statistics, series)
    _check_marginals(jax.tree.map(lambda leaf: leaf[0], local), r, mean, second)


def _check_marginals(local, r, mean, second):
    np.testing.assert_allclose(local.mean["z"].probs, r, rtol=1e-4)
    x = local.mean["x"]
    np.testing.assert_allclose(x.x[..., 0], (r * mean).sum(1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(x.xx[..., 0, 0], (r * second).sum(1), rtol=1e-4)
    assert np.all(np.isfinite(Gaussian.entropy(local.natural["x"])))


def test_states_and_starts_of_the_wrong_shape_are_refused():
    mean, psi = means_of(HMMEP())[0], potential_of(HMMEP())
    flat = {**mean, "transition": mean["initial"]}
    with pytest.raises(ValueError, match=r"'transition' has batch shape \(\); it must be \(3,\)"):
        HMMEP().infer(flat, psi)
    with pytest.raises(ValueError, match=r"must be \(3, 3\) or \(3, 3, 3\)"):
        HMMMeanField(np.ones(2)).infer(mean, psi)
    with pytest.raises(ValueError, match="init is 'potential'; it must be 'prior', or an array"):
        SLDSMeanField("potential")
