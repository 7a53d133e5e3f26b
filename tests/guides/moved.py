"""Parameters of a guide off its start."""

from jax import random
from jax.flatten_util import ravel_pytree


def moved(svi, amount, *args):
    """The parameters at the start of ``svi`` plus normal noise of this size, constrained."""
    start = svi.optim.get_params(svi.init(random.key(0), *args).optim_state)
    flat, unravel = ravel_pytree(start)
    return svi.constrain_fn(unravel(flat + amount * random.normal(random.key(1), flat.shape)))
