"""`SemiImplicitELBO` against its formula, known values, and the order of its bounds."""

from functools import cache, partial

import jax
from jax import random
from jax.nn import logsumexp
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
import optax
import pytest

from numpyro_ext._model.handlers import seed_plates
from numpyro_ext.guides import AutoSemiImplicit
from numpyro_ext.objectives import SemiImplicitELBO
from tests.objectives.compare import assert_refuses, assert_same


class ByHand:
    """psi ~ N(0, 1), z | psi ~ N(psi, scale^2), with a density at the site that draws z."""

    def __call__(self):
        psi = numpyro.sample("psi", dist.Normal(0.0, 1.0), infer={"is_auxiliary": True})
        numpyro.sample("z", dist.Normal(psi, numpyro.param("scale", 0.5)))

    def sample_mixing(self, rng_key, params, num_samples):
        return {"loc": random.normal(rng_key, (num_samples, 1))}

    def conditional(self, params, psi):
        return dist.Normal(psi["loc"], params["scale"]).to_event(1)


def standard_normal():
    numpyro.sample("z", dist.Normal(0.0, 1.0))


# E log p of the marginal N(0, 1.25), and entropy terms: .7257913526 = log(2 pi e / 4) / 2 is that
# of one conditional, 1.5305103089 = log(2 pi e 1.25) / 2 the entropy; the others are quadratures
# for J = 1 (exact) and Monte Carlo for J = 4 (+- .0009 and .0033).
LOG_P = -0.9189385332 - 0.625
ENTROPY = 1.5305103089
LOWER = {0: (0.7257913526, 0.0), 1: (1.0545800706, 0.0), 4: (1.3115, 0.0009)}
UPPER = {4: (2.0875, 0.0033), 1: (4.7257913526, 0.0)}


@cache
def bounds_by_num_aux():
    """``{J: (L_J, U_J)}`` of 20,000 independent estimates with 4 particles each."""

    args = ({"scale": 0.5}, standard_normal, ByHand())

    def estimate(J, key):
        loss = SemiImplicitELBO(4, J)
        return loss.bounds(key, *args) if J else (-loss.loss(key, *args), jnp.zeros(()))

    run = jax.jit(lambda keys: {J: jax.vmap(partial(estimate, J))(keys) for J in (0, 1, 4)})
    return run(random.split(random.key(0), 20_000))


@pytest.mark.slow
def test_bounds_have_their_known_values():
    # Monte Carlo: standard errors of .003 to .007, and of .05 for the upper bound with J = 1.
    for side, known in ((0, LOWER), (1, UPPER)):
        for J, (entropy, error) in known.items():
            x = bounds_by_num_aux()[J][side]
            standard_error = float(x.std()) / len(x) ** 0.5 + error
            assert standard_error < 0.06
            assert abs(float(x.mean()) - LOG_P - entropy) < 4 * standard_error


def test_bounds_are_ordered_in_the_number_of_auxiliary_draws():
    means = {
        J: (float(lower.mean()), float(upper.mean()))
        for J, (lower, upper) in bounds_by_num_aux().items()
    }
    elbo = LOG_P + ENTROPY
    assert means[0][0] < means[1][0] < means[4][0] < elbo < means[4][1] < means[1][1]


def model(x):
    """Constrained sites, not in the order of the alphabet, a minibatch, and a parameter."""
    b = numpyro.param("b", 0.7)
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    mix = numpyro.sample("mix", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    with numpyro.plate("data", len(x), subsample_size=4):
        x = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(b * mix[1] + mix[2], scale), obs=x)


X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


@cache
def perturbed():
    guide = AutoSemiImplicit(
        model, hidden_dims=(5,), noise_dim=2, covariance="conditional", init_from=None
    )
    svi = SVI(model, guide, optax.adam(0.1), SemiImplicitELBO(2, 3))
    params = svi.get_params(svi.init(random.key(0), X))
    keys = iter(random.split(random.key(1), 10))
    noise = jax.tree.map(lambda x: 0.5 * random.normal(next(keys), jnp.shape(x)), params)
    return guide, jax.tree.map(lambda x, e: x + jnp.abs(e), params, noise)


def by_loops(key, params, K=2, J=2):
    """The loss from single densities, on the same draws."""
    guide, _ = perturbed()
    plate_key, rest = random.split(key)
    key_own, key_z, key_fresh = random.split(random.fold_in(rest, K), 3)
    own = guide.sample_mixing(key_own, params, K)
    z = guide.conditional(params, own).rsample(key_z)
    fresh = guide.sample_mixing(key_fresh, params, J)
    on_batch = substitute(seed(seed_plates(model, plate_key), random.key(7)), params)
    total = 0.0
    for k in range(K):
        log_p = -potential_energy(on_batch, (X,), {}, guide.unpack(z[k]))
        normals = [tuple(x[k] for x in own), *(tuple(x[j] for x in fresh) for j in range(J))]
        log_q = jnp.stack([dist.Normal(*one).log_prob(z[k]).sum() for one in normals])
        total += log_p - logsumexp(log_q) + jnp.log(len(normals))
    return -total / K


@pytest.mark.slow
@pytest.mark.x64
def test_loss_and_gradient_are_those_of_explicit_loops(tol):
    guide, params = perturbed()
    key = random.key(3)

    def ours(params):
        return SemiImplicitELBO(2, 2).loss(key, params, model, guide, X)

    both = jax.jit(lambda p: [jax.value_and_grad(f)(p) for f in (ours, partial(by_loops, key))])
    found, loops = both(params)
    assert_same(found, loops, tol(2e-4, 1e-10))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found))


def test_guides_that_do_not_fit_are_named():
    loss = SemiImplicitELBO(2, 2)
    auto = AutoNormal(model)
    svi = SVI(model, auto, optax.adam(0.1), loss)
    params = svi.get_params(svi.init(random.key(0), X))
    sentence = "needs a guide with sample_mixing and conditional; use AutoSemiImplicit"
    assert_refuses(sentence, loss, params, model, auto, X, error=TypeError)

    class Twice(ByHand):
        def conditional(self, params, psi):
            return dist.Normal(jnp.repeat(psi["loc"], 2, -1), 0.5).to_event(1)

    sentence = r"gives \(2,\) numbers for one psi, and its sites have \(1,\)"
    assert_refuses(sentence, loss, {"scale": 0.5}, standard_normal, Twice())
