"""What each objective takes, and the sentence where it does not. Nothing is compiled."""

import math

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_ext import objectives
from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    AmortizedMCMC,
    BBAlphaELBO,
    ChiUpperBound,
    CurvatureELBO,
    DensityRatioELBO,
    FDivergence,
    FisherDivergence,
    ImplicitELBO,
    KLWeightedELBO,
    NestedVRELBO,
    Objective,
    PosteriorRegularizedELBO,
    ReweightedWakeSleep,
    SteinDiscrepancy,
    TailAdaptive,
    ThermodynamicELBO,
)
from tests.objectives.compare import assert_refuses
from tests.objectives.models import (
    NONE,
    X_LOCAL,
    global_model,
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
    ReweightedWakeSleep(3): (False, True, True),
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
    "FilteringELBO",
    "ImplicitELBO",
    "MixtureELBO",
    "PosteriorRegularizedELBO",
    "SemiImplicitELBO",
    "SteinDiscrepancy",
    "SymmetricKL",
    "WakeSleep",
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
        sentence = f"{type(loss).__name__}: latent site 'z' .*NestedVRELBO, BBAlphaELBO"
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


@pytest.mark.parametrize("make", [VRELBO, BBAlphaELBO, NestedVRELBO, VIMCO, ChiUpperBound])
def test_a_count_in_the_place_of_an_order(make):
    name = make.__name__
    words = rf"{name}\(10\) is of order 10.*{name}\(num_particles=10\).*{name}\(10.0\)"
    with pytest.raises(ValueError, match=words):
        make(10)
    for loss in (make(10.0), make(10, 4)):
        assert "10.0, num_particles=" in repr(loss)
    assert make(2) is not None and make(num_particles=10).num_particles == 10


def test_objectives_print_as_summaries():
    every = {getattr(objectives, name) for name in objectives.__all__}
    losses = {one for one in every if isinstance(one, type) and issubclass(one, Objective)}
    in_table = {type(loss).__name__ for loss in SUPPORT}
    assert in_table | OF_OTHER_GUIDES == {loss.__name__ for loss in losses - {Objective}}
    for loss in SUPPORT:
        assert repr(loss).startswith(f"{type(loss).__name__}(")
        assert "num_particles=3" in repr(loss)
    assert repr(IWELBO(10, vectorize_particles=False)) == (
        "IWELBO(num_particles=10, vectorize_particles=False, gradient='standard')"
    )
    assert repr(FDivergence(TailAdaptive())) == (
        "FDivergence(f=TailAdaptive(beta=-1.0), num_particles=10)"
    )
    assert "num_partitions=100" in repr(ThermodynamicELBO(100))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: VRELBO(math.nan), "alpha is nan"),
        (lambda: VRELBO(math.inf, gradient="dreg"), "alpha is inf; only VRELBO"),
        (lambda: VRELBO(0.5, gradient="score"), "'dreg', 'single', 'standard', 'stl'"),
        (lambda: VRELBO(0.5, 2.0), "num_particles is 2.0"),
        (lambda: BBAlphaELBO(-math.inf), "alpha is -inf; only VRELBO"),
        (lambda: VIMCO(math.inf), "alpha is inf; only VRELBO"),
        (lambda: VIMCO(num_particles=1), "must be at least 2, because the baseline"),
        (lambda: ChiUpperBound(num_particles=1), "must be at least 2, because with one"),
        (lambda: ChiUpperBound(0.5), r"order is 0.5; it must be at least 1.*VRELBO\(1 - order\)"),
        (lambda: ChiUpperBound(math.inf, gradient="dreg"), "alpha is -inf; only VRELBO"),
        (lambda: TailAdaptive(0.5), "beta is 0.5; it must be finite and at most 0"),
        (lambda: ThermodynamicELBO(num_particles=1), 'gradient="pathwise" takes it'),
        (lambda: ThermodynamicELBO(betas=(0.1, 1.0)), "they must increase from 0 to 1"),
        (lambda: ThermodynamicELBO(beta_min=1.5), "they must increase from 0 to 1"),
        (lambda: CurvatureELBO("ggn"), "curvature is 'ggn'"),
        (lambda: ReweightedWakeSleep(1), 'guide_update="sleep" takes it'),
        (lambda: ImplicitELBO(1), "must be at least 2, because the score"),
        (lambda: DensityRatioELBO(1), "must be at least 2, because one draw"),
        (lambda: SteinDiscrepancy(1), "must be at least 2, because the U-statistic"),
        (lambda: AmortizedMCMC(1), "must be at least 2, because the energy distance"),
        (lambda: PosteriorRegularizedELBO(IWELBO(), {}, 1), "the penalty of the mean is the mean"),
        (lambda: KLWeightedELBO(-0.1), "weight is -0.1; it must be a non-negative"),
    ],
)
def test_arguments_that_would_give_a_wrong_loss(make, says):
    with pytest.raises(ValueError, match=says):
        make()
