"""Models, noisy gradients and runs that several test files of the room share."""

from jax import Array, random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC


def gaussian(loc, h):
    """Independent coordinates with curvature ``h``: ``U = h (z - loc)^2 / 2``."""
    numpyro.sample("z", dist.Normal(loc, 1 / jnp.sqrt(h)))


def from_potential(potential, n):
    """``n`` independent coordinates with the potential given."""

    def model():
        z = numpyro.sample("z", dist.ImproperUniform(constraints.real, (n,), ()))
        numpyro.factor("u", -potential(z))

    return model


def gaussian_mean(x, subsample_size=10):
    loc = numpyro.sample("loc", dist.Normal(0.0, 10**0.5))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("x", dist.Normal(loc, 1.0), obs=x[idx])


def gaussian_mean_data():
    return 0.7 + jnp.sin(1.7 * jnp.arange(100))


def slope(x, y, subsample_size=10):
    w = numpyro.sample("w", dist.Normal(0.0, 10.0))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("y", dist.Normal(w * x[idx], 1.0), obs=y[idx])


def slope_data():
    n = jnp.arange(200)
    x = 1 + jnp.sin(1.3 * n)
    return x, 2 * x + jnp.cos(2.1 * n)


def linear(x, y, subsample_size=8):
    """A vector and a positive site, a deterministic one, and a minibatch."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    numpyro.deterministic("length", jnp.sqrt(w @ w))
    with numpyro.plate("data", len(x), subsample_size=subsample_size) as idx:
        numpyro.sample("y", dist.Normal(x[idx] @ w, sigma), obs=y[idx])


def linear_full(x, y):
    linear(x, y, subsample_size=None)


def linear_data():
    n = jnp.arange(40.0)
    x = jnp.stack([jnp.sin(1.3 * n), 1 + jnp.cos(0.7 * n)], 1)
    return x, x @ jnp.array([1.5, -0.5]) + 0.4 * jnp.cos(2.1 * n)


class NoisyGradient:
    """The model's gradient plus Gaussian noise of known variance, a float or one per coordinate."""

    def __init__(self, variance):
        self.variance = variance

    def init(self, z, potential):
        return ()

    def estimate(self, rng_key, i, z, idx, potential, state):
        value, grad = potential.value_and_grad(z, idx)
        noise = jnp.sqrt(jnp.asarray(self.variance))
        grad = {name: g + noise * random.normal(rng_key, g.shape) for name, g in grad.items()}
        return value, grad, state


def run(kernel, *args, warmup=50, draws=100, seed=0, extra_fields=(), **options):
    mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False, **options)
    mcmc.run(random.key(seed), *args, extra_fields=extra_fields)
    return mcmc


def arrays_of_size(jaxpr, size: int) -> list[str]:
    """The operations, at any depth, that make an array of at least ``size`` numbers."""
    found = []
    for eqn in jaxpr.eqns:
        params = [
            p for v in eqn.params.values() for p in (v if isinstance(v, tuple | list) else [v])
        ]
        inner = [getattr(p, "jaxpr", p) for p in params]
        inner = [p for p in inner if hasattr(p, "eqns")]
        for sub in inner:
            found += arrays_of_size(sub, size)
        if not inner:
            made = [v.aval for v in eqn.outvars if hasattr(v.aval, "size")]
            found += [f"{eqn.primitive}: {a}" for a in made if a.size >= size]
    return found


def within(value: Array, expected: float, error: float) -> None:
    """``value`` is ``expected`` within four standard errors."""
    assert abs(float(value) - expected) < 4 * error, (float(value), expected, error)
