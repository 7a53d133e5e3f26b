"""Stochastic gradient Langevin dynamics: Welling & Teh (2011), eq. 4."""

from typing import Any, NamedTuple

from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._typing import Sites
from numpyro_ext.mcmc._grad_fn import GradFn
from numpyro_ext.mcmc.base import SGMCMCKernel
from numpyro_ext.mcmc.minibatch import PlateState

__all__ = ["SGLD", "SGLDState"]


class SGLDState(NamedTuple):
    """
    State of one chain; the fields that all stochastic-gradient kernels have:

     - **i** - number of transitions made, from 0; it is not reset after warmup.
     - **z** - dict of the latent sites in unconstrained space.
     - **potential_energy** - minibatch potential where the gradient was taken last.
     - **grad_norm** - 2-norm of that gradient estimate.
     - **step_size** - step size of the last transition.
     - **diverging** - whether a transition of the last draw met a value that was not finite.
     - **sampling** - False in the exploration stage of a cyclical schedule.
     - **gradient** - state of the gradient estimator.
     - **plates** - ``{name: (epoch, offset, rng_key)}`` for ``minibatch="epoch"``, else empty.
     - **rng_key** - random number generator key of the next transition.
    """

    i: Array
    z: Sites
    potential_energy: Array
    grad_norm: Array
    step_size: Array
    diverging: Array
    sampling: Array
    gradient: Any
    plates: dict[str, PlateState]
    rng_key: Array


class SGLD(SGMCMCKernel):
    r"""
    Stochastic gradient Langevin dynamics [1]: gradient descent with a minibatch, plus noise.

    .. math::

        z' = z - \epsilon g(z) + \sqrt{2 \epsilon T}\, \zeta, \qquad \zeta \sim N(0, I),

    where g estimates the gradient of the potential of all N data, so :math:`\epsilon` is of the order of the posterior
    variance, :math:`O(1/N)`. The paper's step is :math:`2\epsilon`.

    Biased at a fixed step: with curvature h and gradient noise of variance :math:`s^2` a Gaussian target
    comes out with variance :math:`(2T + \epsilon s^2) / (h (2 - \epsilon h))` for :math:`T/h`. The noise counts as
    long as :math:`\epsilon s^2` is not small against :math:`2T`, and :math:`s^2` grows as :math:`N^2/B`; see
    :class:`ControlVariate`. It diverges for :math:`\epsilon h > 2`, so sites of unequal scale mix at unequal speed.

    :param model: Python callable containing NumPyro primitives.
    :param step_size: positive float or schedule, in units of the squared latent.
    :param common: keyword arguments of :class:`SGMCMCKernel`: ``temperature``, ``gradient``, ``minibatch``,
        ``steps_per_sample``, ``sharding``, ``init_strategy``.

    **References:**

    1. *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, Max Welling, Yee Whye Teh (ICML 2011), eq. 4

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from jax import random
        >>> from numpyro.infer import MCMC
        >>> from numpyro_ext.mcmc import SGLD
        >>> def model(x):
        ...     loc = numpyro.sample("loc", dist.Normal(0, 10))
        ...     with numpyro.plate("data", len(x), subsample_size=10) as idx:
        ...         numpyro.sample("x", dist.Normal(loc, 1), obs=x[idx])
        >>> x = jnp.sin(jnp.arange(100.0)) + 3
        >>> mcmc = MCMC(SGLD(model, 1e-3), num_warmup=200, num_samples=2000, progress_bar=False)
        >>> mcmc.run(random.key(0), x)
        >>> abs(mcmc.get_samples()["loc"].mean() - 3) < 0.1
        Array(True, dtype=bool)
    """

    state_class = SGLDState

    def step(
        self, rng_key: Array, state: SGLDState, z: Array, grad_fn: GradFn, eps: Array, T: Array
    ) -> tuple[Array, dict[str, Array], Array, Array]:
        potential, g = grad_fn(z)
        zeta = random.normal(rng_key, z.shape, z.dtype)
        return z - eps * g + jnp.sqrt(2 * eps * T) * zeta, {}, potential, g
