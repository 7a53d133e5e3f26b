"""The start of the particles: at the modes, enough of them, and no two at one point."""

from typing import Any, ClassVar
import warnings

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from numpyro.infer.initialization import init_to_uniform

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.checks import check_rows
from numpyro_ext._model.handlers import given_rows
from numpyro_ext._model.mode_search import is_searched, modes_or_warning
from numpyro_ext._model.modes import InitFrom, Modes, check_sites, given_modes
from numpyro_ext._model.operations import run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Float, Model

_PER_DIMENSION = 2  # particles of a mode, with which a field has the right spread


class BeginsAtModes:
    """What the guide and the kernel of particles share: where the particles begin."""

    start_argument: ClassVar[str]
    """The argument that says where particles begin without modes."""

    def choose_start(self, init_from: InitFrom, *, own: bool) -> None:
        # `own` says whether another argument says where they begin; the modes at which they
        # began, once they have, are `start_modes`.
        self.given_modes = self.start_modes = given_modes(init_from)
        self.searches = isinstance(init_from, str) and not own

    def find_modes(self, model: Model, potential: Potential) -> Modes | None:
        """The modes at which the particles begin; None for NumPyro's start."""
        info, self.start_modes = potential.info, self.given_modes
        if self.given_modes is not None:
            check_sites(self.given_modes, info)
        elif self.searches and is_searched(info.size, info.params, bool(info.mutable)):
            how: Any = {"who": "the particles begin", "start": self.start_argument}
            self.start_modes = modes_or_warning(model, *potential.arguments, **how)
            return self.start_modes
        check_data(model, potential)
        return self.start_modes


def check_data(model: Model, potential: Potential) -> None:
    """An error where data do not fit the model, which a search for modes says by itself."""
    info = potential.info
    model = given_rows(model, info.given)
    check_rows(model, *potential.arguments, init_to_uniform, bounded=info.bounded)


def draw_at_modes(
    rng_key: Array, modes: Modes, num: int, potential: Potential, least: int = _PER_DIMENSION
) -> tuple[Float[Array, "m d"], Float[Array, "m K"]]:
    """A draw at one of the modes, by their shares, for each particle, and at which, unless there
    are fewer than ``least`` for a mode and dimension; what is not finite on the first rows lies a
    tenth as far from its mode."""
    which = modes.apportion(num)

    def draw(rng_key: Array) -> Array:
        x, near = (modes.sample_at(rng_key, which, scale) for scale in (1.0, 0.1))
        rows = potential.first_rows()
        value, grad = jax.vmap(lambda x: potential.value_and_grad_flat(x, rows))(x)
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(grad), axis=1)
        return jnp.where(finite[:, None], x, near)

    K = len(modes.modes)
    several = num >= least * K * modes.size
    groups = which[:, None] == np.arange(K) if several else np.ones((num, 1))
    return run_once(draw, rng_key), jax.device_put(np.asarray(groups, float))


def check_distinct(x: Array, remedy: str) -> None:
    """Refuse particles that coincide: no field ever separates them."""
    if x.shape[0] < 2 or isinstance(x, Tracer):
        return
    values = np.asarray(x)  # NumPy, because inside a loop JAX would trace the comparison
    distinct = len(np.unique(values, axis=0))
    # Of many particles in one dimension some draws coincide by rounding, far from 0 more of them.
    if distinct <= 0.5 * len(values):
        raise ValueError(
            f"{len(values)} particles start at {distinct} different points, and those that start at"
            f" the same point would stay together; {remedy}"
        )


def warn_of_few_particles(m: int, d: int) -> None:
    """Warn where d > m / 2, because every field then makes the spread too small."""
    if 1 < m < _PER_DIMENSION * d:
        warnings.warn(
            f"{m} particles for {d} latent dimensions: their spread is smaller than the posterior's"
            f" with every field where d > m / 2; give {2 * d} particles, or take ParVI(model)"
            " without a field, whose particles are draws.",
            InferenceWarning,
            stacklevel=3,
        )
