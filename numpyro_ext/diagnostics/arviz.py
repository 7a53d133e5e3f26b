"""Conversion of a fitted NumPyro object to the ``DataTree`` on which all of ArviZ works."""

from collections.abc import Sequence
import math
from typing import TYPE_CHECKING, Any
import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.infer import MCMC

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.circles import is_circle, middle_of, wrapped
from numpyro_ext._model.labels import Coords, Labels, Names, in_tree
from numpyro_ext._model.read import is_data, sample_sites
from numpyro_ext._model.spheres import without_signs
from numpyro_ext._typing import Trace
from numpyro_ext.diagnostics._fit import Prototype, count_of, evaluator, mcmc_stats
from numpyro_ext.diagnostics._fit_of import fit_of
from numpyro_ext.diagnostics._predicted import LARGEST

if TYPE_CHECKING:
    from xarray import DataTree

_TIED = 1e-12
"""The relative size of the noise in rows that have the same log likelihood in all draws."""


def _tree(
    groups: dict[str, dict[str, Any]],
    attributes: dict[str, Any],
    dims: dict[str, list[str]],
    coords: Coords | None,
    special: dict[str, tuple[dict[str, list[str]], dict[str, Any]]],
) -> "DataTree":
    """The groups as a tree; ``special`` has other dimensions and coordinates of some groups."""
    import arviz_base
    from xarray import DataTree

    every = {*dims, *(name for data in groups.values() for name in data)}
    every |= {dim for names in dims.values() for dim in names}
    renamed = sorted(name for name in every if "/" in name)
    for name in renamed:
        if in_tree(name) in every:
            raise ValueError(
                f"the model has the names '{name}' and '{in_tree(name)}', which would be one in a"
                " DataTree, whose names hold no '/'; rename one of them."
            )
    if renamed:
        attributes = {**attributes, "renamed": renamed}

    def dataset(group: str, data: dict[str, Any]) -> Any:
        sample_dims = [] if group == "observed_data" else ["chain", "draw"]
        own_dims, own_coords = special.get(group, ({}, {}))
        names = {in_tree(name): [*map(in_tree, x)] for name, x in {**dims, **own_dims}.items()}
        data = {in_tree(name): x for name, x in data.items()}
        for name in data.keys() & set(sample_dims):
            raise ValueError(
                f"the model has a site '{name}', which is the name of a dimension of the DataTree;"
                " rename it."
            )
        return arviz_base.dict_to_dataset(
            data,
            attrs=attributes if group == "posterior" else None,
            inference_library=numpyro,
            # Log densities have the axes of a site without the axes of its event.
            dims={
                name: names[name][: np.ndim(x) - len(sample_dims)]
                for name, x in data.items()
                if name in names
            },
            coords={in_tree(dim): x for dim, x in {**(coords or {}), **own_coords}.items()},
            sample_dims=sample_dims,
            # Many chains of few draws are no mistake here: restarts, ensembles.
            check_conventions=False,
        )

    tree = DataTree.from_dict(
        {group: dataset(group, data) for group, data in groups.items() if data}
    )
    tree.attrs.update(tree["posterior"].attrs)
    return tree


def site_names(tree: "DataTree") -> dict[str, str]:
    """The model's names of what :func:`to_arviz` calls otherwise, as sites of Flax modules.

    A ``DataTree`` takes no ``/`` in the name of a site or of a plate, so that :func:`to_arviz` puts
    a ``:`` in its place. Everything else, such as ``Predictive`` and the plots of this package,
    goes on with the names of the model.

    :param tree: a result of :func:`to_arviz`, also from a file.
    :return: ``{name in the tree: name in the model}`` of the sites and dimensions with two names.

    >>> from numpyro.infer import NUTS
    >>> from numpyro_ext.diagnostics import site_names, to_arviz
    >>> def model():
    ...     numpyro.sample("net/bias", dist.Normal())
    >>> mcmc = MCMC(NUTS(model), num_warmup=10, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> tree = to_arviz(mcmc)
    >>> list(tree.posterior), site_names(tree)
    (['net:bias'], {'net:bias': 'net/bias'})
    """
    names = np.atleast_1d(tree.attrs.get("renamed", [])).tolist()
    return {in_tree(name): name for name in names}


def _without_masked(
    log_lik: dict[str, Any], counted: dict[str, Any], dims: dict[str, list[str]]
) -> tuple[dict[str, Any], dict[str, list[str]], dict[str, Any]]:
    """Log likelihoods without the entries that a mask leaves out, of which PSIS has no tail; their
    dimensions, one of its own if a site has several axes or other rows than another site of the
    same plate; and the places that are left."""
    out, names, places = {}, {}, {}
    masks = {site: np.broadcast_to(counted[site], x.shape[2:]) for site, x in log_lik.items()}
    for site, x in log_lik.items():
        kept, name = masks[site], f"{site}_entry"
        if not kept.all() and kept.any():
            of_plate = [masks[other] for other in log_lik if dims[site][0] in dims[other]]
            if kept.ndim == 1 and all(np.array_equal(kept, mask) for mask in of_plate):
                name = dims[site][0]
            x, names[site], places[name] = x[..., kept], [name], np.flatnonzero(kept)
        out[site] = _without_ties(x)
    return out, names, places


def _without_ties(x: np.ndarray) -> np.ndarray:
    """Log likelihoods ``(chain, draw, *rows)``, with noise below their rounding in the rows that
    have one value in all draws, at which LOO by ArviZ stops."""
    low = x.min((0, 1))
    tied = (low == x.max((0, 1))) & np.isfinite(low)
    if not np.any(tied):
        return x
    noise = _TIED * np.random.default_rng(0).uniform(size=x.shape[:2])
    size = np.where(tied, np.maximum(np.abs(low), 1.0), 0.0)
    return x + np.multiply.outer(noise, size)


def _refuse_large(
    proto: Prototype, num_draws: int, log_likelihood: bool, posterior_predictive: bool
) -> None:
    """An error, before anything is computed, if a group would not fit into a small memory."""
    data = [x for x in proto.trace.values() if is_data(x) and x["name"] not in proto.left_out]
    of_rows, of_values = (
        sum(count_of(x) * factor(x) for x in data)
        for factor in (lambda x: 1, lambda x: math.prod(x["fn"].event_shape))
    )
    groups = {
        "log_likelihood": of_rows * log_likelihood,
        "posterior_predictive": of_values * posterior_predictive,
    }
    for name, count in groups.items():
        size = num_draws * count * np.dtype(jnp.result_type(float)).itemsize
        if size > LARGEST:
            raise ValueError(
                f"{name} would hold {size / 1e9:.1f} GB; pass {name}=False, or fewer draws"
                " (num_samples=, or MCMC(..., thinning=))."
            )


def _warn_of_factors(trace: Trace) -> None:
    """A warning that LOO leaves out a ``numpyro.factor`` that looks like a likelihood."""
    observed = [site for site in sample_sites(trace) if site["is_observed"]]
    has_data = any(is_data(site) for site in observed)
    for site in observed:
        if not is_data(site) and (not has_data or count_of(site) > 1):
            message = (
                f"the factor '{site['name']}' has no observed rows, so log_likelihood, and LOO"
                " with it, leave it out; use numpyro.sample(..., obs=), or log_likelihood=False."
            )
            warnings.warn(InferenceWarning(message), stacklevel=3)
            return


def _warn_of_lost_draws(computed: Sequence[np.ndarray]) -> None:
    """A warning of the draws ``(chain, draw)`` in which one of these densities is not a number."""
    lost = np.any([~np.isfinite(x.reshape(*x.shape[:2], -1)).all(-1) for x in computed], 0)
    if np.any(lost):
        chains = np.flatnonzero(lost.any(1)).tolist()
        message = (
            f"{np.sum(lost)} of {np.size(lost)} draws (chains {chains}) have no density, and LOO"
            " and what else is computed from them is not finite; make the step size smaller, or"
            " leave these draws out."
        )
        warnings.warn(InferenceWarning(message), stacklevel=3)


def to_arviz(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
    log_likelihood: bool = True,
    posterior_predictive: bool = False,
    coords: Coords | None = None,
    dims: Names | None = None,
) -> "DataTree":
    r"""A fitted object as an ArviZ ``DataTree``, whatever fitted it.

    All quantities belong to the model on **all N data** (see :func:`full_data`), also where the
    fit took minibatches. The groups, each ``(chain, draw, *site)`` but the last:

    - ``posterior``: the model's latent sites and its deterministic sites computed from them. With a
      particle guide the draws are the m particles, in order. Angles of a site on a circle, named
      by the attribute ``circular``, go on beyond pi where the draws do, since ArviZ's means,
      standard deviations, R-hat and intervals take them for numbers on a line. The roots of
      probabilities of :class:`SphereReparam` are positive.
    - ``sample_stats``: with z the latents in unconstrained space, ``lp``, the log joint :math:`\log
      p(x, z)`, Jacobian included; for a guide with a density ``log_q``, :math:`\log q(z)`, and
      ``log_weight``, their difference, one for each element of plates that enclose every site.
      ``MCMC``: its extra fields that are arrays (``potential_energy`` becomes ``lp``, or
      ``lp_minibatch`` of a minibatch).
    - ``log_likelihood``: :math:`\log p(x_n \mid z)` of every datum that no mask leaves out, without
      plate scale, with the places of these data as coordinates where there are masks. A row that
      has the same value in all draws, at which ArviZ's LOO stops, has noise in its twelfth digit.
      ``numpyro.factor`` terms belong to ``lp`` only; an :class:`InferenceWarning` says where LOO
      would leave out a factor that looks like a likelihood.
    - ``posterior_predictive``: the observed sites drawn anew at the same arguments.
    - ``observed_data``: the N observations.

    The attributes are ``inference_method`` (``"svi"``, ``"particles"``, ``"mcmc"``, ``"sgmcmc"`` or
    the engine's name), ``guide``, ``loss``, ``engine`` or ``kernel``, ``num_restarts``, and
    ``density``: ``"exact"``; ``"bound"`` where the guide has auxiliary variables; ``"none"``. A
    guide of your own with ``Delta`` sites has a density if it declares at the sites, by
    ``infer={"states_jacobian": True}``, that their ``log_density`` is minus the log Jacobian of the
    map from its auxiliary sites. Discrete latent sites that the run summed out are
    ``marginalized``; deterministic and observed sites are then ``left_out``.

    The LOO to quote for a variational fit is
    ``az.loo_approximate_posterior(dt, log_p=dt.sample_stats.lp, log_q=dt.sample_stats.log_q)``. A
    ``/`` in a name becomes a ``:``, in ``coords`` and ``dims`` too (:func:`site_names` has the
    model's names), and a group of more than 1 GB is refused.

    :param obj: an ``SVI``, an ``MCMC`` that has run, or an engine.
    :param result: for an ``SVI`` or an engine: what ``run`` returned, the state of the ``SVI``, a
        params dict, or a list of these, which become the chains; :func:`restarts` makes it.
    :param tuple model_args: the model's arguments; an ``MCMC`` has the arguments of its run.
    :param dict model_kwargs: its keyword arguments; the ``static_kwargs`` of an ``SVI`` are added.
    :param int num_samples: draws per chain from a guide; particles and ``MCMC`` have their own.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :param bool log_likelihood: True computes that group.
    :param bool posterior_predictive: True draws that group.
    :param coords: coordinates by dimension.
    :param dims: dimensions by site, without chain and draw; they replace those found in the model's
        plates and ``infer={"event_dims": ...}``.
    :return: ``xarray.DataTree`` of host arrays in the precision of the draws, ``log_weight`` in
        double precision.

    **References**

    1. *Bayesian Leave-One-Out Cross-Validation for Large Data*, M. Magnusson, M. R. Andersen,
       J. Jonasson, A. Vehtari (ICML 2019), section 2.3 (the weights of an approximate posterior).

    >>> from numpyro_ext.diagnostics import to_arviz
    >>> def model(x):
    ...     loc = numpyro.sample("loc", dist.Normal())
    ...     with numpyro.plate("N", len(x), subsample_size=2) as idx:
    ...         numpyro.sample("x", dist.Normal(loc), obs=x[idx])
    >>> x = jnp.array([0.5, -1.0, 2.0])
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    >>> fit = svi.run(jax.random.key(0), 100, x, progress_bar=False)
    >>> dt = to_arviz(svi, result=fit, model_args=(x,), num_samples=50)
    >>> dict(dt.log_likelihood.sizes), dt.attrs["density"]
    ({'chain': 1, 'draw': 50, 'N': 3}, 'exact')
    """
    fit = fit_of(obj, result, model_args, model_kwargs, num_samples, rng_key)
    proto, is_mcmc = fit.proto, isinstance(obj, MCMC)
    stats = mcmc_stats(fit) if is_mcmc else {}
    attributes = {**fit.attributes, "density": proto.density}
    labels = Labels.of_trace(proto.trace).named(coords, dims)
    num_draws = fit.num_draws * len(fit.params)
    _refuse_large(proto, num_draws, log_likelihood, posterior_predictive)
    if log_likelihood:
        _warn_of_factors(proto.trace)
    if proto.marginalized:
        attributes |= {"marginalized": proto.marginalized, "left_out": proto.left_out}
    evaluate = evaluator(
        fit,
        lp=not is_mcmc,
        log_likelihood=log_likelihood,
        posterior_predictive=posterior_predictive,
    )
    out = evaluate(fit.keys[1], num_samples)
    supports = {name: proto.trace[name]["fn"].support for name in out["latent"]}
    out["latent"] = without_signs(out["latent"], supports)
    circular = [name for name in supports if is_circle(supports[name])]
    for name in circular:
        x = out["latent"][name]
        out["latent"][name] = wrapped(x, middle_of(x.reshape(-1, *x.shape[2:])))
    if circular:
        attributes["circular"] = circular
    densities = [out["stats"][name] for name in ("lp",) if name in out["stats"]]
    if densities := [*densities, *out.get("log_likelihood", {}).values()]:
        _warn_of_lost_draws(densities)
    named = labels.dims
    if proto.units is not None:
        named = {"log_weight": list(proto.units.plates), **named}
    log_lik, dims_kept, places = _without_masked(
        out.get("log_likelihood", {}), out["counted"], named
    )
    groups = {
        "posterior": {**out["latent"], **out["deterministic"]},
        "sample_stats": {**stats, **out["stats"]},
        "log_likelihood": log_lik,
        "posterior_predictive": out.get("posterior_predictive", {}),
        "observed_data": out["observed"],
    }
    every = {in_tree(n): np.arange(i[-1] + 1) for n, i in places.items()} | labels.coords
    kept = {n: every[in_tree(n)][i] for n, i in places.items()}
    special = {"log_likelihood": (dims_kept, kept)}
    return _tree(groups, attributes, named, labels.coords, special)
