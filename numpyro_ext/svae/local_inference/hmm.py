"""Local inference for hidden Markov models: a chain of states z, and in each step a vector x.

So, "EP Structured Variational Auto-Encoders" (2018); Johnson et al., "Composing graphical models
with neural networks for structured representations and fast inference" (2016).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jax import Array, random
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_ext._checks import check_count
from numpyro_ext.expfam import (
    NIW,
    Dirichlet,
    DirichletNatural,
    Gaussian,
    GaussianNatural,
    MarkovChain,
    MarkovChainNatural,
    fixed_point,
)
from numpyro_ext.svae.local_inference.base import (
    LocalInfo,
    LocalPosterior,
    check_batch,
    check_factor,
    check_gaussian,
    expected_log_normal,
    negative_entropy,
    no_iterations,
    plug_in,
)
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential, merge_normals

__all__ = [
    "HMMEP",
    "HMMMeanField",
    "broadcast_start",
    "check_start",
    "check_states",
    "expected_log_states",
    "random_concentration",
    "states_given",
]

STARTS = ("potential", "prior")


class _HMM:
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
    site_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "initial": ("pi",),
        "transition": ("P",),
        "emission": ("Sigma", "mu"),
        "z": ("z",),
        "x": ("x",),
    }

    def local_kl(self, global_mean: Mapping[str, Any], local: LocalPosterior) -> Array:
        emission, z = global_mean["emission"], local.mean["z"]
        moments = jax.tree.map(lambda leaf: leaf[:, :, None], local.mean["x"])
        expected = z.probs * expected_log_normal(emission, moments)
        x = jnp.sum(negative_entropy(local.natural["x"]) - jnp.sum(expected, -1), -1)
        states = -MarkovChain.entropy(local.natural["z"]) - expected_log_states(global_mean, z)
        return states + x

    def distributions(self, local: LocalPosterior) -> dict[str, dist.Distribution]:
        return {
            "z": MarkovChain.to_distribution(local.natural["z"]),
            "x": Gaussian.to_distribution(local.natural["x"]).to_event(1),
        }

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """The prior's, with locations spread by 3 and concentrations between 1 and 2."""
        key_pi, key_P, key_loc = random.split(rng_key, 3)
        start = NIW.to_standard(prior["emission"])
        loc = start.loc + 3 * random.normal(key_loc, start.loc.shape)
        return {
            "initial": random_concentration(key_pi, prior["initial"]),
            "transition": random_concentration(key_P, prior["transition"]),
            "emission": NIW.from_standard(**start._replace(loc=loc)._asdict()),
        }


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

    References: So (2018).

    .. doctest::

        >>> import jax.numpy as jnp
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
        _check("HMMEP", global_mean, potential)
        eta = plug_in(global_mean["emission"])
        z = states_given(global_mean, potential.log_partition_ratio(eta))
        states = MarkovChain.mean(z)
        x = Gaussian.from_standard(*merge_normals(states.probs, potential.tilted_normal(eta)))
        mean = {"z": states, "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(z.unary[:, 0, 0]))


class HMMMeanField(_HMM):
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

    References: Johnson et al. (2016), section 4.

    .. doctest::

        >>> from numpyro_ext.svae import HMMMeanField
        >>> HMMMeanField(max_iter=50).max_iter
        50
    """

    def __init__(
        self, init: str | Any = "potential", tol: float | None = None, max_iter: int = 200
    ) -> None:
        self.init = check_start(init)
        self.tol = tol
        self.max_iter = check_count("max_iter", max_iter)

    def infer(self, global_mean: Mapping[str, Any], potential: GaussianPotential) -> LocalPosterior:
        check_gaussian(potential, "HMMMeanField", "HMMEP")
        _check("HMMMeanField", global_mean, potential)

        def one(psi: GaussianPotential, init: Array) -> LocalPosterior:
            args = (dict(global_mean), psi)
            found = fixed_point(_sweep, args, init, tol=self.tol, max_iter=self.max_iter)
            z = _states(args, _normals(args, found.value))
            states = MarkovChain.mean(z)
            x = _normals(args, states.probs)
            info = LocalInfo(found.num_iter, found.residual, found.converged)
            return LocalPosterior({"z": z, "x": x}, {"z": states, "x": Gaussian.mean(x)}, info)

        K = global_mean["initial"].log_prob.shape[-1]
        if not isinstance(self.init, str):
            start = broadcast_start("HMMMeanField", self.init, (*potential.h.shape[:-1], K))
            return jax.vmap(one)(potential, start.astype(potential.h.dtype))

        def begin(psi: GaussianPotential) -> LocalPosterior:
            return one(psi, _begin((dict(global_mean), psi), self.init == "prior"))

        return jax.vmap(begin)(potential)


Args = tuple[dict[str, Any], GaussianPotential]


def _check(name: str, global_mean: Mapping[str, Any], factor: Any) -> None:
    check_states(global_mean, "emission")
    check_factor(factor, name, "B, T", global_mean["emission"].precision_loc.shape[-1])


def check_states(global_mean: Mapping[str, Any], *names: str) -> None:
    """Transitions from each state, and factors of each state."""
    for name in ("transition", *names):
        check_batch(global_mean, name, global_mean["initial"].log_prob.shape)


def check_start(init: Any) -> Any:
    """A start by name, or an array of probabilities."""
    if isinstance(init, str):
        if init not in STARTS:
            raise ValueError(
                f"init is {init!r}; it must be 'potential', 'prior', or an array of probabilities."
            )
        return init
    return np.asarray(init)


def broadcast_start(rule: str, init: Any, shape: tuple[int, ...]) -> Array:
    """Probabilities of shape ``(B, T, K)``, of which the first axis may be missing."""
    if init.shape not in (shape, shape[1:]):
        raise ValueError(
            f"init of {rule} has shape {init.shape}; it must be {shape[1:]} or {shape}."
        )
    return jnp.broadcast_to(init, shape)


def random_concentration(rng_key: Array, prior: DirichletNatural) -> DirichletNatural:
    """Concentrations between 1 and 2, which break the symmetry between states."""
    return DirichletNatural(random.uniform(rng_key, jnp.shape(prior.a)))


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


def _sweep(args: Args, r: Array) -> Array:
    """One sweep: the update of all x, and then that of the chain of z."""
    return MarkovChain.mean(_states(args, _normals(args, r))).probs


def _normals(args: Args, r: Array) -> GaussianNatural:
    global_mean, psi = args
    eta = plug_in(global_mean["emission"])
    return GaussianNatural(
        psi.h + jnp.einsum("tk,ki->ti", r, eta.h), psi.W + jnp.einsum("tk,kij->tij", r, eta.W)
    )


def _states(args: Args, x: GaussianNatural) -> MarkovChainNatural:
    global_mean, _ = args
    moments = jax.tree.map(lambda leaf: leaf[:, None], Gaussian.mean(x))
    return states_given(global_mean, expected_log_normal(global_mean["emission"], moments))


def _begin(args: Args, without_data: bool) -> Array:
    """Probabilities from the potentials' own moments; a step that is no density says nothing."""
    global_mean, psi = args
    d, K = psi.h.shape[-1], global_mean["initial"].log_prob.shape[-1]
    proper = Gaussian.in_domain(GaussianNatural(psi.h, psi.W)) & (not without_data)
    unit = -jnp.eye(d, dtype=psi.W.dtype) / 2
    x = GaussianNatural(psi.h, jnp.where(proper[:, None, None], psi.W, unit))
    moments = jax.tree.map(lambda leaf: leaf[:, None], Gaussian.mean(x))
    log_weights = expected_log_normal(global_mean["emission"], moments)
    log_weights = jnp.where(proper[:, None], log_weights, jnp.zeros(K))
    return MarkovChain.mean(states_given(global_mean, log_weights)).probs
