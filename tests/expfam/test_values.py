"""Reference values in double precision, and what float32 keeps at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_ext.expfam import (
    NIW,
    Bernoulli,
    Beta,
    BetaNatural,
    Categorical,
    CategoricalNatural,
    Dirichlet,
    DirichletMean,
    DirichletNatural,
    Gamma,
    GammaMean,
    GammaNatural,
    Gaussian,
    GaussianNatural,
    InverseGamma,
    InverseGammaNatural,
    NIWNatural,
    Poisson,
    PoissonNatural,
    Wishart,
    WishartNatural,
    divide,
    multiply,
)

close = lambda result, expected: np.testing.assert_allclose(result, expected, atol=1e-8)  # noqa: E731


@pytest.mark.x64
def test_gamma_and_its_inverse(needs_x64):
    """Against SciPy, whose scale is 1 / b of the one and b of the other."""
    a, b = 2.5, 0.3
    q, r = Gamma.from_standard(a, b), InverseGamma.from_standard(a, b)
    close(Gamma.log_partition(q), special.gammaln(a) - a * np.log(b))
    close(Gamma.mean(q).log_value, stats.gamma(a, scale=1 / b).expect(np.log))
    close(Gamma.entropy(q), stats.gamma(a, scale=1 / b).entropy())
    close(Gamma.log_prob(q, 1.7), stats.gamma(a, scale=1 / b).logpdf(1.7))
    close(InverseGamma.entropy(r), stats.invgamma(a, scale=b).entropy())
    close(InverseGamma.log_prob(r, 1.7), stats.invgamma(a, scale=b).logpdf(1.7))
    # Invariant under v -> 1 / v, and its derivatives are those of the closed form.
    gap = Gamma.kl(q, Gamma.from_standard(3.0, 1.5))
    close(InverseGamma.kl(r, InverseGamma.from_standard(3.0, 1.5)), gap)
    slope = jax.grad(lambda n: Gamma.kl(n, Gamma.from_standard(3.0, 1.5)))(q)
    close(slope.a, (a - 3) * special.polygamma(1, a) - (b - 1.5) / b)
    close(slope.b, a * (b - 1.5) / b**2 - (a - 3) / b)


@pytest.mark.x64
def test_wishart(needs_x64):
    """Against SciPy; a matrix of one dimension is gamma with half of both parameters."""
    nu, S, P = 5.0, np.array([[2.0, 0.3], [0.3, 1.0]]), np.array([[1.2, -0.4], [-0.4, 0.9]])
    reference = stats.wishart(nu, np.linalg.inv(S))
    q = Wishart.from_standard(nu, S)
    close(Wishart.log_prob(q, P), reference.logpdf(P))
    close(Wishart.entropy(q), reference.entropy())
    close(-2 * Wishart.mean(q).neg_half_precision, reference.mean())
    one, two = (Wishart.from_standard(n, [[s]]) for n, s in ((5.0, 0.6), (6.0, 3.0)))
    gap = Gamma.kl(Gamma.from_standard(2.5, 0.3), Gamma.from_standard(3.0, 1.5))
    close(Wishart.kl(one, two), gap)


@pytest.mark.x64
def test_poisson_has_the_entropy_of_the_sum_for_small_and_large_rates(needs_x64):
    """Against the sum of all terms; 100 is where the series takes over. With its derivative."""
    rates = np.array([1e-3, 0.2, 3.5, 99.9, 100.1, 1e4])

    def by_sum(rate):
        v = np.arange(int(rate + 20 * rate**0.5 + 50))
        log_p = stats.poisson(rate).logpmf(v)
        # d log p / d log rate is v - rate, whose mean is 0.
        return -np.exp(log_p) @ log_p, -np.exp(log_p) @ (log_p * (v - rate))

    result = jax.vmap(jax.value_and_grad(Poisson.entropy))(Poisson.from_standard(rates))
    expected = np.transpose([by_sum(rate) for rate in rates])
    np.testing.assert_allclose(result[0], expected[0], rtol=0, atol=2e-10)
    np.testing.assert_allclose(result[1].log_rate, expected[1], rtol=1e-7, atol=1e-7)


def test_counts_and_normal_data_update_their_conjugate_families():
    """Posterior over prior is the likelihood, up to a constant in the parameter."""
    v, x, counts = jnp.array([0.4, 1.7]), np.array([0.5, -2.0, 1.0]), np.array([3, 0, 4])
    half = len(x) / 2, np.sum(x**2) / 2
    precision = jnp.stack([jnp.array([[1.2, -0.4], [-0.4, 0.9]]), jnp.eye(2)])
    y = np.array([[0.5, 1.0], [-2.0, 0.3], [1.0, -1.0]])
    normal = lambda sd: stats.norm(0, sd[:, None]).logpdf(x).sum(1)  # noqa: E731
    cases = [
        (Gamma, GammaNatural(counts.sum(), 3.0), v, stats.poisson(v[:, None]).logpmf(counts)),
        (Gamma, GammaNatural(*half), v, normal(v**-0.5)),
        (InverseGamma, InverseGammaNatural(*half), v, normal(v**0.5)),
        (
            Wishart,
            WishartNatural(y.T @ y, 3.0),
            precision,
            [stats.multivariate_normal(np.zeros(2), np.linalg.inv(P)).logpdf(y) for P in precision],
        ),
    ]
    for family, data, value, log_lik in cases:
        result = family.inner(data, family.statistics(value))
        log_lik = np.sum(np.reshape(log_lik, (2, -1)), axis=1)
        np.testing.assert_allclose(result[0] - result[1], log_lik[0] - log_lik[1], rtol=1e-4)


def test_edges_of_gamma_and_poisson():
    """A density at 0, an exponential; means that no density has; counts that do not occur."""
    assert Gamma.log_prob(Gamma.from_standard(1.0, 2.0), 0.0) == pytest.approx(np.log(2.0))
    assert np.isnan(Gamma.natural(GammaMean(0.5, -1.0)).a)  # E log v is below log E v
    assert Poisson.log_prob(PoissonNatural(-200.0), 1) == -200.0
    assert Poisson.log_prob(PoissonNatural(0.0), -1) == -np.inf
    assert np.isfinite(jax.grad(Poisson.entropy)(PoissonNatural(-80.0)).log_rate)


@pytest.mark.x64
def test_concentrations_of_all_sizes_come_back_from_the_mean(needs_x64):
    """Newton's method converges from 1e-3 to 1e6, also where these are side by side."""
    sizes = np.array([1e-3, 0.02, 0.5, 1.0, 30.0, 1e4, 1e6])
    alpha = np.stack([sizes, sizes[::-1], np.full(7, 1e-3), np.full(7, 1e6), sizes**0.2])
    result = jax.jit(lambda a: Dirichlet.natural(Dirichlet.mean(DirichletNatural(a))).a)(alpha - 1)
    # The mean itself is rounded: 1e-16 times the sum of the concentrations.
    np.testing.assert_allclose(result + 1, alpha, rtol=1e-6)


@pytest.mark.x64
@pytest.mark.parametrize("d", [1, 2, 30])
def test_degrees_of_freedom_of_all_sizes_come_back_from_the_mean(d, needs_x64):
    nu = d - 1 + np.array([1e-3, 0.1, 1.0, 7.0, 300.0, 1e5])

    def back(nu):
        q = NIW.from_standard(jnp.zeros(d), 1.0, nu, jnp.eye(d))
        return NIW.natural(NIW.mean(q)).nu

    np.testing.assert_allclose(jax.jit(jax.vmap(back))(nu), nu, rtol=1e-8)


def test_float32_is_enough_for_the_way_back_from_moderate_counts():
    """The mean is rounded by 1e-7, which counts of 1,000 multiply to 1e-3 of themselves."""
    alpha = np.array([[0.02, 0.5, 3.0], [30.0, 1.0, 200.0], [1e3, 1e3, 1e3]])
    result = jax.jit(lambda a: Dirichlet.natural(Dirichlet.mean(DirichletNatural(a))).a)(alpha - 1)
    np.testing.assert_allclose(result + 1, alpha, rtol=5e-3)


@pytest.mark.slow
def test_a_mean_that_no_density_has_gives_nan():
    probs = np.array([0.2, 0.3, 0.5])  # E log pi is below log E pi, by Jensen's inequality
    assert np.isnan(Dirichlet.natural(DirichletMean(np.log(probs))).a).all()
    point = NIW.statistics((jnp.ones(2), jnp.eye(2)))
    assert np.isnan(NIW.natural(point).nu)


def test_a_scale_matrix_that_is_lost_in_rounding_is_outside_the_domain():
    """In float32 A = S + m m^T with S = I: an error of 1e-3 at m = 100, and nothing at m = 1e4."""

    def at(m):
        m = np.full(2, m, np.float32)
        return NIWNatural(np.eye(2, dtype=np.float32) + np.outer(m, m), m, 1.0, 4.0)

    assert NIW.in_domain(at(100.0)) and not NIW.in_domain(at(1e4))
    np.testing.assert_allclose(NIW.to_standard(at(100.0)).scale_matrix, np.eye(2), atol=5e-3)


def test_float32_far_from_the_origin():
    """Mean 30, variance .01: the products that A subtracts are 45,000."""
    q = Gaussian.from_standard([30.0], [[0.01]])
    p = Gaussian.from_standard([30.1], [[0.01]])
    np.testing.assert_allclose(Gaussian.kl(q, p), 0.5, rtol=2e-3)
    np.testing.assert_allclose(Gaussian.log_prob(q, [30.0]), 1.383647, rtol=1e-4)
    np.testing.assert_allclose(Gaussian.entropy(q), -0.883647, rtol=1e-4)


def test_probabilities_near_zero_and_one_have_finite_gradients():
    extreme = CategoricalNatural(jnp.array([200.0, -200.0, 0.0]))
    assert all(np.isfinite(jax.grad(Categorical.entropy)(extreme).logits))
    np.testing.assert_allclose(Categorical.log_prob(extreme, 1), -400.0)
    assert Bernoulli.log_prob(Bernoulli.from_standard(0.5)._replace(log_odds=-200.0), 1) == -200.0


def test_a_probability_of_zero_has_the_density_of_its_limit():
    """Where the natural parameter is 0 a power of the probability is 1; elsewhere it decides."""
    q = DirichletNatural(np.array([0.0, 1.0, 2.0]))
    result = Dirichlet.log_prob(q, jnp.array([[0.0, 0.4, 0.6], [0.4, 0.0, 0.6]]))
    # Gamma(6) / (Gamma(1) Gamma(2) Gamma(3)) is 60.
    np.testing.assert_allclose(result, [np.log(60 * 0.4 * 0.6**2), -np.inf], rtol=1e-5)
    result = Beta.log_prob(BetaNatural(0.0, 2.0), jnp.array([0.0, 1.0]))
    np.testing.assert_allclose(result, [np.log(3.0), -np.inf], rtol=1e-5)


def test_a_quotient_may_be_improper_and_a_product_of_other_families_is_none():
    narrow, wide = (Gaussian.from_standard([0.0], [[v]]) for v in (1.0, 2.0))
    assert Gaussian.in_domain(divide(narrow, wide))
    assert not Gaussian.in_domain(divide(wide, narrow))
    assert np.isnan(Gaussian.log_partition(divide(wide, narrow)))
    with pytest.raises(TypeError, match="GaussianNatural and a BetaNatural"):
        multiply(narrow, BetaNatural(1.0, 1.0))
    with pytest.raises(ValueError, match="h of GaussianNatural"):
        multiply(narrow, GaussianNatural(np.zeros(2), -np.eye(2)))
