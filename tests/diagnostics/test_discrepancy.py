"""Discrepancies of draws that are in a ``DataTree`` or a dict, and of a model."""

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import potential_energy, unconstrain_fn
import pytest

from numpyro_ext.diagnostics import kernel_stein_discrepancy, maximum_mean_discrepancy
from numpyro_ext.scores.discrepancy import squared_ksd, squared_mmd
from numpyro_ext.targets import normal_mean, normal_mean_answer

X = jnp.array([0.5, -1.0, 2.0])


def constrained(x, batch=None):
    scale = numpyro.sample("scale", dist.LogNormal(0.5, 0.3))
    base = dist.Normal(jnp.array([0.5, -0.3]), jnp.array([1.0, 2.0])).to_event(1)
    simplex = dist.transforms.StickBreakingTransform()
    p = numpyro.sample("p", dist.TransformedDistribution(base, simplex))
    numpyro.deterministic("sum", p.sum() + scale)
    with numpyro.plate("N", len(x), subsample_size=batch) as i:
        numpyro.sample("x", dist.Normal(p[0], scale), obs=x[i])


def draws_of(size):
    key_scale, key_p = random.split(random.key(0))
    return {
        "scale": jnp.exp(0.5 + 0.3 * random.normal(key_scale, (size,))),
        "p": jax.nn.softmax(random.normal(key_p, (size, 3))),
    }


def tree_of(draws, chains=2, **more):
    return az.from_dict(
        {
            "posterior": {k: np.reshape(v, (chains, -1, *v.shape[1:])) for k, v in draws.items()}
            | more
        }
    )


@pytest.mark.slow
@pytest.mark.x64
def test_stein_discrepancy_of_a_tree_equals_the_one_by_hand(tol):
    draws = draws_of(20)

    @jax.jit
    @jax.vmap
    def point_and_score(values):
        z = unconstrain_fn(numpyro.handlers.seed(constrained, 0), (X,), {}, values)
        return z, jax.grad(lambda z: -potential_energy(constrained, (X,), {}, z))(z)

    z, grad = point_and_score(draws)

    def flat(sites):
        return jnp.concatenate([sites["p"], sites["scale"][:, None]], axis=1)

    by_hand = squared_ksd(flat(z), flat(grad))
    tree = tree_of(draws, sum=np.ones((2, 10)))
    found = kernel_stein_discrepancy(tree, model=constrained, model_args=(X, 1), block_size=7)
    np.testing.assert_allclose(found, by_hand, rtol=tol(1e-4, 1e-10))


def test_stein_discrepancy_is_zero_for_the_posterior_and_not_near_it():
    answer = normal_mean_answer(X)
    noise = random.normal(random.key(1), (1500,))

    def ksd(shift):
        z = answer.mean + shift + jnp.sqrt(answer.variance) * noise
        return kernel_stein_discrepancy(
            {"z": z}, model=normal_mean, model_args=(X,), model_kwargs={"subsample_size": 1}
        )

    # Under the null the U-statistic has a standard deviation of about E[k0] / S = 6 / 1500.
    assert abs(ksd(0.0)) < 0.02 < ksd(0.2)


def test_thinning_takes_equally_spaced_draws():
    x = random.normal(random.key(0), (30, 2))
    expected = squared_ksd(x[::3], -x[::3])
    assert kernel_stein_discrepancy(x, lambda x: -x, num_samples=10) == expected
    assert kernel_stein_discrepancy(x, -x, num_samples=10) == expected
    assert kernel_stein_discrepancy(x[::3], -x[::3], num_samples=100) == expected
    of_model = kernel_stein_discrepancy(
        {"z": x[:, 0]}, num_samples=np.int64(10), model=normal_mean, model_args=(X,)
    )
    z = x[::3, :1]
    expected = squared_ksd(z, X.sum() - 4 * z)
    np.testing.assert_allclose(of_model, expected, rtol=1e-4)


@pytest.mark.x64
def test_mean_discrepancy_of_draws_equals_the_one_by_hand(tol):
    x, y = draws_of(20), {k: 0.7 * v[:12] for k, v in draws_of(20).items()}

    def flat(sites):
        return jnp.concatenate([sites["p"], sites["scale"][:, None]], axis=1)

    by_hand = squared_mmd(flat(x), flat(y))
    for a, b in ((x, y), (tree_of(x), tree_of(y, 3)), (flat(x), flat(y))):
        np.testing.assert_allclose(maximum_mean_discrepancy(a, b), by_hand, rtol=tol(1e-5, 1e-12))


def test_bad_input_of_the_stein_discrepancy():
    x, draws = jnp.ones((5, 2)), draws_of(5)
    options = {"model": constrained, "model_args": (X,)}
    with pytest.raises(ValueError, match="pass an array with score="):
        kernel_stein_discrepancy(x)
    with pytest.raises(ValueError, match=r"score has shape \(3, 2\) and x has shape \(5, 2\)"):
        kernel_stein_discrepancy(x, -x[:3])
    with pytest.raises(ValueError, match="pass an array with score="):
        kernel_stein_discrepancy(draws)
    with pytest.raises(ValueError, match="draws lack latent site 'p'"):
        kernel_stein_discrepancy({"scale": draws["scale"]}, **options)
    with pytest.raises(ValueError, match=r"x has sites of \[\(3,\), \(5,\)\] draws"):
        kernel_stein_discrepancy({**draws, "p": draws["p"][:3]}, **options)

    def discrete(x):
        numpyro.sample("k", dist.Bernoulli(0.5))

    with pytest.raises(ValueError, match="'k' is discrete"):
        kernel_stein_discrepancy({"k": jnp.zeros(4, int)}, model=discrete, model_args=(X,))


def test_bad_input_of_the_mean_discrepancy():
    draws = draws_of(5)
    with pytest.raises(ValueError, match="keep only the common ones"):
        maximum_mean_discrepancy(draws, {"p": draws["p"]})
    with pytest.raises(ValueError, match="keep only the common ones"):
        maximum_mean_discrepancy(draws, {**draws, "p": draws["p"][:, :2]})
