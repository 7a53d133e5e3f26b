"""Settings that a kernel finds by itself: a mode, coordinates of unit scale, and a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
import warnings

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from numpyro.infer.initialization import init_to_uniform, init_to_value
import optax

from numpyro_ext._checks import InferenceWarning
from numpyro_ext._model.handlers import first_rows
from numpyro_ext._model.mistakes import check_rows, read_global
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import draw_params, draw_start
from numpyro_ext._numpyro import normal_of_guide
from numpyro_ext._typing import Model, Sites
from numpyro_ext.mcmc._mode import (
    DENSE_UP_TO,
    NOISE_ESTIMATES,
    Mode,
    batch_rows,
    find_modes,
    measure_noise,
)
from numpyro_ext.mcmc._shape import NORMAL_FIT, NORMAL_MODE, Shape, measure_shape
from numpyro_ext.mcmc.gradients import MinibatchGradient
from numpyro_ext.mcmc.schedules import ConstantSchedule
from numpyro_ext.mcmc.whitening import Whitening

__all__ = ["Settings", "find_settings", "find_whitening"]

_TOO_MANY = 10_000
_SVI_STEPS = 5_000
_SHARE = 7.0  # nats: a mode with less than a thousandth of the mass is not looked at


@dataclass(frozen=True)
class Settings:
    """
    What a kernel with ``step_size=None`` has found, as ``kernel.settings``; it prints as a table.

    The predictions are those of the kernel's law on a Gaussian: what a posterior that is not near
    one does is not in them, and ``problems`` says what was seen of that.

    :param str kernel: class of the kernel.
    :param float step_size: in whitened units.
    :param friction: rate C; None for a kernel without momentum, or where it was given.
    :param whitening: the coordinates, in which the chains also start; None where there are none.
    :param dict center: constrained values of the latent sites at the center.
    :param bool control_variate: whether the gradient is corrected at the center.
    :param float noise: largest variance of a coordinate of the minibatch gradient, whitened.
    :param float noise_control_variate: the same, corrected at the center.
    :param float variance_ratio: predicted variance over the right one, where they differ most.
    :param float transitions: predicted transitions per independent draw.
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

    kernel: str
    step_size: float
    friction: float | None
    whitening: Whitening | None = field(repr=False)
    center: Sites = field(repr=False)
    control_variate: bool
    noise: float
    noise_control_variate: float
    variance_ratio: float
    transitions: float
    row_gradients: int
    problems: tuple[str, ...] = ()

    @property
    def gradients(self) -> float:
        """Predicted minibatch gradients per independent draw."""
        return self.transitions * (2 if self.control_variate else 1)

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
        text = "\n".join(f"  {name:<32}{value}" for name, value in lines)
        problems = "".join(f"\n  ! {problem}" for problem in self.problems)
        return f"{self.kernel}: settings found\n{text}{problems}"


@dataclass(frozen=True)
class Found:
    """A normal approximation of the posterior of a potential."""

    potential: Potential
    mode: Mode
    problems: tuple[str, ...]
    row_gradients: int
    stiffness: float = 1.0
    """The largest curvature in whitened coordinates; 1 if the posterior is normal."""

    @property
    def whitening(self) -> Whitening:
        return Whitening(self.mode.x, self.mode.factor)

    def whiten(self, matrix: np.ndarray) -> np.ndarray:
        r""":math:`A^{-1} D A^{-\top}`: a diffusion or curl of z as one of the whitened coordinates.

        Further coordinates of the matrix (momenta) stay as they are.
        """
        factor = np.asarray(self.mode.factor, float)
        n = len(factor)
        root = np.eye(len(matrix))
        root[:n, :n] = factor if factor.ndim == 2 else np.diag(factor)
        return np.linalg.solve(root, np.linalg.solve(root, matrix).T).T


def find_whitening(
    model: Model,
    *args: Any,
    init_params: Sites | None = None,
    rng_key: Array | None = None,
    **kwargs: Any,
) -> Whitening:
    """
    The coordinates of the normal approximation of a model's posterior at its mode.

    Adam on minibatches and damped Newton steps on all rows find the mode; the inverse curvature
    there is the covariance. It is dense up to 512 latent dimensions. Where there is no mode, or
    where gradients around it are far from those of a normal posterior, the normal is a variational
    fit; an :class:`InferenceWarning` says so where there is no mode and where the fit is not near
    either.

    :param model: Python callable containing NumPyro primitives.
    :param args: arguments of the model.
    :param dict init_params: unconstrained values of all latent sites, where the search begins.
    :param rng_key: random number generator key of the search.
    :param kwargs: keyword arguments of the model.
    :return: a :class:`Whitening`, for the argument ``whitening`` of a kernel.

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_ext.mcmc import find_whitening
        >>> def model():
        ...     numpyro.sample("z", dist.Normal(300.0, 20.0))
        >>> whitening = find_whitening(model)
        >>> print(f"{whitening.center[0]:.0f} {whitening.factor[0, 0]:.0f}")
        300 20
    """
    rng_key = random.key(0) if rng_key is None else rng_key
    info = read_latents(model, args, kwargs, init_to_uniform)
    check_rows(model, args, kwargs, init_to_uniform)
    params = draw_params(rng_key, model, info, args, kwargs)
    potential = Potential(model, info, params, args, kwargs)
    if init_params is not None:
        init_params = info.check_unconstrained("init_params", init_params)
    found = find_normal(rng_key, model, potential, init_params)
    warn(found.problems)
    return found.whitening


def read_latents(
    model: Model, args: tuple, kwargs: dict[str, Any], init_strategy: Callable[..., Any]
) -> ModelInfo:
    """What chains need to know of a model; an error where they cannot run on it."""
    because = "a chain holds one value of it while the rows change at every step"
    return read_global(model, args, kwargs, because=because, init_strategy=init_strategy)


def find_normal(
    rng_key: Array,
    model: Model,
    potential: Potential,
    start: Sites | None,
    init_strategy: Callable[..., Any] = init_to_uniform,
) -> Found:
    """A normal approximation of the posterior: at its mode, or a variational one where there is
    none or where the posterior around it is far from normal, as with scales of a hierarchy."""
    info = potential.info
    key_start, key_mode, key_svi, key_shape = random.split(rng_key, 4)
    given = start is not None
    if start is None:
        start, energy, _ = draw_start(
            key_start, model, info, *potential.arguments, init_strategy=init_strategy
        )
        potential.check_start(start, potential.first_rows(), energy)
    # Opposite points, because an exchange of two numbers is one of their difference's sign.
    first, more = info.ravel(start), random.fold_in(key_start, 1)
    other = random.uniform(more, first.shape, first.dtype, -2, 2)
    modes = find_modes(key_mode, potential, [first, -first, other, -other])
    mode = next(modes)
    spent, problems = mode.row_gradients, ()
    if mode.known and not given:
        mode, problems, more_spent = _most_likely([mode, *modes])
        spent += more_spent
    shape = measure_shape(key_shape, potential, mode) if mode.known else Shape(np.inf, 1.0)
    if shape.departure <= NORMAL_MODE:
        return Found(potential, mode, problems, spent, shape.stiffness)
    if not np.isfinite(mode.decrement):
        # The search leaves out minibatches whose gradient is not finite; all rows are in here.
        rows = {n: jnp.arange(N) for n, (N, _) in potential.plates.items()}
        potential.check_start(start, rows, *jax.jit(potential.full_value_and_grad)(start))
    fit = _fit(key_svi, model, potential, start)
    spent += fit.row_gradients
    of_fit = measure_shape(key_shape, potential, fit)
    if mode.known and shape.departure <= of_fit.departure:
        fit, of_fit = mode, shape
    if not mode.known:
        what = (
            f"the curvature has {mode.num_negative} negative directions where the search for a mode"
            " ended"
            if mode.num_negative
            else f"the search for a mode ended {mode.decrement:.2g} standard deviations from one"
        )
        problems += (
            f"{what}, so center and scales come from a variational fit instead; reparametrise the"
            " model (LocScaleReparam for hierarchies), or give init_params near the mode.",
        )
    elif of_fit.departure > NORMAL_FIT:
        problems += (
            "gradients around the center are far from those of a normal posterior (relative error"
            f" {of_fit.departure**0.5:.2g}), so the scales found do not hold in all of it;"
            " reparametrise the model (LocScaleReparam for hierarchies), or use NUTS.",
        )
    return Found(potential, fit, problems, spent, of_fit.stiffness)


def _most_likely(modes: list[Mode]) -> tuple[Mode, tuple[str, ...], int]:
    """The mode of most mass, a sentence if another one has a share in it, and the gradients spent
    on all but the first."""
    spent = sum(mode.row_gradients for mode in modes[1:])
    known = [mode for mode in modes if mode.known and np.isfinite(mode.log_evidence)]
    best = max(known, key=lambda mode: mode.log_evidence, default=modes[0])
    far = 3 + float(np.sqrt(best.x.size))
    distances = [
        best.distance(mode.x) for mode in known if mode.log_evidence > best.log_evidence - _SHARE
    ]
    if max(distances, default=0.0) <= far:
        return best, (), spent
    problem = (
        f"searches from {len(modes)} points ended at different modes, {max(distances):.2g} standard"
        " deviations apart, and all chains start at one of them and may not leave it; give each"
        " chain init_params of its own, or check that the modes are copies of each other."
    )
    return best, (problem,), spent


def find_settings(
    kernel: Any, model: Model, potential: Potential, start: Sites | None
) -> tuple[Settings, Whitening]:
    """
    Settings of a kernel with ``step_size=None``, and the normal approximation to start from.

    :param kernel: a :class:`ModelKernel`; it says what its law allows by ``choose``.
    """
    leaves = jax.tree.leaves(potential.arguments)
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise ValueError(
            "step_size is None, but an argument of the model is an array of several processes, on"
            " which settings cannot be found; find them from the rows of one process, and pass"
            " step_size and whitening of kernel.settings."
        )
    key_normal, key_noise = random.split(random.key(0))
    given = kernel.given_whitening
    if given is None:
        found = find_normal(key_normal, model, potential, start, kernel.init_strategy)
    else:
        mode = Mode(given.center, given.factor, 0.0, 0, 0)
        shape = measure_shape(key_normal, potential, mode)
        found = Found(potential, mode, (), 0, shape.stiffness)
    center = _constrained(potential, potential.info.unravel(found.mode.x))
    estimators = kernel.estimators(center)
    noises = [measure_noise(key_noise, potential, found.mode, e) for e in estimators]
    zero = np.zeros(potential.info.size)
    # A corrected gradient takes two.
    noise_rows = NOISE_ESTIMATES * batch_rows(potential) * (3 if len(noises) == 2 else len(noises))
    plain, corrected = ([*noises, zero] if len(noises) == 1 else noises or [zero, zero])[:2]
    control_variate = len(noises) == 2 and np.max(corrected) < 0.8 * np.max(plain)
    choice = kernel.choose(corrected if control_variate else plain, found)
    problems = found.problems
    if len(noises) == 2 and not control_variate:
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
    warn(problems)
    settings = Settings(
        kernel=type(kernel).__name__,
        step_size=choice.step_size,
        friction=choice.friction,
        whitening=found.whitening if kernel.moves_whitened else given,
        center=center,
        control_variate=bool(control_variate),
        noise=float(np.max(plain)),
        noise_control_variate=float(np.max(corrected)),
        variance_ratio=choice.variance_ratio,
        transitions=choice.transitions,
        row_gradients=found.row_gradients + noise_rows,
        problems=problems,
    )
    return settings, found.whitening


def warn(problems: tuple[str, ...]) -> None:
    """One ``InferenceWarning`` with all that was seen."""
    if problems:
        warnings.warn(InferenceWarning(" ".join(problems)), stacklevel=2)


def _constrained(potential: Potential, z: Sites) -> Sites:
    """The latent sites of an unconstrained point, in their supports."""
    return potential.info.in_order(potential.postprocess()(z))


def _fit(rng_key: Array, model: Model, potential: Potential, start: Sites) -> Mode:
    """A variational fit on the same minibatches, as a mode and a factor."""
    info, (args, kwargs) = potential.info, potential.arguments
    dense = info.size <= DENSE_UP_TO
    guide_class = AutoMultivariateNormal if dense else AutoDiagonalNormal
    guide = guide_class(
        first_rows(model),
        init_loc_fn=init_to_value(values=_constrained(potential, start)),
        init_scale=0.05,
    )
    rate = optax.exponential_decay(0.02, _SVI_STEPS, 0.02)
    svi = SVI(model, guide, optax.adam(rate), Trace_ELBO(num_particles=8))
    result = svi.run(rng_key, _SVI_STEPS, *args, progress_bar=False, stable_update=True, **kwargs)
    center, factor = normal_of_guide(guide, result.params)
    return Mode(center, factor, 0.0, 0, 8 * _SVI_STEPS * batch_rows(potential))


def argument_of(kernel: Any, name: str, default: Any) -> Any:
    """An argument of a kernel, with what was found in place of None."""
    if name == "gradient" and isinstance(kernel.gradient, MinibatchGradient):
        return default
    name = "_schedule" if name == "step_size" else name
    value = getattr(kernel, name, getattr(kernel, f"_{name}", default))
    return value.value if isinstance(value, ConstantSchedule) else value
