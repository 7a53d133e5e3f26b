"""What every objective promises: one table of constructors, one test for each promise."""

from functools import partial
import math
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
import optax
import pytest

from numpyro_ext.diagnostics import InferenceWarning
from numpyro_ext.guides import Implicit
from numpyro_ext.objectives import (
    IWELBO,
    VIMCO,
    VRELBO,
    AmortizedMCMC,
    AuxiliaryELBO,
    BBAlphaELBO,
    ChiUpperBound,
    CurvatureELBO,
    DensityRatioELBO,
    FDivergence,
    FilteringELBO,
    FisherDivergence,
    ImplicitELBO,
    KLWeightedELBO,
    MixtureELBO,
    NestedVRELBO,
    PosteriorRegularizedELBO,
    ReweightedWakeSleep,
    SteinDiscrepancy,
    TailAdaptive,
    ThermodynamicELBO,
)
from numpyro_ext.scores import LogisticRatio


def hinge(mean):
    return jax.nn.relu(2.0 - mean)


OBJECTIVES = {
    "VRELBO": lambda **kwargs: VRELBO(0.5, 3, **kwargs),
    "VRELBO single": lambda **kwargs: VRELBO(-math.inf, 3, gradient="single", **kwargs),
    "VRELBO stl": lambda **kwargs: VRELBO(1.5, 3, gradient="stl", **kwargs),
    "VRELBO dreg": lambda **kwargs: VRELBO(0.5, 3, gradient="dreg", **kwargs),
    "IWELBO": lambda **kwargs: IWELBO(3, **kwargs),
    "BBAlphaELBO": lambda **kwargs: BBAlphaELBO(0.5, 3, **kwargs),
    "NestedVRELBO": lambda **kwargs: NestedVRELBO(0.5, 3, num_inner=2, **kwargs),
    "VIMCO": lambda **kwargs: VIMCO(0.5, 3, **kwargs),
    "ReweightedWakeSleep": lambda **kwargs: ReweightedWakeSleep(3, **kwargs),
    "ChiUpperBound": lambda **kwargs: ChiUpperBound(2.0, 3, **kwargs),
    "FDivergence": lambda **kwargs: FDivergence("hellinger", 3, **kwargs),
    "FilteringELBO": lambda **kwargs: FilteringELBO(3, **kwargs),
    "DensityRatioELBO": lambda **kwargs: DensityRatioELBO(3, ratio=LogisticRatio(), **kwargs),
    "FisherDivergence": lambda **kwargs: FisherDivergence(3, **kwargs),
    "ThermodynamicELBO": lambda **kwargs: ThermodynamicELBO(3, 3, **kwargs),
    "ImplicitELBO": lambda **kwargs: ImplicitELBO(3, **kwargs),
    "AmortizedMCMC, KL": lambda **kwargs: AmortizedMCMC(3, 2, divergence="kl", **kwargs),
    "SteinDiscrepancy": lambda **kwargs: SteinDiscrepancy(3, **kwargs),
    "AmortizedMCMC": lambda **kwargs: AmortizedMCMC(3, 2, transition="mala", **kwargs),
    "KLWeightedELBO": lambda **kwargs: KLWeightedELBO(0.5, Trace_ELBO(3, **kwargs)),
    "MixtureELBO, Gershman": lambda **kwargs: MixtureELBO(3, "gershman", **kwargs),
    "MixtureELBO": lambda **kwargs: MixtureELBO(3, **kwargs),
    "PosteriorRegularizedELBO": lambda **kwargs: PosteriorRegularizedELBO(
        Trace_ELBO(3, **kwargs), {"ratio": hinge}, 3, **kwargs
    ),
    "CurvatureELBO": lambda **kwargs: CurvatureELBO("fisher", 3, **kwargs),
}
# The last two have a base of NumPyro's, whose minibatch takes a key; a filter has no minibatch.
WITHOUT_UNITS = {
    "CurvatureELBO",
    "FilteringELBO",
    "MixtureELBO",
    "MixtureELBO, Gershman",
    "KLWeightedELBO",
    "PosteriorRegularizedELBO",
}
X = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])
TRACES = []


def model(x, broken=False):
    """Constrained and deterministic sites, and a minibatch."""
    TRACES.append(1)
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.5))
    numpyro.deterministic("ratio", loc / scale)
    with numpyro.plate("data", len(x), subsample_size=4):
        batch = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(jnp.where(broken, jnp.nan, loc), scale), obs=batch)


def guide(x, broken=False):
    m = numpyro.param("m", 0.5)
    s = numpyro.param("s", 0.4, constraint=dist.constraints.positive)
    numpyro.sample("loc", dist.Normal(m, s))
    numpyro.sample("scale", dist.LogNormal(0.1, s))


def draws_alone(x, broken=False):
    m, s = numpyro.param("m", 0.5), numpyro.param("s", 0.4)
    e = numpyro.sample("e", dist.Normal().expand([2]).to_event(1), infer={"is_auxiliary": True})
    numpyro.sample("loc", Implicit(m + s * e[0]))
    numpyro.sample("scale", Implicit(jnp.exp(s * e[1]), support=dist.constraints.positive))


def normals_alone(x, broken=False):
    m, s = numpyro.param("m", 0.5), numpyro.param("s", 0.4)
    numpyro.sample("loc", dist.Normal(m, s))
    u = numpyro.sample("u", dist.Normal(0.1, s), infer={"is_auxiliary": True})
    numpyro.sample("scale", dist.Delta(jnp.exp(u), log_density=-u))


def walk(x, broken=False, obs=True):
    def step(z, x):
        z = numpyro.sample("z", dist.Normal(jnp.where(broken, jnp.nan, z) + m, s))
        return z, numpyro.sample("x", dist.Normal(z, 0.7), obs=x) if obs else None

    m, s = numpyro.param("m", 0.5), numpyro.param("s", 0.4)
    scan(step, 0.3, x)


GUIDES = {
    "ImplicitELBO": draws_alone,
    "CurvatureELBO": normals_alone,
    "FilteringELBO": partial(walk, obs=False),
}
MODELS = {"FilteringELBO": walk}


def components(params):
    """The guide as a mixture of one normal, over the logarithm of the scale."""
    loc, scale = jnp.array([[params["m"], 0.1]]), jnp.full((1, 2), params["s"])
    return jnp.ones(1), dist.Normal(loc, scale).to_event(1)


guide.components = components

# What the base does for all is shown on two members: the first with units, the second without.
shared = pytest.mark.parametrize("name", ["ThermodynamicELBO", "NestedVRELBO"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch")
@pytest.mark.filterwarnings("ignore:the loss is NaN")
@shared
def test_steps(name):
    """Pickled, with init_params: stable_update keeps a finite state, and nothing traces again."""
    loss = pickle.loads(pickle.dumps(OBJECTIVES[name]()))
    svi = SVI(model, guide, optax.adam(0.05), loss)
    state = svi.init(random.key(0), X, init_params={"m": jnp.array(0.7)})
    assert svi.get_params(state)["m"] == pytest.approx(0.7)
    step = jax.jit(svi.stable_update)
    with pytest.warns(InferenceWarning, match="not finite in a step"):
        kept, loss = jax.block_until_ready(step(state, X, broken=True))
    assert jnp.isnan(loss)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, svi.get_params(kept), svi.get_params(state)))
    traced = len(TRACES)
    for _ in range(3):
        kept, loss = step(kept, X, broken=False)
    assert len(TRACES) == traced
    assert jnp.isfinite(loss)
    assert svi.get_params(kept)["m"] != pytest.approx(0.7)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*takes the noise of a minibatch")
def test_pickled_objectives_are_finite_unless_the_model_is_not():
    losses = [
        (pickle.loads(pickle.dumps(make())), MODELS.get(name, model), GUIDES.get(name, guide))
        for name, make in OBJECTIVES.items()
    ]
    params = {"m": 0.5, "s": 0.4}

    @jax.jit
    def values(broken):
        return jnp.array([l.loss(random.key(0), params, p, q, X, broken) for l, p, q in losses])

    assert jnp.all(jnp.isfinite(values(False)))
    assert not jnp.any(jnp.isfinite(values(True)))


def rows_of(size):
    """A model of which a minibatch has the same three rows for every size, and its guides."""
    x = jnp.array([0.5, -1.0, 2.0])

    def rows():
        return numpyro.plate("data", size, subsample_size=3)

    def model():
        with rows():
            z = numpyro.sample("z", dist.Normal(0.3, 1.0))
            numpyro.deterministic("ratio", 2.0 * z)
            numpyro.sample("x", dist.Normal(z, 0.8), obs=x)

    def guide():
        with rows():
            numpyro.sample("z", dist.Normal(numpyro.param("m", 0.5) * x, 0.4))

    def by_noise(site=lambda loc: Implicit(loc)):
        with rows():
            e = numpyro.sample("e", dist.Normal(), infer={"is_auxiliary": True})
            numpyro.sample("z", site(numpyro.param("m", 0.5) * x + 0.4 * e))

    class WithReverse:
        def __call__(self):
            by_noise(lambda loc: dist.Normal(loc, 0.3))

        def reverse_log_prob(self, params, aux, latents):
            return dist.Normal(latents["z"], 0.7).log_prob(aux["e"])

    return model, {"ImplicitELBO": by_noise, "AuxiliaryELBO": WithReverse()}, guide


@pytest.mark.slow
def test_three_rows_of_six_have_twice_the_loss_and_the_gradient_of_three():
    """If plates enclose every site, and the same is drawn."""
    makers = {**OBJECTIVES, "AuxiliaryELBO": lambda: AuxiliaryELBO(3)}
    losses = {name: make() for name, make in makers.items() if name not in WITHOUT_UNITS}

    def values(m, size):
        model, guides, guide = rows_of(size)
        return jnp.stack(
            [
                loss.loss(random.key(2), {"m": m}, model, guides.get(name, guide))
                for name, loss in losses.items()
            ]
        )

    both = jax.jit(lambda m: [jax.jvp(lambda m: values(m, n), (m,), (1.0,)) for n in (3, 6)])  # noqa: B023
    (three, of_three), (six, of_six) = both(0.5)
    np.testing.assert_allclose(six, 2 * three, rtol=1e-5)
    np.testing.assert_allclose(of_six, 2 * of_three, rtol=1e-4)


FINITE_BY_HALF = {
    **{VRELBO(0.5, 20, gradient=g): True for g in ("standard", "single", "stl", "dreg")},
    ChiUpperBound(2.0, 20): True,
    FDivergence("chi2", 20): True,
    FDivergence("kl_qp", 20): False,
    FDivergence(TailAdaptive(), 20): False,
    ThermodynamicELBO(2, 20): False,
    ThermodynamicELBO(2, 20, gradient="pathwise"): False,
    ThermodynamicELBO(2, 20, bound="upper"): True,
    ThermodynamicELBO(2, 20, bound="upper", gradient="pathwise"): True,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the loss is NaN")
def test_weights_of_minus_infinity_leave_finite_gradients():
    """Half of the weights, all of them, and a model that is not a number."""

    def values(m, threshold, otherwise):
        def model():
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.factor("half", jnp.where(z > threshold, 0.0, otherwise))

        def guide():
            numpyro.sample("z", dist.Normal(numpyro.param("m", 0.1), 1.0))

        return jnp.stack(
            [loss.loss(random.key(0), {"m": m}, model, guide) for loss in FINITE_BY_HALF]
        )

    def both(*setting):
        return values(0.1, *setting), jax.jacrev(values)(0.1, *setting)

    settings = jnp.array([0.0, jnp.inf, 0.0]), jnp.array([-jnp.inf, -jnp.inf, jnp.nan])
    (half, none, wrong), gradients = jax.jit(jax.vmap(both))(*settings)
    assert np.isfinite(half).tolist() == list(FINITE_BY_HALF.values())
    assert np.all(none == np.inf) and np.all(np.isnan(wrong))
    assert np.all(np.isfinite(gradients[:2]))
