"""What is compared with: particles, a model and its density by hand, fields as double loops."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

X = np.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
G = -(X - np.array([1.0, -1.0])) @ np.array([[2.0, 0.3], [0.3, 0.5]])

DATA = jnp.array([0.3, -1.2, 2.5, 0.9, 1.7, -0.4])
STARTS = jnp.array([[0.2, -1.0], [1.5, 0.4], [-0.7, 0.1], [0.9, 0.8], [2.2, -0.3]])


def model(data=DATA, subsample_size=None):
    loc = numpyro.sample("loc", dist.Normal(1.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    shift = numpyro.param("shift", 0.3)
    width = numpyro.param("width", 1.5, constraint=constraints.positive)
    with numpyro.plate("data", data.shape[0], subsample_size=subsample_size) as i:
        numpyro.sample("obs", dist.Normal(loc + shift, scale * width), obs=data[i])


def log_joint(x, shift=0.3, width=1.5, rows=None):
    """The density of ``model`` in (loc, log scale), written by hand."""
    loc, log_scale = x
    data, weight = (DATA, 1.0) if rows is None else (DATA[rows], DATA.size / len(rows))
    prior = dist.Normal(1.0, 2.0).log_prob(loc) + dist.Normal(0.0, 0.5).log_prob(log_scale)
    likelihood = dist.Normal(loc + shift, jnp.exp(log_scale) * width).log_prob(data)
    return prior + weight * likelihood.sum()


# The rows of every minibatch of three, and the potentials of the starts on each.
SUBSETS = jnp.array([[i, j, k] for i in range(6) for j in range(i) for k in range(j)])


@jax.jit
def potentials_of_subsets():
    on = lambda rows: -jax.vmap(lambda x: log_joint(x, rows=rows))(STARTS)  # noqa: E731
    return jax.vmap(on)(SUBSETS)


def pair(kernel):
    """k(a, b) and its gradient in b, of one pair, by automatic differentiation."""
    one = lambda a, b: kernel(a[None], b[None])[0, 0]  # noqa: E731
    return jax.jit(jax.value_and_grad(one, argnums=1))


def matrices(kernel, x):
    """K_ij and grad_{x_j} k(x_i, x_j), by a double loop."""
    m, d = x.shape
    fn = pair(kernel)
    k, slopes = np.zeros((m, m)), np.zeros((m, m, d))
    for i in range(m):
        for j in range(m):
            k[i, j], slopes[i, j] = fn(x[i], x[j])
    return k, slopes


def slow_velocity(name, kernel, x, g, eta=None):
    """Each field as in its paper, one particle at a time, with a numeric bandwidth."""
    x, g = np.asarray(x), np.asarray(g)
    m = len(x)
    k, slopes = matrices(kernel, jnp.asarray(x))
    rho = k.sum(1)
    v = np.zeros_like(x)
    b = slopes.sum(1)
    for i in range(m):
        for j in range(m):
            if name == "SVGD":
                v[i] += (k[i, j] * g[j] + slopes[i, j]) / m
            elif name == "GFSD":
                v[i] += g[i] / m + slopes[i, j] / rho[i]
            elif name == "Blob":
                v[i] += g[i] / m + slopes[i, j] / rho[i] + slopes[i, j] / rho[j]
    if name == "GFSF":
        v = g + np.linalg.solve(k + eta * k[0, 0] * np.eye(m), b)
    if name == "RegularizedSVGD":
        v = np.linalg.solve(k + eta * k[0, 0] * np.eye(m), k @ g + b)
    return v


def slow_whitening(x):
    """The factor L of preconditioning, straight from its definition."""
    m, d = x.shape
    c = np.cov(np.asarray(x).T, bias=True).reshape(d, d)
    return np.linalg.cholesky(m / (m + d) * c + d / (m + d) * np.diag(np.diag(c)))
