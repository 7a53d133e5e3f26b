"""ParVI: the same steps as the loss, the state of an ensemble, and what it refuses."""

from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC
from numpyro.infer.initialization import init_to_feasible
import optax
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.particles import (
    PSGHMC,
    SVGD,
    Blob,
    ParVI,
    ParVIState,
)
from tests.particles.fixture import DATA, STARTS, log_joint, model, potentials_of_subsets

SITES = {"loc": STARTS[:, 0], "scale": STARTS[:, 1]}


def ensemble(kernel, *args, num_warmup=None, num_samples=1, num_chains=5, extra_fields=(), **run):
    mcmc = MCMC(
        kernel,
        # The default step takes its length from the warmup.
        num_warmup=int(kernel.optim is None) if num_warmup is None else num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, extra_fields=extra_fields, **run)
    return mcmc


@pytest.mark.slow
@pytest.mark.x64
def test_takes_the_steps_of_its_field_and_optimiser(tol):
    field = SVGD(temperature=2.0, annealing=lambda i: (i + 1.0) / 4.0)
    optim = optax.adam(0.1)
    kernel = ParVI(model, field, optim, steps_per_sample=2, init_from=None)
    mcmc = ensemble(
        kernel,
        num_samples=2,
        init_params=SITES,
        extra_fields=("potential_energy", "z.scale"),
    )

    x = STARTS
    state = optim.init(x)
    score = jax.jit(jax.vmap(jax.grad(log_joint)))
    for i in range(4):
        v = SVGD().velocity(x, score(x) * (i + 1.0) / 4.0 / 2.0)
        updates, state = optim.update(-v, state)
        x = x + updates
    atol = tol(1e-5, 1e-12)
    samples, fields = mcmc.get_samples(group_by_chain=True), mcmc.get_extra_fields(True)
    np.testing.assert_allclose(samples["loc"][:, -1], x[:, 0], atol=atol)
    np.testing.assert_allclose(samples["scale"][:, -1], jnp.exp(x[:, 1]), atol=atol)
    np.testing.assert_allclose(fields["z.scale"][:, -1], x[:, 1], atol=atol)
    energy = -jax.vmap(log_joint)(x)
    np.testing.assert_allclose(fields["potential_energy"][:, -1], energy, rtol=tol(1e-5, 1e-12))
    assert not fields["diverging"].any()
    assert mcmc.last_state.i == 4
    assert isinstance(mcmc.last_state, ParVIState)


@pytest.mark.slow
def test_minibatch_is_drawn_anew_at_every_step_and_shared_by_all_particles():
    kernel = ParVI(model, optim=optax.sgd(0.0), init_from=None)
    fields = ("potential_energy",)
    mcmc = ensemble(kernel, DATA, 3, num_samples=12, init_params=SITES, extra_fields=fields)
    found = mcmc.get_extra_fields(group_by_chain=True)
    energies = np.asarray(found["potential_energy"]).T
    possible = np.asarray(potentials_of_subsets())
    seen = set()
    for row in energies:
        distance = np.abs(possible - row).max(axis=1)
        assert distance.min() < 1e-4
        seen.add(int(distance.argmin()))
    assert len(seen) > 4


def free(name, shape=()):
    return numpyro.sample(name, dist.ImproperUniform(constraints.real, (), shape))


def test_few_particles_are_a_warning():
    with pytest.warns(InferenceWarning, match=r"3 particles for 2 latent dimensions.*give 4"):
        ParVI(model, SVGD(), init_from=None).init(random.split(random.key(0), 3), 1)


@pytest.mark.slow
def test_dynamics_keep_the_momenta_in_the_state():
    dynamics = PSGHMC(0.05, flow="fgh", friction=0.5, mass=2.0)
    kernel = ParVI(model, optim=dynamics, init_from=None)
    assert isinstance(kernel.field, Blob)
    mcmc = ensemble(kernel, init_params=SITES)
    key = random.split(random.split(random.key(0), 5)[0], 4)[2]
    x = STARTS
    g = jax.vmap(jax.grad(log_joint))(x)
    x, r = dynamics.step(x, dynamics.init(key, x), g, Blob())
    np.testing.assert_allclose(mcmc.last_state.z["loc"], x[:, 0], rtol=1e-4)
    np.testing.assert_allclose(mcmc.last_state.optim_state, r, rtol=1e-4)
    assert pickle.loads(pickle.dumps(kernel)).optim.friction == 0.5


def test_chains_one_by_one_are_an_error_that_names_vectorized():
    kernel = ParVI(model, init_from=None)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, num_chains=2, chain_method="sequential")
    with pytest.raises(ValueError, match="vectorized"):
        mcmc.run(random.key(0))


@pytest.mark.slow
def test_pickling_keeps_the_samples_and_an_optimiser_that_pickle_can_store():
    mcmc = ensemble(
        ParVI(model, optim=partial(optax.sgd, 0.1), init_from=None),
        num_samples=2,
        init_params=SITES,
    )
    saved = pickle.loads(pickle.dumps(mcmc))
    np.testing.assert_array_equal(saved.get_samples()["scale"], mcmc.get_samples()["scale"])
    assert pickle.loads(pickle.dumps(ParVI(model, SVGD(), init_from=None))).optim is None


def far():
    """No start of ``init_to_uniform`` has a finite density; the sites are not in sorted order."""
    b = numpyro.sample("b", dist.Normal(12.0, 3.0))
    numpyro.sample("a", dist.Normal(0.0, 0.5))
    numpyro.factor("hole", jnp.where(b > 10.0, 0.0, -jnp.inf))


def test_init_params_need_no_other_start_and_gradients_are_in_the_order_of_the_model():
    start = {"a": jnp.array([1.0, -2.0, 0.5, 0.0]), "b": jnp.array([11.0, 14.0, 15.0, 12.0])}
    kernel = ParVI(far, optim=optax.sgd(0.1), init_from=None)
    state = kernel.init(random.split(random.key(0), 4), 0, start)
    g = jnp.stack([-(start["b"] - 12.0) / 9.0, -start["a"] / 0.25], axis=1)
    np.testing.assert_allclose(state.z_grad, g, rtol=1e-5)
    with pytest.raises(ValueError, match="not finite at the initial point: see site 'hole'"):
        kernel.init(random.split(random.key(0), 4), 0)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: ParVI(model, SVGD(), PSGHMC(0.1)),
            TypeError,
            r"SVGD.*use Blob\(\), GFSD\(\) or GFSF\(\)",
        ),
        (
            lambda: ensemble(ParVI(model, SVGD(), init_from=None), num_warmup=0),
            ValueError,
            "num_warmup is 0.*num_samples=1, or give optim",
        ),
        (
            lambda: ensemble(ParVI(model, init_strategy=init_to_feasible)),
            ValueError,
            r"same point.*init_strategy",
        ),
        (
            lambda: ensemble(ParVI(model, init_from=None), init_params={"loc": jnp.arange(5.0)}),
            ValueError,
            r"\['loc', 'scale'\]",
        ),
    ],
)
def test_bad_input_is_one_clear_sentence(make, error, words):
    with pytest.raises(error, match=words):
        make()
