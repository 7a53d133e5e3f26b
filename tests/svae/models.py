"""Models with decoders, their priors and guides: off the origin, of unequal scales."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_ext.expfam import NIW, Beta, Dirichlet, Gaussian
from numpyro_ext.svae import (
    GMMEP,
    CycleEP,
    FixedGaussian,
    SVAEGuide,
    decoder_network,
    recognition_network,
)

N, B, K, D = 12, 5, 3, 2
LOC = jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 0.0]])
Y = jnp.array([2.0, -1.0]) + jnp.array([1.5, 0.4]) * random.normal(random.key(7), (N, D))
Y_CYCLE = 0.5 + random.normal(random.key(8), (N, K, D)) * jnp.array([1.0, 0.6])
CONCENTRATION = jnp.array([1.2, 2.0, 1.6])
BETA = {"concentration1": jnp.array([1.5, 2.0, 3.0]), "concentration0": jnp.array([2.5, 1.5, 1.2])}
# Sharp, so that draws of the global variables make little noise.
PARTS = {
    "loc": LOC,
    "kappa": 40.0,
    "df": 50.0,
    "scale_matrix": jnp.diag(jnp.array([40.0, 20.0])),
}
CORNERS = jnp.array([[[1.0, 0.2], [0.1, 1.2]], [[0.3, -1.0], [-1.1, 0.0]]])
PARTS_CYCLE = {**PARTS, "loc": CORNERS}
NETWORK = {"hidden": (4,), "init_scale": 1.0}
DECODER = decoder_network(D, **NETWORK)


def _components(parts, *plates):
    m, kappa, nu, S = parts.values()
    Sigma = numpyro.sample("Sigma", dist.InverseWishart(nu, scale_matrix=S).expand(m.shape[:-1]))
    return Sigma, numpyro.sample("mu", dist.MultivariateNormal(m, Sigma / kappa))


def mixture(y, subsample_size=None, scale=1.0, seen=None):
    pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
    Sigma, mu = _components(PARTS)
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", dist.Categorical(pi))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
        obs = None if y is None else y if len(y) != N else y[idx]
        noise = dist.Normal(*decode(scale * x))
        noise = noise if seen is None else noise.mask(seen)
        numpyro.sample("y", noise.to_event(1), obs=obs)


def cycle(y, subsample_size=None):
    pi = numpyro.sample("pi", dist.Beta(**BETA))
    Sigma, mu = _components(PARTS_CYCLE)
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", dist.Bernoulli(pi).to_event(1))
        pair = z, jnp.roll(z, -1, axis=-1)
        x = numpyro.sample("x", dist.MultivariateNormal(mu[pair], Sigma[pair]).to_event(1))
        obs = y if len(y) != N else y[idx]
        numpyro.sample("y", dist.Normal(*decode(x)).to_event(2), obs=obs)


PLAIN = Gaussian.from_standard(jnp.array([0.5, -1.0]), jnp.array([[2.0, 0.3], [0.3, 0.7]]))


def plain(y, subsample_size=None):
    decode = numpyro.module("decoder", DECODER, (D,))
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        x = numpyro.sample("x", Gaussian.to_distribution(PLAIN))
        numpyro.sample("y", dist.Normal(*decode(x)).to_event(1), obs=y[idx])


def same_plate(y, subsample_size=None, **kwargs):
    return numpyro.plate("data", N, subsample_size=subsample_size)


def guide_of(rule, **kwargs):
    """The guide of a rule, which starts at the prior moved by 0.3."""
    prior = {}
    if rule.families:
        parts = PARTS if rule.families["pi"] is Dirichlet else PARTS_CYCLE
        pi = (
            Dirichlet.from_standard(CONCENTRATION)
            if rule.families["pi"] is Dirichlet
            else Beta.from_standard(**BETA)
        )
        prior = {"pi": pi, "components": NIW.from_standard(**parts)}
        moved = NIW.from_standard(**{**parts, "loc": parts["loc"] + 0.3, "kappa": 60.0})
        start = {"pi": jax.tree.map(lambda a: 20 * a + 10, pi), "components": moved}
        kwargs = {"init_natural": start, **kwargs}
    network = recognition_network(D, **NETWORK)
    return SVAEGuide(prior, network, rule, **{"create_plates": same_plate, **kwargs})


def program(rule):
    """``(model, data)`` of a rule."""
    if not rule.families:
        return plain, Y
    return (mixture, Y) if rule.families["pi"] is Dirichlet else (cycle, Y_CYCLE)


@cache
def params_of(name):
    """Parameters of guide and model: ``"mixture"``, ``"cycle"`` or ``"plain"``."""
    rule = {"mixture": GMMEP(), "cycle": CycleEP(), "plain": FixedGaussian(PLAIN)}[name]
    model, y = program(rule)
    found = {}
    for fn in (guide_of(rule), model):
        seeded = numpyro.handlers.seed(fn, 3)
        trace = numpyro.handlers.trace(seeded).get_trace(y)
        found |= {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    return found
