"""Starts of chains and particles: those of NumPyro's kernels, in one compiled program."""

from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer import init_to_median, init_to_uniform, init_to_value
from numpyro.infer.util import initialize_model
import pytest

from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext._model.start import draw_start, prior_center, start_near_median
from tests._model.models import ROWS, data, straight


def picky(x):
    """Finite for a positive mean above 1 only, which the first tries of a start seldom are."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    cut = numpyro.sample("cut", dist.Exponential(1.0))
    numpyro.factor("above", jnp.where(mean > 1.0, 0.0, -jnp.inf))
    numpyro.sample("x", dist.Normal(mean, cut).expand((ROWS,)).to_event(1), obs=x)


@pytest.mark.parametrize(
    ("model", "init_strategy", "chains"),
    [
        (straight, init_to_uniform, None),
        (straight, init_to_median, None),
        (straight, init_to_value(values={"noise": 2.0}), 3),
        (picky, init_to_uniform, None),
        (picky, init_to_uniform, 3),
    ],
    ids=["uniform", "median", "value", "not finite at first", "one of several not finite"],
)
def test_starts_where_numpyros_kernels_start(model, init_strategy, chains):
    """The same numbers for the same key, for one chain and for several, in the flat order."""
    key = random.key(7) if chains is None else random.split(random.key(7), chains)
    expected = initialize_model(
        key, model, init_strategy=init_strategy, model_args=(data(),), validate_grad=False
    )
    info = read_model(model, (data(),))
    z, potential, _ = draw_start(key, model, info, (data(),), {}, init_strategy=init_strategy)
    assert tuple(z) == tuple(info.latents)
    for name, x in z.items():
        assert jnp.allclose(x, expected.param_info.z[name], rtol=1e-6, atol=1e-6)
    energy = expected.param_info.potential_energy
    assert jnp.allclose(potential, energy, rtol=1e-6, atol=1e-6)
    assert jnp.all(jnp.isfinite(potential))
    if model is picky:
        assert jnp.all(z["mean"] > 1.0)


def test_starts_without_a_draw_of_all_rows():
    """The first rows are as good as any for a start, and the rows of a plate may be many."""

    def model():
        z = numpyro.sample("z", dist.Normal())
        with numpyro.plate("rows", 10**9, subsample_size=4) as idx:
            numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.cos(idx))

    info = read_model(model)
    z, potential, _ = draw_start(random.key(0), model, info, (), {})
    there = Potential(model, info, {}, (), {})(z, {"rows": jnp.arange(4)})
    assert jnp.allclose(potential, there)


@pytest.mark.filterwarnings("ignore:init_to_uniform.. skipping:UserWarning")
def test_a_value_by_substitute_is_a_start():
    """As in NumPyro, such a site stays latent; a site with a value has no key of its own."""
    begun = substitute(straight, data={"noise": 0.3})
    potential = Potential(begun, read_model(begun, (data(),)), {}, (data(),), {})
    median, sds = prior_center(random.key(0), begun, potential)
    assert jnp.allclose(potential.info.unravel(median)["noise"], jnp.log(0.3))
    assert jnp.all(sds > 0.3)
    assert jnp.isfinite(start_near_median(random.key(0), begun, potential)[1])


def test_the_center_of_the_prior_leaves_out_sites_that_are_summed_out():
    """Of a model of life and death, in which discrete sites have no unconstrained space."""
    pytest.importorskip("funsor")

    def model(enumerated):
        stays = numpyro.sample("stays", dist.Normal(-1.0, 0.5))
        seen = numpyro.sample("seen", dist.LogNormal(2.0, 0.1))
        if enumerated:
            alive = numpyro.sample("alive", dist.Bernoulli(logits=stays))
            numpyro.sample("y", dist.Poisson(0.1 + seen * alive), obs=jnp.array(0))

    infos = [read_model(model, (enumerated,), sums=True) for enumerated in (True, False)]
    potentials = [Potential(model, info, {}, (i == 0,), {}) for i, info in enumerate(infos)]
    (median, sds), expected = (prior_center(random.key(0), model, u) for u in potentials)
    # Of 100 draws a quartile is off by 0.14 standard deviations.
    assert jnp.allclose(median, jnp.array([-1.0, 2.0]), atol=jnp.array([0.3, 0.06]))
    assert jnp.allclose(sds, jnp.array([0.5, 0.1]), rtol=0.5)
    assert jnp.allclose(median, expected[0]) and jnp.allclose(sds, expected[1])
