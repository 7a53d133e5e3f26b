"""Local inference for switching linear dynamical systems (Johnson et al., 2016)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jax import Array, random
import jax.numpy as jnp

from numpyro_ext.expfam import (
    MNIW,
    NIW,
    Dirichlet,
    GaussianChain,
    GaussianChainNatural,
    MarkovChain,
    MarkovChainNatural,
)
from numpyro_ext.svae.local_inference.base import (
    CoordinateAscent,
    LocalPosterior,
    random_concentration,
)
from numpyro_ext.svae.local_inference.hmm import expected_log_states, states_given
from numpyro_ext.svae.local_inference.lds import (
    chain_given,
    chain_negative_entropy,
    expected_log_steps,
)
from numpyro_ext.svae.potentials import GaussianPotential


@dataclass(eq=False, repr=False)
class SLDSMeanField(CoordinateAscent):
    r"""Switching linear dynamical system: chains q(z) and q(x) in turn, to their fixed point.

    .. math::
        z_1 \sim Cat(\pi), \quad z_{t+1} \mid z_t \sim Cat(P_{z_t}), \qquad
        x_1 \mid z \sim N(\mu_{z_1}, \Sigma_{z_1}), \quad
        x_{t+1} \mid x_t, z \sim N(A_{z_{t+1}} x_t, Q_{z_{t+1}}),

    so that :math:`z_t` selects the dynamics that lead to step t. Given q(z), q(x) is the chain of
    the statistics of the systems averaged over :math:`q(z_t)`; given q(x), q(z) is the chain with
    the expected log densities of the steps under each system as log weights. Every sweep raises
    the surrogate bound. The answer depends on the start, and q is too sure of z.

    The global factors are ``initial``, a Dirichlet, ``transition``, Dirichlet of batch ``(K,)``,
    ``initial_x``, NIW of batch ``(K,)``, and ``dynamics``, MNIW of batch ``(K,)``; the model's
    sites are ``pi``, ``P``, ``Sigma_1``, ``mu_1``, ``Q``, ``A``, and ``z`` and ``x`` of events
    ``(T,)`` and ``(T, d)``. Data have shape ``(B, T, ...)`` and potentials batch ``(B, T)``; a zero
    potential is a step that was not observed.

    :param init: where the probabilities of states start: ``"prior"`` is the chain without data, an
        array ``(T, K)`` or ``(B, T, K)`` holds them.
    :param float tol: sweeps end when probabilities move by less; None as for ``fixed_point``.
    :param int max_iter: at most so many sweeps.

    References: Johnson et al. (NIPS 2016), section 4 and appendix B.

    >>> from numpyro_ext.svae import SLDSMeanField
    >>> sorted(SLDSMeanField().families)
    ['dynamics', 'initial', 'initial_x', 'transition']
    """

    families: ClassVar[Mapping[str, Any]] = {
        "initial": Dirichlet,
        "transition": Dirichlet,
        "initial_x": NIW,
        "dynamics": MNIW,
    }
    local_families: ClassVar[Mapping[str, Any]] = {"z": MarkovChain, "x": GaussianChain}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "initial": ("pi",),
        "transition": ("P",),
        "initial_x": ("Sigma_1", "mu_1"),
        "dynamics": ("Q", "A"),
    }

    batch, x_factor, mixture_rule = "B, T", "initial_x", "HMMEP"
    by_state = ("initial", "transition", "initial_x", "dynamics")
    starts = ("prior",)
    init: Any = "prior"

    def infer(self, global_mean: Mapping[str, Any], potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        shape = (*potential.h.shape[:-1], global_mean["initial"].log_prob.shape[-1])
        if isinstance(self.init, str):
            states = MarkovChain.mean(states_given(global_mean, jnp.zeros(shape[1:])))
            start = jnp.broadcast_to(states.probs, shape).astype(potential.h.dtype)
        else:
            start = self.init_in_shape(potential, shape)
        return self.alternate(_z_given, _x_given, global_mean, potential, start)

    def local_kl(self, global_mean: Mapping[str, Any], local: LocalPosterior) -> Array:
        z, x = local.mean["z"], local.mean["x"]
        expected = z.probs * expected_log_steps(*_systems(global_mean), x)
        states = -MarkovChain.entropy(local.natural["z"]) - expected_log_states(global_mean, z)
        return states + chain_negative_entropy(local.natural["x"]) - jnp.sum(expected, (-2, -1))

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """The start is the prior's, with concentrations between 1 and 2, and with transitions of
        0.9 times the identity plus noise of 0.1, which breaks the symmetry between systems."""
        key_pi, key_P, key_A = random.split(rng_key, 3)
        start = MNIW.to_standard(prior["dynamics"])
        noise = random.normal(key_A, start.weight.shape)
        weight = 0.9 * jnp.eye(start.weight.shape[-1]) + 0.1 * noise
        return {
            "initial": random_concentration(key_pi, prior["initial"]),
            "transition": random_concentration(key_P, prior["transition"]),
            "initial_x": prior["initial_x"],
            "dynamics": MNIW.from_standard(**start._replace(weight=weight)._asdict()),
        }


Args = tuple[dict[str, Any], GaussianPotential]


def _systems(global_mean: Mapping[str, Any]) -> tuple[Any, Any]:
    return global_mean["initial_x"], global_mean["dynamics"]


def _x_given(args: Args, r: Array) -> GaussianChainNatural:
    global_mean, psi = args
    return chain_given(*_systems(global_mean), psi, r)


def _z_given(args: Args, x: GaussianChainNatural) -> MarkovChainNatural:
    global_mean, _ = args
    log_weights = expected_log_steps(*_systems(global_mean), GaussianChain.mean(x))
    return states_given(global_mean, log_weights)
