"""The promises of every Auto guide: one table of constructors, one test per law.

A new guide joins by one line in FLOWS or, if it has no log q, in GUIDES.
"""

from functools import cache, partial
import inspect
import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import StickBreakingTransform
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal
from numpyro.infer.initialization import init_to_value
from numpyro.infer.util import unconstrain_fn
import optax
import pytest

from numpyro_ext._numpyro import unpacking_of
from numpyro_ext.guides import (
    AutoAuxiliary,
    AutoGatedIAFNormal,
    AutoHouseholderNormal,
    AutoHVI,
    AutoImplicit,
    AutoLangevinDiffusion,
    AutoLaplaceGGN,
    AutoMAFNormal,
    AutoMarkov,
    AutoMatrixNormal,
    AutoMixtureNormal,
    AutoNICENormal,
    AutoPlanarNormal,
    AutoRadialNormal,
    AutoRealNVPNormal,
    AutoSemiImplicit,
    AutoSplineNormal,
    AutoStructuredNormal,
)
from numpyro_ext.objectives import ImplicitELBO, SemiImplicitELBO
from tests.guides.moved import moved

FLOWS = {
    "RealNVP": partial(AutoRealNVPNormal, num_flows=2, hidden_dims=(8,), init_from=None),
    "MAF": partial(AutoMAFNormal, hidden_dims=(9,), init_from=None),
    "gated IAF": partial(AutoGatedIAFNormal, num_flows=2, hidden_dims=(8,), init_from=None),
    "NICE": partial(AutoNICENormal, num_flows=2, hidden_dims=(8,), init_from=None),
    "spline": partial(AutoSplineNormal, hidden_dims=(8,), num_bins=4, init_from=None),
    "planar": partial(AutoPlanarNormal, num_flows=3, init_from=None),
    "radial": partial(AutoRadialNormal, num_flows=3, init_from=None),
    "Householder": partial(AutoHouseholderNormal, init_from=None),
}
GUIDES = FLOWS | {
    "mixture": partial(AutoMixtureNormal, num_components=2, init_spread=1e-3),
    "Markov": partial(AutoMarkov, init_from=None),  # the sites of two rows are its sequence
    "matrix normal": partial(AutoMatrixNormal, init_from=None),
    "structured": partial(AutoStructuredNormal, init_from=None),
    "Laplace GGN": AutoLaplaceGGN,
    "implicit": partial(AutoImplicit, hidden_dims=(8,), init_from=None),
    # These have no density of the latent vector alone; the last two start at a normal if steps are
    # short.
    "semi-implicit": partial(AutoSemiImplicit, hidden_dims=(8,), init_from=None),
    "auxiliary": partial(AutoAuxiliary, hidden_dims=(8,), init_from=None),
    "HVI": partial(AutoHVI, num_steps=2, hidden_dims=(8,), step_size=1e-3, init_from=None),
    "Langevin diffusion": partial(
        AutoLangevinDiffusion, num_steps=2, hidden_dims=(8,), step_size=1e-4, init_from=None
    ),
}
# Every other guide is trained in the tests of its own file, and is here near its start.
TRAINED = ("auxiliary",)
# The losses of guides for which Trace_ELBO is none.
LOSSES = {"implicit": ImplicitELBO(8), "semi-implicit": SemiImplicitELBO(2, 5)}
# Parameters that no draw depends on.
OF_THE_LOSS = ("reverse",)

every_guide = pytest.mark.parametrize("name", GUIDES)
# For a model of two numbers, without a sequence, a matrix, or data with a curvature.
every_other_guide = pytest.mark.parametrize(
    "name", [name for name in GUIDES if name not in ("Markov", "matrix normal", "Laplace GGN")]
)
# What the base class promises, shown on one.
one_guide = pytest.mark.parametrize("name", ["RealNVP"])
# What AutoJoint promises whatever is drawn: one guide whose latent vector has a density, and those
# that draw it in a way of their own.
every_kind = pytest.mark.parametrize(
    "name",
    ["RealNVP", "semi-implicit"]
    + [pytest.param(x, marks=pytest.mark.slow) for x in ("implicit", "auxiliary", "HVI")],
)
# In double precision too where the layer is one of AutoFlowNormal, and where it is a coupling.
every_density = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.x64 if name in ("MAF", "spline") else ())
        for name in FLOWS
    ],
)

N = 20
LINE = np.linspace(-1.0, 2.0, N)
X, Y = jnp.asarray(LINE), jnp.asarray(1.5 + 0.7 * LINE + 0.3 * np.sin(17.0 * LINE))
SITES = {"sigma": (), "mix": (3,), "b": (2, 2), "r": ()}
TRACES = []
STEPS = 40


def model(x, y=None):
    """Positive, simplex, matrix and interval sites; deterministic ones; a minibatch of 5."""
    TRACES.append(1)
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    mix = numpyro.sample(
        "mix",
        dist.TransformedDistribution(
            dist.Normal(jnp.zeros(2), 1.0).to_event(1), StickBreakingTransform()
        ),
    )
    b = numpyro.sample("b", dist.Normal(1.0, 3.0).expand([2, 2]).to_event(2))
    r = numpyro.sample("r", dist.Uniform(-1.0, 4.0))
    mu = numpyro.deterministic("mu", r + x * (mix @ jnp.arange(3.0)) * b[0, 1] + b[1].sum())
    with numpyro.plate("N", len(x), subsample_size=5):
        batch = numpyro.subsample(mu, event_dim=0)
        obs = None if y is None else numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(batch, sigma), obs=obs)


def in_support(draws):
    assert (draws["sigma"] > 0).all()
    assert jnp.allclose(draws["mix"].sum(-1), 1.0, atol=1e-5) and (draws["mix"] > 0).all()
    assert ((draws["r"] > -1) & (draws["r"] < 4)).all()
    assert all(jnp.isfinite(value).all() for value in draws.values())


def new_svi(name, the_model=model, **kwargs):
    guide = GUIDES[name](the_model, **kwargs)
    return guide, SVI(the_model, guide, optax.adam(3e-2), LOSSES.get(name, Trace_ELBO()))


@cache
def trained(name):
    guide, svi = new_svi(name)
    before = len(TRACES)
    result = svi.run(random.key(0), STEPS, X, Y, progress_bar=False)
    assert len(TRACES) - before < STEPS / 2
    return guide, svi, result


@cache
def fitted(name):
    if name in TRAINED:
        guide, svi, result = trained(name)
        return guide, svi, result.params
    guide, svi = new_svi(name)
    return guide, svi, moved(svi, 0.1, X, Y)


unconstrain = jax.jit(jax.vmap(partial(unconstrain_fn, handlers.seed(model, 0), (X, Y), {})))


@cache
def drawn(name):
    """Three draws of the fitted guide, as sites and as latent vectors."""
    guide, _, params = fitted(name)
    key = random.key(1)

    @jax.jit
    def draws(params):
        sites = guide.sample_posterior(key, params, sample_shape=(3,))
        return sites, guide.sample_latent(key, params, 3)

    return draws(params)


def two_dimensional():
    numpyro.sample("a", dist.HalfNormal(2.0))
    numpyro.sample("b", dist.Normal(2.0, 0.5))


@cache
def perturbed(name, amount=0.3):
    """A guide of two dimensions at parameters that are far from its start."""
    guide, svi = new_svi(name, two_dimensional, init_scale=0.4)
    return guide, svi, moved(svi, amount)


def close(tree, other, rtol=1e-5, atol=1e-6):
    return jax.tree.all(jax.tree.map(partial(jnp.allclose, rtol=rtol, atol=atol), tree, other))


@pytest.mark.slow
@every_kind
def test_draws_have_support_and_deterministic_sites(name):
    guide, _, params = fitted(name)
    for start in ((), (2, 3)):
        draw = partial(guide.sample_posterior, random.key(1), sample_shape=start)
        shapes = {site: (*start, *shape) for site, shape in (SITES | {"mu": (N,)}).items()}
        assert jax.tree.map(jnp.shape, jax.eval_shape(draw, params)) == shapes
    draws, _ = drawn(name)
    in_support(draws)
    slope = (draws["mix"] @ jnp.arange(3.0)) * draws["b"][..., 0, 1]
    mu = (draws["r"] + draws["b"][..., 1, :].sum(-1))[..., None] + slope[..., None] * X
    assert jnp.allclose(draws["mu"], mu, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@one_guide
def test_deterministic_sites_follow_the_arguments(name):
    guide, _, params = fitted(name)
    key, shape = random.key(1), (3,)
    stock = guide.sample_posterior(key, params, sample_shape=shape)
    other = guide.sample_posterior(key, params, X[:7] + 1.0, y=None, sample_shape=shape)
    assert other["mu"].shape == (3, 7) and close(other["b"], stock["b"])
    again = guide.sample_posterior(key, params, sample_shape=shape)
    assert close(stock, again)


@every_kind
def test_latent_draws_are_those_of_sample_posterior(name):
    guide = fitted(name)[0]
    assert hasattr(guide, "sample_latent")
    draws, latent = drawn(name)
    assert latent.shape == (3, guide.latent_dim) == (3, 8)
    z = unconstrain({site: draws[site] for site in SITES})
    # In the order of the model, not of the alphabet.
    flat = jnp.concatenate([z[site].reshape(3, -1) for site in SITES], axis=1)
    assert jnp.allclose(flat, latent, rtol=1e-3, atol=1e-4)
    assert not jnp.allclose(latent[0], latent[1])


@pytest.mark.slow
@every_other_guide
def test_latent_draws_are_differentiable_in_every_parameter(name):
    guide, _, params = perturbed(name)
    draw = lambda p: jnp.sin(guide.sample_latent(random.key(1), p, 5)).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(draw))(params)
    without = {n for n, leaf in gradient.items() if not jnp.abs(leaf).max() > 0}
    assert without == {n for n in params if any(word in n for word in OF_THE_LOSS)}


@every_kind
def test_predictive_draws_from_the_guide_and_then_from_the_model(name):
    guide, _, params = fitted(name)
    wanted = [*SITES, "mu", "y"]
    predictive = Predictive(model, guide=guide, params=params, num_samples=6, return_sites=wanted)
    predicted = predictive(random.key(1), X)
    in_support({site: predicted[site] for site in SITES})
    assert predicted["y"].shape == (6, 5) and predicted["mu"].shape == (6, N)
    assert jnp.isfinite(predicted["y"]).all()


# The base class takes them from sample_latent, whatever draws that.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["RealNVP", "auxiliary"])
def test_median_and_quantiles_are_those_of_the_draws(name):
    guide, _, params = fitted(name)
    median = guide.median(params)
    assert jax.tree.map(jnp.shape, median) == SITES | {"mu": (N,)}
    levels = [0.05, 0.5, 0.95]
    quantiles = guide.quantiles(params, levels)
    assert jax.tree.map(jnp.shape, quantiles) == {s: (3, *shape) for s, shape in SITES.items()} | {
        "mu": (3, N)
    }
    in_support(median)
    in_support(quantiles)
    assert close(jax.tree.map(lambda q: q[1], quantiles), median, rtol=1e-4)
    draws = guide.sample_posterior(random.key(7), params, sample_shape=(4000,))
    for site in ("sigma", "b", "r"):
        below = (draws[site][:, None] <= quantiles[site]).mean(0)
        expected = jnp.array(levels).reshape(3, *(1,) * len(SITES[site]))
        # Both are Monte Carlo: standard error at most .5 sqrt(1 / 4000 + 1 / 10000) = .0094.
        assert jnp.abs(below - expected).max() < 4 * 0.0094


@every_kind
def test_pickled_guide_draws_the_same(name):
    guide, _, params = fitted(name)
    again = pickle.loads(pickle.dumps(guide))
    draw = jax.jit(lambda params: again.sample_posterior(random.key(1), params, sample_shape=(3,)))
    assert close(draw(params), drawn(name)[0])


@every_guide
def test_every_argument_is_in_the_signature_and_a_misspelt_one_is_named_with_the_class(name):
    cls = GUIDES[name].func if isinstance(GUIDES[name], partial) else GUIDES[name]
    first, *others = inspect.signature(cls).parameters.values()
    assert first.name == "model" and first.kind is first.POSITIONAL_OR_KEYWORD
    assert {"init_scale", "prefix", "init_loc_fn"} < {one.name for one in others}
    assert all(one.kind is one.KEYWORD_ONLY and one.default is not one.empty for one in others)
    with pytest.raises(TypeError, match=rf"{cls.__name__}.* argument 'init_scales'"):
        cls(model, init_scales=1.0)


@pytest.mark.golden  # of a key whose first start fails
@one_guide
def test_latent_vector_is_in_the_order_of_the_model_even_if_the_first_start_fails(name):
    def model():
        b = numpyro.sample("b", dist.Normal(1.0, 1.0))
        numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.factor("hole", jnp.where(b > 1.5, 0.0, -jnp.inf))

    stock, guide = AutoDiagonalNormal(model), GUIDES[name](model)
    for one in (stock, guide):
        handlers.seed(one, 0)()
    assert list(unpacking_of(stock)(jnp.zeros(2))) == ["a", "b"]  # the alphabet: the trap is there
    assert guide.latent_sites == ("b", "a")
    assert guide.unpack(jnp.array([1.0, 2.0])) == {"b": 1.0, "a": 2.0}
    assert guide.init_latent[0] > 1.5


WALK = jnp.array([0.3, 1.1, 0.8, 1.9, 2.5])


def random_walk(y=WALK):
    drift = numpyro.sample("drift", dist.Normal(0.5, 0.2))

    def step(z, y):
        z = numpyro.sample("z", dist.Normal(z + drift, 0.3))
        numpyro.sample("y", dist.Normal(z, 0.5), obs=y)
        return z, z**2

    squares = scan(step, 0.0, y, length=5)[1]
    gain = numpyro.param("gain", 1.5, constraint=constraints.positive)
    numpyro.deterministic("power", gain * squares)


@pytest.mark.slow
def test_models_with_scan_run_and_their_parameters_are_constrained_once():
    guide, svi = new_svi("RealNVP", random_walk)
    params = svi.get_params(svi.init(random.key(0)))
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(200,))
    assert params["gain"] == 1.5  # NumPyro's own guides would use exp(1.5)
    assert jnp.allclose(draws["power"], 1.5 * draws["z"] ** 2, rtol=1e-5)
    latent = guide.sample_latent(random.key(1), params, 200)
    assert jnp.allclose(draws["drift"], latent[:, 0]) and jnp.allclose(draws["z"], latent[:, 1:])
    predicted = Predictive(random_walk, guide=guide, params=params, num_samples=7)
    assert predicted(random.key(2), None)["y"].shape == (7, 5)
    # The loss is the mean of log q - log p, with log p written by hand.
    path = jnp.concatenate([jnp.zeros((200, 1)), latent[:, 1:]], axis=1)
    log_p = dist.Normal(0.5, 0.2).log_prob(latent[:, 0])
    log_p += dist.Normal(0.0, 0.3).log_prob(jnp.diff(path) - latent[:, :1]).sum(1)
    log_p += dist.Normal(path[:, 1:], 0.5).log_prob(WALK).sum(1)

    @jax.jit
    def loss_and_log_q(params):
        loss = Trace_ELBO(2000).loss(random.key(3), params, random_walk, guide)
        return loss, guide.get_posterior(params).log_prob(latent)

    loss, log_q = loss_and_log_q(params)
    terms = log_q - log_p
    assert jnp.abs(loss - terms.mean()) < 5 * terms.std() * (1 / 200 + 1 / 2000) ** 0.5


@pytest.mark.x64
@one_guide
def test_parameters_and_draws_have_the_default_precision(name):
    guide, _, params = perturbed(name)
    wanted = jnp.zeros(()).dtype
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {wanted}
    draws = guide.sample_posterior(random.key(0), params, sample_shape=(2,))
    assert {leaf.dtype for leaf in jax.tree.leaves(draws)} == {wanted}


@every_other_guide
def test_starts_at_a_normal_around_init_loc(name):
    init = init_to_value(values={"a": jnp.exp(0.7), "b": -1.2})
    guide, svi = new_svi(name, two_dimensional, init_scale=0.25, init_loc_fn=init)
    params = svi.get_params(svi.init(random.key(0)))
    z = jax.jit(lambda params: guide.sample_latent(random.key(1), params, 20_000))(params)
    z = (z - jnp.array([0.7, -1.2])) / 0.25
    # Monte Carlo: 1 / sqrt(20000) = .007 for means and covariances, sqrt(2) more for variances.
    assert jnp.abs(z.mean(0)).max() < 0.03
    assert jnp.abs(z.T @ z / len(z) - jnp.eye(2)).max() < 0.04


def local():
    with numpyro.plate("rows", 10, subsample_size=4):
        numpyro.sample("own", dist.Normal())


@one_guide
def test_a_local_site_and_a_guide_without_its_model_or_params_are_named(name):
    with pytest.raises(ValueError, match="'own' is local to the subsampled plate 'rows'"):
        handlers.seed(GUIDES[name](local), 0)()
    guide, _, params = fitted(name)
    with pytest.raises(ValueError, match="has not seen its model"):
        GUIDES[name](model).sample_posterior(random.key(0), params)
    with pytest.raises(ValueError, match=f"params has no '{guide.prefix}_loc'"):
        guide.median({"other_loc": 0.0})
    with pytest.raises(ValueError, match=r"quantiles is \[0.5, 1.5\]"):
        guide.quantiles(params, [0.5, 1.5])
    with pytest.raises(ValueError, match="init_scale is -1"):
        GUIDES[name](model, init_scale=-1.0)


@pytest.mark.slow
@every_density
def test_density_of_own_draw_of_foreign_value_and_by_autodiff_agree(name, tol):
    guide, _, params = perturbed(name)
    assert isinstance(guide, AutoContinuous)

    @jax.jit
    def densities(params):
        posterior, transform = guide.get_posterior(params), guide.get_transform(params)
        z, cached = posterior.sample_with_intermediates(random.key(3), (6,))
        base = guide.get_base_dist().sample(random.key(3), (6,))
        log_det = jnp.linalg.slogdet(jax.vmap(jax.jacobian(transform))(base))[1]
        expected = guide.get_base_dist().log_prob(base) - log_det
        own, foreign = posterior.log_prob(z, cached), posterior.log_prob(transform(base))
        return z, transform(base), transform.inv(z), base, own, foreign, expected

    z, forward, inverse, base, own, foreign, expected = densities(params)
    assert jnp.allclose(forward, z, rtol=1e-6)
    assert jnp.allclose(inverse, base, atol=tol(1e-5, 1e-9))
    assert jnp.allclose(own, expected, atol=tol(2e-5, 1e-11))
    assert jnp.allclose(foreign, expected, atol=tol(2e-5, 1e-11))
