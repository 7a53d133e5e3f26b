"""Local inference for mixtures: the component z, and the vector x in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import Array
from jax.nn import log_softmax
import jax.numpy as jnp

from numpyro_ext.expfam import (
    NIW,
    Categorical,
    CategoricalNatural,
    Dirichlet,
    Gaussian,
    GaussianMean,
    GaussianNatural,
)
from numpyro_ext.svae.local_inference.base import (
    CoordinateAscent,
    LocalPosterior,
    Rule,
    expected_log_normal,
    negative_entropy,
    no_iterations,
    own_moments,
    plug_in,
    times_expected,
)
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential, merge_normals


class _GMM(Rule):
    r"""The model that both rules share.

    .. math::
        z \sim Cat(\pi), \qquad x \mid z \sim N(\mu_z, \Sigma_z), \qquad
        KL_n = \sum_k r_k (\log r_k - \mathrm{E} \log \pi_k) - \tfrac12 \log |V| - \tfrac d2
        - \sum_k r_k \mathrm{E} T_k(x).
    """

    families: ClassVar[Mapping[str, Any]] = {"pi": Dirichlet, "components": NIW}
    local_families: ClassVar[Mapping[str, Any]] = {"z": Categorical, "x": Gaussian}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "pi": ("pi",),
        "components": ("Sigma", "mu"),
    }

    by_state = ("pi", "components")

    def local_kl(self, global_mean: Mapping[str, Any], local: LocalPosterior) -> Array:
        moments = jax.tree.map(lambda leaf: leaf[:, None], local.mean["x"])
        log_p = global_mean["pi"].log_prob + expected_log_normal(global_mean["components"], moments)
        # From the logits: the gradient of r log r is NaN where r underflows.
        log_r = log_softmax(local.natural["z"].logits, axis=-1)
        r = local.mean["z"].probs
        return jnp.sum(r * (log_r - log_p), axis=-1) + negative_entropy(local.natural["x"])


class GMMEP(_GMM):
    r"""Mixture: exact marginals of prior times potential, by one pass of expectation propagation.

    With the plug-in normals :math:`\eta_k` of the components and
    :math:`\log Z_k = \log \int N(x \mid \eta_k)\, \psi(x)\, dx`,

    .. math::
        r_k &\propto \exp(\mathrm{E} \log \pi_k + \log Z_k), \qquad
        \mathrm{E}\, t(x) = \sum_k r_k\, \mathrm{E}_{\eta_k \psi}\, t(x), \\
        q(z) &= r, \quad q(x) = N \text{ of these moments}.

    There is no iteration. The normals :math:`\eta_k` ignore how uncertain a component is; the bound
    does not. q(x) has one mode even where x has several, one for each component.

    The global factors are ``pi``, a Dirichlet, and ``components``, NIW of batch ``(K,)``.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.expfam import NIW, Dirichlet
    >>> from numpyro_ext.svae import GMMEP, GaussianPotential
    >>> known = {
    ...     "pi": Dirichlet.statistics(jnp.array([0.3, 0.7])),
    ...     "components": NIW.statistics(
    ...         (jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))),
    ... }
    >>> psi = GaussianPotential(jnp.array([[0.8]]), jnp.array([[[-1.0]]]))
    >>> print([f"{r:.3f}" for r in GMMEP().infer(known, psi).mean["z"].probs[0]])
    ['0.396', '0.604']
    """

    def infer(
        self, global_mean: Mapping[str, Any], potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check(global_mean, potential)
        eta = plug_in(global_mean["components"])
        logits = global_mean["pi"].log_prob + potential.log_partition_ratio(eta)
        z = CategoricalNatural(logits)
        r = Categorical.mean(z)
        normal = merge_normals(r.probs, potential.tilted_normal(eta))
        x = Gaussian.from_standard(*normal)
        mean = {"z": r, "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(logits[..., 0]))


@dataclass(eq=False, repr=False)
class GMMMeanField(CoordinateAscent, _GMM):
    r"""Mixture: the factorised q(z) q(x) by coordinate ascent, to its fixed point.

    .. math::
        q(x) \propto \psi(x) \exp\Big(\sum_k r_k \langle \eta_k, t(x) \rangle\Big), \qquad
        r_k \propto \exp(\mathrm{E} \log \pi_k + \mathrm{E}\, T_k(x)),

    with the exact expected statistics of the components. Every sweep raises the surrogate bound.
    The answer depends on the start, q is too sure of z, and a start that is symmetric between
    components stays so.

    The global factors are ``pi``, a Dirichlet, and ``components``, NIW of batch ``(K,)``.

    :param init: where r starts: ``"potential"`` is one step from the potential's own moments,
        ``"prior"`` is :math:`\exp \mathrm{E} \log \pi`, and an array ``(K,)`` or ``(B, K)`` holds
        probabilities.
    :param float tol: sweeps end when r moves by less; None as for ``fixed_point``.
    :param int max_iter: at most so many sweeps.

    References: Johnson et al. (NIPS 2016), section 4.

    >>> from numpyro_ext.svae import GMMMeanField
    >>> GMMMeanField().families["components"].__name__
    'NIW'
    """

    mixture_rule = "GMMEP"

    def infer(self, global_mean: Mapping[str, Any], potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        start = self._start(global_mean, potential)
        return self.alternate(_z_given, _x_given, global_mean, potential, start)

    def _start(self, global_mean: Mapping[str, Any], potential: GaussianPotential) -> Array:
        batch, K = potential.h.shape[0], global_mean["pi"].log_prob.shape[-1]
        if not isinstance(self.init, str):
            return self.init_in_shape(potential, (batch, K))
        if self.init == "prior":
            prior = CategoricalNatural(global_mean["pi"].log_prob)
            return jnp.broadcast_to(Categorical.mean(prior).probs, (batch, K))
        return jax.vmap(lambda psi: _start_of((dict(global_mean), psi)))(potential)


Args = tuple[dict[str, Any], GaussianPotential]


def _x_given(args: Args, r: Array) -> GaussianNatural:
    global_mean, psi = args
    return times_expected(psi, r, plug_in(global_mean["components"]))


def _z_given(args: Args, x: GaussianNatural) -> CategoricalNatural:
    return CategoricalNatural(_logits_given(args, Gaussian.mean(x)))


def _logits_given(args: Args, moments: GaussianMean) -> Array:
    global_mean, _ = args
    return global_mean["pi"].log_prob + expected_log_normal(global_mean["components"], moments)


def _start_of(args: Args) -> Array:
    """r of the potential's own moments, or the prior's where the potential is no density."""
    global_mean, psi = args
    moments, proper = own_moments(psi)
    logits = _logits_given(args, moments)
    return jax.nn.softmax(jnp.where(proper, logits, global_mean["pi"].log_prob), axis=-1)
