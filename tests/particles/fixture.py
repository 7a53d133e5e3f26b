"""Four particles, their gradients, and the fields as loops over pairs: what is compared with."""

import jax
import jax.numpy as jnp
import numpy as np

X = np.array([[0.0, 0.0], [1.0, 0.5], [-0.5, 2.0], [3.0, -1.0]])
G = -(X - np.array([1.0, -1.0])) @ np.array([[2.0, 0.3], [0.3, 0.5]])


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
