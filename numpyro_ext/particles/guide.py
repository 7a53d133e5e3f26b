"""The guide whose parameters are the particles themselves."""

from collections.abc import Callable, Sequence
import math
from typing import Any, cast

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform
from numpyro.primitives import mutable

from numpyro_ext._checks import check_count, check_nonnegative
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._model.operations import run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.start import draw_start
from numpyro_ext._numpyro import ContinuousGuide
from numpyro_ext._typing import Float, Model, Params, Sites, Trace
from numpyro_ext.particles.base import read_for_particles
from numpyro_ext.particles.start import check_distinct, warn_of_few_particles

__all__ = ["AutoParticles"]


_NO_DENSITY = "AutoParticles is a set of points and has no density"


class _OneOfThem(Implicit):
    """The value of a site at one of the particles."""

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        raise IntractableDensityError(
            f"{_NO_DENSITY}, for which Trace_ELBO and the like, and numpyro.render_model, ask; fit"
            " it with a field of numpyro_ext.particles as the loss, and its step as the optimiser:"
            " SVI(model, guide, particle_step(num_steps), loss=RegularizedSVGD()); and draw the"
            " model in its place."
        )


class AutoParticles(ContinuousGuide):
    r"""m equally weighted points in unconstrained space, moved by a loss like ``RegularizedSVGD``.

    It has one parameter, ``{prefix}_particles`` of shape ``(m, d)``, where d is the number of
    unconstrained latent numbers of the model, in the order in which the model samples its sites.
    Each particle starts at its own draw of ``init_loc_fn``, plus ``init_scale`` times standard
    normal noise. Called as a guide it picks one particle uniformly. It has no density, so losses
    that need one (``Trace_ELBO``) raise an error instead of collapsing all particles to a mode.

    The latent sites of the model must be continuous and outside every subsampled plate; observed
    sites may be subsampled. The result is only as good as m points can be: there are no quantiles
    beyond 1/m, and for d > m / 2 the spread is smaller than that of the posterior, of which a
    warning is given. A single particle climbs to a mode. ``diagnose`` says whether the particles
    have converged, and :func:`print_particles` prints a summary of ``particles(params)``.

    :param model: a NumPyro model.
    :param int num_particles: m.
    :param str prefix: prefix of the parameter's name.
    :param init_loc_fn: one of NumPyro's initialization strategies, for the start of the particles.
        Strategies that give every particle the same point need ``init_scale``.
    :param float init_scale: standard deviation of the noise added to the start, in unconstrained
        space.
    :param bool count_steps: True to register the mutable site ``{prefix}_step``, which the loss
        counts up; losses with ``annealing`` need it.

    .. doctest::

        >>> import jax, numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI
        >>> from numpyro_ext.particles import AutoParticles, RegularizedSVGD, particle_step
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(3.0, 1.0))
        >>> guide = AutoParticles(model, num_particles=20)
        >>> svi = SVI(model, guide, particle_step(200), loss=RegularizedSVGD())
        >>> params = svi.run(jax.random.key(0), 200, progress_bar=False).params
        >>> guide.particles(params)["rate"].shape
        (20,)
        >>> bool((guide.particles(params)["rate"] > 0).all())
        True
    """

    def __init__(
        self,
        model: Model,
        num_particles: int = 100,
        *,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_scale: float = 0.0,
        count_steps: bool = False,
    ) -> None:
        check_nonnegative("init_scale", init_scale)
        self.num_particles = check_count("num_particles", num_particles)
        self.init_scale = init_scale
        self.count_steps = count_steps
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    @property
    def param_name(self) -> str:
        """Name of the one parameter."""
        return f"{self.prefix}_particles"

    def prepare(self, *args: Any, **kwargs: Any) -> Float[Array, "m d"]:
        """The particles at the start."""
        info = read_for_particles(self.model, args, kwargs)
        m = self.num_particles
        how: dict[str, Any] = {"init_strategy": self.init_loc_fn, "validate_grad": True}

        def draw(rng_key: Array) -> tuple[Array, Sites, Any]:
            _, key_init, key_noise = random.split(rng_key, 3)
            keys = random.split(key_init, m)
            z, potential, params = draw_start(keys, self.model, info, args, kwargs, **how)
            rows = {n: jnp.tile(jnp.arange(size), (m, 1)) for n, (_, size) in info.plates.items()}
            x = jax.vmap(info.ravel)(z)
            if not (isinstance(self.init_scale, float) and self.init_scale == 0.0):
                x = x + self.init_scale * random.normal(key_noise, x.shape, x.dtype)
            return x, {n: v[0] for n, v in z.items()}, (params, z, rows, potential)

        # Without the block the model's own sites would be recorded in the guide's trace.
        with handlers.block():
            x, self._first, (params, *start) = run_once(draw, _key())
            Potential(self.model, info, params, args, kwargs).check_start(*start)
        warn_of_few_particles(*x.shape)
        return x

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites]:
        return _key(), self._first

    def latent_distribution(self) -> Any:
        raise IntractableDensityError(f"{_NO_DENSITY}; use particles(params) or sample_posterior.")

    def get_base_dist(self) -> Any:
        return self.latent_distribution()

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        self.set_up(*args, **kwargs)
        x = jnp.asarray(numpyro.param(self.param_name, self.prepared))
        if x.shape != (self.num_particles, self.latent_dim):
            raise ValueError(
                f"{self.param_name} has shape {x.shape}; it must be ({self.num_particles},"
                f" {self.latent_dim}): num_particles rows of the model's unconstrained latents."
            )
        check_distinct(x, "give init_scale > 0, or another init_loc_fn such as init_to_uniform.")
        if self.count_steps:
            mutable(f"{self.prefix}_step", jnp.zeros((), int))

        def one_of(rng_key: Array, x: Array) -> Sites:
            return self.constrain(x[random.randint(rng_key, (), 0, self.num_particles)], {})

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
        """All particles, in unconstrained space; ``num_samples`` must be None or their number."""
        if num_samples not in (None, self.num_particles):
            raise ValueError(
                f"num_particles is {num_samples}, but this AutoParticles guide has"
                f" {self.num_particles} particles and gives all of them; leave num_particles out of"
                " the loss, or build the guide with that number."
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

        :param rng_key: random key.
        :param dict params: the parameters of guide and model, from ``svi.get_params``.
        :param args: the model's arguments, for deterministic sites that depend on them; without
            any, those of the first call are used.
        :param tuple sample_shape: what the shape of every site starts with.
        :return: constrained latent sites and deterministic ones, ``sample_shape + site shape``.
        """
        n = math.prod(sample_shape)
        index = random.permutation(rng_key, self.num_particles)[:n]
        different = self.constrain(params[self.param_name][index], params, args, kwargs)
        again = jnp.arange(n) % max(index.size, 1)
        return jax.tree.map(lambda v: v[again].reshape(sample_shape + v.shape[1:]), different)

    def median(self, params: Params) -> Sites:
        """Median over the particles, for each latent site."""
        return {name: jnp.median(v, axis=0) for name, v in self._latent_values(params).items()}

    def quantiles(self, params: Params, quantiles: Sequence[float] | Array) -> Sites:
        """Quantiles over the particles, for each latent site, along a leading axis."""
        q = jnp.asarray(quantiles)
        return {name: jnp.quantile(v, q, axis=0) for name, v in self._latent_values(params).items()}

    def _latent_values(self, params: Params) -> Sites:
        return {k: v for k, v in self.particles(params).items() if k in self.latent_sites}


def _key() -> Array:
    key = numpyro.prng_key()
    if key is None:
        raise ValueError("AutoParticles draws a particle; seed it with numpyro.handlers.seed.")
    return key
