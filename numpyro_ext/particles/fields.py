"""What all fields of particle inference share: the loss that lets ``SVI`` move particles along a field.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016); Feng, Wang and Liu, *Learning
to draw samples with amortized Stein variational gradient descent* (UAI 2017), eq. 6, for guides that
draw their particles; D'Angelo and Fortuin, *Annealed Stein variational gradient descent* (2021).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
import math
from typing import Any

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
from numpyro import handlers
from numpyro.distributions.transforms import biject_to
from numpyro.infer import ELBO
from numpyro.infer.util import potential_energy

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._model.handlers import refuse_mutable, seed_plates, valid_plates
from numpyro_ext._model.read import continuous_latents
from numpyro_ext._typing import Float, Model, Params, SamplesLatent, Sites, Trace
from numpyro_ext.scores import RBF, as_kernel

__all__ = ["ParticleField"]

# Up to this many particles the m x m matrices are small enough to be built at once.
_DENSE_UP_TO = 2048
_DEFAULT_BLOCK = 512


class ParticleField(ELBO, ABC):
    r"""A velocity :math:`V(x, \nabla \log p)` of m particles, which is also a loss for ``SVI``.

    Subclasses write :meth:`_velocity`. With ``z`` the ``(m, d)`` unconstrained latents that the guide's
    ``sample_latent`` gives, :math:`x = \mathrm{sg}(z)` (no gradient flows) and
    :math:`g_i = \gamma_t \nabla \log p(x_i) / T`, all on one minibatch, the loss is

    .. math::

        -\frac1m \sum_i \log p(x_i; \theta)
        \quad\text{with the gradient of}\quad
        -\sum_i \langle \mathrm{sg}(V_i), z_i \rangle - \frac1m \sum_i \log p(x_i; \theta).

    So ``optax.sgd(eps)`` moves each particle of an ``AutoParticles`` guide by ``eps`` times its
    velocity, any guide that draws its latents is trained along the field (amortised inference), and a
    ``numpyro.param`` of the model gets the gradient of the mean. The value is a mean negative log joint
    density in unconstrained space: not a bound, and not for the comparison of models.
    """

    def __init__(
        self,
        kernel: Any = None,
        *,
        num_particles: int | None = None,
        temperature: float = 1.0,
        annealing: Callable[[Array], ArrayLike] | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__()
        if num_particles is not None:
            check_count("num_particles", num_particles)
        if block_size is not None:
            check_count("block_size", block_size)
        check_positive("temperature", temperature)
        if annealing is not None and not callable(annealing):
            raise TypeError(
                f"annealing is {annealing!r}; it must be a function of the step that gives a number in"
                " (0, 1], or None."
            )
        self.kernel = as_kernel(RBF("median") if kernel is None else kernel)
        self.num_particles = num_particles  # type: ignore[assignment]
        self.temperature = temperature
        self.annealing = annealing
        self.block_size = block_size

    @abstractmethod
    def _velocity(self, kernel: Any, x: Array, g: Array) -> Array:
        """The field at ``(m, d)`` particles, with a kernel whose bandwidth is a number."""

    def velocity(self, x: ArrayLike, grad_log_p: ArrayLike) -> Float[Array, "m d"]:
        """The field itself, a pure function: neither temperature nor annealing enters.

        :param x: ``(m, d)`` particles.
        :param grad_log_p: ``(m, d)`` gradients of the log density at the particles.
        """
        x, grad_log_p = jnp.asarray(x), jnp.asarray(grad_log_p)
        if x.ndim != 2 or x.shape != grad_log_p.shape:
            raise ValueError(
                f"x has shape {x.shape} and grad_log_p has shape {grad_log_p.shape}; both must be"
                " (m, d), one row per particle."
            )
        return self._velocity(self.kernel.resolve(x), x, grad_log_p)

    def tempered_velocity(self, x: Array, grad_log_p: Array, step: ArrayLike | None) -> Array:
        """:meth:`velocity` with the gradients times ``annealing(step) / temperature``."""
        scale = 1.0 / self.temperature
        if self.annealing is not None:
            scale = scale * self.annealing(jnp.asarray(step))
        return self.velocity(x, jnp.asarray(scale, grad_log_p.dtype) * grad_log_p)

    def _by_rows(self, fn: Callable[[Array], Array], x: Array) -> Array:
        """``fn`` of all rows of x, or of ``block_size`` rows at a time: the same numbers in less memory."""
        m = x.shape[0]
        block = self.block_size or (m if m <= _DENSE_UP_TO else _DEFAULT_BLOCK)
        if block >= m:
            return fn(x)
        num_blocks = -(-m // block)
        padded = jnp.pad(x, ((0, num_blocks * block - m), (0, 0)), mode="edge")
        values = lax.map(fn, padded.reshape(num_blocks, block, -1))
        return values.reshape(num_blocks * block, -1)[:m]

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: Params,
        model: Model,
        guide: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(guide, SamplesLatent):
            name = getattr(guide, "__name__", type(guide).__name__)
            raise TypeError(
                f"guide {name} has no sample_latent(rng_key, params, num_samples), so it has no particles"
                " to move; use AutoParticles(model), or a guide that draws its latent vector."
            )
        step_name, step = self._step(guide, param_map)
        key_minibatch, key_guide = random.split(rng_key)
        num_particles = self.num_particles or getattr(guide, "num_particles", 100)
        z = guide.sample_latent(key_guide, param_map, num_particles)
        unpack = _unpacker(guide, model, key_guide, z, param_map, args, kwargs)

        log_prob = particle_log_prob(model, key_minibatch, unpack, args, kwargs)
        # One evaluation gives the gradients of the particles and of the model's parameters.
        x, params = lax.stop_gradient((z, param_map))
        log_p, vjp = jax.vjp(log_prob, x, params)
        g, grad_params = vjp(jnp.ones_like(log_p))

        m = x.shape[0]
        v = lax.stop_gradient(self.tempered_velocity(x, g, step))
        surrogate = -jnp.sum(v * z) - _inner(grad_params, param_map) / m
        # The difference is 0, so that the value keeps its digits when the surrogate is large.
        loss = -jnp.mean(log_p) + (surrogate - lax.stop_gradient(surrogate))
        mutable_state = {step_name: step + 1} if step_name in param_map else None
        return {"loss": loss, "mutable_state": mutable_state}

    def _step(self, guide: Any, param_map: Params) -> tuple[str, Any]:
        name = f"{getattr(guide, 'prefix', 'auto')}_step"
        # SVI.evaluate passes no mutable state; the value does not depend on the step.
        counts = name in param_map or getattr(guide, "count_steps", False)
        if self.annealing is not None and not counts:
            raise ValueError(
                "annealing needs the number of the step, and this guide does not count; use"
                " AutoParticles(model, count_steps=True)."
            )
        return name, param_map.get(name, 0)


def particle_log_prob(
    model: Model, rng_key: Array, unpack: Callable[[Array], Any], args: Any, kwargs: Any
) -> Callable[[Array, Params], Array]:
    """``(x, params) -> (m,)`` log joint densities, all particles on the minibatch of one key."""

    def log_prob(x: Array, params: Params) -> Any:
        fn = handlers.substitute(refuse_mutable(valid_plates(model)), data=params)
        return -potential_energy(seed_plates(fn, rng_key), args, kwargs, unpack(x))

    return jax.vmap(log_prob, in_axes=(0, None))


def check_model(model: Model, rng_key: Array, args: Any, kwargs: Any) -> Trace:
    """The latent sites of a model, all continuous; an error where particles cannot run on it."""
    with handlers.block():
        traced = handlers.trace(handlers.seed(refuse_mutable(valid_plates(model)), rng_key))
        return continuous_latents(traced.get_trace(*args, **kwargs))


def check_distinct(x: Array, remedy: str) -> None:
    """Refuse particles that all coincide: no field ever separates them."""
    if x.shape[0] < 2 or isinstance(x, Tracer):
        return
    values = np.asarray(x)  # NumPy, because inside a loop JAX would trace the comparison
    if np.any(values != values[0]):
        return
    raise ValueError(
        f"all {x.shape[0]} particles start at the same point and would stay there; {remedy}"
    )


def _unpacker(
    guide: Any, model: Model, rng_key: Array, z: Array, params: Params, args: Any, kwargs: Any
) -> Callable[[Array], Sites]:
    """How a latent vector splits into the model's unconstrained sites."""
    if z.ndim != 2:
        raise ValueError(
            f"sample_latent of the guide gave shape {z.shape}; it must be (num_samples, latent_dim)."
        )
    # NumPyro's automatic guides know their own order; any other guide follows the model's.
    own = getattr(guide, "_unpack_latent", None)
    if own is not None:
        return own
    sites = check_model(handlers.substitute(model, data=params), rng_key, args, kwargs)
    shapes = {
        name: biject_to(site["fn"].support).inverse_shape(jnp.shape(site["value"]))
        for name, site in sites.items()
    }
    sizes = [math.prod(shape) for shape in shapes.values()]
    if sum(sizes) != z.shape[1]:
        raise ValueError(
            f"sample_latent of the guide gives vectors of length {z.shape[1]}, but the model's latent"
            f" sites {', '.join(shapes)} take {sum(sizes)} unconstrained numbers."
        )

    def unpack(x: Array) -> Sites:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        parts = jnp.split(x, ends)
        return {n: p.reshape(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}

    return unpack


def _inner(grads: Any, params: Any) -> Array:
    """Inner product over the floating-point leaves; integers and keys have no gradient."""
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True)
    terms = [jnp.sum(lax.stop_gradient(g) * p) for g, p in pairs if g.dtype != jax.dtypes.float0]
    return jnp.sum(jnp.stack(terms))
