"""Settings that a kernel finds by itself: coordinates of unit scale, and a step in them."""

from dataclasses import dataclass, field, replace
from typing import Any
import warnings

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.mode_search import search_modes
from numpyro_ext._model.modes import Mode, Modes
from numpyro_ext._model.normal import Normal, Whitening
from numpyro_ext._model.normal_fit import Moves, NormalMeasure
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.same import agree
from numpyro_ext._model.surface import batch_rows, draw_batch, surface_of
from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient

NO_LOCAL_SITES = "a chain holds one value of it while the rows change at every step"
"""The reason for which no latent site may be local to a subsampled plate."""
_TOO_MANY = 10_000
_NO_NOISE = 1e-6  # of gradients in posterior units, below which a correction has nothing to do
_NORMAL = 0.1
"""The departure up to which a correction fails only where rows fit, as they do without noise."""
_PROBES = 4
# The noise of a corrected gradient grows as the square of the distance, so it varies from point to
# point by one to two times its mean: few points with many batches would miss the mean by a third.
_NOISE_POINTS, _NOISE_BATCHES = 512, 4


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Settings:
    """
    The settings found by a kernel with ``step_size=None``, as ``kernel.settings``.

    The modes are found first, by :func:`~numpyro_ext.optim.find_modes`, and in the coordinates the
    curvature at the heaviest is 1. The step, and the friction, are the largest at which the
    kernel's law on a Gaussian with the measured gradient noise keeps the relative error of every
    variance within ``max_bias``. Chains start at draws of the normal approximation, a single one at
    the heaviest mode; of several that start together (``chain_method="vectorized"``) each mode has
    its share, and the step is one for these modes. A posterior that is not near normal deviates
    from the predictions; see ``problems``.

    A new run on other data finds other settings. A chain that goes on (``mcmc.post_warmup_state``)
    keeps its own, and refuses other data.

    :param float step_size: in whitened units.
    :param friction: rate C; None for a kernel without one.
    :param integrator: the splitting of a kernel that has several.
    :param float variance_ratio: predicted over right variance, where they differ most.
    :param float transitions: predicted transitions per independent draw.
    :param tuple kinetic_temperature: what the law predicts at the end of a step, over the
        temperature, of a coordinate without gradient noise and of the one with most of it.
    :param str kernel: class of the kernel.
    :param whitening: the coordinates; None for a kernel that moves the sites themselves.
    :param dict center: constrained values of the latent sites at the center.
    :param bool control_variate: True if the gradient is corrected at the center.
    :param float noise: largest variance of a coordinate of the minibatch gradient, whitened.
    :param float noise_control_variate: the same, corrected at the center.
    :param int row_gradients: gradients of single rows that were spent on finding all this.
    :param tuple problems: one sentence per assumption that failed.

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
    integrator: str | None = None

    @property
    def if_hot(self) -> str:
        """What to do about a chain that is hotter than these settings predict."""
        return (
            "the posterior is not near normal in the coordinates found, or each call has other"
            " rows: reparametrise the model, take a smaller max_bias, or give the model all rows,"
            " of which numpyro.plate(name, N, subsample_size=B) draws the minibatch"
        )

    @property
    def gradients(self) -> float:
        """Predicted minibatch gradients per independent draw."""
        return self.transitions * (2 if self.control_variate else 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which a kernel of this class has these settings."""
        arguments: dict[str, Any] = {"step_size": self.step_size, "whitening": self.whitening}
        arguments |= {
            name: getattr(self, name)
            for name in ("friction", "integrator")
            if getattr(self, name) is not None
        }
        if self.control_variate:
            arguments["gradient"] = ControlVariate(self.center)
        return arguments

    def __str__(self) -> str:
        kind = "none" if self.whitening is None else repr(self.whitening)[10:-1]
        lines = [
            ("step size", f"{self.step_size:.4g}"),
            ("friction", "-" if self.friction is None else f"{self.friction:.4g}"),
            ("integrator", self.integrator or "-"),
            ("whitening", kind),
            ("gradient", "ControlVariate" if self.control_variate else "as given"),
            ("gradient noise", f"{self.noise:.3g} (corrected {self.noise_control_variate:.3g})"),
            ("variance ratio", f"{self.variance_ratio:.3f} (predicted)"),
            ("gradients per independent draw", f"{self.gradients:.3g} (predicted)"),
            ("gradients of a row spent", f"{self.row_gradients:,}"),
        ]
        text = "\n".join(f"  {name:<32}{value}" for name, value in lines)
        problems = "".join(f"\n  ! {problem}" for problem in self.problems)
        return f"{self.kernel}: settings found\n{text}{problems}"


@dataclass(frozen=True)
class Found:
    """The result of a search, with a step for the ``num_modes`` heaviest modes; its data are known
    by the ``plates`` of a potential and by whitened ``gradients`` of all rows, ``(4, n)``."""

    settings: Settings
    modes: Modes
    num_modes: int
    plates: dict[str, tuple[int, int]]
    gradients: np.ndarray

    def is_of(self, potential: Potential) -> bool:
        """Whether these are the data for which the settings were found."""
        whitening = self.modes.whitening
        if potential.info.size != whitening.size or potential.plates != self.plates:
            return False
        # By a program of its own: a kept one holds the data that a closure had when it was made.
        now = _gradients(potential.changed(), whitening)
        finite = np.isfinite(now)
        same = np.array_equal(finite, np.isfinite(self.gradients))
        return same and bool(agree(*(np.where(finite, x, 0) for x in (now, self.gradients))))


def _gradients(potential: Potential, normal: Normal) -> np.ndarray:
    moves, surface = Moves(normal), surface_of(potential)
    away = moves.push(np.random.default_rng(0).normal(size=(_PROBES, normal.size)))
    center = np.asarray(normal.center, float)
    return moves.pull(np.stack([surface.sums(center + x)[1] for x in away]))


def find_settings(
    kernel: Any, potential: Potential, start: Sites | None, modes: Modes | None, num_chains: int
) -> Found:
    """Settings of a kernel with ``step_size=None``, from a search from ``start``, or from modes."""
    leaves = jax.tree.leaves(potential.arguments)
    if any(isinstance(x, Tracer) for x in leaves):
        raise ValueError(
            "step_size is None, but the run is inside a traced function; pass"
            " **kernel.settings.arguments of a kernel outside."
        )
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "step_size is None, and an argument is an array of several processes, on which settings"
            " cannot be found; find them from the rows of one process."
        )
    if potential.info.size == 0:
        raise ValueError("step_size is None, but the latent sites have no free coordinate.")
    info = potential.info
    key_normal, key_noise = random.split(random.key(0))
    given: Whitening | None = kernel.given_whitening
    coordinates = given if modes is None else modes.whitening
    spent = 0
    if coordinates is None:
        # By a key of its own, so that runs on the same data have the same settings.
        modes = search_modes(key_normal, kernel.model, potential, start, kernel.init_strategy)
        spent = modes.row_gradients
    elif modes is None:
        parts = coordinates.center.astype(float), coordinates.factor.astype(float)
        normal = Mode(*parts, coordinates.circles)
        normal = NormalMeasure(key_normal, potential)(normal)
        modes = Modes((normal,), info.shapes, problems=normal.problems)
    assert modes is not None
    taken = modes.num_taken(num_chains)
    normal = replace(modes.heaviest, stiffness=_stiffest(modes.modes[:taken]))
    center, noises = look_around(key_noise, potential, kernel.gradient, normal)

    # One noise is of the estimator that was given, two are without and with a correction.
    all_finite = bool(np.all([np.isfinite(noise) for noise in noises]))
    noises = [np.where(np.isfinite(noise), noise, 0) for noise in noises]
    plain = noises[0] if noises else np.zeros(info.size)
    corrected = noises[1] if len(noises) == 2 else np.zeros(info.size)
    gains = len(noises) == 2 and np.max(corrected) < 0.8 * np.max(plain)
    control_variate = bool(gains and taken == 1)  # a center at one mode is no help at another
    # A schedule changes the temperature, and at 0 there is no law to keep to.
    T = kernel.temperature
    noise = (corrected if control_variate else plain) / (1.0 if callable(T) or T == 0 else float(T))
    choice = kernel.choose(noise, normal, potential)

    problems = (*modes.problems, *choice.problems)
    may_correct = len(noises) == 2 and taken == 1 and np.max(plain) > _NO_NOISE
    if not all_finite:
        problems += (
            "the gradient is not finite at most points within a standard deviation of the center,"
            " so the step may be too long; check the data, or use NUTS.",
        )
    elif may_correct and not gains and normal.sure_departure > _NORMAL:
        problems += (
            "a gradient corrected at the center is about as noisy as the plain one, so the"
            " posterior has several modes or is far from normal; compare runs, or use NUTS.",
        )
    if choice.transitions > _TOO_MANY:
        problems += (
            f"an independent draw takes {choice.transitions:,.0f} transitions; reparametrise the"
            " model (LocScaleReparam, the other way round from now), or take larger minibatches.",
        )
    bias, allowed = abs(choice.variance_ratio - 1), kernel.max_bias
    if bias > 1.01 * allowed and not choice.problems:
        problems += (
            f"no step keeps the relative error of a variance within max_bias = {allowed:g}:"
            f" {bias:.2g} is the least; take larger minibatches, or leave out a given friction.",
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
    )
    gradients = _gradients(potential, modes.whitening)
    return Found(settings, modes, taken, potential.plates, gradients)


def look_around(
    rng_key: Array, potential: Potential, estimator: GradientEstimator | None, normal: Mode
) -> tuple[Sites, list[np.ndarray]]:
    """The constrained center of a normal approximation, and the mean variances of gradient
    estimates at its draws, whitened, ``(n,)`` for each estimator: the one that is given, or the
    plain one and the one that is corrected at the center; NaN where less than half are finite."""
    info, sites = potential.info, potential.postprocess()

    def measure(center: Array, factor: Array) -> tuple[Sites, list[Array]]:
        whitening, values = Whitening(center, factor), info.in_order(sites(info.unravel(center)))
        estimators: list[GradientEstimator] = []
        if estimator is not None:
            estimators = [estimator]
        elif potential.takes_minibatches:
            corrected = [] if info.given else [ControlVariate(values)]
            estimators = [MinibatchGradient(), *corrected]
        noises = _noises(rng_key, potential, whitening, estimators) if estimators else []
        return values, noises

    center, noises = jit_on_data(measure, quick_options())(normal.center, normal.factor)
    return center, [np.asarray(x, float) for x in noises]


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


def _stiffest(modes: tuple[Mode, ...]) -> float:
    """The largest curvature at any of the modes, in coordinates of the first one."""
    first, *others = modes
    if not others:
        return max(first.stiffness, 1.0)
    root = np.asarray(first.factor, np.float64)

    def scale(mode: Mode) -> float:
        moved = mode.on_host.solve(root)
        return float(np.linalg.norm(moved, 2) if moved.ndim == 2 else np.max(moved))

    return max(first.stiffness, *(mode.stiffness * scale(mode) ** 2 for mode in others), 1.0)
