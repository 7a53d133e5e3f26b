"""`AutoAuxiliary` and `with_reverse`: their densities add up, and what does not fit is named."""

from functools import cache, partial

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.initialization import init_to_median
import optax
import pytest

from numpyro_ext.guides import AutoAuxiliary, with_reverse
from numpyro_ext.objectives import AuxiliaryELBO, log_weights
from tests.guides.moved import moved


def model():
    """Normalised, with a constrained site, not in the order of the alphabet."""
    b = numpyro.sample("b", dist.Normal(1.0, 0.7))
    numpyro.sample("a", dist.LogNormal(0.3 * b, 0.5))


MAKE = {
    "one layer": partial(AutoAuxiliary, model, aux_dim=3, hidden_dims=(5,), init_from=None),
    "two layers": partial(
        AutoAuxiliary, model, aux_dim=1, hidden_dims=(4,), num_layers=2, init_from=None
    ),
}
every_kind = pytest.mark.parametrize("kind", MAKE)


@cache
def perturbed(kind):
    guide = MAKE[kind](init_scale=1.0, init_loc_fn=init_to_median)
    svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
    return guide, svi, svi.get_params(svi.init(random.key(0))), moved(svi, 0.05)


@pytest.mark.slow
@every_kind
def test_log_weights_on_the_extended_space_average_to_the_evidence(kind):
    guide, _, _, params = perturbed(kind)
    weights = jnp.exp(log_weights(random.key(2), params, model, guide, num_samples=50_000))
    error = weights.std() / 50_000**0.5
    assert error < 0.03 and abs(weights.mean() - 1.0) < 5 * error


@pytest.mark.slow
@every_kind
def test_starts_at_the_normal_with_a_reverse_model_that_is_right(kind):
    guide, _, params, _ = perturbed(kind)
    K = 20_000
    loss = jax.jit(lambda p: AuxiliaryELBO(K).loss(random.key(2), p, model, guide))(params)
    normal = dist.Normal(params["auto_loc"], 1.0)
    z = normal.sample(random.key(3), (K,))
    log_p = dist.Normal(1.0, 0.7).log_prob(z[:, 0])
    terms = log_p + dist.Normal(0.3 * z[:, 0], 0.5).log_prob(z[:, 1]) - normal.log_prob(z).sum(1)
    assert abs(-loss - terms.mean()) < 0.001 + 4 * terms.std() * (2 / K) ** 0.5


@every_kind
def test_factor_is_minus_the_reverse_density(kind):
    guide, _, _, params = perturbed(kind)
    sites = trace(substitute(seed(guide, 3), params)).get_trace()
    aux = {n: s["value"] for n, s in sites.items() if n.startswith("_auto_aux")}
    latents = {name: sites[name]["value"] for name in ("a", "b")}
    assert len(aux) == guide.num_layers
    log_r = guide.reverse_log_prob(params, aux, latents)
    assert jnp.allclose(sites["auto_reverse"]["fn"].log_factor, -log_r, rtol=1e-5)


def test_default_networks_are_replaced_one_by_one():
    def pair(out):
        return (lambda key, shape: ((out,), jnp.ones(())), lambda w, x: jnp.full(out, w) * x.sum())

    guide = AutoAuxiliary(
        model, network=pair(4), reverse_network=pair(6), aux_dim=3, init_from=None
    )
    sites = trace(seed(guide, 0)).get_trace()
    a, z = sites["_auto_aux__0"]["value"], sites["_auto_latent"]["value"]
    normal = sites["_auto_latent"]["fn"].base_dist
    loc = sites["auto_loc"]["value"]
    clamped = 5.0 * jnp.tanh(a.sum() / 5.0)
    assert jnp.allclose(normal.loc, loc + 0.1 * a.sum(), rtol=1e-5)
    assert jnp.allclose(normal.scale, 0.1 * jnp.exp(clamped), rtol=1e-5)
    e = ((z - loc) / 0.1).sum()
    log_r = dist.Normal(e, jnp.exp(5.0 * jnp.tanh(e / 5.0))).log_prob(a).sum()
    assert jnp.allclose(sites["auto_reverse"]["fn"].log_factor, -log_r, rtol=1e-5)


def by_hand():
    c = numpyro.sample("c", dist.Normal(), infer={"is_auxiliary": True})
    d = numpyro.sample("d", dist.Normal(c, 2.0), infer={"is_auxiliary": True})
    numpyro.sample("b", dist.Normal(d, numpyro.param("s", 0.5)))
    numpyro.sample("a", dist.LogNormal(c, 1.0))


def reverse(latents):
    d = numpyro.sample("d", dist.Normal(numpyro.param("w", 0.7) * latents["b"], 1.5))
    numpyro.sample("c", dist.Normal(0.2 * d + jnp.log(latents["a"]), 1.0))
    numpyro.deterministic("hidden", d)


def test_only_factors_and_parameters_of_the_reverse_model_are_seen():
    paired = with_reverse(by_hand, reverse)
    inner, sites = (trace(seed(fn, 1)).get_trace() for fn in (by_hand, paired))
    assert set(sites) - set(inner) == {"auto_reverse_c", "auto_reverse_d", "w"}
    c, d, b, a = (inner[name]["value"] for name in "cdba")
    log_r = dist.Normal(0.7 * b, 1.5).log_prob(d)
    assert jnp.allclose(sites["auto_reverse_d"]["fn"].log_factor, -log_r)
    other = dist.Normal(0.2 * d + jnp.log(a), 1.0).log_prob(c)
    assert jnp.allclose(sites["auto_reverse_c"]["fn"].log_factor, -other)
    result = paired.reverse_log_prob({"w": 0.7}, {"c": c, "d": d}, {"a": a, "b": b})
    assert jnp.allclose(result, log_r + other)


def no_aux():
    numpyro.sample("b", dist.Normal())
    numpyro.sample("a", dist.LogNormal())


def lacks_c(latents):
    numpyro.sample("d", dist.Normal())


def has_more(latents):
    reverse(latents)
    numpyro.sample("e", dist.Normal())


def has_factor(latents):
    reverse(latents)
    numpyro.factor("f", 1.0)


@pytest.mark.parametrize(
    ("guide", "reverse", "match"),
    [
        (by_hand, lacks_c, "the reverse model has no site 'c', an auxiliary site of the guide"),
        (by_hand, has_more, r"the site or factor 'e'; .* auxiliary sites \['c', 'd'\]"),
        (by_hand, has_factor, "the site or factor 'f'"),
        (no_aux, reverse, "a guide without auxiliary sites"),
    ],
)
def test_reverse_models_that_do_not_fit_are_named(guide, reverse, match):
    with pytest.raises(ValueError, match=match):
        seed(with_reverse(guide, reverse), 0)()
