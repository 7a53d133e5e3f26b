"""Accelerated descent: the recursions as slow loops, and use in SVI and ParVI."""

from functools import cache

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI
import optax
import pytest

from numpyro_ext.optim import po, wag, wasserstein_eval_params, wnes
from numpyro_ext.particles import SVGD, AutoParticles

# A tree of parameters, off the origin and of unequal scales.
START = {"a": np.array([[4.0, -30.0], [0.5, 2.0], [1e3, 7.0]]), "b": np.array(-0.3)}


def velocity(z):
    """Neither linear nor the same in all coordinates."""
    return jax.tree.map(lambda a: -jnp.tanh(a - 1) - 0.1 * (a + 2), z)


def schedule(i):
    return 0.3 * (i + 2.0) ** -0.55


def path(optim, start, steps, v=velocity):
    """(x_k, y_k) stacked over the steps, by a scan."""

    def step(carry, _):
        params, state = carry
        updates, state = optim.update(jax.tree.map(jnp.negative, v(params)), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), (wasserstein_eval_params(state, params), params)

    start = jax.tree.map(lambda a: jnp.asarray(a, float), start)
    return lax.scan(step, (start, optim.init(start)), length=steps)[1]


def slow_loop(name, steps, alpha=3.1, mu=1.7, beta=0.4, decay=0.6):
    """The recursions as the paper writes them, one array at a time, in double precision."""
    outcome = {}
    for site, start in START.items():
        x = y = np.array(start)
        d, rows = np.zeros_like(y), []
        for k in range(1, steps + 1):
            eps = schedule(k - 1)
            v = -np.tanh(y - 1) - 0.1 * (y + 2)
            if name == "po":
                d = decay * d + eps * v
                x = y = y + d
            else:
                old, x = x, y + eps * v
                if name == "wag":
                    y = x + (k - 1) / k * (y - old) + (k + alpha - 2) / k * eps * v
                else:
                    y = x + (momentum(mu, eps, beta) if mu else (k - 1) / (k + 2)) * (x - old)
            rows.append((x, y))
        outcome[site] = [np.stack(z) for z in zip(*rows, strict=True)]
    return {site: z[0] for site, z in outcome.items()}, {site: z[1] for site, z in outcome.items()}


def momentum(mu, eps, beta):
    """c1 (1 / a - 1) of Zhang and Sra, with no simplification."""
    h = mu * eps
    b = beta * np.sqrt(h)
    s = np.sqrt(b**2 + 4 * (1 + b) * h)
    a = (s - b) / 2
    q = mu * (s - b) / (s + b)
    return a * q / (q + a * mu) * (1 / a - 1)


@pytest.mark.parametrize(
    ("name", "optim", "options"),
    [
        ("wag", wag(schedule, 3.1), {}),
        ("wnes", wnes(schedule), {"mu": None}),
        ("wnes", wnes(schedule, mu=1.7, beta=0.4), {}),
        ("po", po(schedule, decay=0.6), {}),
    ],
    ids=["wag", "wnes", "wnes, mu", "po"],
)
def test_equals_the_recursion_as_a_slow_loop(name, optim, options, tol):
    # Single precision: 30 additions to numbers of up to 1000, and errors that momentum repeats.
    for ours, exact in zip(path(optim, START, 30), slow_loop(name, 30, **options), strict=True):
        for site in START:
            np.testing.assert_allclose(ours[site], exact[site], rtol=tol(2e-6, 1e-12), atol=1e-5)


def test_noise_of_po_is_standard_normal_and_falls_as_a_power():
    optim = po(2.0, decay=0.0, noise=0.5, noise_decay=0.7, rng_key=random.key(0))
    start = {"a": jnp.zeros(4000), "b": jnp.zeros((2, 2000))}
    _, y = path(optim, start, 3, lambda z: jax.tree.map(jnp.zeros_like, z))
    steps = {site: np.diff(z, axis=0, prepend=0 * z[:1]) for site, z in y.items()}
    xi = np.stack(
        [s.reshape(3, -1) / np.array([[1.0], [2**-0.7], [3**-0.7]]) for s in steps.values()]
    )
    # Standard errors over 4000 draws: 0.011 of a standard deviation, 0.016 of a correlation.
    np.testing.assert_allclose(xi.std(-1), 1.0, atol=0.05)
    np.testing.assert_allclose(np.corrcoef(xi.reshape(6, -1)), np.eye(6), atol=0.07)


def model(theta_scale=1.0):
    w = numpyro.sample("w", dist.Normal(3.0, 2.0))
    theta = numpyro.param("theta", 0.5)
    numpyro.sample("y", dist.Normal(w + theta, theta_scale), obs=4.0)


OPTIMS = {
    "wag": wag(0.05),
    "wnes": wnes(lambda i: 0.1 / (i + 1.0) ** 0.5, mu=1.0),
    "po": po(0.05, noise=0.1, rng_key=random.key(3)),
}


@cache
def straight(name):
    """Twenty steps of SVI in which only the particles are accelerated."""
    labels = {"auto_particles": "particles", "theta": "model"}
    optim = optax.multi_transform({"particles": OPTIMS[name], "model": optax.sgd(0.01)}, labels)
    guide = AutoParticles(model, 8, init_from=None)
    svi = SVI(model, guide, optim, SVGD())
    return svi, svi.run(random.key(0), 20, progress_bar=False)


@pytest.mark.parametrize("name", [pytest.param("po", marks=pytest.mark.slow), "wag", "wnes"])
def test_only_the_labelled_parameters_are_accelerated(name):
    svi, result = straight(name)
    x = wasserstein_eval_params(result.state.optim_state, result.params)
    assert x["theta"] == result.params["theta"]
    apart = jnp.abs(x["auto_particles"] - result.params["auto_particles"]).max()
    assert (apart == 0) if name == "po" else (1e-5 < apart < 0.5)
    # The first step of theta is a step of sgd: theta + 0.01 mean_i (4 - w_i - theta).
    start = svi.init(random.key(0))
    w = svi.get_params(start)["auto_particles"][:, 0]
    after = svi.get_params(jax.jit(svi.update)(start)[0])["theta"]
    np.testing.assert_allclose(after, 0.5 + 0.01 * jnp.mean(4 - w - 0.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wag(0.1, 0.5), ValueError, "alpha is 0.5; it must be at least 1"),
        (lambda: wnes(schedule, mu=9.0), ValueError, "mu 9.0 times learning_rate .* is above 1"),
        (lambda: po(0.1, noise=0.1), ValueError, "noise is 0.1 and rng_key is None; give a random"),
        (
            lambda: wasserstein_eval_params(optax.sgd(0.1).init(1.0), 1.0),
            ValueError,
            "opt_state holds no state of wag, wnes or po",
        ),
    ],
)
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
