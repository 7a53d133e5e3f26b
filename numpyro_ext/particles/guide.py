"""The guide whose parameters are the particles themselves."""

from collections.abc import Callable, Sequence
import math
from typing import Any, cast

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import initialize_model
from numpyro.primitives import mutable

from numpyro_ext._checks import check_count, check_nonnegative
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._typing import Float, Model, Params, Sites, Trace
from numpyro_ext.particles.fields import check_distinct, check_model

__all__ = ["AutoParticles"]


class AutoParticles(AutoContinuous):
    r"""m equally weighted points in unconstrained space, moved by a field such as ``SVGD``.

    One parameter, ``{prefix}_particles`` of shape ``(m, d)``; d is the number of unconstrained latent
    numbers of the model. Each particle starts at its own draw of ``init_loc_fn``, plus
    ``init_scale`` times standard normal noise. Called as a guide it picks one particle uniformly; it has no density, so
    losses that need one (``Trace_ELBO``) raise an error instead of collapsing all particles to a mode.

    The model needs continuous latents, none of them inside a subsampled plate; observed sites may be
    subsampled. The answer is as good as m points can be: quantiles beyond 1/m are not there.

    :param model: a NumPyro model.
    :param int num_particles: m.
    :param str prefix: prefix of the parameter's name.
    :param init_loc_fn: where particles start, see NumPyro's initialization strategies. Strategies that give
        every particle the same point need ``init_scale``.
    :param float init_scale: standard deviation of the noise added to the start, in unconstrained space.
    :param bool count_steps: register the mutable site ``{prefix}_step``, which the loss counts up; for losses with
        ``annealing``.

    .. doctest::

        >>> import jax, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Predictive
        >>> from numpyro_ext.particles import SVGD, AutoParticles
        >>> def model():
        ...     numpyro.sample("rate", dist.Gamma(3.0, 1.0))
        >>> guide = AutoParticles(model, num_particles=20)
        >>> svi = SVI(model, guide, optax.adagrad(0.3), loss=SVGD())
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
        check_count("num_particles", num_particles)
        check_nonnegative("init_scale", init_scale)
        self.num_particles = num_particles
        self.init_scale = init_scale
        self.count_steps = count_steps
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    @property
    def _param_name(self) -> str:
        return f"{self.prefix}_particles"

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        key_check, key_init, key_noise = random.split(_key(), 3)
        check_model(self.model, key_check, args, kwargs)
        super()._setup_prototype(*args, **kwargs)
        # Without the block the model's own sites would be recorded in the guide's trace.
        with handlers.block():
            info = initialize_model(
                random.split(key_init, self.num_particles),
                self.model,
                init_strategy=self.init_loc_fn,
                dynamic_args=True,
                model_args=args,
                model_kwargs=kwargs,
            )
        sites = info.param_info.z
        x = jnp.concatenate(
            [sites[name].reshape(self.num_particles, -1) for name in self._init_locs], axis=1
        )
        noise = random.normal(key_noise, x.shape, x.dtype)
        self._init_particles = x + self.init_scale * noise

    def _get_posterior(self) -> Any:
        raise IntractableDensityError(
            "AutoParticles is a set of points and has no density; use particles(params) or"
            " sample_posterior."
        )

    def get_base_dist(self) -> Any:
        return self._get_posterior()

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        x = jnp.asarray(numpyro.param(self._param_name, self._init_particles))
        if x.shape != (self.num_particles, self.latent_dim):
            raise ValueError(
                f"{self._param_name} has shape {x.shape}; it must be ({self.num_particles},"
                f" {self.latent_dim}): num_particles rows of the model's unconstrained latents."
            )
        check_distinct(x, "give init_scale > 0, or another init_loc_fn such as init_to_uniform.")
        if self.count_steps:
            mutable(f"{self.prefix}_step", jnp.zeros((), int))
        picked = x[random.randint(_key(), (), 0, self.num_particles)]
        with handlers.block():
            values = self._unpack_and_constrain(picked, {})
        result, trace = {}, cast(Trace, self.prototype_trace)
        for name in self._init_locs:
            fn = trace[name]["fn"]
            site = Implicit(values[name], event_dim=fn.event_dim, support=fn.support)
            result[name] = numpyro.sample(name, site)
        return result

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Float[Array, "m d"]:
        """All particles, in unconstrained space; ``num_samples`` must be None or their number."""
        if num_samples not in (None, self.num_particles):
            raise ValueError(
                f"num_particles is {num_samples}, but this AutoParticles guide has"
                f" {self.num_particles} particles and gives all of them; leave num_particles out of the"
                " loss, or build the guide with that number."
            )
        return params[self._param_name]

    def particles(self, params: Params) -> Sites:
        """All m particles in order, constrained, with the model's deterministic sites."""
        return self._unpack_and_constrain(params[self._param_name], params)

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Sites:
        """Particles in random order, repeated: of n draws each is floor(n/m) or ceil(n/m) times one."""
        n = math.prod(sample_shape)
        index = random.permutation(rng_key, self.num_particles)[:n]
        different = self._unpack_and_constrain(params[self._param_name][index], params)
        again = jnp.arange(n) % max(index.size, 1)
        return jax.tree.map(lambda v: v[again].reshape(sample_shape + v.shape[1:]), different)

    def median(self, params: Params) -> Sites:
        """Median over the particles, for each latent site."""
        return {name: jnp.median(v, axis=0) for name, v in self._latents(params).items()}

    def quantiles(self, params: Params, quantiles: Sequence[float] | Array) -> Sites:
        """Quantiles over the particles, for each latent site, along a leading axis."""
        q = jnp.asarray(quantiles)
        return {name: jnp.quantile(v, q, axis=0) for name, v in self._latents(params).items()}

    def _latents(self, params: Params) -> Sites:
        return {k: v for k, v in self.particles(params).items() if k in self._init_locs}


def _key() -> Array:
    key = numpyro.prng_key()
    if key is None:
        raise ValueError("AutoParticles draws a particle; seed it with numpyro.handlers.seed.")
    return key
