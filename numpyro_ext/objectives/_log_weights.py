r"""The log-weight engine that all objectives of this room share.

For K particles :math:`z_k \sim q` that see **one** minibatch it gives :math:`\log p(x, z_k)` and
:math:`\log q(z_k)`, split into a global part and one term per unit (see ``_plates.py``):

========================= ============== =========================================================
field of a ``Particle``    shape          content
========================= ============== =========================================================
``log_prior``              ``()``         log p of the sites outside the unit plates, all scales in
``log_lik``                ``(*units)``   log p of the sites of each unit, plate scale divided out
``log_q_global``           ``()``         the same split of log q
``log_q_local``            ``(*units)``
``log_q_score``            ``(*units)``   log q of the scored sites, without any scale
``values``                               the guide's sample sites
``state``                                the mutable sites that this particle leaves
``log_weight``             ``(*units)``   ``log_lik - log_q_local + log_prior - log_q_global``
========================= ============== =========================================================

Stacked over particles there is a K in front. With ``per_datum=False`` the units are the plates around
*every* site of model and guide; then all sites are local and the global fields are 0. With
``per_datum=True`` they are the plates around all *observed* sites; ``log_weight`` then means nothing,
and an objective combines the four parts itself.

**How a new objective uses it.** Subclass ``ParticleELBO`` and write ``loss_with_mutable_state``::

    engine = Engine(self, rng_key, param_map, model, guide, args, kwargs, per_datum=False)
    particles = engine.particles()                     # stacked, parameters live
    bound = surrogate(particles.log_weight, a)         # (*units), value and gradient
    return engine.result(-engine.layout.scale * jnp.sum(bound), particles.state)

``engine.layout`` (sizes, scale, names; static Python) exists once a particle has been traced. Set
``can_infer_discrete = True`` on the objective if it has a score term for the sites of
``layout.not_reparameterized`` (their values carry no gradient); otherwise such a site is an error.
What has a gradient is chosen by keywords of ``particle`` (and ``particles``):

* ``params=``, ``guide_params=``: the parameters of the model and of the guide; ``engine.stopped`` is
  the copy under ``stop_gradient``, ``engine.params`` the live one (default).
* ``values=``: guide sites that take these values instead of a draw; the rest is drawn with the key.
  ``engine.values(key)`` are the draws of a key, live. So "log q at the same z with its parameters
  stopped" is ``particle(key, values=engine.values(key), guide_params=engine.stopped)``, and "z under
  ``stop_gradient``, densities live" is ``particle(key, values=stop_gradient(engine.values(key)))``.
  Delta sites are left out of ``values``: they are recomputed from the others.
* ``detach=True``: the model sees the values under ``stop_gradient``.

The *scored sites* are those of ``layout.not_reparameterized``, or with ``Engine(..., score_all=True)``
all that are drawn: the guide's latent sites but its Delta sites.

``engine.map(fn, xs)`` maps over particles as ``vectorize_particles`` says; with ``False`` under
``jax.checkpoint``, so that nothing but the outputs of ``fn`` is stored for each particle. Let ``fn``
return only what is needed (``particles`` leaves ``values`` out).

Draws are those of NumPyro's ``RenyiELBO``: ``plate_key, rng_key = split(rng_key)``, ``keys =
split(rng_key, K)``, ``model_key, guide_key = split(keys[k])``. So objectives of this room that get the
same key see the same particles and the same minibatch. ``engine.extra_key`` is independent of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from numpyro.handlers import replay, seed, substitute, trace
from numpyro.infer import ELBO

from numpyro_ext._checks import check_count
from numpyro_ext._model.handlers import seed_plates, valid_plates
from numpyro_ext._model.read import Site, is_delta, latent_sites, sample_sites
from numpyro_ext._model.units import Layout, find_layout
from numpyro_ext._numpyro import without_rsample_stop_gradient
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.objectives._checks import (
    check_traces,
    refuse_hidden_density,
    refuse_local_subsampling,
    refuse_model_params,
)
from numpyro_ext.objectives.annealing import advance_step

MapT = Callable[[Callable[..., Any], Any], Any]


def map_with_checkpoint(fn: Callable[..., Any], xs: Any) -> Any:
    """``lax.map`` whose backward pass recomputes each particle instead of storing its residuals."""
    return jax.lax.map(jax.checkpoint(fn, prevent_cse=False), xs)


class ParticleELBO(ELBO):
    """An objective of K particles: checks the arguments that all of them take."""

    instead_of_density = 'gradient="standard"'
    """What to use where log q cannot be evaluated at a given value."""

    def __init__(self, num_particles: int, vectorize_particles: bool | MapT) -> None:
        check_count("num_particles", num_particles)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)
        if vectorize_particles is False:
            self.vectorize_particles_fn = map_with_checkpoint


class Particle(NamedTuple):
    """Log densities of one particle, or of K with a leading axis; see the top of this file."""

    log_prior: Array
    log_lik: Array
    log_q_global: Array
    log_q_local: Array
    log_q_score: Array
    values: Sites
    state: dict[str, Any]

    @property
    def log_weight(self) -> Array:
        shared = self.log_prior - self.log_q_global
        units = self.log_lik.ndim - shared.ndim
        return self.log_lik - self.log_q_local + jnp.reshape(shared, shared.shape + (1,) * units)


class Engine:
    """One evaluation of an objective; see the top of this file."""

    layout: Layout

    def __init__(
        self,
        objective: ParticleELBO,
        rng_key: Array,
        params: Params,
        model: Model,
        guide: Model,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        per_datum: bool = False,
        score_all: bool = False,
    ) -> None:
        plate_key, rng_key = random.split(rng_key)
        num_particles = objective.num_particles
        self.keys = random.split(rng_key, num_particles)
        # fold_in(key, i) is the i-th key of a split, so 0 .. K-1 are taken.
        self.extra_key = random.fold_in(rng_key, num_particles)
        self.params = params
        self.stopped: Params = stop_gradient(params)
        self._objective = objective
        self._model = seed_plates(model, plate_key)
        self._guide = seed_plates(guide, plate_key)
        self._args = args
        self._kwargs = kwargs
        self._per_datum = per_datum
        self._score_all = score_all

    @property
    def name(self) -> str:
        return type(self._objective).__name__

    def map(self, fn: Callable[..., Any], xs: Any) -> Any:
        """``fn`` over the leading axis of ``xs``, as the objective's ``vectorize_particles`` says."""
        if self._objective.num_particles == 1 and self._objective.vectorize_particles is True:
            return jax.tree.map(
                lambda x: jnp.asarray(x)[None], fn(jax.tree.map(lambda x: x[0], xs))
            )
        return cast(MapT, self._objective.vectorize_particles_fn)(fn, xs)

    def particles(self, **options: Any) -> Particle:
        """All K particles, without ``values``; the keywords are those of :meth:`particle`."""
        return self.map(lambda key: self.particle(key, **options)._replace(values={}), self.keys)

    def particle(
        self,
        key: Array,
        *,
        params: Params | None = None,
        guide_params: Params | None = None,
        values: Sites | None = None,
        detach: bool = False,
    ) -> Particle:
        """The particle of one key."""
        params = self.params if params is None else params
        guide_params = params if guide_params is None else guide_params
        guide_trace = self.guide_trace(key, guide_params, values)
        seen = (
            _with_values(guide_trace, stop_gradient(_values(guide_trace)))
            if detach
            else guide_trace
        )
        model_trace = self.model_trace(key, seen, params)
        score_free = not self._objective.can_infer_discrete
        check_traces(model_trace, guide_trace, self.name if score_free else None)
        self.layout = find_layout(model_trace, guide_trace, self._per_datum)

        local, everything = partial(self.layout.sum_sites, local=True), self.layout.sum_sites
        log_p = [(site, _log_prob(site)) for site in sample_sites(model_trace)]
        log_q = [(site, self._guide_log_prob(site)) for site in sample_sites(guide_trace)]
        scored = self.layout.drawn if self._score_all else self.layout.not_reparameterized
        # What is drawn follows q itself, whatever scale its log density has in the bound.
        unscaled = {"scale": self.layout.scale}
        score = [({**site, **unscaled}, x) for site, x in log_q if site["name"] in scored]
        return Particle(
            log_prior=everything(log_p, local=False),
            log_lik=local(log_p),
            log_q_global=everything(log_q, local=False),
            log_q_local=local(log_q),
            log_q_score=local(score),
            values=_values(guide_trace),
            state={**_mutable(guide_trace), **_mutable(model_trace)},
        )

    def values(self, key: Array, params: Params | None = None) -> Sites:
        """The guide's draws of one key, Delta sites left out, differentiable in its parameters."""
        return {
            name: site["value"]
            for name, site in self.drawn_sites(self.guide_trace(key, params)).items()
        }

    @staticmethod
    def drawn_sites(guide_trace: Trace) -> dict[str, Site]:
        """The latent sites of a guide whose value can be replaced: all but its Delta sites."""
        return {site["name"]: site for site in latent_sites(guide_trace) if not is_delta(site)}

    def guide_trace(
        self, key: Array, params: Params | None = None, values: Sites | None = None
    ) -> Trace:
        _, guide_key = random.split(key)
        data = {**(self.params if params is None else params), **(values or {})}
        with valid_plates(), without_rsample_stop_gradient():
            guide = substitute(seed(self._guide, guide_key), data=data)
            return trace(guide).get_trace(*self._args, **self._kwargs)

    def model_trace(self, key: Array, guide_trace: Trace, params: Params | None = None) -> Trace:
        """The model at the values of ``guide_trace``, on its minibatch."""
        model_key, _ = random.split(key)
        data = {**(self.params if params is None else params), **_mutable(guide_trace)}
        with valid_plates():
            model = substitute(
                replay(seed(self._model, model_key), cast(Any, guide_trace)), data=data
            )
            return trace(model).get_trace(*self._args, **self._kwargs)

    def log_joint(self, key: Array, guide_trace: Trace, values: Sites) -> Array:
        """Log p per unit of the model at ``values``, which replace those of ``guide_trace``."""
        model_trace = self.model_trace(key, _with_values(guide_trace, values))
        log_p = [(site, _log_prob(site)) for site in sample_sites(model_trace)]
        return self.layout.sum_sites(log_p, local=True)

    def _guide_log_prob(self, site: Site) -> Array:
        try:
            return _log_prob(site)
        except NotImplementedError as error:
            raise ValueError(
                f"log q of guide site '{site['name']}' cannot be evaluated at a given value, because a"
                f" transform has no inverse; use {self._objective.instead_of_density}."
            ) from error

    def local_log_weight(self, key: Array, values: Sites) -> Array:
        """``log_lik - log_q_local`` of a fresh draw, given the ``values`` of other guide sites."""
        guide_trace = self.guide_trace(key, values=values)
        local = [site for site in sample_sites(guide_trace) if self.layout.is_local(site)]
        log_q = [(site, self._guide_log_prob(site)) for site in local]
        log_lik = self.log_joint(key, guide_trace, {})
        return log_lik - self.layout.sum_sites(log_q, local=True)

    def refuse_local_subsampling(self) -> None:
        """For a bound that is not linear in the log joint of the minibatch."""
        refuse_local_subsampling(self.name, self.layout)

    def refuse_model_params(self) -> None:
        """For an upper bound that is minimised."""
        refuse_model_params(self.name, self.layout)

    def refuse_hidden_density(self, key: Array, guide_trace: Trace) -> None:
        """For a gradient that evaluates log q of ``guide_trace`` at the values it has."""
        values = {name: site["value"] for name, site in self.drawn_sites(guide_trace).items()}
        suspects = [s["name"] for s in sample_sites(guide_trace) if s["name"] not in values]
        params = {
            name: self.stopped[name]
            for name, site in guide_trace.items()
            if site["type"] == "param" and name in self.stopped
        }
        if suspects and params:
            refuse_hidden_density(
                self.name,
                self._objective.instead_of_density,
                lambda params: self.guide_trace(key, {**self.stopped, **params}, values),
                params,
                suspects,
            )

    def result(self, loss: Array, state: dict[str, Any]) -> Any:
        """What ``loss_with_mutable_state`` returns: the state is that of particle 0, one step on."""
        state = self.first_state(state)
        return {"loss": loss, "mutable_state": advance_step(state) if state else None}

    @staticmethod
    def first_state(state: dict[str, Any]) -> dict[str, Any]:
        """The mutable sites of particle 0, out of those of all particles."""

        def first(x: Array) -> Array:
            return stop_gradient(jax.lax.convert_element_type(x[0], jnp.result_type(x)))

        return jax.tree.map(first, state)


def _log_prob(site: Site) -> Array:
    if site["intermediates"]:
        return site["fn"].log_prob(site["value"], site["intermediates"])
    return site["fn"].log_prob(site["value"])


def _values(guide_trace: Trace) -> Sites:
    return {site["name"]: site["value"] for site in latent_sites(guide_trace)}


def _with_values(guide_trace: Trace, values: Sites) -> Trace:
    return {
        name: {**site, "value": values[name]} if name in values else site
        for name, site in guide_trace.items()
    }


def _mutable(trace: Trace) -> dict[str, Any]:
    return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}
