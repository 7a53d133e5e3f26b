"""A guide that learns where a few Markov transitions take its draws (Li, Turner and Liu, 2017)."""

from collections.abc import Callable

import jax
from jax import Array, lax, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext._checks import check_choice, check_count, check_positive, check_several
from numpyro_ext._typing import Params
from numpyro_ext.objectives.base import Draws, MapT, Objective, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples

Transition = Callable[[Array, Array, Callable[[Array], Array]], Array]
"""``(rng_key, z, potential_fn) -> z`` with ``z`` of shape ``(d,)``."""


class AmortizedMCMC(Objective):
    r"""Distils a Markov chain into the guide, which learns the law of where the chain ends.

    The unconstrained vectors :math:`z_k \sim q` of K draws are moved by T transitions that leave
    the posterior invariant, to :math:`y_k \sim q_T`, without a gradient. The guide minimises a
    divergence:

    * ``divergence="energy"``: the energy distance

      .. math::
          \frac{1}{K(K-1)} \sum_{i \ne j} \big( 2\,|z_i - y_j| - |z_i - z_j| - |y_i - y_j| \big),

      in units of the standard deviations of z and y together in each coordinate, which needs draws
      and no density. It is zero on average, and so is its gradient, where the transitions do not
      change the law of the draws and are reversible: at the posterior.
    * ``"kl"``: :math:`-\frac1K \sum_k \log q(y_k)` in nats, which is
      :math:`\mathrm{KL}(q_T \| q)` but for a constant, for a guide with a density; less noise.
    * ``"js"``: the Jensen-Shannon divergence of q and :math:`q_T` in nats, for the guide
      ``with_critic(guide)``: with the logistic loss D of the critic :math:`T \approx \log q/q_T`,
      the guide minimises :math:`\log 2 - D/2` by its draws, and the critic D. Too small, with a
      gradient to match, while the critic lags behind.

    Parameters of the model get :math:`-\frac1K \sum_k \nabla_\theta \log p^*(y_k)`, a gradient
    without a value, as in Monte Carlo EM.

    **Bias.** Modes that no chain finds are left out. ``"langevin"`` is not adjusted: its fixed
    point is too wide by a relative variance of :math:`\epsilon / (2 s^2)` for a posterior of
    variance :math:`s^2`. With a subsampled likelihood the transitions have its noise.

    **Units.** If plates enclose every site, each of their elements has transitions of its own.
    Latents in a subsampled plate that does not enclose every site are an error.

    A step takes K T gradients of the model (twice as many for ``"mala"``) and :math:`O(K^2 d)`.

    :param int num_particles: number of draws K, at least 2 for the energy distance.
    :param int num_transitions: number of transitions T.
    :param transition: ``"langevin"``, :math:`z' = z + \epsilon \nabla \log p^*(z) +
        \sqrt{2\epsilon}\,\xi`; ``"mala"``, the same with Metropolis' acceptance; or a function
        ``(rng_key, z, potential_fn)`` that gives the next ``(d,)`` vector, where ``potential_fn``
        is minus the log density of the whole minibatch and ``z`` holds the vectors of all units.
    :param float step_size: :math:`\epsilon`, in units of length squared.
    :param str divergence: ``"energy"``, ``"kl"`` or ``"js"``.

    **Reference:** *Approximate inference with amortised MCMC*, Li et al., arXiv:1702.08343, 2017
    (section 3: a divergence between q and the law of the chain's end).

    >>> from numpyro_ext.guides import Implicit
    >>> def guide(x):
    ...     loc, scale = numpyro.param("loc", 0.), numpyro.param("scale", 1.)
    ...     noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    ...     numpyro.sample("z", Implicit(loc + scale * noise))
    >>> svi = SVI(normal_mean, guide, optax.adam(0.02), AmortizedMCMC(100, step_size=0.1))
    >>> params = svi.run(jax.random.key(0), 500, jnp.array([1.5]), progress_bar=False).params
    >>> bool(abs(params["loc"] - 0.75) < 0.2)  # the posterior is N(0.75, 0.5)
    True
    """

    without_log_q = 'divergence="energy"'

    def __init__(
        self,
        num_particles: int = 16,
        num_transitions: int = 5,
        *,
        transition: str | Transition = "langevin",
        step_size: float | Array = 1e-2,
        divergence: str = "energy",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        if not callable(transition):
            check_choice("transition", transition, ("langevin", "mala"))
        check_choice("divergence", divergence, ("energy", "kl", "js"))
        if divergence == "energy":
            why = "the energy distance is a mean over pairs; use divergence='kl'"
            check_several(num_particles, why)
        self.divergence = divergence
        check_positive("step_size", step_size)
        self.num_transitions = check_count("num_transitions", num_transitions)
        self.transition = transition
        self.step_size = step_size
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        samples = Samples(draws, implicit=False)
        if self.divergence == "kl":
            samples.refuse_auxiliary()
        params = draws.layout.model_params
        theta = {**draws.stopped, **{n: draws.params[n] for n in params if n in draws.params}}

        def draw(key: Array) -> tuple[Array, Array, Array, State]:
            particle = draws.particle(key)
            z = samples.vector_of(particle)
            y = stop_gradient(self._run(key, samples, draws, stop_gradient(z)))
            loss = jnp.zeros(draws.layout.shape)
            if self.divergence == "kl":
                there = samples.particle(key, y)
                loss = -(there.log_q_local + there.log_q_global)
            if params:
                log_p = samples.log_p(key, y, theta)
                loss += stop_gradient(log_p) - log_p
            return z, y, loss, particle.state

        z, y, loss, state = draws.map(draw, draws.keys)
        loss = jnp.mean(loss, axis=0)  # (*units)
        if self.divergence == "energy":
            loss += energy_distance(z, y)
        elif self.divergence == "js":
            loss += _jensen_shannon(draws, samples, z, y)
        return draws.total(loss), state

    def _run(self, key: Array, samples: Samples, draws: Draws, z: Array) -> Array:
        """The vectors ``(*units, d)`` after the transitions."""

        def log_p(z: Array) -> Array:
            return samples.log_p(key, z, draws.stopped)  # (*units)

        def step(z: Array, key: Array) -> tuple[Array, None]:
            if not callable(self.transition):
                return self._langevin(key, z, log_p), None

            def potential_fn(x: Array) -> Array:
                return -jnp.sum(log_p(x.reshape(z.shape)))

            return self.transition(key, z.reshape(-1), potential_fn).reshape(z.shape), None

        # The first two keys of a split belong to model and guide.
        keys = random.split(random.fold_in(key, 2), self.num_transitions)
        return lax.scan(step, z, keys)[0]

    def _langevin(self, key: Array, z: Array, log_p: Callable[[Array], Array]) -> Array:
        eps = jnp.asarray(self.step_size, z.dtype)
        key_noise, key_accept = random.split(key)

        def with_drift(z: Array) -> tuple[Array, Array]:
            value, pullback = jax.vjp(log_p, z)
            return value, z + eps * pullback(jnp.ones_like(value))[0]

        log_p_z, mean = with_drift(z)
        there = mean + jnp.sqrt(2 * eps) * random.normal(key_noise, z.shape, z.dtype)
        if self.transition == "langevin":
            return there
        log_p_there, mean_back = with_drift(there)
        forth = jnp.sum((there - mean) ** 2, axis=-1)
        back = jnp.sum((z - mean_back) ** 2, axis=-1)
        log_ratio = log_p_there - log_p_z + (forth - back) / (4 * eps)
        log_u = jnp.log1p(-random.uniform(key_accept, log_ratio.shape, z.dtype))
        # A proposal without a finite density is not accepted, but a NaN at z itself is shown.
        moved = jnp.where((log_u < log_ratio)[..., None], there, z)
        return jnp.where(jnp.isnan(log_p_z)[..., None] | jnp.isnan(mean), jnp.nan, moved)


def _jensen_shannon(draws: Draws, samples: Samples, z: Array, y: Array) -> Array:
    """``(*units)``: log 2 - D / 2, which the guide minimises, and the loss D of the critic."""
    critic = critic_of(draws, samples.group, 'divergence="energy"')

    def logistic_loss(params: Params, z: Array) -> Array:
        of_guide, of_ends = jax.nn.softplus(-critic(params, z)), jax.nn.softplus(critic(params, y))
        return jnp.mean(of_guide, 0) + jnp.mean(of_ends, 0)

    training = logistic_loss(draws.params, stop_gradient(z))
    js = jnp.log(2.0) - logistic_loss(draws.stopped, z) / 2
    return js + (training - stop_gradient(training))


def energy_distance(z: Array, y: Array) -> Array:
    """``(*units)``, of ``(K, *units, d)`` draws z and y without the pairs of a draw with itself, in
    units of the standard deviations of both together: in units of y alone the gradient would not be
    zero on average for equal laws."""
    K, *units, _ = z.shape
    sd = jnp.std(jnp.concatenate([z, y]), axis=0)
    sd = stop_gradient(jnp.where(sd == 0, 1.0, sd))

    def distances(a: Array, b: Array) -> Array:
        squared = jnp.sum(((a[:, None] - b[None]) / sd) ** 2, axis=-1)  # (K, K, *units)
        same = squared == 0  # a square root has no derivative at 0
        return jnp.where(same, 0.0, jnp.sqrt(jnp.where(same, 1.0, squared)))

    terms = 2 * distances(z, y) - distances(z, z) - distances(y, y)
    off = ~jnp.eye(K, dtype=bool).reshape(K, K, *(1,) * len(units))
    return jnp.sum(jnp.where(off, terms, 0.0), axis=(0, 1)) / (K * (K - 1))
