"""Stein discrepancy and MMD equal their reference values, population laws and blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_ext.scores import IMQ, RBF, stein_kernel_matrix
from numpyro_ext.scores.discrepancy import squared_ksd, squared_mmd

X = np.array([[0.3, -0.7], [1.2, 0.4], [-0.8, 0.9], [0.1, 1.5], [-1.4, -0.6]])
Y = np.array([[0.5, 0.5], [-0.2, 0.1]])
PRECISION = np.linalg.inv(np.array([[1.0, 0.5], [0.5, 2.0]]))


def score(x):
    return -x @ PRECISION


@pytest.mark.x64
@pytest.mark.parametrize("block_size", [None, 2, 9])
@pytest.mark.parametrize(
    ("kernel", "u", "v"),
    [(RBF(1.5), -0.4051729809, 0.1287414339), (IMQ(1.5), -0.3356758671, 0.1843391250)],
)
def test_stein_discrepancy_matches_reference(kernel, u, v, block_size, tol):
    x = jnp.array(X)
    for statistic, value in (("u", u), ("v", v)):
        ours = squared_ksd(x, score, kernel, statistic=statistic, block_size=block_size)
        np.testing.assert_allclose(ours, value, rtol=tol(2e-5, 1e-8))


@pytest.mark.x64
@pytest.mark.parametrize("block_size", [None, 3])
def test_mmd_matches_reference(block_size, tol):
    for statistic, value in (("u", -0.0568284807), ("v", 0.1175429902)):
        ours = squared_mmd(
            jnp.array(X), jnp.array(Y), RBF(1.5), statistic=statistic, block_size=block_size
        )
        np.testing.assert_allclose(ours, value, rtol=tol(2e-5, 1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [IMQ("median")], ids=repr)
def test_stein_kernel_is_the_double_score_of_the_kernel(kernel):
    """k0 = p^-1(x) p^-1(y) trace d/dx d/dy [p(x) k p(y)], by autodiff."""
    x = jnp.array(X)
    kernel = kernel.resolve(x)

    def log_p(a):
        return -0.5 * a @ PRECISION @ a

    def k0(a, b):
        joint = lambda u, v: jnp.exp(log_p(u) + log_p(v)) * kernel(u[None], v[None])[0, 0]  # noqa: E731
        return jnp.trace(jax.jacfwd(jax.grad(joint), 1)(a, b)) / jnp.exp(log_p(a) + log_p(b))

    expected = jax.vmap(lambda a: jax.vmap(lambda b: k0(a, b))(x))(x)
    ours = stein_kernel_matrix(x, score(x), kernel)
    np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_rules_are_resolved_on_all_points():
    x, y = jnp.array(X), jnp.array(Y)
    both = jnp.concatenate([x, y])
    resolved = RBF("median_distance").resolve(both)
    np.testing.assert_allclose(squared_mmd(x, y), squared_mmd(x, y, resolved), rtol=1e-6)
    default = squared_ksd(x, score)
    explicit = squared_ksd(x, score, IMQ("median_distance").resolve(x), block_size=2)
    np.testing.assert_allclose(default, explicit, rtol=1e-5)


def test_blocks_bound_the_memory():
    x = jax.ShapeDtypeStruct((2000, 5), jnp.float32)

    def temporary_bytes(block_size):
        fn = lambda x: squared_ksd(x, -x, RBF(1.0), block_size=block_size)  # noqa: E731
        return jax.jit(fn).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(50) < 4e6
    assert temporary_bytes(50) < 0.25 * max(temporary_bytes(None), 2000 * 2000 * 4)


@pytest.mark.slow
def test_non_finite_input_is_an_error_and_gives_nan_where_it_is_traced():
    x, y, s = jnp.array(X), jnp.array(Y), score(jnp.array(X))
    # A rule has no bandwidth on such samples, which is no error either.
    for kernel in (RBF(1.5), None):
        mmd = lambda x, y: squared_mmd(x, y, kernel)  # noqa: B023, E731
        ksd = lambda x, s: squared_ksd(x, s, kernel)  # noqa: B023, E731
        for bad in (jnp.nan, jnp.inf):
            spoilt, bad_score = x.at[1, 0].set(bad), s.at[0, 0].set(bad)
            calls = (mmd, spoilt, y), (mmd, y, spoilt), (ksd, spoilt, s), (ksd, x, bad_score)
            names = "x", "y", "x", "score"
            for (fn, *args), name in zip(calls, names, strict=True):
                assert bad == jnp.inf or jnp.isnan(jax.jit(fn)(*args))
                with pytest.raises(ValueError, match=f"{name} has 1 of .* not finite"):
                    fn(*args)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, y: squared_mmd(x, y, statistic="w"), "statistic is 'w'"),
        (lambda x, y: squared_mmd(x[:1], y), "statistic is 'u' with 1 sample"),
        (lambda x, y: squared_mmd(x, y[:, :1]), "dimension 2 and y of dimension 1"),
        (lambda x, y: squared_ksd(x, y), r"score has shape \(2, 2\)"),
    ],
)
def test_bad_input_is_one_clear_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.array(X), jnp.array(Y))


def test_samples_whose_squares_are_no_numbers_are_refused():
    """At these the discrepancy was 0, because all samples were as one."""
    x, y = np.float32(X), np.float32(Y)
    for unit in (1e-20, 1e20):
        with pytest.raises(ValueError, match=r"x has a spread of .*, whose square is no number of"):
            squared_mmd(jnp.asarray(x * unit, jnp.float32), jnp.asarray(y * unit, jnp.float32))
    for unit in (1e-15, 1e15):
        scaled = squared_mmd(*(jnp.asarray(a * unit, jnp.float32) for a in (x, y)))
        assert float(scaled) == pytest.approx(float(squared_mmd(x, y)), rel=1e-4)
