"""A field of particle inference as a kernel for ``MCMC``.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016); Liu, Zhuo, Cheng, Zhang, Zhu
and Carin, *Understanding and accelerating particle-based variational inference* (ICML 2019).
"""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import identity, is_prng_key
import optax

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Model
from numpyro_ext.particles.fields import (
    ParticleField,
    check_distinct,
    check_model,
    particle_log_prob,
)
from numpyro_ext.particles.svgd import SVGD

__all__ = ["ParVI", "ParVIState"]

ParVIState = namedtuple(
    "ParVIState",
    [
        "i",
        "z",
        "optim_state",
        "potential_energy",
        "z_grad",
        "diverging",
        "rng_key",
    ],
)
"""
A :func:`~collections.namedtuple` consisting of the following fields, m being the number of particles:

 - **i** - number of steps so far, warmup included.
 - **z** - the particles: unconstrained values of the latent sites, with a leading axis of length m.
 - **optim_state** - state of the optimiser.
 - **potential_energy** - ``(m,)`` potential energies at ``z``, on the minibatch of the last step.
 - **z_grad** - ``(m, d)`` gradients of the log density at ``z``, on the same minibatch.
 - **diverging** - ``(m,)``, true if the last step was refused because something was not finite.
 - **rng_key** - random number generator seed of the next steps.
"""


class ParVI(MCMCKernel):
    r"""Particle-based variational inference as an ensemble kernel: the chains are the particles.

    One step moves all m particles :math:`x \in R^{m \times d}` (unconstrained, Jacobian included) along
    the field,

    .. math::

        x \leftarrow x + \text{optimiser}\left( V(x, \gamma_i \nabla \log p(x) / T) \right),

    with temperature T and annealing :math:`\gamma` those of the field, and i the number of the step.
    A plate with ``subsample_size`` gives one minibatch per step, the same for all particles.

    It wants ``MCMC(..., chain_method="vectorized", num_chains=m)``. Warmup steps are ordinary steps, so
    put the iterations into ``num_warmup`` and take ``num_samples=1``: ``get_samples()`` are the m
    particles. The draws of one chain are the path of an optimisation, not a Markov chain: R-hat and
    effective sample size mean nothing here (``print_summary`` shows them, and wants 4 draws of each). What the answer is biased by is said at the field.

    A step at which something is not finite is refused: the particles stay where they are and
    ``diverging`` is set, which ``MCMC`` collects.

    :param model: a NumPyro model with continuous latents; exactly one of ``model`` and ``potential_fn``.
    :param field: a field such as ``SVGD()``, the default.
    :param optim: an optax transformation, of parameters of shape ``(m, d)``; defaults to
        ``optax.adagrad(0.1)``. Pickling drops it, because optax makes it of closures (samples can still
        be had); ``functools.partial(optax.adam, 0.1)``, which makes one when called, is kept.
    :param potential_fn: the potential energy of one particle, a function of the type of
        ``init_params`` without its leading axis.
    :param init_strategy: where particles start, each from its own key.
    :param int steps_per_sample: steps in one iteration of ``MCMC``.

    .. doctest::

        >>> import jax, numpyro, optax
        >>> import numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.particles import SVGD, ParVI
        >>> def model():
        ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
        >>> kernel = ParVI(model, SVGD(), optax.adagrad(0.5))
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=1, num_chains=50,
        ...             chain_method="vectorized", progress_bar=False)
        >>> mcmc.run(jax.random.key(0))
        >>> w = mcmc.get_samples()["w"]
        >>> print(f"{w.mean():.1f} {w.std():.1f}")
        3.0 1.9
    """

    def __init__(
        self,
        model: Model | None = None,
        field: ParticleField | None = None,
        optim: optax.GradientTransformation
        | Callable[[], optax.GradientTransformation]
        | None = None,
        *,
        potential_fn: Callable[[Any], Array] | None = None,
        init_strategy: Callable[..., Any] = init_to_uniform,
        steps_per_sample: int = 1,
    ) -> None:
        if (model is None) == (potential_fn is None):
            raise ValueError(
                "model and potential_fn are both given or both missing; give exactly one of them."
            )
        field = SVGD() if field is None else field
        if not isinstance(field, ParticleField):
            raise TypeError(f"field is {field!r}; it must be a field of particles, such as SVGD().")
        optim = partial(optax.adagrad, 0.1) if optim is None else optim
        made = optim() if callable(optim) else optim
        if not isinstance(made, optax.GradientTransformation):
            raise TypeError(
                f"optim is {optim!r}; it must be an optax transformation, such as optax.adagrad(0.1)."
            )
        check_count("steps_per_sample", steps_per_sample)
        self._model = model
        self._field = field
        self._optim = optim
        self._potential_fn = potential_fn
        self._init_strategy = init_strategy
        self._steps_per_sample = steps_per_sample
        self._params: dict[str, Any] = {}
        self._postprocess_fn: Callable[..., Any] | None = None

    @property
    def model(self) -> Model | None:
        return self._model

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "diverging")

    @property
    def is_ensemble_kernel(self) -> bool:
        return True

    def get_diagnostics_str(self, state: ParVIState) -> str:
        # Shapes only: a number from the state would wait for the device at every update of the bar.
        return f"{type(self._field).__name__}, {state.diverging.size} particles"

    def postprocess_fn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if self._postprocess_fn is None:
            return identity
        # Deterministic sites need a replay of the model, and its plates a key for their rows.
        return handlers.seed(self._postprocess_fn(*args, **kwargs), rng_seed=0)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Any = None,
        model_args: tuple[Any, ...] = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> ParVIState:
        if is_prng_key(rng_key) or rng_key.shape[0] < 2:
            raise ValueError(
                "ParVI was given one chain, but its particles are the chains and move together; use"
                ' MCMC(..., chain_method="vectorized", num_chains=m) with m >= 2.'
            )
        num_particles = rng_key.shape[0]
        model_kwargs = {} if model_kwargs is None else model_kwargs
        rng_key, key_init, key_check, key_minibatch = random.split(rng_key[0], 4)
        if self._model is not None:
            latents = check_model(self._model, key_check, model_args, model_kwargs)
            if init_params is not None and set(init_params) != set(latents):
                raise ValueError(
                    f"init_params has the sites {sorted(init_params)}, but the latent sites of the model"
                    f" are {sorted(latents)}; give unconstrained values for each of them."
                )
            # With init_params one start is enough, to learn about the model.
            keys = random.split(key_init, num_particles) if init_params is None else key_init
            info = initialize_model(
                keys,
                self._model,
                init_strategy=self._init_strategy,
                dynamic_args=True,
                model_args=model_args,
                model_kwargs=model_kwargs,
            )
            self._postprocess_fn = info.postprocess_fn
            self._params = {
                name: site["value"]
                for name, site in info.model_trace.items()
                if site["type"] == "param"
            }
            if init_params is None:
                init_params = info.param_info.z
        elif init_params is None:
            raise ValueError("potential_fn says nothing about where to start; give init_params.")

        for leaf in jax.tree.leaves(init_params):
            if jnp.shape(leaf)[:1] != (num_particles,):
                raise ValueError(
                    f"init_params has an array of shape {jnp.shape(leaf)}; its first axis must be the"
                    f" {num_particles} particles (num_chains)."
                )
        x = _ravel(init_params)
        check_distinct(x, "use init_strategy=init_to_uniform, or init_params that differ.")
        log_p, g = self._evaluate(key_minibatch, x, init_params, model_args, model_kwargs)
        refused = jnp.zeros(num_particles, bool)
        i = jnp.zeros((), int)
        return ParVIState(
            i, init_params, self._transformation().init(x), -log_p, g, refused, rng_key
        )

    def sample(
        self, state: ParVIState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> ParVIState:
        step = partial(self._step, model_args=model_args, model_kwargs=model_kwargs or {})
        if self._steps_per_sample == 1:
            return step(state)
        return lax.fori_loop(0, self._steps_per_sample, lambda _, state: step(state), state)

    def _step(self, state: ParVIState, *, model_args: Any, model_kwargs: Any) -> ParVIState:
        rng_key, key_minibatch = random.split(state.rng_key)
        x = _ravel(state.z)
        v = self._field.tempered_velocity(x, state.z_grad, state.i)
        updates, optim_state = self._transformation().update(-v, state.optim_state, x)
        new_x = x + cast(Array, updates)
        fine = jnp.all(jnp.isfinite(v)) & jnp.all(jnp.isfinite(new_x))
        x, optim_state = jax.tree.map(
            lambda new, old: jnp.where(fine, new, old),
            (new_x, optim_state),
            (x, state.optim_state),
        )
        z = _unraveler(state.z, batch=True)(x)
        log_p, g = self._evaluate(key_minibatch, x, z, model_args, model_kwargs)
        diverging = jnp.broadcast_to(~fine, log_p.shape)
        return ParVIState(state.i + 1, z, optim_state, -log_p, g, diverging, rng_key)

    def _evaluate(
        self, rng_key: Array, x: Array, z: Any, model_args: Any, model_kwargs: Any
    ) -> tuple[Array, Array]:
        """Log density and its gradient at each particle, on one minibatch."""
        unravel, model, potential_fn = _unraveler(z), self._model, self._potential_fn
        if model is not None:
            joint = particle_log_prob(model, rng_key, unravel, model_args, model_kwargs)
            log_p, vjp = jax.vjp(lambda x: joint(x, self._params), x)
        else:
            assert potential_fn is not None
            log_p, vjp = jax.vjp(jax.vmap(lambda x: -potential_fn(unravel(x))), x)
        return log_p, vjp(jnp.ones_like(log_p))[0]

    def _transformation(self) -> optax.GradientTransformation:
        if self._optim is None:
            raise ValueError(
                "this ParVI was unpickled without its optim; build it again, or build it with"
                " optim=functools.partial(optax.adagrad, 0.1), which pickle can store."
            )
        return self._optim() if callable(self._optim) else self._optim

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if not callable(self._optim):
            state["_optim"] = None
        return state


def _ravel(z: Any) -> Array:
    return jax.vmap(lambda tree: ravel_pytree(tree)[0])(z)


def _unraveler(z: Any, batch: bool = False) -> Callable[[Array], Any]:
    unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], z))[1]
    return jax.vmap(unravel) if batch else unravel
