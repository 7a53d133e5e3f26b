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
    GaussianChainMean,
    GaussianChainNatural,
    MarkovChain,
)
from numpyro_ext.svae.local_inference.base import Means, random_concentration
from numpyro_ext.svae.local_inference.lds import (
    chain_given,
    chain_negative_entropy,
    expected_log_steps,
)
from numpyro_ext.svae.local_inference.states import ChainOfStates, StatesMeanField
from numpyro_ext.svae.potentials import GaussianPotential


@dataclass(eq=False, repr=False)
class SLDSMeanField(StatesMeanField, ChainOfStates):
    r"""Switching linear dynamical system: chains q(z) and q(x) in turn, to their fixed point.

    .. math::
        z_1 \sim Cat(\pi), \quad z_{t+1} \mid z_t \sim Cat(P_{z_t}), \qquad
        x_1 \mid z \sim N(\mu_{z_1}, \Sigma_{z_1}), \quad
        x_{t+1} \mid x_t, z \sim N(A_{z_{t+1}} x_t, Q_{z_{t+1}}),

    so that :math:`z_t` selects the dynamics that lead to step t. Given q(z), q(x) is the chain of
    the statistics of the systems averaged over :math:`q(z_t)`; given q(x), q(z) is the chain with
    the expected log densities of the steps under each system as log weights. Every sweep raises the
    surrogate bound. The answer depends on the start, and q is too sure of z.

    The global factors are ``initial``, a Dirichlet, ``transition``, Dirichlet of batch ``(K,)``,
    ``initial_x``, NIW of batch ``(K,)``, and ``dynamics``, MNIW of batch ``(K,)``; the model's
    sites are ``pi``, ``P``, ``Sigma_1``, ``mu_1``, ``Q``, ``A``, and ``z`` and ``x`` of events
    ``(T,)`` and ``(T, d)``. Data and potentials are as for :class:`LDS`.

    :param init: where the probabilities of states start: ``"prior"`` is the chain without data, an
        array ``(T, K)`` or ``(B, T, K)`` holds them.
    :param tol, max_iter: of the sweeps, as for ``fixed_point``.

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

    x_factor, mixture_rule = "initial_x", "HMMEP"
    by_state = ("initial", "transition", "initial_x", "dynamics")
    starts = ("prior",)
    init: Any = "prior"

    def vectors_given(
        self, global_mean: Means, psi: GaussianPotential, r: Array
    ) -> GaussianChainNatural:
        return chain_given(global_mean["initial_x"], global_mean["dynamics"], psi, r)

    def log_weights(self, global_mean: Means, moments: GaussianChainMean) -> Array:
        return expected_log_steps(global_mean["initial_x"], global_mean["dynamics"], moments)

    def vectors_negative_entropy(self, natural: GaussianChainNatural) -> Array:
        return chain_negative_entropy(natural)

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """The prior's, with concentrations between 1 and 2, and transitions of 0.9 times the
        identity plus noise of 0.1."""
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
