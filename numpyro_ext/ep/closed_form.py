"""Moments of a factor times its cavity from a formula."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array
import jax.numpy as jnp

from numpyro_ext.ep.projection import (
    LogFactor,
    Projected,
    Projection,
    Tilted,
    are_finite,
    inverse,
    smallest,
)
from numpyro_ext.ep.sampling import ImportanceSampling
from numpyro_ext.expfam.linalg import matvec, symmetric


@dataclass(eq=False)
class ClosedForm(Projection):
    r"""Moments that a function of yours computes, in all D coordinates of the model.

    .. math:: \hat m,\ \hat S,\ \log Z \quad\text{of}\quad
        \mathcal N(\theta; m, S)\, e^{\alpha l_n(\theta)} / Z

    The site is the difference :math:`(\hat S^{-1} - S^{-1}) / \alpha`, a full matrix. A factor that
    is much weaker than its cavity therefore loses digits in single precision.

    :param fn: ``(shift, precision, index, power) -> (mean, cov, log_normaliser)``: the natural
        parameters :math:`S^{-1} m`, of shape ``(D,)``, and :math:`S^{-1}`, of shape ``(D, D)``, of
        the cavity, the number of the factor and the power alpha, to the moments of the tilted
        distribution and log Z. It is traced, with a traced ``index``.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.ep import ClosedForm
        >>> y = jnp.array([1.0, 2.0])                                  # y_n ~ N(theta, 1)
        >>> def tilted(shift, precision, index, power):
        ...     cov = jnp.linalg.inv(precision + power)
        ...     return cov @ (shift + power * y[index]), cov, jnp.nan
        >>> found = ClosedForm(tilted).project(
        ...     None, jnp.zeros(1), jnp.eye(1), 1.0, index=1)
        >>> print(found.site_shift, found.site_precision)
        [2.] [[1.]]
    """

    fn: Callable[..., Any]

    exclusive = False
    whole = True
    takes_local = True

    def tilted(self, f: LogFactor, r: int, rng_key: Array | None, local: int) -> Tilted:
        raise NotImplementedError("ClosedForm has moments in all coordinates; call project.")

    def project(
        self,
        log_factor: LogFactor | None,
        mean: Array,
        cov: Array,
        power: float,
        rng_key: Array | None = None,
        index: Array | int | None = None,
        local: int = 0,
    ) -> Projected:
        precision = inverse(cov)
        shift = matvec(precision, mean)
        m, S, log_normaliser = self.fn(shift, precision, index, power)
        tilted = inverse(S)
        T = symmetric(tilted - precision) / power
        v = (matvec(tilted, m) - shift) / power
        ok = are_finite(v, T) & (smallest(S) > 0)
        no = jnp.array(False)
        return Projected(v, T, jnp.asarray(log_normaliser), ok, no, no)

    def draw(self, log_density: LogFactor, size: int, rng_key: Array) -> tuple[Array, Array]:
        return ImportanceSampling(num_samples=2048).draw(log_density, size, rng_key)
