"""The particles of a guide as vectors, and log p* at vectors of one's choice."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoNormal
import pytest

from numpyro_ext.guides import Implicit
from numpyro_ext.objectives import Objective
from numpyro_ext.objectives.base import Draws
from numpyro_ext.objectives.samples import Samples

X = jnp.array([[0.5, -1.0], [2.0, 0.1], [1.3, -0.4], [0.2, 0.9], [-1.5, 0.3], [0.8, 0.6]])
NOISE = {"is_auxiliary": True}
noise = partial(numpyro.sample, infer=NOISE)


class Anything(Objective):
    linear = True

    def estimate(self, draws):
        raise NotImplementedError


def draws_of(model, guide, *args, num_particles=3, params=None, **kwargs):
    loss = Anything(num_particles, **kwargs)
    params = {} if params is None else params
    return Draws(loss, random.key(1), params, model, guide, args, {})


def global_model():
    """Sites in an order that is not the alphabet's, of three supports."""
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    mix = numpyro.sample("mix", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
    a = numpyro.sample("a", dist.Normal(1.0, 3.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(a.sum() + mix[0], scale), obs=0.7)


def implicit_guide():
    e = noise("e", dist.Normal().expand([5]).to_event(1))
    m = numpyro.param("m", 0.3)
    scale, simplex = biject_to(constraints.positive), biject_to(constraints.simplex)
    numpyro.sample("scale", Implicit(scale(m + e[0]), support=constraints.positive))
    mix = simplex(m * e[1:3] + e[0])
    numpyro.sample("mix", Implicit(mix, event_dim=1, support=constraints.simplex))
    numpyro.sample("a", Implicit(e[3:] * e[1] + m, event_dim=1))


def log_p_by_hand(z):
    log_scale, u, a = z[0], z[1:3], z[3:]
    simplex = biject_to(constraints.simplex)
    mix = simplex(u)
    return (
        dist.HalfNormal(2.0).log_prob(jnp.exp(log_scale))
        + log_scale
        + dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])).log_prob(mix)
        + simplex.log_abs_det_jacobian(u, mix)
        + dist.Normal(1.0, 3.0).log_prob(a).sum()
        + dist.Normal(a.sum() + mix[0], jnp.exp(log_scale)).log_prob(0.7)
    )


log_p_of_rows = jax.jit(jax.vmap(jax.value_and_grad(log_p_by_hand)))


@pytest.mark.slow
def test_vectors_are_unconstrained_and_log_p_has_the_jacobian():
    draws = draws_of(global_model, implicit_guide, params={"m": jnp.array(0.3)})
    samples = Samples(draws, implicit=True)
    group = samples.group
    assert (group.dim, group.plates, group.shape, group.scale) == (5, (), (), 1.0)

    def own(particle):
        z = samples.vector_of(particle)
        return z, samples.log_p_of(particle, z), particle.guide_trace["e"]["value"]

    (z, log_p, e), _ = jax.jit(lambda: draws.each(own))()
    by_hand = jnp.stack([0.3 + e[:, 0], *(0.3 * e[:, 1:3] + e[:, :1]).T], 1)
    assert jnp.allclose(z[:, :3], by_hand, rtol=1e-4, atol=1e-5)
    assert jnp.allclose(z[:, 3:], e[:, 3:] * e[:, 1:2] + 0.3, rtol=1e-5)
    assert jnp.allclose(log_p, log_p_of_rows(z)[0], rtol=1e-5)
    # At vectors of one's choice, with gradients that a vmap over particles has.
    there = random.normal(random.key(3), (3, 5))

    @jax.jit
    @jax.vmap
    def at(key, z):
        return jax.value_and_grad(lambda z: samples.log_p(key, z, draws.stopped))(z)

    value, grad = at(draws.keys, there)
    expected, expected_grad = log_p_of_rows(there)
    assert jnp.allclose(value, expected, rtol=1e-5)
    assert jnp.allclose(grad, expected_grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_of_a_guide_with_densities_the_vectors_are_its_draws():
    guide = AutoNormal(global_model)
    handlers.seed(guide, 0)()
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace()
    params = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    draws = draws_of(global_model, guide, params=params)
    samples = Samples(draws, implicit=False)

    def own(particle):
        z = samples.vector_of(particle)
        return z, samples.log_p_of(particle, z), particle.values["a"]

    (z, log_p, a), _ = jax.jit(lambda: draws.each(own))()
    assert jnp.allclose(z[:, 3:], a)
    assert jnp.allclose(log_p, log_p_of_rows(z)[0], rtol=1e-5)
    with pytest.raises(ValueError, match="the guide has no Implicit site"):
        Samples(draws, implicit=True)


@pytest.mark.slow
def test_density_sites_drawn_as_they_are_get_a_jacobian():
    def guide():
        numpyro.sample("scale", dist.LogNormal(0.1, 0.3))
        numpyro.sample("mix", dist.Dirichlet(jnp.ones(3)))
        low = noise("low", dist.Normal())
        numpyro.sample("a", dist.TruncatedNormal(0.0, 1.0, low=low).expand([2]).to_event(1))

    draws = draws_of(global_model, guide)
    samples = Samples(draws, implicit=False)
    z = random.normal(random.key(3), (5,))
    log_p = jax.jit(lambda: samples.log_p(draws.keys[0], z))()
    # The support of "a" is known only while the guide runs.
    low = draws.guide_trace(draws.keys[0])["low"]["value"]
    a = low + jnp.exp(z[3:])
    moved = jnp.concatenate([z[:3], a])
    expected = log_p_of_rows(moved[None])[0][0] + z[3:].sum()
    assert jnp.allclose(log_p, expected, rtol=1e-5)


def local_model(x):
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    with numpyro.plate("N", len(x), subsample_size=4, dim=-2) as i:
        with numpyro.plate("D", 2, dim=-1):
            z = numpyro.sample("z", dist.Normal(loc, 1.0))
            numpyro.sample("x", dist.Normal(z, 0.7), obs=x[i])


def local_guide(x):
    numpyro.sample("loc", dist.Normal(numpyro.param("m", 0.2), 0.5))
    with numpyro.plate("N", len(x), subsample_size=4, dim=-2) as i:
        with numpyro.plate("D", 2, dim=-1):
            f = noise("f", dist.Normal())
            numpyro.sample("z", Implicit(f + x[i]))


@pytest.mark.slow
def test_one_vector_for_each_element_of_the_plates_around_a_site():
    draws = draws_of(local_model, local_guide, X, params={"m": jnp.array(0.2)})
    samples = Samples(draws, implicit=True)
    both = samples.group
    assert (both.plates, both.shape, both.dim, both.scale) == (("N", "D"), (4, 2), 1, 1.5)

    def own(particle):
        z = samples.vector_of(particle)
        trace = particle.guide_trace
        drawn = {name: trace[name]["value"] for name in ("loc", "f", "N")}
        return z, samples.log_p_of(particle, z), drawn

    (z, log_p, drawn), _ = jax.jit(lambda: draws.each(own))()
    x = X[drawn["N"][0]]
    assert jnp.allclose(z[..., 0], drawn["f"] + x, atol=1e-6)

    def by_hand(loc, z):
        local = dist.Normal(loc, 1.0).log_prob(z) + dist.Normal(z, 0.7).log_prob(x)
        # log q of "loc" stays; the Implicit site and its noise have none.
        return (
            1.5 * local.sum()
            + dist.Normal(0, 2).log_prob(loc)
            - dist.Normal(0.2, 0.5).log_prob(loc)
        )

    assert jnp.allclose(log_p, jax.vmap(by_hand)(drawn["loc"], z[..., 0]), rtol=1e-5)
    moved = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2, 1)
    value = jax.jit(lambda: samples.log_p(draws.keys[0], moved))()
    assert jnp.allclose(value, by_hand(drawn["loc"][0], moved[..., 0]), rtol=1e-5)


def unit_model(x):
    with numpyro.plate("N", len(x), subsample_size=4, dim=-2) as i:
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("D", 2, dim=-1):
            z = numpyro.sample("z", dist.Normal(0.5, 1.0))
            numpyro.sample("x", dist.Normal(z, tau), obs=x[i])


def unit_guide(x):
    with numpyro.plate("N", len(x), subsample_size=4, dim=-2) as i:
        e = noise("e", dist.Normal())
        tau = jnp.exp(0.1 * e + x[i][:, :1])
        numpyro.sample("tau", Implicit(tau, support=constraints.positive))
        with numpyro.plate("D", 2, dim=-1):
            f = noise("f", dist.Normal())
            numpyro.sample("z", Implicit(f + x[i]))


@pytest.mark.slow
def test_one_vector_for_each_unit_with_all_that_is_drawn():
    draws = draws_of(unit_model, unit_guide, X)
    assert draws.layout.plates == ("N",)
    samples = Samples(draws, implicit=False)
    group = samples.group
    assert (group.plates, group.shape, group.dim, group.scale) == (("N",), (4,), 3, 1.5)

    def own(particle):
        z = samples.vector_of(particle)
        return z, samples.log_p_of(particle, z), particle.guide_trace["f"]["value"]

    (z, log_p, f), _ = jax.jit(lambda: draws.each(own))()
    x = X[draws.guide_trace(draws.keys[0])["N"]["value"]]
    assert jnp.allclose(z[..., 1:], f + x, atol=1e-6)
    expected = dist.HalfNormal(1.0).log_prob(jnp.exp(z[..., 0])) + z[..., 0]
    expected += dist.Normal(0.5, 1.0).log_prob(z[..., 1:]).sum(-1)
    expected += dist.Normal(z[..., 1:], jnp.exp(z[..., :1])).log_prob(x).sum(-1)
    assert log_p.shape == (3, 4) and jnp.allclose(log_p, expected, rtol=1e-5)


def two_sites():
    numpyro.sample("a", dist.Normal())
    numpyro.sample("b", dist.Normal())


def on_density():
    a = numpyro.sample("a", dist.Normal())
    numpyro.sample("b", Implicit(a + noise("e", dist.Normal())))


def shared_noise():
    e = noise("e", dist.Normal())
    numpyro.sample("a", Implicit(e))
    numpyro.sample("b", dist.Normal(noise("f", dist.Normal(e, 1.0)), 1.0))


def other_plates():
    numpyro.sample("a", Implicit(noise("e", dist.Normal())))
    with numpyro.plate("two", 2):
        numpyro.sample("b", Implicit(noise("f", dist.Normal())))


def rows_of_two():
    numpyro.sample("a", dist.Normal())
    with numpyro.plate("two", 2):
        numpyro.sample("b", dist.Normal())


def implicit_pair():
    numpyro.sample("a", Implicit(noise("e", dist.Normal())))
    numpyro.sample("b", Implicit(noise("f", dist.Normal())))


def scaled_pair():
    with handlers.scale(scale=0.5):
        numpyro.sample("a", Implicit(noise("e", dist.Normal())))
    numpyro.sample("b", Implicit(noise("f", dist.Normal())))


@pytest.mark.parametrize(
    ("model", "guide", "match"),
    [
        (two_sites, on_density, "depends on the latent site 'a', which has a density"),
        (two_sites, shared_noise, "'f' has a density that depends on 'e', the noise of"),
        (rows_of_two, other_plates, "'a' and 'b' lie in different plates or under"),
        (two_sites, scaled_pair, "'a' and 'b' lie in different plates or under"),
        (two_sites, handlers.mask(implicit_pair, jnp.array(False)), "'a' lies under a mask"),
    ],
)
def test_what_no_estimate_can_be_made_of_is_named(model, guide, match):
    with pytest.raises(ValueError, match=match):
        Samples(draws_of(model, guide), implicit=True)
