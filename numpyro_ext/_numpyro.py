"""NumPyro's private names and attributes, as of 0.22.0: nowhere else, not even as strings."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
import copy
from functools import partial
from inspect import getclosurevars
import math
from typing import Any

from jax import Array, jit
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to
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
from numpyro.primitives import _PYRO_STACK
from numpyro.util import _validate_model as validate_model

from numpyro_ext._typing import Model, Params, Sites, Trace

__all__ = [
    "ContinuousGuide",
    "ResumableKernel",
    "StartGiven",
    "at_unconstrained",
    "default_key",
    "mask_of",
    "max_tree_depth",
    "mcmc_arguments",
    "normal_of_guide",
    "params_of_hmc",
    "params_of_normal",
    "posterior_guide",
    "replayed_trace",
    "site_of_log_det",
    "unpacking_of",
    "unwrap_distribution",
    "validate_model",
    "without_rsample_stop_gradient",
    "wrap_distribution",
]


def mask_of(fn: dist.Distribution) -> Any:
    """The mask of a ``MaskedDistribution``; None for any other distribution."""
    return getattr(fn, "_mask", None)


def at_unconstrained(model: Model, z: Sites) -> Model:
    """The model at unconstrained values of its latent sites; each log Jacobian is a factor."""
    return substitute(model, substitute_fn=partial(_unconstrain_reparam, z))


def site_of_log_det(name: str, latents: Collection[str]) -> str:
    """The latent site whose log Jacobian is the factor of this name; otherwise the name itself."""
    site = name.removeprefix("_").removesuffix("_log_det")
    return site if site in latents else name


def replayed_trace() -> Trace | None:
    """The trace of the guide whose draws a loss gives to the model that runs; None elsewhere."""
    return next((x.trace for x in reversed(_PYRO_STACK) if isinstance(x, replay)), None)


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


def mcmc_of_draws(
    mcmc: MCMC, draws: dict[str, Any], last_state: Any, args: tuple, kwargs: dict[str, Any]
) -> MCMC:
    """The ``MCMC`` as if its ``run`` had these draws, ``(chain, draw, *shape)`` of each field."""
    state: Any = mcmc
    state._states, state._last_state, state._args, state._kwargs = draws, last_state, args, kwargs
    return mcmc


class ResumableKernel(MCMCKernel):
    """A kernel whose :meth:`init` is also called where ``MCMC`` takes up a chain again, which asks
    for ``_sample_fn`` only where it has a state."""

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
    place = guide._unpack_latent(jnp.arange(guide.latent_dim))
    order = jnp.concatenate([jnp.ravel(place[name]) for name in sites])
    if isinstance(guide, AutoDiagonalNormal):
        loc = transform(jnp.zeros(guide.latent_dim))
        return loc[order], (transform(jnp.ones(guide.latent_dim)) - loc)[order]
    loc, factor = transform.loc[order], transform.scale_tril[order]
    if bool(jnp.all(order[1:] > order[:-1])):
        return loc, factor
    return loc, triangular_root(factor)


def triangular_root(root: Array) -> Array:
    """The lower triangular root of the covariance of which ``(n, m)`` rows are a root."""
    R = jnp.linalg.qr(root.T, mode="r")
    return R.T * jnp.sign(jnp.diagonal(R))


def params_of_normal(guide: Any, loc: Array, factor: Array) -> Params:
    """The parameters of a normal guide of this mean and covariance, as of :func:`normal_of_guide`;
    variances of a diagonal one are those of each site given the others."""
    allowed = (AutoMultivariateNormal, AutoNormal, AutoDiagonalNormal)
    if not isinstance(guide, allowed):
        names = ", ".join(cls.__name__ for cls in allowed)
        raise TypeError(f"guide is a {type(guide).__name__}; it must be one of {names}.")
    size = sum(map(jnp.size, guide._init_locs.values()))
    if len(loc) != size:
        raise ValueError(f"the normal has {len(loc)} coordinates; the guide's model has {size}.")
    scale = factor
    if factor.ndim == 2:
        root = solve_triangular(factor, jnp.eye(len(loc), dtype=factor.dtype), lower=True)
        scale = 1 / jnp.linalg.norm(root, axis=0)
    prefix, trace = guide.prefix, guide.prototype_trace or {}
    if isinstance(guide, AutoNormal):
        params, start = {}, 0
        for name in (name for name in trace if name in guide._init_locs):
            shape = jnp.shape(guide._init_locs[name])
            stop = start + math.prod(shape)
            params[f"{name}_{prefix}_loc"] = loc[start:stop].reshape(shape)
            params[f"{name}_{prefix}_scale"] = scale[start:stop].reshape(shape)
            start = stop
        return params
    place = guide._unpack_latent(jnp.arange(guide.latent_dim))
    back = jnp.argsort(jnp.concatenate([jnp.ravel(place[name]) for name in trace if name in place]))
    if isinstance(guide, AutoDiagonalNormal):
        return {f"{prefix}_loc": loc[back], f"{prefix}_scale": scale[back]}
    dense = factor if factor.ndim == 2 else jnp.diag(factor)
    return {f"{prefix}_loc": loc[back], f"{prefix}_scale_tril": triangular_root(dense[back])}


def posterior_guide(
    guide: Model,
    params: Sequence[Params],
    args: tuple,
    kwargs: dict[str, Any],
    on_every_row: Callable[[Model], Model],
) -> tuple[Model, list[Params]]:
    """A guide whose call draws what ``sample_posterior`` draws, for all data, and its params."""
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

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        """A key of ``numpyro.prng_key`` and the unconstrained start; None: NumPyro searches."""

    @property
    def seen_model(self) -> Model:
        """The model of which the guide draws all latent sites; ``model`` may have others."""
        return self.model

    def set_up(self, *args: Any, **kwargs: Any) -> None:
        """Run the model once on its arguments, unless that was done before."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        start = self.start(*args, **kwargs)
        if start is None:
            super()._setup_prototype(*args, **kwargs)
            return
        rng_key, locs = start

        def at_start(site: dict[str, Any]) -> Array | None:
            loc = locs.get(site["name"])
            return None if loc is None else biject_to(site["fn"].support)(loc)

        with block():
            fn = substitute(seed(self.seen_model, rng_key), substitute_fn=at_start)
            transforms, replay, _, trace = _get_model_transforms(fn, args, kwargs)
        self.prototype_trace, self._init_locs = trace, locs
        plates = [site for site in trace.values() if site["type"] == "plate"]
        self._prototype_frame_full_sizes = {site["name"]: site["args"][0] for site in plates}
        if replay:
            model = _prepare_model_for_potential(self.seen_model, trace, enum=False)
            whole: Any = partial(constrain_fn, model, args, kwargs, return_deterministic=True)
            self._postprocess_fn = seed(whole, 0)
        else:
            self._postprocess_fn = partial(transform_fn, transforms)


class ContinuousGuide(AutoContinuous, StartGiven):
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
        self, latent: Array, params: Params, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Sites:
        """Latent vectors ``(*sample_shape, latent_dim)`` as constrained and deterministic sites, on
        ``args`` and ``kwargs`` if there are any, or on the first call's."""
        guide = self
        if args or kwargs:
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
