"""Reading a model: what is found, the flat order, and what is refused."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.infer import SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoDiagonalNormal
import optax
import pytest

from numpyro_ext._model.checks import read_global
from numpyro_ext._model.read import (
    frames,
    is_data,
    is_delta,
    not_reparameterized,
    plate_sizes,
    read_model,
    trace_of,
)
from tests._model.models import ORDER, ROWS, SIZE, data, unordered
from tests.mcmc.models import arrays_of_size


def test_flat_order_is_that_in_which_the_model_samples():
    info = read_model(unordered, (data(),))
    assert tuple(info.latents) == ORDER
    assert tuple(sorted(ORDER)) != ORDER
    assert info.size == SIZE
    stops = np.cumsum([1, 2, 6, 2])
    assert [info.slices[name].stop for name in ORDER] == list(stops)
    assert [info.slices[name].start for name in ORDER] == [0, *stops[:-1]]


@pytest.mark.slow
@pytest.mark.x64
def test_flat_order_is_that_of_numpyros_guides(tol):
    """The median of a Gaussian guide whose mean is x is what ``unravel`` makes of x."""
    guide = AutoDiagonalNormal(unordered, init_loc_fn=init_to_median)
    svi = SVI(unordered, guide, optax.adam(0.01), Trace_ELBO())
    params = svi.get_params(svi.init(random.key(0), data()))
    x = jnp.linspace(-1.0, 1.5, SIZE)
    median = guide.median(params | {"auto_loc": x})
    info = read_model(unordered, (data(),))
    z = info.unravel(x)
    for name in ORDER:
        expected = biject_to(info.latents[name].support)(z[name])
        assert jnp.allclose(median[name], expected, atol=tol(1e-6, 1e-12)), name


def test_ravel_and_unravel_are_inverse():
    info = read_model(unordered, (data(),))
    x = jnp.arange(float(SIZE))
    z = info.unravel(x)
    assert {name: value.shape for name, value in z.items()} == {
        name: latent.unconstrained.shape for name, latent in info.latents.items()
    }
    assert jnp.array_equal(z["basis"], 3 + jnp.arange(6.0).reshape(2, 3))
    assert jnp.array_equal(info.ravel(z), x)
    assert jnp.array_equal(info.ravel(dict(sorted(z.items()))), x)
    assert jnp.array_equal(info.ravel(info.unravel(np.asarray(x))), x)
    for name, where in info.slices.items():
        assert jnp.array_equal(x[where], jnp.ravel(z[name]))


def test_says_what_the_model_contains():
    def model(x):
        scale = numpyro.param("scale", 2.0)
        with numpyro.plate("groups", 3):
            v = numpyro.sample("v", dist.Normal(0.0, scale))
        numpyro.factor("soft", -jnp.sum(v**2))
        numpyro.deterministic("total", v.sum())
        with numpyro.plate("rows", ROWS, subsample_size=2):
            u = numpyro.sample("u", dist.Beta(2.0, 3.0))
            numpyro.sample("x", dist.Normal(u, 1.0), obs=numpyro.subsample(x, event_dim=0))

    info = read_model(model, (data(),))
    assert info.plates == {"rows": (ROWS, 2)}
    assert info.data_plates == {"rows"}
    assert info.deterministic == ("total",)
    assert info.params == ("scale",)
    assert {name: latent.plates for name, latent in info.latents.items()} == {
        "v": ("groups",),
        "u": ("rows",),
    }
    assert info.latents["u"].constrained.shape == (2,)
    with pytest.raises(ValueError, match="'u' is local to the subsampled plate 'rows', and it is"):
        read_global(model, (data(),), {}, because="it is")


def test_nothing_is_local_without_a_minibatch():
    found = read_global(unordered, (data(),), {"subsample_size": 3}, because="it has none")
    assert found.plates == {"rows": (ROWS, 3)}
    assert read_model(unordered, (data(),), {"subsample_size": ROWS}).plates == {}


def test_reading_computes_nothing():
    """The values are abstract, and nothing has the size of a plate that takes a minibatch."""
    seen = []

    def model():
        z = numpyro.sample("z", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", 1_000, subsample_size=10) as idx:
            numpyro.sample("x", dist.Normal(z, 1.0), obs=jnp.cos(idx))
        seen.append(isinstance(z, jax.core.Tracer))

    alive = len(jax.live_arrays())
    info = read_model(model)
    assert len(jax.live_arrays()) == alive
    assert all(seen)
    assert info.plates == {"rows": (1_000, 10)}
    jaxpr = jax.make_jaxpr(lambda: read_model(model) and None)().jaxpr
    assert not arrays_of_size(jaxpr, 1_000)
    shapes = jax.make_jaxpr(lambda: trace_of(handlers.seed(model, 0))["x"]["value"])().jaxpr
    assert arrays_of_size(shapes, 1_000), "the check itself is blind"


def test_a_support_may_depend_on_another_site():
    def model():
        low = numpyro.sample("low", dist.HalfNormal(2.0))
        numpyro.sample("high", dist.Uniform(low, 5.0).expand((3,)).to_event(1))

    assert read_model(model).latents["high"].unconstrained.shape == (3,)


def test_a_model_without_latents_is_refused():
    with pytest.raises(ValueError, match="no latent sample site"):
        read_model(lambda: numpyro.sample("x", dist.Normal(), obs=0.0))


@pytest.mark.parametrize(
    ("fn", "remedy"),
    [(dist.Bernoulli(0.3), "sum it out of the model"), (dist.Poisson(3.0), "HMCGibbs")],
)
def test_a_discrete_latent_is_refused_with_a_remedy_that_exists(fn, remedy):
    """NumPyro's ``DiscreteHMCGibbs`` takes only what could be summed out."""
    with pytest.raises(ValueError, match=f"'k' is discrete.*{remedy}") as error:
        read_model(lambda: numpyro.sample("k", fn))
    assert "DiscreteHMCGibbs" not in str(error.value)


@pytest.mark.parametrize("fn", [dist.Bernoulli(0.3), dist.Poisson(3.0)])
def test_a_discrete_site_with_an_obs_mask_is_refused_by_its_name(fn):
    mask = jnp.array([True, False])

    def model():
        numpyro.sample("p", dist.Normal())
        with numpyro.plate("rows", 2):
            numpyro.sample("y", fn, obs=jnp.ones(2, int), obs_mask=mask)

    with pytest.raises(ValueError, match=r"site 'y' has an obs_mask.*handlers.mask\(mask"):
        read_model(model)


def test_values_are_checked_by_name_and_shape():
    info = read_model(unordered, (data(),))
    good = {name: np.ones(latent.unconstrained.shape) for name, latent in info.latents.items()}
    checked = info.check_unconstrained("init_params", good)
    assert all(
        checked[name].dtype == latent.unconstrained.dtype for name, latent in info.latents.items()
    )
    chains = {name: np.ones((4, *value.shape)) for name, value in good.items()}
    info.check_unconstrained("init_params", chains, (4,))
    with pytest.raises(ValueError, match=r"init_params has shape .* at site 'loc'"):
        info.check_unconstrained("init_params", good | {"loc": np.ones(3)})
    with pytest.raises(ValueError, match=r"center has \['tau'\].*'basis', 'loc', 'shares', 'tau'"):
        info.check_unconstrained("center", {"tau": 1.0})
    with pytest.raises(ValueError, match="center has ndarray"):
        info.check_unconstrained("center", np.ones(SIZE))


def test_kinds_of_sites():
    def program():
        numpyro.sample("pathwise", dist.Gamma(2.0, 1.0))
        numpyro.sample("counted", dist.Poisson(3.0))
        numpyro.sample("noise", dist.Bernoulli(0.5).mask(False))
        numpyro.sample("fixed", dist.Delta(jnp.ones(2)).to_event(1))
        numpyro.factor("soft", -1.0)
        with numpyro.plate("rows", 10, subsample_size=4, dim=-2), numpyro.plate("columns", 3):
            numpyro.sample("x", dist.Normal().mask(True), obs=jnp.ones((4, 3)))

    trace = trace_of(handlers.seed(program, 0))
    assert not_reparameterized(trace) == ("counted",)
    assert [name for name, site in trace.items() if is_data(site)] == ["x"]
    assert [n for n, s in trace.items() if s["type"] == "sample" and is_delta(s)] == ["fixed"]
    assert frames(trace["x"]) == {"rows": -2, "columns": -1}
    assert plate_sizes(trace) == {"rows": (10, 4), "columns": (3, 3)}
