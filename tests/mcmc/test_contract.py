"""What every kernel of the room does for NumPyro's ``MCMC``: one table of constructors, times laws.

A new kernel joins by one line of ``KERNELS``; one that cannot take a minibatch also by its name in
``FULL_DATA``.
"""

import functools
from functools import partial
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pytest

from numpyro_ext.mcmc import (
    PSGLD,
    SGHMC,
    SGLD,
    SGNHT,
    SGRLD,
    SVRG,
    ExpandedMean,
    GeodesicSGHMC,
    GeodesicSGNHT,
    KernelHMC,
    RecipeKernel,
)
from tests.mcmc.models import arrays_of_size, linear, linear_data, linear_full


def cubic(z):
    return -(z**3)


KERNELS = {
    "SGLD": partial(SGLD, step_size=1e-3),
    "SGLD, epochs and SVRG": partial(SGLD, step_size=1e-3, gradient=SVRG(3), minibatch="epoch"),
    "SGHMC": partial(SGHMC, step_size=0.01, noise_variance="warmup", resample_every=5),
    "SGNHT, per site": partial(SGNHT, step_size=0.01, thermostat="per_site"),
    "PSGLD": partial(PSGLD, step_size=0.01),
    "SGRLD": partial(SGRLD, step_size=1e-3, metric=ExpandedMean()),
    "GeodesicSGHMC": partial(GeodesicSGHMC, step_size=0.01),
    "GeodesicSGNHT": partial(GeodesicSGNHT, step_size=0.01),
    "RecipeKernel": partial(RecipeKernel, step_size=1e-3, diffusion=jnp.ones_like, num_auxiliary=1),
    "KernelHMC": partial(KernelHMC, step_size=0.05, score=cubic),
}
FULL_DATA = {"KernelHMC"}
# The laws of the base are proven on two kernels that use all of it between them.
SHARED = ["SGLD, epochs and SVRG", "SGHMC"]
WARMUP, DRAWS = 4, 12


def kernel_of(name, **options):
    model = linear_full if name in FULL_DATA else linear
    return KERNELS[name](model, **options)


def sampler(kernel, draws=DRAWS, progress_bar=False, **options):
    return MCMC(kernel, num_warmup=WARMUP, num_samples=draws, progress_bar=progress_bar, **options)


@pytest.fixture(scope="module", params=KERNELS)
def every(request):
    """Every kernel."""
    return request.param


@pytest.fixture(scope="module", params=SHARED)
def name(request):
    """A kernel for the laws of the base."""
    return request.param


@functools.cache
def keys_of_chains():
    return random.split(random.key(7), 2)


@pytest.fixture
def keys():
    return keys_of_chains()


@functools.cache
def chain_of(name):
    """One chain of 2 * DRAWS draws."""
    mcmc = sampler(kernel_of(name), 2 * DRAWS)
    mcmc.run(keys_of_chains()[0], *linear_data(), extra_fields=("i", "z.sigma"))
    return mcmc


@functools.cache
def start_of(name):
    """A kernel and its first state."""
    kernel = kernel_of(name)
    return kernel, kernel.init(keys_of_chains()[0], WARMUP, None, linear_data(), {})


@pytest.fixture(
    params=[x if x in SHARED else pytest.param(x, marks=pytest.mark.slow) for x in KERNELS]
)
def single(request):
    """A chain of every kernel."""
    return chain_of(request.param)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_sites_are_constrained_and_deterministic_ones_computed(single):
    draws = single.get_samples()
    assert draws["w"].shape == (2 * DRAWS, 2)
    assert jnp.allclose(draws["length"], jnp.linalg.norm(draws["w"], axis=1), rtol=1e-5)
    fields = single.get_extra_fields()
    assert jnp.allclose(draws["sigma"], jnp.exp(fields["z.sigma"]), rtol=1e-5)
    assert jnp.std(draws["sigma"]) > 0
    assert fields["i"].tolist() == list(range(WARMUP + 1, WARMUP + 2 * DRAWS + 1))


@pytest.mark.slow
def test_progress_bar_and_resumption_continue_the_same_chain(name, keys):
    """And the second run traces nothing: the model is called once, for the initial draw's
    deterministic site.
    """
    calls, single = [], chain_of(name)
    kernel = kernel_of(name)
    model, kernel.model = kernel.model, lambda *args: (calls.append(1), model(*args))[1]
    mcmc, data = sampler(kernel, progress_bar=True), linear_data()
    mcmc.run(keys[0], *data)
    first, traced = mcmc.get_samples(), len(calls)
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *data)
    assert len(calls) == traced + 1
    one = single.last_state
    assert np.array_equal(random.key_data(one.rng_key), random.key_data(mcmc.last_state.rng_key))
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: jnp.allclose(a, b, rtol=1e-3, atol=1e-4), one.z, mcmc.last_state.z
        )
    )
    for site, x in mcmc.get_samples().items():
        both = jnp.concatenate([first[site], x])
        assert jnp.allclose(both, single.get_samples()[site], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("chain_method", ["vectorized", "parallel"])
def test_chain_methods_give_the_same_draws(keys, chain_method):
    """The same random numbers; XLA may round a batched product differently."""
    single = chain_of("SGHMC")
    mcmc = sampler(kernel_of("SGHMC"), 2 * DRAWS, num_chains=2, chain_method=chain_method)
    mcmc.run(keys, *linear_data())
    chains = mcmc.get_samples(group_by_chain=True)
    for site, expected in single.get_samples().items():
        assert jnp.allclose(chains[site][0], expected, rtol=1e-4, atol=1e-5)
        assert not jnp.allclose(chains[site][1], expected, rtol=0.01)
    one, many = single.last_state, mcmc.last_state
    assert np.array_equal(random.key_data(one.rng_key), random.key_data(many.rng_key[0]))
    assert one.i == many.i[0] == many.i[1]


def test_pickles_with_its_results(single):
    copy = pickle.loads(pickle.dumps(single))
    assert same(copy.get_samples(), single.get_samples())
    assert copy.sampler.model is single.sampler.model
    assert type(copy.last_state) is type(single.last_state)


@pytest.mark.slow
def test_initial_params_are_honoured(keys):
    start = {"w": jnp.array([0.3, -0.2]), "sigma": jnp.array(-1.1)}
    kernel, data = kernel_of("SGHMC"), linear_data()
    state = kernel.init(keys[0], WARMUP, start, data, {})
    assert same(state.z, start)
    two = jax.tree.map(lambda x: jnp.stack([x, x + 0.1]), start)
    assert same(kernel.init(keys, WARMUP, two, data, {}).z, two)
    for wrong, message in [
        ({"w": start["w"]}, r"init_params has \['w'\]; .* \['sigma', 'w'\]"),
        (start | {"w": jnp.zeros(3)}, r"init_params has shape \(3,\) at site 'w'"),
    ]:
        with pytest.raises(ValueError, match=message):
            kernel.init(keys[0], WARMUP, wrong, data, {})


def test_divergence_keeps_the_last_finite_state(name):
    data = linear_data()
    kernel, state = start_of(name)
    after_warmup = {"i": jnp.asarray(1000), "z": state.z | {"w": jnp.array([0.3, 1e30])}}
    bad = state._replace(**after_warmup)
    new = jax.jit(lambda state: kernel.sample(state, data, {}))(bad)
    assert bool(new.diverging)
    assert int(new.i) == 1001
    assert all(jnp.all(jnp.isfinite(x)) for x in new.z.values())


def test_a_transition_makes_no_array_of_the_data_size(name):
    x, y = linear_data()
    data = (jnp.tile(x, (50, 1)), jnp.tile(y, 50))
    kernel = kernel_of(name) if "SVRG" not in name else SGLD(linear, 1e-3, minibatch="epoch")
    state = kernel.init(random.key(0), WARMUP, None, data, {})
    jaxpr = jax.make_jaxpr(lambda state, data: kernel.sample(state, data, {}))(state, data).jaxpr
    assert not arrays_of_size(jaxpr, 200)
    assert arrays_of_size(jaxpr, 16)


def test_prints_as_a_short_summary(every):
    """What differs from the defaults, in one line without addresses."""
    make, text = KERNELS[every], repr(kernel_of(every))
    model = "linear_full" if every in FULL_DATA else "linear"
    assert text.startswith(f"{make.func.__name__}(model={model}, step_size=0.0")
    assert text.endswith(")") and len(text) < 150 and "object at" not in text
    for name in set(make.keywords) - {"step_size"}:
        assert f"{name}=" in text
    assert "max_bias" not in text and "friction=0" not in text


def test_states_are_documented_and_share_their_fields(every):
    state = KERNELS[every].func.state_class
    assert state._fields[:3] == ("i", "z", "potential_energy")
    assert state._fields[-1] == "rng_key"
    assert all(f"**{field}** - " in state.__doc__ for field in state._fields)
