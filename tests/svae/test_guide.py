"""SVAEGuide as a guide of NumPyro: rows, names, draws, and what it refuses."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
import pytest

from numpyro_ext.expfam import NIW, Dirichlet, DirichletNatural
from numpyro_ext.svae import (
    GMMEP,
    LDS,
    FixedGaussian,
    SVAEGuide,
    recognition_network,
)
from tests.svae.models import (
    CONCENTRATION,
    PARTS,
    PLAIN,
    PROGRAMS,
    RULES,
    Y_SERIES,
    B,
    D,
    K,
    N,
    Y,
    guide_of,
    lds,
    mixture,
    params_of,
)

PRIOR = jax.jit(  # one program in place of many, while tests are collected
    lambda: {
        "pi": Dirichlet.from_standard(CONCENTRATION),
        "components": NIW.from_standard(**PARTS),
    }
)()
NETWORK = recognition_network(D, hidden=(4,))


def traced(guide, *args, params=None, key=0):
    return trace(substitute(seed(guide, key), data=params or {})).get_trace(*args)


def test_sites_and_their_shapes():
    result = {}
    jax.eval_shape(lambda: result.update(traced(guide_of(GMMEP()), Y, B)))
    shapes = {name: jnp.shape(s["value"]) for name, s in result.items() if s["type"] == "sample"}
    assert shapes == {"pi": (K,), "Sigma": (K, D, D), "mu": (K, D), "z": (B,), "x": (B, D)}
    reports = {n: jnp.shape(s["value"]) for n, s in result.items() if s["type"] == "deterministic"}
    local = ("kl_local", "num_iter", "residual", "converged")
    assert reports == {"svae_kl_global": (), **{f"svae_{name}": (B,) for name in local}}
    params = {name for name, site in result.items() if site["type"] == "param"}
    assert params == {"svae_natural", "svae_recognition$params"}
    assert guide_of(GMMEP()).param_labels(dict.fromkeys([*params, "decoder$params"])) == {
        "svae_natural": "natural",
        "svae_recognition$params": "network",
        "decoder$params": "network",
    }
    plain = {}
    jax.eval_shape(lambda: plain.update(traced(guide_of(FixedGaussian(PLAIN), prefix="vae"), Y)))
    assert "vae_recognition$params" in plain and "vae_natural" not in plain


def test_the_plate_takes_the_rows():
    """All rows are indexed by the minibatch; a minibatch that is given is taken as it is."""
    params, guide = params_of("mixture"), guide_of(GMMEP())

    @jax.jit
    def means(params):
        result, given = (traced(guide, y, B, params=params) for y in (Y, Y[:B]))
        rows, whole = result["data"]["value"], guide.local_posterior(params, Y).mean["x"].x
        return result["x"]["fn"].mean, whole[rows], given["x"]["fn"].mean, whole[:B]

    inside, expected, of_given, first = means(params)
    np.testing.assert_allclose(inside, expected, rtol=1e-5)
    np.testing.assert_allclose(of_given, first, rtol=1e-5)
    for bad, words in [
        (Y[:3], "have 3 rows, but the plate 'data' takes 5 of 12 rows"),
        (Y[0], "2 rows"),
    ]:
        with pytest.raises(ValueError, match=words):
            traced(guide, bad, B)


def test_missing_entries_are_refused():
    hole = Y.at[1, 0].set(jnp.nan)
    guide = guide_of(GMMEP())
    for call in (partial(traced, guide), partial(guide.local_posterior, params_of("mixture"))):
        with pytest.raises(ValueError, match="the data of the guide have NaN"):
            call(hole)
    with pytest.raises(
        ValueError, match=r"first positional argument .* the keywords \['y'\] alone"
    ):
        guide(y=Y)


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"prior has \['pi'\], but GMMEP .* \['comp"):
        SVAEGuide({"pi": PRIOR["pi"]}, NETWORK, GMMEP())
    with pytest.raises(ValueError, match=r"prior\['pi'\] is no natural parameter of Dirichlet, wh"):
        SVAEGuide({**PRIOR, "pi": CONCENTRATION}, NETWORK, GMMEP())
    outside = {**PRIOR, "pi": DirichletNatural(jnp.array([0.2, -1.5, 0.0]))}
    with pytest.raises(ValueError, match=r"prior\['pi'\] is no natural parameter of Dirichlet, wh"):
        SVAEGuide(outside, NETWORK, GMMEP())
    with pytest.raises(ValueError, match=r"init_natural\['pi'\] is no natural parameter"):
        traced(SVAEGuide(PRIOR, NETWORK, GMMEP(), init_natural=lambda rng_key: outside), Y)


def test_networks_whose_potentials_do_not_fit_are_refused():
    init, apply = NETWORK
    params = params_of("mixture")
    guide = guide_of(GMMEP())
    guide.recognition = init, lambda params, y: apply(params, y[0])
    with pytest.raises(ValueError, match=r"h of shape \(2,\) for 12 rows"):
        guide.local_posterior(params, Y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture", "lds"])
def test_check_passes_the_model_that_the_guide_stands_for(name):
    model, y = PROGRAMS[name]
    guide_of(RULES[name]).check(model, random.key(0), y)


@pytest.mark.slow
def test_check_names_a_transition_the_wrong_way_round():
    with pytest.raises(ValueError, match=r"log density of 'x' changes by .* and with LDS by"):
        guide_of(LDS()).check(partial(lds, turned=True), random.key(0), Y_SERIES)


@pytest.mark.slow
def test_check_names_what_differs():
    """A concentration as a natural parameter, and x that depends on another variable."""
    wrong = guide_of(GMMEP())
    wrong.prior = {**wrong.prior, "pi": DirichletNatural(CONCENTRATION)}
    with pytest.raises(ValueError, match=r"log density of 'pi' .* prior\['pi'\]"):
        wrong.check(mixture, random.key(0), Y)
    wrong = guide_of(GMMEP())
    wrong.prior["components"] = NIW.from_standard(**{**PARTS, "df": 30.0})
    with pytest.raises(ValueError, match=r"log density of 'Sigma' and 'mu'"):
        wrong.check(mixture, random.key(0), Y)

    def shifted(y):
        pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
        Sigma = numpyro.sample(
            "Sigma",
            dist.InverseWishart(PARTS["df"], scale_matrix=PARTS["scale_matrix"]).expand([K]),
        )
        mu = numpyro.sample("mu", dist.MultivariateNormal(PARTS["loc"], Sigma / PARTS["kappa"]))
        with numpyro.plate("data", N):
            z = numpyro.sample("z", dist.Categorical(pi))
            numpyro.sample("x", dist.MultivariateNormal(mu[(z + 1) % K], Sigma[z]))

    with pytest.raises(ValueError, match=r"'z' and 'x' changes by .* GMMEP by"):
        guide_of(GMMEP()).check(shifted, random.key(0), Y)


@pytest.mark.slow
def test_ordinary_losses_have_ordinary_gradients():
    """Without SVAEELBO nothing is stopped: a finite difference of pi's divergence."""
    params, guide = params_of("mixture"), guide_of(GMMEP())

    @jax.jit
    def kl(a):
        natural = {**params["svae_natural"], "pi": DirichletNatural(a)}
        result = traced(guide, Y, params={**params, "svae_natural": natural})
        return result["svae_kl_global"]["value"]

    a = params["svae_natural"]["pi"].a
    slope = jax.grad(kl)(a)[0]
    step = jnp.array([0.5, 0, 0])
    np.testing.assert_allclose(slope, kl(a + step) - kl(a - step), rtol=0.05)
