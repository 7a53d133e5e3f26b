"""The symmetric variational autoencoder (Chen et al., 2018): both KL divergences of two joints."""

from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp

from numpyro_ext.objectives.base import Draws, MapT, State
from numpyro_ext.objectives.density_ratio import DensityRatioELBO, pairs_of
from numpyro_ext.objectives.samples import Samples


class SymmetricKL(DensityRatioELBO):
    r"""Both divergences between data with their latents by the guide, and draws of the model.

    With :math:`q(x, z) = \tilde p(x)\, q(z | x)`, where :math:`\tilde p` is the density from which
    the N rows of data come, the loss is an estimate, in nats, of

    .. math::
        N \big[ KL(q(x, z) \,\|\, p(x, z)) + KL(p(x, z) \,\|\, q(x, z)) \big]
            = N \big[ E_q\, T - E_p\, T \big], \qquad T \approx \log \frac{q(x, z)}{p(x, z)} ,

    from pairs (x, z) alone: K draws of the guide for each row of the minibatch, and as many pairs
    drawn by running the model. Neither log q nor a likelihood is evaluated. T is estimated as in
    ``DensityRatioELBO(contrast="joint")``. At the optimum, where the model has the law of the data
    and the guide is its posterior, both are 0; the second divergence is large for a model that
    draws what no data look like, for which the ELBO has no penalty. A covariate of a row has to be
    an observed site, as there, or a wrong guide may be as good as the posterior.

    **The gradient** passes through the draws alone, as in the paper: the guide descends the first
    divergence, which is minus its ELBO, and the parameters of the model the second. It is not the
    gradient of the sum. The other halves, :math:`-E_p \nabla \log q` and :math:`-E_q \nabla \log
    p`, need densities. Both vanish at the optimum.

    **Biased and unstable.** As of :class:`DensityRatioELBO`, T is estimated. The two players follow
    different divergences, so that the loss need not fall; where few data and draws of the model
    are alike T has little slope. Sites of a model with parameters have to be reparameterised.

    :param int num_particles: the draws K for each row.
    :param ratio: ``"critic"``, the network of ``with_critic(guide, features=f)`` for f observed
        numbers of a row; or ``LogisticRatio()`` or ``KernelRatio()``.

    **Reference:** *Symmetric variational autoencoder and connections to adversarial learning*, Chen
    et al. (AISTATS 2018); *Adversarial symmetric variational autoencoder*, Pu et al.
    (NIPS 2017)

    >>> from numpyro_ext.objectives import SymmetricKL
    >>> from numpyro_ext.scores import LogisticRatio
    >>> def model(x):
    ...     m = numpyro.param("m", 0.0)
    ...     with numpyro.plate("rows", len(x)):
    ...         z = numpyro.sample("z", dist.Normal(m, 1.0))
    ...         numpyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     a, b = numpyro.param("a", 0.0), numpyro.param("b", 0.0)
    ...     with numpyro.plate("rows", len(x)):
    ...         numpyro.sample("z", dist.Normal(a + b * x, 0.5**0.5))
    >>> x = 2.0 + 2.0**0.5 * jax.random.normal(jax.random.key(1), (500,))
    >>> loss = SymmetricKL(4, ratio=LogisticRatio())
    >>> svi = SVI(model, guide, optax.adam(0.05), loss)
    >>> params = svi.run(jax.random.key(0), 300, x, progress_bar=False).params
    >>> # The model has the law of x at m = 2, and then the posterior is N(1 + x / 2, 1 / 2).
    >>> bool(abs(params["m"] - 2) < 0.3), bool(abs(params["b"] - 0.5) < 0.15)
    (True, True)
    """

    minus_elbo = False

    def __init__(
        self,
        num_particles: int = 8,
        *,
        ratio: object = "critic",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        super().__init__(
            num_particles, "joint", ratio=ratio, vectorize_particles=vectorize_particles
        )

    def of_pairs(self, draws: Draws, samples: Samples, keys: Array) -> tuple[Array, State]:
        if draws.layout.model_params:
            for name, site in draws.dream(random.key(0)).items():
                if site["type"] == "sample" and not site["fn"].has_rsample:
                    raise ValueError(
                        f"SymmetricKL has no gradient for the parameters of the model through its"
                        f" site '{name}', a {type(site['fn']).__name__}; use reparameterised"
                        " distributions, or DensityRatioELBO(contrast='adaptive')."
                    )
        x, y, state = pairs_of(draws, samples, keys, draws.params)
        log_ratio, training = self.estimator(draws, samples, x.shape[-1])(x, y)
        rows = samples.group.scale * len(x) / self.num_particles
        value = rows * (jnp.mean(log_ratio(x)) - jnp.mean(log_ratio(y)))
        return value + (training - stop_gradient(training)), state
