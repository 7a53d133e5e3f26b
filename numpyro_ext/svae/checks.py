"""Checks for mistakes that would make a structured auto-encoder silently wrong."""

from collections.abc import Mapping
from typing import Any, cast

from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import block, replay, seed

from numpyro_ext._model.density import log_prob
from numpyro_ext._model.read import Site, latent_sites, layers, trace_of
from numpyro_ext._numpyro import mask_of
from numpyro_ext._typing import Model, Trace
from numpyro_ext.expfam import Gaussian
from numpyro_ext.svae.local_inference.base import LocalInference, LocalPosterior
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential


def check_naturals(argument: str, naturals: Mapping[str, Any], rule: LocalInference) -> None:
    """An error that names the factor with natural parameters outside the domain, if known."""
    if sorted(naturals) != sorted(rule.families):
        raise ValueError(
            f"{argument} has {sorted(naturals)}, but {type(rule).__name__} has the global factors"
            f" {sorted(rule.families)}."
        )
    for name, family in rule.families.items():
        natural = naturals[name]
        inside = isinstance(natural, family.Natural) and jnp.all(family.in_domain(natural))
        if not isinstance(inside, Tracer) and not inside:
            raise ValueError(
                f"{argument}['{name}'] is no natural parameter of {family.__name__}, which requires"
                f" {family.domain}; make it by {family.__name__}.from_standard."
            )


def check_factor_rows(factor: Any, y: Array) -> None:
    """An error unless a factor of our types has one element for each row of ``y``."""
    if not isinstance(factor, GaussianPotential | MixturePotential):
        return  # a rule of your own may take others
    shape = factor.h.shape
    if shape[:1] != y.shape[:1]:
        raise ValueError(
            f"the recognition network returned h of shape {shape} for {y.shape[0]} rows of data;"
            " its first axis must be the rows."
        )


def scale_of(site: Site) -> Any:
    """The factor of the log density of a site, 1 by default."""
    return 1.0 if site["scale"] is None else site["scale"]


def check_scales(model_trace: Trace, guide_trace: Trace) -> None:
    """An error if model and guide weigh a latent site differently, or if either masks it."""
    for site in latent_sites(guide_trace):
        name = site["name"]
        if name not in model_trace:
            continue
        both = {"model": model_trace[name], "guide": site}
        for owner, traced in both.items():
            if any(mask_of(layer) is not None for layer in layers(traced["fn"])):
                raise ValueError(
                    f"the {owner} masks the latent site '{name}', of which SVAEELBO takes the whole"
                    " divergence; drop these rows, or use Trace_ELBO."
                )
        ours, theirs = map(scale_of, both.values())
        concrete = not isinstance(ours, Tracer) and not isinstance(theirs, Tracer)
        if concrete and not np.allclose(ours, theirs, rtol=1e-5):
            raise ValueError(
                f"the model scales the latent site '{name}' by {ours} and the guide by {theirs};"
                " put the same numpyro.handlers.scale around the site in both, or use Trace_ELBO."
            )


def check_model(
    guide: Any, model: Model, rng_key: Array, args: tuple, kwargs: dict[str, Any]
) -> None:
    """An error if the model's densities at three pairs of values are not prior's and the rule's."""
    for key in random.split(rng_key, 3):
        _check_pair(guide, model, key, args, kwargs)


def _check_pair(
    guide: Any, model: Model, rng_key: Array, args: tuple, kwargs: dict[str, Any]
) -> None:
    key_model, key_first, key_second = random.split(rng_key, 3)
    families, names = guide.local_inference.families, guide.site_names
    with block():
        first, second = (
            trace_of(seed(guide, key), args, kwargs) for key in (key_first, key_second)
        )
        # Other global variables beside the same local ones.
        swapped = {site: second[site] for name in families for site in names[name]}
        traces = first, {**first, **swapped}
        models = [
            trace_of(replay(seed(model, key_model), cast(Any, t)), args, kwargs) for t in traces
        ]
    for site in latent_sites(first):
        if site["name"] not in models[0]:
            raise ValueError(
                f"the guide has the latent site '{site['name']}', but the model does not; name the"
                " sites as the rule does."
            )
    check_scales(models[0], first)
    for name, family in families.items():
        log_p = sum(_total(models[0], site) for site in names[name])
        value = _value_of(names[name], first)
        expected = float(jnp.sum(family.log_prob(guide.prior[name], value)))
        if not abs(log_p - expected) <= 1e-3 * (1 + abs(expected)):
            raise ValueError(
                f"the model's log density of {_words(names[name])} is {log_p:.4g}, and"
                f" prior['{name}'] has {expected:.4g} at the same values; prior holds natural"
                f" parameters, which {family.__name__}.from_standard makes."
            )
    if families:
        _check_locals(guide, traces, models)
    elif guide.local_inference.local_families == {"x": Gaussian}:
        _check_known_normal(guide, (first, second), models[0])


def _check_locals(guide: Any, traces: tuple[Trace, Trace], models: list[Trace]) -> None:
    """Compare the changes of log p(x, z | theta) with theta, which constants do not enter."""
    rule, names = guide.local_inference, guide.site_names
    sites = tuple(names[name][0] for name in rule.local_families)
    means = [
        {
            name: family.statistics(_value_of(names[name], trace))
            for name, family in rule.families.items()
        }
        for trace in traces
    ]
    values = {name: traces[0][names[name][0]]["value"] for name in rule.local_families}
    local = certain(rule, means[0], values)
    log_p = [sum(_total(trace, site) for site in sites) for trace in models]
    expected = [-float(jnp.sum(rule.local_kl(mean, local))) for mean in means]
    change, wanted = log_p[1] - log_p[0], expected[1] - expected[0]
    # After a few steps of random dynamics that grow, float32 keeps four digits.
    if not abs(change - wanted) <= 1e-3 * (1 + sum(map(abs, (*log_p, *expected)))):
        raise ValueError(
            f"the model's log density of {_words(sites)} changes by {change:.4g} between two values"
            f" of the global variables, and with {type(rule).__name__} by {wanted:.4g}; write"
            " p(x, z | theta) as its docstring does, or take fewer steps if it is not finite."
        )


def certain(
    rule: LocalInference, global_mean: Mapping[str, Any], values: Mapping[str, Array]
) -> LocalPosterior:
    """A local posterior with the statistics of values for its means, by local latent variable."""
    x, point = values["x"], {}
    no_data = GaussianPotential(jnp.zeros_like(x), jnp.zeros((*x.shape, x.shape[-1])))
    local = rule.infer(global_mean, no_data)
    for name, family in rule.local_families.items():
        # The statistics of a category need the number of categories.
        mean = local.mean[name]
        categories = [mean.probs.shape[-1]] if hasattr(mean, "probs") else []
        point[name] = family.statistics(values[name], *categories)
    return local._replace(mean=point)


def _check_known_normal(guide: Any, traces: tuple[Trace, Trace], model_trace: Trace) -> None:
    """Compare the changes of log p(x) between the means of two normal q of the same covariance."""
    rule, (site,) = guide.local_inference, guide.site_names["x"]
    log_p, expected = [], []
    for trace in traces:
        x = trace[site]["value"]
        local = rule.infer({}, GaussianPotential.from_diagonal(x, jnp.ones_like(x)))
        log_p.append(log_prob({**model_trace[site], "value": local.mean["x"].x}))
        expected.append(-rule.local_kl({}, local))
    change, wanted = log_p[1] - log_p[0], expected[1] - expected[0]
    if not bool(jnp.all(jnp.abs(change - wanted) <= 1e-3 * (1 + jnp.abs(wanted)))):
        raise ValueError(
            f"the model and {type(rule).__name__} have different log densities of '{site}'; give"
            " both the same prior."
        )


def _value_of(sites: tuple[str, ...], trace: Trace) -> Any:
    """The value of a family, such as (mu, Sigma): the values of its sites in reverse order."""
    values = [trace[site]["value"] for site in reversed(sites)]
    return tuple(values) if len(values) > 1 else values[0]


def _total(trace: Trace, site: str) -> float:
    return float(jnp.sum(log_prob(trace[site])))


def _words(sites: tuple[str, ...]) -> str:
    return " and ".join(f"'{site}'" for site in sites)
