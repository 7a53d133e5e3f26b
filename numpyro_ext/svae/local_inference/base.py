"""The interface of a rule of local inference, and the functions that all rules share.

A rule takes the expected statistics of the global variables and a recognition potential, and gives
an approximation q of the local latent variables of each datum. Any rule gives a lower bound on the
evidence; rules differ in how close it is.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_ext.expfam import DirichletMean, GaussianMean, GaussianNatural, NIWMean
from numpyro_ext.expfam.linalg import cholesky, half_logdet, symmetric
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential

__all__ = [
    "LocalInference",
    "LocalInfo",
    "LocalPosterior",
    "check_batch",
    "check_gaussian",
    "check_factor",
    "expected_log_normal",
    "global_statistics",
    "negative_entropy",
    "no_iterations",
    "plug_in",
    "surrogate_elbo",
]

Factor = GaussianPotential | MixturePotential


class LocalInfo(NamedTuple):
    """A report on the iterations of a rule, with arrays ``(B,)``."""

    num_iter: Array
    residual: Array
    converged: Array


class LocalPosterior(NamedTuple):
    """The factors of q of a batch, by the names of local latent variables."""

    natural: dict[str, Any]
    """Natural parameters, leaves ``(B, ...)``."""
    mean: dict[str, Any]
    """Expected statistics, leaves ``(B, ...)``."""
    info: LocalInfo


@runtime_checkable
class LocalInference(Protocol):
    r"""A rule of local inference; write one of your own by giving these attributes and methods.

    With global expected statistics :math:`\mu` and a potential :math:`\psi_n` of each datum,

    .. math::

        KL_n(\mu, q_n) = \mathrm{E}_{q_n} \log q_n(x, z)
        - \mathrm{E}_{q(\theta) q_n} \log p(x, z \mid \theta)

    has to be affine in :math:`\mu` for a given q, which is how natural gradients of the global
    variables come about. Everything is a pure function and works under ``jax.jit``; the result of a
    datum never depends on the others of its batch.

    .. doctest::

        >>> from numpyro_ext.svae import GMMEP, LocalInference
        >>> isinstance(GMMEP(), LocalInference)
        True
    """

    @property
    def families(self) -> Mapping[str, Any]:
        """The family of each global factor by name; its batch shape is the rule's own."""
        ...

    @property
    def local_families(self) -> Mapping[str, Any]:
        """The family of each local latent variable by name."""
        ...

    @property
    def site_names(self) -> Mapping[str, tuple[str, ...]]:
        """The model's sample sites of each global factor and of each local latent variable.

        A family of pairs, such as NIW, has two: that of the covariance, and that of the mean given
        it.
        """
        ...

    def infer(self, global_mean: Mapping[str, Any], potential: Any) -> LocalPosterior:
        """q for each datum of a batch.

        :param global_mean: expected statistics of each global factor.
        :param potential: of batch shape ``(B,)``.
        """
        ...

    def local_kl(self, global_mean: Mapping[str, Any], local: LocalPosterior) -> Array:
        """``(B,)``, the divergence above, affine in ``global_mean``."""
        ...

    def distributions(self, local: LocalPosterior) -> dict[str, dist.Distribution]:
        """The distribution of each local latent variable, of batch shape ``(B,)``."""
        ...

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """Initial natural parameters of the global factors, given those of the prior."""
        ...


def surrogate_elbo(
    rule: LocalInference,
    global_mean: Mapping[str, Any],
    potential: Factor,
    local: LocalPosterior,
) -> Array:
    r"""The objective of local inference, :math:`\mathrm{E}_q \log \psi - KL_n(\mu, q)`, ``(B,)``.

    It is at most the log integral of prior times potential. For chains, the potential is summed
    over time.

    :param rule: the rule that made ``local``.
    :param global_mean: expected statistics of each global factor.
    :param potential: a Gaussian potential; that of a mixture has no closed form.
    :param local: q.

    References: Johnson et al., *Composing graphical models with neural networks for structured
    representations and fast inference* (NIPS 2016), equation 5.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.expfam import Gaussian
        >>> from numpyro_ext.svae import FixedGaussian, GaussianPotential, surrogate_elbo
        >>> rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(1), jnp.eye(1)))
        >>> psi = GaussianPotential(jnp.full((1, 1), 3.0), -jnp.ones((1, 1, 1)))
        >>> bound = surrogate_elbo(rule, {}, psi, rule.infer({}, psi))
        >>> print(f"{bound[0]:.3f}")  # the log integral, because this q is exact
        0.951
    """
    check_gaussian(potential, "surrogate_elbo", "the marginal moments of infer")
    assert isinstance(potential, GaussianPotential)
    moments = local.mean["x"]
    log_psi = jnp.sum(potential.h * moments.x, -1) + jnp.sum(potential.W * moments.xx, (-1, -2))
    kl = rule.local_kl(global_mean, local)
    return jnp.sum(log_psi, tuple(range(kl.ndim, log_psi.ndim))) - kl


def global_statistics(
    rule: LocalInference, global_mean: Mapping[str, Any], local: LocalPosterior
) -> dict[str, Any]:
    """The statistics that a batch adds to each global factor, minus the slope of its divergence.

    They are natural parameters: the conjugate update of a factor is its prior plus N / B times
    these.

    :param rule: the rule that made ``local``.
    :param global_mean: expected statistics of each global factor.
    :param local: q.

    References: Hoffman et al., *Stochastic variational inference* (JMLR 2013), equation 22.

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro_ext.expfam import NIW, Dirichlet
        >>> from numpyro_ext.svae import GMMEP, GaussianPotential, global_statistics
        >>> components = (jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1)))
        >>> known = {
        ...     "pi": Dirichlet.statistics(jnp.array([0.5, 0.5])),
        ...     "components": NIW.statistics(components)}
        >>> psi = GaussianPotential(jnp.zeros((3, 1)), -jnp.ones((3, 1, 1)))  # three data
        >>> added = global_statistics(GMMEP(), known, GMMEP().infer(known, psi))["pi"].a
        >>> print([f"{count:.3f}" for count in added])
        ['1.500', '1.500']
    """

    def evidence(mean: Mapping[str, Any]) -> Array:
        return -jnp.sum(rule.local_kl(mean, local))

    slope = jax.grad(evidence)(dict(global_mean))
    return {name: rule.families[name].Natural(*leaves) for name, leaves in slope.items()}


def expected_log_normal(components: NIWMean, moments: GaussianMean) -> Array:
    """Expected log density of x under components, without ``-d/2 log 2 pi``.

    Batch shapes broadcast. The statistics and their pairing are those of NIW.
    """
    return (
        jnp.sum(components.neg_half_precision * moments.xx, (-1, -2))
        + jnp.sum(components.precision_loc * moments.x, -1)
        + components.neg_half_quad
        + components.half_logdet
    )


def plug_in(components: NIWMean) -> GaussianNatural:
    """The normal of the expected natural parameters of components."""
    return GaussianNatural(components.precision_loc, components.neg_half_precision)


def negative_entropy(natural: GaussianNatural) -> Array:
    """``E log q`` of a normal, without ``-d/2 log 2 pi``."""
    d = natural.h.shape[-1]
    return half_logdet(cholesky(-2 * symmetric(natural.W))) - d / 2


def no_iterations(like: Array) -> LocalInfo:
    """The report of a rule in closed form, for a batch of the shape of ``like``."""
    zeros = jnp.zeros(jnp.shape(like))
    return LocalInfo(zeros.astype(int), zeros, jnp.ones(jnp.shape(like), bool))


def check_batch(global_mean: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> None:
    """The batch shape of a global factor, or an error that names it."""
    mean = global_mean[name]
    batch = mean[0].shape[:-1] if isinstance(mean, DirichletMean) else mean.half_logdet.shape
    if batch != shape:
        raise ValueError(
            f"the factor '{name}' has batch shape {batch}; it must be {shape}, one for each"
            " component: give the prior's parameters that batch shape."
        )


def check_factor(factor: Any, name: str, batch: str, d: int) -> None:
    """An error unless a factor is of our types and its shapes fit the rule.

    :param name: of the rule.
    :param batch: its batch axes, such as ``"B, T"``.
    :param d: the size of x.
    """
    if not isinstance(factor, Factor):
        raise TypeError(
            f"{name} was given a {type(factor).__name__} as its potential; the recognition"
            " network must return a GaussianPotential or a MixturePotential."
        )
    axes = f"{batch}, C" if isinstance(factor, MixturePotential) else batch
    h, W = jnp.shape(factor.h), jnp.shape(factor.W)
    if len(h) != axes.count(",") + 2 or h[-1] != d or W != (*h, d):
        raise ValueError(
            f"the potential of {name} has h of shape {h} and W of shape {W}; they must be"
            f" ({axes}, d) and ({axes}, d, d) with d = {d} as in the prior, so give the"
            f" recognition network that latent_dim, and data of shape ({batch}, ...)."
        )


def check_gaussian(factor: Any, name: str, instead: str) -> None:
    """An error, which names an alternative, unless a factor is a Gaussian potential."""
    if not isinstance(factor, GaussianPotential):
        raise TypeError(
            f"{name} requires a GaussianPotential, but was given a {type(factor).__name__}; use"
            f" {instead}."
        )
