"""Coupling layers: half of the vector is moved by an amount that depends on the other half.

Dinh, Sohl-Dickstein, Bengio, "Density estimation using Real NVP" (ICLR 2017).
"""

from collections.abc import Callable
import functools
from typing import Any

from jax import Array
import jax.numpy as jnp
from jax.tree_util import Partial, all_leaves, tree_flatten
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform
from numpyro.distributions.util import array_equiv

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Float

__all__ = ["AffineCoupling"]


def _as_pytree(net: Callable[[Array], Array]) -> Any:
    """``net`` with its weights as leaves: from a closure they cannot cross ``jit`` or ``vmap``."""
    if isinstance(net, functools.partial) and not isinstance(net, Partial):
        return Partial(net.func, *net.args, **net.keywords)
    return Partial(net) if all_leaves([net]) else net


class AffineCoupling(Transform):
    r"""The affine coupling layer of RealNVP on vectors of length :math:`d`.

    With :math:`x = (a, b)`, :math:`a` the first ``split`` of the :math:`d` coordinates,

    .. math::

        y = (a,\; b \odot e^{s} + t), \qquad (s_{raw}, t) = net(a), \qquad
        s = c \tanh(s_{raw} / c), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = \sum_i s_i ,

    where :math:`c` is ``clamp``. The inverse costs one pass too:
    :math:`b' = (y_b - t) \odot e^{-s}` with the same :math:`s` and :math:`t`, since
    :math:`y_a = a`. All leading axes are batch axes. The first ``split`` coordinates never move, so
    layers are stacked with a permutation in between.

    The paper leaves :math:`s` to a scaled ``tanh`` with a learnt factor (its Section 4.1). Here the
    factor is the constant ``clamp``: one layer stretches a coordinate by at most :math:`e^{c}`, and
    for :math:`|s_{raw}|` well above :math:`c` the gradient of :math:`s` vanishes. Targets whose
    scale varies by more than that (a funnel's neck) need several layers or a larger ``clamp``, at
    the price of exploding draws early in training.

    :param net: a callable from ``(*batch, split)`` to ``(*batch, 2 * (d - split))``:
        :math:`s_{raw}` and :math:`t` concatenated. What ``numpyro.module`` returns will do.
    :param int split: the number of coordinates that stay; at least 1 and below :math:`d`.
    :param float clamp: the bound :math:`c > 0` of :math:`|s|`.

    **References**

    1. *Density estimation using Real NVP*, equations 4-8, Laurent Dinh, Jascha Sohl-Dickstein,
       Samy Bengio (2017)

    .. doctest::

        >>> import jax.numpy as jnp, numpyro.distributions as dist
        >>> from numpyro_ext.transforms import AffineCoupling
        >>> banana = AffineCoupling(lambda a: jnp.concatenate([0 * a, 3 * (a**2 - 1)], -1), split=1)
        >>> base = dist.Normal(jnp.zeros(2), 1).to_event(1)
        >>> d = dist.TransformedDistribution(base, banana)
        >>> print(f"{d.log_prob(jnp.array([1.0, 0.5])):.4f}")
        -2.4629
    """

    def __init__(
        self, net: Callable[[Array], Array], split: int, *, clamp: float | Array = 2.0
    ) -> None:
        if not callable(net):
            raise TypeError(
                f"net is a {type(net).__name__}; it must be a callable from the first `split`"
                " coordinates to the log-scales and shifts of the others, such as numpyro.module"
                " gives."
            )
        check_positive("clamp", clamp)
        self.net = _as_pytree(net)
        self.split = check_count("split", split)
        self.clamp = clamp

    @property
    def domain(self) -> constraints.Constraint:
        return constraints.real_vector

    @property
    def codomain(self) -> constraints.Constraint:
        return constraints.real_vector

    def _scale_and_shift(self, a: Float[Array, "*batch k"], size: int) -> tuple[Array, Array]:
        """The clamped ``s`` and ``t`` of a vector of length ``size``."""
        moved = size - self.split
        if moved < 1:
            raise ValueError(
                f"split is {self.split} and the vector has length {size}; a coupling needs a split"
                " between 1 and that length minus 1 (and so at least two coordinates)."
            )
        out = self.net(a)
        if out.shape != (*a.shape[:-1], 2 * moved):
            raise ValueError(
                f"net turns shape {a.shape} into {out.shape}; with split {self.split} of {size}"
                f" coordinates it must give {(*a.shape[:-1], 2 * moved)}: s_raw and t concatenated."
            )
        s_raw, t = out[..., :moved], out[..., moved:]
        return self.clamp * jnp.tanh(s_raw / self.clamp), t

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        a, b = x[..., : self.split], x[..., self.split :]
        s, t = self._scale_and_shift(a, x.shape[-1])
        return jnp.concatenate([a, b * jnp.exp(s) + t], axis=-1), s

    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.call_with_intermediates(x)[0]

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        a, b = y[..., : self.split], y[..., self.split :]
        s, t = self._scale_and_shift(a, y.shape[-1])
        return jnp.concatenate([a, (b - t) * jnp.exp(-s)], axis=-1)

    def log_abs_det_jacobian(
        self,
        x: Float[Array, "*batch d"],
        y: Float[Array, "*batch d"],
        intermediates: Array | None = None,
    ) -> Float[Array, "*batch"]:
        s = intermediates
        if s is None:
            s, _ = self._scale_and_shift(x[..., : self.split], x.shape[-1])
        return s.sum(-1)

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[tuple[str, ...], dict[str, Any]]]:
        return (self.net, self.clamp), (("net", "clamp"), {"split": self.split})

    def eq(self, other: object, static: bool = False) -> Any:
        if not isinstance(other, AffineCoupling) or self.split != other.split:
            return False
        leaves, structure = tree_flatten((self.net, self.clamp))
        other_leaves, other_structure = tree_flatten((other.net, other.clamp))
        if structure != other_structure:
            return False
        same: Any = True
        for mine, theirs in zip(leaves, other_leaves, strict=True):
            same = same & array_equiv(mine, theirs, static=static)
        return same
