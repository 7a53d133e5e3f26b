"""Local inference for linear dynamical systems: exact smoothing of a chain of normal vectors."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam import (
    MNIW,
    NIW,
    GaussianChain,
    GaussianChainMean,
    GaussianChainNatural,
    GaussianMean,
    MNIWMean,
    NIWMean,
)
from numpyro_ext.svae.local_inference.base import (
    LocalPosterior,
    Means,
    Rule,
    expected_log_normal,
    no_iterations,
)
from numpyro_ext.svae.potentials import GaussianPotential


class LDS(Rule):
    r"""Linear dynamical system: x is a chain, and q(x) its exact posterior, by smoothing.

    .. math::
        x_1 \sim N(\mu, \Sigma), \qquad x_{t+1} \sim N(A x_t, Q), \qquad
        q(x) \propto \exp(\langle \mathrm{E}_{q(\theta)} \eta(\theta), t(x) \rangle)
        \prod_t \psi_t(x_t).

    q is the optimum of the surrogate bound, so that ``"full"`` and ``"explicit_only"`` gradients of
    :class:`SVAEELBO` agree where the potentials are exact. The cost is :math:`O(T d^3)`.

    The global factors are ``initial``, NIW, and ``dynamics``, MNIW with as many inputs as outputs;
    the model's sites are ``Sigma_1``, ``mu_1``, ``Q``, ``A``, and ``x`` of events ``(T, d)``, for
    which :class:`~numpyro_ext.expfam.GaussianChain` has a distribution. Data have shape ``(B, T,
    ...)`` and potentials batch ``(B, T)``; a zero potential is a step that was not observed, and
    the steps after the last observation are a forecast.

    **The prior and the start.** An entry of A has the prior variance Q / K, so that K = I beside a
    small Q pulls A to zero. A starts at 0.9 I; where cycles are likely, give :class:`SVAEGuide` an
    ``init_natural`` with a rotation, as ``examples/svae_sunspots.py`` does.

    References: Johnson et al. (NIPS 2016), section 4 and appendix B.

    >>> from numpyro_ext.expfam import MNIW, NIW
    >>> from numpyro_ext.svae import LDS, GaussianPotential
    >>> statistics = {
    ...     "initial": NIW.statistics((jnp.array([0.5]), jnp.eye(1))),
    ...     "dynamics": MNIW.statistics((0.8 * jnp.eye(1), 0.3 * jnp.eye(1))),
    ... }
    >>> y = jnp.array([1.0, -0.3, 0.4, 2.0])[None, :, None]
    >>> psi = GaussianPotential.from_diagonal(2.0 * y, jnp.full((1, 4, 1), 2.0))
    >>> means = jax.jit(LDS().infer)(statistics, psi).mean["x"].x[0, :, 0]
    >>> print([f"{m:.3f}" for m in means])
    ['0.689', '0.389', '0.626', '1.063']
    """

    families: ClassVar[Mapping[str, Any]] = {"initial": NIW, "dynamics": MNIW}
    local_families: ClassVar[Mapping[str, Any]] = {"x": GaussianChain}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "initial": ("Sigma_1", "mu_1"),
        "dynamics": ("Q", "A"),
    }

    batch, x_factor, mixture_rule = "B, T", "initial", "HMMEP"

    def infer(self, global_mean: Means, potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        r = jnp.ones((*potential.h.shape[:-1], 1), potential.h.dtype)
        natural = chain_given(*_one_system(global_mean), potential, r)
        mean = GaussianChain.mean(natural)
        return LocalPosterior({"x": natural}, {"x": mean}, no_iterations(len(potential.h)))

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        expected = expected_log_steps(*_one_system(global_mean), local.mean["x"])
        return chain_negative_entropy(local.natural["x"]) - jnp.sum(expected, axis=(-2, -1))

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """The prior's, with a transition of 0.9 times the identity."""
        start = MNIW.to_standard(prior["dynamics"])
        weight = 0.9 * jnp.eye(start.weight.shape[-1])
        dynamics = MNIW.from_standard(**start._replace(weight=weight)._asdict())
        return {"initial": prior["initial"], "dynamics": dynamics}


def _one_system(global_mean: Means) -> tuple[Any, Any]:
    """The factors with a batch axis of length one."""
    factors = global_mean["initial"], global_mean["dynamics"]
    return jax.tree.map(lambda leaf: leaf[None], factors)


def chain_given(
    initial: NIWMean, dynamics: MNIWMean, potential: GaussianPotential, r: Array
) -> GaussianChainNatural:
    """The chain of expected natural parameters, averaged over the probabilities r ``(*batch, T,
    K)`` of each system at each step."""
    h = jnp.einsum("...k,ki->...i", r[..., 0, :], initial.precision_loc)
    first = jnp.einsum("...k,kij->...ij", r[..., 0, :], initial.neg_half_precision)
    later = r[..., 1:, :]
    to = jnp.einsum("...tk,kij->...tij", later, dynamics.neg_half_precision)
    back = jnp.einsum("...tk,kij->...tij", later, dynamics.neg_half_quad)
    V = jnp.einsum("...tk,kij->...tij", later, dynamics.precision_weight)
    W = potential.W + jnp.concatenate([first[..., None, :, :], to], axis=-3)
    return GaussianChainNatural(potential.h.at[..., 0, :].add(h), W.at[..., :-1, :, :].add(back), V)


def expected_log_steps(initial: NIWMean, dynamics: MNIWMean, moments: GaussianChainMean) -> Array:
    """``(*batch, T, K)``, the expected log density of each step, without ``-d/2 log 2 pi``."""
    first = GaussianMean(moments.x[..., :1, None, :], moments.xx[..., :1, None, :, :])
    to, before = moments.xx[..., 1:, :, :], moments.xx[..., :-1, :, :]
    later = (
        jnp.einsum("kij,...tij->...tk", dynamics.neg_half_precision, to)
        + jnp.einsum("kij,...tij->...tk", dynamics.precision_weight, moments.xx_next)
        + jnp.einsum("kij,...tij->...tk", dynamics.neg_half_quad, before)
        + dynamics.half_logdet
    )
    return jnp.concatenate([expected_log_normal(initial, first), later], axis=-2)


def chain_negative_entropy(natural: GaussianChainNatural) -> Array:
    """``E log q`` of a chain, without ``-T d/2 log 2 pi``."""
    T, d = natural.h.shape[-2:]
    return T * d / 2 * jnp.log(2 * jnp.pi) - GaussianChain.entropy(natural)
