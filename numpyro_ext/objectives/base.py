r"""What an objective is made of: its declarations, its draws, and their log densities.

A new objective subclasses :class:`Objective` and writes :meth:`Objective.estimate`, a pure function
of :class:`Draws`. For K particles :math:`z_k \sim q` that share **one** minibatch it may ask for
:math:`\log p(x, z_k)` and :math:`\log q(z_k)`, split by *unit*. A unit is what has a log weight of
its own: one element of the plates around every site of model and guide, or the whole minibatch
where there is no such plate.

The draws are those of NumPyro's ``RenyiELBO``, ``plate_key, rng_key = split(rng_key)``, ``keys =
split(rng_key, K)``, ``model_key, guide_key = split(keys[k])``: one key, one set of particles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import Any, cast

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute
from numpyro.infer import ELBO
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import (
    check_count,
    no_count_as_order,
    of_an_object,
    summary,
    with_known_arguments,
)
from numpyro_ext._model.density import log_prob
from numpyro_ext._model.handlers import same_plates, seed_plates, valid_plates
from numpyro_ext._model.read import (
    Site,
    is_data,
    is_delta,
    latent_sites,
    sample_sites,
    set_up,
    trace_of,
)
from numpyro_ext._model.units import Layout, check_traces, find_layout, refuse
from numpyro_ext._numpyro import without_rsample_stop_gradient
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.objectives.annealing import STEP, advance_step
from numpyro_ext.objectives.mapping import MapT, map_of
from numpyro_ext.objectives.zero_weight import weightless_dropped

__all__ = ["Draws", "MapT", "Objective", "Particle", "State"]

State = dict[str, Any]  # of the mutable sites

_NUMPYRO_OPTIONS = {
    "multi_sample_guide": "the guide draws one particle at a time; give num_particles instead",
    "sum_sites": "the loss is not a sum over sites; numpyro.infer.Trace_ELBO has that option",
}


class Objective(ELBO, ABC):
    r"""A loss of K particles for ``SVI(..., loss=)``: base class for objectives of your own.

    A subclass writes :meth:`estimate` and says by class attributes what is true of it. What does
    not fit the model and the guide is refused in one sentence, before anything is drawn:

    * ``per_datum`` - whether the units are the plates around all *observed* sites, so that latents
      outside are global. If not, they are the plates around every site.
    * ``linear`` - whether the loss is linear in the log joint of the minibatch. Otherwise latents
      in a subsampled plate that is no unit plate are an error.
    * ``upper_bound`` - whether an upper bound of the evidence is minimised. Then parameters of the
      model are an error.
    * ``can_infer_discrete`` - whether there is a score term. Otherwise a guide site that is not
      reparameterised is an error.
    * ``needs_log_q_at_values`` - whether log q is asked for at values that are given instead of
      drawn. Then a transform of the guide without an inverse is an error, which names
      ``without_log_q``.
    * ``stops_guide_params`` - whether log q is asked for with the guide's parameters stopped, as
      :meth:`Draws.path_particle` does. Then a parameter in a Delta or an observed site of the guide
      is an error too.

    They may be properties, or be set in ``__init__``.

    :param int num_particles: number of particles K.
    :param vectorize_particles: whether to use ``jax.vmap`` over the particles; if ``False`` use
        ``jax.lax.map`` and recompute each particle in the backward pass, so that memory does not
        grow with K. ``jax.pmap`` (K at most the number of devices) or a callable ``mapT(fn, xs)``
        are also allowed.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.objectives import Objective
        >>> class MyBound(Objective):
        ...     def estimate(self, draws):
        ...         lw, state = draws.each(lambda particle: particle.log_weight)  # (K, *units)
        ...         bound = jax.nn.logsumexp(lw, 0) - jnp.log(self.num_particles)
        ...         return -draws.total(bound), state
        >>> def model(x):
        ...     z = numpyro.sample("z", dist.Normal(0., 1.))
        ...     numpyro.sample("x", dist.Normal(z, 1.), obs=x)
        >>> def guide(x):
        ...     numpyro.sample("z", dist.Normal(0., 1.))
        >>> print(f"{MyBound(100).loss(jax.random.key(0), {}, model, guide, 1.5):.3f}")
        1.836
    """

    per_datum: bool = False
    linear: bool = False
    upper_bound: bool = False
    needs_log_q_at_values: bool = False
    stops_guide_params: bool = False
    without_log_q: str = 'gradient="standard"'

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            init = no_count_as_order(cls.__init__)
            cls.__init__ = with_known_arguments(init, _NUMPYRO_OPTIONS)

    def __init__(self, num_particles: int = 10, *, vectorize_particles: bool | MapT = True) -> None:
        num_particles = check_count("num_particles", num_particles)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)
        if (mapT := map_of(vectorize_particles)) is not None:
            self.vectorize_particles_fn = mapT

    def __repr__(self) -> str:
        return summary(self)

    @abstractmethod
    def estimate(self, draws: "Draws") -> tuple[Array, State]:
        """The loss and the mutable state, a pure function of the draws.

        :param Draws draws: the particles of this evaluation.
        :return: the loss to be minimised, a scalar, and the mutable sites that the particles leave,
            with a leading axis of particles; :meth:`Draws.each` returns them.
        """

    @of_an_object
    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Model,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The loss, and the mutable state that the first particle leaves, one step further."""
        loss, state = self.estimate(Draws(self, rng_key, param_map, model, guide, args, kwargs))
        first = jax.tree.map(lambda x: stop_gradient(x[0].astype(jnp.result_type(x))), state)
        return {"loss": loss, "mutable_state": advance_step(first) or None}

    loss = of_an_object(ELBO.loss)


class Draws:
    """The K particles of one evaluation: what :meth:`Objective.estimate` may ask for.

    * ``layout`` - the plates, sizes and names of sites, known before anything is drawn: ``plates``
      and ``shape`` of the units, ``size`` N and ``scale`` N/M over them, ``not_reparameterized``,
      ``drawn_global`` and ``drawn_local``, ``model_params``.
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
        self.params = params
        self.stopped: Params = stop_gradient(params)
        self.objective = objective
        self._model = seed_plates(model, plate_key)
        self._guide = seed_plates(guide, plate_key)
        self.guide, self.args, self.kwargs = guide, args, kwargs
        set_up(guide, args, kwargs)
        self.layout = cast(Layout, jax.eval_shape(self._read))
        self.step = params.get(STEP, {"step": 0})["step"] if STEP in self.layout.mutable else None

    def each(self, fn: Callable[["Particle"], Any], **options: Any) -> tuple[Any, State]:
        """``fn`` of all particles, stacked, and their mutable state.

        :param fn: function of a :class:`Particle`; ``options`` are keywords of :meth:`particle`.
        """

        def one(key: Array) -> tuple[Any, State]:
            particle = self.particle(key, **options)
            return fn(particle), particle.state

        return self.map(one, self.keys)

    def map(self, fn: Callable[..., Any], *xs: Any) -> Any:
        """``fn`` over the leading axis of each of ``xs``, as ``vectorize_particles`` says.

        What ``fn`` returns is all that is stored of a particle with ``vectorize_particles=False``.
        """
        if self.objective.num_particles == 1 and self.objective.vectorize_particles is True:
            one = fn(*jax.tree.map(lambda x: x[0], xs))
            return jax.tree.map(lambda x: jnp.asarray(x)[None], one)
        mapT = cast(MapT, self.objective.vectorize_particles_fn)
        return mapT(fn, *xs) if len(xs) == 1 else mapT(lambda xs: fn(*xs), xs)

    def total(self, x: Array) -> Array:
        """The sum over units, scaled from the minibatch to all data."""
        return self.layout.scale * jnp.sum(x)

    def particle(
        self,
        key: Array,
        *,
        params: Params | None = None,
        guide_params: Params | None = None,
        values: Sites | None = None,
    ) -> "Particle":
        """The particle of one key.

        :param dict params: the parameters, ``self.params`` if None; ``self.stopped`` has no
            gradient.
        :param dict guide_params: those of the guide, if they are others.
        :param dict values: guide sites that take these values; the rest is drawn with the key.
        """
        params = self.params if params is None else params
        guide_params = params if guide_params is None else guide_params
        guide_trace = self.guide_trace(key, guide_params, values)
        return Particle(self, key, params, guide_trace, guide_trace)

    def path_particle(self, key: Array, gamma: Array | None = None, **options: Any) -> "Particle":
        """A particle whose guide has a gradient through its draws alone, scaled by ``gamma``.

        Its log q is that of stopped parameters; ``gamma`` is one number for each unit, or None.
        """
        values = {}
        for name, site in _drawn(self.guide_trace(key)).items():
            z = site["value"]
            if gamma is not None:
                stopped = stop_gradient(z)
                z = stopped + self.layout.along(site, gamma) * (z - stopped)
            values[name] = z
        return self.particle(key, **{"guide_params": self.stopped, "values": values, **options})

    def values(self, key: Array, params: Params | None = None) -> Sites:
        """The guide's draws of one key, live, without the Delta sites computed from them."""
        return {n: site["value"] for n, site in _drawn(self.guide_trace(key, params)).items()}

    def guide_trace(
        self, key: Array, params: Params | None = None, values: Sites | None = None
    ) -> Trace:
        """One run of the guide; ``values`` replace its draws."""
        guide_key = random.split(key)[1]
        data = {**(self.params if params is None else params), **(values or {})}
        with valid_plates(), without_rsample_stop_gradient():
            guide = substitute(seed(self._guide, guide_key), data=data)
            return trace_of(guide, self.args, self.kwargs)

    def model_trace(self, key: Array, guide_trace: Trace, params: Params | None = None) -> Trace:
        """One run of the model at the values of ``guide_trace``, on its minibatch."""
        model_key, _ = random.split(key)
        data = {**(self.params if params is None else params), **_mutable(guide_trace)}
        with valid_plates(), same_plates(None, guide_trace):
            model = replay(seed(self._model, model_key), cast(Any, guide_trace))
            return trace_of(substitute(model, data=data), self.args, self.kwargs)

    def _read(self) -> Layout:
        """The layout, from one run on shapes alone; an error if the objective does not take it."""
        objective, key = self.objective, self.keys[0]
        guide_trace = self.guide_trace(key)
        model_trace = self.model_trace(key, guide_trace)
        check_traces(model_trace, guide_trace, objective.per_datum)
        layout = find_layout(model_trace, guide_trace, objective.per_datum)
        refuse(objective, layout, guide_trace)
        if objective.needs_log_q_at_values or objective.stops_guide_params:
            self._refuse_hidden_log_q(layout.guide_params)
        return layout

    def _refuse_hidden_log_q(self, guide_params: tuple[str, ...]) -> None:
        """An error if log q cannot be evaluated at given values."""
        key, drawn = self.keys[0], self.values(self.keys[0])

        def given(params: Params) -> dict[str, tuple[Array, Array]]:
            guide_trace = self.guide_trace(key, {**self.params, **params}, drawn)
            log_q = {site["name"]: (site, self.log_q(site)) for site in sample_sites(guide_trace)}
            return {n: (site["value"], q) for n, (site, q) in log_q.items() if n not in drawn}

        params = {name: self.params[name] for name in guide_params if name in self.params}
        for name, origins in eval_provenance(given, params=params).items():
            if self.objective.stops_guide_params and any(origins):
                site = self.guide_trace(key)[name]
                kind = "a Delta" if is_delta(site) else "observed" if is_data(site) else "a factor"
                raise ValueError(
                    f"{type(self.objective).__name__}: site '{name}' of the guide is {kind} and"
                    " depends on a parameter, so log q cannot be evaluated at a given value; use"
                    f" {self.objective.without_log_q}."
                )

    def log_q(self, site: Site) -> Array:
        """Log density of a guide site, or an error that says what to use where there is none."""
        try:
            return log_prob(site)
        except NotImplementedError as error:
            raise ValueError(
                f"log q of guide site '{site['name']}' cannot be evaluated at a given value,"
                f" because a transform has no inverse; use {self.objective.without_log_q}."
            ) from error


class Particle:
    """One draw of the guide. A density is computed when it is asked for, and not before.

    ================  =============  ===============================================================
    ``log_prior``      ``()``         log p of the sites outside the unit plates, all scales applied
    ``log_lik``        ``(*units)``   log p of the sites of each unit, without the scale N/M
    ``log_q_global``   ``()``         the same split of log q
    ``log_q_local``    ``(*units)``
    ``log_weight``     ``(*units)``   log p - log q; of use if the units are the plates of all sites
    ``values``                        the guide's latent sites
    ``state``                         the mutable sites that it leaves
    ================  =============  ===============================================================
    """

    def __init__(
        self, draws: Draws, key: Array, params: Params, guide_trace: Trace, seen: Trace
    ) -> None:
        self._draws, self._key, self._params = draws, key, params
        self.guide_trace = guide_trace
        self._seen, *self._zeros = weightless_dropped(seen, draws.layout)

    @cached_property
    def model_trace(self) -> Trace:
        return self._draws.model_trace(self._key, self._seen, self._params)

    def at(self, values: Sites) -> "Particle":
        """The same particle, where the model sees ``values``; log q stays that of the draw."""
        moved = {name: {**self.guide_trace[name], "value": x} for name, x in values.items()}
        seen = {**self.guide_trace, **moved}
        return Particle(self._draws, self._key, self._params, self.guide_trace, seen)

    @property
    def values(self) -> Sites:
        return {site["name"]: site["value"] for site in latent_sites(self.guide_trace)}

    @property
    def state(self) -> State:
        return {**_mutable(self.guide_trace), **_mutable(self.model_trace)}

    @property
    def log_prior(self) -> Array:
        return self._log_p(local=False)

    @property
    def log_lik(self) -> Array:
        return self._log_p(local=True)

    @property
    def log_q_global(self) -> Array:
        return self._log_q(self.guide_trace.values(), local=False)

    @property
    def log_q_local(self) -> Array:
        return self._log_q(self.guide_trace.values(), local=True)

    @property
    def log_weight(self) -> Array:
        return self.log_lik - self.log_q_local + (self.log_prior - self.log_q_global)

    def log_q_of(self, names: Collection[str]) -> Array:
        """``(*units)``, log q of these sites without any scale: a draw follows q, scaled or not."""
        unscaled = {"scale": self._draws.layout.scale}
        chosen = [{**site, **unscaled} for n, site in self.guide_trace.items() if n in names]
        return self._log_q(chosen, local=True)

    def _log_p(self, *, local: bool) -> Array:
        log_p = self._draws.layout.sum_sites(sample_sites(self.model_trace), local=local)
        return log_p + self._zeros[local].astype(log_p.dtype)

    def _log_q(self, sites: Iterable[Site], *, local: bool) -> Array:
        sites = (site for site in sites if site["type"] == "sample")
        return self._draws.layout.sum_sites(sites, local=local, log_prob=self._draws.log_q)


def _drawn(guide_trace: Trace) -> Trace:
    return {site["name"]: site for site in latent_sites(guide_trace) if not is_delta(site)}


def _mutable(trace: Trace) -> State:
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}
