"""Runs of engines, their answers as moments, and tables of them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

Moments = tuple[np.ndarray, np.ndarray]


def of_params(params: dict[str, Array]) -> Moments:
    L = np.asarray(params["auto_scale_tril"], float)
    return np.asarray(params["auto_loc"], float), L @ L.T


def of_natural(shift: Any, precision: Any) -> Moments:
    V = np.linalg.inv(np.asarray(precision, float))
    return V @ np.asarray(shift, float), V


def of_draws(x: Any) -> Moments:
    x = np.asarray(x, float)
    return x.mean(0), np.cov(x.T)


def fit(engine: Any, num_steps: int, *args: Any) -> Any:
    return engine.run(random.key(0), num_steps, *args, progress_bar=False)


def passes(engine: Any, num_steps: int, *args: Array) -> tuple[Moments, Moments]:
    """Averaged over the last half, and the last iterate, of steps in one compiled loop."""
    state = engine.init(random.key(0), *args)
    state, shift, precision = _loop(engine, num_steps, state, *args)
    n = num_steps - num_steps // 2
    return of_natural(shift / n, precision / n), of_natural(
        state.total.shift, state.total.precision
    )


@partial(jax.jit, static_argnums=(0, 1))
def _loop(engine: Any, num_steps: int, state: Any, *args: Array) -> Any:
    def step(carry: Any, i: Array) -> tuple[Any, None]:
        state, shift, precision = carry
        state, _ = engine.update(state, *args)
        late = i >= num_steps // 2
        return (
            state,
            shift + jnp.where(late, state.total.shift, 0),
            precision + jnp.where(late, state.total.precision, 0),
        ), None

    zero = jnp.zeros_like(state.total.shift), jnp.zeros_like(state.total.precision)
    return lax.scan(step, (state, *zero), jnp.arange(num_steps))[0]


class Table:
    """A table that is printed as it grows."""

    def __init__(self, *header: str) -> None:
        self.append(header)
        print("|" + "---|" * len(header), flush=True)

    def append(self, row: Sequence[Any]) -> None:
        print("|", " | ".join(str(x) for x in row), "|", flush=True)
