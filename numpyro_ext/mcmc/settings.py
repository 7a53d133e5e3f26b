"""Settings that a kernel finds by itself: coordinates of unit scale, and a step in them."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from scipy.linalg import solve_triangular

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.mode_search import Mode, batch_rows
from numpyro_ext._model.modes import Modes, search_modes
from numpyro_ext._model.normal_fit import factor_like, shape_measure
from numpyro_ext._model.operations import run_once
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import Sites
from numpyro_ext.mcmc.gradient_noise import NOISE_ESTIMATES, noise_measure, probe
from numpyro_ext.mcmc.gradients import ControlVariate

__all__ = [
    "NO_LOCAL_SITES",
    "Fitness",
    "Found",
    "Settings",
    "settings_for",
]

NO_LOCAL_SITES = "a chain holds one value of it while the rows change at every step"
"""The reason for which no latent site may be local to a subsampled plate."""
_TOO_MANY = 10_000
_NO_NOISE = 1e-6  # of gradients in posterior units, below which a correction has nothing to do
_NORMAL = 0.1
"""The departure up to which a correction fails only where rows fit, as they do without noise."""
_SAME, _NEAR = 1e-4, 0.03


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Settings:
    """
    The settings found by a kernel with ``step_size=None``, as ``kernel.settings``; they print as a
    table.

    The mode is found first, by four searches of 2,000 minibatches and at most 300 gradients of all
    rows each, and the coordinates are those in which the curvature there is 1 in all directions.
    The step, and the friction, are the largest at which the kernel's law on a Gaussian with the
    measured noise of minibatch gradients keeps the relative error of every variance within
    ``max_bias``. Chains start at draws of the normal approximations, a single chain at the heaviest
    mode, and of several that start together (``chain_method="vectorized"``) each mode has its
    share at temperature 1. The step is then one for all modes at which chains start. The
    predictions are those of the law: a posterior that is not near normal deviates from them, and
    ``problems`` says what was seen of that.

    A new run of the kernel on other data finds other settings. A chain that goes on
    (``mcmc.post_warmup_state``) keeps its own, and refuses data that they do not fit.

    :param float step_size: in whitened units.
    :param friction: rate C; None for a kernel without one.
    :param float variance_ratio: predicted variance over the right one, where they differ most.
    :param float transitions: predicted transitions per independent draw.
    :param tuple kinetic_temperature: what the law predicts at the end of a step, over the
        temperature, of a coordinate without gradient noise and of the one with most of it.
    :param str kernel: class of the kernel.
    :param whitening: the coordinates; None for a kernel that moves in those of the sites.
    :param dict center: constrained values of the latent sites at the center.
    :param bool control_variate: True if the gradient is corrected at the center.
    :param float noise: largest variance of a coordinate of the minibatch gradient, whitened.
    :param float noise_control_variate: the same, corrected at the center.
    :param str rows: of which rows there was no noise, where no plate takes a minibatch.
    :param int row_gradients: gradients of single rows that were spent on finding all this.
    :param tuple problems: sentences on what did not hold.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.mcmc import SGHMC
        >>> from numpyro_ext.targets import normal_mean
        >>> mcmc = MCMC(SGHMC(normal_mean), num_warmup=10, num_samples=10, progress_bar=False)
        >>> mcmc.run(random.key(0), jnp.array([0.5, -1.0, 2.0]))
        >>> print(mcmc.sampler.settings)  # doctest: +ELLIPSIS
        SGHMC: settings found
          step size                       0.5
          friction                        1
          ...
    """

    step_size: float
    friction: float | None = None
    variance_ratio: float = 1.0
    transitions: float = 1.0
    kernel: str = ""
    whitening: Whitening | None = field(default=None, repr=False)
    center: Sites = field(default_factory=dict, repr=False)
    control_variate: bool = False
    noise: float = 0.0
    noise_control_variate: float = 0.0
    row_gradients: int = 0
    problems: tuple[str, ...] = ()
    kinetic_temperature: tuple[float, float] = (1.0, 1.0)
    rows: str = ""

    @property
    def if_hot(self) -> str:
        """What to do about a chain that is hotter than these settings predict."""
        if self.rows:
            return (
                f"the settings were found on {self.rows}: if each call has other rows, give the"
                " model all of them, and have numpyro.plate(name, N, subsample_size=B) draw the"
                " minibatch"
            )
        return (
            "the posterior is not near normal in the coordinates found, so reparametrise the model,"
            " or take a smaller max_bias"
        )

    @property
    def gradients(self) -> float:
        """Predicted minibatch gradients per independent draw."""
        return self.transitions * (2 if self.control_variate else 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which a kernel of this class has these settings."""
        found: dict[str, Any] = {"step_size": self.step_size, "whitening": self.whitening}
        if self.friction is not None:
            found["friction"] = self.friction
        if self.control_variate:
            found["gradient"] = ControlVariate(self.center)
        return found

    def __str__(self) -> str:
        kind = "none" if self.whitening is None else repr(self.whitening)[10:-1]
        lines = [
            ("step size", f"{self.step_size:.4g}"),
            ("friction", "-" if self.friction is None else f"{self.friction:.4g}"),
            ("whitening", kind),
            ("gradient", "ControlVariate" if self.control_variate else "as given"),
            ("gradient noise", f"{self.noise:.3g} (corrected {self.noise_control_variate:.3g})"),
            ("variance ratio", f"{self.variance_ratio:.3f} (predicted)"),
            ("gradients per independent draw", f"{self.gradients:.3g} (predicted)"),
            ("gradients of a row spent", f"{self.row_gradients:,}"),
        ]
        if self.rows:
            lines.append(("found on", self.rows))
        text = "\n".join(f"  {name:<32}{value}" for name, value in lines)
        problems = "".join(f"\n  ! {problem}" for problem in self.problems)
        return f"{self.kernel}: settings found\n{text}{problems}"


@dataclass(frozen=True)
class Fitness:
    """
    Gradients of all rows at four points around a mode, by which data are told from others.

    :param whitening: the normal approximation of which the points are draws.
    :param dict batches: rows in a minibatch of each plate.
    :param gradients: ``(4, n)``, whitened.
    """

    whitening: Whitening
    batches: dict[str, int]
    gradients: np.ndarray

    @classmethod
    def at(cls, potential: Potential, whitening: Whitening) -> "Fitness":
        gradients = jax.jit(partial(probe, potential))(whitening)
        return cls(whitening, _batches(potential), np.asarray(gradients, float))

    def of(self, potential: Potential) -> str:
        """``"same"`` for the same data, ``"near"`` for those that move the gradients by less than a
        sixth, which settings outlast, and ``"other"``."""
        if potential.info.size != self.whitening.size:
            return "other"
        now = Fitness.at(potential, self.whitening)
        if now.batches != self.batches:
            return "other"
        known, here = np.isfinite(self.gradients), np.isfinite(now.gradients)
        moved = np.where(known & here, now.gradients - self.gradients, 0)
        moved = np.where(known == here, moved, np.inf)
        size = np.mean(np.where(known, self.gradients, 0) ** 2)
        distance = np.mean(moved**2) / max(size, 1.0)
        return "same" if distance < _SAME else "near" if distance < _NEAR else "other"


def _batches(potential: Potential) -> dict[str, int]:
    return {name: batch for name, (_, batch) in potential.plates.items()}


def _check_resumed(fit: str, compiled: bool) -> None:
    """A ``ValueError`` if a chain goes on with data that its settings do not fit.

    :param bool compiled: True for the arguments on which the chain was compiled, which keeps the
        data of a closure as they were.
    """
    if fit == "other" or (fit == "near" and compiled):
        raise ValueError(
            "a chain goes on with other data than those for which its settings were found, and"
            " NumPyro gives it no way to take new ones; set mcmc.post_warmup_state = None, so that"
            " the run finds settings again, or keep these by the arguments"
            " **kernel.settings.arguments of a new kernel."
        )


@dataclass(frozen=True)
class Found:
    """
    What a search gave.

    :param settings: the settings.
    :param modes: those at which chains start.
    :param int num_modes: modes for which the step was found, the heaviest ones.
    :param fitness: by which other data are told from these.
    """

    settings: Settings
    modes: Modes
    num_modes: int
    fitness: Fitness


def settings_for(
    kernel: Any,
    known: Found | None,
    potential: Potential,
    start: Sites | None,
    rng_key: Array,
    resumes: bool,
    num_chains: int,
) -> Found:
    """
    What is known, if it fits these data and the modes at which so many chains start; else what a
    search finds, see :func:`_find`.

    :param known: of an earlier run of the kernel.
    :param bool resumes: True for a chain that goes on, which keeps what it has.
    """
    # A chain may start where a program is traced; the search is on numbers all the same. Elsewhere
    # this would compile each constant of the model by itself.
    traced = isinstance(jnp.zeros(()), Tracer)
    with jax.ensure_compile_time_eval() if traced else nullcontext():
        if known is None:
            return _find(kernel, potential, start, rng_key, kernel.given_modes, num_chains)
        fit = known.fitness.of(potential)
        if resumes:
            _check_resumed(fit, compiled=kernel.has_read(*potential.arguments))
            return known
        # Of more chains some may start at a mode for which the step was not found.
        if fit == "same" and known.modes.num_taken(num_chains) <= known.num_modes:
            return known
        if fit == "near":
            # Another object, for which `MCMC` compiles the chain, and its data, again.
            return replace(known, settings=replace(known.settings))
        modes = known.modes if fit == "same" else kernel.given_modes
        return _find(kernel, potential, start, rng_key, modes, num_chains)


def _find(
    kernel: Any,
    potential: Potential,
    start: Sites | None,
    rng_key: Array,
    modes: Modes | None,
    num_chains: int,
) -> Found:
    """
    Settings of a kernel with ``step_size=None``.

    :param kernel: a :class:`ModelKernel`; it says what its law allows by ``choose``.
    :param start: unconstrained sites where the search begins.
    :param rng_key: key of the run, for other starts where the first one was of no use. All else is
        drawn from a key of its own, so that runs on the same data have the same settings.
    :param modes: those that are known, which are then not searched.
    :param int num_chains: chains that start together, each mode having its share of them.
    """
    leaves = jax.tree.leaves(potential.arguments)
    if any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            "step_size is None, but the run is inside a traced function (jax.jit, jax.vmap) and has"
            " the model's arguments from it, while settings are found from numbers; find them"
            " outside, and pass **kernel.settings.arguments to the kernel inside."
        )
    if potential.info.size == 0:
        raise ValueError(
            "step_size is None, but the latent sites have no free coordinate (a simplex of one"
            " category has none), for which settings could be found; give a step_size."
        )
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "step_size is None, but an argument of the model is an array of several processes, on"
            " which settings cannot be found; find them from the rows of one process, and pass"
            " step_size and whitening of kernel.settings."
        )
    potential = potential.traced_once()
    key_normal, key_noise = run_once(lambda key: tuple(random.split(key)), random.key(0))
    given: Whitening | None = kernel.given_whitening
    known = given if modes is None else modes.whitening
    factor: Any = factor_like(potential.info) if known is None else known.factor.astype(float)
    look_around = noise_measure(key_noise, potential, kernel.gradient, factor)
    spent = 0
    if known is None:
        again = key_normal if isinstance(rng_key, Tracer) else rng_key
        modes = search_modes(
            key_normal, kernel.model, potential, start, kernel.init_strategy, again
        )
        spent = modes.row_gradients
    elif modes is None:
        normal = Mode(known.center.astype(float), factor)
        normal = shape_measure(key_normal, potential, factor)(normal)
        modes = Modes((normal,), potential.info.shapes, problems=normal.problems)
    assert modes is not None
    problems, taken = modes.problems, modes.num_taken(num_chains)
    normal = replace(modes.heaviest, stiffness=_stiffest(modes.modes[:taken]))
    center, noises, gradients = look_around(normal)
    zero = np.zeros(potential.info.size)
    # A corrected gradient takes two.
    estimates = NOISE_ESTIMATES * (3 if len(noises) == 2 else len(noises))
    finite = [np.isfinite(noise) for noise in noises]
    noises = [np.where(ok, x, 0) for ok, x in zip(finite, noises, strict=True)]
    plain, corrected = ([*noises, zero] if len(noises) == 1 else noises or [zero, zero])[:2]
    # What is corrected at one mode is noisier at another one.
    control_variate = len(noises) == 2 and np.max(corrected) < 0.8 * np.max(plain) and taken == 1
    # Laws are those of the temperature 1, which stands for 0 and for a schedule too.
    T = 1.0 if callable(kernel.temperature) else float(kernel.temperature) or 1.0
    choice = kernel.choose((corrected if control_variate else plain) / T, normal, potential)
    problems: tuple[str, ...] = (*problems, *choice.problems)
    if not np.all(finite):
        problems += (
            "the gradient is not finite at most points within a standard deviation of the center,"
            " so its noise is not known and the step may be too long; check the data, or use NUTS.",
        )
    elif (
        len(noises) == 2
        and not control_variate
        and np.max(plain) > _NO_NOISE
        and normal.departure > _NORMAL
        and taken == 1
    ):
        problems += (
            "a gradient corrected at the center is about as noisy as the plain one within a"
            " standard deviation of it, so the posterior has several modes or is far from normal,"
            " and the scales found do not hold in all of it; compare several runs, or use NUTS.",
        )
    if choice.transitions > _TOO_MANY:
        problems += (
            f"gradient noise or unequal scales allow so small a step that an independent draw takes"
            f" {choice.transitions:,.0f} transitions, so the posterior is not near normal in these"
            " coordinates; reparametrise the model (LocScaleReparam, the other way round from now),"
            " or take larger minibatches.",
        )
    bias, allowed = abs(choice.variance_ratio - 1), getattr(kernel, "max_bias", np.inf)
    if bias > 1.01 * allowed and not choice.problems:
        problems += (
            f"no step keeps the relative error of a variance within max_bias = {allowed:g}:"
            f" {bias:.2g} is the least; take larger minibatches, or leave out a friction that is"
            " given.",
        )
    _warn(problems)
    settings = replace(
        choice,
        kernel=type(kernel).__name__,
        whitening=normal.whitening if kernel.finds_whitening else given,
        center=center,
        control_variate=bool(control_variate),
        noise=float(np.max(plain)),
        noise_control_variate=float(np.max(corrected)),
        row_gradients=spent + estimates * batch_rows(potential),
        problems=problems,
        rows=_all_rows(potential),
    )
    fitness = Fitness(normal.whitening, _batches(potential), gradients)
    return Found(settings, modes, taken, fitness)


def _all_rows(potential: Potential) -> str:
    """Which rows are all that there are, where no plate takes a minibatch."""
    rows = potential.info.rows
    if potential.plates or not rows:
        return ""
    scaled = [f", though '{site}' is scaled by {x:g}" for site, (_, x) in rows.items() if x > 1]
    num = sum(num for num, _ in rows.values())
    return f"the {num:,} rows of these arguments, which no plate subsamples{''.join(scaled[:1])}"


def _stiffest(modes: tuple[Mode, ...]) -> float:
    """The largest curvature at any of the modes, in coordinates of the first one."""
    first, *others = modes
    root = np.asarray(first.factor, np.float64)

    def scale(mode: Mode) -> float:
        there = np.asarray(mode.factor, np.float64)
        if there.ndim == 1:
            return float(np.max(root / there))
        return float(np.linalg.norm(solve_triangular(there, root, lower=True), 2))

    return max(first.stiffness, *(mode.stiffness * scale(mode) ** 2 for mode in others), 1.0)


def _warn(problems: tuple[str, ...]) -> None:
    """One ``InferenceWarning`` with all that was seen."""
    if problems:
        warnings.warn(InferenceWarning(" ".join(problems)), stacklevel=2)
