"""Local inference for mixtures: the component z, and the vector x in it."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jax import Array
from jax.nn import log_softmax
import jax.numpy as jnp

from numpyro_ext.expfam import NIW, Categorical, CategoricalNatural, Dirichlet, Gaussian
from numpyro_ext.svae.local_inference.base import LocalPosterior, Means
from numpyro_ext.svae.local_inference.states import OnePassEP, States, StatesMeanField


class _GMM(States):
    r"""The model of both rules: :math:`z \sim Cat(\pi), x \mid z \sim N(\mu_z, \Sigma_z)`."""

    families: ClassVar[Mapping[str, Any]] = {"pi": Dirichlet, "components": NIW}
    local_families: ClassVar[Mapping[str, Any]] = {"z": Categorical, "x": Gaussian}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "pi": ("pi",),
        "components": ("Sigma", "mu"),
    }

    by_state = ("pi", "components")

    def states_given(self, global_mean: Means, log_weights: Array) -> CategoricalNatural:
        return CategoricalNatural(global_mean["pi"].log_prob + log_weights)

    def states_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        # From the logits: the gradient of r log r is NaN where r underflows.
        log_r = log_softmax(local.natural["z"].logits, axis=-1)
        return jnp.sum(local.mean["z"].probs * (log_r - global_mean["pi"].log_prob), axis=-1)


class GMMEP(OnePassEP, _GMM):
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
    >>> statistics = {
    ...     "pi": Dirichlet.statistics(jnp.array([0.3, 0.7])),
    ...     "components": NIW.statistics(
    ...         (jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))),
    ... }
    >>> psi = GaussianPotential(jnp.array([[0.8]]), jnp.array([[[-1.0]]]))
    >>> print([f"{r:.3f}" for r in GMMEP().infer(statistics, psi).mean["z"].probs[0]])
    ['0.396', '0.604']
    """


class GMMMeanField(StatesMeanField, _GMM):
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
    :param tol, max_iter: of the sweeps, as for ``fixed_point``.

    References: Johnson et al. (NIPS 2016), section 4.

    >>> from numpyro_ext.svae import GMMMeanField
    >>> GMMMeanField().families["components"].__name__
    'NIW'
    """

    mixture_rule = "GMMEP"
