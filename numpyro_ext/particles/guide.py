"""The guide with the particles themselves as its parameters."""

from collections.abc import Callable, Sequence
from functools import partial
import math
from typing import Any, cast

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import mutable

from numpyro_ext._checks import check_count, check_nonnegative
from numpyro_ext._model.arguments import frames_in, is_traced
from numpyro_ext._model.circular_guide import CircularGuide
from numpyro_ext._model.enumeration import without_summed
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._model.modes import SEARCH, InitFrom
from numpyro_ext._model.operations import run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.same import is_same
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._typing import Float, Kwargs, Model, Params, Sites, Trace
from numpyro_ext.particles._start import (
    BeginsAtModes,
    check_distinct,
    draw_at_modes,
    warn_of_few_particles,
)
from numpyro_ext.particles.base import read_for_particles

_NO_DENSITY = "AutoParticles is a set of points and has no density"


class _OneOfThem(Implicit):
    """The value of a site at one of the particles."""

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        raise IntractableDensityError(
            f"{_NO_DENSITY}, for which Trace_ELBO and numpyro.render_model ask; fit it by"
            " SVI(model, guide, particle_step(num_steps), loss=RegularizedSVGD()), and draw the"
            " model in its place."
        )


class AutoParticles(BeginsAtModes, CircularGuide):
    r"""m equally weighted points in unconstrained space, moved by a loss like ``RegularizedSVGD``.

    Its parameter ``{prefix}_particles`` ``(m, d)`` has the d unconstrained latent numbers in the
    order in which the model samples its sites. Called as a guide it picks one particle uniformly.
    It has no density, and losses that need one (``Trace_ELBO``) raise an error.

    **Start.** At ``svi.init`` the guide searches for the modes of the posterior, by
    :func:`~numpyro_ext.optim.find_modes`, and the particles begin at draws of the normals there.
    Each mode has its share of them by Laplace's formula; one that no search has found has none. A
    field that is preconditioned keeps the shares: it moves the particles of each mode by
    themselves, in units of their own spread, in the part of the posterior that is nearest to them.
    Which particle began at which of K modes is a second parameter, ``{prefix}_modes``, ones and
    zeros ``(m, K)`` without a gradient; with fewer than 2 d K particles all are one group.
    Particles of a mode with at most d of them rest.

    The particles begin at draws of ``init_loc_fn`` instead, plus ``init_scale`` times standard
    normal noise, if one of these is given or ``init_from`` is None; for models of more than 512
    latent dimensions or with networks; and, with a warning, where the search fails or cannot run.

    The latent sites must be continuous and outside every subsampled plate; with funsor installed
    discrete sites of few values are summed out. For d > m / 2 the spread is smaller than the
    posterior's, with a warning.

    :param model: a NumPyro model.
    :param int num_particles: m.
    :param str prefix: prefix of the parameter's name.
    :param init_from: ``"search"``; or a result of ``find_modes``, ``(guide, params)`` of a fitted
        ``AutoNormal`` or another normal guide of the same model, or a ``taylor_proxy`` of it at its
        mode, in place of the search; or None.
    :param init_loc_fn: one of NumPyro's initialization strategies, ``init_to_uniform`` by default.
    :param float init_scale: standard deviation of the noise added to such a start, in unconstrained
        space, 0 by default.
    :param bool count_steps: True to register the mutable site ``{prefix}_step``, which the loss
        counts up; losses with ``annealing`` need it.

    >>> from numpyro_ext.particles import RegularizedSVGD, particle_step
    >>> def model():
    ...     numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    >>> guide = AutoParticles(model, num_particles=20, init_from=None)
    >>> svi = SVI(model, guide, particle_step(200), loss=RegularizedSVGD())
    >>> params = svi.run(jax.random.key(0), 200, progress_bar=False).params
    >>> guide.particles(params)["rate"].shape
    (20,)
    >>> bool((guide.particles(params)["rate"] > 0).all())
    True
    """

    start_argument = "init_loc_fn"

    def __init__(
        self,
        model: Model,
        num_particles: int = 100,
        *,
        prefix: str = "auto",
        init_from: InitFrom = SEARCH,
        init_loc_fn: Callable[..., Any] | None = None,
        init_scale: float | None = None,
        count_steps: bool = False,
    ) -> None:
        self.choose_start(init_from, own=init_loc_fn is not None or init_scale is not None)
        self.init_scale = 0.0 if init_scale is None else init_scale
        check_nonnegative("init_scale", self.init_scale)
        self.count_steps = count_steps
        self.num_particles = check_count("num_particles", num_particles)
        self.seen: tuple[Potential, Any] | None = None
        self.summed, self.left_out = False, frozenset[str]()
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn or init_to_uniform)

    @property
    def at_modes(self) -> bool:
        """True if particles may begin at several modes."""
        return self.searches or (self.given_modes is not None and len(self.given_modes.modes) > 1)

    @property
    def param_name(self) -> str:
        return f"{self.prefix}_particles"

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[Any, Array | None, Sites]:
        """The particles at the start, at which mode each of them is, and the first one's sites."""
        info = read_for_particles(self.model, args, kwargs)
        potential = Potential(self.model, info, {}, args, kwargs)
        # A frame may change in place, of which a potential has the numbers.
        may_change = is_traced((args, kwargs)) or frames_in((args, kwargs))
        self.seen = None if may_change else (potential.changed(), (args, kwargs))
        self.summed = bool(info.summed)
        if self.summed:
            self.left_out = frozenset(info.deterministic)
        m = self.num_particles
        if self.known_start is not None:  # its particles are among the parameters
            return None, None, self.known_start
        warn_of_few_particles(m, info.size)
        # Without the block the model's own sites would be recorded in the guide's trace.
        with handlers.block():
            modes = self.find_modes(self.model, potential)
            key = _key()
            if modes is not None:
                info = self.cut(info, args, kwargs, modes)
                params = draw_params(random.fold_in(key, 0), self.model, info, args, kwargs)
                potential = Potential(self.model, info, params, args, kwargs)
                x, groups = draw_at_modes(random.fold_in(key, 1), modes, m, potential)
                first = info.unravel((x if is_traced(x) else np.asarray(x))[0])
                return x, groups, {name: jax.device_put(z) for name, z in first.items()}
            info = self.cut(info, args, kwargs)

        def draw(rng_key: Array) -> tuple[Array, Sites, Any]:
            _, key_init, key_noise = random.split(rng_key, 3)
            z, potential, params = draw_start(
                random.split(key_init, m),
                self.model,
                info,
                args,
                kwargs,
                init_strategy=self.init_loc_fn,
                validate_grad=True,
            )
            rows = {n: jnp.tile(jnp.arange(size), (m, 1)) for n, (_, size) in info.plates.items()}
            x = jax.vmap(info.ravel)(z)
            if self.init_scale:
                x = x + self.init_scale * random.normal(key_noise, x.shape, x.dtype)
            return x, {n: v[0] for n, v in z.items()}, (params, z, rows, potential)

        with handlers.block():
            x, first, (params, *start) = run_once(draw, key)
            potential = Potential(self.model, info, params, args, kwargs)
            potential.check_start(
                *start, give="init_from=find_modes(model, *args), or another init_loc_fn"
            )
        return x, None, first

    def potential_on(self, model: Model, args: tuple, kwargs: Kwargs) -> Potential | None:
        """What :meth:`prepare` has read, if in this model on these very arguments."""
        if self.seen is None or model is not self.model:
            return None
        potential, arguments = self.seen
        return potential if is_same(arguments, (args, kwargs)) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "seen": None}

    @property
    def first_param(self) -> str:
        return self.param_name

    @property
    def seen_model(self) -> Model:
        return self.cut_model(without_summed(self.model) if self.summed else self.model)

    def constrain(self, *args: Any, **kwargs: Any) -> Sites:
        sites = super().constrain(*args, **kwargs)
        return {name: x for name, x in sites.items() if name not in self.left_out}

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites]:
        return _key(), self.prepared[2]

    def latent_distribution(self) -> Any:
        raise IntractableDensityError(f"{_NO_DENSITY}; use particles(params) or sample_posterior.")

    def get_base_dist(self) -> Any:
        return self.latent_distribution()

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        is_new = self.begin_fit(*args, **kwargs)
        x: Any = numpyro.param(self.param_name)
        if x is None:
            x, groups, _ = self.prepared if is_new else self.prepare(*args, **kwargs)
        else:  # with modes of their own, if any
            groups = jnp.ones((self.num_particles, 0)) if self.at_modes else None
        params = self.cut_params()  # before the particles, of which it asks whether they are new
        x = jnp.asarray(numpyro.param(self.param_name, x))
        if x.shape != (self.num_particles, self.latent_dim):
            shape = self.num_particles, self.latent_dim
            raise ValueError(f"{self.param_name} has shape {x.shape}; it must be {shape}.")
        check_distinct(x, "give init_scale > 0, or another init_loc_fn such as init_to_uniform.")
        if groups is not None:
            numpyro.param(f"{self.prefix}_modes", groups)
        if self.count_steps:
            mutable(f"{self.prefix}_step", jnp.zeros((), int))

        def one_of(rng_key: Array, x: Array) -> Sites:
            particle = x[random.randint(rng_key, (), 0, self.num_particles)]
            arguments = (args, kwargs, True) if self.begun_on else ()
            return self.constrain(particle, params, *arguments)

        values = run_once(one_of, _key(), x)
        result, trace = {}, cast(Trace, self.prototype_trace)
        for name in self.latent_sites:
            fn = trace[name]["fn"]
            site = _OneOfThem(values[name], event_dim=fn.event_dim, support=fn.support)
            result[name] = numpyro.sample(name, site)
        return result

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Float[Array, "m d"]:
        """All particles, in unconstrained space."""
        if num_samples not in (None, self.num_particles):
            raise ValueError(
                f"num_particles is {num_samples}, but this guide gives all of its"
                f" {self.num_particles} particles; leave num_particles out of the loss."
            )
        return params[self.param_name]

    def particles(self, params: Params) -> Sites:
        """All m particles in order, constrained, with the model's deterministic sites."""
        return self.constrain(params[self.param_name], params)

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Sites:
        """Particles in random order, repeated: n draws hold each floor(n/m) or ceil(n/m) times.

        :param args: the model's arguments, for deterministic sites; by default as at the start.
        """
        x = _in_random_order(rng_key, params[self.param_name], math.prod(sample_shape))
        return _repeated(self.constrain(x, params, args, kwargs), sample_shape)

    def median(self, params: Params) -> Sites:
        """Median over the particles, for each latent site."""
        return {name: jnp.median(v, axis=0) for name, v in self._latent_values(params).items()}

    def quantiles(self, params: Params, quantiles: Sequence[float] | Array) -> Sites:
        """Quantiles over the particles, for each latent site, along a leading axis."""
        q = jnp.asarray(quantiles)
        return {name: jnp.quantile(v, q, axis=0) for name, v in self._latent_values(params).items()}

    def _latent_values(self, params: Params) -> Sites:
        return {k: v for k, v in self.particles(params).items() if k in self.latent_sites}


@partial(jax.jit, static_argnums=2)
def _in_random_order(rng_key: Array, x: Array, n: int) -> Array:
    return x[random.permutation(rng_key, len(x))[:n]]


@partial(jax.jit, static_argnums=1)
def _repeated(sites: Sites, shape: tuple[int, ...]) -> Sites:
    n = math.prod(shape)

    def repeat(v: Array) -> Array:
        return v[jnp.arange(n) % max(len(v), 1)].reshape(shape + v.shape[1:])

    return jax.tree.map(repeat, sites)


def _key() -> Array:
    key: Any = numpyro.prng_key()
    return key
