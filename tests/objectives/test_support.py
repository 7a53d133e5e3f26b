"""What each objective takes, and the sentence where it does not. Nothing is compiled."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext import objectives
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    BBAlphaELBO,
    ChiUpperBound,
    FDivergence,
    FisherDivergence,
    NestedVRELBO,
    Objective,
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
    FisherDivergence(3): (False, False, False),
    ThermodynamicELBO(3, 3): (False, True, True),
    ThermodynamicELBO(3, 3, gradient="pathwise"): (False, False, True),
    ThermodynamicELBO(3, 3, bound="upper"): (False, True, False),
}
# What these take and refuse is in the test files of their own.
OF_OTHER_GUIDES = {
    "AmortizedMCMC",
    "AuxiliaryELBO",
    "CurvatureELBO",
    "DensityRatioELBO",
    "ImplicitELBO",
    "MixtureELBO",
    "PosteriorRegularizedELBO",
    "SemiImplicitELBO",
    "SteinDiscrepancy",
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

    sentence = "no density.*SVGD of numpyro_ext.particles"
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


@table
def test_a_guide_with_the_wrong_support_and_data_with_nan(loss, minibatch, discrete, model_params):
    def model(x):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("x", dist.Normal(0.0, scale), obs=x)

    def guide(x):
        numpyro.sample("scale", dist.Normal(1.0, 0.1))

    def positive(x):
        numpyro.sample("scale", dist.LogNormal(0.0, 0.1))

    x = jnp.array([1.0, 2.0])
    assert_refuses("site 'scale' has the support positive", loss, NONE, model, guide, x)
    assert_refuses("site 'x' have 1 NaN", loss, NONE, model, positive, x.at[0].set(jnp.nan))
    assert accepts(loss, model, positive, x)


@pytest.mark.parametrize("make", [VRELBO, BBAlphaELBO, NestedVRELBO, VIMCO, ChiUpperBound])
def test_a_count_in_the_place_of_an_order(make):
    name = make.__name__
    words = rf"{name}\(10\) is of order 10.*{name}\(num_particles=10\).*{name}\(10.0\)"
    with pytest.raises(ValueError, match=words):
        make(10)
    for loss in (make(10.0), make(10, 4), make(10, num_particles=4)):
        assert "10.0, num_particles=" in repr(loss)
    assert make(2) is not None
    assert make(num_particles=10).num_particles == 10
    assert IWELBO(10).num_particles == 10


def test_a_class_in_place_of_a_loss():
    for loss in (VRELBO, IWELBO):
        svi = SVI(linear_gaussian, AutoNormal(linear_gaussian), optax.sgd(0.1), loss)
        state = svi.init(random.key(0), 1.5)
        for call in (svi.update, svi.evaluate):
            with pytest.raises(TypeError, match=r"the loss is a class.*loss=VRELBO\(\)"):
                call(state, 1.5)


def test_objectives_print_as_summaries():
    every = {getattr(objectives, name) for name in objectives.__all__}
    losses = {one for one in every if isinstance(one, type) and issubclass(one, Objective)}
    in_table = {type(loss).__name__ for loss in SUPPORT}
    assert in_table | OF_OTHER_GUIDES == {loss.__name__ for loss in losses - {Objective}}
    for loss in SUPPORT:
        assert repr(loss).startswith(f"{type(loss).__name__}(")
        assert "num_particles=3" in repr(loss)
    assert repr(VRELBO(0.5, 10)) == "VRELBO(alpha=0.5, num_particles=10, gradient='standard')"
    assert repr(IWELBO(10, vectorize_particles=False)) == (
        "IWELBO(num_particles=10, vectorize_particles=False, gradient='standard')"
    )
    assert repr(FDivergence(TailAdaptive())) == (
        "FDivergence(f=TailAdaptive(beta=-1.0), num_particles=10)"
    )
    assert "num_partitions=100" in repr(ThermodynamicELBO(100))
    assert len(repr(ThermodynamicELBO(100))) < 150
