"""Local inference for hidden Markov models: a chain of states z, and in each step a vector x."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam import NIW, Dirichlet, Gaussian, MarkovChain, MarkovChainNatural
from numpyro_ext.svae.local_inference.base import LocalPosterior, Means
from numpyro_ext.svae.local_inference.states import OnePassEP, States, StatesMeanField


class ChainOfStates(States):
    """The base of rules in which z is a Markov chain of states."""

    batch = "B, T"

    def states_given(self, global_mean: Means, log_weights: Array) -> MarkovChainNatural:
        initial, transition = global_mean["initial"].log_prob, global_mean["transition"].log_prob
        T, K = log_weights.shape[-2:]
        pair = jnp.broadcast_to(transition, (*log_weights.shape[:-2], T - 1, K, K))
        return MarkovChainNatural(log_weights.at[..., 0, :].add(initial), pair)

    def states_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        z = local.mean["z"]
        first = jnp.sum(z.probs[..., 0, :] * global_mean["initial"].log_prob, -1)
        moves = jnp.sum(z.pair_probs * global_mean["transition"].log_prob, (-3, -2, -1))
        return -MarkovChain.entropy(local.natural["z"]) - first - moves


class _HMM(ChainOfStates):
    r"""The model of both rules: :math:`z_1 \sim Cat(\pi), z_{t+1} \mid z_t \sim Cat(P_{z_t}),
    x_t \mid z_t \sim N(\mu_{z_t}, \Sigma_{z_t})`."""

    families: ClassVar[Mapping[str, Any]] = {
        "initial": Dirichlet,
        "transition": Dirichlet,
        "emission": NIW,
    }
    local_families: ClassVar[Mapping[str, Any]] = {"z": MarkovChain, "x": Gaussian}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "initial": ("pi",),
        "transition": ("P",),
        "emission": ("Sigma", "mu"),
    }

    x_factor = "emission"
    by_state = ("initial", "transition", "emission")


class HMMEP(OnePassEP, _HMM):
    r"""Hidden Markov model: expectation propagation, exact marginals in one pass.

    With the plug-in normals :math:`\eta_k` of the states, the log weight of state k at step t is
    :math:`\log \int N(x \mid \eta_k)\, \psi_t(x)\, dx`; q(z) is the chain of these weights with the
    expected log transitions, from one pass forward and one back, and :math:`q(x_t)` is the normal
    with the moments of normal times potential, averaged over :math:`q(z_t)`. There is no
    iteration. The normals ignore how uncertain a state's parameters are; the bound does not.

    The global factors are ``initial``, a Dirichlet, ``transition``, Dirichlet of batch ``(K,)``,
    and ``emission``, NIW of batch ``(K,)``; the model's sites are ``pi``, ``P``, ``Sigma``, ``mu``,
    and ``z`` and ``x`` of events ``(T,)`` and ``(T, d)``. Data have shape ``(B, T, ...)`` and
    potentials batch ``(B, T)``; a zero potential is a step that was not observed.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.expfam import NIW, Dirichlet
    >>> from numpyro_ext.svae import HMMEP, GaussianPotential
    >>> statistics = {
    ...     "initial": Dirichlet.statistics(jnp.array([0.6, 0.4])),
    ...     "transition": Dirichlet.statistics(jnp.array([[0.9, 0.1], [0.2, 0.8]])),
    ...     "emission": NIW.statistics(
    ...         (jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))),
    ... }
    >>> h = jnp.array([-1.0, 0.8, 2.0])[None, :, None]
    >>> psi = GaussianPotential(h, -jnp.ones((1, 3, 1, 1)))
    >>> probs = HMMEP().infer(statistics, psi).mean["z"].probs[0, :, 0]
    >>> print([f"{p:.3f}" for p in probs])
    ['0.954', '0.836', '0.650']
    """


class HMMMeanField(StatesMeanField, _HMM):
    r"""Hidden Markov model: the factorised :math:`q(z) \prod_t q(x_t)` by coordinate ascent.

    .. math::
        q(x_t) \propto \psi_t(x) \exp \sum_k q(z_t = k) \langle \eta_k, t(x) \rangle, \qquad
        q(z) \propto p(z) \exp \sum_t \mathrm{E}\, T_{z_t}(x_t),

    with a whole chain q(z), and the exact expected statistics of the states. Every sweep raises the
    surrogate bound. The answer depends on the start, and q is too sure of z.

    It has the global factors and potentials of :class:`HMMEP`.

    :param init: where the probabilities of states start: ``"potential"`` is one pass with the
        potentials' own moments, ``"prior"`` one without data, and an array ``(T, K)`` or
        ``(B, T, K)`` holds them.
    :param tol, max_iter: of the sweeps, as for ``fixed_point``.

    References: Johnson et al. (NIPS 2016), section 4.

    >>> from numpyro_ext.svae import HMMMeanField
    >>> HMMMeanField(max_iter=50).max_iter
    50
    """

    mixture_rule = "HMMEP"
