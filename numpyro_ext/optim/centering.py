"""How far each effect of a hierarchy is to be centred: what its rows say of it, and its prior."""

from collections.abc import Callable
from typing import Any
import warnings

from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.handlers import reparam, seed, substitute
from numpyro.infer.reparam import LocScaleReparam
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.handlers import on_first_rows
from numpyro_ext._model.labels import Coords, Names, labels_of, number_name, split_names
from numpyro_ext._model.mode_search import search_model
from numpyro_ext._model.read import latent_sites, shape_trace, trace_of
from numpyro_ext._numpyro import unwrap_distribution
from numpyro_ext._typing import Model

_ENDS = 10
"""Numbers at either end that are printed."""


class Centering(dict[str, np.ndarray]):
    """The result of :func:`find_centering`, which prints its numbers by their names."""

    labels: Callable[[str], str] = str

    def __str__(self) -> str:
        lines = []
        for site, c in self.items():
            order = np.argsort(c, axis=None, kind="stable")
            # Of many, the least and the most centred ones.
            shown = order if c.size <= 2 * _ENDS else np.append(order[:_ENDS], order[-_ENDS:])
            names = [self.labels(number_name(site, c.shape, int(k))) for k in shown]
            if len(shown) < c.size:
                lines.append(f"{site}: the least and the most of {c.size}")
            width = max(map(len, names))
            lines += [
                f"{name:{width}}  {c.flat[k]:.2f}" for name, k in zip(names, shown, strict=True)
            ]
        return "\n".join(lines)


def find_centering(
    model: Model,
    *args: Any,
    rng_key: Array | None = None,
    coords: Coords | None = None,
    dims: Names | None = None,
    **kwargs: Any,
) -> Centering:
    r"""
    How far each effect of a hierarchy is to be centred, for NumPyro's ``LocScaleReparam``.

    An effect is a latent site :math:`\theta_j \sim N(m, s^2)`, where the mean or the standard
    deviation depends on other latent sites. If its rows have the information :math:`I_j` about
    :math:`\theta_j`, given all else, its number is the share of the rows in what is known of it,

    .. math:: c_j = \frac{I_j}{I_j + 1 / s^2} .

    It is near 1 where a group has many rows, which are best served by :math:`\theta_j` itself
    (centred), and near 0 where it has few, which are best served by :math:`(\theta_j - m) / s`
    (decentred). Between, and between groups of one site, :math:`\theta_j` is centred in part, which
    makes it independent of :math:`m` in a model of normal distributions.

    The information is found by :func:`find_modes` with all effects decentred, where
    :math:`c_j = 1 - v_j` with the variance :math:`v_j` of a decentred effect given all others.

    **When it fails.** It is the information at one point, so it is rough where the spread of an
    effect is hardly known. It never changes the posterior.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model.
    :param rng_key: random number generator key of the search.
    :param coords: labels by dimension, as :func:`to_arviz` takes them, for the names that are
        printed; a model that takes ``coords`` or ``dims`` itself gets them.
    :param dims: dimensions by site, where they are not the model's plates or ``event_dims``.
    :param kwargs: keyword arguments of the model.
    :return: a dict of the numbers of each effect, in the shape of the site, which prints as a
        table.

    **References:**

    1. *A General Framework for the Parametrization of Hierarchical Models*,
       Papaspiliopoulos, Roberts, Sköld (2007), section 4 on partial centring
    2. *Automatic Reparameterisation of Probabilistic Programs*, Gorinova, Moore, Hoffman (2020)

    >>> def model(group, y):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("groups", 3):
    ...         level = numpyro.sample("level", dist.Normal(mean, 1.0))
    ...     numpyro.sample("y", dist.Normal(level[group], 2.0), obs=y)
    >>> group = jnp.repeat(jnp.arange(3), jnp.array([1, 4, 36]))  # 1, 4 and 36 rows
    >>> towns = {"groups": ["Bath", "Hull", "Leeds"]}
    >>> centering = find_centering(model, group, 0.1 * jnp.arange(41.0), coords=towns)
    >>> print(centering)  # n / (n + 2^2)
    level[Bath]   0.20
    level[Hull]   0.50
    level[Leeds]  0.90
    >>> model = reparam(model, {name: LocScaleReparam(c) for name, c in centering.items()})
    """
    kwargs, coords, dims = split_names(model, kwargs, coords, dims)
    labels = labels_of(model, args, kwargs, coords, dims) if coords or dims else str
    effects = _effects(model, args, kwargs)
    decentred = reparam(model, config={name: LocScaleReparam(0.0) for name in effects})
    rng_key = random.key(0) if rng_key is None else rng_key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InferenceWarning)  # of a model that nobody fits
        modes, _ = search_model(rng_key, decentred, args, kwargs)
    variances = modes.unravel(jnp.asarray(modes.heaviest.conditional_sds) ** 2)
    centering = Centering(
        (name, np.clip(1 - np.asarray(variances[f"{name}_decentered"], float), 0, 1))
        for name in effects
    )
    centering.labels = labels
    return centering


def _effects(model: Model, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """The normal latent sites with a mean or a standard deviation that depends on others."""
    read = shape_trace(seed(model, random.key(0)), args, kwargs)
    sites = {site["name"]: site for site in latent_sites(read)}

    def parameters(**values: Any) -> dict[str, tuple[Any, Any]]:
        fn = seed(on_first_rows(substitute(model, data=values)), random.key(0))
        trace = trace_of(fn, args, kwargs)
        laws = {name: unwrap_distribution(trace[name]["fn"])[0] for name in sites}
        return {name: (x.loc, x.scale) for name, x in laws.items() if isinstance(x, dist.Normal)}

    sources = eval_provenance(parameters, **{name: site["value"] for name, site in sites.items()})
    effects = [name for name, names in sources.items() if any(names)]
    if not effects:
        raise ValueError(
            f"no latent site of {list(sites)} is a Normal whose mean or standard deviation depends"
            " on another one; give find_centering the model as it is before reparam."
        )
    return effects
