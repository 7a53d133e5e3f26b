"""Models with decoders, their priors and guides: off the origin, of unequal scales.

The densities of chains are sums over their steps, and share nothing with ``expfam``.
"""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_ext.expfam import MNIW, NIW, Beta, BetaNatural, Dirichlet, DirichletNatural, Gaussian
from numpyro_ext.svae import (
    GMMEP,
    HMMEP,
    LDS,
    CycleEP,
    FixedGaussian,
    SLDSMeanField,
    SVAEGuide,
    decoder_network,
    recognition_network,
)

N, B, K, D, T = 12, 5, 3, 2, 3
LOC = jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 0.0]])
Y = jnp.array([2.0, -1.0]) + jnp.array([1.5, 0.4]) * random.normal(random.key(7), (N, D))
Y_CYCLE = 0.5 + random.normal(random.key(8), (N, K, D)) * jnp.array([1.0, 0.6])
Y_SERIES = 0.5 + random.normal(random.key(9), (N, T, D)) * jnp.array([1.0, 0.6])
CONCENTRATION = jnp.array([1.2, 2.0, 1.6])
ROWS = jnp.array([[3.0, 1.0, 0.7], [0.8, 2.5, 1.1], [1.3, 0.9, 2.2]])
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
FIRST = {**PARTS, "loc": LOC[0]}
WEIGHTS = jnp.array([[[0.8, 0.2], [-0.1, 0.6]], [[-0.5, 0.0], [0.3, 0.9]], jnp.eye(2)])
MOVES = {
    "weight": WEIGHTS,
    "precision": jnp.diag(jnp.array([60.0, 40.0])),
    "df": 50.0,
    "scale_matrix": jnp.diag(jnp.array([15.0, 30.0])),
}
NETWORK = {"hidden": (4,), "init_scale": 1.0}
DECODER = decoder_network(D, **NETWORK)


def _components(parts, *names):
    m, kappa, nu, S = parts.values()
    covariance, mean = names or ("Sigma", "mu")
    wishart = dist.InverseWishart(nu, scale_matrix=S).expand(m.shape[:-1])
    Sigma = numpyro.sample(covariance, wishart)
    return Sigma, numpyro.sample(mean, dist.MultivariateNormal(m, Sigma / kappa))


def _moves(parts):
    M, precision, nu, S = parts.values()
    Q = numpyro.sample("Q", dist.InverseWishart(nu, scale_matrix=S).expand(M.shape[:-2]))
    column = jnp.linalg.cholesky(jnp.linalg.inv(precision))
    return Q, numpyro.sample("A", dist.MatrixNormal(M, jnp.linalg.cholesky(Q), column))


class States(dist.Distribution):
    """A Markov chain of T states, of which only the density is needed."""

    support = constraints.independent(constraints.nonnegative_integer, 1)

    def __init__(self, pi, P):
        self.log_pi, self.log_P = jnp.log(pi), jnp.log(P)
        super().__init__((), (T,))

    def log_prob(self, z):
        return self.log_pi[z[..., 0]] + self.log_P[z[..., :-1], z[..., 1:]].sum(-1)


class Steps(dist.Distribution):
    """A normal first step, and normal steps with their own weights and noise."""

    support = constraints.independent(constraints.real, 2)

    def __init__(self, loc, covariance, weight, noise):
        self.first = dist.MultivariateNormal(loc, covariance)
        self.weight, self.noise = weight, noise
        super().__init__(self.first.batch_shape, (T, D))

    def log_prob(self, x):
        mean = (self.weight @ x[..., :-1, :, None])[..., 0]
        later = dist.MultivariateNormal(mean, self.noise).log_prob(x[..., 1:, :])
        return self.first.log_prob(x[..., 0, :]) + later.sum(-1)


def decoded(name, x, y, seen=None):
    """Normal data of the decoder's mean and scale at x, masked where ``seen`` is false."""
    noise = dist.Normal(*numpyro.module("decoder", DECODER, (D,))(x))
    noise = noise if seen is None else noise.mask(seen)
    numpyro.sample(name, noise.to_event(x.ndim - 1), obs=y)


def mixture(y, subsample_size=None, seen=None):
    pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
    Sigma, mu = _components(PARTS)
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", dist.Categorical(pi))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]))
        decoded("y", x, None if y is None else y if len(y) != N else y[idx], seen)


def cycle(y, subsample_size=None):
    pi = numpyro.sample("pi", dist.Beta(**BETA))
    Sigma, mu = _components(PARTS_CYCLE)
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", dist.Bernoulli(pi).to_event(1))
        pair = z, jnp.roll(z, -1, axis=-1)
        x = numpyro.sample("x", dist.MultivariateNormal(mu[pair], Sigma[pair]).to_event(1))
        decoded("y", x, y if len(y) != N else y[idx])


def hmm(y, subsample_size=None):
    pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
    P = numpyro.sample("P", dist.Dirichlet(ROWS))
    Sigma, mu = _components(PARTS)
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", States(pi, P))
        x = numpyro.sample("x", dist.MultivariateNormal(mu[z], Sigma[z]).to_event(1))
        decoded("y", x, y[idx])


def lds(y, subsample_size=None, turned=False):
    Sigma, mu = _components(FIRST, "Sigma_1", "mu_1")
    Q, A = _moves({**MOVES, "weight": WEIGHTS[0]})
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        x = numpyro.sample("x", Steps(mu, Sigma, A.T if turned else A, Q))
        decoded("y", x, y[idx])


def slds(y, subsample_size=None):
    pi = numpyro.sample("pi", dist.Dirichlet(CONCENTRATION))
    P = numpyro.sample("P", dist.Dirichlet(ROWS))
    Sigma, mu = _components(PARTS, "Sigma_1", "mu_1")
    Q, A = _moves(MOVES)
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        z = numpyro.sample("z", States(pi, P))
        first, later = z[..., 0], z[..., 1:]
        x = numpyro.sample("x", Steps(mu[first], Sigma[first], A[later], Q[later]))
        decoded("y", x, y[idx])


PLAIN = jax.jit(  # one program in place of many, while tests are collected
    lambda: Gaussian.from_standard(jnp.array([0.5, -1.0]), jnp.array([[2.0, 0.3], [0.3, 0.7]]))
)()


def plain(y, subsample_size=None):
    with numpyro.plate("data", N, subsample_size=subsample_size) as idx:
        x = numpyro.sample("x", Gaussian.to_distribution(PLAIN))
        decoded("y", x, y[idx])


RULES = {
    "mixture": GMMEP(),
    "cycle": CycleEP(),
    "plain": FixedGaussian(PLAIN),
    "hmm": HMMEP(),
    "lds": LDS(),
    "slds": SLDSMeanField(),
}
PROGRAMS = {
    "mixture": (mixture, Y),
    "cycle": (cycle, Y_CYCLE),
    "plain": (plain, Y),
    "hmm": (hmm, Y_SERIES),
    "lds": (lds, Y_SERIES),
    "slds": (slds, Y_SERIES),
}


def kind_of(rule):
    """The name of its model, in RULES; rules of one model have the same sites."""
    (name,) = (n for n, other in RULES.items() if other.families == rule.families)
    return name


def program(rule):
    """``(model, data)`` of a rule."""
    return PROGRAMS[kind_of(rule)]


@cache
def naturals():
    """name of a model -> natural parameters of its prior, compiled together."""

    @jax.jit
    def make():
        pi, P = (Dirichlet.from_standard(c) for c in (CONCENTRATION, ROWS))
        components = NIW.from_standard(**PARTS)
        chain = {"initial": pi, "transition": P}
        one = MNIW.from_standard(**{**MOVES, "weight": WEIGHTS[0]})
        return {
            "mixture": {"pi": pi, "components": components},
            "cycle": {
                "pi": Beta.from_standard(**BETA),
                "components": NIW.from_standard(**PARTS_CYCLE),
            },
            "plain": {},
            "hmm": {**chain, "emission": components},
            "lds": {"initial": NIW.from_standard(**FIRST), "dynamics": one},
            "slds": {
                **chain,
                "initial_x": components,
                "dynamics": MNIW.from_standard(**MOVES),
            },
        }

    with jax.ensure_compile_time_eval():  # a first call may be under jit
        return make()


@cache
def starts():
    """name of a model -> the same moved: other locations and weights, and larger counts."""

    def moved(natural):
        if isinstance(natural, DirichletNatural | BetaNatural):
            return jax.tree.map(lambda a: 20 * a + 10, natural)
        family = NIW if isinstance(natural, NIW.Natural) else MNIW
        first, count, *rest = family.to_standard(natural)
        shift = 0.3 if family is NIW else 0.1
        return family.from_standard(first + shift, 1.5 * count, *rest)

    @jax.jit
    def make(given):
        return {n: {key: moved(v) for key, v in prior.items()} for n, prior in given.items()}

    with jax.ensure_compile_time_eval():
        return make(naturals())


def same_plate(y, subsample_size=None, **kwargs):
    return numpyro.plate("data", N, subsample_size=subsample_size)


def guide_of(rule, **kwargs):
    """The guide of a rule, which starts at the prior moved."""
    name = kind_of(rule)
    options = {"create_plates": same_plate, "init_natural": starts()[name], **kwargs}
    return SVAEGuide(naturals()[name], recognition_network(D, **NETWORK), rule, **options)


@cache
def params_of(name):
    """Parameters of guide and model, at the guide's start."""
    guide, (_, y) = guide_of(RULES[name]), PROGRAMS[name]

    @jax.jit
    def make():
        trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, 3)).get_trace(y)
        own = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
        return {**own, "decoder$params": DECODER[0](random.key(4), (D,))[1]}

    return make()
