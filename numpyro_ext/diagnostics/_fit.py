"""A fit of any kind: its draws, the model on all of its data, and what is computed from both."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from importlib.util import find_spec
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, uncondition
from numpyro.infer import MCMC, init_to_sample
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._model.checks import check_observed
from numpyro_ext._model.circles import circular_sites, cut_by_draws, unrolled
from numpyro_ext._model.density import log_abs_det, log_density, num_seen
from numpyro_ext._model.exact import exact_draws, exact_log_prob
from numpyro_ext._model.operations import count_operations, jit_on_data, map_blocks
from numpyro_ext._model.potential import Potential, Program
from numpyro_ext._model.read import (
    ModelInfo,
    Site,
    is_data,
    latent_sites,
    model_info,
    moving_supports,
    sample_sites,
    trace_of,
)
from numpyro_ext._model.units import Layout, find_layout
from numpyro_ext._numpyro import max_tree_depth
from numpyro_ext._typing import DiagnosableChains, Model, Params, Sites, Trace
from numpyro_ext.diagnostics._density import (
    density_of,
    log_weight,
    reference_of,
    total_of,
    total_parts,
)
from numpyro_ext.diagnostics.full_data import minibatch_plates

BLOCK = 10**6
"""Log densities in a block of draws: 4 MB in float32."""

Numbers = dict[str, np.ndarray]
"""Arrays ``(chain, draw, *site)`` by name."""
Evaluate = Callable[..., dict[str, Any]]
"""``(rng_key, num_samples, params=fit.params)`` to the dict that :func:`evaluator` describes."""


class Prototype(NamedTuple):
    """The common structure of all draws, read off one of them without arithmetic."""

    trace: Trace
    """A trace of the model, in which only names, kinds, shapes and types mean anything."""
    latents: list[str]
    """The latent sites that are drawn, in the order of the model."""
    density: str
    """``"exact"``, ``"bound"`` or ``"none"``: see :func:`density_of`."""
    undeclared: list[str]
    """``Delta`` sites that may state their Jacobian or not, so that the density is not known."""
    units: Layout | None
    """The units into which the weight of a draw splits; None if it does not."""
    marginalized: list[str]
    """Latent sites that the run summed out."""
    moving: set[str]
    """Latent sites with a support that depends on other latent sites."""
    left_out: list[str]
    """The deterministic and observed sites, if the run summed some out that they may need."""


@dataclass(frozen=True, eq=False)
class Fit:
    """A fitted object: the source of its draws, the model on all data to run them through, and what
    is computed from both, once."""

    model: Model
    """The model on all data, or another one by which the fit is judged."""
    args: tuple
    kwargs: dict[str, Any]
    params: list[Params]
    """One dict per restart; a single one for draws that exist already in several chains."""
    attributes: dict[str, Any] = field(default_factory=dict)
    guide: Model | None = None
    linearised: Any = None
    """A guide with ``linearised_site``: its draws predict by a linearised network."""
    existing: Sequence[Sites] = ()
    """Draws that exist already: ``(draw, *site)``, one dict per entry of params."""
    num_chains: int = 1
    """Chains that the draws of one entry hold, one after the other."""
    by_minibatches: bool = False
    """True if an ``MCMC`` took minibatches."""
    obj: Any = None
    """The fitted object, and its result."""
    result: Any = None
    rng_key: Any = None
    num_samples: int = 1000
    """Draws from a guide, per restart."""
    num_moves: int | None = None
    needs_latents: bool = True
    """False where its predictions alone are asked for."""
    problems: tuple[str, ...] = ()
    """Sentences on the density by which the fit is judged."""

    @cached_property
    def results_of(self) -> dict[Callable[[Any], Any], Any]:
        return {}

    @cached_property
    def kind(self) -> Literal["chains", "guide", "particles", "ensemble"]:
        """An ensemble has particles that are independent draws at every time, all of which are
        judged."""
        method = self.attributes["inference_method"]
        if method in ("particles", "ensemble"):
            return method
        return "chains" if isinstance(self.obj, MCMC) else "guide"

    @property
    def is_biased(self) -> bool:
        """True for chains with another stationary law than the posterior."""
        return self.attributes["inference_method"] == "sgmcmc"

    def title_of(self, size: str) -> str:
        """The kernel, the engine, or the guide and its loss, and the number of draws."""
        guide = f"{self.attributes.get('guide')} by {self.attributes.get('loss')}"
        return f"{self.attributes.get('kernel') or self.attributes.get('engine') or guide}, {size}"

    @property
    def title(self) -> str:
        chains, length = next(iter(self.draws.values())).shape[:2]
        if self.kind == "particles":
            return self.title_of(f"{length} particles")
        if self.kind == "ensemble":
            chains, length = self.num_chains, length // self.num_chains
        return self.title_of(f"{chains} x {length:,} draws")

    @cached_property
    def noise_problem(self) -> str | None:
        """What a loss does wrong on minibatches, and what to do; None if it does nothing wrong."""
        ask = getattr(getattr(self.obj, "loss", None), "noise_problem", None)
        if ask is None:
            return None
        plates = minibatch_plates(self.obj.model, self.args, self.kwargs)
        units = () if self.proto.units is None else self.proto.units.plates
        return ask({plate: rows for plate, rows in plates.items() if plate not in units})

    # The kernel of chains.

    @cached_property
    def kernel(self) -> DiagnosableChains | None:
        """The kernel, if it states its own stationary law."""
        kernel = getattr(self.obj, "sampler", None)
        return kernel if isinstance(kernel, DiagnosableChains) else None

    @cached_property
    def temperature(self) -> float | None:
        """T of the transitions that were drawn; None where it changes, or does not exist."""
        kernel, state = self.kernel, getattr(self.obj, "last_state", None)
        if kernel is None or (i := getattr(state, "i", None)) is None:
            return None
        last = int(np.max(jax.device_get(i)))
        first = max(0, last - self.obj.num_samples * kernel.steps_per_sample)
        # Not jitted, which would compile anew at each look at the run.
        steps = jnp.linspace(first, last - 1, 100).astype(int)
        values = jax.device_get(jax.vmap(kernel.temperature_at)(steps))
        if values is None:
            return None
        # It is 0 while a cyclical schedule explores.
        different = {float(T) for T in values.tolist() if T > 0}
        return different.pop() if len(different) == 1 else None

    # One draw, run through guide and model.

    def guide_trace(self, params: Params, key: Array, values: Sites | None = None) -> Trace:
        guide = seed(substitute(self.guide, data={**params, **(values or {})}), key)
        return trace_of(guide, self.args, self.kwargs)

    def draw(self, params: Params, draw: Sites | None, key: Array) -> tuple[Trace, Sites]:
        """A trace of the guide and the values of its sites; no trace of a draw that exists."""
        if draw is not None:
            return {}, draw
        trace = self.guide_trace(params, key)
        return trace, {name: site["value"] for name, site in trace.items()}

    def model_trace(self, params: Params, latents: Sites, key: Array) -> Trace:
        def value_of(site: Site) -> Array | None:
            is_latent = site["type"] == "sample" and not site["is_observed"]
            value = latents.get(site["name"]) if is_latent else None
            if value is not None:
                _check_size(site, value)
            return value

        program = Program(self.model, self.args, self.kwargs, params)
        return program.trace(values=value_of, rng_key=key)

    @cached_property
    def proto(self) -> Prototype:
        return prototype(self)

    # All draws.

    @cached_property
    def keys(self) -> tuple[Array, ...]:
        """A key for more draws, and another one for draws or moves."""
        return tuple(random.split(self.rng_key))

    @property
    def num_draws(self) -> int:
        """Draws of each entry of params."""
        if self.existing:
            return len(next(iter(self.existing[0].values())))
        return self.num_samples

    @cached_property
    def evaluate(self) -> Evaluate:
        return evaluator(self, lp=True)

    @cached_property
    def evaluated(self) -> dict[str, Any]:
        return self.evaluate(self.keys[1], self.num_samples)

    def by_chain(self) -> Numbers:
        """Draws that exist already, by chain, as host arrays."""
        draws = jax.device_get(self.existing[0])
        return {name: split_chains(np.asarray(x), self.num_chains) for name, x in draws.items()}

    @cached_property
    def _drawn(self) -> Numbers:
        """The draws ``(chain, draw, *site)`` as they are; particles are the draws of one chain, the
        last time first."""
        if self.kind == "guide":
            return {**self.evaluated["latent"], **self.evaluated["deterministic"]}
        by_chain = self.by_chain()
        if self.kind == "chains" or not isinstance(self.obj, MCMC):
            return by_chain
        # The chains are the particles, and their last draw is the answer.
        by_time = {name: np.swapaxes(x, 0, 1)[::-1] for name, x in by_chain.items()}
        if self.kind == "ensemble":
            return {name: x.reshape(1, -1, *x.shape[2:]) for name, x in by_time.items()}
        return {name: x[:1] for name, x in by_time.items()}

    @cached_property
    def draws(self) -> Numbers:
        """The same of all sites, with angles within pi of the middle of their circle."""
        return unrolled(self._drawn, self.info)

    @property
    def latent(self) -> Numbers:
        """The draws of the latent sites."""
        return {name: x for name, x in self.draws.items() if name in self.proto.latents}

    @property
    def first(self) -> dict[str, Any]:
        """The draws ``{site: (m, *site)}`` that belong to the first parameters."""
        draws = self.draws
        if self.kind == "guide":
            draws = {name: x[:1] for name, x in draws.items()}
        return {name: x.reshape(-1, *x.shape[2:]) for name, x in draws.items()}

    @cached_property
    def stats(self) -> Numbers:
        return mcmc_stats(self) if self.kind == "chains" else self.evaluated["stats"]

    @cached_property
    def sampling(self) -> np.ndarray | None:
        """``(chain, draw)``: draws that a cyclical schedule did not mark as exploration."""
        marks = self.stats.get("sampling")
        return None if marks is None else np.asarray(marks, bool)

    # The density on all data.

    @cached_property
    def info(self) -> ModelInfo:
        """The parts of the model that are static on all data, with each circle cut where the draws
        are not."""
        info = model_info(self.proto.trace, sums=True)
        return cut_by_draws(info, self._drawn) if circular_sites(info) else info

    def potential(
        self, params: Params, info: ModelInfo, deterministic: tuple[str, ...] = ()
    ) -> Potential:
        """The potential, without its other deterministic sites, which cost another run."""
        info = replace(info, deterministic=deterministic)
        return Potential(self.model, info, params, self.args, self.kwargs)

    @cached_property
    def block(self) -> int:
        """Draws that are run through the model at a time, with at most ``BLOCK`` log densities."""
        sites = sample_sites(self.proto.trace)
        count = sum(max(count_of(site), math.prod(jnp.shape(site["value"]))) for site in sites)
        return max(1, BLOCK // max(1, count))

    @cached_property
    def has_gradient(self) -> bool:
        """True if no drawn site is discrete, and sites that were not drawn can be summed out."""
        supports = (self.proto.trace[name]["fn"].support for name in self.proto.latents)
        summable = not self.proto.marginalized or find_spec("funsor") is not None
        return summable and not any(support.is_discrete for support in supports)

    @cached_property
    def gradient_cost(self) -> float:
        """How many numbers a gradient on all data computes; but for what does not depend on the
        draw, as the normaliser of a prior with known parameters, which all draws share."""

        def gradient(params: Params, x: Array) -> tuple[Array, Array]:
            return self.potential(params, self.info).value_and_grad_flat(x, {})

        x = jax.ShapeDtypeStruct((self.info.size,), jnp.result_type(float))
        return max(count_operations(gradient, self.params[0], x, fixed=1), 1.0)


def prototype(fit: Fit) -> Prototype:
    """Look at one draw without computing it; an error names a latent site without draws."""
    key, params = random.key(0), fit.params[0]
    guide_trace: Trace = {}
    model_trace: Trace = {}

    def look() -> None:
        if fit.existing:
            values = {name: jnp.asarray(x[0]) for name, x in fit.existing[0].items()}
        else:
            guide_trace.update(fit.guide_trace(params, key))
            values = {site["name"]: site["value"] for site in latent_sites(guide_trace)}
        model_trace.update(fit.model_trace(params, values, key))
        check_observed(model_trace)

    jax.eval_shape(look)
    _check_known(fit, model_trace, guide_trace)
    latents = [site["name"] for site in latent_sites(model_trace)]
    if fit.needs_latents and not latents:
        raise ValueError("the model has no latent sample site; use predictive_scores.")
    drawn = fit.existing[0] if fit.existing else guide_trace
    missing = [model_trace[name] for name in latents if name not in drawn]
    for site in missing:
        summed = bool(fit.existing) or site["infer"].get("enumerate")
        if not (summed and site["fn"].has_enumerate_support):
            source = "the draws lack" if fit.existing else "the guide does not draw"
            raise ValueError(
                f"{source} latent site '{site['name']}' of the model; if it is data, pass it in"
                " model_args, otherwise collect it."
            )
    marginalized = [site["name"] for site in missing]
    density, undeclared, units = "none", [], None
    if guide_trace and not missing:
        density, undeclared = density_of(fit.guide, guide_trace, model_trace)
        layout = find_layout(model_trace, guide_trace, per_datum=False)
        units = layout if density == "exact" and layout.plates else None
    return Prototype(
        trace=model_trace,
        latents=[name for name in latents if name not in marginalized],
        density=density,
        undeclared=undeclared,
        units=units,
        marginalized=marginalized,
        moving=moving_supports(seed(fit.model, key), fit.args, fit.kwargs, model_trace),
        left_out=[
            name
            for name, site in model_trace.items()
            if missing and (site["type"] == "deterministic" or is_data(site))
        ],
    )


def _check_size(site: Site, value: Array) -> None:
    shape = site["kwargs"].get("sample_shape", ()) + tuple(site["fn"].shape())
    drawn = jnp.shape(value)
    # Inside a loop a value has an axis of steps besides.
    if len(drawn) == len(shape) and jnp.size(value) != math.prod(shape):
        raise ValueError(
            f"the draws of latent site '{site['name']}' have shape {drawn}, and on these arguments"
            f" it is {shape}: they are known for the rows of the training data alone."
        )


def _check_known(fit: Fit, model_trace: Trace, guide_trace: Trace) -> None:
    """An error that names a parameter or a mutable site that has no value in the fit. A parameter
    of the model that starts at a constant may be missing: NumPyro starts it there."""
    is_chain = "kernel" in fit.attributes
    missing = []
    for name, site in {**guide_trace, **model_trace}.items():
        if site["type"] not in ("param", "mutable") or name in fit.params[0]:
            continue
        if site["type"] == "param" and name in guide_trace:
            raise ValueError(
                f"the result has no parameter '{name}' of the guide, but {sorted(fit.params[0])}."
            )
        # Names that begin with an underscore are the counters of an objective.
        if site["type"] == "mutable" and not is_chain and not name.startswith("_"):
            raise ValueError(
                f"the mutable site '{name}' has no value in a params dict; pass result=state, or"
                " what run() returned."
            )
        if site["type"] == "param":
            missing.append(name)
    if missing and (missing := _random_starts(fit, missing)):
        remedy = "chain_method='vectorized' keeps it" if is_chain else "pass the result of the fit"
        raise ValueError(
            f"the value that parameter '{missing[0]}' of the model had in this fit is not known;"
            f" {remedy}, or use numpyro.handlers.substitute."
        )


def _random_starts(fit: Fit, names: list[str]) -> list[str]:
    """The names of the parameters, among these, that start at values that depend on the key."""

    def starts(key: Array) -> dict[str, Any]:
        model: Any = substitute(seed(fit.model, key), substitute_fn=init_to_sample)
        trace = trace_of(model, fit.args, fit.kwargs)
        return {name: trace[name]["value"] for name in names}

    sources = eval_provenance(starts, key=random.key(0))
    return [name for name in names if any(jax.tree.leaves(sources[name]))]


def count_of(site: Site) -> int:
    """Number of log densities of a site."""
    fn, shape = site["fn"], jnp.shape(site["value"])
    return math.prod(np.broadcast_shapes(shape[: len(shape) - fn.event_dim], fn.batch_shape))


def evaluator(
    fit: Fit,
    *,
    lp: bool = False,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
) -> Evaluate:
    """A compiled function that runs draws through the model: to ``latent``, ``deterministic`` and
    ``stats``, ``(chain, draw, *site)`` each, what else was asked for, the data ``observed``, and
    which of their rows are ``counted``, by the mask of the site."""
    proto = fit.proto
    has_lp = lp and not proto.marginalized
    weighs = has_lp and proto.density != "none"

    def traces_of(params: Params, draw: Sites | None, keys: Array) -> tuple[Trace, Sites, Trace]:
        guide_sites, values = fit.draw(params, draw, keys[0])
        draw = {name: values[name] for name in proto.latents}
        return guide_sites, draw, fit.model_trace(params, draw, keys[1])

    def prepare(params: Params, first: Sites | None, keys: Array) -> tuple[Any, Any]:
        guide_sites, _, sites = traces_of(params, first, keys)
        reference, total = None, None
        if weighs:
            reference = reference_of(sites, guide_sites, proto.units)
            total = total_parts(sites, guide_sites, proto.units, reference)
        observed = {
            name: jnp.broadcast_to(
                site["value"],
                jnp.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape()),
            )
            for name, site in sites.items()
            if is_data(site)
        }
        counted = {name: num_seen(site) > 0 for name, site in sites.items() if is_data(site)}
        return partial(evaluate_draw, params, reference), (observed, counted, total)

    def evaluate_draw(
        params: Params, reference: Any, draw: Sites | None, keys: Array
    ) -> dict[str, Any]:
        guide_sites, draw, sites = traces_of(params, draw, keys)
        there = {name: site for name, site in sites.items() if name not in proto.left_out}
        data = {name: site for name, site in there.items() if is_data(site)}
        stats: Sites = {}
        if has_lp:
            jacobian = log_abs_det(sites, proto.latents)
            stats["lp"] = log_density(sites) + jacobian
        if weighs:
            stats["log_q"] = log_density(guide_sites) + jacobian
            weight = log_weight(sites, guide_sites, proto.units, reference)
            # Of a value outside of its support NumPyro's densities are what they are inside.
            if proto.moving:
                inside = [jnp.all(sites[n]["fn"].support(sites[n]["value"])) for n in proto.moving]
                weight = jnp.where(jnp.all(jnp.array(inside)), weight, -jnp.inf)
            stats["log_weight"] = weight
        computed = {n: x["value"] for n, x in there.items() if x["type"] == "deterministic"}
        out: dict[str, Any] = {"latent": draw, "deterministic": computed, "stats": stats}
        if log_likelihood:
            out["log_likelihood"] = {name: exact_log_prob(site) for name, site in data.items()}
        if posterior_predictive:
            unobserved = replace(fit, model=exact_draws(uncondition(fit.model)))
            replayed = unobserved.model_trace(params, draw, keys[2])
            out["posterior_predictive"] = {name: replayed[name]["value"] for name in data}
        return out

    over = over_draws(fit, prepare, fit.block, 3)

    def evaluate(
        rng_key: Array, num_samples: int, params: Sequence[Params] = fit.params
    ) -> dict[str, Any]:
        pieces, observed, counted = [], {}, {}
        by_chain = partial(split_chains, num_chains=fit.num_chains)
        for out, (observed, counted, total) in over(rng_key, num_samples, params):  # noqa: B007
            if weighs:
                weight = out["stats"]["log_weight"]  # the sum is in double precision
                out["stats"]["log_weight"] = weight + total_of(total, proto.units)
            pieces.append(jax.tree.map(by_chain, out))
        return {**concatenate(pieces), "observed": observed, "counted": counted}

    return evaluate


def over_draws(
    fit: Fit,
    prepare: Callable[[Params, Sites | None, Array], tuple[Any, Any]],
    block: int,
    num_keys: int,
) -> Callable[..., Iterator[Any]]:
    """A function ``(rng_key, num_samples, params=fit.params)`` that maps a compiled function over
    draws in blocks, and yields host arrays for each set of parameters.

    :param prepare: takes parameters, the first draw (None of a guide) and its keys to a function
        of a draw and its keys, and to what is the same for all draws.
    """

    def run(params: Params, draws: Sites | None, keys: Array) -> Any:
        def draw(i: Any) -> Sites | None:
            return jax.tree.map(lambda x: x[i], draws)

        evaluate_draw, shared = prepare(params, draw(0), keys[0])
        return map_blocks(lambda i: evaluate_draw(draw(i), keys[i]), len(keys), block), shared

    compiled = jit_on_data(run)

    def each(
        rng_key: Array, num_samples: int, params: Sequence[Params] = fit.params
    ) -> Iterator[Any]:
        for i, key in enumerate(random.split(rng_key, len(params))):
            draws = dict(fit.existing[i]) if fit.existing else None
            size = num_samples if draws is None else len(next(iter(draws.values())))
            yield jax.device_get(compiled(params[i], draws, random.split(key, (size, num_keys))))

    return each


def concatenate(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *xs: np.concatenate(xs), *pieces)


def flat_draws(target: Potential, draws: Sites, block: int) -> Array:
    """Constrained draws of the latent sites as ``(m, d)`` points."""
    ravel, unconstrain = target.info.ravel, target.unconstrain
    return lax.map(lambda draw: ravel(unconstrain("x", draw)), draws, batch_size=block)


def cached[T](function: Callable[[Fit], T]) -> Callable[[Fit], T]:
    """A function of a fit, computed once for each."""

    @wraps(function)
    def compute_once(fit: Fit) -> T:
        if function not in fit.results_of:
            fit.results_of[function] = function(fit)
        return fit.results_of[function]

    return compute_once


STATS = {
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "accept_prob": "acceptance_rate",
}
"""NumPyro's names of sampler statistics, and ArviZ's."""


def mcmc_stats(fit: Fit) -> Numbers:
    """The extra fields of an ``MCMC`` that are arrays, under ArviZ's names."""
    stats: Numbers = {}
    extra: dict[str, Any] = jax.device_get(fit.obj.get_extra_fields(group_by_chain=True))
    for field_name, value in extra.items():
        if not isinstance(value, np.ndarray):
            continue
        name = STATS.get(field_name, field_name)
        if field_name == "potential_energy":
            value = -value
            if fit.by_minibatches:
                name = "lp_minibatch"
        stats[name] = value
        if field_name == "num_steps":
            stats["tree_depth"] = np.log2(value).astype(int) + 1
            limit = max_tree_depth(fit.obj.sampler)
            if limit is not None:
                stats["reached_max_tree_depth"] = stats["tree_depth"] >= limit
    return stats


def split_chains(x: np.ndarray, num_chains: int) -> np.ndarray:
    """``(chain, draw, ...)`` of draws of several chains, one chain after the other."""
    return x.reshape(num_chains, len(x) // num_chains, *x.shape[1:])
