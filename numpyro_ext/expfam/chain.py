"""The parts that families of chains share: the choice of algorithm, and their distributions."""

from abc import abstractmethod
from typing import Any, ClassVar

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_ext._typing import Float
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.leaves import leaves_of

LONG = 64
"""From this number of steps on, the algorithm of logarithmic depth is the default."""


class ChainFamily[N: tuple, M: tuple, S: tuple](ExponentialFamily[N, M, S]):
    """A family of sequences, whose sums over states run step by step or as associative scans.

    A value has T steps. With ``parallel=False`` the depth of the computation is T; with
    ``parallel=True`` it is O(log T) at about twice the work, which pays on an accelerator and for
    long chains; with None, the default, it is parallel from 64 steps on. The numbers agree up to
    rounding, and draws of the same key are the same.
    """

    discrete: ClassVar[bool]
    """True if the steps are integers."""

    @classmethod
    def log_partition(cls, natural: N, *, parallel: bool | None = None) -> Float[Array, "*batch"]:
        checked = cls._checked(cls.Natural, natural)
        return cls._log_partition(checked, cls._in_parallel(checked, parallel))

    @classmethod
    def mean(cls, natural: N, *, parallel: bool | None = None) -> M:
        """The mean of the statistics: smoothed moments of steps and of pairs of neighbours."""
        checked = cls._checked(cls.Natural, natural)
        return cls._mean(checked, cls._in_parallel(checked, parallel))

    @classmethod
    def sample(
        cls,
        rng_key: Array,
        natural: N,
        sample_shape: tuple[int, ...] = (),
        *,
        parallel: bool | None = None,
    ) -> Array:
        checked = cls._checked(cls.Natural, natural)
        parallel = cls._in_parallel(checked, parallel)
        return cls._sample(rng_key, checked, tuple(sample_shape), parallel)

    @classmethod
    @abstractmethod
    def _log_partition(cls, natural: N, parallel: bool = False) -> Array: ...

    @classmethod
    @abstractmethod
    def _mean(cls, natural: N, parallel: bool = False) -> M: ...

    @classmethod
    @abstractmethod
    def _sample(
        cls, rng_key: Array, natural: N, sample_shape: tuple[int, ...], parallel: bool = False
    ) -> Array: ...

    @staticmethod
    def num_steps(natural: Any) -> int:
        """T."""
        return natural[0].shape[-2]

    @classmethod
    def _in_parallel(cls, natural: N, parallel: bool | None) -> bool:
        return cls.num_steps(natural) >= LONG if parallel is None else bool(parallel)

    @classmethod
    def _to_distribution(cls, natural: N) -> "ChainDistribution":
        return ChainDistribution(cls, natural)


class ChainDistribution(dist.Distribution):
    """A chain as a distribution of NumPyro, whose event is the whole sequence."""

    arg_constraints = {}  # noqa: RUF012 - NumPyro's own way to say that nothing is checked
    pytree_data_fields = ("natural",)
    pytree_aux_fields = ("family",)

    def __init__(self, family: Any, natural: Any) -> None:
        self.family, self.natural = family, natural
        super().__init__(self.batch_shape, self._event_of(natural[0].shape))

    def _event_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[-2:-1] if self.family.discrete else shape[-2:]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        # Read off the parameters: under vmap and scan their shape has changed since construction.
        return jnp.shape(self.natural[0])[: -len(leaves_of(self.family.Natural)[0].dims)]

    @property
    def has_rsample(self) -> bool:
        return not self.family.discrete

    @constraints.dependent_property
    def support(self) -> constraints.Constraint:
        if self.family.discrete:
            num_states = self.natural[0].shape[-1]
            return constraints.independent(constraints.integer_interval(0, num_states - 1), 1)
        return constraints.independent(constraints.real, 2)

    def sample(self, key: Array | None = None, sample_shape: tuple[int, ...] = ()) -> Array:
        assert key is not None
        return self.family.sample(key, self.natural, sample_shape)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return self.family.log_prob(self.natural, value)
