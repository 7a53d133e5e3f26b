"""What each objective takes, and the sentence where it does not. Nothing is compiled."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    BBAlphaELBO,
    ChiUpperBound,
    FDivergence,
    NestedVRELBO,
    TailAdaptive,
    ThermodynamicELBO,
)
from tests.objectives.compare import assert_refuses
from tests.objectives.models import (
    NONE,
    X_LOCAL,
    global_model,
    linear_gaussian,
    local_guide,
    local_model,
    mixed_guide,
    mixed_model,
    normal_guide,
)

# objective: (locals and globals with a minibatch, discrete sites, parameters of the model)
SUPPORT = {
    VRELBO(0.5, 3): (False, False, True),
    VRELBO(1.0, 3): (True, False, True),
    IWELBO(3): (False, False, True),
    BBAlphaELBO(0.5, 3): (True, False, True),
    NestedVRELBO(0.5, 3): (True, False, True),
    NestedVRELBO(-math.inf, 3): (True, False, True),
    VIMCO(0.5, 3): (False, True, True),
    ChiUpperBound(2.0, 3): (False, False, False),
    FDivergence("kl_pq", 3): (False, False, True),
    FDivergence(TailAdaptive(), 3): (False, False, True),
    ThermodynamicELBO(3, 3): (False, True, True),
    ThermodynamicELBO(3, 3, gradient="pathwise"): (False, False, True),
    ThermodynamicELBO(3, 3, bound="upper"): (False, True, False),
}
table = pytest.mark.parametrize(
    ("loss", "minibatch", "discrete", "model_params"),
    [(loss, *row) for loss, row in SUPPORT.items()],
    ids=[f"{type(loss).__name__}-{i}" for i, loss in enumerate(SUPPORT)],
)


def accepts(loss, model, guide, *args):
    value = jax.eval_shape(lambda key: loss.loss(key, NONE, model, guide, *args), random.key(0))
    return value.shape == ()


@table
def test_minibatch_of_globals_and_locals(loss, minibatch, discrete, model_params):
    assert accepts(loss, mixed_model, mixed_guide)
    if minibatch:
        assert accepts(loss, mixed_model, mixed_guide, X_LOCAL, 2)
    else:
        sentence = f"{type(loss).__name__}: latent site 'z' .*NestedVRELBO or BBAlphaELBO"
        assert_refuses(sentence, loss, NONE, mixed_model, mixed_guide, batch=2)


@table
def test_discrete_sites(loss, minibatch, discrete, model_params):
    def model():
        with numpyro.plate("data", 2):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(1.0 * z, 1.0), obs=jnp.array([0.5, 1.0]))

    def guide():
        p = numpyro.param("p", 0.4)
        with numpyro.plate("data", 2):
            numpyro.sample("z", dist.Bernoulli(p))

    if discrete:
        assert accepts(loss, model, guide)
    else:
        sentence = r"guide site 'z' \(Bernoulli.*\) is not reparameterised.*VIMCO or Thermodynamic"
        assert_refuses(sentence, loss, NONE, model, guide)


@table
def test_parameters_of_the_model(loss, minibatch, discrete, model_params):
    for model, guide, batch in ((local_model, local_guide, 2), (global_model, normal_guide, None)):
        if model_params:
            assert accepts(loss, model, guide, X_LOCAL, batch)
        else:
            sentence = f"{type(loss).__name__}: the model has the param site 'b'.*VRELBO"
            assert_refuses(sentence, loss, NONE, model, guide, X_LOCAL, batch)


@table
def test_implicit_guides(loss, minibatch, discrete, model_params):
    def model():
        with numpyro.plate("data", 2):
            numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("x", dist.Normal(0.0, 1.0), obs=jnp.zeros(2))

    def guide():
        with numpyro.plate("data", 2):
            e = numpyro.sample("e", dist.Normal(), infer={"is_auxiliary": True})
            numpyro.sample("z", Implicit(jnp.tanh(e)))

    sentence = "no density.*particles.SVGD"
    assert_refuses(sentence, loss, NONE, model, guide, error=IntractableDensityError)


@table
def test_a_model_without_sites_and_a_guide_without_a_latent(
    loss, minibatch, discrete, model_params
):
    def empty(*args):
        pass

    assert_refuses("the model has no sample site", loss, NONE, empty, empty)
    assert_refuses(
        "latent site 'z' .*missing in the guide", loss, NONE, linear_gaussian, empty, 1.5
    )
