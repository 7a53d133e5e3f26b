"""The contents of a NumPyro program, and the runs on shapes that read them: sites, plates,
parameters, and the flat order of latents."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import accumulate, pairwise
import math
from typing import Any, NamedTuple

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro import validation_enabled
from numpyro.distributions import (
    Delta,
    ExpandedDistribution,
    ImproperUniform,
    TransformedDistribution,
    Unit,
    biject_to,
    constraints,
)
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoGuide
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_ext._model.arguments import has_words, indexed, is_traced
from numpyro_ext._model.handlers import (
    check_num_rows,
    on_first_rows,
    subsampled_plates,
    valid_plates,
)
from numpyro_ext._model.lookups import marked_plates, shapes_on_plates
from numpyro_ext._model.operations import on_numbers
from numpyro_ext._numpyro import handlers_around, mask_of, validate_model
from numpyro_ext._typing import Model, Shape, Sites, Trace
from numpyro_ext.data._rows import is_stream

Site = dict[str, Any]
"""One entry of a trace."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The unconstrained shape of each site, in the order of a latent vector."""

FILLED = "_of_masked_entries"
"""The end of the name of what a guide adds for losses of NumPyro alone."""


def sample_sites(trace: Trace) -> Iterator[Site]:
    """Latent and observed sites, in the order of the trace."""
    return (site for site in trace.values() if site["type"] == "sample")


def latent_sites(trace: Trace) -> Iterator[Site]:
    """Sample sites that are not observed; a guide's auxiliary sites among them."""
    return (site for site in sample_sites(trace) if not site["is_observed"])


def values_of(trace: Trace, *kinds: str) -> dict[str, Any]:
    """The values of the sites of these kinds, such as ``"param"`` and ``"mutable"``."""
    return {name: site["value"] for name, site in trace.items() if site["type"] in kinds}


def layers(fn: Any) -> Iterator[Any]:
    """A distribution, and the ones under its ``expand``, ``mask``, ``to_event`` and transforms."""
    while fn is not None:
        yield fn
        fn = getattr(fn, "base_dist", None)


def transforms_of(fn: Any) -> list[Any]:
    """The transforms of a distribution."""
    return [t for layer in layers(fn) for t in getattr(layer, "transforms", ())]


def without_expand(fn: Any, shape: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
    """A distribution and the shape of its draws, with ``expand`` as a part of the shape, if it is
    around one that has no batch axes."""
    if isinstance(fn, ExpandedDistribution) and not fn.base_dist.batch_shape:
        return fn.base_dist, (*shape, *fn.batch_shape)
    return fn, shape


def steps_of_draw(fn: Any, rng_key: Array, shape: tuple[int, ...]) -> tuple[Any, list[Any]]:
    """``fn.sample_with_intermediates``, in which a log determinant is left to be computed when it
    is asked for."""
    if not isinstance(fn, TransformedDistribution):
        return fn.sample_with_intermediates(rng_key, shape)
    x, before = fn.base_dist.sample(rng_key, shape), []
    for transform in fn.transforms:
        before.append([x, None])
        x = transform(x)
    return x, before


def value_before(site: Site) -> Array:
    """What was drawn before the one transform of a site."""
    return site["intermediates"][0][0]


def has_array_mask(fn: Any) -> bool:
    """Return whether an array masks entries of a distribution; ``mask=False`` leaves out all."""
    masks = [mask_of(layer) for layer in layers(fn)]
    return any(mask is not None and jnp.ndim(mask) > 0 for mask in masks)


def base_distribution(fn: Any) -> Any:
    """The innermost layer."""
    return list(layers(fn))[-1]


def elementwise(support: Any) -> Any:
    """A constraint without the axes that ``to_event`` has declared."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_bounded(site: Site) -> bool:
    """Return whether there are numbers outside of the support of a site."""
    support = elementwise(getattr(site["fn"], "support", None))
    return support not in (None, constraints.real, constraints.circular, constraints.complex)


def split_auxiliary(guide_trace: Trace) -> tuple[Sites, Sites]:
    """Values of the sites marked ``is_auxiliary``, and of the other latent sites."""
    latents = {site["name"]: site["value"] for site in _values_of(guide_trace)}
    sites = latent_sites(guide_trace)
    return {x["name"]: x["value"] for x in sites if x["name"] not in latents}, latents


def is_delta(site: Site) -> bool:
    """Return whether the value of a site is computed and not drawn."""
    return isinstance(base_distribution(site["fn"]), Delta)


def is_data(site: Site) -> bool:
    """Return whether a site is an observed sample site and not a ``numpyro.factor``."""
    return (
        site["type"] == "sample"
        and site["is_observed"]
        and not isinstance(base_distribution(site["fn"]), Unit)
    )


def frames(site: Site) -> dict[str, int]:
    """``{plate: dim}`` of the plates around a site."""
    return {frame.name: frame.dim for frame in site["cond_indep_stack"]}


def plate_sizes(*traces: Trace) -> dict[str, tuple[int, int]]:
    """``{plate: (N, M)}``, the numbers of all rows and of rows in the minibatch."""
    sizes = {}
    for sites in traces:
        for site in sample_sites(sites):
            for frame in site["cond_indep_stack"]:
                plate = sites.get(frame.name)
                full = frame.size if plate is None else plate["args"][0]
                sizes[frame.name] = (full, frame.size)
    return sizes


def own_scale(site: Site, sizes: dict[str, tuple[int, int]]) -> Any:
    """What ``handlers.scale`` adds to the scale of the plates, ``{plate: (N, M)}``, of a site."""
    scale = 1.0 if site["scale"] is None else site["scale"]
    batches = (sizes.get(name, (1, 1)) for name in frames(site))
    of_plates = math.prod(N / M for N, M in batches)
    return scale if of_plates == 1 else scale / of_plates


def is_same_scale(a: Any, b: Any) -> bool:
    """Whether two scales are the same number or array; of traced ones only an object itself is."""
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return False
    same_shape = jnp.shape(a) == jnp.shape(b) or jnp.ndim(b) == 0
    return bool(same_shape and np.allclose(a, b, rtol=1e-6, atol=0))


def scaled_latents(trace: Trace) -> tuple[str, ...]:
    """The latent sites under a ``handlers.scale`` that are discrete or in the plates of data."""
    sizes = plate_sizes(trace)
    with_data = {name for site in trace.values() if is_data(site) for name in frames(site)}
    return tuple(
        site["name"]
        for site in latent_sites(trace)
        if (with_data & set(frames(site)) or site["fn"].support.is_discrete)
        and not is_same_scale(own_scale(site, sizes), 1.0)
    )


def refuse_scaled(names: Iterable[str], who: str) -> None:
    """An error that names a latent site of :func:`scaled_latents`."""
    for name in names:
        raise ValueError(
            f"the latent site '{name}' of each row is under a numpyro.handlers.scale, and {who}"
            " cannot take that for copies of the row; give the rows as often as they count, or put"
            " the scale around the observed sites alone."
        )


def not_reparameterized(guide_trace: Trace) -> tuple[str, ...]:
    """Latent sites without a pathwise gradient, except noise under ``mask=False``."""
    return tuple(
        site["name"]
        for site in latent_sites(guide_trace)
        if not site["fn"].has_rsample
        and not any(mask_of(layer) is False for layer in layers(site["fn"]))
    )


def continuous_latents(trace: Trace, *, sums: bool = False) -> dict[str, Site]:
    """The continuous latent sites in the trace of a model; an error without any, and for a discrete
    site, unless ``sums`` is true and funsor sums it out."""
    latents, summed = {}, []
    for site in latent_sites(trace):
        name, few = site["name"], site["fn"].has_enumerate_support
        if not site["fn"].support.is_discrete:
            latents[name] = site
        elif sums and few and find_spec("funsor"):
            summed.append(f"'{name}' is discrete")
        else:
            by_mask = name.removesuffix("_unobserved")
            if name != by_mask and f"{by_mask}_observed" in trace:
                raise ValueError(
                    f"site '{by_mask}' has an obs_mask, and what it leaves out is a discrete latent"
                    " site; where nothing reads these values, put the site without obs_mask under"
                    " numpyro.handlers.mask(mask=...), or leave the rows out."
                )
            remedy = "sum it out of the model"
            if sums and few:
                remedy = f"install funsor (pip install funsor), or {remedy}"
            elif not few:
                remedy += ", or use numpyro.infer.HMCGibbs with your own update"
            raise ValueError(
                f"latent site '{name}' is discrete; {remedy}. If it is data, its obs= is None on"
                " these arguments: pass the data."
            )
    if not latents:
        what = f" ({', '.join(summed)}, and summed out)" if summed else ""
        raise ValueError(
            f"the model has no latent sample site that is continuous{what}, so there is nothing to"
            " infer."
        )
    return latents


def _values_of(guide_trace: Trace) -> list[Site]:
    """The latent sites of a guide that are not auxiliary."""
    return [s for s in latent_sites(guide_trace) if not s["infer"].get("is_auxiliary")]


def shared_plates(guide_trace: Trace) -> dict[str, int]:
    """``{plate: rows}`` of the plates around every latent site of a guide, left to right."""
    stacks = [frames(site) for site in _values_of(guide_trace)]
    names = set.intersection(*map(set, stacks)) if stacks else set()
    sizes = plate_sizes(guide_trace)
    return {name: sizes[name][1] for name in sorted(names, key=lambda name: stacks[0][name])}


def latent_size(guide: Model, guide_trace: Trace) -> int:
    """The number of unconstrained coordinates that a guide draws, over all rows of its plates."""
    model_trace = getattr(guide, "prototype_trace", None)
    if model_trace:  # guides of local latents keep an empty one
        return model_info(model_trace).size
    shapes = [
        unconstrained_shape(site["fn"].support, jnp.shape(site["value"]))
        for site in _values_of(guide_trace)
    ]
    return sum(map(math.prod, shapes))


class Latent(NamedTuple):
    """One continuous latent site."""

    support: constraints.Constraint
    """May hold traced bounds: look at its kind only."""
    constrained: jax.ShapeDtypeStruct
    """Shape and type of a value in the support."""
    unconstrained: jax.ShapeDtypeStruct
    """Shape and type of a value in unconstrained space."""
    plates: tuple[str, ...]
    """Names of the plates around it."""


def slices_of(shapes: Shapes) -> dict[str, slice]:
    """The slice of each site in a latent vector."""
    ends = [0, *accumulate(math.prod(shape) for _, shape in shapes)]
    return {name: slice(*pair) for (name, _), pair in zip(shapes, pairwise(ends), strict=True)}


def unravel(x: Any, shapes: Shapes) -> Sites:
    """Vectors ``(*batch, n)`` as unconstrained sites of :attr:`ModelInfo.shapes`."""
    places = slices_of(shapes)
    return {name: x[..., places[name]].reshape((*x.shape[:-1], *shape)) for name, shape in shapes}


@dataclass(frozen=True)
class ModelInfo:
    r"""The parts of a model that are static on given arguments.

    **The flat order.** A latent vector of length :attr:`size` is the unconstrained latent sites in
    the order in which the model samples them, each ravelled in C order, as for ``AutoContinuous``.

    :param dict latents: ``{site: Latent}`` in that order.
    :param dict plates: ``{plate: (size, subsample_size)}`` of the plates that take a minibatch.
    :param dict given: the same of the plates that have one minibatch as the arguments: no observed
        site in them follows the index, as in ``plate("rows", N, subsample_size=len(x))`` around
        ``obs=x``. They are not among ``plates``.
    :param tuple data: names of the observed sites.
    :param frozenset data_plates: names of the plates around observed sites.
    :param tuple deterministic: names of the deterministic sites.
    :param tuple params: names of the ``param`` sites.
    :param tuple mutable: names of the ``mutable`` sites.
    :param tuple summed: names of the discrete latent sites, which are summed out.
    :param int nesting: the number of axes that plates take.
    :param bool masked: True if an array masks entries of a latent site.
    :param tuple scaled: names of the latent sites under a ``numpyro.handlers.scale`` that are
        discrete or in the plates of data.
    :param bool bounded: True if there are numbers outside of the support of an observed site.
    """

    latents: dict[str, Latent]
    plates: dict[str, tuple[int, int]]
    data: tuple[str, ...]
    data_plates: frozenset[str]
    deterministic: tuple[str, ...]
    params: tuple[str, ...]
    mutable: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    nesting: int = 0
    masked: bool = False
    bounded: bool = True
    scaled: tuple[str, ...] = ()
    given: dict[str, tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """Length of a latent vector."""
        return sum(math.prod(latent.unconstrained.shape) for latent in self.latents.values())

    @cached_property
    def shapes(self) -> Shapes:
        """``(site, unconstrained shape)`` in the order of a latent vector."""
        return tuple((name, latent.unconstrained.shape) for name, latent in self.latents.items())

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each site in a latent vector."""
        return slices_of(self.shapes)

    @property
    def site_table(self) -> "SiteTable":
        """The facts about latent sites that a fit must share with the model on which it goes on."""
        return _table((n, x.unconstrained.shape, x.support) for n, x in self.latents.items())

    def ravel(self, z: Sites) -> Array:
        """Unconstrained sites as one ``(size,)`` vector."""
        return jnp.concatenate([jnp.ravel(z[name]) for name in self.latents])

    def unravel(self, x: Any) -> Sites:
        """A ``(size,)`` vector as unconstrained sites, each in its type in the model."""
        return {
            name: x[..., self.slices[name]].reshape((*x.shape[:-1], *z.shape)).astype(z.dtype)
            for name, z in ((n, latent.unconstrained) for n, latent in self.latents.items())
        }

    def ravel_numbers(self, what: str, values: Any) -> Array:
        """A number or an array for each site, as one ``(size,)`` vector."""
        self.check_names(what, values)
        shapes = dict(self.shapes)
        full = {n: jnp.full(shapes[n], x) if jnp.ndim(x) == 0 else x for n, x in values.items()}
        return self.ravel(self.check_unconstrained(what, full))

    def in_order(self, sites: dict[str, Any]) -> dict[str, Any]:
        """The same dict in the order of the model; JAX sorts the names of a dict."""
        return {name: sites[name] for name in self.latents}

    def check_names(self, what: str, values: Any) -> None:
        """A ``ValueError`` unless ``values`` is a dict with just the latent sites."""
        if not isinstance(values, dict) or set(values) != set(self.latents):
            names = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ValueError(
                f"{what} has {names}; it must be a dict with the sites {sorted(self.latents)}."
            )

    def check_shapes(self, before: Shapes, what: str, remedy: str) -> None:
        """A ``ValueError`` unless the latent vector is ``before``, as ``what`` has it."""
        if list(self.shapes) != list(before):
            raise ValueError(
                f"{what} has the unconstrained latent sites {dict(before)}, but on these arguments"
                f" the model has {dict(self.shapes)}; {remedy}."
            )

    def check_unconstrained(
        self, what: str, values: Any, batch_shape: Shape = (), kind: str = "unconstrained"
    ) -> Sites:
        """``values`` as arrays in unconstrained space, or a ``ValueError`` that names the site."""
        self.check_names(what, values)
        like = {name: getattr(latent, kind) for name, latent in self.latents.items()}
        for name, expected in like.items():
            here, shape = jnp.shape(values[name]), batch_shape + expected.shape
            if here != shape:
                raise ValueError(f"{what} has shape {here} at site '{name}'; it must be {shape}.")
        return {name: jnp.asarray(values[name], expected.dtype) for name, expected in like.items()}

    def check_constrained(self, what: str, values: Any, batch_shape: Shape = ()) -> Sites:
        """``values`` as arrays in the supports; values of deterministic sites are left out."""
        if isinstance(values, dict):
            values = {name: x for name, x in values.items() if name not in self.deterministic}
        return self.check_unconstrained(what, values, batch_shape, "constrained")


def model_info(trace: Trace, *, sums: bool = False) -> ModelInfo:
    """Everything static in a trace of a model; ``sums`` as in :func:`continuous_latents`."""
    real = jnp.result_type(float)
    latents = {}
    for name, site in continuous_latents(trace, sums=sums).items():
        support, shape = site["fn"].support, jnp.shape(site["value"])
        latents[name] = Latent(
            support,
            jax.ShapeDtypeStruct(shape, real),
            jax.ShapeDtypeStruct(unconstrained_shape(support, shape), real),
            tuple(frames(site)),
        )
    summed = tuple(site["name"] for site in latent_sites(trace) if site["name"] not in latents)
    if summed:  # an axis without a plate would be taken for values to sum over
        validate_model(trace, plate_warning="error")
    axes = (-dim for site in sample_sites(trace) for dim in frames(site).values())
    observed = (site for site in sample_sites(trace) if site["is_observed"])
    return ModelInfo(
        latents=latents,
        plates=subsampled_plates(trace),
        data=tuple(name for name, site in trace.items() if is_data(site)),
        data_plates=frozenset(n for x in observed for n in frames(x)),
        deterministic=tuple(values_of(trace, "deterministic")),
        params=tuple(values_of(trace, "param")),
        mutable=tuple(values_of(trace, "mutable")),
        summed=summed,
        nesting=max(axes, default=0),
        masked=any(has_array_mask(site["fn"]) for site in latent_sites(trace)),
        bounded=any(is_bounded(site) for site in trace.values() if is_data(site)),
        scaled=scaled_latents(trace),
    )


def latent_shapes(trace: Trace) -> Shapes:
    """The unconstrained shape of each latent site."""
    return tuple(
        (site["name"], unconstrained_shape(site["fn"].support, jnp.shape(site["value"])))
        for site in latent_sites(trace)
    )


def unconstrained_shape(support: constraints.Constraint, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in unconstrained space of a value of this shape."""
    # A bound may be a tracer of a reading that is over, with which nothing can be computed.
    alive = jax.tree.map(lambda x: np.zeros(jnp.shape(x)) if is_traced(x) else x, support)
    return biject_to(alive).inverse_shape(shape)


def has_fixed_bounds(supports: Any) -> bool:
    """Return whether all bounds of supports are numbers; arrays may depend on other sites."""
    return all(isinstance(leaf, int | float) for leaf in jax.tree.leaves(supports))


def moving_supports(model: Model, args: tuple, kwargs: dict[str, Any], trace: Trace) -> set[str]:
    """The latent sites in a trace with a support that depends on another latent site."""
    values = {site["name"]: site["value"] for site in latent_sites(trace)}
    if has_fixed_bounds([trace[name]["fn"].support for name in values]):
        return set()

    def supports(**values: Array) -> dict[str, list[Any]]:
        seeded = seed(on_first_rows(model), random.key(0))
        sites = trace_of(substitute(seeded, data=values), args, kwargs)
        return {name: jax.tree.leaves(sites[name]["fn"].support) for name in values}

    with block(), validation_enabled(False):
        values = {n: jnp.zeros(jnp.shape(x), jnp.result_type(x)) for n, x in values.items()}
        sources = eval_provenance(supports, **values)
    return {name for name, leaves in sources.items() if any(leaves)}


type SiteTable = list[tuple[str, Shape, str]]
"""Name, unconstrained shape and kind of support of each continuous latent site."""


def sites_in_trace(trace: Trace) -> SiteTable:
    """The table of the sites in a trace of a model."""
    sites = {x["name"]: x for x in latent_sites(trace) if not x["fn"].support.is_discrete}
    return _table((n, shape, sites[n]["fn"].support) for n, shape in latent_shapes(sites))


def _table(sites: Iterable[tuple[str, Shape, Any]]) -> SiteTable:
    supports = ((name, shape, elementwise(support)) for name, shape, support in sites)
    return [(n, shape, getattr(x, "kind", type(x).__name__.strip("_"))) for n, shape, x in supports]


def check_site_table(saved: SiteTable, now: SiteTable) -> None:
    """An error where the latent sites of a fit that is loaded are not the model's."""
    before, here = ({name: rest for name, *rest in table} for table in (saved, now))
    for name in [*before, *here]:
        if before.get(name) != here.get(name):
            old, new = (
                "no such site" if x is None else f"shape {tuple(x[0])} on {x[1]}"
                for x in (before.get(name), here.get(name))
            )
            raise ValueError(
                f"the file has a fit of another model: of the latent site '{name}' it has {old},"
                f" and this model has {new}, without constraints; give load the model of the fit,"
                " and arguments on which its latent sites have the same shapes."
            )
    if list(before) != list(here):
        raise ValueError(
            f"the file has the latent sites in the order {list(before)}, and this model samples"
            f" them in the order {list(here)}; give load the model of the fit."
        )


def drawn_names(model: Model, args: tuple, kwargs: dict[str, Any]) -> set[str]:
    """Names of the sites that the model draws on these arguments; no site is refused."""
    trace = shape_trace(seed(on_first_rows(model), random.key(0)), args, kwargs)
    return {site["name"] for site in latent_sites(trace)}


class _refuse_no_rows(Messenger):
    """Refuse a minibatch without rows, on which NumPyro has the prior alone and says nothing, and
    draws of an improper prior, at which it stops without a word."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            check_num_rows(msg)
        elif msg["type"] == "sample" and msg["value"] is None:
            if isinstance(base_distribution(msg["fn"]), ImproperUniform):
                raise ValueError(
                    f"the prior of latent site '{msg['name']}' is improper, and draws of the prior"
                    " are needed here; give it a proper one, such as a wide dist.Normal."
                )


def trace_of(fn: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """The trace of one run."""
    try:
        with _refuse_no_rows():
            return trace_again(fn, args, kwargs or {})
    except TypeError as error:
        if not any(map(has_words, jax.tree.leaves((args, kwargs)))):
            raise
        raise TypeError(
            "the model computes with an array of words or of Python objects among its arguments;"
            " code words as numbers, as by np.unique(words, return_inverse=True)[1]."
        ) from error


def trace_again(fn: Model, args: tuple, kwargs: dict[str, Any]) -> Trace:
    """The trace of a program that :func:`trace_of` has run before on such arguments."""
    sites = trace(fn).get_trace(*indexed(args), **indexed(kwargs))
    return {name: site for name, site in sites.items() if not name.endswith(FILLED)}


def call_and_trace(fn: Model, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Trace]:
    """The result of ``fn`` and the trace of that run. Outer handlers see its sites too."""
    with trace() as recorded:
        result = fn(*args, **kwargs)
    return result, recorded


def shape_trace(fn: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """The trace of a run without arithmetic, in which values have only a shape and a type."""
    box: Trace = {}

    def run() -> None:
        with block():  # a guide that reads its model is traced itself
            box.update(trace_of(marked_plates(fn), args, kwargs))

    shapes_on_plates(run)
    return box


def is_only_recorded() -> bool:
    """Whether no handler around the program that runs can give a site a value."""
    return all(type(handler) in (trace, seed) for handler in handlers_around())


def set_up(guide: Model, args: tuple = (), kwargs: dict[str, Any] | None = None) -> None:
    """Call an auto guide that was never called, so that it does not read its model in a trace."""
    if isinstance(guide, type):
        name = guide.__name__
        raise TypeError(
            f"the guide is the class {name}; give SVI an instance: SVI(model, {name}(model), ...)."
        )
    while not isinstance(guide, AutoGuide):
        if not hasattr(guide, "fn"):  # of a handler, or of another wrapper
            return
        guide = guide.fn  # type: ignore[attr-defined] - looked at just above
    if guide.prototype_trace is None:
        with block(), on_numbers():
            seed(getattr(guide, "set_up", guide), 0)(*args, **(kwargs or {}))


def read_model(
    model: Model,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    *,
    init_strategy: Callable[..., Any] = init_to_uniform,
    sums: bool = False,
) -> ModelInfo:
    """Run the model once on shapes alone; an error names a site that no method here can handle."""
    seeded = valid_plates(on_first_rows(seed(model, random.key(0))))
    fn = substitute(seeded, substitute_fn=init_strategy)
    trace = shape_trace(fn, args, kwargs)
    info = model_info(trace, sums=sums)
    given = given_plates(model, args, kwargs or {}, init_strategy, trace)
    plates = {name: sizes for name, sizes in info.plates.items() if name not in given}
    return replace(info, plates=plates, given=given)


def check_all_rows(
    who: str, given: dict[str, tuple[int, int]], args: tuple, kwargs: dict[str, Any]
) -> None:
    """An error where the rows of a minibatch are all that ``who`` can read."""
    if not given and not is_stream((args, kwargs)):
        return
    what = "a Batches gives them as its loader does"
    for plate, (size, batch) in given.items():
        what = f"the arguments of the model are {batch} of the {size} rows of the plate '{plate}'"
    raise ValueError(
        f"{who} reads all rows, and the same rows again, but {what}; use a"
        " numpyro_ext.data.HostArray of all rows, of which the model takes x[i]."
    )


def given_plates(
    model: Model,
    args: tuple,
    kwargs: dict[str, Any],
    init_strategy: Callable[..., Any],
    trace: Trace | None = None,
) -> dict[str, tuple[int, int]]:
    """:attr:`ModelInfo.given`: the plates that take a minibatch and have the same densities for any
    rows, of a model that may have no continuous latent site."""
    fn = substitute(on_first_rows(seed(model, random.key(0))), substitute_fn=init_strategy)
    trace = shape_trace(fn, args, kwargs) if trace is None else trace
    plates = subsampled_plates(trace)
    latent = {name for site in latent_sites(trace) for name in frames(site)}
    observed = {site["name"]: site for site in sample_sites(trace) if site["is_observed"]}
    around = {name for site in observed.values() for name in frames(site)}
    plates = {name: sizes for name, sizes in plates.items() if name in around - latent}
    if not plates:
        return {}

    def densities(**rows: Array) -> list[Any]:
        sites = trace_of(substitute(fn, data=rows), args, kwargs)
        seen = (sites[name] for name in observed)
        return [(site["fn"].log_prob(site["value"]), site["scale"]) for site in seen]

    with block(), validation_enabled(False):
        first = {name: jnp.arange(batch) for name, (_, batch) in plates.items()}
        followed = frozenset().union(*jax.tree.leaves(eval_provenance(densities, **first)))
    return {name: sizes for name, sizes in plates.items() if name not in followed}
