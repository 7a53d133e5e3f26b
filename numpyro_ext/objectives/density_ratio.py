"""The evidence lower bound by a density ratio (Mescheder, Nowozin and Geiger, 2017)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array, random
from jax.extend.core import jaxpr_as_fun
from jax.lax import stop_gradient
import jax.numpy as jnp
from jax.scipy.stats import norm
from numpyro.distributions import Unit, biject_to
from numpyro.ops.provenance import eval_provenance

from numpyro_ext._checks import check_choice, check_several
from numpyro_ext._model.implicit import has_density
from numpyro_ext._model.masked import is_masked
from numpyro_ext._model.read import Site, base_distribution, frames, latent_sites, sample_sites
from numpyro_ext._numpyro import unpacking_of
from numpyro_ext._typing import Params, Sites, Trace
from numpyro_ext.objectives.base import Draws, MapT, Objective, Particle, State
from numpyro_ext.objectives.critic import critic_of
from numpyro_ext.objectives.samples import Samples, SiteGroup
from numpyro_ext.scores import KernelRatio, logistic_loss, whiten

Estimate = Callable[[Array, Array], tuple[Callable[[Array], Array], Array]]
"""``(x, y)``, draws ``(K, *plates, d)`` of q and of the contrast r, to the log ratio
:math:`T \\approx \\log q / r`, a function to ``(K, *plates)`` that is differentiable in its
argument only, and to the loss of what is trained for it."""


class DensityRatioELBO(Objective):
    r"""Evidence lower bound of a guide without a density: a density ratio replaces log q.

    For draws z of q and a contrast r of known density,

    .. math::
        L = E_q\Big[\log p^*(z) - \log r(z) - T(z)\Big], \qquad T \approx \log \frac{q}{r},

    in nats and in unconstrained space, where :math:`\log p^*` is the log joint density, Jacobian
    included. T is estimated from K draws of each of q and r:

    * ``contrast="adaptive"``: r is the normal with the mean and the standard deviations of the K
      draws of q, without gradient. T compares the whitened draws, :math:`u = (z - loc) / scale`,
      with draws of N(0, I), and has only the shape of q to learn.
    * ``contrast="prior"``: r is the prior, drawn by running the model, and
      :math:`L = E_q[\log p(x | z) - T(z)]`.
    * ``contrast="joint"``, for data in the rows of a plate that have latents of their own: T
      compares pairs (x, z), data with draws of q(z | x), with pairs drawn by running the model.
      **No likelihood is evaluated**, so that a model which can only be simulated is allowed. The
      loss is an estimate of

      .. math:: \sum_n E_{q(z | x_n)}[T(x_n, z)], \qquad T \approx \log \frac{q(z | x)\, \tilde
          p(x)}{p(x, z)} ,

      where :math:`\tilde p` is the density from which the data come: N times a KL divergence, 0 at
      the posterior under the true model. For the guide it differs from minus the ELBO by a
      constant. Parameters of the model are an error; :class:`SymmetricKL` trains them. A covariate
      c of a row is unknown to T, and a guide that takes c for -c might be as good as the posterior:
      it has to be a site, ``c = numpyro.sample("c", ..., obs=c)``, so that T sees it. Draws of the
      model in a row that depend on another array of as many rows, or on its number, are an error.

    T comes from the ``ratio``: ``"critic"`` is the network of ``with_critic(guide)``, trained by
    :func:`~numpyro_ext.scores.logistic_loss` D in the same scalar loss :math:`-L + D -
    \mathrm{sg}(D)`; D does not reach the guide, and L does not reach the critic.
    :class:`~numpyro_ext.scores.LogisticRatio` and :class:`~numpyro_ext.scores.KernelRatio` (of r/q)
    are fitted to the draws of each step, with ``"joint"`` to all rows of the minibatch together,
    and need no critic. The gradient of the guide flows through z alone, because :math:`E_q
    \nabla_\phi \log q = 0`.

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
    :param str contrast: ``"adaptive"``, ``"prior"`` or ``"joint"``.
    :param ratio: ``"critic"``, ``KernelRatio()`` or ``LogisticRatio()``.

    **References:** *Adversarial variational Bayes: unifying variational autoencoders and generative
    adversarial networks*, Mescheder et al., ICML 2017 (equations 3.3 and 3.7, propositions 1 and 2,
    Algorithm 2); *Variational inference using implicit distributions*, Ferenc Huszar, 2017;
    *Hierarchical implicit models and likelihood-free variational inference*, Tran, Ranganath
    and Blei, NIPS 2017, on the joint contrast; *Kernel implicit variational inference*,
    Shi et al., ICLR 2018

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

    def __init__(
        self,
        num_particles: int = 64,
        contrast: str = "adaptive",
        *,
        ratio: Any = "critic",
        vectorize_particles: bool | MapT = True,
    ) -> None:
        check_choice("contrast", contrast, ("adaptive", "prior", "joint"))
        # With "joint" the rows of one draw are many.
        if contrast == "adaptive" or (ratio != "critic" and contrast == "prior"):
            check_several(num_particles, "one draw has no distribution")
        self.contrast, self.ratio = contrast, ratio
        self.minus_elbo = contrast != "joint"
        super().__init__(num_particles, vectorize_particles=vectorize_particles)

    def estimate(self, draws: Draws) -> tuple[Array, State]:
        samples = _samples(draws)
        key, prior_key = random.split(draws.extra_key)
        prior_keys = random.split(prior_key, self.num_particles)
        if self.contrast == "joint":
            return self.of_pairs(draws, samples, prior_keys)

        def draw(key: Array, prior_key: Array) -> tuple[Array, Array, Array, State]:
            particle = draws.particle(key)
            z = samples.vector_of(particle)
            if self.contrast == "prior":
                log_lik, prior = _prior_contrast(draws, samples, key, particle, prior_key)
                return z, log_lik, prior, particle.state
            return z, samples.log_p_of(particle, z), z, particle.state

        z, log_p, prior, state = draws.map(draw, draws.keys, prior_keys)
        x, y, log_r = self._contrast(random.fold_in(key, 0), z, prior)
        log_ratio, training = self.estimator(draws, samples)(x, y)
        bound = draws.total(jnp.mean(log_p, 0))
        bound -= samples.group.scale * jnp.sum(jnp.mean(log_r + log_ratio(x), 0))
        return -bound + (training - stop_gradient(training)), state

    def of_pairs(self, draws: Draws, samples: Samples, keys: Array) -> tuple[Array, State]:
        """The loss of data with draws of q, and of pairs drawn by the model."""
        for name in draws.layout.model_params:
            raise ValueError(
                f"contrast='joint' has no gradient for the parameter '{name}' of the model; use"
                " SymmetricKL, or contrast='adaptive'."
            )
        x, y, state = pairs_of(draws, samples, keys, draws.stopped)
        log_ratio, training = self.estimator(draws, samples, x.shape[-1])(x, y)
        rows = samples.group.scale * len(x) / self.num_particles
        return rows * jnp.mean(log_ratio(x)) + (training - stop_gradient(training)), state

    def _contrast(self, key: Array, x: Array, prior: Array) -> tuple[Array, Array, Array]:
        """Draws of q and of r in the coordinates of T, and log r at the draws of q."""
        if self.contrast == "prior":
            return x, prior, jnp.zeros(x.shape[:-1])
        y = random.normal(key, x.shape, x.dtype)
        # Coordinate by coordinate, so the rows of plates may stand side by side.
        u, _, scale = whiten(x.reshape(len(x), -1))
        log_r = jnp.sum((norm.logpdf(u) - jnp.log(scale)).reshape(x.shape), -1)
        return u.reshape(x.shape), y, log_r

    def estimator(self, draws: Draws, samples: Samples, size: int | None = None) -> Estimate:
        """Of vectors, or of pairs of ``size`` numbers."""
        if self.ratio != "critic":
            return _fit_ratio(self.ratio)
        observed = None if size is None else size - samples.group.dim
        instead = f"{type(self).__name__}(ratio=LogisticRatio())"
        critic = critic_of(draws, samples.group, instead, observed=observed)

        def estimate(x: Array, y: Array) -> tuple[Callable[[Array], Array], Array]:
            x, y = stop_gradient((x, y))
            loss = logistic_loss(critic(draws.params, x), critic(draws.params, y))
            return partial(critic, draws.stopped), loss

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

    def of_row(x: Array, y: Array, z: Array) -> Array:
        x, y = stop_gradient((x, y))
        if isinstance(ratio, KernelRatio):  # accurate where its denominator has mass
            return -stop_gradient(ratio.fit(y, x)).log_ratio(z)
        return stop_gradient(ratio.fit(x, y)).log_ratio(z)

    def estimate(x: Array, y: Array) -> tuple[Callable[[Array], Array], Array]:
        def log_ratio(z: Array) -> Array:
            rows = (arg.reshape(len(arg), -1, arg.shape[-1]) for arg in (x, y, z))
            return jax.vmap(of_row, 1, 1)(*rows).reshape(z.shape[:-1])

        return log_ratio, jnp.zeros(())

    return estimate


def pairs_of(
    draws: Draws, samples: Samples, keys: Array, params: Params
) -> tuple[Array, Array, State]:
    """``(n, d + f)``, the latents and data of all rows of K particles, and as many pairs drawn by
    the model; with the state."""
    name, plates = type(draws.objective).__name__, samples.group.plates
    trace = draws.dream(keys[0])
    for site in sample_sites(trace):
        if "obs" in site["infer"] and isinstance(base_distribution(site["fn"]), Unit):
            raise ValueError(
                f"{name}: draws of the model do not follow the factor '{site['name']}'; use"
                " DensityRatioELBO(contrast='adaptive')."
            )
    for site in sample_sites(trace):
        if not plates or not set(plates) <= set(frames(site)) or is_masked(site):
            raise ValueError(
                f"{name} compares the rows of a plate with draws of the model, for which every"
                f" latent and observed site must be in it without a mask, and '{site['name']}' is"
                " not; use DensityRatioELBO(contrast='adaptive')."
            )
    draws.once(_check_alike, samples.group, keys[0])

    def draw(key: Array, dream_key: Array) -> tuple[Array, Array, State]:
        particle = draws.particle(key)
        dream = draws.dream(dream_key, params=params)
        data = [site for site in sample_sites(dream) if "obs" in site["infer"]]
        for site in data:
            del dream[site["name"]]
        observed = [_rows_of(site, site["infer"]["obs"], plates) for site in data]
        drawn = [_rows_of(site, site["value"], plates) for site in data]
        z = samples.vector_of(particle), _vector_of(draws, samples, dream)
        x, y = (
            jnp.concatenate([z, *rows], -1) for z, rows in zip(z, (observed, drawn), strict=True)
        )
        return x, y, particle.state

    x, y, state = draws.map(draw, draws.keys, keys)
    return x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), state


def _check_alike(draws: Draws, group: SiteGroup, rng_key: Array) -> None:
    """An error if draws of the model depend on an array with as many rows as the data, or on the
    indices of rows, so that its rows do not all have the same law."""

    def values(params: Params) -> tuple[list[Any], list[Any]]:
        sites = list(sample_sites(draws.dream(rng_key, params=params)))
        observed = [jnp.asarray(x["infer"]["obs"]) for x in sites if "obs" in x["infer"]]
        return [site["value"] for site in sites], observed

    indices = {plate: jnp.arange(M) for plate, M in zip(group.plates, group.shape, strict=True)}
    # Arrays among the arguments, and arrays that the model closes over, are constants here.
    inputs = {**draws.stopped, **indices}
    program, shapes = jax.make_jaxpr(values, return_shape=True)(inputs)
    arrays = {str(i): x for i, x in enumerate(program.consts)}

    def run(indices: Sites, **arrays: Array) -> Any:
        consts, leaves = [arrays[str(i)] for i in range(len(arrays))], {**inputs, **indices}
        results = jaxpr_as_fun(program.replace(consts=consts))(*jax.tree.leaves(leaves))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    origins = eval_provenance(run, indices=indices, **arrays)
    drawn, observed = (set().union(*part) - {"indices"} for part in origins)
    sizes = {*group.shape, *(n for plate, n, _ in draws.layout.subsampled if plate in group.plates)}
    rows = sizes & {n for name in observed for n in jnp.shape(arrays[name])}
    shapes_read = [x for x in (jnp.shape(arrays[n]) for n in sorted(drawn)) if rows & {*x}]
    by_index = any("indices" in names for names in origins[0])
    if shapes_read or by_index:
        what = f"an array of shape {shapes_read[0]}" if shapes_read else "the indices of its plate"
        raise ValueError(
            f"{type(draws.objective).__name__}: draws of the model in a row depend on {what}, which"
            ' the ratio does not see; make a covariate an observed site, c = numpyro.sample("c",'
            " ..., obs=c), and use what that returns; or use DensityRatioELBO(contrast='adaptive')."
        )


def _rows_of(site: Site, value: Any, plates: tuple[str, ...]) -> Array:
    """The numbers of each row of the plates, ``(*plates, f)``."""
    value = jnp.asarray(value, float)
    shape = jnp.broadcast_shapes(value.shape, (*site["fn"].batch_shape, *site["fn"].event_shape))
    batch = len(shape) - site["fn"].event_dim
    axes = [batch + frames(site)[plate] for plate in plates]
    front = jnp.moveaxis(jnp.broadcast_to(value, shape), axes, range(len(axes)))
    return front.reshape(*front.shape[: len(axes)], -1)


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
            f"{type(draws.objective).__name__} draws the sites {', '.join(sites)} of the"
            f" model, and the vectors of the guide are made of {', '.join(drawn)}; use"
            " DensityRatioELBO(contrast='adaptive')."
        )
    # An automatic guide draws one vector and knows where in it each site is.
    places = unpack(jnp.arange(samples.group.dim))
    order = jnp.argsort(jnp.concatenate([jnp.ravel(places[name]) for name in sites]))
    values = (biject_to(s["fn"].support).inv(s["value"]) for s in sites.values())
    return jnp.concatenate([jnp.ravel(value) for value in values])[order]
