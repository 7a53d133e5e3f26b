"""The Renyi bound of each datum inside variational inference for the global latents."""

from jax import Array, random
import jax.numpy as jnp

from numpyro_ext._checks import check_count
from numpyro_ext.objectives.base import Draws, MapT, OfOrder, Order, State, map_over
from numpyro_ext.objectives.power_mean import surrogate


class NestedVRELBO(OfOrder):
    r"""Evidence lower bound over global latents, with a Renyi bound for the latents of each datum.

    .. math::
        L = E_{q(\theta)}\Big[\log \frac{p_0(\theta)}{q(\theta)} +
        \sum_{n=1}^{N} \frac{1}{1 - \alpha} \log E_{q(z_n | x_n)}
        \Big[\Big(\frac{p(z_n | \theta)\, p(x_n | z_n, \theta)}{q(z_n | x_n)}
        \Big)^{1 - \alpha}\Big]\Big],

    in nats. With K global draws, L draws of the local latents for each, and a minibatch of M rows

    .. math::
        \hat L = \frac{1}{K} \sum_k \Big\{ \log \frac{p_0(\theta_k)}{q(\theta_k)} +
        \frac{N}{M} \sum_m \frac{1}{1 - \alpha} \log \frac{1}{L}
        \sum_l e^{(1 - \alpha)\, lw_{k,m,l}} \Big\},

    where :math:`lw_{k,m,l}` is the log weight of datum m and its latents alone. The loss is
    :math:`-\hat L`, which is unbiased in the minibatch for global and local latents together, where
    :class:`VRELBO` is an error. ``alpha=1`` or ``num_inner=1`` is the ELBO, ``alpha=0`` importance
    weighting inside VI: as L grows each term rises to :math:`\log p(x_n | \theta)`.

    **Biased.** For alpha >= 0 it is a lower bound on the evidence, at every K and L; for alpha < 0
    it is not a bound. The global guide keeps the bias of VI: its variance is too small.

    The *data plate* encloses all observed sites of the model; a guide site is local if it lies in
    that plate. A step takes K global draws and K x L evaluations of the local part.

    :param alpha: order of the inner bound, a number in [-inf, inf], a traced finite scalar, or a
        callable of the step (with :func:`count_steps` around the guide).
    :param int num_particles: number of global draws K.
    :param int num_inner: number L of draws of the local latents for each global draw.

    **References:** *Approximate inference: new visions*, Li, PhD thesis, Cambridge 2018 (chapter
    4); *Renyi divergence variational inference*, Li and Turner, NIPS 2016 (eq. 4)

    >>> def model(x):
    ...     w = numpyro.sample("w", dist.Normal(0., 1.))
    ...     with numpyro.plate("data", 3):
    ...         z = numpyro.sample("z", dist.Normal(w, 1.))
    ...         numpyro.sample("x", dist.Normal(z, 1.), obs=x)
    >>> def guide(x):  # exact for w, the prior for z
    ...     w = numpyro.sample("w", dist.Normal(0.3, 0.4 ** 0.5))
    ...     with numpyro.plate("data", 3):
    ...         numpyro.sample("z", dist.Normal(w, 1.))
    >>> x = jnp.array([0.5, -1., 2.])
    >>> loss = NestedVRELBO(0., 1000, num_inner=50)
    >>> estimate = jax.jit(lambda key: loss.loss(key, {}, model, guide, x))
    >>> bool(abs(estimate(jax.random.key(0)) - 5.45) < 0.2)  # -log p(x)
    True
    """

    per_datum = True
    linear = True

    def __init__(
        self,
        alpha: Order = 0.0,
        num_particles: int = 1,
        *,
        num_inner: int = 10,
        vectorize_particles: bool | MapT = True,
    ) -> None:
        self.num_inner = check_count("num_inner", num_inner)
        super().__init__(alpha, num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        def outer(key: Array, inner_key: Array) -> tuple[Array, Array, State]:
            particle = draws.particle(key)
            values = particle.values
            shared = {name: values[name] for name in draws.layout.drawn_global}

            def local_log_weight(key: Array) -> Array:
                inner = draws.particle(key, values=shared)
                return inner.log_lik - inner.log_q_local

            # The first of the L draws is the particle's own: num_inner=1 is the ELBO of that key.
            lw = (particle.log_lik - particle.log_q_local)[None]
            if self.num_inner > 1 and draws.layout.drawn_local:
                inner_keys = random.split(inner_key, self.num_inner - 1)
                side_by_side = self.vectorize_particles is not False
                more = map_over(side_by_side, local_log_weight, inner_keys)
                lw = jnp.concatenate([lw, more])
            return particle.log_prior - particle.log_q_global, lw, particle.state

        inner_keys = random.split(draws.extra_key, self.num_particles)
        log_ratio, lw, state = draws.map(outer, draws.keys, inner_keys)
        inner = surrogate(jnp.moveaxis(lw, 1, 0), 1 - self.order_at(draws.step))
        return -jnp.mean(log_ratio) - draws.total(inner) / self.num_particles, state
