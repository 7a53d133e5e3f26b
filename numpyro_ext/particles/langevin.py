"""Langevin dynamics of an ensemble: each half is moved in units of the other half's covariance."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._checks import check_positive, if_given, summary
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.taylor import TaylorProxy, check_proxy
from numpyro_ext._typing import Float, Int
from numpyro_ext.particles._whitening import CovarianceWhitening, PerModeWhitening
from numpyro_ext.particles.base import ParticleField

_HALVES = slice(0, None, 2), slice(1, None, 2)
_LONGEST_KICK = 1.5
"""The largest :math:`\\epsilon |g|`, the root mean square over the coordinates, in which the
momentum has a standard deviation of 1: a step of more is where the dynamics are not stable."""
_LARGEST_STEP, _UNKNOWN = 0.5, 0.3
"""The step for a posterior that is normal, and for one of which nothing is known."""
_STABLE = 0.7
"""The step times the root of the largest curvature."""
_UNSTABLE, _CALM = 0.2, 0.05
"""Shares of the gradients that are too long, above which the largest step becomes smaller in the
warmup, and below which it grows again."""
_WIDEST = 5.0
"""How much wider than at its start a coordinate may be for L, so that halves that leave the
posterior together do not make each other's steps longer and longer."""
_FALLS_FROM, _LAST = 0.6, 0.25
"""The part of the warmup at the large step, and how large the last step is beside it."""

_Units = CovarianceWhitening | PerModeWhitening


class EnsembleLangevinState(NamedTuple):
    """State of :class:`EnsembleLangevin`."""

    momenta: Float[Array, "m d"]  # in the units of the other half; the second half kick is to come
    units: tuple[_Units, _Units]  # of both halves in the last step
    step_size: Float[Array, ""]  # of the last step, 0 at the start
    largest_step: Float[Array, ""]
    given_step: Float[Array, ""]  # which the largest one may have again
    widest: Float[Array, " d"]  # what a coordinate of L is at most
    start: CovarianceWhitening  # fixed coordinates, of the normal where the particles began
    shortened: Int[Array, " m"]  # steps since the warmup in which the gradient was too long
    num_steps: Int[Array, ""]  # steps since the warmup
    rng_key: Array


@dataclass(kw_only=True, eq=False, repr=False)
class EnsembleLangevin:
    r"""Underdamped Langevin dynamics of particles, each half in units of the other's covariance.

    The particles have noise in place of a repulsion. They are two halves, A and B. With the
    covariance :math:`L L^\top` of B, the momenta r of A, of law N(0, I), friction
    :math:`\gamma`, :math:`c = e^{-\gamma \epsilon}` and standard normal :math:`\xi`, one step of
    each particle of A is

    .. math::
        r &\leftarrow r + \tfrac{\epsilon}{2} L^\top g(x), \qquad
        x \leftarrow x + \tfrac{\epsilon}{2} L r, \\
        r &\leftarrow c\, r + \sqrt{1 - c^2}\, \xi, \\
        x &\leftarrow x + \tfrac{\epsilon}{2} L r, \qquad
        r \leftarrow r + \tfrac{\epsilon}{2} L^\top g(x),
        \qquad g = \nabla \log p / T,

    the splitting BAOAB. Then B moves by the covariance of the new A. The next step begins
    with the gradients at the new places, so that a step takes one for each particle.

    **Stationary law.** While A moves, B is fixed, and so is L: given B, the step of A is a Langevin
    step with a constant matrix, which needs no derivative of L. At a small step it leaves the
    posterior as it is, whatever B is, and so does the step of B. So the law of the ensemble is the
    product of m posteriors for every m and d: the particles are draws that are independent but for
    L, their errors are the Monte Carlo errors of m draws, and d may be larger than m. With few
    particles L is a poor preconditioner, which costs steps and changes no law.

    **The matrix.** L is as in :class:`ParticleField`, with the covariance of B shrunk towards its
    diagonal by :math:`\lambda = d / (d + m/2)`, in the coordinates of the normal at the heaviest
    mode where the particles begin at modes. There a normal posterior has no correlations, so that
    the shrinkage loses none, and the draws do not depend on linear maps of the parameters. Where
    the particles begin elsewhere these are the coordinates of the model, in which L knows strong
    correlations only if m is many times d: let them begin at modes. Of several modes each has the
    covariance of its own particles, and keeps its share of them unless the dynamics pass from one
    to the other.

    **Bias.** It is of second order in the step: none for the positions of a normal posterior with
    known covariance. A kick :math:`\epsilon |L^\top g|` of more than 1.5 root mean square is
    shortened to 1.5, because it would not be stable. That happens where the posterior is less than
    :math:`\epsilon / 1.5` times as wide as L says, as deep in the neck of a funnel, of which
    particles then see too little; ``optim_state.shortened`` counts such steps after the warmup, and
    ``diagnose`` says so if they are many. While it happens to more than a fifth of the particles
    before the step falls, :math:`\epsilon_0` becomes smaller by 3 % a step, and no coordinate of L
    is wider than five times its start. All particles share a minibatch, and its noise adds to the
    variance of each of them, and to the error of their mean: give a ``proxy``, which takes nearly
    all of it away.

    It is given to :class:`ParVI` in place of an optimiser, and is no loss for ``SVI``. The step is
    :math:`\epsilon_0` for the first six tenths of the warmup, falls geometrically to
    :math:`\epsilon_0 / 4` until its end, and stays. 1,000 steps of warmup do for most models. Draws
    after the warmup are the particles at later times, which are nearly independent from :math:`4 /
    \epsilon` steps on where the posterior is near normal.

    Cost of a step: m gradients of the model and O(m d^2), or O(m^2 d) if d > m / 2; memory O(m d).

    :param float step_size: :math:`\epsilon_0`, positive and without unit; by default
        :math:`\min(0.5, 0.7 / \sqrt{s})` with the largest ``stiffness`` s of the modes at which the
        particles begin, and 0.3 where they begin elsewhere.
    :param float friction: :math:`\gamma`, positive.
    :param float temperature: T, positive.
    :param proxy: as for :class:`ParticleField`.

    **References:**

    1. Leimkuhler, Matthews and Weare, *Ensemble preconditioning for Markov chain Monte Carlo
       simulation* (Statistics and Computing 2018), sections 2 and 3.
    2. Garbuno-Inigo, Nuesken and Reich, *Affine invariant interacting Langevin dynamics for
       Bayesian inference* (SIAM Journal on Applied Dynamical Systems 2020).
    3. Leimkuhler and Matthews, *Rational construction of stochastic numerical methods for molecular
       sampling* (Applied Mathematics Research eXpress 2013), for the splitting.

    >>> from numpyro_ext.particles import EnsembleLangevin, ParVI
    >>> def model():
    ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
    >>> kernel = ParVI(model, optim=EnsembleLangevin(), steps_per_sample=10)
    >>> mcmc = MCMC(kernel, num_warmup=20, num_samples=20, num_chains=100,
    ...             chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(jax.random.key(0))
    >>> w = mcmc.get_samples()["w"]
    >>> w.shape, bool(abs(w.mean() - 3.0) < 0.3), bool(abs(w.std() - 2.0) < 0.2)
    ((2000,), True, True)
    """

    step_size: float | None = field(default=None, kw_only=False)
    friction: float = 1.0
    temperature: float = 1.0
    proxy: TaylorProxy | None = None

    def __post_init__(self) -> None:
        if_given(check_positive, "step_size", self.step_size)
        check_positive("friction", self.friction)
        check_positive("temperature", self.temperature)
        check_proxy(self.proxy)

    def __repr__(self) -> str:
        return summary(self)

    def check_field(self, field: Any) -> ParticleField:
        """The gradients as a field, with temperature and proxy; an error if another is given."""
        if field is not None:
            raise TypeError(
                f"field is {field!r}, but EnsembleLangevin has noise in place of a field; leave"
                " field out, and give temperature and proxy to EnsembleLangevin."
            )
        return _Gradients(temperature=self.temperature, proxy=self.proxy)

    def init(
        self,
        rng_key: Array,
        x: Float[Array, "m d"],
        modes: Modes | None = None,
        groups: Array | None = None,
    ) -> EnsembleLangevinState:
        """The state of the particles x, which begin at draws of the normals at ``modes``.

        :param groups: ``(m, K)``, 1 for the one of K modes at which each particle begins.
        """
        m, d = x.shape
        if m < 4:
            raise ValueError(
                f"num_chains is {m}, but each half of the particles of EnsembleLangevin needs two"
                " at least, to have a covariance; give 4 or more."
            )
        key_momenta, rng_key = random.split(rng_key)
        largest, start = _UNKNOWN, CovarianceWhitening(jnp.mean(x, axis=0), jnp.ones(d, x.dtype))
        if modes is not None:
            stiffest = max(float(mode.stiffness) for mode in modes.modes)
            largest = min(_LARGEST_STEP, _STABLE / stiffest**0.5)
            center, factor = modes.heaviest.center, modes.heaviest.factor
            start = CovarianceWhitening(center.astype(x.dtype), factor.astype(x.dtype))
        if self.step_size is not None:
            largest = self.step_size
        y = start.points(x)
        widest = jnp.full(d, jnp.inf, x.dtype) if modes is None else _WIDEST * jnp.std(y, axis=0)
        A, B = _HALVES
        units = _units(y, A, B, groups, widest), _units(y, B, A, groups, widest)
        return EnsembleLangevinState(
            momenta=random.normal(key_momenta, x.shape, x.dtype),
            units=units,
            step_size=jnp.zeros((), x.dtype),
            largest_step=jnp.asarray(largest, x.dtype),
            given_step=jnp.asarray(largest, x.dtype),
            widest=widest,
            start=start,
            shortened=jnp.zeros(m, int),
            num_steps=jnp.zeros((), int),
            rng_key=rng_key,
        )

    def step(
        self,
        x: Float[Array, "m d"],
        state: EnsembleLangevinState,
        grad_log_p: Float[Array, "m d"],
        progress: Array | float = 1.0,
        groups: Array | None = None,
    ) -> tuple[Float[Array, "m d"], EnsembleLangevinState]:
        """The particles and their state after one step.

        :param progress: the part of the warmup that is over, from 0 to 1.
        :param groups: ``(m, K)``, 1 for the one of K modes at which each particle began.
        """
        y, g = state.start.points(x), state.start.gradients(grad_log_p)
        begun, r = y, state.momenta
        last, h = state.step_size, self._step_size(state.largest_step, progress).astype(x.dtype)
        c = jnp.exp(-self.friction * h)
        rng_key, key_noise = random.split(state.rng_key)
        noise = jnp.sqrt(1 - c**2) * random.normal(key_noise, x.shape, x.dtype)
        shortened = jnp.zeros(len(x), bool)
        new_units = []
        for half, other, units in zip(_HALVES, reversed(_HALVES), state.units, strict=True):
            # The kick that ends the last step, and the kick that begins this one.
            first, _ = _kick(units, g[half], last)
            units = _units(y, half, other, groups, state.widest)
            second, too_long = _kick(units, g[half], h)
            before = r[half] + first + second
            after = c * before + noise[half]
            y = y.at[half].add(units.velocities(h / 2 * (before + after)))
            r = r.at[half].set(after)
            shortened = shortened.at[half].set(too_long)
            new_units.append(units)
        progress, share = jnp.asarray(progress), jnp.mean(shortened)
        warm = progress >= 1.0
        factor = jnp.where(share > _UNSTABLE, 0.97, jnp.where(share < _CALM, 1.01, 1.0))
        largest = jnp.minimum(state.largest_step * factor.astype(x.dtype), state.given_step)
        state = state._replace(
            momenta=r,
            units=(new_units[0], new_units[1]),
            step_size=h,
            largest_step=jnp.where(progress < _FALLS_FROM, largest, state.largest_step),
            shortened=state.shortened + (warm & shortened),
            num_steps=state.num_steps + warm,
            rng_key=rng_key,
        )
        return x + state.start.velocities(y - begun), state

    def _step_size(self, largest: Array, progress: Array | float) -> Array:
        falling = jnp.clip((jnp.asarray(progress) - _FALLS_FROM) / (1 - _FALLS_FROM), 0, 1)
        return largest * _LAST**falling


class _Gradients(ParticleField):
    """A field without repulsion, which gives a dynamics its gradients."""

    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        return grad_log_p

    def bandwidth(self, x: Array, groups: Array | None = None) -> Float[Array, ""]:
        return jnp.full((), jnp.nan, x.dtype)


def _units(y: Array, half: slice, other: slice, groups: Array | None, widest: Array) -> _Units:
    """The map for the particles of one half, which the other half defines."""
    if groups is None or groups.shape[1] < 2:
        return CovarianceWhitening.from_particles(y[other]).at_most(widest)
    units = PerModeWhitening.from_particles(y[other], groups[other], groups[half], least=2)
    return units.at_most(widest)


def _kick(units: _Units, g: Array, h: Array) -> tuple[Array, Array]:
    """Half a step along the gradients, and which of them were shortened."""
    g = units.gradients(g)
    length = h * jnp.sqrt(jnp.mean(g**2, axis=1))
    kick = h / 2 * g / jnp.maximum(1.0, length / _LONGEST_KICK)[:, None]
    return kick, length > _LONGEST_KICK
