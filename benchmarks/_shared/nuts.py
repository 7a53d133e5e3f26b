"""Draws of NUTS, which are the truth where there is no closed form; made once and kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax import random
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
) -> Samples:
    """4 chains of 1,000 + 2,000 draws of the sites (all by default), put one after the other."""
    path = folder / f"nuts_{name.replace(' ', '_').replace(',', '')}.npz"
    if path.is_file():
        return dict(np.load(path))
    kernel = NUTS(model, target_accept_prob=0.95, init_strategy=init_strategy)
    options = {"num_chains": 4, "chain_method": "sequential", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=1000, num_samples=2000, **options)
    mcmc.run(random.key(0), *data)
    samples = {name: np.asarray(x) for name, x in mcmc.get_samples().items()}
    samples = {name: x for name, x in samples.items() if sites is None or name in sites}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **samples)
    return samples
