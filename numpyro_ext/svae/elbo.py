"""The evidence lower bound of a structured auto-encoder, with exact natural gradients."""

from collections.abc import Callable, Mapping
import copy
from functools import partial
from typing import Any, cast

import jax
from jax import Array, random
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute
from numpyro.infer import ELBO
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_ext._checks import check_choice
from numpyro_ext._model.checks import valid_data
from numpyro_ext._model.density import log_prob, scaled
from numpyro_ext._model.handlers import same_plates, seed_plates, subsampled_plates, valid_plates
from numpyro_ext._model.losses import finite_step, map_over
from numpyro_ext._model.read import (
    Site,
    call_and_trace,
    frames,
    latent_sites,
    sample_sites,
    trace_of,
    values_of,
)
from numpyro_ext._typing import Model, Params, Trace
from numpyro_ext.expfam import straight_through_kl, straight_through_mean
from numpyro_ext.svae.checks import check_scales, scale_of
from numpyro_ext.svae.guide import GlobalTerms, GuideRun, SVAEGuide


class SVAEELBO(ELBO):
    r"""Loss of ``SVI`` for a model with conjugate structure and any likelihood, and its
    :class:`SVAEGuide`.

    For global variables :math:`\theta`, local variables (x, z) and a minibatch of B of N data,

    .. math::
        loss &= KL(q(\theta) \| p(\theta)) - \frac NB \sum_n \big(
        \mathrm{E}_{q} \log p(y_n \mid x_n) - KL_n \big), \\
        KL_n &= \mathrm{E} \log q(x_n, z_n) - \mathrm{E} \log p(x_n, z_n \mid \theta),

    where only the likelihood is a Monte Carlo estimate, over draws of x. It has the mean of
    ``Trace_ELBO``, and is a lower bound on the evidence for every rule of local inference.

    The gradient in the global natural parameters is minus the natural gradient,

    .. math::
        \tau_0 + \frac NB \sum_n \mathrm{E}\, t_n - \tau
        + \nabla_\mu \Big[\frac NB \sum_n (\ldots)\Big]_{\text{through local inference}},

    so that :func:`natural_gradient` of step 1 is the conjugate update; give no other optimiser
    these parameters. The last term vanishes where local inference has found a stationary point of
    the bound. ``"explicit_only"`` leaves it out: a step then never leaves the domain, and training
    is more robust. All other parameters have ordinary gradients.

    A ``numpyro.handlers.scale`` of latent sites must be the same in the model and in the guide, and
    one for all global and one for all local sites. A step with a loss of NaN or a gradient that is
    not finite leaves the parameters, and warns.

    **When it fails.** Whether the model has the guide's densities of latent sites is not noticed
    here, but by :meth:`SVAEGuide.check`. Parameters of the model in these densities are refused,
    and so are data that depend on another variable than x.

    :param str implicit: ``"full"`` or ``"explicit_only"``.
    :param int num_particles: number of draws of x; local inference runs once.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    section 4.

    >>> from numpyro_ext.svae import SVAEELBO
    >>> SVAEELBO("explicit_only").num_particles
    1
    """

    can_infer_discrete = True

    def __init__(
        self,
        implicit: str = "full",
        num_particles: int = 1,
        vectorize_particles: bool | Callable[..., Any] = True,
    ) -> None:
        check_choice("implicit", implicit, ("full", "explicit_only"))
        self.implicit = implicit
        super().__init__(num_particles, vectorize_particles)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        estimate = partial(self._estimate, rng_key, model, guide, args, kwargs)
        loss, state = finite_step(estimate, param_map)
        return {"loss": loss, "mutable_state": state or None}

    def _estimate(
        self,
        rng_key: Array,
        model: Model,
        guide: Model,
        args: tuple,
        kwargs: dict[str, Any],
        param_map: Params,
    ) -> tuple[Array, dict[str, Any]]:
        """The loss, and the mutable sites that its first particle leaves."""
        model_key, guide_key = random.split(rng_key)
        terms = partial(_natural_terms, self.implicit == "explicit_only")
        running = seed_plates(_running(guide, terms), guide_key)
        run = substitute(seed(running, guide_key), data=param_map)
        with valid_plates():
            guide_run, guide_trace = call_and_trace(run, args, kwargs)

        def expected_log_lik(key: Array | None) -> tuple[Array, tuple[Params, Params]]:
            drawn = guide_trace if key is None else _redraw(guide_trace, guide_run.vectors, key)
            trace = self._model_trace(model, model_key, drawn, param_map, args, kwargs)
            observed = [site for site in sample_sites(trace) if site["is_observed"]]
            log_lik = sum(map(_scaled_log_prob, observed), jnp.zeros(()))
            scales = {s["name"]: jnp.asarray(scale_of(s)) for s in latent_sites(trace)}
            return log_lik, (values_of(trace, "mutable"), scales)

        self._check(model, model_key, guide_trace, guide_run, param_map, args, kwargs)
        if self.num_particles == 1:
            log_lik, (state, scales) = expected_log_lik(None)
        else:
            keys = random.split(guide_key, self.num_particles)
            log_liks, rest = map_over(self.vectorize_particles, expected_log_lik, keys)
            log_lik, (state, scales) = jnp.mean(log_liks), jax.tree.map(lambda leaf: leaf[0], rest)
        local = set(frames(guide_trace[guide_run.vectors[0]]))
        sites = {site["name"]: local <= set(frames(site)) for site in latent_sites(guide_trace)}
        scale_global, scale_local = (
            _common_scale([n for n, here in sites.items() if here is which], guide_trace, scales)
            for which in (False, True)
        )
        kl_local = jnp.sum(scale_local * guide_run.kl_local)
        loss = scale_global * guide_run.kl_global + kl_local - log_lik
        return loss, {**values_of(guide_trace, "mutable"), **state}

    def _model_trace(
        self,
        model: Model,
        key: Array,
        guide_trace: Trace,
        params: Params,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Trace:
        replayed = replay(seed(model, key), cast(Any, guide_trace))
        with valid_plates(), same_plates(None, guide_trace):
            return trace_of(valid_data(substitute(replayed, data=params)), args, kwargs)

    def _check(
        self,
        model: Model,
        key: Array,
        guide_trace: Trace,
        guide_run: GuideRun,
        params: Params,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """An error that names a latent site that the guide lacks, or one without a gradient."""
        drawn = {site["name"]: site for site in latent_sites(guide_trace)}

        def log_probs(**inputs: Any) -> dict[str, Array]:
            replaced = {name: {**site, "value": inputs[name]} for name, site in drawn.items()}
            own = {name: inputs[name] for name in params}
            trace = self._model_trace(model, key, {**guide_trace, **replaced}, own, args, kwargs)
            latents = {site["name"] for site in latent_sites(trace)}
            for name in sorted(latents ^ set(drawn)):
                ours, theirs = ("the guide", "the model")[:: 1 if name in drawn else -1]
                raise ValueError(
                    f"{ours} has the latent site '{name}', but {theirs} has only"
                    f" {sorted(latents if name in drawn else drawn)}; use the names of the rule."
                )
            _check_plates(trace, drawn)
            check_scales(trace, drawn)
            return {site["name"]: _scaled_log_prob(site) for site in sample_sites(trace)}

        values = {name: site["value"] for name, site in drawn.items()}
        differentiated = set(guide_run.vectors)
        for name, origins in eval_provenance(log_probs, **params, **values).items():
            for origin in sorted((origins & set(params)) if name in drawn else ()):
                raise ValueError(
                    f"the density of the latent site '{name}' depends on the parameter '{origin}',"
                    " which would have no gradient; make it a constant, or use Trace_ELBO."
                )
            for origin in sorted(() if name in drawn else origins & set(drawn) - differentiated):
                raise ValueError(
                    f"the observed site '{name}' depends directly on '{origin}'; let the data"
                    f" depend on {sorted(differentiated)} alone, or use Trace_ELBO."
                )


def _check_plates(trace: Trace, drawn: dict[str, Site]) -> None:
    """An error if the model takes a minibatch of latent variables and the guide does not."""
    for name, (size, batch) in subsampled_plates(trace).items():
        for site in latent_sites(trace):
            around, ours = (
                {frame.name for frame in sampled["cond_indep_stack"]}
                for sampled in (site, drawn[site["name"]])
            )
            if name in around - ours:
                raise ValueError(
                    f"the model's site '{site['name']}' is in the plate '{name}', which takes"
                    f" {batch} of {size} rows; give SVAEGuide that plate by create_plates."
                )


def _running(guide: Any, terms: Callable[..., GlobalTerms]) -> Any:
    """The guide's ``run`` with ``terms``, inside the handlers around the guide."""
    if isinstance(guide, SVAEGuide):
        return partial(guide.run, terms)
    if not isinstance(guide, Messenger):
        raise TypeError(f"SVAEELBO requires an SVAEGuide, and the guide is {guide!r}.")
    handler: Any = copy.copy(guide)
    handler.fn = _running(guide.fn, terms)
    return handler


def _common_scale(names: list[str], guide_trace: Trace, scales: dict[str, Array]) -> Any:
    """The one scale of these latent sites in guide and model; NaN if they have several."""
    if not names:
        return 1.0
    scale = scale_of(guide_trace[names[0]])
    ours = [scale_of(guide_trace[name]) for name in names]
    same = [jnp.all(jnp.isclose(x, scale)) for x in [*ours, *(scales[name] for name in names)]]
    return jnp.where(jnp.stack(same).all(), scale, jnp.nan)


def _natural_terms(
    explicit_only: bool,
    families: Mapping[str, Any],
    natural: Mapping[str, Any],
    prior: Mapping[str, Any],
) -> GlobalTerms:
    """The terms of the global factors, with minus the natural gradients for gradients."""
    mean = {name: straight_through_mean(families[name], q) for name, q in natural.items()}
    inner = jax.lax.stop_gradient(mean) if explicit_only else mean
    kls = [straight_through_kl(families[n], q, prior[n], mean[n]) for n, q in natural.items()]
    kl = sum(map(jnp.sum, kls), jnp.zeros(()))
    return GlobalTerms(mean, inner, kl)


def _redraw(guide_trace: Trace, vectors: tuple[str, ...], rng_key: Array) -> Trace:
    """The trace with new draws of the continuous local sites."""
    trace = dict(guide_trace)
    for name in vectors:
        rng_key, key = random.split(rng_key)
        site = guide_trace[name]
        trace[name] = {**site, "value": site["fn"].rsample(key)}
    return trace


def _scaled_log_prob(site: Site) -> Array:
    return jnp.sum(scaled(site, log_prob(site)))
