"""Sums over discrete latent sites, against models in which they are summed by hand."""

from itertools import product

import jax
from jax import random
from jax.nn import logsumexp
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
import optax
import pytest

from numpyro_ext._model import read
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import read_model
from numpyro_ext.diagnostics import diagnose
from numpyro_ext.ep import EP
from numpyro_ext.mcmc import SGHMC
from numpyro_ext.particles import SVGD, AutoParticles

Y = jnp.array([1.3, -0.9, 0.2, 2.2, 3.1, -1.4])
SHARES = jnp.array([0.5, 0.2, 0.3])


def labelled(y, batch=None, power=1.0, summed=False):
    """A label in each row, whose likelihood is to a power."""
    w = numpyro.sample("w", dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])))
    loc = numpyro.sample("loc", dist.Normal(jnp.array([-1.0, 0.5, 2.0]), 1.5).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0.2, 0.5))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        if summed:
            each = jnp.log(w) + power * dist.Normal(loc, s).log_prob(y[i][:, None])
            numpyro.factor("y", logsumexp(each, -1))
            return
        k = numpyro.sample("k", dist.Categorical(w))
        with handlers.scale(scale=power):
            numpyro.sample("y", dist.Normal(loc[k], s), obs=y[i])


def shared(y, summed=False):
    """A label of all rows, and one of each row, whose shares follow the first."""
    loc = numpyro.sample("loc", dist.Normal(0.3, 2.0))
    rows = numpyro.plate("rows", len(y))

    def of(c, k):
        return dist.Normal(loc + 2.0 * c - 1.5 * k, 0.8)

    chance = jnp.array([0.2, 0.7])
    if summed:
        c, k = jnp.array([0.0, 1.0]), jnp.array([0.0, 1.0])
        log_k = dist.Bernoulli(chance[:, None]).log_prob(k)
        each = logsumexp(log_k[:, None] + of(c[:, None, None], k).log_prob(y[:, None]), -1)
        numpyro.factor("y", logsumexp(dist.Bernoulli(0.4).log_prob(c) + each.sum(-1)))
        return
    c = numpyro.sample("c", dist.Bernoulli(0.4))
    with rows:
        k = numpyro.sample("k", dist.Bernoulli(chance[c]))
        numpyro.sample("y", of(c, k), obs=y)


def hidden_chain(y, summed=False):
    """A chain of states in a scan; by hand, the sum over all of its paths."""
    loc = numpyro.sample("loc", dist.Normal(jnp.array([-1.0, 1.0, 2.0]), 1.0).to_event(1))
    P = jnp.array([[0.7, 0.1, 0.2], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6]])
    if summed:
        paths = np.array(list(product(range(3), repeat=len(y))))
        before = np.concatenate([np.zeros((len(paths), 1), int), paths[:, :-1]], 1)
        log_p = jnp.log(P[before, paths]) + dist.Normal(loc[paths], 0.7).log_prob(y)
        numpyro.factor("y", logsumexp(log_p.sum(-1)))
        return

    def step(k, y):
        k = numpyro.sample("k", dist.Categorical(P[k]))
        numpyro.sample("y", dist.Normal(loc[k], 0.7), obs=y)
        return k, None

    scan(step, 0, y)


CASES = {
    "local": (labelled, (Y,), ()),
    "local in a minibatch": (labelled, (Y, 2), (4, 1)),
    "local and powered in a minibatch": (labelled, (Y, 3, 0.6), (5, 0, 2)),
    "global and local": (shared, (Y,), ()),
    "in a scan": (hidden_chain, (Y[:4],), ()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.x64
def test_the_potential_is_that_of_the_sums_by_hand(case, tol):
    pytest.importorskip("funsor")
    model, args, rows = CASES[case]
    ours = Potential(model, read_model(model, args, sums=True), {}, args, {})
    by_hand = {"summed": True}
    theirs = Potential(model, read_model(model, args, by_hand), {}, args, by_hand)
    z = theirs.info.unravel(0.7 * random.normal(random.key(0), (theirs.info.size,)))
    idx = {"rows": jnp.array(rows)} if rows else {}
    found, expected = jax.jit(
        lambda z: (ours.value_and_grad(z, idx), theirs.value_and_grad(z, idx))
    )(z)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tol(2e-5, 1e-11), atol=tol(2e-5, 1e-11))


def kinds(y, s=1.0, of_data=1.0, batch=None, by_hand=False):
    """Rows of two kinds under a scale of their own, and the data under another."""
    loc = numpyro.sample("loc", dist.Normal(0.5, 2.0))
    of = dist.Normal(loc + jnp.array([0.0, 2.5]), 1.0)
    with numpyro.plate("rows", len(y), subsample_size=batch) as i, handlers.scale(scale=s):
        if by_hand:
            log_k = dist.Bernoulli(0.35).log_prob(jnp.arange(2))
            numpyro.factor("y", logsumexp(log_k + of_data * of.log_prob(y[i][:, None]), -1))
            return
        k = numpyro.sample("k", dist.Bernoulli(0.35))
        with handlers.scale(scale=of_data):
            numpyro.sample("y", dist.Normal(loc + 2.5 * k, 1.0), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("s", [3.0, jnp.array([1.0, 2.0, 1.0, 4.0, 1.0, 1.0])])
def test_a_scale_around_whole_rows_is_outside_of_their_sums(s, tol):
    pytest.importorskip("funsor")
    z, idx = {"loc": jnp.array(0.4)}, jnp.array([4, 1, 3])
    for kwargs, rows in (
        ({"s": s}, {}),
        ({"s": 3.0, "batch": 3}, {"rows": idx}),
        ({"of_data": 3.0}, {}),
    ):
        ours = Potential(kinds, read_model(kinds, (Y,), kwargs, sums=True), {}, (Y,), kwargs)
        by_hand = {**kwargs, "by_hand": True}
        theirs = Potential(kinds, read_model(kinds, (Y,), by_hand), {}, (Y,), by_hand)
        np.testing.assert_allclose(ours(z, rows), theirs(z, rows), rtol=tol(1e-5, 1e-12))
    mixed = {"s": 3.0, "of_data": 2.0}
    ours = Potential(kinds, read_model(kinds, (Y,), mixed, sums=True), {}, (Y,), mixed)
    with pytest.raises(ValueError, match="latent site 'k' is under a"):
        ours(z, {})


def test_a_scale_of_the_latent_site_of_a_row_is_refused():
    """A chain, a particle and a factor have one value of it, and not one for each copy."""

    def model(y):
        loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", len(y)), handlers.scale(scale=10.0):
            z = numpyro.sample("z", dist.Normal(loc, 1.0))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    particles = SVI(model, AutoParticles(model, num_particles=2), optax.adam(0.1), SVGD())
    guide = AutoNormal(model)
    svi, key = SVI(model, guide, optax.adam(0.1), Trace_ELBO()), random.key(0)
    params = svi.get_params(svi.init(key, Y))
    for who, run in {
        "SGHMC": lambda: SGHMC(model, 1e-3).init(key, 0, None, (Y,), {}),
        "a particle": lambda: particles.init(key, Y),
        "EP": lambda: EP(model).run(key, 1, Y),
        "diagnose": lambda: diagnose(svi, params, model_args=(Y,), num_moves=0),
    }.items():
        with pytest.raises(ValueError, match=rf"'z' of each row is under .* {who} cannot take"):
            run()


def test_a_sum_over_all_rows_of_a_minibatch_is_refused():
    pytest.importorskip("funsor")

    def model(y):
        c = numpyro.sample("c", dist.Bernoulli(0.4))
        loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
        with numpyro.plate("rows", len(y), subsample_size=2) as i:
            numpyro.sample("y", dist.Normal(loc + c, 1.0), obs=y[i])

    potential = Potential(model, read_model(model, (Y,), sums=True), {}, (Y,), {})
    with pytest.raises(ValueError, match=r"\['c'\] are summed .* plate 'rows', whose minibatches"):
        potential({"loc": jnp.array(0.0)}, {"rows": jnp.array([0, 1])})


def test_without_funsor_the_error_names_it(monkeypatch):
    monkeypatch.setattr(read, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"site 'k' is discrete; install funsor .*pip install"):
        SGHMC(labelled).init(random.key(0), 0, None, (Y,), {})


def two_kinds(y, batch=None):
    """Rows of two kinds that are told apart in part."""
    loc = numpyro.sample("loc", dist.Normal(0.5, 2.0))
    with numpyro.plate("rows", len(y), subsample_size=batch) as i:
        k = numpyro.sample("k", dist.Bernoulli(0.35))
        numpyro.deterministic("kind", 1 - k)
        numpyro.sample("y", dist.Normal(loc + 2.5 * k, 1.0), obs=y[i])
    numpyro.deterministic("twice", 2 * loc)


def test_sites_that_are_computed_from_a_label_are_left_out():
    pytest.importorskip("funsor")
    potential = Potential(two_kinds, read_model(two_kinds, (Y,), sums=True), {}, (Y,), {})
    assert set(potential.postprocess()({"loc": jnp.array(0.4)})) == {"loc"}
