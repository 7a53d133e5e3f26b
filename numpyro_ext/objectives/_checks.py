"""What is wrong with a model, a guide or their use, in one sentence each."""

from collections.abc import Callable
from typing import Any

from numpyro.ops.provenance import eval_provenance
from numpyro.util import check_model_guide_match

from numpyro_ext._checks import check_count
from numpyro_ext._model.read import (
    base_distribution,
    frames,
    latent_sites,
    not_reparameterized,
    plate_sizes,
    sample_sites,
)
from numpyro_ext._model.units import Layout
from numpyro_ext._numpyro import validate_model
from numpyro_ext._typing import Params, Trace


def check_traces(model_trace: Trace, guide_trace: Trace, score_free: str | None) -> None:
    """Model and guide fit; ``score_free`` names an objective that needs reparameterised sites."""
    if not any(sample_sites(model_trace)):
        raise ValueError(
            "the model has no sample site, so there is no log density; give it at least one"
            " numpyro.sample or numpyro.factor."
        )
    latents = {site["name"]: site for site in latent_sites(model_trace)}
    for name in latents:
        if name not in guide_trace:
            raise ValueError(
                f"latent site '{name}' of the model is missing in the guide; sample it in the guide,"
                " or sum it out of the model."
            )
    for name in not_reparameterized(guide_trace) if score_free else ():
        fn = type(base_distribution(guide_trace[name]["fn"])).__name__
        raise ValueError(
            f"guide site '{name}' ({fn}) is not reparameterised, so {score_free} has no gradient for it;"
            " use VIMCO or ThermodynamicELBO with the covariance gradient, or sum the site out of the model."
        )
    check_model_guide_match(model_trace, guide_trace)
    validate_model(model_trace, plate_warning="loose")
    sizes = plate_sizes(guide_trace, model_trace)
    for name, site in latents.items():
        for plate in set(frames(site)) - set(frames(guide_trace[name])):
            full, batch = sizes[plate]
            if batch < full:
                raise ValueError(
                    f"latent site '{name}' lies in the subsampled plate '{plate}' in the model but not in"
                    " the guide, so its log q would not be scaled; put it into that plate."
                )


def refuse_local_subsampling(name: str, layout: Layout) -> None:
    """For an objective (``name``) that is not linear in the log joint of the minibatch."""
    for site, plate in layout.subsampled_latents:
        raise ValueError(
            f"{name}: latent site '{site}' lies in the subsampled plate '{plate}', which does not enclose"
            " every site of model and guide, so one bound cannot be scaled to all data; use NestedVRELBO"
            " or BBAlphaELBO, VRELBO(1.), or no subsample_size."
        )


def refuse_hidden_density(
    name: str,
    instead: str,
    replay: Callable[[Params], Trace],
    params: Params,
    suspects: list[str],
) -> None:
    """An error if log q at given values hides a parameter in one of the sites ``suspects``.

    ``instead`` says what to use, ``replay(params)`` is the guide's trace at fixed values of all sites that are not Delta.
    """

    def contents(params: Params) -> dict[str, Any]:
        guide_trace = replay(params)
        sites = [guide_trace[name] for name in suspects]
        return {s["name"]: (s["value"], s["fn"].log_prob(s["value"])) for s in sites}

    for site, origins in eval_provenance(contents, params=params).items():
        if any(origins):
            raise ValueError(
                f"{name}: site '{site}' of the guide is a Delta or a factor that depends on a parameter, so"
                f" log q cannot be evaluated at a given value; use {instead}."
            )


def refuse_model_params(name: str, layout: Layout) -> None:
    """For an upper bound, which is lowered by a lower evidence."""
    for site in layout.model_params:
        raise ValueError(
            f"{name}: the model has the param site '{site}', and an upper bound that is minimised over it"
            " would lower the evidence; train it with VRELBO, then put its value into the model"
            " (numpyro.handlers.substitute)."
        )


def check_several(num_particles: int, why: str) -> None:
    """At least two particles; ``why`` says what one cannot do, and what to use instead."""
    check_count("num_particles", num_particles)
    if num_particles < 2:
        raise ValueError(f"num_particles is {num_particles}; it must be at least 2, because {why}.")
