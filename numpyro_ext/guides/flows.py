"""The bases of flows on a normal distribution."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
import math
from typing import Any

import jax
from jax import Array
from jax.nn import softplus
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    IdentityTransform,
    IndependentTransform,
    LowerCholeskyAffine,
    ParameterFreeTransform,
    PermuteTransform,
    Transform,
)

from numpyro_ext._checks import check_count
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.modes import MATRIX_UP_TO
from numpyro_ext._networks import Network, as_pair
from numpyro_ext.guides.base import AutoAtModes, FixedMap
from numpyro_ext.guides.networks import check_widths, flat_module, masked_mlp, mlp
from numpyro_ext.transforms import VectorTransform


class QuickPositive(type(constraints.softplus_positive)):  # pyright: ignore[reportGeneralTypeIssues]
    """Positive numbers that an optimiser changes by three times its step, in relative terms."""


@biject_to.register(QuickPositive)
def _exp_of_triple(_: QuickPositive) -> Transform:
    return ComposeTransform([AffineTransform(0.0, 3.0), ExpTransform()])


class RowsOfFactor(type(constraints.scaled_unit_lower_cholesky)):  # pyright: ignore[reportGeneralTypeIssues]
    """Lower triangular factors of which an optimiser moves a row, not each number, by its step."""


def _on_host(fn: Callable[[Any, Any], Any], x: Array) -> Any:
    """``fn(x, jnp)`` where x is traced, and ``fn(x, np)`` of numbers, which compiles nothing."""
    if is_traced(x):
        return fn(x, jnp)
    with np.errstate(all="ignore"):
        return jax.device_put(fn(np.asarray(x), np))


class _OfRows(ParameterFreeTransform):
    """NumPyro's map from numbers to a (d, d) factor, with the numbers below the diagonal, which
    come first, over the root of d."""

    domain = constraints.real_vector  # pyright: ignore[reportAssignmentType]
    codomain = constraints.scaled_unit_lower_cholesky  # pyright: ignore[reportAssignmentType]

    def __call__(self, x: Array) -> Any:
        return _on_host(_factor_of, x)

    def _inverse(self, y: Array) -> Any:
        return _on_host(_numbers_of, y)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Any = None) -> Array:
        d = y.shape[-1]
        log_diagonal = jnp.log(jnp.diagonal(y, axis1=-2, axis2=-1))
        slopes = (log_diagonal * jnp.arange(d) - softplus(-x[..., -d:])).sum(-1)
        return slopes - d * (d - 1) / 4 * math.log(d)


def _factor_of(x: Any, xp: Any) -> Any:
    d = int((2 * x.shape[-1]) ** 0.5)
    n = x.shape[-1] - d
    place = np.full((d, d), n)  # the 0 behind the numbers below the diagonal; then there is a 1
    place[np.tril_indices(d, -1)] = np.arange(n)
    np.fill_diagonal(place, n + 1)
    ends = xp.broadcast_to(np.array([0, 1], x.dtype), (*x.shape[:-1], 2))
    numbers = xp.concatenate([x[..., :n] * d**-0.5, ends], axis=-1)
    return numbers[..., place] * xp.logaddexp(x[..., n:], 0)[..., None]


def _numbers_of(y: Any, xp: Any) -> Any:
    d, diagonal = y.shape[-1], xp.diagonal(y, axis1=-2, axis2=-1)
    rows, columns = np.tril_indices(d, -1)
    below = (y / diagonal[..., None])[..., rows, columns] / d**-0.5
    return xp.concatenate([below, xp.log(-xp.expm1(-diagonal)) + diagonal], axis=-1)


@biject_to.register(RowsOfFactor)
def _rows_of_factor(_: RowsOfFactor) -> Transform:
    return _OfRows()


@dataclass(kw_only=True, eq=False, repr=False)
class AutoFlowNormal(AutoAtModes):
    r"""Base of the normalizing-flow guides, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::
        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \log|\det f_i'| - \sum_j \log scale_j .

    A subclass gives the flows :math:`f_i` by :meth:`flow`, near the identity at the start.
    Coordinates are permuted between flows, and brought back into their order after the last, so
    that the guide starts at the normal approximation of the posterior at its mode. There a full
    factor L is trained in place of ``scale``, as ``{prefix}_scale_tril``, and z goes through the
    fixed map of :class:`AutoAtModes`.

    *Where it fails.* A flow is a homeomorphism: separated modes stay joined by a thin bridge, and a
    minimised ``KL(q || p)`` may leave modes out. The KL that is reached depends on the rate.

    :param int num_flows: the number F of flows.

    **Reference:** *Variational inference with normalizing flows*, equation 15, Rezende and Mohamed
    (ICML 2015)
    """

    num_flows: int = 4

    most_searched = MATRIX_UP_TO

    def __post_init__(self) -> None:
        self.num_flows = check_count("num_flows", self.num_flows, minimum=0)
        super().__post_init__()

    @abstractmethod
    def flow(self, i: int) -> Transform:
        """The ``i``-th flow, its parameters registered under a name that ends in ``__{i}``."""

    def permutation(self, i: int) -> np.ndarray:
        """The order in which flow ``i + 1`` sees the coordinates of flow ``i``: reversed."""
        return np.arange(self.latent_dim)[::-1]

    def latent_distribution(self) -> dist.TransformedDistribution:
        flows = [self.flow(i) for i in range(self.num_flows)]
        steps = [self.permutation(i) for i in range(self.num_flows - 1)]
        parts = [*permute_between(flows, steps), *self.last_layers()]
        return dist.TransformedDistribution(self.get_base_dist(), parts)

    def last_layers(self) -> list[Transform]:
        """The maps ``scale e``, or ``L e`` inside a map with a full factor; ``loc + e``; and the
        fixed map, if there is one."""
        loc, scale, fixed, _ = self.begin()
        loc: Any = numpyro.param(f"{self.prefix}_loc", loc)
        zero, one = (np.full(loc.shape, x, loc.dtype) for x in (0, 1))  # which compiles nothing
        shift = IndependentTransform(AffineTransform(loc, one), 1)
        if fixed and isinstance(fixed[0], FixedMap) and fixed[0].normal.is_matrix:
            name, rows = f"{self.prefix}_scale_tril", RowsOfFactor()
            start: Any = jnp.diag(scale) if is_traced(scale) else jax.device_put(np.diag(scale))
            L: Any = numpyro.param(name, start, constraint=rows)
            return [LowerCholeskyAffine(zero, L), shift, *fixed]
        scale: Any = numpyro.param(f"{self.prefix}_scale", scale, constraint=QuickPositive())
        return [IndependentTransform(AffineTransform(zero, scale), 1), shift, *fixed]


def permute_between(flows: Sequence[Transform], steps: Sequence[np.ndarray]) -> list[Transform]:
    """The flows with a permutation after each but the last, and then the order of the start."""
    transforms, order = [], np.arange(len(steps[0]) if steps else 0)
    in_order = order
    for i, flow in enumerate(flows):
        transforms.append(flow)
        step = steps[i] if i < len(steps) else np.argsort(order)
        order = order[step]
        if not np.array_equal(step, in_order):
            # NumPy, not JAX: a constant of the program, and comparable when transforms are.
            transforms.append(PermuteTransform(step))  # pyright: ignore[reportArgumentType]
    return transforms


def other_halves(dim: int, i: int) -> np.ndarray:
    """The permutation after coupling i: first the halves swapped, then odd places before even ones,
    so that F couplings separate all coordinates up to dimension :math:`2^{F-1}`."""
    reverse = np.arange(dim)[::-1]
    odd, even = reverse[reverse % 2 == 1], reverse[reverse % 2 == 0]
    return reverse if i == 0 else np.concatenate([odd, even])


class SkewTransform(VectorTransform):
    r"""Unequal sides, :math:`y = x + t (\sqrt{1 + x^2} - 1)` with :math:`t = \tanh a`, of slope
    :math:`1 - t` far on the left and :math:`1 + t` far on the right, for ``(d,)`` skews a."""

    arrays = ("a",)

    def __init__(self, a: Array) -> None:
        self.a = a

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        t, root = jnp.tanh(self.a), jnp.sqrt(1 + x**2)
        # x^2 / (1 + root) is root - 1 with its digits.
        return x + t * x**2 / (1 + root), jnp.sum(jnp.log1p(t * x / root), -1)

    def _inverse(self, y: Array) -> Array:
        return jnp.sinh(jnp.arcsinh(jnp.cosh(self.a) * y + jnp.sinh(self.a)) - self.a)


@dataclass(kw_only=True, eq=False, repr=False)
class AutoregressiveFlowNormal(AutoFlowNormal):
    """Base of the flow guides of networks with masked weights, one for each flow.

    :param hidden_dims: widths of the hidden layers of each network (ELU).
    """

    hidden_dims: Sequence[int] = (32, 32)

    def __post_init__(self) -> None:
        self.hidden_dims = check_widths(self.hidden_dims)
        super().__post_init__()

    def net(self, i: int) -> Callable[[Array], Array]:
        """The network of flow ``i``, from d to 2 d numbers, which starts at zero."""
        pair = masked_mlp(self.latent_dim, self.hidden_dims)
        return flat_module(f"{self.prefix}_net__{i}$params", pair, (self.latent_dim,))


@dataclass(kw_only=True, eq=False, repr=False)
class CouplingFlowNormal(AutoFlowNormal):
    r"""Base of the flow guides of coupling layers, each with a network of its own.

    The first :math:`\lfloor d/2 \rfloor` coordinates go through the network; its outputs move the
    others. After the first flow the halves change places; after each other one a new half has
    coordinates of both. Where the guide starts at a normal with a full factor L, ``{prefix}_skew``
    stretches the two sides of each coordinate by :math:`1 \mp \tanh skew`, between the flows and L.
    With one latent dimension the guide is a normal distribution with such a skew at most.

    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, in its place,
        from :math:`\lfloor d/2 \rfloor` inputs to the coupling's number of outputs for each of the
        :math:`\lceil d/2 \rceil` coordinates that move, with weights of its own in each coupling.
    """

    hidden_dims: Sequence[int] = (32, 32)
    network: Network | None = None

    def __post_init__(self) -> None:
        self.network = as_pair(self.network, optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        super().__post_init__()

    @abstractmethod
    def coupling(self, i: int) -> Transform:
        """The ``i``-th flow, for two or more latent dimensions."""

    def flow(self, i: int) -> Transform:
        return self.coupling(i) if self.latent_dim > 1 else IdentityTransform()

    def permutation(self, i: int) -> np.ndarray:
        return other_halves(self.latent_dim, i)

    def last_layers(self) -> list[Transform]:
        layers = super().last_layers()
        if not isinstance(layers[0], LowerCholeskyAffine):
            return layers
        skew: Any = numpyro.param(f"{self.prefix}_skew", jax.device_put(np.zeros(self.latent_dim)))
        return [SkewTransform(skew), *layers]

    def net(self, i: int, outputs: int) -> tuple[Callable[[Array], Array], int]:
        """The network of coupling ``i``, with ``outputs`` numbers for each coordinate that moves,
        and the number of coordinates that go into it."""
        split = self.latent_dim // 2
        pair = self.network or mlp(self.hidden_dims, outputs * (self.latent_dim - split))
        return flat_module(f"{self.prefix}_net__{i}$params", pair, (split,)), split
