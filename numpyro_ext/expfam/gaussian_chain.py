"""Chains of normal vectors: linear dynamical systems in information form."""

from typing import Annotated, Any, NamedTuple

from jax import Array, lax, random
import jax.numpy as jnp

from numpyro_ext._checks import check_count
from numpyro_ext._typing import Shape
from numpyro_ext.expfam.base import LocationFamily
from numpyro_ext.expfam.chain import ChainFamily
from numpyro_ext.expfam.leaves import canonical
from numpyro_ext.expfam.linalg import (
    cholesky,
    half_logdet,
    inverse,
    inverse_root,
    matmul,
    matvec,
    outer,
    solve,
    solve_lower,
    symmetric,
    transpose,
)


class GaussianChainNatural(NamedTuple):
    """Natural parameters of :class:`GaussianChain`: h linear in x_t, W minus half a diagonal block
    of the precision, and V minus one below the diagonal, of x_{t+1} on the left and x_t."""

    h: Annotated[Array, "T d"]
    W: Annotated[Array, "T d d symmetric"]
    V: Annotated[Array, "T-1 d d"]


class GaussianChainMean(NamedTuple):
    """Mean parameters of :class:`GaussianChain`: E x_t, E x_t x_t^T, and E x_{t+1} x_t^T."""

    x: Annotated[Array, "T d"]
    xx: Annotated[Array, "T d d symmetric"]
    xx_next: Annotated[Array, "T-1 d d"]


class GaussianChainStandard(NamedTuple):
    """A linear dynamical system with the same transition at all steps."""

    initial_loc: Annotated[Array, "d"]
    initial_covariance: Annotated[Array, "d d symmetric"]
    weight: Annotated[Array, "d d"]
    covariance: Annotated[Array, "d d symmetric"]


class GaussianChain(
    ChainFamily[GaussianChainNatural, GaussianChainMean, GaussianChainStandard],
    LocationFamily[GaussianChainNatural, GaussianChainMean, GaussianChainStandard],
):
    r"""Normal sequences :math:`x_1, \dots, x_T` of d-vectors with a tridiagonal precision.

    .. math::
        p(x) \propto \exp\Big\{ \sum_t (h_t^\top x_t + x_t^\top W_t x_t)
            + \sum_t x_{t+1}^\top V_t x_t \Big\},

    with the base measure :math:`(2\pi)^{-Td/2}`. Steps are eliminated forwards,

    .. math::
        J_{t+1}' = -2 W_{t+1} - V_t J_t'^{-1} V_t^\top, \qquad
        h_{t+1}' = h_{t+1} + V_t J_t'^{-1} h_t', \qquad
        A = \sum_t \tfrac12 h_t'^\top J_t'^{-1} h_t' - \tfrac12 \log |J_t'|,

    and :math:`x_t \mid x_{t+1} \sim N(J_t'^{-1}(h_t' + V_t^\top x_{t+1}), J_t'^{-1})` gives moments
    and draws backwards. Potentials of observations are added to h and W; there is no need for the
    transitions to be normalised.

    **When it fails.** If the weight lets variances grow more than a millionfold in num_steps,
    float32 loses their inverse: log densities and draws are NaN then, or keep few digits.

    References: Johnson et al., *Composing graphical models with neural networks* (NIPS 2016),
    section 4.

    >>> from numpyro_ext.expfam import GaussianChain
    >>> prior = GaussianChain.from_standard(
    ...     initial_loc=jnp.zeros(1), initial_covariance=jnp.eye(1),
    ...     weight=0.8 * jnp.eye(1), covariance=0.3 * jnp.eye(1), num_steps=3)
    >>> y, precision = jnp.array([[1.0], [0.5], [2.0]]), 4.0
    >>> posterior = prior._replace(
    ...     h=prior.h + precision * y, W=prior.W - precision / 2 * jnp.eye(1))
    >>> print([f"{x:.3f}" for x in GaussianChain.mean(posterior).x[:, 0].tolist()])
    ['0.880', '0.854', '1.401']
    """

    domain = "a positive definite initial_covariance and covariance"
    discrete = False

    @classmethod
    def from_standard(
        cls, initial_loc: Any, initial_covariance: Any, weight: Any, covariance: Any, num_steps: int
    ) -> GaussianChainNatural:
        """The chain of ``num_steps`` steps with x_1 ~ N(initial_loc, initial_covariance) and
        x_{t+1} ~ N(weight x_t, covariance)."""
        T = check_count("num_steps", num_steps)
        m, C, F, Q = canonical(
            GaussianChainStandard(initial_loc, initial_covariance, weight, covariance)
        )
        repeat = lambda M, n: jnp.repeat(M[..., None, :, :], n, axis=-3)  # noqa: E731
        later = jnp.zeros((*m.shape[:-1], T - 1, m.shape[-1]), m.dtype)
        initial = jnp.concatenate([m[..., None, :], later], axis=-2)
        first, noise = inverse(cholesky(C)), inverse(cholesky(Q))
        J = jnp.concatenate([first[..., None, :, :], repeat(noise, T - 1)], axis=-3)
        natural = _from_transitions(repeat(F, T - 1), J, matvec(J, initial))
        # The chain is a density whatever the weight, but in_domain loses that to rounding where
        # variances grow, and SVI would be stopped at its first trace by a draw from a wide prior.
        finite = [jnp.all(jnp.isfinite(M), axis=(-2, -1)) for M in (first, noise, F)]
        finite.append(jnp.all(jnp.isfinite(m), axis=-1))
        return cls._constructed(natural, in_domain=jnp.all(jnp.stack(finite), axis=0))

    @classmethod
    def statistics(cls, value: Any) -> GaussianChainMean:
        x = jnp.asarray(value)
        return GaussianChainMean(x, outer(x, x), outer(x[..., 1:, :], x[..., :-1, :]))

    @classmethod
    def _log_partition(cls, natural: GaussianChainNatural) -> Array:
        J, h = _filter(natural)
        L = cholesky(J)
        root = solve_lower(L, h[..., None])[..., 0]
        return jnp.sum(jnp.sum(root**2, axis=-1) / 2 - half_logdet(L), axis=0)

    @classmethod
    def _mean(cls, natural: GaussianChainNatural) -> GaussianChainMean:
        L, G, b = _backward_maps(natural)
        x, C = _affine(G, b, inverse(L))
        lag = matmul(C[1:], transpose(G[:-1]))
        return GaussianChainMean(
            jnp.moveaxis(x, 0, -2),
            jnp.moveaxis(C + outer(x, x), 0, -3),
            jnp.moveaxis(lag + outer(x[1:], x[:-1]), 0, -3),
        )

    @classmethod
    def _natural(cls, mean: GaussianChainMean) -> GaussianChainNatural:
        x = mean.x
        C = mean.xx - outer(x, x)
        lag = mean.xx_next - outer(x[..., 1:, :], x[..., :-1, :])
        F = transpose(solve(cholesky(C[..., :-1, :, :]), transpose(lag)))
        Q = C[..., 1:, :, :] - matmul(F, transpose(lag))
        noise = jnp.concatenate([C[..., :1, :, :], symmetric(Q)], axis=-3)
        centred = _from_transitions(F, inverse(cholesky(noise)), jnp.zeros_like(x))
        return centred._replace(h=-cls._slope(centred, x))

    @classmethod
    def _log_base_measure(cls, mean: GaussianChainMean) -> Array:
        T, d = mean.x.shape[-2:]
        return -T * d / 2 * jnp.log(2 * jnp.pi)

    @classmethod
    def _slope(cls, natural: GaussianChainNatural, x: Array) -> Array:
        h, W, V = natural
        from_next = matvec(transpose(V), x[..., 1:, :])
        from_last = matvec(V, x[..., :-1, :])
        none = jnp.zeros_like(x[..., :1, :])
        return (
            h
            + 2 * matvec(W, x)
            + jnp.concatenate([from_next, none], axis=-2)
            + jnp.concatenate([none, from_last], axis=-2)
        )

    @classmethod
    def _sample(cls, rng_key: Array, natural: GaussianChainNatural, sample_shape: Shape) -> Array:
        L, G, b = _backward_maps(natural)
        shape = (b.shape[0], *sample_shape, *b.shape[1:])
        eps = random.normal(rng_key, shape, b.dtype)
        within = (slice(None), *[None] * len(sample_shape))
        noise = matvec(inverse_root(L)[within], eps)
        x, _ = _affine(G[within], b[within] + noise, None)
        return jnp.moveaxis(x, 0, -2)


def _from_transitions(F: Array, J: Array, h: Array) -> GaussianChainNatural:
    """x_1 with precision J_1, and x_{t+1} given x_t with mean F_t x_t and precision J_{t+1}."""
    V = matmul(J[..., 1:, :, :], F)
    back = matmul(transpose(F), V)
    none = jnp.zeros_like(J[..., :1, :, :])
    return GaussianChainNatural(h, -(J + jnp.concatenate([back, none], axis=-3)) / 2, V)


def _time_first(natural: GaussianChainNatural) -> tuple[Array, Array, Array]:
    h, W, V = natural
    return jnp.moveaxis(h, -2, 0), -2 * jnp.moveaxis(W, -3, 0), jnp.moveaxis(V, -3, 0)


def _filter(natural: GaussianChainNatural) -> tuple[Array, Array]:
    """J_t' and h_t', time first: each step with all before it eliminated."""
    h, J, V = _time_first(natural)

    def step(carry: tuple[Array, Array], inputs: tuple[Array, Array, Array]) -> Any:
        J_last, h_last = carry
        h_t, J_t, V_t = inputs
        L = cholesky(J_last)
        a = solve_lower(L, transpose(V_t))
        v = solve_lower(L, h_last[..., None])
        back = transpose(a)
        new = (J_t - matmul(back, a), h_t + matmul(back, v)[..., 0])
        return new, new

    rest = lax.scan(step, (J[0], h[0]), (h[1:], J[1:], V))[1]
    return jnp.concatenate([J[:1], rest[0]]), jnp.concatenate([h[:1], rest[1]])


def _backward_maps(natural: GaussianChainNatural) -> tuple[Array, Array, Array]:
    """The factor of J_t', and G_t, b_t of E[x_t | x_{t+1}] = G_t x_{t+1} + b_t, time first."""
    J, h = _filter(natural)
    L = cholesky(J)
    V = _time_first(natural)[2]
    ahead = jnp.concatenate([transpose(V), jnp.zeros_like(J[:1])])
    return L, solve(L, ahead), solve(L, h)


def _affine(G: Array, b: Array, D: Array | None) -> tuple[Array, Any]:
    """x_t = G_t x_{t+1} + b_t and, with D, C_t = G_t C_{t+1} G_t^T + D_t, from the end of G = 0."""

    def step(later: tuple[Array, Any], inputs: tuple[Array, Array, Any]) -> Any:
        x, C = later
        G, b, D = inputs
        if D is not None:
            D = D + matmul(matmul(G, C), transpose(G))
        new = matvec(G, x) + b, D
        return new, new

    start = (jnp.zeros_like(b[0]), None if D is None else jnp.zeros_like(D[0]))
    return lax.scan(step, start, (G, b, D), reverse=True)[1]
