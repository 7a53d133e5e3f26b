"""NumPyro's private names and attributes, as of 0.22.0: nowhere else, not even as strings."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
import copy
from functools import partial
from inspect import getclosurevars
import math
from typing import Any, cast

import jax
from jax import Array, jit, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.handlers import block, replay, seed, substitute
from numpyro.infer import MCMC
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoSemiDAIS,
)
from numpyro.infer.initialization import init_to_value
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import (
    _get_model_transforms,
    _prepare_model_for_potential,
    _unconstrain_reparam,
    constrain_fn,
    transform_fn,
)
from numpyro.infer.util import _substitute_default_key as default_key
from numpyro.infer.util import _without_rsample_stop_gradient as without_rsample_stop_gradient
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.util import _validate_model as validate_model

from numpyro_ext._typing import Model, Params, Sites, Trace

# What is handed on as it is; the functions and classes below are for all files too.
__all__ = ["default_key", "validate_model", "without_rsample_stop_gradient"]


def mask_of(fn: dist.Distribution) -> Any:
    """The mask of a ``MaskedDistribution``; None for any other distribution."""
    return getattr(fn, "_mask", None)


def at_unconstrained(model: Model, z: Sites) -> Model:
    """The model at unconstrained values of its latent sites; each log Jacobian is a factor."""
    return substitute(model, substitute_fn=partial(_unconstrain_reparam, z))


def site_of_log_det(name: str, latents: Collection[str]) -> str:
    """The latent site if the factor of this name is its log Jacobian; otherwise the name itself."""
    site = name.removeprefix("_").removesuffix("_log_det")
    return site if site in latents else name


def replayed_trace() -> Trace | None:
    """The trace of the guide that is replayed in the model that runs, or None."""
    return next((x.trace for x in reversed(_PYRO_STACK) if isinstance(x, replay)), None)


def handlers_around() -> list[Any]:
    """The handlers around the program that runs."""
    return list(_PYRO_STACK)


def max_tree_depth(kernel: Any) -> int | None:
    """The limit of ``NUTS`` after warmup; None for a kernel that builds no trees."""
    limit = getattr(kernel, "_max_tree_depth", None)
    return limit[-1] if isinstance(limit, tuple) else limit


def params_of_hmc(kernel: Any) -> Params | None:
    """Values of the ``param`` and ``mutable`` sites of the model in the chains of ``HMC`` or
    ``NUTS``; None where they are not known, as of a kernel that was pickled."""
    start = getattr(kernel, "_init_fn", None)
    potential = getclosurevars(start).nonlocals.get("potential_fn_gen") if start else None
    fn: Any = potential.args[0].args[0] if potential else None
    while fn is not None and not isinstance(fn, substitute):
        fn = getattr(fn, "fn", None)
    return None if fn is None else dict(fn.data or {})


def unwrap_distribution(fn: dist.Distribution) -> tuple[Any, tuple[int, ...], int]:
    """The distribution under ``expand`` and ``to_event``, and the shape and event dims they add."""
    return LocScaleReparam()._unwrap(fn)


def wrap_distribution(
    fn: dist.Distribution, expand_shape: tuple[int, ...], event_dim: int
) -> dist.Distribution:
    """The inverse of :func:`unwrap_distribution`, for another distribution."""
    return LocScaleReparam()._wrap(fn, expand_shape, event_dim)


def mcmc_arguments(mcmc: MCMC) -> tuple[tuple, dict[str, Any]]:
    """The model's arguments in the last ``run``."""
    state: Any = mcmc
    return state._args, state._kwargs


def draws_of_mcmc(mcmc: MCMC) -> Any:
    """``(chain, draw, *shape)`` of each field that was collected in the last ``run``."""
    state: Any = mcmc
    return state._states


def mcmc_of_draws(
    mcmc: MCMC, draws: Any, last_state: Any, args: tuple, kwargs: dict[str, Any]
) -> MCMC:
    """The ``MCMC`` as if its ``run`` had these draws, ``(chain, draw, *shape)`` of each field."""
    state: Any = mcmc
    state._states, state._last_state, state._args, state._kwargs = draws, last_state, args, kwargs
    state._states_flat = None
    return mcmc


class ResumableKernel(MCMCKernel):
    """A kernel with an :meth:`init` that is also called when ``MCMC`` takes up a chain again: only
    with a state does ``MCMC`` ask for ``_sample_fn``."""

    _is_taken_up = False

    @property
    def _sample_fn(self) -> None:
        self._is_taken_up = True

    def takes_up_a_chain(self) -> bool:
        """Whether the call of :meth:`init` that asks this is for a chain that ``MCMC`` has."""
        is_taken_up, self._is_taken_up = self._is_taken_up, False
        return is_taken_up


_SECOND = {
    AutoDiagonalNormal: "scale",
    AutoNormal: "scale",
    AutoMultivariateNormal: "scale_tril",
    AutoLowRankMultivariateNormal: "scale",
}
"""The parameter of a normal guide beside its mean."""


def normal_of_guide(guide: Any, params: Params) -> tuple[Array, Array]:
    """Mean ``(n,)`` and lower triangular factor of a normal guide, or scales of a diagonal one, in
    the order in which the model samples its sites."""
    allowed = (*_SECOND, AutoLaplaceApproximation)
    if not isinstance(guide, allowed):
        names = ", ".join(cls.__name__ for cls in allowed)
        raise TypeError(f"guide is a {type(guide).__name__}; it must be one of {names}.")
    if guide.prototype_trace is None:
        raise ValueError(
            f"{type(guide).__name__} has not seen its model; fit it by svi.run first, and pass the"
            " guide and its params."
        )
    sites = guide.prototype_trace.items()
    sites = [n for n, x in sites if x["type"] == "sample" and not x["is_observed"]]
    of_sites = isinstance(guide, AutoNormal)
    for name in [f"{site}_{guide.prefix}" for site in sites] if of_sites else [guide.prefix]:
        kinds = [kind for cls, kind in _SECOND.items() if isinstance(guide, cls)]
        for param in (f"{name}_loc", *(f"{name}_{kind}" for kind in kinds)):
            if param not in params:  # NumPyro would take the value at the start
                raise ValueError(
                    f"params has no '{param}' but {sorted(params)}; pass the params that"
                    f" svi.get_params gives for this {type(guide).__name__}."
                )
    if isinstance(guide, AutoNormal):
        loc, scale = (
            jnp.concatenate([jnp.ravel(params[f"{name}_{guide.prefix}_{what}"]) for name in sites])
            for what in ("loc", "scale")
        )
        return loc, scale
    transform: Any = guide.get_transform(params)
    # The guide's order falls back to the alphabet if its first start was not finite.
    with jax.ensure_compile_time_eval():
        place = guide._unpack_latent(jnp.arange(guide.latent_dim))
    order = np.concatenate([np.ravel(place[name]) for name in sites])
    if isinstance(guide, AutoDiagonalNormal):
        loc = transform(jnp.zeros(guide.latent_dim))
        return loc[order], (transform(jnp.ones(guide.latent_dim)) - loc)[order]
    loc, factor = transform.loc[order], transform.scale_tril[order]
    if np.all(order[1:] > order[:-1]):
        return loc, factor
    return loc, triangular_root(factor)


def triangular_root(root: Array) -> Array:
    """The lower triangular root of the covariance with the ``(n, m)`` root."""
    R = jnp.linalg.qr(root.T, mode="r")
    return R.T * jnp.sign(jnp.diagonal(R))


def params_of_normal(guide: Any, loc: Array, factor: Array) -> Params:
    """The parameters of a normal guide of this mean and factor: a matrix for an
    ``AutoMultivariateNormal``, and scales for the others."""
    allowed = (AutoMultivariateNormal, AutoNormal, AutoDiagonalNormal)
    if not isinstance(guide, allowed):
        names = ", ".join(cls.__name__ for cls in allowed)
        raise TypeError(f"guide is a {type(guide).__name__}; it must be one of {names}.")
    size = sum(map(jnp.size, guide._init_locs.values()))
    if len(loc) != size:
        raise ValueError(f"the normal has {len(loc)} coordinates; the guide's model has {size}.")
    prefix, trace = guide.prefix, guide.prototype_trace or {}
    if isinstance(guide, AutoNormal):
        params, start = {}, 0
        for name in (name for name in trace if name in guide._init_locs):
            shape = jnp.shape(guide._init_locs[name])
            stop = start + math.prod(shape)
            params[f"{name}_{prefix}_loc"] = loc[start:stop].reshape(shape)
            params[f"{name}_{prefix}_scale"] = factor[start:stop].reshape(shape)
            start = stop
        return params
    place = guide._unpack_latent(jnp.arange(guide.latent_dim))
    back = jnp.argsort(jnp.concatenate([jnp.ravel(place[name]) for name in trace if name in place]))
    if isinstance(guide, AutoDiagonalNormal):
        return {f"{prefix}_loc": loc[back], f"{prefix}_scale": factor[back]}
    return {f"{prefix}_loc": loc[back], f"{prefix}_scale_tril": triangular_root(factor[back])}


def posterior_guide(
    guide: Model,
    params: Sequence[Params],
    args: tuple,
    kwargs: dict[str, Any],
    on_every_row: Callable[[Model], Model],
) -> tuple[Model, list[Params]]:
    """A guide that draws what ``sample_posterior`` draws, for all data, and its params."""
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        seed(guide, 0)(*args, **kwargs)
    if isinstance(guide, AutoGuideList):
        whole: Any = copy.copy(guide)
        whole._guides, params = [], list(params)
        for part in guide:
            part, params = posterior_guide(part, params, args, kwargs, on_every_row)
            whole._guides.append(part)
        return whole, params
    if isinstance(guide, AutoLaplaceApproximation):
        normal: Any = copy.copy(guide)
        loc, scale_tril = f"{guide.prefix}_loc", f"{guide.prefix}_scale_tril"
        normal._get_posterior = lambda *args, **kwargs: dist.MultivariateNormal(
            numpyro.param(loc), scale_tril=numpyro.param(scale_tril), validate_args=False
        )
        factor = jit(lambda params: guide.get_transform(params).scale_tril)
        params = [{**fit, scale_tril: factor(fit)} for fit in params]
        if any(bool(jnp.any(jnp.diag(fit[scale_tril]) == 0)) for fit in params):
            raise ValueError(
                "the Hessian that AutoLaplaceApproximation takes at its parameters is singular or"
                " not positive, so it has no Normal to draw from; fit it longer, or use AutoNormal."
            )
        return normal, params
    if isinstance(guide, AutoSemiDAIS):
        full: Any = copy.copy(guide)
        name, size, _ = full._local_plate
        full._local_plate = (name, size, size)
        full.local_model = on_every_row(full.local_model)
        return full, list(params)
    return guide, list(params)


def unpacking_of(guide: Any) -> Callable[[Array], Sites] | None:
    """How ``AutoContinuous`` splits its latent vector; None for others."""
    return getattr(guide, "_unpack_latent", None)


class StartGiven(AutoGuide):
    """``AutoGuide``, set up at a start that a subclass has found in one compiled program."""

    known_start: Sites | None = None
    """The unconstrained start of a fit that is loaded; it replaces :meth:`start`."""
    begun_on: tuple[tuple[tuple, dict[str, Any]], ...] = ()
    """The arguments on which the guide was set up, and others on which a later fit began, where
    constrained sites may depend on them, as deterministic ones do, and they were not traced."""

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        """A key of ``numpyro.prng_key`` and the unconstrained start; None: NumPyro searches."""

    @property
    def seen_model(self) -> Model:
        """The model with the latent sites that the guide draws; ``model`` may have others."""
        return self.model

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Run the model once on its arguments, unless that was done before."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        start = self.start(*args, **kwargs)  # which also reads what a guide needs of its model
        if self.known_start is not None:
            start = numpyro.prng_key(), self.known_start
        traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
        self.begun_on = () if traced else ((args, kwargs),)
        if start is None:
            super()._setup_prototype(*args, **kwargs)
            return
        rng_key, locs = start

        def at_start(site: dict[str, Any]) -> Array | None:
            loc = locs.get(site["name"])
            if loc is None:
                return None
            # A ``scan`` indexes by a traced number, which no NumPy array of a search allows.
            return biject_to(site["fn"].support)(jnp.asarray(loc))

        with block():
            fn = substitute(seed(self.seen_model, rng_key), substitute_fn=at_start)
            transforms, replay, _, trace = _get_model_transforms(fn, args, kwargs)
        supports = [trace[name]["fn"].support for name in locs]
        # NumPyro looks at some of the supports alone for bounds that depend on another site.
        replay |= not all(isinstance(x, int | float) for x in jax.tree.leaves(supports))
        self.prototype_trace, self._init_locs = trace, locs
        plates = [site for site in trace.values() if site["type"] == "plate"]
        self._prototype_frame_full_sizes = {site["name"]: site["args"][0] for site in plates}
        if replay:
            model = _prepare_model_for_potential(self.seen_model, trace, enum=False)
            whole: Any = partial(constrain_fn, model, args, kwargs, return_deterministic=True)
            self._postprocess_fn = seed(whole, 0)
        else:
            self.begun_on = ()
            self._postprocess_fn = partial(transform_fn, transforms)


class OnSupports(AutoContinuous, StartGiven):
    """``AutoContinuous``, which keeps the supports of its first call, with supports that may depend
    on the values of other sites."""

    def supports_at(self, z: Sites, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The support of each latent site at unconstrained values of all of them."""
        trace: Any = self.prototype_trace
        return {name: trace[name]["fn"].support for name in z}

    def evaluate(self, fn: Callable[[Any], Any], x: Any) -> Any:
        """``fn(x)``, which a subclass may compute in one program."""
        return fn(x)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.set_up(*args, **kwargs)
        latent: Any = self._sample_latent(*args, **kwargs)
        z: Any = self.evaluate(self._unpack_latent, latent)
        supports, trace = self.supports_at(z, args, kwargs), cast(Trace, self.prototype_trace)

        def points(z: Sites) -> dict[str, Any]:
            points: dict[str, Any] = {}
            for name, u in z.items():
                transform, event_dim = biject_to(supports[name]), trace[name]["fn"].event_dim
                value: Any = transform(u)
                log_density: Any = 0.0
                if numpyro.get_mask() is not False:
                    log_det: Any = transform.log_abs_det_jacobian(u, value)
                    extra = jnp.ndim(log_det) - jnp.ndim(value) + event_dim
                    log_density = -sum_rightmost(log_det, extra)
                points[name] = dist.Delta(value, log_density=log_density, event_dim=event_dim)
            return points

        made = self.evaluate(points, z)
        return {name: numpyro.sample(name, made[name]) for name in z}


def start_of(guide: AutoGuide) -> tuple[Sites, Sites]:
    """Where a guide was set up: values of its latent sites, and unconstrained ones, in the order of
    its latent vector."""
    begun: Any = guide
    sites = begun.prototype_trace.values()
    latent = [x for x in sites if x["type"] == "sample" and not x["is_observed"]]
    return {site["name"]: site["value"] for site in latent}, dict(begun._init_locs)


def set_up_at(
    guide: AutoGuide, start: tuple[Sites, Sites], args: tuple, kwargs: dict[str, Any]
) -> None:
    """Set up a guide, also one of NumPyro's own, at the start of another, without a search. A site
    without a start, such as one to predict, does not belong to the guide."""
    own: Any = guide
    values, locs = start
    model, strategy = own.model, own.init_loc_fn
    own.model, own.init_loc_fn = _Given(model, values), init_to_value(values=values)
    if isinstance(guide, StartGiven):
        own.known_start = locs
    try:
        with seed(rng_seed=0), block():
            own._setup_prototype(*args, **kwargs)
    finally:
        own.model, own.init_loc_fn = model, strategy
        vars(own).pop("known_start", None)


class _Given(Messenger):
    """A model in which all sites except these are as if they were observed."""

    def __init__(self, fn: Model, names: Collection[str]) -> None:
        super().__init__(fn)
        self.names = frozenset(names)

    def process_message(self, msg: dict[str, Any]) -> None:
        latent = msg["type"] == "sample" and not msg["is_observed"]
        if latent and msg["name"] not in self.names:
            shape = msg["kwargs"].get("sample_shape", ())
            msg["value"] = msg["fn"](rng_key=random.key(0), sample_shape=shape)
            msg["is_observed"] = True


def constrain_latent(guide: AutoContinuous, latent: Array, params: Params) -> Sites:
    """Latent vectors of a guide as its sites, on the arguments on which it was set up."""
    sites: Any = guide._unpack_and_constrain(latent, params)
    return sites


class ContinuousGuide(OnSupports):
    """NumPyro's ``AutoContinuous`` with its private hooks under public names, and with the latent
    vector in the order in which the model samples its sites."""

    prepared: Any = None

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Inspect the model before the guide is set up; the result is kept as ``prepared``."""

    @abstractmethod
    def latent_distribution(self) -> dist.Distribution:
        """The distribution of the ``(latent_dim,)`` vector, its parameters by ``numpyro.param``."""

    @property
    def init_latent(self) -> Array:
        """The ``(latent_dim,)`` vector of ``init_loc_fn``."""
        return self._init_latent

    @property
    def latent_sites(self) -> tuple[str, ...]:
        """Names of the latent sites, in the order of the latent vector."""
        return tuple(self._init_locs)

    def unpack(self, latent: Array) -> Sites:
        """A ``(latent_dim,)`` vector as unconstrained sites."""
        sites: Any = self._unpack_latent(latent)
        return sites

    def sample_vector(self, sample_shape: tuple[int, ...], args: tuple, kwargs: Params) -> Array:
        """Latent vectors ``(*sample_shape, latent_dim)``, and the guide's own sites on the way."""
        fn: Any = self.latent_distribution().expand_by(sample_shape)
        z: Any = numpyro.sample(f"_{self.prefix}_latent", fn, infer={"is_auxiliary": True})
        return z

    def constrain(
        self,
        latent: Array,
        params: Params,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        anew: bool = False,
    ) -> Sites:
        """Latent vectors ``(*sample_shape, latent_dim)`` as constrained and deterministic sites, on
        ``args`` and ``kwargs`` if there are any or if ``anew``, or on the first call's."""
        guide = self
        if anew or args or kwargs:
            guide = copy.copy(self)
            model = seed(self.seen_model, 0)  # for minibatch indices alone
            full: Any = partial(constrain_fn, model, args, kwargs or {}, return_deterministic=True)
            guide._postprocess_fn = full
        # Not passed on as params: NumPyro would constrain these values a second time.
        trace: Any = self.prototype_trace
        values = {k: v for k, v in params.items() if k in trace and trace[k]["type"] == "param"}
        with block(), substitute(data=values):
            return guide._unpack_and_constrain(latent, {})

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self.prepared = self.prepare(*args, **kwargs)
        super()._setup_prototype(*args, **kwargs)

    @property
    def _init_locs(self) -> Sites:
        return vars(self)["_init_locs"]

    @_init_locs.setter
    def _init_locs(self, sites: Sites) -> None:
        trace: Any = self.prototype_trace  # NumPyro sets it before
        vars(self)["_init_locs"] = {name: sites[name] for name in trace if name in sites}

    def _sample_latent(self, *args: Any, **kwargs: Any) -> Array:
        return self.sample_vector((), args, kwargs)

    def _get_posterior(self) -> dist.Distribution:
        return self.latent_distribution()
