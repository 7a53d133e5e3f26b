"""Draws of NUTS, which are the truth where there is no closed form; made once and kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS, init_to_uniform

Samples = dict[str, np.ndarray]


def nuts(
    folder: Path,
    name: str,
    model: Callable[..., None],
    data: tuple[Any, ...],
    sites: Any = None,
    init_strategy: Callable[..., Any] = init_to_uniform,
    *,
    warmup: int = 1000,
    draws: int = 2000,
    x64: bool = False,
) -> Samples:
    """4 chains of draws of the sites (all by default), put one after the other.

    :param x64: in double precision; the data are then arrays of NumPy.
    """
    path = folder / f"nuts_{name.replace(' ', '_').replace(',', '')}.npz"
    if path.is_file():
        return dict(np.load(path))
    kernel = NUTS(model, target_accept_prob=0.95, init_strategy=init_strategy)
    options = {"num_chains": 4, "chain_method": "sequential", "progress_bar": False}
    with jax.enable_x64(x64 or bool(jax.config.jax_enable_x64)):
        data = jax.tree.map(jnp.asarray, data) if x64 else data
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws, **options)
        mcmc.run(random.key(0), *data)
        samples = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    samples = {name: x for name, x in samples.items() if sites is None or name in sites}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **samples)
    return samples
