"""A guide that draws by a Langevin diffusion from a normal to the posterior."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Normal, constraints

from numpyro_ext._checks import check_choice
from numpyro_ext.guides.along_gradient import AutoAlongGradient
from numpyro_ext.guides.networks import bounded, flat_module, mlp

# In standard deviations of the noise of a step, far beyond what a stable step does.
DRIFT = 10.0


@dataclass(kw_only=True, eq=False, repr=False)
class AutoLangevinDiffusion(AutoAlongGradient):
    r"""Annealed Langevin steps from a normal distribution, with a backward kernel for each.

    In the model's unconstrained space of dimension :math:`d`, with :math:`q_0 = N(loc,
    \mathrm{diag}\, scale^2)`, :math:`0 < \beta_1 < \dots < \beta_T = 1` and
    :math:`\log \pi_t = (1 - \beta_t) \log q_0 + \beta_t \log p^*`,

    .. math::
        z_0 \sim q_0, \qquad z_t = F_t(z_{t-1}) + \sigma_t \odot \xi_t, \quad \xi_t \sim N(0, I),
        \qquad F_t(z) = z + \tfrac12 \sigma_t^2 \odot \nabla \log \pi_t(z),

    with :math:`\sigma_{ti}^2 = 2 \epsilon_t / M_i` in coordinate i. With the backward kernels
    :math:`r_t(z_{t-1} \mid z_t) = N(F_t(z_t) + \sigma_t \odot s_t(z_t), \sigma_t^2)`,

    .. math::
        \log w = \log p^*(z_T) - \log q_0(z_0)
        + \sum_t \log \frac{r_t(z_{t-1} \mid z_t)}{N(z_t; F_t(z_{t-1}), \sigma_t^2)},
        \qquad L = E[\log w] \le \log p(x).

    * ``backward="ula"``: :math:`s_t = 0`, the reversal of a step that keeps :math:`\pi_t`
      (unadjusted Langevin annealing).
    * ``backward="learnt"``: :math:`s_t` is a network, at first 0 (Monte Carlo diffusion). The
      reversal of a diffusion is :math:`s_t = \sigma_t \odot \nabla \log (q_t / \pi_t)`, with the
      density :math:`q_t` of :math:`z_t`.

    Here loc, scale, :math:`\epsilon_t`, M and :math:`\beta_t` are trained too. The guide subtracts
    :math:`\sum_t \log r_t` in units of the noise by the factor ``{prefix}_reverse``: ``Trace_ELBO``
    is the bound L, and ``IWELBO`` one too, because :math:`E w = p(x)` for all parameters. The drift
    of a step is bounded smoothly by 10 :math:`\sigma_t` (x becomes 10 tanh(x / 10)). A draw costs T
    + 1 gradients of the model, and the gradient of a loss takes its second derivatives.

    *What it is biased by.* The bound is too low by the KL of the backward kernels from the right
    ones, which falls as 1 / T while the steps get shorter. Steps above twice the smallest variance
    of the posterior are unstable. On minibatches the bound holds for their joint density, and draws
    are too wide. A call without data takes the data of the first.

    :param int num_steps: the number T of steps.
    :param str backward: ``"ula"`` or ``"learnt"``.
    :param float step_size: the initial value of each :math:`\epsilon_t`, a squared length.
    :param reverse_network: for :math:`s_t`, a stax pair ``(init_fn, apply_fn)``, or a Flax or
        Equinox module, from :math:`(z_t - loc) / scale` and a one-hot vector of t, d + T numbers,
        to d numbers. The default is an MLP of ``hidden_dims`` (ELU), which starts at 0.

    **References:** *Monte Carlo variational auto-encoders*, Thin et al. (ICML 2021), for ``"ula"``;
    *Score-based diffusion meets annealed importance sampling*, Doucet et al. (NeurIPS 2022), for
    ``"learnt"``; *Langevin diffusion variational inference*, Geffner and Domke (AISTATS 2023), for
    both

    >>> guide = AutoLangevinDiffusion(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 2000, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(1000,))
    >>> bool(jax.numpy.corrcoef(draws["x"], draws["y"])[0, 1] > 0.5)  # AutoNormal has 0
    True
    """

    num_steps: int = 8
    step_size: float = 0.01
    backward: str = "learnt"

    def __post_init__(self) -> None:
        check_choice("backward", self.backward, ("ula", "learnt"))
        if self.backward == "ula" and self.reverse_network is not None:
            raise ValueError(
                "backward='ula' has no network, but reverse_network was given; use"
                " backward='learnt', or leave it out."
            )
        super().__post_init__()

    def carry(
        self, z: Array, noise: Array, grad_u: Callable[[Array], Array], loc: Array, scale: Array
    ) -> tuple[Array, Array]:
        T = self.num_steps
        steps, mass = self.steps()
        shares: Any = numpyro.param(
            f"{self.prefix}_annealing", jnp.full(T, 1 / T), constraint=constraints.simplex
        )
        score = self._score()

        def drift(z: Array, g: Array, beta: Array, sigma: Array) -> Array:
            slope = (1 - beta) * (loc - z) / scale**2 - beta * g
            return bounded(0.5 * sigma * slope, DRIFT)

        def step(state: tuple[Array, Array], parts: Any) -> tuple[tuple[Array, Array], Array]:
            z, g = state
            xi, eps, beta, one_hot = parts
            sigma = jnp.sqrt(2 * eps / mass)
            moved = drift(z, g, beta, sigma) + xi
            z = z + sigma * moved
            g = grad_u(z)
            s = score(jnp.concatenate([(z - loc) / scale, one_hot]))
            back = moved + drift(z, g, beta, sigma) + s  # minus the noise of the way back
            return (z, g), Normal(0.0, 1.0).log_prob(back).sum()

        parts = noise, steps, jnp.cumsum(shares), jnp.eye(T, dtype=noise.dtype)
        (z, _), log_r = lax.scan(step, (z, grad_u(z)), parts)
        return z, log_r

    def _score(self) -> Callable[[Array], Array]:
        d, inputs = self.latent_dim, self.latent_dim + self.num_steps
        if self.backward == "ula":
            return lambda x: jnp.zeros(d)
        pair = self.reverse_network or mlp(self.hidden_dims, d)
        net = flat_module(f"{self.prefix}_reverse$params", pair, (inputs,))

        def score(x: Array) -> Array:
            out = net(x)
            if jnp.shape(out) != (d,):
                raise ValueError(
                    f"the reverse_network gives an output of shape {jnp.shape(out)}; it must be"
                    f" {(d,)}, a number for each latent coordinate."
                )
            return out

        return score
