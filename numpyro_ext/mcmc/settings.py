"""Settings that a kernel finds by itself: coordinates of unit scale, and a step in them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
import warnings

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np
from scipy.linalg import solve_triangular

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.mode_search import search_modes
from numpyro_ext._model.modes import Mode, Modes
from numpyro_ext._model.normal_fit import NormalMeasure, batch_rows, draw_batch
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient

NO_LOCAL_SITES = "a chain holds one value of it while the rows change at every step"
"""The reason for which no latent site may be local to a subsampled plate."""
_TOO_MANY = 10_000
_NO_NOISE = 1e-6  # of gradients in posterior units, below which a correction has nothing to do
_NORMAL = 0.1
"""The departure up to which a correction fails only where rows fit, as they do without noise."""
_SAME, _NEAR = 1e-4, 0.03
_PROBES = 4
# The noise of a corrected gradient grows as the square of the distance, so it varies from point to
# point by one to two times its mean: few points with many batches would miss the mean by a third.
_NOISE_POINTS, _NOISE_BATCHES = 512, 4


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Settings:
    """
    The settings found by a kernel with ``step_size=None``, as ``kernel.settings``.

    The mode is found first, by four searches of 2,000 minibatches and at most 300 gradients of all
    rows each, and in the coordinates the curvature there is 1. The step, and the friction, are the
    largest at which the kernel's law on a Gaussian with the measured gradient noise keeps the
    relative error of every variance within ``max_bias``. Chains start at draws of the normal
    approximation, a single one at the heaviest mode; of several that start together
    (``chain_method="vectorized"``) each mode has its share, and the step is one for these modes. A
    posterior that is not near normal deviates from the predictions; see ``problems``.

    A new run on other data finds other settings. A chain that goes on (``mcmc.post_warmup_state``)
    keeps its own, and refuses data that they do not fit.

    :param float step_size: in whitened units.
    :param friction: rate C; None for a kernel without one.
    :param float variance_ratio: predicted over right variance, where they differ most.
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
    :param tuple problems: one sentence per assumption that failed.

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
        arguments: dict[str, Any] = {"step_size": self.step_size, "whitening": self.whitening}
        if self.friction is not None:
            arguments["friction"] = self.friction
        if self.control_variate:
            arguments["gradient"] = ControlVariate(self.center)
        return arguments

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
    """Whitened gradients of all rows, ``(4, n)``, at four draws of a normal approximation, by which
    data are told from others; ``batches`` are the rows in a minibatch of each plate."""

    whitening: Whitening
    batches: dict[str, int]
    gradients: np.ndarray

    @classmethod
    def at(cls, potential: Potential, whitening: Whitening) -> "Fitness":
        gradients = jit_on_data(partial(_probe, potential))(whitening)
        return cls(whitening, _batches(potential), np.asarray(gradients, float))

    def of(self, potential: Potential) -> str:
        """``"same"`` for the same data, ``"near"`` for those that move the gradients by less than a
        sixth, which settings outlast, and ``"other"``."""
        if potential.info.size != self.whitening.size or _batches(potential) != self.batches:
            return "other"
        now = Fitness.at(potential, self.whitening).gradients
        finite = np.isfinite(self.gradients)
        moved = np.where(finite & np.isfinite(now), now - self.gradients, 0)
        moved = np.where(finite == np.isfinite(now), moved, np.inf)
        size = np.mean(np.where(finite, self.gradients, 0) ** 2)
        distance = np.mean(moved**2) / max(size, 1.0)
        return "same" if distance < _SAME else "near" if distance < _NEAR else "other"


def _batches(potential: Potential) -> dict[str, int]:
    return {name: batch for name, (_, batch) in potential.plates.items()}


def _probe(potential: Potential, whitening: Whitening) -> Array:
    """Gradients of all rows at four points of a normal approximation, whitened: ``(4, n)``."""

    def grad(xi: Array) -> Array:
        return whitening.pull(potential.full_value_and_grad_flat(whitening.to_z(xi))[1])

    center = whitening.center
    return lax.map(grad, random.normal(random.key(0), (_PROBES, *center.shape), center.dtype))


@dataclass(frozen=True)
class Found:
    """The result of a search: settings, whose step is for the ``num_modes`` heaviest of the modes
    at which chains start, and the fitness by which other data are told from these."""

    settings: Settings
    modes: Modes
    num_modes: int
    fitness: Fitness


def settings_for(
    kernel: Any,
    before: Found | None,
    potential: Potential,
    start: Sites | None,
    rng_key: Array,
    resumes: bool,
    num_chains: int,
) -> Found:
    """The result of an earlier search, if it fits these data and the modes at which so many chains
    start; else of a new one, see :func:`_find`. A chain that resumes keeps what it has."""
    # A chain may start where a program is traced; the search is on numbers all the same. Elsewhere
    # this would compile each constant of the model by itself.
    traced = isinstance(jnp.zeros(()), Tracer)
    with jax.ensure_compile_time_eval() if traced else nullcontext():
        if before is None:
            return _find(kernel, potential, start, rng_key, kernel.given_modes, num_chains)
        fit = before.fitness.of(potential)
        if resumes:
            # A program that was compiled on these arguments keeps the data of a closure.
            compiled = kernel.has_read(*potential.arguments)
            other = fit == "other" or (fit == "near" and compiled)
            if other and not potential.info.given:  # of a loader each batch is another
                raise ValueError(
                    "a chain goes on with other data than those for which its settings were found;"
                    " set mcmc.post_warmup_state = None, so that the run finds settings again, or"
                    " keep these by the arguments **kernel.settings.arguments of a new kernel."
                )
            return before
        # Of more chains some may start at a mode for which the step was not found.
        if fit == "same" and before.modes.num_taken(num_chains) <= before.num_modes:
            return before
        if fit == "near":
            # Another object, for which `MCMC` compiles the chain, and its data, again.
            return replace(before, settings=replace(before.settings))
        modes = before.modes if fit == "same" else kernel.given_modes
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
    Settings of a kernel with ``step_size=None``, whose law says by ``choose`` what it allows.

    :param start: unconstrained sites where the search begins.
    :param rng_key: key of the run, for other starts where the first one was of no use. All else is
        drawn from a key of its own, so that runs on the same data have the same settings.
    :param modes: those that are known, which are then not searched.
    """
    _check_numbers(potential)
    info = potential.info
    key_normal, key_noise = random.split(random.key(0))
    given: Whitening | None = kernel.given_whitening
    known = given if modes is None else modes.whitening
    look_around = noise_measure(key_noise, potential, kernel.gradient)
    spent = 0
    if known is None:
        again = key_normal if isinstance(rng_key, Tracer) else rng_key
        modes = search_modes(
            key_normal, kernel.model, potential, start, kernel.init_strategy, again
        )
        spent = modes.row_gradients
    elif modes is None:
        normal = Mode(known.center.astype(float), known.factor.astype(float))
        normal = NormalMeasure(key_normal, potential).with_shape(normal)
        modes = Modes((normal,), info.shapes, problems=normal.problems)
    assert modes is not None
    taken = modes.num_taken(num_chains)
    normal = replace(modes.heaviest, stiffness=_stiffest(modes.modes[:taken]))
    center, noises, gradients = look_around(normal)

    # One noise is that of the estimator that was given, two those without and with a correction.
    all_finite = bool(np.all([np.isfinite(noise) for noise in noises]))
    noises = [np.where(np.isfinite(noise), noise, 0) for noise in noises]
    plain = noises[0] if noises else np.zeros(info.size)
    corrected = noises[1] if len(noises) == 2 else np.zeros(info.size)
    gains = len(noises) == 2 and np.max(corrected) < 0.8 * np.max(plain)
    control_variate = bool(gains and taken == 1)  # a center at one mode is no help at another
    noise = (corrected if control_variate else plain) / _temperature_of_law(kernel)
    choice = kernel.choose(noise, normal, potential)

    problems = (*modes.problems, *choice.problems)
    if not all_finite:
        problems += (
            "the gradient is not finite at most points within a standard deviation of the center,"
            " so its noise is not known and the step may be too long; check the data, or use NUTS.",
        )
    elif (
        len(noises) == 2
        and taken == 1
        and not gains
        and np.max(plain) > _NO_NOISE
        and normal.departure > _NORMAL
    ):
        problems += (
            "a gradient corrected at the center is about as noisy as the plain one, so the"
            " posterior has several modes or is far from normal, and the scales found do not hold"
            " in all of it; compare several runs, or use NUTS.",
        )
    if choice.transitions > _TOO_MANY:
        problems += (
            f"the step is so small that an independent draw takes {choice.transitions:,.0f}"
            " transitions; reparametrise the model (LocScaleReparam, the other way round from now),"
            " or take larger minibatches.",
        )
    bias, allowed = abs(choice.variance_ratio - 1), kernel.max_bias
    if bias > 1.01 * allowed and not choice.problems:
        problems += (
            f"no step keeps the relative error of a variance within max_bias = {allowed:g}:"
            f" {bias:.2g} is the least; take larger minibatches, or leave out a friction that is"
            " given.",
        )
    if problems:
        warnings.warn(InferenceWarning(" ".join(problems)), stacklevel=2)
    gradients_for_noise = _NOISE_POINTS * _NOISE_BATCHES * (0, 1, 3)[len(noises)]
    settings = replace(
        choice,
        kernel=type(kernel).__name__,
        whitening=normal.whitening if kernel.finds_whitening else given,
        center=center,
        control_variate=control_variate,
        noise=float(np.max(plain)),
        noise_control_variate=float(np.max(corrected)),
        row_gradients=spent + gradients_for_noise * batch_rows(potential),
        problems=problems,
        rows=_all_rows(potential),
    )
    return Found(settings, modes, taken, Fitness(normal.whitening, _batches(potential), gradients))


def _check_numbers(potential: Potential) -> None:
    """A ``ValueError`` where there are no numbers from which settings could be found."""
    leaves = jax.tree.leaves(potential.arguments)
    if any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            "step_size is None, but the run is inside a traced function, and settings are found"
            " from numbers; find them outside, and pass **kernel.settings.arguments to the kernel"
            " inside."
        )
    if potential.info.size == 0:
        raise ValueError(
            "step_size is None, but the latent sites have no free coordinate for which settings"
            " could be found; give a step_size."
        )
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "step_size is None, but an argument of the model is an array of several processes, on"
            " which settings cannot be found; find them from the rows of one process."
        )


def _temperature_of_law(kernel: Any) -> float:
    """The temperature for which a step is found: 1 for a schedule, which changes it, and for 0, at
    which there is no law to keep to."""
    T = kernel.temperature
    return 1.0 if callable(T) or T == 0 else float(T)


def noise_measure(
    rng_key: Array, potential: Potential, given: GradientEstimator | None
) -> Callable[[Mode], tuple[Sites, list[np.ndarray], np.ndarray]]:
    r"""
    A function ``look_around(normal)`` of a normal approximation. It returns the constrained center,
    variances of gradient estimates, and the gradients of all rows by which :class:`Fitness` knows
    the data.

    Variances are those over batches, whitened, ``(n,)`` for each estimator: the one that is given,
    or the plain one and the one that is corrected at the center, or none without a plate. Each is
    the mean over points of the normal approximation at which it is finite, which is what the
    variance of a Gaussian target feels to first order; NaN if these are less than half.
    """
    info, sites = potential.info, potential.postprocess()

    def measure(rng_key: Array, center: Array, factor: Array) -> tuple[Sites, list[Array], Array]:
        whitening, values = Whitening(center, factor), info.in_order(sites(info.unravel(center)))
        estimators: list[GradientEstimator] = []
        if given is not None:
            estimators = [given]
        elif info.given:
            estimators = [MinibatchGradient()]
        elif potential.plates:
            estimators = [MinibatchGradient(), ControlVariate(values)]
        noises = _noises(rng_key, potential, whitening, estimators) if estimators else []
        return values, noises, _probe(potential, whitening)

    run = jit_on_data(measure, quick_options())

    def look_around(normal: Mode) -> tuple[Sites, list[np.ndarray], np.ndarray]:
        center, noises, gradients = run(rng_key, normal.center, normal.factor)
        return center, [np.asarray(x, float) for x in noises], np.asarray(gradients, float)

    return look_around


def _noises(
    rng_key: Array, potential: Potential, whitening: Whitening, estimators: list[GradientEstimator]
) -> list[Array]:
    info, center = potential.info, whitening.center
    states = [estimator.init(info.unravel(center), potential) for estimator in estimators]

    def at_point(key: Array) -> list[Array]:
        key_xi, key_batches = random.split(key)
        z = info.unravel(whitening.to_z(random.normal(key_xi, center.shape, center.dtype)))

        def on_batch(key: Array) -> list[Array]:
            key_batch, key_gradient = random.split(key)
            i, idx = jnp.zeros((), int), draw_batch(key_batch, potential)
            on_rows = potential.with_rows(idx)
            on_rows = on_rows.resampled(key_batch) if info.given else on_rows
            grads = [
                estimator.estimate(key_gradient, i, z, idx, on_rows, state)[1]
                for estimator, state in zip(estimators, states, strict=True)
            ]
            return [whitening.pull(info.ravel(grad)) for grad in grads]

        batches = lax.map(on_batch, random.split(key_batches, _NOISE_BATCHES))
        return [jnp.var(grads, 0, ddof=1) for grads in batches]

    def mean(variances: Array) -> Array:
        finite = jnp.all(jnp.isfinite(variances), 1)
        share = jnp.mean(finite, dtype=variances.dtype)
        mean = jnp.mean(jnp.where(finite[:, None], variances, 0), 0) / share
        return jnp.where(share < 0.5, jnp.nan, mean)

    return [mean(x) for x in lax.map(at_point, random.split(rng_key, _NOISE_POINTS))]


def _all_rows(potential: Potential) -> str:
    """Which rows are all that there are, where no plate takes a minibatch."""
    rows = potential.info.rows
    if potential.takes_minibatches or not rows:
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
