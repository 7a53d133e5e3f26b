"""A normal guide with a banded precision along a sequence, for models of time series."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform, IndependentTransform, PermuteTransform

from numpyro_ext._checks import check_count
from numpyro_ext._model.modes import Mode
from numpyro_ext._model.read import ModelInfo
from numpyro_ext.guides.base import AutoAtModes
from numpyro_ext.transforms import VectorTransform


class Chain(NamedTuple):
    """The place of the chain in the latent vector: T, the number of time steps; D, the numbers of a
    time step; and ``(latent_dim,)`` coordinates: the chain's by time, and then the others."""

    length: int
    width: int
    order: np.ndarray


class MarkovTransform(VectorTransform):
    r"""The map :math:`x_t = \sum_j A_{tj} x_{t+j} + L_t e_t` on the first ``T D`` coordinates, and
    ``scale * e`` on the others, with ``factor`` L ``(T, D, D)`` and ``weights`` A ``(T, order, D,
    D)``."""

    arrays = ("factor", "weights", "scale")

    def __init__(self, factor: Array, weights: Array, scale: Array) -> None:
        self.factor, self.weights, self.scale = factor, weights, scale

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        e, rest = self._split(x)
        order = self.weights.shape[1]

        def step(later: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            e, L, A = xs
            x = jnp.einsum("jab,...jb->...a", A, later) + jnp.einsum("ab,...b->...a", L, e)
            return jnp.concatenate([x[..., None, :], later], axis=-2)[..., :order, :], x

        later = jnp.zeros((*e.shape[:-2], order, e.shape[-1]), e.dtype)
        xs = (jnp.moveaxis(e, -2, 0), self.factor, self.weights)
        path = jnp.moveaxis(lax.scan(step, later, xs, reverse=True)[1], 0, -2)
        y = jnp.concatenate([path.reshape(*x.shape[:-1], -1), self.scale * rest], axis=-1)
        diagonal = jnp.diagonal(self.factor, axis1=-2, axis2=-1)
        log_det = jnp.log(diagonal).sum() + jnp.log(self.scale).sum()
        return y, jnp.broadcast_to(log_det, x.shape[:-1])

    def _inverse(self, y: Array) -> Array:
        path, rest = self._split(y)
        T, order = self.weights.shape[:2]
        padded = jnp.concatenate([path, jnp.zeros_like(path[..., :order, :])], axis=-2)
        for j in range(order):
            later = padded[..., j + 1 : j + 1 + T, :]
            path = path - jnp.einsum("tab,...tb->...ta", self.weights[:, j], later)
        columns = path.reshape(-1, *path.shape[-2:]).transpose(1, 2, 0)
        e = solve_triangular(self.factor, columns, lower=True).transpose(2, 0, 1)
        return jnp.concatenate([e.reshape(*y.shape[:-1], -1), rest / self.scale], axis=-1)

    def _split(self, x: Array) -> tuple[Array, Array]:
        T, D, _ = self.factor.shape
        return x[..., : T * D].reshape(*x.shape[:-1], T, D), x[..., T * D :]


@dataclass(kw_only=True, eq=False, repr=False)
class AutoMarkov(AutoAtModes):
    r"""A normal over sequences, in which a time step depends on the next ``order`` ones alone.

    Let :math:`z_t \in R^D` be what the sequence sites have at time :math:`t = 1 \dots T`, in
    unconstrained space. Then

    .. math::
        z_t = m_t + \sum_{j=1}^{order} A_{tj} (z_{t+j} - m_{t+j}) + L_t e_t, \qquad
        e_t \sim N(0, I_D),

        \log q(z) = \sum_t \log N(e_t; 0, I) - \sum_t \sum_i \log L_{t,ii} ,

    backwards in time, with terms beyond T left out. This is any normal with a precision
    :math:`\Lambda = B B^T` of ``order`` blocks beside the diagonal one: :math:`B_{tt} = L_t^{-T}`
    and :math:`B_{t+j,t} = -A_{tj}^T L_t^{-T}`. All other latents get an independent normal each.
    The guide begins with the band of the covariance at the mode; its fixed map is diagonal.

    *What it is biased by.* With ``order=1`` the family holds the posterior of every linear model
    with normal noise and a state of D numbers. The standard deviations of the other latents are too
    small where the posterior couples them with the sequence. A model with innovations and
    ``cumsum`` has a posterior without a band: sample the path itself.

    :param model: as of :class:`AutoJoint`; the sequence is made by ``scan``, ``plate`` or a vector.
    :param sites: names of the sequence sites, of the same leading length T in unconstrained space;
        by default the sites of the most frequent leading length above 1.
    :param int order: the number of next time steps on which a time step depends; below T.

    **Reference:** *Black box variational inference for state space models*, section 3, Archer et
    al. (ICLR workshop 2016)

    >>> def model(y):
    ...     z = numpyro.sample("z", dist.GaussianRandomWalk(0.3, len(y)))
    ...     numpyro.sample("y", dist.Normal(z, 0.5), obs=y)
    >>> y = jnp.sin(jnp.arange(20.0))
    >>> guide = AutoMarkov(model)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> params = svi.run(jax.random.key(0), 50, y, progress_bar=False).params
    >>> guide.sample_posterior(jax.random.key(1), params, sample_shape=(100,))["z"].shape
    (100, 20)
    """

    sites: Sequence[str] | None = None
    order: int = 1

    def __post_init__(self) -> None:
        self.sites = None if self.sites is None else tuple(self.sites)
        self.order = check_count("order", self.order, minimum=0)
        super().__post_init__()

    def prepare(self, *args: Any, **kwargs: Any) -> Chain:
        chain = find_chain(self.read(*args, **kwargs), self.sites)
        if self.order >= chain.length:
            raise ValueError(
                f"order is {self.order} and the sequence has length {chain.length}; use an order"
                " below that, or AutoMultivariateNormal."
            )
        return chain

    def latent_distribution(self) -> dist.TransformedDistribution:
        chain: Chain = self.prepared
        init_loc, init_scale, fixed, mode = self.begin()
        loc: Any = numpyro.param(f"{self.prefix}_loc", init_loc)
        first = self.first_band(init_scale, mode)
        factor: Any = numpyro.param(
            f"{self.prefix}_scale_tril",
            first.factor,
            constraint=constraints.scaled_unit_lower_cholesky,
        )
        weights: Any = first.weights
        if self.order:
            weights = numpyro.param(f"{self.prefix}_weights", weights)
        scale: Any = first.scale
        if scale.size:
            scale = numpyro.param(
                f"{self.prefix}_scale", scale, constraint=constraints.softplus_positive
            )
        shift = IndependentTransform(AffineTransform(loc, jnp.ones_like(loc)), 1)
        back: Any = PermuteTransform(np.argsort(chain.order))  # pyright: ignore[reportArgumentType]
        parts = [MarkovTransform(factor, weights, scale), back, shift, *fixed]
        return dist.TransformedDistribution(self.get_base_dist(), parts)

    def units(self, mode: Mode) -> Array:
        return jnp.asarray(mode.sds)

    def first_band(self, scale: Array, mode: Mode | None) -> MarkovTransform:
        """The band at the start: from the covariance at the mode, or independent."""
        T, D, order = self.prepared
        chain = order[: T * D]
        factor: Any = scale[chain].reshape(T, D)[..., None] * jnp.eye(D)
        weights: Any = jnp.zeros((T, self.order, D, D))
        if mode is not None and mode.is_matrix:
            root = np.asarray(mode.factor, float) / mode.sds[:, None]
            band = band_of(root[chain].reshape(T, D, -1), self.order)
            factor, weights = (jnp.asarray(x, scale.dtype) for x in band)
            scale = jnp.asarray(mode.conditional_sds / mode.sds, scale.dtype)
        return MarkovTransform(factor, weights, scale[order[T * D :]])


def band_of(root: np.ndarray, order: int) -> tuple[np.ndarray, np.ndarray]:
    """``L (T, D, D)`` and ``A (T, order, D, D)`` of each time given the next ones, where all have
    the covariance ``root root^T`` of a root ``(T, D, n)``."""
    T, D, n = root.shape
    factor, weights = np.empty((T, D, D)), np.zeros((T, order, D, D))
    for t, here in enumerate(root):
        later = root[t + 1 : t + 1 + order].reshape(-1, n)
        A = np.linalg.lstsq(later.T, here.T)[0].T
        left = here - A @ later
        factor[t] = np.linalg.cholesky(left @ left.T)
        A = A.reshape(D, -1, D).swapaxes(0, 1)
        weights[t, : len(A)] = A
    return factor, weights


def find_chain(info: ModelInfo, sites: Sequence[str] | None) -> Chain:
    """The sequence of these sites, or of those with the most frequent leading length above 1."""
    shapes = {name: latent.unconstrained.shape for name, latent in info.latents.items()}
    lengths = {name: shape[0] if shape else 1 for name, shape in shapes.items()}
    if sites is None:
        counts = Counter(length for length in lengths.values() if length > 1)
        if not counts:
            raise ValueError(
                f"no latent site has a leading axis of time, their unconstrained shapes are"
                f" {shapes}; sample the whole path in one site or by scan."
            )
        T = max(counts, key=lambda length: (counts[length], length))
        sites = tuple(name for name in shapes if lengths[name] == T)
    lengths = {name: lengths.get(name) for name in sites}
    T = lengths[sites[0]]
    if T is None or T < 2 or set(lengths.values()) != {T}:
        raise ValueError(
            f"the leading lengths of the sequence sites are {lengths}, in unconstrained space; they"
            f" must be the same number, at least 2. Choose other sites out of {shapes}."
        )
    places = [np.arange(info.size)[info.slices[name]].reshape(T, -1) for name in sites]
    chain = np.concatenate(places, axis=1)
    others = np.setdiff1d(np.arange(info.size), chain)
    return Chain(T, chain.shape[1], np.concatenate([chain.ravel(), others]))
