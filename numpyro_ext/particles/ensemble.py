"""Particle inference as a kernel for ``MCMC``: the chains are the particles.

References: Liu and Wang, *Stein variational gradient descent* (NIPS 2016); Liu, Zhuo, Cheng, Zhang,
Zhu and Carin, *Understanding and accelerating particle-based variational inference* (ICML 2019).
"""

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
from jax import Array, lax, random
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from numpyro.handlers import substitute
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key
import optax

from numpyro_ext._checks import check_count
from numpyro_ext._model.potential import Potential, draw_params, draw_start, value_and_grad
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.particles.base import ParticleField, check_distinct, read_latents
from numpyro_ext.particles.svgd import SVGD

__all__ = ["ParVI", "ParVIState"]

ParVIState = namedtuple(
    "ParVIState", ["i", "z", "optim_state", "potential_energy", "z_grad", "diverging", "rng_key"]
)
"""
A :func:`~collections.namedtuple` with these entries, m being the number of particles:

 - **i** - number of steps so far, warmup included.
 - **z** - the particles: unconstrained values of the latent sites, with a leading axis of length m.
 - **optim_state** - state of the optimiser.
 - **potential_energy** - ``(m,)`` potential energies at ``z``, on the minibatch of the last step.
 - **z_grad** - ``(m, d)`` gradients of the log density at ``z``, on the same minibatch, in the
   order in which the model samples its sites.
 - **diverging** - ``(m,)``, true if the last step was refused because something was not finite.
 - **rng_key** - random number generator seed of the next steps.
"""


class ParVI(MCMCKernel):
    r"""Particle-based variational inference as an ensemble kernel: the chains are the particles.

    One step moves all m particles :math:`x \in R^{m \times d}` (unconstrained, Jacobian included,
    in the order in which the model samples its sites) along the field,

    .. math::

        x \leftarrow x + \text{optimiser}\left( V(x, \gamma_i \nabla \log p(x) / T) \right),

    with the temperature T and the annealing :math:`\gamma` of the field, and i the number of the
    step. A plate with ``subsample_size`` gives one minibatch per step, the same for all particles;
    latent sites inside it are refused.

    It runs under ``MCMC(..., chain_method="vectorized", num_chains=m)``. Warmup steps are ordinary
    steps, so put the iterations into ``num_warmup`` and take ``num_samples=1``: ``get_samples()``
    are the m particles.

    **Bias.** It is that of the field. The draws of one chain are the path of an optimisation, not a
    Markov chain: R-hat and effective sample size mean nothing here (``print_summary`` shows them,
    and requires 4 draws of each chain). A step at which something is not finite is refused: the
    particles stay where they are and ``diverging`` is set, which ``MCMC`` collects.

    :param model: a NumPyro model with continuous latents; exactly one of ``model`` and
        ``potential_fn``.
    :param field: a field such as ``SVGD()``, the default.
    :param optim: an optax transformation, of parameters of shape ``(m, d)``; defaults to
        ``optax.adagrad(0.1)``. Pickling drops it, because optax makes it of closures, and keeps the
        samples; ``functools.partial(optax.adam, 0.1)``, which makes one when called, is kept too.
    :param potential_fn: the potential energy of one particle, a function of the type of
        ``init_params`` without its leading axis.
    :param init_strategy: where particles start, each from its own key.
    :param int steps_per_sample: steps in one iteration of ``MCMC``.
    :param bool forward_mode_differentiation: whether to differentiate in forward mode, which models
        with ``while_loop`` need; it costs d times as much.

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
        forward_mode_differentiation: bool = False,
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
                f"optim is {optim!r}; it must be an optax transformation, such as"
                " optax.adagrad(0.1)."
            )
        self.model = model
        self.field = field
        self.optim = optim
        self.potential_fn = potential_fn
        self.init_strategy = init_strategy
        self.steps_per_sample = check_count("steps_per_sample", steps_per_sample)
        self.forward_mode_differentiation = forward_mode_differentiation
        self.params: Params = {}

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
        return f"{type(self.field).__name__}, {state.diverging.size} particles"

    def postprocess_fn(
        self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> Callable[..., Any]:
        if self.model is None:
            return identity
        return self._potential_of(self.model, model_args, model_kwargs or {}).postprocess()

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
        num_particles, args, kwargs = rng_key.shape[0], model_args, model_kwargs or {}
        rng_key, key_init, _, key_minibatch = random.split(rng_key[0], 4)
        if self.model is not None:
            z = self._start(key_init, num_particles, init_params, args, kwargs)
        elif init_params is None:
            raise ValueError("potential_fn says nothing about where to start; give init_params.")
        else:
            z = init_params
            for leaf in jax.tree.leaves(z):
                if jnp.shape(leaf)[:1] != (num_particles,):
                    raise ValueError(
                        f"init_params has an array of shape {jnp.shape(leaf)}; its first axis must"
                        f" be the {num_particles} particles (num_chains)."
                    )
        target = self._target(z, args, kwargs)
        x = target.ravel(z)
        check_distinct(x, "use init_strategy=init_to_uniform, or init_params that differ.")
        potential, grad, idx = jax.jit(target.evaluate)(key_minibatch, z)
        target.check_start(z, idx, potential, grad)
        refused = jnp.zeros(num_particles, bool)
        optim_state = self._transformation().init(x)
        g = -target.ravel(grad)
        return ParVIState(jnp.zeros((), int), z, optim_state, potential, g, refused, rng_key)

    def sample(
        self, state: ParVIState, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> ParVIState:
        target = self._target(state.z, model_args, model_kwargs or {})
        if self.steps_per_sample == 1:
            return self._moved(state, target)
        return lax.fori_loop(
            0, self.steps_per_sample, lambda _, state: self._moved(state, target), state
        )

    def _moved(self, state: ParVIState, target: "_Target") -> ParVIState:
        rng_key, key_minibatch = random.split(state.rng_key)
        x = target.ravel(state.z)
        v = self.field.tempered_velocity(x, state.z_grad, state.i)
        updates, optim_state = self._transformation().update(-v, state.optim_state, x)
        new_x = x + cast(Array, updates)
        fine = jnp.all(jnp.isfinite(v)) & jnp.all(jnp.isfinite(new_x))
        x, optim_state = jax.tree.map(
            lambda new, old: jnp.where(fine, new, old),
            (new_x, optim_state),
            (x, state.optim_state),
        )
        z = target.unravel(x)
        potential, grad, _ = target.evaluate(key_minibatch, z)
        diverging = jnp.broadcast_to(~fine, potential.shape)
        g = -target.ravel(grad)
        return ParVIState(state.i + 1, z, optim_state, potential, g, diverging, rng_key)

    def _start(
        self, rng_key: Array, num_particles: int, init_params: Any, args: tuple, kwargs: dict
    ) -> Sites:
        """Unconstrained particles; the model's own parameters are drawn and kept."""
        assert self.model is not None
        info = read_latents(self.model, args, kwargs)
        rest = self.model, info, args, kwargs
        how: dict[str, Any] = {"init_strategy": self.init_strategy}
        if init_params is not None:
            self.params = draw_params(rng_key, *rest, **how)
            return info.check_unconstrained("init_params", init_params, (num_particles,))
        how |= {"forward_mode": self.forward_mode_differentiation, "validate_grad": True}
        z, _, self.params = draw_start(random.split(rng_key, num_particles), *rest, **how)
        return z

    def _potential_of(self, model: Model, args: tuple, kwargs: dict[str, Any]) -> Potential:
        info = read_latents(substitute(model, data=self.params), args, kwargs)
        forward_mode = self.forward_mode_differentiation
        return Potential(model, info, self.params, args, kwargs, forward_mode=forward_mode)

    def _target(self, z: Any, args: tuple, kwargs: dict[str, Any]) -> "_Target":
        if self.model is not None:
            return _target_of_model(self._potential_of(self.model, args, kwargs))
        assert self.potential_fn is not None
        forward_mode = self.forward_mode_differentiation
        return _target_of_function(value_and_grad(self.potential_fn, forward_mode=forward_mode), z)

    def _transformation(self) -> optax.GradientTransformation:
        if self.optim is None:
            raise ValueError(
                "this ParVI was unpickled without its optim; build it again, or build it with"
                " optim=functools.partial(optax.adagrad, 0.1), which pickle can store."
            )
        return self.optim() if callable(self.optim) else self.optim

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if not callable(self.optim):
            state["optim"] = None
        return state


class _Target(NamedTuple):
    """What a step asks of the density, for all particles at once."""

    ravel: Callable[[Any], Array]
    """Particles, a pytree with a leading axis of length m, as ``(m, d)``."""
    unravel: Callable[[Array], Any]
    evaluate: Callable[[Array, Any], tuple[Array, Any, Any]]
    """``(rng_key, z) -> (potential, grad, idx)`` on one minibatch."""
    check_start: Callable[[Any, Any, Array, Any], None]
    """``(z, idx, potential, grad)``: an error if a number is not finite."""


def _target_of_model(potential: Potential) -> _Target:
    info = potential.info

    def evaluate(rng_key: Array, z: Sites) -> tuple[Array, Sites, dict[str, Array]]:
        idx = potential.draw_rows(rng_key, jax.tree.map(lambda leaf: leaf[0], z))
        value, grad = jax.vmap(lambda z: potential.value_and_grad(z, idx))(z)
        return value, grad, idx

    def check_start(z: Sites, idx: dict[str, Array], value: Array, grad: Sites) -> None:
        each = {name: jnp.tile(i, (len(value), 1)) for name, i in idx.items()}
        potential.check_start(z, each, value, grad)

    return _Target(jax.vmap(info.ravel), jax.vmap(info.unravel), evaluate, check_start)


def _target_of_function(fn: Callable[[Any], tuple[Array, Any]], z: Any) -> _Target:
    def check_start(z: Any, idx: None, value: Array, grad: Any) -> None:
        leaves = jax.tree.leaves((value, grad))
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        if not traced and not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves):
            raise ValueError(
                "potential_fn or its gradient is not finite at init_params; give init_params at"
                " which both are."
            )

    return _Target(
        jax.vmap(lambda tree: ravel_pytree(tree)[0]),
        jax.vmap(ravel_pytree(jax.tree.map(lambda leaf: leaf[0], z))[1]),
        lambda rng_key, z: (*jax.vmap(fn)(z), None),
        check_start,
    )
