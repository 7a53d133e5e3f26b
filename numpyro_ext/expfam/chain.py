"""What families of chains share: distributions of whole sequences."""

from typing import Any, ClassVar

from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import ExponentialFamily
from numpyro_ext.expfam.leaves import leaves_of


class ChainFamily[N: tuple, M: tuple, S: tuple](ExponentialFamily[N, M, S]):
    """A family of sequences of T steps; its sums over states run step by step."""

    discrete: ClassVar[bool]  # whether the steps are integers

    @staticmethod
    def num_steps(natural: Any) -> int:
        return natural[0].shape[-2]

    @classmethod
    def _to_standard(cls, natural: N) -> S:
        raise TypeError(f"{cls.__name__} has no standard parameters; use its mean.")

    @classmethod
    def _to_distribution(cls, natural: N) -> "ChainDistribution":
        return ChainDistribution(cls, natural)


class ChainDistribution(dist.Distribution):
    """A chain as a distribution of NumPyro; the event is the whole sequence."""

    arg_constraints = {}  # noqa: RUF012 - NumPyro's own way to say that nothing is checked
    pytree_data_fields = ("natural",)
    pytree_aux_fields = ("family",)

    def __init__(self, family: Any, natural: Any) -> None:
        self.family, self.natural = family, natural
        shape = natural[0].shape
        super().__init__(self.batch_shape, shape[-2:-1] if family.discrete else shape[-2:])

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

    def sample(self, key: Array | None = None, sample_shape: Shape = ()) -> Array:
        assert key is not None
        return self.family.sample(key, self.natural, sample_shape)

    def log_prob(self, value: Array, intermediates: Any = None) -> Array:
        return self.family.log_prob(self.natural, value)
