"""What every family promises, one law each: a new family joins by an entry of the table.

The laws of a family are compiled together: what is exact, its slopes, and what is drawn.
"""

import functools
import itertools

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.expfam import (
    NIW,
    Categorical,
    CategoricalNatural,
    MarkovChain,
    MarkovChainNatural,
    divide,
    multiply,
)
from tests.expfam.families import FAMILIES, arrays, every_family, pair_of, quick_jit

# Computed by Dirichlet, Gamma and MNIW; test_values has values of their own.
BY_ANOTHER = ("Beta", "InverseGamma", "NIW")


def each(names):
    return [pytest.param(x, marks=pytest.mark.slow) if x in BY_ANOTHER else x for x in names]


each_family = pytest.mark.parametrize("name", each(every_family))
# The transitions of a chain may differ from step to step.
HAVE_STANDARD = [name for name in every_family if not name.endswith("Chain")]
NUM_SAMPLES = 4000
REPARAMETERISED = ["Gaussian", "Dirichlet", "Gamma", "Wishart", "GaussianChain"]


def asymmetric(natural):
    """The same symmetric parts, in matrices that are not symmetric."""

    def skew(leaf, x):
        if leaf not in ("A", "K", "S", "W"):
            return x
        return x + 0.7 * (jnp.triu(jnp.ones_like(x), 1) - jnp.tril(jnp.ones_like(x), -1))

    return type(natural)(*map(skew, natural._fields, natural))


@functools.cache
def exact(name):
    """What the family computes, by one compilation."""
    family = FAMILIES[name][0]

    @quick_jit
    def compute(q, p, spoilt):
        mean = family.mean(q)
        # The second of the batch is compared with itself.
        other = jax.tree.map(lambda a, b: jnp.stack([b, a[1]]), q, p)
        return {
            "mean": mean,
            "gradient": jax.vmap(jax.grad(family.log_partition))(asymmetric(q)),
            "back": family.natural(mean),
            "standard": family.to_standard(q) if name in HAVE_STANDARD else (),
            "kl": family.kl(q, other),
            "in_domain": family.in_domain(spoilt),
        }

    q, p = pair_of(name)
    return compute(q, p, spoilt(q))


def spoilt(q):
    """q, and q with one number of the first of its batch in each leaf that is not finite."""
    copies = [q]
    for position, leaf in enumerate(q):
        for bad in (np.nan, np.inf):
            wrong = np.array(leaf)
            wrong[(0,) * wrong.ndim] = bad
            copies.append(type(q)(*q[:position], wrong, *q[position + 1 :]))
    return jax.tree.map(lambda *x: np.stack(x), *copies)


@functools.cache
def slopes(name):
    """Along a direction: the change of the mean, and of the natural parameters of this mean."""
    family = FAMILIES[name][0]

    @quick_jit
    def compute(q):
        mean, change = jax.jvp(family.mean, (q,), (jax.tree.map(jnp.cos, q),))
        return change, jax.jvp(family.natural, (mean,), (change,))[1]

    return compute(pair_of(name)[0])


@functools.cache
def drawn(name):
    """Statistics and log densities of draws of the family, by one compilation."""
    family = FAMILIES[name][0]

    @quick_jit
    def compute(q, p, key):
        sizes = {"num_categories": q[0].shape[-1]} if family in (Categorical, MarkovChain) else {}

        def draw(n):
            values = family.sample(key, n, (NUM_SAMPLES,))
            return family.statistics(values, **sizes), values

        along = jax.tree.map(jnp.cos, q)
        if name in REPARAMETERISED:
            statistics, slopes, values = jax.jvp(draw, (q,), (along,), has_aux=True)
        else:
            (statistics, values), slopes = draw(q), ()
        return {
            "statistics": statistics,
            "slopes": slopes,
            "log q": family.log_prob(q, values),
            "log p": family.log_prob(p, values),
            "numpyro": numpyro_log_prob(family.to_distribution(q), values),
            "base measure": family.log_base_measure(values),
            "entropy": family.entropy(q),
        }

    return compute(*pair_of(name), random.key(3))


def numpyro_log_prob(distribution, value):
    if isinstance(distribution, tuple):
        (first, second), (loc, covariance) = distribution, value
        return first.log_prob(covariance) + second(covariance).log_prob(loc)
    return distribution.log_prob(value)


def assert_trees_close(result, expected, tol):
    for field, a, b in zip(expected._fields, result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * np.abs(b).max(), err_msg=field)


def up_to_a_constant(natural):
    """The same distribution always, of the representations that an overcomplete family has."""
    if isinstance(natural, CategoricalNatural):
        return CategoricalNatural(natural.logits - natural.logits[..., :1])
    if isinstance(natural, MarkovChainNatural):
        unary, pair = natural
        num_steps, num_states = unary.shape[-2:]
        z = np.array(list(itertools.product(range(num_states), repeat=num_steps)))
        t = np.arange(num_steps)
        score = unary[:, t, z].sum(-1) + pair[:, t[:-1], z[:, :-1], z[:, 1:]].sum(-1)
        return up_to_a_constant(CategoricalNatural(score))
    return natural


@each_family
def test_mean_is_the_gradient_of_the_log_partition(name):
    """One by one under vmap, and with matrices of which only the symmetric part counts."""
    result = exact(name)
    assert_trees_close(result["gradient"], result["mean"], 2e-4)


@each_family
def test_natural_parameters_come_back_from_the_mean(name):
    back, q = (up_to_a_constant(n) for n in (exact(name)["back"], pair_of(name)[0]))
    assert_trees_close(back, q, 5e-4)


@pytest.mark.slow
@each_family
def test_the_way_back_from_the_mean_has_the_inverse_derivative(name):
    along = jax.tree.map(np.cos, pair_of(name)[0])
    assert_trees_close(*map(up_to_a_constant, (slopes(name)[1], along)), 2e-3)


@pytest.mark.parametrize("name", each(HAVE_STANDARD))
def test_standard_parameters_come_back_from_the_natural_ones(name):
    given = FAMILIES[name][1]
    for field, value in exact(name)["standard"]._asdict().items():
        np.testing.assert_allclose(value, given[field], rtol=2e-5, atol=1e-6)


@each_family
def test_divergence_is_zero_only_from_itself(name):
    from_other, from_itself = exact(name)["kl"]
    assert from_other > 0.01
    np.testing.assert_allclose(from_itself, 0.0, atol=1e-5)


@pytest.mark.slow
@each_family
def test_log_density_is_that_of_numpyro(name):
    result = drawn(name)
    assert result["base measure"].shape == result["log q"].shape == (NUM_SAMPLES, 2)
    # The covariances of a few draws are nearly singular, where float32 keeps four digits.
    np.testing.assert_allclose(result["log q"], result["numpyro"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@each_family
def test_averages_over_draws_are_means_entropy_and_divergence(name):
    """To five standard errors of 4000 draws."""
    result, means = drawn(name), exact(name)["mean"]

    def check(values, expected):
        error = np.std(values, axis=0) / NUM_SAMPLES**0.5
        assert np.all(np.abs(np.mean(values, axis=0) - expected) < 5 * error + 1e-6)

    for values, expected in zip(result["statistics"], means, strict=True):
        check(values, expected)
    check(-result["log q"], result["entropy"])
    check(result["log q"][:, 0] - result["log p"][:, 0], exact(name)["kl"][0])


@pytest.mark.slow
@pytest.mark.parametrize("name", REPARAMETERISED)
def test_the_derivative_of_a_draw_has_the_mean_of_the_derivative(name):
    """To five standard errors, along one direction."""
    for each, expected in zip(drawn(name)["slopes"], slopes(name)[0], strict=True):
        error = np.std(each, axis=0) / NUM_SAMPLES**0.5
        assert np.all(np.abs(np.mean(each, axis=0) - expected) < 5 * error + 1e-4)


@each_family
def test_product_and_quotient_undo_each_other(name):
    q, p = pair_of(name)
    assert_trees_close(divide(multiply(q, p), p), q, 1e-5)


def test_wrong_shapes_and_types_are_named():
    natural = pair_of("NIW")[0]
    with pytest.raises(ValueError, match=r"\bb of NIWNatural has shape"):
        NIW.log_partition(natural._replace(b=np.ones(3)))
    with pytest.raises(TypeError, match="given a NIWMean where it takes a NIWNatural"):
        NIW.log_partition(NIW.Mean(*natural))


@each_family
def test_nothing_that_is_not_finite_is_in_the_domain(name):
    inside, outside = np.split(exact(name)["in_domain"], [1])
    assert inside.all() and outside[:, 1].all() and not outside[:, 0].any()


OUTSIDE = {
    "Gaussian": {"loc": [0.0, 1.0], "covariance_matrix": [[1.0, 2.0], [2.0, 1.0]]},
    "NIW": {"loc": [0.0, 1.0], "kappa": 1.0, "df": 1.0, "scale_matrix": np.eye(2)},
    "MNIW": {
        "weight": np.ones((2, 1)),
        "precision": -np.eye(1),
        "df": 4.0,
        "scale_matrix": np.eye(2),
    },
    "Dirichlet": {"concentration": [1.0, 0.0, 2.0]},
    "Beta": {"concentration1": -0.5, "concentration0": 2.0},
    "Categorical": {"probs": [0.5, 0.2, 0.2]},
    "Bernoulli": {"prob": 1.2},
    "Gamma": {"concentration": 2.0, "rate": -1.0},
    "InverseGamma": {"concentration": 0.0, "rate": 2.0},
    "Wishart": {"df": 1.0, "rate_matrix": np.eye(2)},
    "Poisson": {"rate": 0.0},
    "GaussianChain": {
        "initial_loc": [0.0],
        "initial_covariance": [[1.0]],
        "weight": [[0.5]],
        "covariance": [[0.0]],
        "num_steps": 2,
    },
    "MarkovChain": {
        "initial_probs": [0.5, 0.5],
        "transition_probs": [[1.2, -0.2], [0.5, 0.5]],
        "num_steps": 2,
    },
}


@each_family
def test_standard_parameters_outside_the_domain(name):
    """An error where the numbers are known, NaN where they are traced; never another number."""
    family, standard = FAMILIES[name][0], OUTSIDE[name]
    with pytest.raises(ValueError, match=rf"{name}.from_standard requires"):
        family.from_standard(**standard)

    @quick_jit
    def traced():
        natural = family.from_standard(**arrays(standard))
        return natural, family.log_partition(natural), family.in_domain(natural)

    natural, log_partition, inside = traced()
    assert all(np.isnan(leaf).all() for leaf in natural)
    assert np.isnan(log_partition) and not inside
