"""The probability simplex: a reparameterisation, and steps of Patterson & Teh (2013), table 1."""

from collections.abc import Callable

import jax
from jax import Array, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.reparam import Reparam

from numpyro_ext._checks import check_choice, check_nonnegative, check_positive
from numpyro_ext._numpyro import unwrap_distribution, wrap_distribution

# A parameterisation maps (theta, counts, alpha, zeta) to A grad, Gam and A^(1/2) zeta, written out
# so that nothing is divided by a probability that may be 0. The diagonals of A that are not bounded
# get a bound, where they are constant and have no divergence: the law is the same in the limit.
Terms = tuple[Array, Array, Array]


def _total(x: Array) -> Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _reduced_mean(theta: Array, counts: Array, alpha: Array, zeta: Array, bound: Array) -> Terms:
    pi = jnp.append(theta, jnp.maximum(1 - _total(theta), 0), axis=-1)
    n, a, K = _total(counts + alpha), counts + alpha - 1, pi.shape[-1]
    noise = jnp.sqrt(pi) * zeta - pi * _total(jnp.sqrt(pi) * zeta)  # (diag(pi) - pi pi')^(1/2)
    gradient, correction = a - pi * _total(a), 1 - K * pi
    return (gradient / n)[..., :-1], (correction / n)[..., :-1], (noise / jnp.sqrt(n))[..., :-1]


def _reduced_natural(theta: Array, counts: Array, alpha: Array, zeta: Array, bound: Array) -> Terms:
    pi = jax.nn.softmax(jnp.append(theta, jnp.zeros_like(theta[..., :1]), axis=-1))
    n, a = _total(counts + alpha), counts + alpha
    b = jnp.minimum(1 / pi, n * bound)
    divergence = jnp.where(b < n * bound, 1 - b, 0.0)

    def against_last(x: Array) -> Array:
        return x[..., :-1] - x[..., -1:]

    gradient, correction = against_last(b * (a - pi * n)), against_last(divergence)
    return gradient / n, correction / n, against_last(zeta * jnp.sqrt(b)) / jnp.sqrt(n)


def _expanded_mean(theta: Array, counts: Array, alpha: Array, zeta: Array, bound: Array) -> Terms:
    theta = jnp.abs(theta)
    gradient = counts + alpha - 1 - theta * (_total(counts) / _total(theta) + 1)
    return gradient, jnp.ones_like(theta), jnp.sqrt(theta) * zeta


def _expanded_natural(
    theta: Array, counts: Array, alpha: Array, zeta: Array, bound: Array
) -> Terms:
    A = jnp.minimum(jnp.exp(-theta), bound)
    gradient = counts + alpha - _total(counts) * jax.nn.softmax(theta) - jnp.exp(theta)
    return A * gradient, jnp.where(A < bound, -A, 0.0), jnp.sqrt(A) * zeta


_TERMS: dict[str, Callable[..., Terms]] = {
    "reduced-mean": _reduced_mean,
    "reduced-natural": _reduced_natural,
    "expanded-mean": _expanded_mean,
    "expanded-natural": _expanded_natural,
}


def _project(theta: Array) -> Array:
    """The nearest point of the simplex (in all K probabilities), without its last entry."""
    x = jnp.append(theta, 1 - _total(theta), axis=-1)
    down = -jnp.sort(-x, axis=-1)
    excess = (jnp.cumsum(down, axis=-1) - 1) / jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    shift = jnp.max(jnp.where(down > excess, excess, -jnp.inf), axis=-1, keepdims=True)
    return jnp.maximum(x - shift, 0)[..., :-1]


def simplex_langevin_step(
    rng_key: Array,
    theta: Array,
    counts: ArrayLike,
    alpha: ArrayLike,
    step_size: ArrayLike,
    *,
    parameterization: str = "expanded-mean",
    temperature: ArrayLike = 1.0,
) -> Array:
    r"""One Riemannian Langevin step towards :math:`\operatorname{Dirichlet}(\alpha + n)`, in one of
    four coordinates.

    .. math:: \theta' = \theta + \epsilon (A \nabla \log p(\theta) + T\, \Gamma)
              + \sqrt{2 \epsilon T}\, A^{1/2} \zeta, \qquad
              \Gamma_k = \textstyle\sum_l \partial A_{kl} / \partial \theta_l,

    with :math:`n_k` counts of K categories, :math:`n = \sum_k n_k` (in A:
    :math:`\bar n = \sum_k n_k + \alpha_k`), and

    - ``"expanded-mean"``, dimension K: :math:`\pi = |\theta|/\sum|\theta|`,
      :math:`A = \mathrm{diag}(\theta)`, :math:`\Gamma_j = 1`;
    - ``"expanded-natural"``, K: :math:`\pi = \mathrm{softmax}\,\theta`,
      :math:`A = \mathrm{diag}(e^{-\theta})`, :math:`\Gamma_j = -e^{-\theta_j}`;
    - ``"reduced-mean"``, K-1: :math:`\theta_k = \pi_k`,
      :math:`A = (\mathrm{diag}(\pi) - \pi\pi^\top)/\bar n`,
      :math:`\Gamma_j = (1 - K\pi_j)/\bar n`;
    - ``"reduced-natural"``, K-1: :math:`\theta_k = \log\pi_k/\pi_K`,
      :math:`A = (\mathrm{diag}(1/\pi) + 11^\top/\pi_K)/\bar n`,
      :math:`\Gamma_j = (1/\pi_K - 1/\pi_j)/\bar n`.

    The expanded forms have :math:`|\theta_k|` (natural: :math:`e^{\theta_k}`)
    :math:`\sim \operatorname{Gamma}(\alpha_k, 1)` a priori. The paper's table is corrected: there
    the reduced-mean gradient lacks a -1, some entries lack 1/n, and the reduced-natural
    :math:`\Gamma` is not the divergence of A.

    Biased at a fixed step. ``"expanded-mean"`` returns :math:`|\theta'|`; ``"reduced-mean"`` can
    leave the simplex and is then put back at its nearest point, another bias. In the natural forms
    :math:`e^{-\theta_j}` and :math:`1/(\pi_j \bar n)` are at most :math:`1/(2\epsilon (1 + n_j +
    \alpha_j))`, and constant beyond it, so that a step is at most about 1 where a probability is
    near 0. For T other than 1 each draws from
    :math:`p^{1/T}` in its own coordinates.

    :param rng_key: random number generator key.
    :param theta: ``(..., K)`` or, reduced, ``(..., K-1)``.
    :param counts: ``(..., K)``, or ``(K,)`` for all; for a minibatch, N/B times its counts.
    :param alpha: a number or ``(..., K)``, positive.
    :param step_size: :math:`\epsilon`.
    :param str parameterization: one of the four names.
    :param temperature: T.
    :return: the new ``theta``.

    **Reference:** *Stochastic Gradient Riemannian Langevin Dynamics on the Probability Simplex*,
    Sam Patterson, Yee Whye Teh (NeurIPS 2013), table 1, eq. 9-11

    >>> counts = jnp.array([6.0, 3.0, 0.0])
    >>> def step(theta, key):
    ...     return (simplex_langevin_step(key, theta, counts, 1.0, 0.02),) * 2
    >>> keys = jax.random.split(jax.random.key(0), 1000)
    >>> _, theta = jax.lax.scan(step, jnp.ones((50, 3)), keys)
    >>> pi = theta / theta.sum(-1, keepdims=True)
    >>> bool(jnp.abs(pi.mean((0, 1)) - jnp.array([7, 4, 1]) / 12).max() < 0.02)
    True
    """
    check_choice("parameterization", parameterization, tuple(_TERMS))
    check_positive("step_size", step_size)
    check_nonnegative("temperature", temperature)
    if not isinstance(alpha, Tracer) and not np.all(np.asarray(alpha) > 0):
        raise ValueError(f"alpha is {alpha}; it must be positive.")
    dtype = jnp.result_type(float, theta)
    theta, counts, alpha = (jnp.asarray(x, dtype) for x in (theta, counts, alpha))
    K = theta.shape[-1] + parameterization.startswith("reduced")
    if counts.shape[-1:] != (K,):
        raise ValueError(
            f"counts has shape {counts.shape} and theta {theta.shape}; with '{parameterization}'"
            f" the last dimension of counts must be {K}."
        )
    zeta = random.normal(rng_key, (*theta.shape[:-1], K), dtype)
    eps, T = jnp.asarray(step_size, dtype), jnp.asarray(temperature, dtype)
    bound = 0.5 / (eps * (1 + counts + alpha))
    gradient, correction, noise = _TERMS[parameterization](theta, counts, alpha, zeta, bound)
    theta = jnp.abs(theta) if parameterization == "expanded-mean" else theta
    theta = theta + eps * (gradient + T * correction) + jnp.sqrt(2 * eps * T) * noise
    if parameterization == "expanded-mean":
        return jnp.abs(theta)
    return _project(theta) if parameterization == "reduced-mean" else theta


class GammaSimplexReparam(Reparam):
    r"""A ``Dirichlet`` site as K independent Gammas, divided by their sum.

    .. math:: \theta_k \sim \operatorname{Gamma}(\alpha_k, 1), \qquad
              \pi = \theta / \textstyle\sum_j \theta_j \sim \operatorname{Dirichlet}(\alpha).

    The latent site is ``<name>_gamma``, and the site itself becomes deterministic. With
    :class:`ExpandedMean` it makes :class:`SGRLD` run on probabilities. For latent sites only.

    **Reference:** *Stochastic Gradient Riemannian Langevin Dynamics on the Probability Simplex*,
    Sam Patterson, Yee Whye Teh (NeurIPS 2013), section 3

    >>> from numpyro.handlers import reparam
    >>> from numpyro_ext.mcmc import SGRLD, ExpandedMean
    >>> def model(counts):
    ...     p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    ...     numpyro.sample("counts", dist.Multinomial(counts.sum(), p), obs=counts)
    >>> model = reparam(model, config={"p": GammaSimplexReparam()})
    >>> kernel = SGRLD(model, 0.003, metric=ExpandedMean())
    >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=2000, progress_bar=False)
    >>> mcmc.run(random.key(0), jnp.array([70, 20, 10]))
    >>> abs(mcmc.get_samples()["p"].mean(0)[0] - 71 / 103) < 0.05
    Array(True, dtype=bool)
    """

    def __call__(self, name: str, fn: dist.Distribution, obs: Array | None) -> tuple[None, Array]:
        base, expand_shape, event_dim = unwrap_distribution(fn)
        if obs is not None or not isinstance(base, dist.Dirichlet):
            what = f"a {type(base).__name__}" if obs is None else "observed"
            raise ValueError(
                f"site '{name}' is {what}; GammaSimplexReparam is for latent Dirichlet sites."
            )
        gammas = dist.Gamma(base.concentration).to_event(1)
        theta = numpyro.sample(f"{name}_gamma", wrap_distribution(gammas, expand_shape, event_dim))
        return None, jnp.asarray(theta) / jnp.sum(theta, axis=-1, keepdims=True)
