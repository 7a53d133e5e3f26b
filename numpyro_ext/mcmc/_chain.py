"""One chain of a stochastic-gradient kernel: its start, its draws, and the transitions that they consist of."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_ext._typing import Sites
from numpyro_ext.mcmc._grad_fn import GradFn
from numpyro_ext.mcmc._oracle import Oracle
from numpyro_ext.mcmc.minibatch import draw_indices, start_plates

if TYPE_CHECKING:
    from numpyro_ext.mcmc.base import SGMCMCKernel

__all__ = ["Chain"]


class Chain:
    """A kernel on the data of an oracle. All methods are for a single chain, and are traced."""

    def __init__(self, kernel: "SGMCMCKernel", oracle: Oracle) -> None:
        self.kernel, self.oracle = kernel, oracle

    def new_batch(self, rng_key: Array) -> dict[str, Array]:
        """One batch of the law of the chain's batches, apart from its passes over the data."""
        key_plates, key_index = random.split(rng_key)
        return self._batch(key_index, self._plates(key_plates))[0]

    def start(
        self, rng_key: Array, key_plates: Array, key_start: Array, z: Sites
    ) -> tuple[Any, dict[str, Array], Sites]:
        """The first state, with the batch and the gradient by which it is checked."""
        kernel, oracle, i = self.kernel, self.oracle, jnp.zeros((), int)
        flat, _ = ravel_pytree(z)
        key_index, key_gradient, key_fields = random.split(key_start, 3)
        plates = self._plates(key_plates)
        idx, _ = self._batch(key_index, plates)
        if kernel.takes_gradient:
            gradient = jax.tree.map(jnp.asarray, kernel.gradient.init(z, oracle))
            potential, grad, _ = kernel.gradient.estimate(key_gradient, i, z, idx, oracle, gradient)
        else:
            gradient, potential = (), oracle.potential(z, idx)
            grad = jax.tree.map(jnp.zeros_like, z)
        state = kernel.state_class(
            i=i,
            z=z,
            potential_energy=jnp.asarray(potential, flat.dtype),
            grad_norm=jnp.linalg.norm(ravel_pytree(grad)[0]).astype(flat.dtype),
            step_size=kernel.step_size_at(i, flat.dtype),
            diverging=jnp.zeros((), bool),
            sampling=kernel.sampling_at(i),
            gradient=gradient,
            plates=plates,
            **kernel.init_state(key_fields, flat),
            rng_key=rng_key,
        )
        return state, idx, grad

    def draw(self, i: Array, state: Any) -> Any:
        """``steps_per_sample`` transitions, the first of number ``i``, from a state whose own ``i`` is not looked at."""
        flat, unravel = ravel_pytree(state.z)
        state = state._replace(i=i, z=flat, diverging=jnp.zeros((), bool))
        transition = partial(self._transition, unravel)
        inner = self.kernel.steps_per_sample - 1

        def not_shown(_: Any, state: Any) -> Any:
            # Left as they are, so that XLA need not compute what no draw shows.
            kept = {name: getattr(state, name) for name in self.kernel.last_step_fields}
            return transition(state)._replace(**kept)

        def all_transitions(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            state = lax.fori_loop(0, inner, not_shown, carry[1]) if inner else carry[1]
            return jnp.zeros((), bool), transition(state)

        # A loop of one turn, though XLA cannot know that: on CPU it makes one function of a small loop, but hands loose
        # operations to its threads one by one, which takes longer than a transition.
        true = (i | 1) != 0
        _, state = lax.while_loop(lambda carry: carry[0], all_transitions, (true, state))
        return state._replace(z=unravel(state.z))

    def _transition(self, unravel: Callable[[Array], Sites], state: Any) -> Any:
        kernel, i, dtype = self.kernel, state.i, state.z.dtype
        rng_key, key_index, key_step = random.split(state.rng_key, 3)
        # Drawn only where they are used, which is seldom; far from the three counters of the split.
        key_gradient, key_redraw = (random.fold_in(state.rng_key, 1000 + k) for k in range(2))
        idx, plates = self._batch(key_index, state.plates)
        eps = kernel.step_size_at(i, dtype)
        T = kernel.temperature_at(i, dtype)
        grad_fn = GradFn(
            kernel.gradient,
            self.oracle,
            unravel,
            i,
            idx,
            key_gradient,
            state.gradient,
            self.new_batch,
        )
        z, fields, potential, grad = kernel.step(key_step, state, state.z, grad_fn, eps, T)
        # What only the last step shows, and what did not change, need not be looked at in every step.
        shown = [
            x
            for name, x in fields.items()
            if name not in kernel.last_step_fields and x is not getattr(state, name)
        ]
        finite = _all_finite((z, grad, shown))
        new = fields | {
            "z": z,
            "potential_energy": potential,
            "grad_norm": jnp.sqrt(jnp.vdot(grad, grad)),
            "gradient": grad_fn.state,
        }
        old = {name: getattr(state, name) for name in new}
        new = jax.tree.map(
            lambda a, b: b if a is b else jnp.where(finite, a, b).astype(b.dtype), new, old
        )
        redraw = partial(kernel.redraw_momentum, key_redraw, state.z, T)
        if drawn := jax.eval_shape(redraw):
            new |= lax.cond(finite, lambda: {name: new[name] for name in drawn}, redraw)
        return state._replace(
            i=i + 1,
            step_size=eps,
            diverging=state.diverging | ~finite,
            sampling=kernel.sampling_at(i),
            plates=plates,
            rng_key=rng_key,
            **new,
        )

    def _plates(self, rng_key: Array) -> dict[str, Any]:
        return start_plates(rng_key, self.oracle.plates, self.kernel.minibatch)

    def _batch(self, rng_key: Array, plates: dict[str, Any]) -> tuple[dict[str, Array], Any]:
        return draw_indices(rng_key, plates, self.oracle.plates, self.kernel.sharding)


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in leaves])))
