r"""The base of all objectives: the particles of one evaluation, and their log densities.

A new objective subclasses :class:`Objective` and writes :meth:`Objective.estimate`, a pure function
of :class:`Draws`. For K particles :math:`z_k \sim q` that share **one** minibatch it may ask for
:math:`\log p(x, z_k)` and :math:`\log q(z_k)`, split by *unit*. A unit has a log weight of its own:
it is one element of the plates around every site of model and guide, or the whole minibatch if
there is no such plate.

NumPyro's ``RenyiELBO`` has the same draws: ``plate_key, rng_key = split(rng_key)``, ``keys =
split(rng_key, K)``, ``model_key, guide_key = split(keys[k])``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, update_wrapper
import inspect
import math
import numbers
from typing import Any, cast
import warnings
from weakref import WeakKeyDictionary

import jax
from jax import Array, random
from jax.core import Tracer
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute
from numpyro.infer import ELBO, init_to_uniform
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import mutable

from numpyro_ext._checks import InferenceWarning, check_count, summary
from numpyro_ext._model.checks import check_rows
from numpyro_ext._model.density import log_prob
from numpyro_ext._model.handlers import (
    drawn_once,
    given_rows,
    same_plates,
    seed_plates,
    unobserved,
    valid_plates,
)
from numpyro_ext._model.lookups import marked_plates, shapes_on_plates
from numpyro_ext._model.losses import finite_step, map_over
from numpyro_ext._model.masked import masks_filled
from numpyro_ext._model.minibatch import rows_of_step
from numpyro_ext._model.potential import Program
from numpyro_ext._model.read import (
    Site,
    base_distribution,
    check_all_rows,
    given_plates,
    is_data,
    is_delta,
    latent_sites,
    sample_sites,
    set_up,
    trace_again,
    trace_of,
    transforms_of,
    value_before,
    values_of,
)
from numpyro_ext._model.same import mark_of
from numpyro_ext._model.taylor import ProxyOfRun, TaylorProxy, check_proxy
from numpyro_ext._model.units import (
    Layout,
    check_traces,
    drawn_sites,
    find_layout,
    weightless_dropped,
    with_copies,
)
from numpyro_ext._numpyro import without_rsample_stop_gradient
from numpyro_ext._typing import Model, Params, Sites, Trace

type MapT = Callable[[Callable[..., Any], Any], Any]
"""``mapT(fn, xs)`` maps over the leading axis of the pytree ``xs``."""
type Arguments = tuple[tuple[Any, ...], dict[str, Any]]
type State = dict[str, Any]  # of the mutable sites
STEP = "_objective_step"  # the mutable site of ``count_steps``
type Order = float | Array | Callable[[Array], Any]
"""An order: a number, a traced scalar, or a schedule ``step -> alpha``."""


class Objective(ELBO, ABC):
    r"""A loss of K particles for ``SVI(..., loss=)``: base class for objectives of your own.

    A subclass writes :meth:`estimate`, and declares by class attributes what is true of it, so that
    a model or a guide for which it is not made is an error before anything is drawn:

    * ``linear = False``: whether the loss is linear in the log joint of the minibatch. If not, a
      latent site in a subsampled plate that is not a unit plate is an error.
    * ``minus_elbo = False``: whether its mean is minus the ELBO, for which the best guide under the
      penalties of :class:`PosteriorRegularizedELBO` is known.
    * ``can_infer_discrete = False``: whether the loss has a score term. If not, a guide site that
      is not reparameterised is an error.
    * ``upper_bound = False``: whether the loss is an upper bound of the evidence. If so, a
      parameter of the model is an error.
    * ``per_datum = False``: whether the units are the elements of the plates around all *observed*
      sites, and latent sites outside are global. If not, the plates are those around every site.
    * ``takes_powers = False``: whether the weights of a unit are taken to a power. If so, a
      ``numpyro.handlers.scale`` around all sites of a unit counts it so many times, as a plate
      does, one around observed sites alone stays inside, and another is an error.
    * ``without_log_q``: what to use instead where log q cannot be evaluated at a given value.

    :param int num_particles: number of particles K.
    :param vectorize_particles: True for ``jax.vmap`` over the particles; False for ``jax.lax.map``
        that recomputes each particle in the backward pass, so that memory does not grow with K; or
        ``jax.pmap``, or a callable ``mapT(fn, xs)``.
    :param proxy: the result of :func:`taylor_proxy`, with which a minibatch of rows that share all
        latent sites is as good as all rows.

    >>> class MyBound(Objective):
    ...     def estimate(self, draws):
    ...         lw, state = draws.each(lambda particle: particle.log_weight)  # (K, *units)
    ...         bound = jax.nn.logsumexp(lw, 0) - jnp.log(self.num_particles)
    ...         return -draws.total(bound), state
    >>> def guide(x):
    ...     numpyro.sample("z", dist.Normal(0., 1.))
    >>> loss = MyBound(10_000).loss(jax.random.key(0), {}, normal_mean, guide, jnp.array([1.5]))
    >>> bool(abs(loss - 1.828) < 0.1)  # log p(x) is -1.828
    True
    """

    linear: bool = False
    minus_elbo: bool = False
    proxy: TaylorProxy | None = None
    upper_bound: bool = False
    per_datum: bool = False
    takes_powers: bool = False
    without_log_q: str = 'gradient="standard"'

    def __init__(
        self,
        num_particles: int = 10,
        *,
        vectorize_particles: bool | MapT = True,
        proxy: TaylorProxy | None = None,
    ) -> None:
        num_particles = check_count("num_particles", num_particles)
        self.proxy = check_proxy(proxy)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)

    def __repr__(self) -> str:
        return summary(self)

    @abstractmethod
    def estimate(self, draws: "Draws") -> tuple[Array, State]:
        """The loss and the mutable state, a pure function of the draws.

        :return: the loss to be minimised, a scalar, and the mutable sites that the particles leave,
            with a leading axis of particles; :meth:`Draws.each` returns them.
        """

    def noise_problem(self, plates: Mapping[str, Sequence[int]]) -> str | None:
        """What is wrong with minibatches of ``{plate: (size, batch)}`` that share latent sites, and
        what to do; None if nothing is."""
        if self.linear or self.per_datum or self.proxy is not None or not plates:
            return None
        plate, (size, batch) = next(iter(plates.items()))
        takes_one = "proxy" in inspect.signature(type(self)).parameters
        by_proxy = "give it proxy=taylor_proxy(model, *args), or " if takes_one else ""
        return (
            f"{type(self).__name__} takes the noise of a minibatch ({batch} of {size} rows of the"
            f" plate '{plate}') for uncertainty of latent sites that all rows share, and the guide"
            f" becomes too wide; {by_proxy}use BBAlphaELBO, VRELBO(1.), or no subsample_size"
        )

    def noise_power(self, step: Array | None) -> Any:
        """The power of the weights in the loss, or 0, for which a proxy corrects its noise."""
        return 0.0

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: Params, model: Model, guide: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The loss, and the mutable state that the first particle leaves, one step further."""

        def step(params: Params) -> tuple[Any, State]:
            loss, state = self.estimate(Draws(self, rng_key, params, model, guide, args, kwargs))
            return loss, jax.tree.map(lambda x: x[0], state)

        loss, first = finite_step(step, param_map)
        if STEP in first:
            first[STEP] = {"step": first[STEP]["step"] + 1}
        return {"loss": loss, "mutable_state": first or None}


_READINGS: WeakKeyDictionary[Objective, tuple[Any, Any, Any]] = WeakKeyDictionary()
"""The mark of the last programs and data of each, their layout, and what else was looked at."""


class Draws:
    """The K particles of one evaluation, the argument of :meth:`Objective.estimate`.

    * ``layout`` - the plates, sizes and names of sites, known before anything is drawn.
    * ``keys`` - ``(K,)``, one key for each particle; ``extra_key`` is independent of them.
    * ``params, stopped`` - the parameters, and their copy under ``stop_gradient``.
    * ``guide, args, kwargs`` - the guide as ``SVI`` has it, and the arguments of the model.
    * ``step`` - number of the update if :func:`count_steps` wraps the guide, else None.
    """

    def __init__(
        self,
        objective: Objective,
        rng_key: Array,
        params: Params,
        model: Model,
        guide: Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        plate_key, rng_key = random.split(rng_key)
        self.keys = random.split(rng_key, objective.num_particles)
        # fold_in(key, i) is the i-th key of a split, so 0 .. K-1 are taken.
        self.extra_key = random.fold_in(rng_key, objective.num_particles)
        self.objective, self.params = objective, params
        self.stopped: Params = stop_gradient(params)
        self._model = seed_plates(model, plate_key)
        self._guide = seed_plates(guide, plate_key)
        self.guide, self.args, self.kwargs = guide, args, kwargs
        mark, layout, _ = _READINGS.get(objective, (None, None, None))
        self._is_read = mark is not None and mark == self._mark(model)
        self.layout: Layout = layout if self._is_read else self._read(model)
        if self.layout.masked:
            self._model = seed_plates(masks_filled(model), plate_key)
        self.step = params.get(STEP, {"step": 0})["step"] if STEP in self.layout.mutable else None
        self.proxy = None
        if self.layout.subsampled:
            self._take_rows(plate_key, model)
        self._copies = self._count_copies() if self.layout.copied else None

    def _take_rows(self, plate_key: Array, model: Model) -> None:
        """The rows of the minibatch, where they are on the host, and the proxy of the others."""
        if (proxy := self.objective.proxy) is not None:
            mean = self.objective.noise_power(self.step), len(self.keys)
            fresh = isinstance(plate_key, Tracer)  # a program that is made for many steps
            self.proxy = proxy.of_run(model, self.args, self.kwargs, *mean, once=not fresh)
        idx, (self.args, self.kwargs) = rows_of_step(
            plate_key, self.layout.subsampled, (self.args, self.kwargs)
        )
        self._model.idx = self._guide.idx = idx

    def _count_copies(self) -> Array:
        """How often each unit counts, by the scale of its sites."""
        guide_trace = self.guide_trace(self.keys[0])
        return self.layout.copies({**guide_trace, **self.model_trace(self.keys[0], guide_trace)})

    def _mark(self, model: Model) -> Any:
        return mark_of(self.params, model, self.guide, self.args, self.kwargs, vars(self.objective))

    def each(self, fn: Callable[["Particle"], Any], **options: Any) -> tuple[Any, State]:
        """``fn`` of all particles, stacked, and their state; ``options`` go to :meth:`particle`."""

        def of_key(key: Array) -> tuple[Any, State]:
            particle = self.particle(key, **options)
            return fn(particle), particle.state

        return self.map(of_key, self.keys)

    def map(self, fn: Callable[..., Any], *xs: Any) -> Any:
        """``fn`` over the leading axis of each of ``xs``, as ``vectorize_particles`` says."""
        if self.objective.num_particles == 1 and self.objective.vectorize_particles is not False:
            result = fn(*jax.tree.map(lambda x: x[0], xs))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], result)
        how = self.objective.vectorize_particles
        return map_over(how, fn, *xs) if len(xs) == 1 else map_over(how, lambda x: fn(*x), xs)

    def total(self, x: Array) -> Array:
        """The sum over units, scaled from the minibatch to all data, and by their copies."""
        if self._copies is not None:
            x = jnp.where(self._copies == 0, 0.0, self._copies * x)
        return self.layout.scale * jnp.sum(x)

    def particle(
        self,
        key: Array,
        *,
        params: Params | None = None,
        guide_params: Params | None = None,
        values: Sites | None = None,
    ) -> "Particle":
        """The particle of one key; ``params`` are ``self.params`` unless given, ``guide_params``
        other ones for the guide, and ``values`` the sites of the guide that are not drawn."""
        guide_params = params if guide_params is None else guide_params
        return Particle(self, key, params, self.guide_trace(key, guide_params, values))

    def path_particle(
        self, key: Array, gamma: Array | None = None, params: Params | None = None
    ) -> "Particle":
        """A particle with a gradient of its guide through the draws alone, scaled by ``gamma``.

        ``gamma`` is one number for each unit, or None, and ``params`` are the model's. log q has
        stopped parameters, and takes what was drawn before a fixed transform, as a value on the
        boundary has no inverse.
        """
        drawn = drawn_sites(self.guide_trace(key))
        refuse_hidden_gradient(self, key, drawn)
        values = {name: site["value"] for name, site in drawn.items()}
        before = {name: value_before(drawn[name]) for name in _fixed_transforms(self, key, drawn)}
        for name, site in drawn.items() if gamma is not None else ():
            weight = self.layout.along(site, cast(Array, gamma))
            values[name] = _path_scaled(values[name], weight)
            if name in before:
                ndim = weight.ndim - site["fn"].event_dim
                weight = weight.reshape(weight.shape[:ndim] + (1,) * (before[name].ndim - ndim))
                before[name] = _path_scaled(before[name], weight)
        guide_trace = self.guide_trace(key, self.stopped, values)
        for name, x in before.items():
            guide_trace[name] = {**guide_trace[name], "intermediates": [[x, None]]}
        return Particle(self, key, params, guide_trace)

    def values(self, key: Array, params: Params | None = None) -> Sites:
        """The draws of the guide with one key, without the Delta sites computed from them."""
        drawn = drawn_sites(self.guide_trace(key, params))
        return {name: site["value"] for name, site in drawn.items()}

    def guide_trace(
        self,
        key: Array,
        params: Params | None = None,
        values: Sites | None = None,
        arguments: Arguments | None = None,
    ) -> Trace:
        """One run of the guide; ``values`` replace its draws, ``arguments`` its arguments."""
        data = {**(self.params if params is None else params), **(values or {})}
        guide = substitute(seed(self._guide, random.split(key)[1]), data=data)
        with drawn_once(), without_rsample_stop_gradient():
            return self._run(guide, *(arguments or (self.args, self.kwargs)))

    def model_trace(self, key: Array, guide_trace: Trace, params: Params | None = None) -> Trace:
        """One run of the model at the values of ``guide_trace``, on its minibatch."""
        data = {**(self.params if params is None else params), **values_of(guide_trace, "mutable")}
        model = replay(seed(self._model, random.split(key)[0]), cast(Any, guide_trace))
        model = substitute(model, data=data)
        model = model if self._is_read else same_plates(model, guide_trace)
        return self._run(model, self.args, self.kwargs)

    def _run(self, program: Model, args: tuple, kwargs: dict[str, Any]) -> Trace:
        if self._is_read:
            return trace_again(program, args, kwargs)
        return trace_of(valid_plates(program), args, kwargs)

    def dream(
        self, rng_key: Array, arguments: Arguments | None = None, params: Params | None = None
    ) -> Trace:
        """One run of the model that draws its observed sites too, with stopped parameters unless
        ``params`` are given; what was observed is in ``site["infer"]["obs"]``."""
        with valid_plates():
            data = self.stopped if params is None else params
            model = unobserved(substitute(self._model, data=data))
            return trace_of(seed(model, rng_key), *(arguments or (self.args, self.kwargs)))

    def program(self, key: Array, data: Sites, plates: Any = None) -> Program:
        """The model with the key of a particle, at these values of its sites."""
        model = seed(self._model, random.split(key)[0])
        return Program(model, self.args, self.kwargs, data, plates=plates)

    def guide_with(self, methods: Collection[str], example: str) -> Any:
        """The guide, or the one inside a handler around it, that has these methods."""
        guide = unwrap(self.guide, *methods)
        if guide is None:
            raise TypeError(
                f"{type(self.objective).__name__} needs a guide with {' and '.join(methods)}; use"
                f" {example}."
            )
        return guide

    def _read(self, model: Model) -> Layout:
        """The layout, where the programs are fit for each other, and the data for them, which is
        looked at once."""
        set_up(self.guide, self.args, self.kwargs)
        layout = cast(Layout, shapes_on_plates(self._find_layout))
        self._check_data(model, layout)
        _READINGS[self.objective] = self._mark(model), layout, set()
        return layout

    def once(self, check: Callable[..., None], *args: Any) -> None:
        """``check(self, *args)``, unless it has passed for these programs and data."""
        passed = _READINGS[self.objective][2]
        if check.__name__ not in passed:
            check(self, *args)
            passed.add(check.__name__)

    def _check_data(self, model: Model, layout: Layout) -> None:
        """An error that names an observed site with data that do not fit, in any row."""

        def value_of_guide(site: Any) -> Any:  # of a parameter for which the model itself has none
            lacks = site["type"] == "param" and site["args"] == (None,)
            return self.stopped.get(site["name"]) if lacks else None

        args, kwargs = self.args, self.kwargs
        model = substitute(model, substitute_fn=value_of_guide)
        if layout.subsampled:
            plates_given = given_plates(model, args, kwargs, init_to_uniform)
            model = given_rows(model, plates_given)
            if self.objective.proxy is not None:
                check_all_rows("a proxy", plates_given, args, kwargs)
        check_rows(model, args, kwargs, init_to_uniform, bounded=layout.bounded)

    def _find_layout(self) -> Layout:
        """The layout; an error if the objective does not take it."""
        objective, guide_trace = self.objective, self.guide_trace(self.keys[0])
        with marked_plates():
            model_trace = self.model_trace(self.keys[0], guide_trace)
        check_traces(model_trace, guide_trace, objective.per_datum, "; use VRELBO(1.)")
        layout = find_layout(model_trace, guide_trace, objective.per_datum, ", or use VRELBO")
        _refuse(objective, layout, model_trace, guide_trace)
        if objective.takes_powers:
            name = type(objective).__name__
            layout = with_copies(name, layout, model_trace, guide_trace)
            if layout.copied and objective.proxy is not None:
                raise ValueError(
                    f"{name}: a proxy takes no numpyro.handlers.scale around the whole model; drop"
                    " the proxy, or the scale."
                )
        return layout

    def log_q(self, site: Site) -> Array:
        """Log density of a guide site, or an error that names the alternative."""
        try:
            return log_prob(site)
        except NotImplementedError as error:
            raise ValueError(
                f"log q of guide site '{site['name']}' cannot be evaluated at a given value,"
                f" because a transform has no inverse; use {self.objective.without_log_q}."
            ) from error


class Particle:
    """One draw of the guide. A density is computed when it is asked for, and not before.

    * ``log_lik``, ``(*units)`` - log p of the sites of each unit, without the scale N/M.
    * ``log_prior``, ``()`` - log p of the sites outside the unit plates, with all scales.
    * ``log_q_local``, ``log_q_global`` - the same split of log q.
    * ``log_weight``, ``(*units)`` - log p - log q, if the units are the plates around all sites.
    * ``values``, ``state`` - the latent sites of the guide, and the mutable sites that are left.
    """

    def __init__(
        self,
        draws: Draws,
        key: Array,
        params: Params | None,
        guide_trace: Trace,
        replayed: Trace | None = None,
    ) -> None:
        self._draws, self._key, self._params = draws, key, params
        self.guide_trace = guide_trace
        # What the model sees of the guide, and zeros to be added to its log densities.
        seen = replayed or guide_trace
        self._replayed, self._zero, self._zeros = weightless_dropped(seen, draws.layout)

    @cached_property
    def model_trace(self) -> Trace:
        return self._draws.model_trace(self._key, self._replayed, self._params)

    def with_model_at(self, values: Sites) -> "Particle":
        """The same particle with ``values`` in the model; log q stays at the draw."""
        moved = {name: {**self.guide_trace[name], "value": x} for name, x in values.items()}
        replayed = {**self.guide_trace, **moved}
        return Particle(self._draws, self._key, self._params, self.guide_trace, replayed)

    @property
    def values(self) -> Sites:
        return {site["name"]: site["value"] for site in latent_sites(self.guide_trace)}

    @property
    def state(self) -> State:
        return values_of(self.guide_trace, "mutable") | values_of(self.model_trace, "mutable")

    log_prior = property(lambda self: self._log_p(local=False))
    log_lik = property(lambda self: self._log_p(local=True))
    log_q_global = property(lambda self: self._log_q(self.guide_trace.values(), local=False))
    log_q_local = property(lambda self: self._log_q(self.guide_trace.values(), local=True))

    @property
    def log_weight(self) -> Array:
        return self.log_lik - self.log_q_local + (self.log_prior - self.log_q_global)

    def log_q_of(self, names: Collection[str]) -> Array:
        """``(*units)``, log q of these sites without any scale: a draw follows q, scaled or not."""
        unscaled = {"scale": self._draws.layout.scale}
        chosen = [{**site, **unscaled} for n, site in self.guide_trace.items() if n in names]
        return self._log_q(chosen, local=True)

    def _log_p(self, *, local: bool) -> Array:
        if local and self._draws.proxy is not None:
            log_p = self._by_proxy(self._draws.proxy)
        else:
            log_p = self._sum(self.model_trace.values(), log_prob, local)
        return log_p + (self._zeros if local else self._zero).astype(log_p.dtype)

    def _by_proxy(self, proxy: ProxyOfRun) -> Array:
        trace = self.model_trace
        rows = values_of(trace, "plate")
        with valid_plates():
            return proxy.log_joint(trace, self._draws.program(self._key, rows).trace)

    def _log_q(self, sites: Iterable[Site], *, local: bool) -> Array:
        return self._sum(sites, self._draws.log_q, local)

    def _sum(self, sites: Iterable[Site], of: Callable[[Site], Array], local: bool) -> Array:
        layout, sites = self._draws.layout, (x for x in sites if x["type"] == "sample")
        sites = map(layout.without_copies, sites) if layout.copied else sites
        return layout.sum_sites(sites, local=local, log_prob=of)


def refuse_hidden_gradient(draws: Draws, key: Array, drawn: Trace) -> None:
    """An error if a parameter of the guide is in a density that is not one of a drawn site, or in
    the support of one that is, where the mean of the score is not zero."""

    def others(trace: Trace) -> dict[str, Any]:
        return {
            site["name"]: jax.tree.leaves(site["fn"].support)
            if site["name"] in drawn
            else (site["value"], draws.log_q(site))
            for site in sample_sites(trace)
        }

    for name in _depending_on_parameters(draws, key, drawn, others):
        site = draws.guide_trace(key)[name]
        kind = "a Delta" if is_delta(site) else "observed" if is_data(site) else "a factor"
        why = f"is {kind} and depends on a parameter, so it has no log q at a given value"
        if name in drawn:
            why = "has a support that depends on a parameter, so its score has no mean of zero"
        raise ValueError(
            f"{type(draws.objective).__name__}: site '{name}' of the guide {why}; use"
            f" {draws.objective.without_log_q}."
        )


def _fixed_transforms(draws: Draws, key: Array, drawn: Trace) -> list[str]:
    """The drawn sites that are made by one transform, in which there is no parameter."""
    single = {
        name: jnp.zeros(jnp.shape(value_before(site)))
        for name, site in drawn.items()
        if site["intermediates"] and len(transforms_of(site["fn"])) == 1
    }

    def at_zero(trace: Trace) -> Sites:
        return {name: transforms_of(trace[name]["fn"])[0](x) for name, x in single.items()}

    depending = _depending_on_parameters(draws, key, drawn, at_zero)
    return [name for name in single if name not in depending]


def _depending_on_parameters(
    draws: Draws, key: Array, drawn: Trace, fn: Callable[[Trace], dict[str, Any]]
) -> list[str]:
    """The names of the results of ``fn``, at the drawn values, that depend on a parameter."""
    values = {name: site["value"] for name, site in drawn.items()}
    params = {n: draws.params[n] for n in draws.layout.guide_params if n in draws.params}
    origins = eval_provenance(
        lambda params: fn(draws.guide_trace(key, {**draws.params, **params}, values)), params=params
    )
    return [name for name, x in origins.items() if any(jax.tree.leaves(x))]


def _path_scaled(x: Array, weight: Array) -> Array:
    """``x`` itself, with its gradient times ``weight``."""
    stopped = stop_gradient(x)
    return stopped + weight * (x - stopped)


def _refuse(objective: Objective, layout: Layout, model_trace: Trace, guide_trace: Trace) -> None:
    """An error, or a warning, if an objective is not made for these programs."""
    name = type(objective).__name__
    for site in () if objective.can_infer_discrete else layout.not_reparameterized:
        kind = type(base_distribution(guide_trace[site]["fn"])).__name__
        raise ValueError(
            f"guide site '{site}' ({kind}) is not reparameterised, so {name} has no gradient for"
            " it; use VIMCO or ThermodynamicELBO, or sum the site out of the model."
        )
    for site in layout.model_params if objective.upper_bound else ():
        raise ValueError(
            f"{name}: the model has the param site '{site}', over which an upper bound must not be"
            " minimised; train it with VRELBO, then substitute its value."
        )
    for site, plate in () if objective.linear else layout.subsampled_latents:
        raise ValueError(
            f"{name}: latent site '{site}' lies in the subsampled plate '{plate}', which does not"
            " enclose every site; use NestedVRELBO, BBAlphaELBO, VRELBO(1.), or no subsample_size."
        )
    if objective.proxy is not None:
        objective.proxy.check(name, layout, model_trace)
    shared = {plate: rows for plate, *rows in layout.subsampled if plate not in layout.plates}
    if (problem := objective.noise_problem(shared)) is not None:
        warnings.warn(InferenceWarning(f"{problem}."), stacklevel=3)


class OfOrder(Objective):
    """Base of the bounds of an order ``alpha``; of the order ``elbo`` they are the ELBO."""

    elbo: float = 1.0

    def __init__(
        self, alpha: Order, num_particles: int, *, finite: bool = False, **options: Any
    ) -> None:
        refuse_count(self, alpha, num_particles)
        self.alpha = check_alpha(alpha, finite=finite)
        self.takes_powers = not (isinstance(self.alpha, float) and self.alpha == self.elbo)
        super().__init__(num_particles, **options)

    def order_at(self, step: Any) -> Any:
        """The order of this update, from ``Draws.step``."""
        return order_of_step(self.alpha, step) if callable(self.alpha) else self.alpha


def check_alpha(alpha: Any, *, finite: bool = False) -> Any:
    """``alpha`` as a float, unless it is traced or a schedule; an error if it is no order."""
    if callable(alpha) or isinstance(alpha, Tracer):
        return alpha
    alpha = float(alpha)
    if math.isnan(alpha):
        raise ValueError("alpha is nan; it must be a number between -inf and inf.")
    if finite and math.isinf(alpha):
        raise ValueError(
            f"alpha is {alpha}; only VRELBO without gradient='dreg' and NestedVRELBO take an"
            " infinite order."
        )
    return alpha


def refuse_count(objective: Any, order: Any, num_particles: int) -> None:
    """An error for ``VRELBO(10)``: the first argument of ``Trace_ELBO(10)`` is the number K."""
    default = inspect.signature(type(objective)).parameters["num_particles"].default
    if num_particles == default and isinstance(order, numbers.Integral) and int(order) > 2:
        name = type(objective).__name__
        raise ValueError(
            f"{name}({order}) is of order {order}; for {order} particles write"
            f" {name}(num_particles={order}), and for that order {name}({order}.0)."
        )


def order_of_step(alpha: Callable[[Array], Any], step: Any, name: str = "alpha") -> Any:
    """The order of this update by its schedule, from ``Draws.step``; ``name`` is the argument's."""
    if step is None:
        raise ValueError(
            f"{name} is a callable of the step, but the guide does not count steps; give SVI the"
            " guide count_steps(guide)."
        )
    return alpha(step)


def unwrap(guide: Any, *names: str) -> Any:
    """The guide, or the one inside the handlers around it, that has these attributes; or None."""
    while not all(hasattr(guide, name) for name in names):
        if not hasattr(guide, "fn"):
            return None
        guide = guide.fn
    return guide


def counts_steps(guide: Any) -> bool:
    """Return whether :func:`count_steps` wraps a guide, or what is under the handlers around it."""
    return unwrap(guide, "counts_steps") is not None


class count_steps:
    r"""Wrap a guide so that the objectives of this package know the number of the update.

    The wrapped guide declares the mutable site ``"_objective_step"``, ``{"step": 0}`` at first, to
    which each ``svi.update`` adds one; an order that is a callable, ``VRELBO(lambda i: ...)``,
    reads it. ``svi.evaluate`` of NumPyro passes no mutable state, hence it sees step 0. Methods of
    the guide (``sample_posterior``, ``median``) stay on the guide that was wrapped.

    :param guide: Python callable with NumPyro primitives, an auto guide for example.

    >>> from numpyro_ext.objectives import VRELBO
    >>> guide = AutoNormal(model)
    >>> loss = VRELBO(lambda i: jnp.minimum(i / 200., 1.))  # from importance weighting to VI
    >>> svi = SVI(model, count_steps(guide), optax.adam(0.05), loss)
    >>> result = svi.run(jax.random.key(0), 300, progress_bar=False)
    >>> int(result.state.mutable_state["_objective_step"]["step"])
    300
    """

    counts_steps = True

    def __init__(self, guide: Model) -> None:
        self.fn = guide
        update_wrapper(self, guide, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        initial: Any = {"step": jnp.zeros((), jnp.int32)}
        mutable(STEP, initial)
        return self.fn(*args, **kwargs)
