"""The interface of a rule of local inference, and the functions that all rules share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_ext._checks import check_count
from numpyro_ext.expfam import (
    NIW,
    Dirichlet,
    DirichletMean,
    DirichletNatural,
    Gaussian,
    GaussianMean,
    GaussianNatural,
    NIWMean,
    NIWNatural,
    fixed_point,
)
from numpyro_ext.expfam.linalg import cholesky, half_logdet, outer, symmetric
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential

Factor = GaussianPotential | MixturePotential
Means = Mapping[str, Any]
"""Expected statistics of the global factors, by name."""


class LocalInfo(NamedTuple):
    """A report on the iterations of a rule, with arrays ``(B,)``."""

    num_iter: Array
    residual: Array
    converged: Array


class LocalPosterior(NamedTuple):
    """The factors of q of a batch, by the names of local latent variables: natural parameters and
    expected statistics, with leaves ``(B, ...)``."""

    natural: dict[str, Any]
    mean: dict[str, Any]
    info: LocalInfo


@runtime_checkable
class LocalInference(Protocol):
    r"""A rule of local inference: how q of the local latent variables of each datum is found.

    Write one of your own by giving these attributes and methods. With global expected statistics
    :math:`\mu` and a potential :math:`\psi_n` of each datum,

    .. math::
        KL_n(\mu, q_n) = \mathrm{E}_{q_n} \log q_n(x, z)
        - \mathrm{E}_{q(\theta) q_n} \log p(x, z \mid \theta)

    has to be affine in :math:`\mu` for a given q, which is how natural gradients of the global
    variables come about. The result of a datum never depends on the others of its batch.

    - **families, local_families** - the family of each global factor, and of each local latent
      variable, by name.
    - **site_names** - the model's sites of both. A family of pairs, such as NIW, has two: the
      covariance, and the mean given it.

    >>> from numpyro_ext.svae import GMMEP, LocalInference
    >>> isinstance(GMMEP(), LocalInference)
    True
    """

    @property
    def families(self) -> Mapping[str, Any]: ...

    @property
    def local_families(self) -> Mapping[str, Any]: ...

    @property
    def site_names(self) -> Mapping[str, tuple[str, ...]]: ...

    def infer(self, global_mean: Means, potential: Any) -> LocalPosterior:
        """q for each datum of a batch, given expected statistics of each global factor, and a
        potential of batch shape ``(B,)``."""
        ...

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        """``(B,)``, the divergence above, affine in ``global_mean``."""
        ...

    def distributions(self, local: LocalPosterior) -> dict[str, dist.Distribution]:
        """The distribution of each local latent variable, of batch shape ``(B,)``."""
        ...

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """Initial natural parameters of the global factors, given the prior's."""
        ...


class Rule:
    """The base of the rules of this package; a local latent variable has a site of its name."""

    families: ClassVar[Mapping[str, Any]]
    local_families: ClassVar[Mapping[str, Any]]
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    batch: ClassVar[str] = "B"  # the batch axes of a potential
    x_factor: ClassVar[str] = "components"  # the global factor with the size of x
    by_state: ClassVar[tuple[str, ...]] = ()  # a Dirichlet over states, and what each state has
    mixture_rule: ClassVar[str | None] = None  # takes mixture potentials, if this one does not

    @property
    def site_names(self) -> dict[str, tuple[str, ...]]:
        return {**self.global_sites, **{name: (name,) for name in self.local_families}}

    def check(self, global_mean: Means, potential: Any) -> None:
        """An error that names a global factor or a potential of the wrong shape."""
        for name in self.by_state[1:]:
            check_batch(name, global_mean[name], global_mean[self.by_state[0]].log_prob.shape)
        self.check_potential(potential, global_mean[self.x_factor].precision_loc.shape[-1])

    def check_potential(self, potential: Any, d: int) -> None:
        """An error unless a potential has the batch axes of the rule, and x has d coordinates."""
        name = type(self).__name__
        is_mixture = isinstance(potential, MixturePotential)
        if is_mixture and self.mixture_rule is not None:
            raise TypeError(f"{name} requires a GaussianPotential; use {self.mixture_rule}.")
        axes = f"{self.batch}, C" if is_mixture else self.batch
        h, W = jnp.shape(potential.h), jnp.shape(potential.W)
        if len(h) != axes.count(",") + 2 or h[-1] != d or W != (*h, d):
            raise ValueError(
                f"the potential of {name} has h of shape {h} and W of shape {W}; they must be"
                f" ({axes}, d) and ({axes}, d, d) with d = {d} as in the prior."
            )

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """The prior's, with locations spread by 3 and concentrations between 1 and 2."""
        starts = {Dirichlet: random_concentration, NIW: spread_locations}
        keys = random.split(rng_key, len(prior))
        pairs = zip(self.families.items(), keys, strict=True)
        return {name: starts[family](key, prior[name]) for (name, family), key in pairs}

    def distributions(self, local: LocalPosterior) -> dict[str, dist.Distribution]:
        fns = {n: q.to_distribution(local.natural[n]) for n, q in self.local_families.items()}
        return {name: fn.to_event(len(fn.batch_shape) - 1) for name, fn in fns.items()}


@dataclass(eq=False, repr=False)
class CoordinateAscent(Rule):
    """The base of rules that sweep to a fixed point."""

    starts: ClassVar[tuple[str | None, ...]] = ("potential", "prior")  # of init, beside an array

    init: Any = "potential"
    tol: float | None = None
    max_iter: int = 200

    def __post_init__(self) -> None:
        if self.init is not None and not isinstance(self.init, str):
            self.init = np.asarray(self.init)
        elif self.init not in self.starts:
            allowed = ", ".join(map(repr, self.starts))
            raise ValueError(
                f"init is {self.init!r}; it must be {allowed}, or an array of probabilities."
            )
        self.max_iter = check_count("max_iter", self.max_iter)

    def init_in_shape(self, potential: Factor, shape: tuple[int, ...]) -> Array:
        """The array ``init`` in this shape; it may lack the first axis, of the batch."""
        if self.init.shape not in (shape, shape[1:]):
            raise ValueError(
                f"init of {type(self).__name__} has shape {self.init.shape}; it must be {shape[1:]}"
                f" or {shape}."
            )
        return jnp.broadcast_to(self.init, shape).astype(potential.h.dtype)

    def solve(self, sweep: Callable[[Any, Any], Any], args: Any, start: Any) -> tuple[Any, Any]:
        """The fixed point of ``sweep``, and the report on its iterations."""
        value, *report = fixed_point(sweep, args, start, tol=self.tol, max_iter=self.max_iter)
        return value, LocalInfo(*report)


def surrogate_elbo(
    rule: LocalInference, global_mean: Means, potential: Factor, local: LocalPosterior
) -> Array:
    r"""The objective of local inference, :math:`\mathrm{E}_q \log \psi - KL_n(\mu, q)`, ``(B,)``.

    It is at most the log integral of prior times potential, which is summed over time for chains.
    With a mixture there is no closed form.

    References: Johnson et al. (NIPS 2016), equation 5.

    >>> from numpyro_ext.expfam import Gaussian
    >>> from numpyro_ext.svae import FixedGaussian, GaussianPotential, surrogate_elbo
    >>> rule = FixedGaussian(Gaussian.from_standard(jnp.zeros(1), jnp.eye(1)))
    >>> psi = GaussianPotential(jnp.full((1, 1), 3.0), -jnp.ones((1, 1, 1)))
    >>> bound = surrogate_elbo(rule, {}, psi, rule.infer({}, psi))
    >>> print(f"{bound[0]:.3f}")  # the log integral, because this q is exact
    0.951
    """
    if not isinstance(potential, GaussianPotential):
        raise TypeError("surrogate_elbo requires a GaussianPotential.")
    moments = local.mean["x"]
    log_psi = jnp.sum(potential.h * moments.x, -1) + jnp.sum(potential.W * moments.xx, (-1, -2))
    kl = rule.local_kl(global_mean, local)
    return jnp.sum(log_psi, tuple(range(kl.ndim, log_psi.ndim))) - kl


def global_statistics(
    rule: LocalInference, global_mean: Means, local: LocalPosterior
) -> dict[str, Any]:
    """The statistics that a batch adds to each global factor, minus the slope of its divergence.

    The conjugate update of a factor is its prior plus N / B times these natural parameters.

    References: Hoffman et al., *Stochastic variational inference* (JMLR 2013), equation 22.

    >>> from numpyro_ext.expfam import NIW, Dirichlet
    >>> from numpyro_ext.svae import GMMEP, GaussianPotential, global_statistics
    >>> components = (jnp.array([[-1.0], [1.0]]), jnp.ones((2, 1, 1)))
    >>> statistics = {
    ...     "pi": Dirichlet.statistics(jnp.array([0.5, 0.5])),
    ...     "components": NIW.statistics(components)}
    >>> psi = GaussianPotential(jnp.zeros((3, 1)), -jnp.ones((3, 1, 1)))  # three data
    >>> rule = GMMEP()
    >>> added = jax.jit(lambda: global_statistics(rule, statistics, rule.infer(statistics, psi)))()
    >>> print([f"{count:.3f}" for count in added["pi"].a])
    ['1.500', '1.500']
    """

    def evidence(mean: Mapping[str, Any]) -> Array:
        return -jnp.sum(rule.local_kl(mean, local))

    slope = jax.grad(evidence)(dict(global_mean))
    return {name: rule.families[name].Natural(*leaves) for name, leaves in slope.items()}


def expected_log_normal(components: NIWMean, moments: GaussianMean) -> Array:
    """Expected log density of x under components, without ``-d/2 log 2 pi``; shapes broadcast."""
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


def random_concentration(rng_key: Array, prior: DirichletNatural) -> DirichletNatural:
    """Concentrations between 1 and 2, which break the symmetry between states."""
    return DirichletNatural(random.uniform(rng_key, jnp.shape(prior.a)))


def spread_locations(rng_key: Array, prior: NIWNatural) -> NIWNatural:
    """The prior with its locations spread by 3."""
    start = NIW.to_standard(prior)
    loc = start.loc + 3 * random.normal(rng_key, start.loc.shape)
    return NIW.from_standard(**start._replace(loc=loc)._asdict())


def times_expected(
    psi: GaussianPotential, r: Array, eta: GaussianNatural, axes: str = "k"
) -> GaussianNatural:
    """A potential times the exponential of the mean over r of normals, of batch ``axes``."""
    return GaussianNatural(
        psi.h + jnp.einsum(f"...{axes},{axes}i->...i", r, eta.h),
        psi.W + jnp.einsum(f"...{axes},{axes}ij->...ij", r, eta.W),
    )


def own_moments(psi: GaussianPotential) -> tuple[GaussianMean, Array]:
    """The moments of a potential, or of N(0, I) if it is no density; and whether it is one."""
    proper = Gaussian.in_domain(GaussianNatural(psi.h, psi.W))
    unit = -jnp.eye(psi.h.shape[-1], dtype=psi.W.dtype) / 2
    W = jnp.where(proper[..., None, None], psi.W, unit)
    loc, covariance = Gaussian.to_standard(GaussianNatural(psi.h, W))
    loc = jnp.where(proper[..., None], loc, 0.0)
    return GaussianMean(loc, covariance + outer(loc, loc)), proper


def no_iterations(batch_size: int) -> LocalInfo:
    """The report of a rule in closed form."""
    zeros = jnp.zeros(batch_size)
    return LocalInfo(zeros.astype(int), zeros, jnp.ones(batch_size, bool))


def check_batch(name: str, mean: Any, shape: tuple[int, ...]) -> None:
    """An error unless the expected statistics of a global factor have this batch shape."""
    batch = mean[0].shape[:-1] if isinstance(mean, DirichletMean) else mean.half_logdet.shape
    if batch != shape:
        raise ValueError(
            f"the factor '{name}' has batch shape {batch}; it must be {shape}, as the parameters of"
            " the prior."
        )
