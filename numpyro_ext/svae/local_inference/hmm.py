"""Local inference for hidden Markov models: a chain of states z, and in each step a vector x."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import Array
import jax.numpy as jnp

from numpyro_ext.expfam import (
    NIW,
    Dirichlet,
    Gaussian,
    GaussianNatural,
    MarkovChain,
    MarkovChainNatural,
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


class _HMM(Rule):
    r"""The model that both rules share.

    .. math::
        z_1 \sim Cat(\pi), \qquad z_{t+1} \mid z_t \sim Cat(P_{z_t}), \qquad
        x_t \mid z_t \sim N(\mu_{z_t}, \Sigma_{z_t}).
    """

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

    batch = "B, T"
    x_factor = "emission"
    by_state = ("initial", "transition", "emission")

    def local_kl(self, global_mean: Mapping[str, Any], local: LocalPosterior) -> Array:
        emission, z = global_mean["emission"], local.mean["z"]
        moments = jax.tree.map(lambda leaf: leaf[:, :, None], local.mean["x"])
        expected = z.probs * expected_log_normal(emission, moments)
        x = jnp.sum(negative_entropy(local.natural["x"]) - jnp.sum(expected, -1), -1)
        states = -MarkovChain.entropy(local.natural["z"]) - expected_log_states(global_mean, z)
        return states + x


class HMMEP(_HMM):
    r"""Hidden Markov model: expectation propagation, exact marginals in one pass.

    With the plug-in normals :math:`\eta_k` of the states, the log weight of state k at step t is
    :math:`\log \int N(x \mid \eta_k)\, \psi_t(x)\, dx`; q(z) is the chain of these weights with the
    expected log transitions, from one pass forward and one back, and :math:`q(x_t)` is the normal
    whose moments are those of normal times potential, averaged over :math:`q(z_t)`. There is no
    iteration. The normals ignore how uncertain a state's parameters are; the bound does not.

    The global factors are ``initial``, a Dirichlet, ``transition``, Dirichlet of batch ``(K,)``,
    and ``emission``, NIW of batch ``(K,)``; the model's sites are ``pi``, ``P``, ``Sigma``, ``mu``,
    and ``z`` and ``x`` of events ``(T,)`` and ``(T, d)``. Data have shape ``(B, T, ...)`` and
    potentials batch ``(B, T)``; a zero potential is a step that was not observed.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.expfam import NIW, Dirichlet
    >>> from numpyro_ext.svae import HMMEP, GaussianPotential
    >>> known = {
    ...     "initial": Dirichlet.statistics(jnp.array([0.6, 0.4])),
    ...     "transition": Dirichlet.statistics(jnp.array([[0.9, 0.1], [0.2, 0.8]])),
    ...     "emission": NIW.statistics(
    ...         (jnp.array([[-1.0], [2.0]]), jnp.array([[[1.0]], [[0.5]]]))),
    ... }
    >>> h = jnp.array([-1.0, 0.8, 2.0])[None, :, None]
    >>> psi = GaussianPotential(h, -jnp.ones((1, 3, 1, 1)))
    >>> probs = HMMEP().infer(known, psi).mean["z"].probs[0, :, 0]
    >>> print([f"{p:.3f}" for p in probs])
    ['0.954', '0.836', '0.650']
    """

    def infer(
        self, global_mean: Mapping[str, Any], potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check(global_mean, potential)
        eta = plug_in(global_mean["emission"])
        z = states_given(global_mean, potential.log_partition_ratio(eta))
        states = MarkovChain.mean(z)
        x = Gaussian.from_standard(*merge_normals(states.probs, potential.tilted_normal(eta)))
        mean = {"z": states, "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(z.unary[:, 0, 0]))


@dataclass(eq=False, repr=False)
class HMMMeanField(CoordinateAscent, _HMM):
    r"""Hidden Markov model: the factorised :math:`q(z) \prod_t q(x_t)` by coordinate ascent.

    .. math::
        q(x_t) \propto \psi_t(x) \exp \sum_k q(z_t = k) \langle \eta_k, t(x) \rangle, \qquad
        q(z) \propto p(z) \exp \sum_t \mathrm{E}\, T_{z_t}(x_t),

    with a whole chain q(z), and the exact expected statistics of the states. Every sweep raises the
    surrogate bound. The answer depends on the start, and q is too sure of z.

    The global factors and potentials are those of :class:`HMMEP`.

    :param init: where the probabilities of states start: ``"potential"`` is one pass with the
        potentials' own moments, ``"prior"`` one without data, and an array ``(T, K)`` or
        ``(B, T, K)`` holds them.
    :param float tol: sweeps end when probabilities move by less; None as for ``fixed_point``.
    :param int max_iter: at most so many sweeps.

    References: Johnson et al. (NIPS 2016), section 4.

    >>> from numpyro_ext.svae import HMMMeanField
    >>> HMMMeanField(max_iter=50).max_iter
    50
    """

    mixture_rule = "HMMEP"

    def infer(self, global_mean: Mapping[str, Any], potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        K = global_mean["initial"].log_prob.shape[-1]
        if not isinstance(self.init, str):
            start = self.init_in_shape(potential, (*potential.h.shape[:-1], K))
        else:
            start = jax.vmap(lambda psi: _begin((dict(global_mean), psi), self.init == "prior"))(
                potential
            )
        return self.alternate(_z_given, _x_given, global_mean, potential, start)


Args = tuple[dict[str, Any], GaussianPotential]


def states_given(global_mean: Mapping[str, Any], log_weights: Array) -> MarkovChainNatural:
    """The chain of states with these log weights ``(..., T, K)`` of the data."""
    initial, transition = global_mean["initial"].log_prob, global_mean["transition"].log_prob
    T, K = log_weights.shape[-2:]
    pair = jnp.broadcast_to(transition, (*log_weights.shape[:-2], T - 1, K, K))
    return MarkovChainNatural(log_weights.at[..., 0, :].add(initial), pair)


def expected_log_states(global_mean: Mapping[str, Any], states: Any) -> Array:
    """Expected log probability of a chain of states, by its marginals."""
    first = jnp.sum(states.probs[..., 0, :] * global_mean["initial"].log_prob, -1)
    moves = states.pair_probs * global_mean["transition"].log_prob
    return first + jnp.sum(moves, axis=(-3, -2, -1))


def _x_given(args: Args, r: Array) -> GaussianNatural:
    global_mean, psi = args
    return times_expected(psi, r, plug_in(global_mean["emission"]))


def _z_given(args: Args, x: GaussianNatural) -> MarkovChainNatural:
    global_mean, _ = args
    moments = jax.tree.map(lambda leaf: leaf[:, None], Gaussian.mean(x))
    return states_given(global_mean, expected_log_normal(global_mean["emission"], moments))


def _begin(args: Args, without_data: bool) -> Array:
    """Probabilities from the potentials' own moments; a step that is no density says nothing."""
    global_mean, psi = args
    moments, proper = own_moments(psi)
    moments = jax.tree.map(lambda leaf: leaf[:, None], moments)
    log_weights = expected_log_normal(global_mean["emission"], moments)
    said = proper & (not without_data)
    log_weights = jnp.where(said[:, None], log_weights, 0.0)
    return MarkovChain.mean(states_given(global_mean, log_weights)).probs
