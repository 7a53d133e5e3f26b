"""Optimisers for ``SVI`` and ``ParVI``, as optax transformations."""

from numpyro_ext.optim.heavy_ball import HeavyBallState, po
from numpyro_ext.optim.natural import NaturalGradientState, natural_gradient
from numpyro_ext.optim.wasserstein import WassersteinState, wag, wasserstein_eval_params, wnes

__all__ = [
    "HeavyBallState",
    "NaturalGradientState",
    "WassersteinState",
    "natural_gradient",
    "po",
    "wag",
    "wasserstein_eval_params",
    "wnes",
]
