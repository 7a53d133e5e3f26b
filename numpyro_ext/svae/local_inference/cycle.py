"""Local inference for cycles of binary variables, each pair of neighbours with a vector x."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import Array, lax, random
from jax.nn import log_sigmoid, sigmoid
import jax.numpy as jnp
import numpy as np

from numpyro_ext.expfam import (
    NIW,
    Bernoulli,
    BernoulliNatural,
    Beta,
    BetaNatural,
    Gaussian,
    GaussianMean,
    GaussianNatural,
)
from numpyro_ext.svae.local_inference.base import (
    CoordinateAscent,
    LocalPosterior,
    Means,
    Rule,
    check_batch,
    expected_log_normal,
    negative_entropy,
    no_iterations,
    own_moments,
    plug_in,
    spread_locations,
    times_expected,
)
from numpyro_ext.svae.local_inference.cycle_bp import cycle_bp
from numpyro_ext.svae.potentials import GaussianPotential, MixturePotential, merge_normals

CROSSHAIR = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.0, -1.0], [-1.0, 0.0]]])


class _Cycle(Rule):
    r"""The model of both rules, with indices modulo K: :math:`z_i \sim Bernoulli(\pi_i), x_i \mid z
    \sim N(\mu_{z_i z_{i+1}}, \Sigma_{z_i z_{i+1}})`."""

    families: ClassVar[Mapping[str, Any]] = {"pi": Beta, "components": NIW}
    local_families: ClassVar[Mapping[str, Any]] = {"z": Bernoulli, "x": Gaussian}
    global_sites: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "pi": ("pi",),
        "components": ("Sigma", "mu"),
    }

    batch = "B, K"

    def check(self, global_mean: Means, potential: Any) -> None:
        check_batch("components", global_mean["components"], (2, 2))
        super().check(global_mean, potential)
        (K,) = global_mean["pi"].log_p.shape
        if K < 2 or potential.h.shape[1] != K:
            raise ValueError(
                f"the potential has h of shape {potential.h.shape}, and pi has {K} probabilities; a"
                " cycle needs K of at least 2, and h of shape (B, K, ..., d)."
            )

    def local_kl(self, global_mean: Means, local: LocalPosterior) -> Array:
        pi, odds = global_mean["pi"], local.natural["z"].log_odds
        q = local.mean["z"].prob
        # From the logits: the gradient of q log q is NaN where q underflows.
        bits = q * (log_sigmoid(odds) - pi.log_p) + (1 - q) * (log_sigmoid(-odds) - pi.log_1mp)
        moments = jax.tree.map(lambda leaf: leaf[:, :, None, None], local.mean["x"])
        expected = _pairs(q) * expected_log_normal(global_mean["components"], moments)
        x = negative_entropy(local.natural["x"]) - jnp.sum(expected, axis=(-2, -1))
        return jnp.sum(bits + x, axis=-1)

    def init_natural(self, rng_key: Array, prior: Mapping[str, Any]) -> dict[str, Any]:
        """Concentrations between 1 and 2, and for d = 2 locations on a circle at a random angle;
        otherwise the prior's, spread by 3."""
        key_a, key_b, key_loc = random.split(rng_key, 3)
        d = prior["components"].b.shape[-1]
        if d == 2:
            angle = random.uniform(key_loc, maxval=2 * jnp.pi)
            cos, sin = jnp.cos(angle), jnp.sin(angle)
            loc = CROSSHAIR @ jnp.array([[cos, sin], [-sin, cos]])
            components = NIW.from_standard(loc, 0.5, d + 0.5, jnp.eye(d) / 2)
        else:
            components = spread_locations(key_loc, prior["components"])
        shape = jnp.shape(prior["pi"].a)
        pi = BetaNatural(random.uniform(key_a, shape), random.uniform(key_b, shape))
        return {"pi": pi, "components": components}


class CycleEP(_Cycle):
    r"""Cycle: expectation propagation, which is loopy belief propagation on the binary variables.

    With the plug-in normals :math:`\eta_{lr}` of the components, pair i has the log factor
    :math:`\phi_i(l, r) = \log \int N(x \mid \eta_{lr})\, \psi_i(x)\, dx`; :func:`cycle_bp` gives
    the marginals :math:`q(z_i)` and the beliefs :math:`R_i(l, r)` of pairs, and :math:`q(x_i)` is
    the normal of the moments :math:`\sum_{lr} R_i(l, r)\, \mathrm{E}\, t(x)` of normal times
    potential. The bound uses :math:`q(z_i)\, q(z_{i+1})`, because q is a product.

    The global factors are ``pi``, Beta of batch ``(K,)``, and ``components``, NIW of batch
    ``(2, 2)``. Potentials have batch ``(B, K)``.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.svae import CycleEP
    >>> CycleEP().families["pi"].__name__
    'Beta'
    """

    def infer(
        self, global_mean: Means, potential: GaussianPotential | MixturePotential
    ) -> LocalPosterior:
        self.check(global_mean, potential)
        eta, odds = plug_in(global_mean["components"]), _prior_odds(global_mean)
        beliefs = jax.vmap(cycle_bp, (None, 0))(odds, potential.log_partition_ratio(eta))
        z = BernoulliNatural(odds + beliefs.a + jnp.roll(beliefs.b, 1, axis=-1))
        normals = jax.tree.map(_flat_pairs, potential.tilted_normal(eta))
        x = Gaussian.from_standard(*merge_normals(_flat_pairs(beliefs.pair), normals))
        mean = {"z": Bernoulli.mean(z), "x": Gaussian.mean(x)}
        return LocalPosterior({"z": z, "x": x}, mean, no_iterations(len(potential.h)))


@dataclass(eq=False, repr=False)
class CycleMeanField(CoordinateAscent, _Cycle):
    r"""Cycle: the factorised :math:`\prod_i q(z_i)\, q(x_i)` by coordinate ascent.

    With :math:`T_i(l, r)` the expected log density of :math:`x_i` under component (l, r), a sweep
    over i = K - 1, ..., 0 sets the log odds of :math:`q(z_i)`, and then :math:`q(x_i)`, to

    .. math::
        &\lambda_i + \sum_r q_{i+1}(r) [T_i(1, r) - T_i(0, r)]
        + \sum_l q_{i-1}(l) [T_{i-1}(l, 1) - T_{i-1}(l, 0)], \\
        &q(x_i) \propto \psi_i(x) \exp \sum_{lr} q_i(l)\, q_{i+1}(r)
        \langle \eta_{lr}, t(x) \rangle .

    Every sweep raises the surrogate bound. The answer depends on the start, and q is too sure of z.

    It has the global factors and potentials of :class:`CycleEP`.

    :param init: where q(z = 1) starts: None is 1/2, with the potential's own moments of x; or an
        array ``(K,)`` or ``(B, K)`` of probabilities.
    :param tol, max_iter: of the sweeps, as for ``fixed_point``.

    References: So, *EP Structured Variational Auto-Encoders* (2018).

    >>> from numpyro_ext.svae import CycleMeanField
    >>> CycleMeanField(max_iter=50).max_iter
    50
    """

    mixture_rule = "CycleEP"
    starts = (None,)
    init: Any = None

    def infer(self, global_mean: Means, potential: GaussianPotential) -> LocalPosterior:
        self.check(global_mean, potential)
        batch = potential.h.shape[:-1]
        if self.init is None:
            start = jnp.full(batch, 0.5, potential.h.dtype)
        else:
            start = self.init_in_shape(potential, batch)

        def infer_datum(psi: GaussianPotential, init: Array) -> LocalPosterior:
            args = (dict(global_mean), psi)
            own = self.init is None
            moments = own_moments(psi)[0] if own else Gaussian.mean(_normal_given(args, init))
            (q, _), info = self.solve(_sweep, args, (init, moments))
            # The last steps are differentiable, and give the log odds of q(z).
            moments = Gaussian.mean(_normal_given(args, q))
            z = BernoulliNatural(_odds_given(args, q, moments))
            mean = Bernoulli.mean(z)
            x = _normal_given(args, mean.prob)
            return LocalPosterior({"z": z, "x": x}, {"z": mean, "x": Gaussian.mean(x)}, info)

        return jax.vmap(infer_datum)(potential, start)


Args = tuple[dict[str, Any], GaussianPotential]
State = tuple[Array, GaussianMean]
"""Probabilities of z = 1, and moments of x."""


def _prior_odds(global_mean: Means) -> Array:
    return global_mean["pi"].log_p - global_mean["pi"].log_1mp


def _pairs(q: Array) -> Array:
    """``(..., K, 2, 2)``, the products of neighbours' probabilities."""
    both = jnp.stack([1 - q, q], axis=-1)
    return both[..., :, None] * jnp.roll(both, -1, axis=-2)[..., None, :]


def _one_pair(left: Array, right: Array) -> Array:
    return jnp.stack([1 - left, left])[:, None] * jnp.stack([1 - right, right])


def _flat_pairs(x: Array) -> Array:
    """``(B, K, 4, ...)`` of ``(B, K, 2, 2, ...)``."""
    return x.reshape(*x.shape[:2], 4, *x.shape[4:])


def _sweep(args: Args, state: State) -> State:
    """For the last variable to the first: q(z_i), then q(x_i)."""
    global_mean, psi = args
    K, eta = psi.h.shape[0], plug_in(global_mean["components"])

    def step(k: Array, state: State) -> State:
        q, moments = state
        i = K - 1 - k
        q = q.at[i].set(sigmoid(_odds_of(args, i, q, moments)))
        pair = _one_pair(q[i], q[(i + 1) % K])
        natural = times_expected(GaussianPotential(psi.h[i], psi.W[i]), pair, eta, "lr")
        x, xx = Gaussian.mean(natural)
        return q, GaussianMean(moments.x.at[i].set(x), moments.xx.at[i].set(xx))

    return lax.fori_loop(0, K, step, state)


def _normal_given(args: Args, q: Array) -> GaussianNatural:
    global_mean, psi = args
    return times_expected(psi, _pairs(q), plug_in(global_mean["components"]), "lr")


def _odds_given(args: Args, q: Array, moments: GaussianMean) -> Array:
    """The log odds of all variables from the last to the first, each given those before it."""
    K = q.shape[0]

    def step(k: Array, odds_and_q: tuple[Array, Array]) -> tuple[Array, Array]:
        odds, q = odds_and_q
        i = K - 1 - k
        own = _odds_of(args, i, q, moments)
        return odds.at[i].set(own), q.at[i].set(sigmoid(own))

    return lax.fori_loop(0, K, step, (jnp.zeros_like(q), q))[0]


def _odds_of(args: Args, i: Array, q: Array, moments: GaussianMean) -> Array:
    global_mean, _ = args
    components, after = global_mean["components"], q[(i + 1) % q.shape[0]]
    own, before = (
        expected_log_normal(components, GaussianMean(moments.x[j], moments.xx[j]))
        for j in (i, i - 1)
    )
    as_left = (own[1] - own[0]) @ jnp.stack([1 - after, after])
    as_right = (before[:, 1] - before[:, 0]) @ jnp.stack([1 - q[i - 1], q[i - 1]])
    return _prior_odds(global_mean)[i] + as_left + as_right
