"""Rules in which a state z, or a chain of states, selects the distribution of x."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
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
    MarkovChain,
    MarkovChainNatural,
)
from numpyro_ext.svae.local_inference.base import (
    CoordinateAscent,
    LocalPosterior,
    Means,
    Rule,
    expected_log_normal,
    negative_entropy,
    no_iterations,
    own_moments,
    plug_in,
    times_expected,
)
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential, merge_normals


class States(Rule, ABC):
    """The base of these rules: q(z) given log weights of the states, and q(x) given q(z)."""

    @abstractmethod
    def states_given(self, global_mean: Means, log_weights: Array) -> Any:
        """q(z): the expected prior of the states times these weights, ``(..., K)``."""

    @abstractmethod
    def states_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        """``(B,)``, the divergence of q(z) from the expected prior of the states."""

    def vectors_given(self, global_mean: Means, psi: GaussianPotential, r: Array) -> Any:
        """q(x) given the probabilities r of the states, ``(..., K)``."""
        return times_expected(psi, r, plug_in(global_mean[self.x_factor]))

    def log_weights(self, global_mean: Means, moments: Any) -> Array:
        """``(..., K)``, the expected log density of x in each state, without ``-d/2 log 2 pi``."""
        moments = GaussianMean(moments.x[..., None, :], moments.xx[..., None, :, :])
        return expected_log_normal(global_mean[self.x_factor], moments)

    def vectors_negative_entropy(self, natural: Any) -> Array:
        """``E log q(x)``, without ``-d/2 log 2 pi``."""
        return negative_entropy(natural)

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        expected = local.mean["z"].probs * self.log_weights(global_mean, local.mean["x"])
        log_q = self.vectors_negative_entropy(local.natural["x"])
        steps = tuple(range(1, log_q.ndim))
        vectors = jnp.sum(log_q, steps) - jnp.sum(expected, tuple(range(1, expected.ndim)))
        return self.states_kl(global_mean, local) + vectors


class OnePassEP(States):
    """Exact marginals of prior times potential, with the plug-in normals of the components."""

    def infer(
        self, global_mean: Means, potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check(global_mean, potential)
        eta = plug_in(global_mean[self.x_factor])
        z = self.states_given(global_mean, potential.log_partition_ratio(eta))
        states = self.local_families["z"].mean(z)
        x = Gaussian.from_standard(*merge_normals(states.probs, potential.tilted_normal(eta)))
        mean = {"z": states, "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(len(potential.h)))


class StatesMeanField(CoordinateAscent, States):
    """Updates of q(x) and of q(z) in turn, for each datum, to their fixed point."""

    def infer(self, global_mean: Means, potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        z_family, x_family = self.local_families["z"], self.local_families["x"]

        def infer_datum(psi: GaussianPotential, start: Array) -> LocalPosterior:
            args = dict(global_mean), psi
            r, info = self.solve(self._sweep, args, start)
            z = self._states_after(args, r)  # the last step is differentiable
            states = z_family.mean(z)
            x = self.vectors_given(*args, states.probs)
            return LocalPosterior({"z": z, "x": x}, {"z": states, "x": x_family.mean(x)}, info)

        return jax.vmap(infer_datum)(potential, self._start(global_mean, potential))

    def _states_after(self, args: tuple[dict[str, Any], GaussianPotential], r: Array) -> Any:
        """q(z) after an update of q(x) and one of q(z)."""
        moments = self.local_families["x"].mean(self.vectors_given(*args, r))
        return self.states_given(args[0], self.log_weights(args[0], moments))

    def _sweep(self, args: tuple[dict[str, Any], GaussianPotential], r: Array) -> Array:
        return self.local_families["z"].mean(self._states_after(args, r)).probs

    def _start(self, global_mean: Means, potential: GaussianPotential) -> Array:
        """The probabilities of the states at first, ``(B, ..., K)``."""
        K = global_mean[self.by_state[0]].log_prob.shape[-1]
        shape = (*potential.h.shape[:-1], K)
        if not isinstance(self.init, str):
            return self.init_in_shape(potential, shape)
        log_weights = jnp.zeros(shape, potential.h.dtype)
        if self.init == "potential":
            moments, proper = own_moments(potential)
            of_states = self.log_weights(global_mean, moments)
            log_weights = jnp.where(proper[..., None], of_states, log_weights)
        return self.local_families["z"].mean(self.states_given(global_mean, log_weights)).probs


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
    >>> print([f"{r:.3f}" for r in jax.jit(GMMEP().infer)(statistics, psi).mean["z"].probs[0]])
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
    with the moments of normal times potential, averaged over :math:`q(z_t)`. The normals ignore how
    uncertain the parameters of a state are; the bound does not.

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
    >>> probs = jax.jit(HMMEP().infer)(statistics, psi).mean["z"].probs[0, :, 0]
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
    >>> sorted(HMMMeanField().families)
    ['emission', 'initial', 'transition']
    """

    mixture_rule = "HMMEP"
