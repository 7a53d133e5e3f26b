"""Stein discrepancy of a guide, minimised (Liu et al., 2016)."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.samples import Samples
from numpyro_ext.scores import IMQ, as_kernel
from numpyro_ext.scores.discrepancy import squared_ksd


class SteinDiscrepancy(Objective):
    r"""Squared kernel Stein discrepancy of the guide from the posterior, by draws alone.

    With the unconstrained vectors :math:`z_k \in R^d` of K draws and
    :math:`s_k = \nabla \log p^*(z_k)`, the loss is the mean over pairs of

    .. math::
        k_0(z_i, z_j) = k\, s_i^\top s_j + s_i^\top \nabla_{z_j} k + s_j^\top \nabla_{z_i} k
        + \mathrm{tr}\, \partial_{z_i} \partial_{z_j} k,

    in units of 1/length squared: over the pairs :math:`i \ne j` (``statistic="u"``, unbiased, and
    negative half of the time once q is right) or over all pairs (``"v"``, never negative, biased
    up by :math:`\frac1K E\,k_0(z, z)`). The gradient flows through the draws and their scores, so a
    step takes second derivatives of the model.

    **When it fails.** The discrepancy is blind to the weights of well separated modes, because
    scores are local. Far from the posterior its gradient may be flat. It is not a bound on the
    evidence, and parameters of the model, over which its minimum means nothing, are an error. With
    a subsampled likelihood under global latents the noise of the scores enters squared, which makes
    the guide too wide; if plates enclose every site, each of their elements has its own
    discrepancy, and their sum is scaled by N/M.

    :param int num_particles: number of draws K; at least 2 for ``statistic="u"``.
    :param kernel: a kernel of :mod:`numpyro_ext.scores` or a function of ``(n, d)`` and ``(m, d)``
        points that gives an ``(n, m)`` matrix; defaults to ``IMQ("median_distance")``. A bandwidth
        rule is resolved on the draws, without a gradient.
    :param str statistic: ``"u"`` or ``"v"``.

    **Reference:** *A kernelized Stein discrepancy for goodness-of-fit tests*, Liu et al., ICML 2016
    (eqs. 9 and 14).

    >>> guide, x = AutoNormal(normal_mean, init_scale=1.), jnp.array([1.5])
    >>> svi = SVI(normal_mean, guide, optax.adam(0.02), SteinDiscrepancy(50))
    >>> params = svi.run(jax.random.key(0), 300, x, progress_bar=False).params
    >>> loc, scale = params["z_auto_loc"], params["z_auto_scale"]
    >>> bool(abs(loc - 0.75) < 0.25), bool(abs(scale - 0.707) < 0.2)
    (True, True)
    """

    def __init__(
        self,
        num_particles: int = 64,
        kernel: Any = None,
        *,
        statistic: str = "u",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("statistic", statistic, ("u", "v"))
        if statistic == "u":
            why = "the U-statistic is a mean over pairs; use statistic='v'"
            check_several("num_particles", num_particles, why)
        self.kernel = as_kernel(IMQ("median_distance") if kernel is None else kernel)
        self.statistic = statistic
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        refuse_model_params(draws)
        samples = Samples(draws, implicit=False)

        def draw(key: Array) -> tuple[Array, Array, State]:
            particle = draws.particle(key)
            z = samples.vector_of(particle)
            score = jax.grad(lambda z: jnp.sum(samples.log_p(key, z)))(z)
            return z, score, particle.state

        z, score, state = draws.map(draw, draws.keys)  # (K, *units, d)
        return draws.total(self._squared_ksd(z, score)), state

    def _squared_ksd(self, z: Array, score: Array) -> Array:
        """``(*units)``, the discrepancy of the K draws of each unit."""

        def ksd(z: Array, score: Array) -> Array:
            return squared_ksd(z, score, self.kernel, statistic=self.statistic)

        K, *units, d = z.shape
        if not units:
            return ksd(z, score)
        rows = jax.vmap(ksd, 1)(z.reshape(K, -1, d), score.reshape(K, -1, d))
        return rows.reshape(units)


def refuse_model_params(draws: Draws) -> None:
    """An error for a discrepancy, whose minimum over a parameter of the model means nothing."""
    for site in draws.layout.model_params:
        raise ValueError(
            f"{type(draws.objective).__name__}: the model has the param site '{site}', but the"
            " minimum over it means nothing; train it with VRELBO, then substitute its value."
        )
