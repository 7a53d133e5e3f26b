"""Models with known answers that the tests of several objectives share."""

import jax
from jax import random
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import seed, substitute, trace

from numpyro_ext._model.handlers import seed_plates

NONE: dict = {}


def linear_gaussian(x):
    """One latent; posterior N(x / 2, 1 / 2)."""
    z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    numpyro.sample("x", dist.Normal(z, 1.0), obs=x)


def normal_guide(*args):
    """N(m, s) for a scalar latent ``z``."""
    m = numpyro.param("m", 0.0)
    s = numpyro.param("s", 1.0, constraint=constraints.positive)
    numpyro.sample("z", dist.Normal(m, s))


X_LOCAL = jnp.array([0.5, -1.0, 2.0, 0.1, 1.3, -0.4])


def local_model(x=X_LOCAL, batch=None):
    """Two chained latents for each datum, one of them positive, and a model parameter ``b``."""
    b = numpyro.param("b", 0.7)
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        u = numpyro.sample("u", dist.HalfNormal(1.5))
        z = numpyro.sample("z", dist.Normal(b * u, 1.0))
        numpyro.sample("x", dist.Normal(z, 0.8), obs=x)


def local_guide(x=X_LOCAL, batch=None):
    """An amortised guide whose second site depends on the first."""
    c = numpyro.param("c", 0.3)
    s = numpyro.param("s", 0.6, constraint=constraints.positive)
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        u = numpyro.sample("u", dist.LogNormal(c * x - 0.5, s))
        numpyro.sample("z", dist.Normal(0.5 * x + c * u, s + 0.2))


LOCAL_PARAMS = {"b": 0.7, "c": 0.3, "s": 0.6}


def global_model(x=X_LOCAL, batch=None):
    """One latent for all data and one model parameter."""
    b = numpyro.param("b", 0.7)
    z = numpyro.sample("z", dist.Normal(0.5, 1.5))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", dist.Normal(b * z, 0.9), obs=x)


def mixed_model(x=X_LOCAL, batch=None):
    """A global and a local latent."""
    w = numpyro.sample("w", dist.Normal(0.2, 1.0))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        z = numpyro.sample("z", dist.Normal(w, 1.0))
        numpyro.sample("x", dist.Normal(z, 0.8), obs=x)


def mixed_guide(x=X_LOCAL, batch=None):
    c = numpyro.param("c", 0.4)
    numpyro.sample("w", dist.Normal(c, 0.6))
    with numpyro.plate("data", len(x), subsample_size=batch):
        x = numpyro.subsample(x, event_dim=0)
        numpyro.sample("z", dist.Normal(c * x, 0.7))


def particle_keys(rng_key, num_particles):
    """The keys of the particles, as documented."""
    _, rng_key = random.split(rng_key)
    return random.split(rng_key, num_particles)


def guide_draws(rng_key, num_particles, guide, params, *args):
    """The values of the guide's sites for all particles of one loss, and of its plates."""
    guide = seed_plates(guide, random.split(rng_key)[0])

    def draw(key):
        with seed(rng_seed=random.split(key)[1]), substitute(data=params):
            return {name: site["value"] for name, site in trace(guide).get_trace(*args).items()}

    return jax.vmap(draw)(particle_keys(rng_key, num_particles))


def floats(params):
    return jax.tree.map(lambda value: jnp.asarray(value, float), params)


def value_and_grad(losses, params, model, guide, *args, seed=0):
    """Value and gradient of one objective, or of each in a list, in one compilation."""

    def all_of(params):
        return jax.tree.map(
            lambda loss: jax.value_and_grad(
                lambda p: loss.loss(random.key(seed), p, model, guide, *args)
            )(params),
            losses,
        )

    return jax.jit(all_of)(floats(params))


def mean_gradient(loss_of, alphas, num_keys, params, model, guide, *args, seed=0):
    """Mean and standard error of the gradient for each alpha, over keys: ``{name: (A,)}`` twice."""
    params = floats(params)

    def gradient(alpha, key):
        return jax.grad(lambda p: loss_of(alpha).loss(key, p, model, guide, *args))(params)

    keys = random.split(random.key(seed), num_keys)
    grads = jax.jit(jax.vmap(jax.vmap(gradient, (None, 0)), (0, None)))(jnp.array(alphas), keys)
    mean = jax.tree.map(lambda g: g.mean(1), grads)
    error = jax.tree.map(lambda g: g.std(1) / num_keys**0.5, grads)
    return mean, error
