"""Coupling layers: half of the vector is moved by an amount that depends on the other half."""

from abc import abstractmethod
from collections.abc import Callable

from jax import Array
import jax.numpy as jnp

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Float
from numpyro_ext.transforms.base import VectorTransform, as_pytree, checked_output, softly_bounded


class Coupling(VectorTransform):
    r"""Base of the coupling layers :math:`(a, b) \mapsto (a, g(b; net(a)))`, g invertible in b.

    Here :math:`a` is the first ``split`` of the :math:`d` coordinates; these never move, so layers
    are stacked with a permutation in between. The inverse costs one pass through the network too. A
    subclass says how many outputs the network has for each coordinate that moves
    (``outputs_per_coordinate``), and writes :meth:`move`.

    :param net: a callable from ``(*batch, split)`` to
        ``(*batch, outputs_per_coordinate * (d - split))``. What ``numpyro.module`` returns will do.
    :param int split: the number of coordinates that stay; at least 1 and below :math:`d`.

    **Reference:** Dinh, Krueger and Bengio, *NICE: non-linear independent components estimation*
    (ICLR workshop 2015), section 3.2.

    >>> class Power(Coupling):
    ...     outputs_per_coordinate = 1
    ...     def move(self, b, out, inverse):
    ...         power = jnp.exp(-out if inverse else out)
    ...         moved = jnp.sign(b) * jnp.abs(b) ** power
    ...         return moved, jnp.log(power) + (power - 1) * jnp.log(jnp.abs(b))
    >>> cube = Power(lambda a: jnp.log(3.0) + 0 * a, split=1)
    >>> print(cube(jnp.array([0.5, 2.0])))
    [0.5 8. ]
    """

    arrays = ("net",)
    static = ("split",)
    outputs_per_coordinate: int

    def __init__(self, net: Callable[[Array], Array], split: int) -> None:
        self.net = as_pytree(net)
        self.split = check_count("split", split)

    @abstractmethod
    def move(self, b: Array, out: Array, inverse: bool) -> tuple[Array, Array]:
        """:math:`g(b)`, or its inverse, and the log of the absolute derivative of each entry."""

    def call_with_intermediates(self, x: Float[Array, "*batch d"]) -> tuple[Array, Array]:
        return self._couple(x, inverse=False)

    def _inverse(self, y: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self._couple(y, inverse=True)[0]

    def _couple(self, x: Array, *, inverse: bool) -> tuple[Array, Array]:
        a, b = x[..., : self.split], x[..., self.split :]
        if b.shape[-1] < 1:
            raise ValueError(
                f"split is {self.split} and the vector has length {x.shape[-1]}; it must be less."
            )
        shape = (*b.shape[:-1], self.outputs_per_coordinate * b.shape[-1])
        because = f"with split {self.split} of {x.shape[-1]} coordinates"
        out = checked_output("net", a, self.net(a), shape, because)
        moved, log_slopes = self.move(b, out, inverse)
        return jnp.concatenate([a, moved], axis=-1), log_slopes.sum(-1)


class AdditiveCoupling(Coupling):
    r"""The additive coupling layer of NICE.

    .. math::
        y = (a,\; b + net(a)), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = 0 .

    The layer keeps volume: no stack of such layers alone changes the scale of a density anywhere.

    :param net: a callable from ``(*batch, split)`` to ``(*batch, d - split)``.

    **Reference:** Dinh, Krueger and Bengio, *NICE* (ICLR workshop 2015), equations 9-12.

    >>> bend = AdditiveCoupling(lambda a: 3 * (a**2 - 1), split=1)
    >>> print(bend(jnp.array([2.0, 0.5])), bend.inv(jnp.array([2.0, 9.5])))
    [2.  9.5] [2.  0.5]
    """

    outputs_per_coordinate = 1

    def move(self, b: Array, out: Array, inverse: bool) -> tuple[Array, Array]:
        return (b - out if inverse else b + out), jnp.zeros_like(b)


class AffineCoupling(Coupling):
    r"""The affine coupling layer of RealNVP.

    .. math::
        y = (a,\; b \odot e^{s} + t), \qquad (s_{raw}, t) = net(a), \qquad
        s = c \tanh(s_{raw} / c), \qquad
        \log\left|\det \frac{\partial y}{\partial x}\right| = \sum_i s_i ,

    where :math:`c` is ``clamp``, a learnt factor in the paper: one layer stretches a coordinate by
    at most :math:`e^{c}`.

    :param net: a callable from ``(*batch, split)`` to ``(*batch, 2 * (d - split))``:
        :math:`s_{raw}` and :math:`t` concatenated.
    :param float clamp: the bound :math:`c > 0` of :math:`|s|`.

    **Reference:** *Density estimation using Real NVP*, equations 4-8, Dinh et al. (ICLR 2017)

    >>> banana = AffineCoupling(lambda a: jnp.concatenate([0 * a, 3 * (a**2 - 1)], -1), split=1)
    >>> base = dist.Normal(jnp.zeros(2), 1).to_event(1)
    >>> d = dist.TransformedDistribution(base, banana)
    >>> print(f"{d.log_prob(jnp.array([1.0, 0.5])):.4f}")
    -2.4629
    """

    arrays = ("net", "clamp")
    outputs_per_coordinate = 2

    def __init__(
        self, net: Callable[[Array], Array], split: int, *, clamp: float | Array = 2.0
    ) -> None:
        check_positive("clamp", clamp)
        super().__init__(net, split)
        self.clamp = clamp

    def move(self, b: Array, out: Array, inverse: bool) -> tuple[Array, Array]:
        s_raw, t = jnp.split(out, 2, axis=-1)
        s = softly_bounded(s_raw, self.clamp)
        return ((b - t) * jnp.exp(-s) if inverse else b * jnp.exp(s) + t), s
