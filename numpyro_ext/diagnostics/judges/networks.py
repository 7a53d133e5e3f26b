"""Whether a model looks like a network, whose weights are not identified. It costs nothing."""

import math

import jax.numpy as jnp
from numpyro.distributions import constraints

from numpyro_ext._model.read import elementwise, latent_sites
from numpyro_ext.diagnostics.full_data import shapes_of
from numpyro_ext.diagnostics.limits import MANY_WEIGHTS
from numpyro_ext.diagnostics.subject import OfFit
from numpyro_ext.diagnostics.table import Row

__all__ = ["networks"]


def networks(subject: OfFit) -> list[Row]:
    """A line for a model with latent matrices outside of plates, as the weights of a network are.

    Such weights may change places and signs, so that no guide of them is right and no two chains
    agree, and their predictions may be right all the same.
    """
    fit = subject.fit
    if fit.model is None:
        return []
    count = 0
    for site in latent_sites(shapes_of(fit.model, fit.args, fit.kwargs)):
        plates = {frame.dim for frame in site["cond_indep_stack"]}
        shape = jnp.shape(site["value"])
        own = [
            n for i, n in enumerate(shape) if i - len(shape) + site["fn"].event_dim not in plates
        ]
        support = elementwise(site["fn"].support)
        if len(own) > 1 and support in (constraints.real, constraints.real_matrix):
            count += math.prod(shape)
    if count < MANY_WEIGHTS:
        return []
    verdict = (
        "if these are the weights of a network, they are not identified, and the lines on them do"
        " not say whether its predictions are right: judge these by predictive_scores on rows that"
        " were not in the fit."
    )
    return [Row("latent numbers in matrices", count, None, "", None, verdict)]
