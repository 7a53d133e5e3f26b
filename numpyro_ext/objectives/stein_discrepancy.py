"""Stein discrepancy of a guide, minimised (Liu et al., 2016; Ranganath et al., 2016)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_positive, check_several
from numpyro_ext._typing import Params
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples
from numpyro_ext.scores import IMQ, as_kernel
from numpyro_ext.scores.discrepancy import squared_ksd

# Up to this many dimensions the divergence of a vector field is exact.
_EXACT_UP_TO = 20


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

    **Operator variational inference.** ``kernel="critic"`` has a network in place of the functions
    of the kernel, the vector field f of ``with_critic(guide, output_dim=d)``, and the loss is the
    minimax

    .. math::
        \max_f E_q\big[f(z)^\top \nabla \log p^*(z) + \mathrm{div} f(z) - \lambda\, |f(z)|^2\big] =
        \frac{1}{4 \lambda} E_q |\nabla \log q - \nabla \log p^*|^2,

    a Fisher divergence without the score of q. The guide descends and the critic ascends, in one
    scalar loss with the paths separated; the value is too small until the critic is optimal. The
    divergence of f is exact in up to 20 dimensions, by d derivatives, and above them by one random
    direction for each draw.

    **When it fails.** The discrepancy is blind to the weights of well separated modes, because
    scores are local. Far from the posterior its gradient may be flat. It is not a bound on the
    evidence, and parameters of the model, over which its minimum means nothing, are an error. With
    a subsampled likelihood under global latents the noise of the scores enters squared, which makes
    the guide too wide; if plates enclose every site, each of their elements has its own
    discrepancy, and their sum is scaled by N/M.

    :param int num_particles: number of draws K; at least 2 for ``statistic="u"``.
    :param kernel: a kernel of :mod:`numpyro_ext.scores` or a function of ``(n, d)`` and ``(m, d)``
        points that gives an ``(n, m)`` matrix; defaults to ``IMQ("median_distance")``. A bandwidth
        rule is resolved on the draws, without a gradient. ``"critic"``: see above.
    :param str statistic: ``"u"`` or ``"v"``, of a kernel.
    :param float critic_penalty: :math:`\lambda`, positive, of a critic.

    **References:** *A kernelized Stein discrepancy for goodness-of-fit tests*, Liu et al., ICML
    2016 (eqs. 9 and 14); *Operator variational inference*, Ranganath et al., NIPS 2016

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
        critic_penalty: float = 1.0,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("statistic", statistic, ("u", "v"))
        check_positive("critic_penalty", critic_penalty)
        if kernel != "critic":
            kernel = as_kernel(IMQ("median_distance") if kernel is None else kernel)
            if statistic == "u":
                why = "the U-statistic is a mean over pairs; use statistic='v'"
                check_several(num_particles, why)
        self.kernel, self.statistic, self.critic_penalty = kernel, statistic, critic_penalty
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
        if self.kernel == "critic":
            return self._with_critic(draws, samples, z, score), state
        return draws.total(self._squared_ksd(z, score)), state

    def _with_critic(self, draws: Draws, samples: Samples, z: Array, score: Array) -> Array:
        """The value of the critic, which the guide minimises and the critic maximises."""
        critic = critic_of(draws, samples.group, "SteinDiscrepancy() with a kernel", field=True)

        def value(params: Params, z: Array, score: Array) -> Array:
            f = partial(critic, params)
            stein = jnp.sum(f(z) * score, -1) + divergence(draws.extra_key, f, z)
            penalty = self.critic_penalty * jnp.sum(f(z) ** 2, -1)
            return draws.total(jnp.mean(stein - penalty, 0))

        gain = value(draws.params, *stop_gradient((z, score)))
        return value(draws.stopped, z, score) - (gain - stop_gradient(gain))

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
    """An error for a discrepancy: its minimum over a parameter of the model means nothing."""
    for site in draws.layout.model_params:
        raise ValueError(
            f"{type(draws.objective).__name__}: the model has the param site '{site}', but the"
            " minimum over it means nothing; train it with VRELBO, then substitute its value."
        )


def divergence(rng_key: Array, field: Callable[[Array], Array], z: Array) -> Array:
    """``(...)``, the divergence of a vector field at points ``(..., d)``; above 20 dimensions by
    one random direction for each point, without bias."""

    def along(v: Array) -> Array:
        return jnp.sum(v * jax.jvp(field, (z,), (v,))[1], -1)

    d = z.shape[-1]
    if d > _EXACT_UP_TO:
        return along(random.rademacher(rng_key, z.shape, z.dtype))
    axes = jnp.eye(d, dtype=z.dtype)
    return jnp.sum(jax.vmap(lambda axis: along(jnp.broadcast_to(axis, z.shape)))(axes), 0)
