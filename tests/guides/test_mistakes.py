"""What newcomers give to guides by mistake: each is answered by one sentence."""

from functools import cache, partial

from jax import random
from jax.example_libraries import stax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
import optax
import pytest

from numpyro_ext.guides import AutoMAFNormal, AutoRealNVPNormal, AutoSemiImplicit, FlowGuide
from numpyro_ext.objectives import VRELBO, SemiImplicitELBO
from numpyro_ext.particles import SVGD, AutoParticles

X = jnp.ones((5, 2))


def model(x=None):
    numpyro.sample("z", dist.Normal(0.0, 1.0).expand([4]).to_event(1))


def local(x):
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("x", dist.Normal(z, 0.5).to_event(1), obs=x)


def dense(width):
    return stax.Dense(width)


def call(guide, *args):
    return handlers.seed(guide, 0)(*args)


def flow_guide(features=lambda x: x):
    return FlowGuide(local, dense(7), plate="rows", features=features)


def set_up(make):
    guide = make(model)
    call(guide)
    return guide


maf = cache(partial(set_up, partial(AutoMAFNormal, init_from=None)))


def first_step(guide):
    """As ``svi.run`` with one of the package's losses, whose ``init`` passes with this guide."""
    svi = SVI(local, guide, optax.adam(1e-2), VRELBO(0.5))
    return svi.update(svi.init(random.key(0), X), X)


def start_from(guide, params):
    return AutoRealNVPNormal(model, init_from=(guide, params))


A_CLASS = r"must be a function; .* pass it a guide and not its class"


@pytest.mark.parametrize(
    ("mistake", "error", "match"),
    [
        # The class of a guide in place of a guide.
        (lambda: call(AutoRealNVPNormal, X), TypeError, rf"AutoRealNVPNormal was .*{A_CLASS}"),
        (lambda: first_step(AutoNormal), TypeError, r"the class AutoNormal; give SVI an instance"),
        # Parameters of something else.
        (
            lambda: flow_guide().sample_posterior(random.key(0), {}, X),
            ValueError,
            r"params has no 'auto_net\$params' but \[\]",
        ),
        (
            # Params of AutoMultivariateNormal, say: the networks would be those of the start.
            lambda: maf().quantiles({"auto_loc": jnp.zeros(4), "auto_scale": jnp.ones(4)}, 0.5),
            ValueError,
            "params has no 'auto_.*0.* but .*gives for this AutoMAFNormal",
        ),
        (
            # Its factor would be that of the start, without a word.
            lambda: start_from(set_up(AutoMultivariateNormal), {"auto_loc": jnp.zeros(4)}),
            ValueError,
            "params has no 'auto_scale_tril' but .*gives for this AutoMultivariateNormal",
        ),
    ],
)
def test_is_answered_by_a_sentence(mistake, error, match):
    with pytest.raises(error, match=match):
        mistake()


def bounded(y, total=jnp.sum, fastest=jnp.min):
    shift = numpyro.sample("shift", dist.Uniform(0.0, fastest(y)))
    numpyro.deterministic("total", shift + total(y))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(shift, 1.0), obs=y)


DATA = jnp.array([2.0, 3.0]), jnp.array([5.0, 6.0, 7.0])
FITS = {
    "flow": (partial(AutoRealNVPNormal, init_from=None), Trace_ELBO()),
    "semi-implicit": (partial(AutoSemiImplicit, init_from=None), SemiImplicitELBO()),
    "particles": (partial(AutoParticles, num_particles=20, init_from=None), SVGD()),
}


def started_twice(fit, **options):
    make, loss = FITS[fit]
    svi = SVI(bounded, make(bounded), optax.sgd(0.0), loss)
    for y in DATA:
        state = svi.init(random.key(0), y, **options)
    return svi.guide, svi.get_params(state)


@pytest.mark.parametrize(
    "fastest", [jnp.min, lambda y: float(np.asarray(y).min())], ids=["array", "float"]
)
@pytest.mark.parametrize("fit", FITS)
def test_a_fit_to_other_data_with_other_bounds(fit, fastest):
    with pytest.raises(ValueError, match="'shift' has other bounds than when this Auto"):
        started_twice(fit, fastest=fastest)


@pytest.mark.parametrize("fit", FITS)
def test_draws_without_arguments_after_a_fit_to_other_data(fit):
    guide, params = started_twice(fit, fastest=lambda y: 2.0)
    for ask in (guide.median, partial(guide.sample_posterior, random.key(1))):
        with pytest.raises(ValueError, match="two sets of arguments, with which 'total' differs"):
            ask(params)
    for y in DATA:
        drawn = guide.sample_posterior(random.key(1), params, y, sample_shape=(20,))
        assert jnp.allclose(drawn["total"], drawn["shift"] + y.sum())


@pytest.mark.parametrize("fit", FITS)
def test_other_data_without_a_difference_are_no_mistake(fit):
    guide, params = started_twice(fit, total=len, fastest=lambda y: jnp.full((), 2.0))
    with pytest.raises(ValueError, match="'total' differs"):
        guide.sample_posterior(random.key(1), params)
    guide, params = started_twice(fit, total=lambda y: 0.0, fastest=lambda y: jnp.full((), 2.0))
    drawn = guide.sample_posterior(random.key(1), params, sample_shape=(20,))
    assert jnp.array_equal(drawn["total"], drawn["shift"])
