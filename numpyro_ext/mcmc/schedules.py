"""Step sizes as functions of the transition number ``i``, counted from 0, as optax's schedules are;
kernels take either, and any other function that can be traced."""

from dataclasses import dataclass, field

from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_count, check_nonnegative, check_positive, check_share


@dataclass(frozen=True)
class PolynomialSchedule:
    r"""Polynomial decay :math:`\epsilon_i = a (b + i)^{-\gamma}`.

    Draws converge to the posterior for :math:`1/2 < \gamma \le 1` when averages are weighted by the
    step size, :math:`\sum_i \epsilon_i f(z_i) / \sum_i \epsilon_i` (eq. 5); others keep a bias.

    **Reference:** *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, Max Welling, Yee
    Whye Teh (ICML 2011)

    >>> print(f"{PolynomialSchedule(2.0, 3.0, 0.5)(6):.4f}")
    0.6667
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        check_positive("a", self.a)
        check_positive("b", self.b)
        check_nonnegative("gamma", self.gamma)

    def __call__(self, i: ArrayLike) -> Array:
        return self.a * jnp.power(self.b + jnp.asarray(i, float), -self.gamma)


@dataclass(frozen=True)
class CyclicalSchedule:
    r"""Cosine cycles with a warm restart, for posteriors with several modes.

    With :math:`L` = ``cycle_length`` and :math:`q = (i \bmod L)/L`,

    .. math::
        \epsilon_i = \tfrac{1}{2}\,\text{peak}\,(\cos(\pi q) + 1).

    While :math:`q <` ``exploration`` the kernel runs at temperature 0 (descent with large steps)
    and the draw is marked ``sampling=False`` in the extra fields. The diagnostics leave these draws
    out; drop them from ``mcmc.get_samples()`` yourself. Here ``i`` counts from 0, not from 1.

    :param float peak: step size at the start of a cycle.
    :param int cycle_length: transitions in a cycle, warmup included, of which a draw takes
        ``steps_per_sample``.
    :param float exploration: share of a cycle that explores, in :math:`[0, 1)`.

    **Reference:** *Cyclical Stochastic Gradient MCMC for Bayesian Deep Learning*, Ruqi Zhang,
    Chunyuan Li, Jianyi Zhang, Changyou Chen, Andrew Gordon Wilson (ICLR 2020), eq. 1, algorithm 1

    >>> schedule = CyclicalSchedule(0.4, 4)
    >>> [round(float(schedule(i)), 4) for i in range(5)]
    [0.4, 0.3414, 0.2, 0.0586, 0.4]
    >>> [bool(schedule.sampling(i)) for i in range(4)]
    [False, True, True, True]
    """

    peak: float
    cycle_length: int
    exploration: float = field(default=0.25, kw_only=True)

    def __post_init__(self) -> None:
        check_positive("peak", self.peak)
        check_count("cycle_length", self.cycle_length)
        check_share("exploration", self.exploration)

    def _phase(self, i: ArrayLike) -> Array:
        return jnp.mod(jnp.asarray(i), self.cycle_length) / self.cycle_length

    def __call__(self, i: ArrayLike) -> Array:
        return 0.5 * self.peak * (jnp.cos(jnp.pi * self._phase(i)) + 1)

    def sampling(self, i: ArrayLike) -> Array:
        """True where transition ``i`` belongs to the sampling stage."""
        return self._phase(i) >= self.exploration
