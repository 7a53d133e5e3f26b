"""The likelihood of new data under a fit with a guide that infers their latent variables too."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
import math
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer.autoguide import AutoGuide
from numpyro.ops.provenance import eval_provenance
from scipy.special import logsumexp

from numpyro_ext._model.exact import exact_log_prob
from numpyro_ext._model.implicit import IntractableDensityError
from numpyro_ext._model.read import base_distribution, is_delta, latent_sites, sample_sites
from numpyro_ext._model.units import Layout, find_layout
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.diagnostics._density import declare, density_of
from numpyro_ext.diagnostics._fit import BLOCK, Fit, concatenate, over_draws
from numpyro_ext.diagnostics._fit_of import predicting_fit
from numpyro_ext.diagnostics._predicted import CLASSES, num_classes, refuse_large
from numpyro_ext.diagnostics.full_data import shapes_of


def held_out_log_likelihood(
    obj: Any,
    result: Any = None,
    *,
    model_args: tuple | None = None,
    model_kwargs: dict[str, Any] | None = None,
    num_samples: int = 1000,
    rng_key: Any = None,
) -> np.ndarray:
    r"""Log predictive density of each row of new data, by importance sampling with the guide.

    For global variables :math:`\theta` and local latent variables x of a row,

    .. math::

        &\log p(y_n \mid \text{training data}) \approx \log \frac1S \sum_{s=1}^S
        \frac{p(y_n \mid x_s, \theta_s)\, p(x_s \mid \theta_s)}{q(x_s \mid y_n, \theta_s)}, \\
        &\theta_s \sim q(\theta), \quad x_s \sim q(x \mid y_n, \theta_s),

    in nats. The guide draws both; the density of :math:`\theta` does not appear, because
    :math:`q(\theta)` stands for the posterior. If one local variable is a category (Bernoulli or
    Categorical, one number for each row), it is summed out of numerator and denominator; several,
    or a chain of states, are drawn. Without local variables this is the log of the mean likelihood
    of a row.

    **Biased downwards**, by about half the relative variance of the weights over S, most where q is
    far from the posterior of a row: raise ``num_samples`` until the estimate no longer rises.

    Entries that a mask leaves out count zero. Every plate runs on all of its rows.

    :param obj: an ``SVI`` or engine with a guide that infers local variables from the data, as a
        :class:`~numpyro_ext.svae.SVAEGuide`, a :class:`~numpyro_ext.guides.FlowGuide` or a function
        with a network does. If all latent variables are global, any fit.
    :param result: for an ``SVI`` or engine: what its ``run`` returned, or the state of the ``SVI``;
        a list of restarts is one mixture.
    :param tuple model_args: the model's arguments with the new data.
    :param dict model_kwargs: its keyword arguments.
    :param int num_samples: S, draws from the guide.
    :param rng_key: a key, new-style or legacy; default ``jax.random.key(0)``.
    :return: an array of the shape of the data plate, ``(B,)``.
    :raises IntractableDensityError: the guide does not give a density of a local variable.

    **References:**

    1. *Importance weighted autoencoders*, Yuri Burda, Roger Grosse, Ruslan Salakhutdinov,
       ICLR 2016 (Theorem 1).
    2. *On the quantitative analysis of decoder-based generative models*, Yuhuai Wu, Yuri Burda,
       Ruslan Salakhutdinov, Roger Grosse, ICLR 2017 (Section 2.2).

    >>> from numpyro_ext.diagnostics import held_out_log_likelihood
    >>> def model(y):
    ...     with numpyro.plate("data", len(y)):
    ...         x = numpyro.sample("x", dist.Normal(0, 1))
    ...         numpyro.sample("y", dist.Normal(x, 1), obs=y)
    >>> def guide(y):  # the exact posterior, for simplicity
    ...     with numpyro.plate("data", len(y)):
    ...         numpyro.sample("x", dist.Normal(y / 2, jnp.sqrt(0.5)))
    >>> svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
    >>> new = jnp.array([0.0, 3.0])
    >>> found = held_out_log_likelihood(svi, {}, model_args=(new,), num_samples=10)
    >>> print([f"{value:.3f}" for value in found])  # log N(y | 0, 2)
    ['-1.266', '-3.516']
    """
    of_a_fit = {"model_args": model_args, "model_kwargs": model_kwargs}
    fit = predicting_fit(obj, result, **of_a_fit, num_samples=num_samples, rng_key=rng_key)
    return log_mean_exp(log_weights_of(fit))


def log_weights_of(fit: Fit) -> np.ndarray:
    """``(S, *rows)`` logs of the weights that :func:`held_out_log_likelihood` takes the mean of."""
    trace = shapes_of(fit.model, fit.args, fit.kwargs)
    layout = find_layout(trace, {}, per_datum=True)
    refuse_large(math.prod(layout.shape), fit.num_draws * len(fit.params), layout.shape)
    _refuse_fixed_rows(fit, trace, layout)
    pieces = _compile(fit)(fit.keys[1], fit.num_samples)
    log_weights = concatenate([part for part, _ in pieces]).astype(np.float64)
    if np.any(np.isnan(log_weights) | np.isposinf(log_weights)):
        raise ValueError("the log likelihood of a row is NaN or +inf in some draws.")
    return log_weights


def _refuse_fixed_rows(fit: Fit, trace: Trace, layout: Layout) -> None:
    """An error if a latent variable is known for the training rows alone, or has no rows."""
    obj, inferred = fit.obj, _sites_reading_data(fit)
    by_row = _sites_along_data(fit, layout, trace)
    for site in latent_sites(trace):
        name = site["name"]
        fixed = fit.existing or (isinstance(obj.guide, AutoGuide) and name not in inferred)
        if fixed and (layout.is_local(site) or name in by_row):
            source = type(obj if fit.existing else obj.guide).__name__
            raise ValueError(
                f"latent site '{name}' belongs to one row, and {source} has it for its training"
                " data alone; use a guide that infers it from the data, such as a FlowGuide."
            )
        if not layout.is_local(site) and name in inferred | by_row:
            raise ValueError(
                f"latent site '{name}' is inferred from the rows of the data but lies outside their"
                f" plates {list(layout.plates)}; draw it inside these, in model and guide."
            )


def _sites_reading_data(fit: Fit) -> set[str]:
    """The latent sites that the guide draws depending on arrays among the arguments."""
    if fit.existing:
        return set()
    leaves, structure = jax.tree.flatten((fit.args, fit.kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, np.ndarray | Array)}

    def drawn(data: dict[int, Array]) -> Sites:
        args, kwargs = structure.unflatten([data.get(i, x) for i, x in enumerate(leaves)])
        there = replace(fit, args=args, kwargs=kwargs)
        return _values(there.guide_trace(fit.params[0], random.key(0)))

    try:
        sources = eval_provenance(drawn, data=arrays)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # it needs the numbers themselves
        return set()
    return {name for name, arrays in sources.items() if arrays}


def _sites_along_data(fit: Fit, layout: Layout, trace: Trace) -> set[str]:
    """Latent sites of another shape where the last row of the data is left out."""
    num_rows = layout.size

    def shorter(x: Any) -> Any:
        if isinstance(x, np.ndarray | Array):
            return x[:-1] if x.shape[:1] == (num_rows,) else x
        return x - 1 if type(x) is int and x == num_rows else x

    other: Trace = {}
    if num_rows > 1 and len(layout.plates) == 1:
        args, kwargs = jax.tree.map(shorter, (fit.args, fit.kwargs))
        with suppress(Exception):  # of rows that the model has from elsewhere
            other = shapes_of(fit.model, args, kwargs)
    names = {site["name"] for site in latent_sites(trace)} & other.keys()
    return {n for n in names if jnp.shape(trace[n]["value"]) != jnp.shape(other[n]["value"])}


def _compile(fit: Fit) -> Callable[..., Iterator[Any]]:
    """The compiled log weights ``(S, *rows)`` of draws."""
    trace = fit.proto.trace
    layout, category = _look(fit, trace)
    numbers = sum(math.prod(jnp.shape(site["value"])) for site in sample_sites(trace))
    block = max(1, BLOCK // max(1, numbers * (1 if category is None else len(category[1]))))

    def log_weight(params: Params, draw: Sites | None, keys: Array) -> Array:
        key_guide, key_model = keys
        if draw is not None:
            trace = fit.model_trace(params, draw, key_model)
            return layout.sum_sites(sample_sites(trace), local=True, log_prob=exact_log_prob)
        guide_trace = fit.guide_trace(params, key_guide)
        drawn = _values(guide_trace)
        # A Delta is computed from these, and its rounding may differ from run to run.
        random_values = {n: value for n, value in drawn.items() if not is_delta(guide_trace[n])}

        def log_densities(values: Sites, trace: Trace) -> tuple[Array, Array]:
            traces = fit.model_trace(params, values, key_model), trace
            log_p, log_q = (
                layout.sum_sites(sample_sites(t), local=True, log_prob=exact_log_prob)
                for t in traces
            )
            return log_p, log_q

        def densities_at(z: Any) -> tuple[Array, Array]:
            replaced = fit.guide_trace(params, key_guide, {**random_values, name: z})
            return log_densities({**drawn, name: z}, replaced)

        if category is None:
            log_p, log_q = log_densities(drawn, guide_trace)
        else:
            name, support = category
            log_p, log_q = jax.tree.map(
                partial(jax.nn.logsumexp, axis=0), jax.vmap(densities_at)(support)
            )
        return log_p - log_q

    return over_draws(fit, lambda params, *_: (partial(log_weight, params), None), block, 2)


def _look(fit: Fit, model_trace: Trace) -> tuple[Layout, tuple[str, np.ndarray] | None]:
    """The plates of the data; and the category to sum out, with its values, if there is one."""
    guide_trace: Trace = {}
    if not fit.existing:
        params, key = fit.params[0], random.key(0)
        jax.eval_shape(lambda: guide_trace.update(fit.guide_trace(params, key)))
    layout = find_layout(model_trace, guide_trace, per_datum=True)
    locals_of = {
        "model": [site for site in latent_sites(model_trace) if layout.is_local(site)],
        "guide": [site for site in latent_sites(guide_trace) if layout.is_local(site)],
    }
    drawn = {site["name"] for site in locals_of["guide"]}
    for site in locals_of["model"]:
        if site["name"] not in drawn:
            raise ValueError(
                f"latent site '{site['name']}' lies in the plates {list(layout.plates)} in the"
                " model but not in the guide; draw it in these plates of the guide."
            )
    rows = {site["name"]: site for site in sample_sites(guide_trace) if layout.is_local(site)}
    density, undeclared = density_of(fit.guide, rows, model_trace)
    if density != "exact":
        raise IntractableDensityError(
            f"the guide gives no density of the sites {sorted(rows)}; use one that draws the"
            f" model's latent sites from distributions, as a FlowGuide{declare(undeclared)}."
        )
    categories = [
        site
        for site in locals_of["guide"]
        if site["fn"].event_dim == 0 and isinstance(base_distribution(site["fn"]), CLASSES)
    ]
    if len(categories) != 1:
        return layout, None
    (site,) = categories
    shape, dtype = jnp.shape(site["value"]), site["value"].dtype
    with jax.ensure_compile_time_eval():
        count = num_classes(site)
    each = np.arange(count, dtype=dtype).reshape(count, *(1,) * len(shape))
    return layout, (site["name"], np.broadcast_to(each, (count, *shape)))


def _values(trace: Trace) -> Sites:
    return {site["name"]: site["value"] for site in latent_sites(trace)}


def log_mean_exp(log_weights: np.ndarray) -> np.ndarray:
    """The log of the mean of these weights over the first axis."""
    return np.asarray(logsumexp(log_weights, axis=0)) - math.log(len(log_weights))
