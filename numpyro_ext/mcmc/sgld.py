"""Stochastic gradient Langevin dynamics: Welling & Teh (2011), eq. 4."""

from dataclasses import dataclass
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.modes import Mode
from numpyro_ext._model.potential import Potential
from numpyro_ext.mcmc.base import GradFn, SGMCMCKernel, Transition, kernel_state
from numpyro_ext.mcmc.laws import choose_sgld
from numpyro_ext.mcmc.settings import Settings

IMPLIED = (
    r"variance over the right one that the last gradient implies, in the mean over coordinates and"
    r" over draws: :math:`1 + \epsilon\, g^\top A g / (2 n T)`, A being the preconditioner."
)

SGLDState = kernel_state("SGLDState", __name__, implied_variance_ratio=IMPLIED)


def implied_variance_ratio(g: Array, drift: Array, eps: Array, T: Array) -> Array:
    r"""
    :math:`1 + \epsilon\, g^\top A g / (2 n T)`; its mean is the mean of the variance ratios.

    On a Gaussian with curvature h, stationarity of
    :math:`z' = z - \epsilon A g + \sqrt{2 \epsilon T A}\, \zeta` gives
    :math:`h \mathrm{Var} = T + \tfrac{\epsilon}{2} A\, E g^2` for a diagonal A, whatever h and the
    noise of g are. Where T is 0, T = 1 is taken.

    :param drift: ``A g``, ``(n,)``.
    """
    return 1 + eps * jnp.vdot(g, drift) / (2 * len(g) * jnp.where(T > 0, T, 1))


@dataclass(kw_only=True, eq=False, repr=False)
class SGLD(SGMCMCKernel):
    r"""
    Stochastic gradient Langevin dynamics: gradient descent with a minibatch, plus noise.

    .. math::
        z' = z - \epsilon g(z) + \sqrt{2 \epsilon T}\, \zeta, \qquad \zeta \sim N(0, I),

    where g estimates the gradient of the potential of all N data, so :math:`\epsilon` is of the
    order of the posterior variance, :math:`O(1/N)`. The paper's step is :math:`2\epsilon`.

    The kernel is biased at a fixed step: with curvature h and gradient noise of variance
    :math:`s^2`, which grows as :math:`N^2/B` (see :class:`ControlVariate`), the draws of a Gaussian
    target have the variance :math:`(2T + \epsilon s^2) / (h (2 - \epsilon h))` instead of
    :math:`T/h`. The extra field ``implied_variance_ratio`` shows both errors without a reference:
    its mean over the draws is the mean ratio of the variances to the right ones. The chain diverges
    for :math:`\epsilon h > 2`, so sites of unequal scale mix at unequal speed.

    :param step_size: positive float or schedule, in units of the squared latent; with None the
        kernel finds it, in whitened coordinates.

    **Reference:** *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, Max Welling, Yee
    Whye Teh (ICML 2011), eq. 4

    >>> x = jnp.sin(jnp.arange(100.0)) + 3
    >>> kernel = SGLD(normal_mean, 1e-3)
    >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
    >>> mcmc.run(random.key(0), x, subsample_size=10)
    >>> abs(mcmc.get_samples()["z"].mean() - 2.97) < 0.1
    Array(True, dtype=bool)
    """

    state_class = SGLDState

    def choose(self, noise: np.ndarray, normal: Mode, potential: Potential) -> Settings:
        return choose_sgld(noise, self.max_bias, stiffness=normal.stiffness)

    def step(
        self, rng_key: Array, state: Any, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> Transition:
        estimate = grad_fn(z)
        g = estimate.grad
        zeta = random.normal(rng_key, z.shape, z.dtype)
        z = z - eps * g + jnp.sqrt(2 * eps * T) * zeta
        fields = {"implied_variance_ratio": implied_variance_ratio(g, g, eps, T)}
        return Transition(z, estimate, fields)
