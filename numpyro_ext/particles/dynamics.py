"""Hamiltonian dynamics with a velocity field in place of the noise."""

import copy
from dataclasses import dataclass, field
from typing import Any

from jax import Array, random
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ext._checks import check_choice, check_nonnegative, check_positive, summary
from numpyro_ext._typing import Float
from numpyro_ext.particles.base import ParticleField
from numpyro_ext.scores import as_kernel


@dataclass(kw_only=True, eq=False, repr=False)
class PSGHMC:
    r"""Stochastic-gradient HMC of particles, with a field of the momenta in place of the noise.

    The state is the particles x and their momenta r, ``(m, d)`` each. The target of r is
    :math:`N(0, S I)`, and :math:`V^r = F(r, -r / S)` is the velocity of a field
    :math:`F(x, \nabla \log p) \approx \nabla \log p - \nabla \log q` on the momenta. One step is,
    with all right sides at the old state,

    .. math::
        \text{"det":} \quad x \leftarrow x + \epsilon\, r / S, \quad
            r \leftarrow r + \epsilon\, (g + C V^r); \\
        \text{"fgh":} \quad x \leftarrow x - \epsilon\, V^r, \quad
            r \leftarrow r + \epsilon\, (F(x, g) + C V^r).

    The first replaces the noise of SGHMC by a deterministic friction and goes on moving on level
    sets of the density. The second also follows the Hamiltonian flow of the KL divergence, and
    comes to rest. It is given to :class:`ParVI` in place of an optimiser, with :class:`Blob` as the
    default field.

    **Bias.** As for the field, which by its smoothing makes both x and r too narrow in many
    dimensions, and the step size. Fields that smooth the gradient as well (``SVGD`` and the like)
    are refused, because the identities behind the dynamics do not hold for them.

    :param float step_size: :math:`\epsilon`, positive.
    :param str flow: ``"det"`` or ``"fgh"``.
    :param float friction: C, not negative.
    :param float mass: S, positive.
    :param kernel: the kernel of the field on the momenta; None means the field's.

    **Reference:** Liu, Zhuo and Zhu, *Understanding MCMC dynamics as flows on the Wasserstein
    space* (ICML 2019), eq. 13 and 14.

    >>> from numpyro_ext.particles import Blob
    >>> x, r = jnp.array([[0.0], [1.0]]), jnp.array([[3.0], [-3.0]])
    >>> x, r = PSGHMC(0.1, flow="det").step(x, r, -x, Blob())
    >>> print(x.ravel())
    [0.3 0.7]
    """

    step_size: float = field(kw_only=False)
    flow: str = "det"
    friction: float = 0.1
    mass: float = 1.0
    kernel: Any = None

    def __post_init__(self) -> None:
        check_positive("step_size", self.step_size)
        check_choice("flow", self.flow, ("det", "fgh"))
        check_nonnegative("friction", self.friction)
        check_positive("mass", self.mass)
        self.kernel = None if self.kernel is None else as_kernel(self.kernel)

    def __repr__(self) -> str:
        return summary(self)

    def init(self, rng_key: Array, x: Array) -> Float[Array, "m d"]:
        """Momenta of the particles x, drawn from N(0, mass I)."""
        scale = jnp.sqrt(jnp.asarray(self.mass, x.dtype))
        return scale * random.normal(rng_key, x.shape, x.dtype)

    def check_field(self, field: Any) -> None:
        """A ``TypeError`` unless the field is the gradient minus a score estimate."""
        if not isinstance(field, ParticleField) or not field.subtracts_score:
            raise TypeError(
                f"field is {field!r}, which is not grad log p minus an estimate of grad log q, as"
                " PSGHMC needs; use Blob(), GFSD() or GFSF()."
            )

    def step(
        self, x: ArrayLike, r: ArrayLike, grad_log_p: ArrayLike, field: ParticleField
    ) -> tuple[Float[Array, "m d"], Float[Array, "m d"]]:
        """One step of the particles x and momenta r, ``(m, d)`` each."""
        self.check_field(field)
        x, r, g = jnp.asarray(x), jnp.asarray(r), jnp.asarray(grad_log_p)
        of_momenta = field
        if self.kernel is not None:
            of_momenta = copy.copy(field)
            of_momenta.kernel = self.kernel
        v_r = of_momenta.velocity(r, -r / self.mass)
        if self.flow == "det":
            dx, dr = r / self.mass, g + self.friction * v_r
        else:
            dx, dr = -v_r, field.velocity(x, g) + self.friction * v_r
        epsilon = jnp.asarray(self.step_size, x.dtype)
        return x + epsilon * dx, r + epsilon * dr
