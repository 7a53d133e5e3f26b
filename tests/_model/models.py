"""A model whose sites stand in an order that is not the alphabet's, and its parts by hand."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

ORDER = ("tau", "loc", "basis", "shares")
"""The latent sites of ``unordered`` as it samples them; the alphabet begins with ``basis``."""
SIZE = 1 + 2 + 6 + 2
ROWS = 6


def data():
    return 0.5 + jnp.sin(1.7 * jnp.arange(ROWS))


def unordered(x, subsample_size=None):
    """A scale, a vector, a matrix and a simplex, of three, two, six and two free coordinates."""
    tau = numpyro.sample("tau", dist.LogNormal(0.3, 0.5))
    loc = numpyro.sample("loc", dist.Normal(jnp.array([1.0, -2.0]), tau).to_event(1))
    basis = numpyro.sample("basis", dist.Normal(jnp.arange(6.0).reshape(2, 3), 0.5).to_event(2))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.array([1.5, 2.0, 3.0])))
    mean = numpyro.deterministic("mean", loc @ basis @ shares)
    with numpyro.plate("rows", ROWS, subsample_size=subsample_size):
        numpyro.sample("x", dist.Normal(mean, tau), obs=numpyro.subsample(x, event_dim=0))


def straight(x, size=None, subsample_size=None):
    """A model of quick compilation, one mean and one scale; the alphabet turns its order round."""
    size = ROWS if size is None else size
    slope = numpyro.sample("slope", dist.Normal(1.0, 2.0))
    noise = numpyro.sample("noise", dist.Exponential(0.7))
    with numpyro.plate("rows", size, subsample_size=subsample_size):
        numpyro.sample("x", dist.Normal(slope, noise), obs=numpyro.subsample(x, event_dim=0))


def crossed(x, sizes=(2, 2)):
    """Two plates that take a minibatch, one for the rows and one for the columns."""
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    rows = numpyro.plate("rows", x.shape[0], subsample_size=sizes[0], dim=-2)
    columns = numpyro.plate("columns", x.shape[1], subsample_size=sizes[1], dim=-1)
    with rows as i, columns as j:
        numpyro.sample("x", dist.StudentT(4.0, loc, 1.5), obs=x[i[:, None], j])
