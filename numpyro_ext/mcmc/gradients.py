"""Estimators of the gradient of the potential of all N rows, from a minibatch of B."""

from typing import NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from numpyro_ext._checks import check_count, if_given
from numpyro_ext._model.potential import Potential
from numpyro_ext._typing import Sites


class MinibatchGradient:
    r"""The plain estimate :math:`g = \nabla U_S(z)`: prior plus :math:`N/B` times the B
    rows of the batch S.

    Unbiased. Its variance per coordinate is
    :math:`\frac{N^2}{B}\operatorname{Var}_n(\nabla \log p(y_n \mid z))` for
    ``minibatch="replace"``, and :math:`(N-B)/(N-1)` times this for ``minibatch="epoch"``.

    >>> from numpyro_ext.mcmc import SGLD
    >>> kernel = SGLD(lambda: None, 1e-3, gradient=MinibatchGradient())
    """

    def init(self, z: Sites, potential: Potential) -> tuple[()]:
        return ()

    def estimate(
        self, rng_key: Array, i: Array, z: Sites, idx: Sites, potential: Potential, state: tuple[()]
    ) -> tuple[Array, Sites, tuple[()]]:
        value, grad = potential.value_and_grad(z, idx)
        return value, grad, state


class Anchor(NamedTuple):
    """Sites, and the potential of all rows and its gradient there."""

    z: Sites
    potential: Array
    grad: Sites


def _anchored(z: Sites, idx: Sites, potential: Potential, anchor: Anchor) -> tuple[Array, Sites]:
    """``U(c) + U_S(z) - U_S(c)`` and its gradient, with one batch S in both."""
    here, there = potential.value_and_grad(z, idx), potential.value_and_grad(anchor.z, idx)
    return jax.tree.map(
        lambda full, a, b: full + (a - b), (anchor.potential, anchor.grad), here, there
    )


class ControlVariate:
    r"""The estimate :math:`g = \nabla U(c) + \nabla U_S(z) - \nabla U_S(c)`, with a fixed center c.

    This is equation 6. It is unbiased, with variance
    :math:`\frac{N^2}{B}\operatorname{Var}_n(\nabla\ell_n(z) - \nabla\ell_n(c))`, which falls as
    :math:`|z-c|^2`. Far from c, or in another mode, it is *worse* than :class:`MinibatchGradient`.
    Each step takes two minibatch gradients; all N rows are read once, when the chain starts. A
    chain that goes on refuses other data.

    :param dict center: constrained values of all latent sites, such as ``guide.median(params)`` of
        an ``AutoDelta``; values of deterministic sites are left out.
    :param int chunk_size: rows per piece in which the gradient of all rows is computed.

    **Reference:** *Control Variates for Stochastic Gradient MCMC*, Jack Baker, Paul Fearnhead,
    Emily B. Fox, Christopher Nemeth (Statistics and Computing, 2019)

    >>> from numpyro_ext.mcmc import SGLD
    >>> kernel = SGLD(normal_mean, 1e-4, gradient=ControlVariate({"z": 3.0}))
    """

    def __init__(self, center: Sites, *, chunk_size: int | None = None) -> None:
        self._center = center
        self._chunk_size = if_given(check_count, "chunk_size", chunk_size)

    def init(self, z: Sites, potential: Potential) -> Anchor:
        potential.check_all_rows("ControlVariate")
        center = potential.unconstrain("ControlVariate's center", self._center)
        return Anchor(center, *potential.full_value_and_grad(center, self._chunk_size))

    def estimate(
        self, rng_key: Array, i: Array, z: Sites, idx: Sites, potential: Potential, state: Anchor
    ) -> tuple[Array, Sites, Anchor]:
        value, grad = _anchored(z, idx, potential, state)
        return value, grad, state


class SVRG:
    r""":class:`ControlVariate` with a center that follows the chain: :math:`c \leftarrow z` when
    ``i % refresh_every == 0``.

    No mode is needed beforehand, and the chain may travel. Unbiased given c. A step costs two
    minibatch gradients, and :math:`N/` ``refresh_every`` rows on average (algorithm 2).

    :param int refresh_every: transitions between two gradients of all rows.
    :param int chunk_size: as for :class:`ControlVariate`.

    **Reference:** *Variance Reduction in Stochastic Gradient Langevin Dynamics*, Avinava Dubey,
    Sashank J. Reddi, Barnabas Poczos, Alexander J. Smola, Eric P. Xing, Sinead A. Williamson
    (NeurIPS 2016)

    >>> from numpyro_ext.mcmc import SGLD
    >>> kernel = SGLD(lambda: None, 1e-3, gradient=SVRG(100))
    """

    def __init__(self, refresh_every: int, *, chunk_size: int | None = None) -> None:
        self._refresh_every = check_count("refresh_every", refresh_every)
        self._chunk_size = if_given(check_count, "chunk_size", chunk_size)

    def init(self, z: Sites, potential: Potential) -> Anchor:
        potential.check_all_rows("SVRG")
        return Anchor(z, *potential.full_value_and_grad(z, self._chunk_size))

    def estimate(
        self, rng_key: Array, i: Array, z: Sites, idx: Sites, potential: Potential, state: Anchor
    ) -> tuple[Array, Sites, Anchor]:
        # At i = 0 the anchor is the one that `init` has just computed.
        anchor = lax.cond(
            (i % self._refresh_every == 0) & (i > 0),
            lambda: jax.tree.map(
                lambda new, old: jnp.asarray(new, old.dtype), self.init(z, potential), state
            ),
            lambda: state,
        )
        value, grad = _anchored(z, idx, potential, anchor)
        return value, grad, anchor
