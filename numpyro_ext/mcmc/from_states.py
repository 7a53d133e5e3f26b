"""The draws of a loop of one's own as an ``MCMC``."""

from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer import MCMC

from numpyro_ext._numpyro import mcmc_of_draws
from numpyro_ext.mcmc.base import ModelKernel


def mcmc_from_states(kernel: ModelKernel, states: Any, *args: Any, **kwargs: Any) -> MCMC:
    """
    The draws of a loop of ``kernel.sample`` as an ``MCMC`` that has run.

    Whatever takes an ``MCMC`` takes it, such as ``diagnose`` and ``to_arviz``. The model is given
    **all** rows here, on which the draws are judged.

    :param kernel: the kernel, after its ``init``.
    :param states: the states after warmup, one for each draw: stacked along the leading axis, as
        ``jax.lax.scan`` returns them, or a list; of several chains (``init`` with an array of keys)
        each has an axis of chains after it.
    :param args: arguments of the model with all rows.
    :param kwargs: keyword arguments of the model, likewise.

    >>> from numpyro_ext.mcmc import SGLD
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
    ...     with numpyro.plate("rows", 1000, subsample_size=len(x)):
    ...         numpyro.sample("x", dist.Normal(loc, 1.0), obs=x)
    >>> x = 2.0 + jax.random.normal(jax.random.key(0), (1000,))
    >>> kernel = SGLD(model, 2e-5)
    >>> state = kernel.init(jax.random.key(1), 0, {"loc": jnp.array(2.0)}, (x[:50],))
    >>> def draw(state, batch):
    ...     state = kernel.sample(state, (batch,))
    ...     return state, state
    >>> batches = jnp.tile(x.reshape(20, 50), (50, 1))
    >>> _, states = jax.lax.scan(draw, state, batches)
    >>> mcmc = mcmc_from_states(kernel, states, x)
    >>> mcmc.get_samples()["loc"].shape
    (1000,)
    """
    if isinstance(states, list):
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    if jnp.ndim(states.i) not in (1, 2):
        raise ValueError(
            f"the states have the shape {jnp.shape(states.i)}; give one state for each draw,"
            " stacked along the leading axis, and of several chains with their axis after it."
        )
    last = jax.tree.map(lambda x: x[-1], states)
    add_chain = jnp.ndim(states.i) == 1
    by_chain = jax.tree.map(lambda x: x[None] if add_chain else jnp.swapaxes(x, 0, 1), states)
    num_chains, num_draws = by_chain.i.shape
    draws = {name: getattr(by_chain, name) for name in kernel.default_fields}
    field = kernel.sample_field
    constrain = jax.jit(jax.vmap(jax.vmap(kernel.postprocess_fn(args, kwargs))))
    draws[field] = constrain(draws[field])
    mcmc = MCMC(
        kernel,
        num_warmup=kernel.num_adapt // kernel.steps_per_sample,
        num_samples=num_draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    return mcmc_of_draws(mcmc, draws, last, args, kwargs)
