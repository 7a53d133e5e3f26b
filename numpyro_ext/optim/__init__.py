"""Optimisers for ``SVI`` and ``ParVI``, as optax transformations."""

from numpyro_ext.optim.wasserstein import (
    HeavyBallState,
    WassersteinState,
    po,
    wag,
    wasserstein_eval_params,
    wnes,
)

__all__ = [
    "HeavyBallState",
    "WassersteinState",
    "po",
    "wag",
    "wasserstein_eval_params",
    "wnes",
]
