"""Models of angles that can be turned as a whole: the posterior is the same but for a turn."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

ANGLES = np.array([0.9, -0.4, 0.3, 0.1])
PRIOR, NOISE = 0.5, 4.0
"""Concentrations of the prior and of a measurement."""


def wrapped(x):
    return np.remainder(np.asarray(x) + np.pi, 2 * np.pi) - np.pi


def turned_data(turn, y):
    return jnp.remainder(y + turn + jnp.pi, 2 * jnp.pi) - jnp.pi


def turned(turn, y):
    """One direction, whose posterior is a von Mises in closed form, see :func:`posterior`."""
    mu = numpyro.sample("mu", dist.VonMises(turn, PRIOR))
    numpyro.deterministic("east", jnp.cos(mu))
    numpyro.sample("y", dist.VonMises(mu, NOISE), obs=turned_data(turn, y))


def posterior(turn, y):
    """Location and concentration: the resultant of prior and data, each with its weight."""
    z = PRIOR * np.exp(1j * turn) + NOISE * np.sum(np.exp(1j * (y + turn)))
    return np.angle(z), abs(z)


def pair(turn, y):
    """Two angles in one site, of which the difference is measured too, and a number beside them."""
    angles = numpyro.sample("angles", dist.VonMises(turn, jnp.array([2.0, 3.0])).to_event(1))
    numpyro.sample("between", dist.VonMises(angles[0] - angles[1], 4.0), obs=0.5)
    numpyro.sample("zero", dist.Normal(0.0, 2.0))
    y = turned_data(turn, y.reshape(2, 2))
    numpyro.sample("y", dist.VonMises(angles[:, None], 3.0).to_event(2), obs=y)
