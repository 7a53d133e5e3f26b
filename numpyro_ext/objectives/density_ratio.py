"""The evidence lower bound by a density ratio (Mescheder, Nowozin and Geiger, 2017)."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from jax.scipy.stats import norm
from numpyro.distributions import biject_to

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.read import latent_sites
from numpyro_ext._numpyro import unpacking_of
from numpyro_ext._typing import Trace
from numpyro_ext.objectives.base import Draws, MapT, Objective, Particle, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples
from numpyro_ext.scores import KernelRatio, logistic_loss, whiten

Estimate = Callable[[Array, Array], tuple[Array, Array]]
"""``(x, y)``, draws ``(K, *plates, d)`` of q and of the contrast r, to the log ratio
:math:`T(x) \\approx \\log q / r`, ``(K, *plates)``, differentiable in x only, and to the loss of
what is trained for it."""


class DensityRatioELBO(Objective):
    r"""Evidence lower bound of a guide without a density, whose log q a density ratio replaces.

    For draws z of q and a contrast r whose density is known,

    .. math::
        L = E_q\Big[\log p^*(z) - \log r(z) - T(z)\Big], \qquad T \approx \log \frac{q}{r},

    in nats and in unconstrained space, where :math:`\log p^*` is the log joint density, Jacobian
    included. T is estimated from K draws of each of q and r:

    * ``contrast="adaptive"``: r is the normal distribution with the mean and the standard
      deviations of the K draws of q, under ``stop_gradient``. T compares the whitened draws,
      :math:`u = (z - loc) / scale`, with draws of N(0, I), and has only the shape of q to learn.
    * ``contrast="prior"``: r is the prior, drawn by running the model, and
      :math:`L = E_q[\log p(x | z) - T(z)]`.

    T comes from the ``ratio``: ``"critic"`` is the network of ``with_critic(guide)``, trained by
    :func:`~numpyro_ext.scores.logistic_loss` D in the same scalar loss
    :math:`-L + D - \mathrm{sg}(D)`; D does not reach the guide, and L does not reach the critic.
    :class:`~numpyro_ext.scores.LogisticRatio` and :class:`~numpyro_ext.scores.KernelRatio` (of r/q)
    are fitted to the draws of each step and need no critic. The gradient of the guide flows through
    z alone, because :math:`E_q \nabla_\phi \log q = 0`.

    **Biased.** The value is an estimate of minus the ELBO and not a bound, because T is estimated:
    it may be below minus the log evidence, so do not compare models by it. The adaptive contrast
    makes it too large, by about d / K, which does not bias the gradient.

    **When it fails.** A critic that lags behind the guide gives a gradient towards where q was;
    with ``"adaptive"`` a correlated guide becomes too wide meanwhile. Where the critic tells all
    draws apart (the prior contrast with a large KL(q || prior), any contrast in more than some tens
    of dimensions), T is too small and the guide too narrow. ``LogisticRatio()`` has a quadratic log
    ratio, so that a flexible guide becomes too wide, and needs many times (d + 1)(d + 2) / 2 draws.

    **Subsampling** is unbiased. ``Implicit`` sites in a plate have one ratio for each row, from K
    draws of each, and their critic takes the data from ``with_critic(guide, features=...)``. Other
    sites keep their density. Parameters of the model get the gradient of the ELBO.

    :param int num_particles: number of draws K, some tens at least to estimate T.
    :param str contrast: ``"adaptive"`` or ``"prior"``.
    :param ratio: ``"critic"``, ``KernelRatio()`` or ``LogisticRatio()``.

    **References:** *Adversarial variational Bayes: unifying variational autoencoders and generative
    adversarial networks*, Mescheder et al., ICML 2017 (equations 3.3 and 3.7, propositions 1 and 2,
    Algorithm 2); *Variational inference using implicit distributions*, Ferenc Huszar, 2017 (section
    3); *Kernel implicit variational inference*, Shi et al., ICLR 2018

    >>> from numpyro_ext.guides import Implicit
    >>> from numpyro_ext.scores import LogisticRatio
    >>> def guide(x):
    ...     noise = numpyro.sample("noise", dist.Normal(), infer={"is_auxiliary": True})
    ...     m, s = numpyro.param("m", 0.), numpyro.param("s", 1.)
    ...     numpyro.sample("z", Implicit(m + s * noise))
    >>> svi = SVI(normal_mean, guide, optax.adam(0.05), DensityRatioELBO(ratio=LogisticRatio()))
    >>> params = svi.run(jax.random.key(0), 200, jnp.array([1.5]), progress_bar=False).params
    >>> # The posterior is N(0.75, 0.5).
    >>> bool(abs(params["m"] - 0.75) < 0.2), bool(abs(params["s"]**2 - 0.5) < 0.2)
    (True, True)
    """

    linear = True
    minus_elbo = True

    def __init__(
        self,
        num_particles: int = 64,
        contrast: str = "adaptive",
        *,
        ratio: Any = "critic",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("contrast", contrast, ("adaptive", "prior"))
        if ratio != "critic" or contrast == "adaptive":
            check_several("num_particles", num_particles, "one draw has no distribution")
        self.contrast, self.ratio = contrast, ratio
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        samples = _samples(draws)
        key, prior_key = random.split(draws.extra_key)
        prior_keys = random.split(prior_key, self.num_particles)

        def draw(key: Array, prior_key: Array) -> tuple[Array, Array, Array, State]:
            particle = draws.particle(key)
            z = samples.vector_of(particle)
            if self.contrast == "prior":
                log_lik, prior = _prior_contrast(draws, samples, key, particle, prior_key)
                return z, log_lik, prior, particle.state
            return z, samples.log_p_of(particle, z), z, particle.state

        z, log_p, prior, state = draws.map(draw, draws.keys, prior_keys)
        x, y, log_r = self._contrast(random.fold_in(key, 0), z, prior)
        log_ratio, training = self._estimator(draws, samples)(x, y)
        bound = draws.total(jnp.mean(log_p, 0))
        bound -= samples.group.scale * jnp.sum(jnp.mean(log_r + log_ratio, 0))
        return -bound + (training - stop_gradient(training)), state

    def _contrast(self, key: Array, x: Array, prior: Array) -> tuple[Array, Array, Array]:
        """Draws of q and of r in the coordinates of T, and log r at the draws of q."""
        if self.contrast == "prior":
            return x, prior, jnp.zeros(x.shape[:-1])
        y = random.normal(key, x.shape, x.dtype)
        # Coordinate by coordinate, so the rows of plates may stand side by side.
        u, _, scale = whiten(x.reshape(len(x), -1))
        log_r = jnp.sum((norm.logpdf(u) - jnp.log(scale)).reshape(x.shape), -1)
        return u.reshape(x.shape), y, log_r

    def _estimator(self, draws: Draws, samples: Samples) -> Estimate:
        if self.ratio != "critic":
            return _fit_ratio(self.ratio)
        critic = critic_of(draws, samples.group, "DensityRatioELBO(ratio=LogisticRatio())")

        def estimate(x: Array, y: Array) -> tuple[Array, Array]:
            loss = logistic_loss(critic(draws.params, stop_gradient(x)), critic(draws.params, y))
            return critic(draws.stopped, x), loss

        return estimate


def _samples(draws: Draws) -> Samples:
    """The vectors of the ``Implicit`` sites, or of all sites where every site has a density."""
    trace = draws.guide_trace(draws.keys[0])
    implicit = not all(has_density(site["fn"]) for site in latent_sites(trace))
    for site, plate in () if implicit else draws.layout.subsampled_latents:
        raise ValueError(
            f"latent site '{site}' lies in the subsampled plate '{plate}', which does not enclose"
            " every site; use no subsample_size, or Implicit sites in the guide."
        )
    return Samples(draws, implicit=implicit)


def _fit_ratio(ratio: Any) -> Estimate:
    """The estimate of a ratio that is fitted to the draws of each row of the plates."""

    def of_row(x: Array, y: Array) -> Array:
        fixed = stop_gradient(x)
        if isinstance(ratio, KernelRatio):  # accurate where its denominator has mass
            return -stop_gradient(ratio.fit(y, fixed)).log_ratio(x)
        return stop_gradient(ratio.fit(fixed, y)).log_ratio(x)

    def estimate(x: Array, y: Array) -> tuple[Array, Array]:
        rows = (len(x), -1, x.shape[-1])
        log_ratio = jax.vmap(of_row, 1, 1)(x.reshape(rows), y.reshape(rows))
        return log_ratio.reshape(x.shape[:-1]), jnp.zeros(())

    return estimate


def _prior_contrast(
    draws: Draws, samples: Samples, key: Array, particle: Particle, prior_key: Array
) -> tuple[Array, Array]:
    """``log p(x | z)``, with the gradient of the prior's parameters, and a draw z of the prior."""
    # Without the gradient in the prior's parameters, which the log joint keeps.
    trace = particle.model_trace
    if draws.layout.model_params:
        trace = draws.model_trace(key, particle.guide_trace, draws.stopped)
    sum_sites = draws.layout.sum_sites
    log_prior = sum(sum_sites(list(latent_sites(trace)), local=local) for local in (True, False))
    plates = {n: site for n, site in particle.guide_trace.items() if site["type"] == "plate"}
    prior_trace = draws.model_trace(prior_key, plates, draws.stopped)
    log_lik = particle.log_lik + particle.log_prior - log_prior
    return log_lik, stop_gradient(_vector_of(draws, samples, prior_trace))


def _vector_of(draws: Draws, samples: Samples, model_trace: Trace) -> Array:
    """The latent sites of a run of the model as the vector of the guide."""
    sites = {site["name"]: site for site in latent_sites(model_trace)}
    drawn = [site.name for site in samples.group.sites]
    if set(drawn) == set(sites):
        return samples.of_trace(model_trace)
    unpack = unpacking_of(draws.guide)
    if len(drawn) > 1 or unpack is None:
        raise ValueError(
            f"contrast='prior' draws the sites {', '.join(sites)} of the model, and the vectors of"
            f" the guide are made of {', '.join(drawn)}; use contrast='adaptive'."
        )
    # An automatic guide draws one vector and knows where in it each site is.
    places = unpack(jnp.arange(samples.group.dim))
    order = jnp.argsort(jnp.concatenate([jnp.ravel(places[name]) for name in sites]))
    values = (biject_to(s["fn"].support).inv(s["value"]) for s in sites.values())
    return jnp.concatenate([jnp.ravel(value) for value in values])[order]
