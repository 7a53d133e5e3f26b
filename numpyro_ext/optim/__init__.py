"""The modes of a posterior, and optimisers for ``SVI`` and ``ParVI`` as optax transformations."""

from numpyro_ext._model.mode_search import find_modes
from numpyro_ext._model.modes import Modes
from numpyro_ext.optim.centering import find_centering
from numpyro_ext.optim.heavy_ball import HeavyBallState, po
from numpyro_ext.optim.ivon import ivon
from numpyro_ext.optim.mean_field import MeanFieldState
from numpyro_ext.optim.natural import NaturalGradientState, natural_gradient
from numpyro_ext.optim.vadam import vadam
from numpyro_ext.optim.von import von
from numpyro_ext.optim.wasserstein import WassersteinState, wag, wasserstein_eval_params, wnes
from numpyro_ext.optim.whitened import whitened

__all__ = [
    "HeavyBallState",
    "MeanFieldState",
    "Modes",
    "NaturalGradientState",
    "WassersteinState",
    "find_centering",
    "find_modes",
    "ivon",
    "natural_gradient",
    "po",
    "vadam",
    "von",
    "wag",
    "wasserstein_eval_params",
    "whitened",
    "wnes",
]
