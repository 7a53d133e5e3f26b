"""The bases of guides: all latent sites as one vector, and flows on a normal distribution."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    ComposeTransform,
    ExpTransform,
    IndependentTransform,
    LowerCholeskyAffine,
    PermuteTransform,
    Transform,
)
from numpyro.handlers import block, seed, substitute
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import not_jax_tracer

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._model.mistakes import read_global
from numpyro_ext._model.mode_search import DENSE_UP_TO
from numpyro_ext._model.modes import Modes
from numpyro_ext._model.read import ModelInfo, call_and_trace
from numpyro_ext._model.start import guide_start
from numpyro_ext._model.taylor import TaylorProxy
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._numpyro import ContinuousGuide
from numpyro_ext._typing import Model, Params, Sites
from numpyro_ext.guides.arguments import check_model, check_params
from numpyro_ext.guides.init_from import (
    SEARCH,
    Start,
    check_sites,
    given_start,
    searched_start,
)
from numpyro_ext.guides.networks import check_widths, flat_module, mlp

__all__ = [
    "AutoAtModes",
    "AutoFlowNormal",
    "AutoJoint",
    "CouplingFlowNormal",
    "back",
    "fixed_map",
    "onwards",
    "through",
]

NUM_QUANTILE_DRAWS = 10_000


@dataclass(kw_only=True, eq=False, repr=False)
class AutoJoint(ContinuousGuide):
    """Base of the guides over all latent sites together, as one vector in unconstrained space.

    A subclass writes ``latent_distribution()``, the distribution of the ``(latent_dim,)`` vector,
    whose parameters it registers by ``numpyro.param``; ``{prefix}_loc`` is one of them. It is a
    transformation of ``get_base_dist()``, by default standard normal.

    :param model: a NumPyro model whose latent sites are continuous and not local to a subsampled
        plate.
    :param float init_scale: the initial standard deviation of every unconstrained coordinate.
    :param str prefix: the first part of the names of the guide's own sites.
    :param init_loc_fn: a per-site initialization function, for ``loc``.
    :param create_plates: ``create_plates(*args, **kwargs)``, which returns a ``numpyro.plate`` or
        several, as in ``AutoNormal``: the model then takes the rows that these plates draw.
    """

    model: Model = field(kw_only=False)
    init_scale: float = 0.1
    prefix: str = "auto"
    init_loc_fn: Callable[..., Any] = init_to_uniform
    create_plates: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_model(type(self), self.model)
        check_positive("init_scale", self.init_scale)
        if not callable(self.init_loc_fn):
            raise TypeError(
                f"init_loc_fn is {self.init_loc_fn!r}; it must be a function of a site, such as"
                " numpyro.infer.init_to_value(values={'z': 0.0}) returns."
            )
        plates = self.create_plates
        if not (plates is None or callable(plates)):
            raise TypeError(
                f"create_plates is {plates!r}; it must be a function of the model's arguments that"
                " returns a numpyro.plate or several."
            )
        super().__init__(self.model, prefix=self.prefix, init_loc_fn=self.init_loc_fn)
        self.create_plates = plates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.record_plates(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def record_plates(self, *args: Any, **kwargs: Any) -> None:
        """Make the plates of ``create_plates``, which are then sites with rows as their values."""
        if self.create_plates is not None:
            self.create_plates(*args, **kwargs)

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        """The latent sites of the model; an error if one is local to a subsampled plate."""
        # With a key of its own: the stream of keys stays that of AutoDiagonalNormal.
        because = f"{type(self).__name__} is one distribution over all latents together"
        return read_global(self.model, args, kwargs, because=because)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        return guide_start(self, self.read(*args, **kwargs), args, kwargs)

    def get_base_dist(self) -> dist.Distribution:
        return dist.Normal(jnp.zeros(self.latent_dim), 1).to_event(1)

    def get_transform(self, params: Params) -> Transform:
        self.check_fitted(params)
        return super().get_transform(params)

    def check_fitted(self, params: Params) -> None:
        """An error if the guide has not seen its model, or if ``params`` are of another guide."""
        if self.prototype_trace is None:
            raise ValueError(
                f"{type(self).__name__} has not seen its model; call svi.init or svi.run with the"
                " model's arguments first."
            )
        check_params(params, [f"{self.prefix}_loc"], self)

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: tuple[int, ...] = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        """Latent vectors from ``sample_vector``, whose sites are recorded nowhere."""
        self.check_fitted(params)
        with block():
            fn: Any = substitute(seed(self.sample_vector, rng_key), params)
            z, drawn = call_and_trace(fn, (sample_shape, args, kwargs or {}), {})
        check_params(params, [n for n, site in drawn.items() if site["type"] == "param"], self)
        return z

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Array:
        """Draws in unconstrained space, differentiable in ``params``.

        :param rng_key: random key; the draws are those of :meth:`sample_posterior` before
            constraining.
        :param dict params: the guide's parameters, from ``svi.get_params``.
        :param int num_samples: the number of draws.
        :return: an array ``(num_samples, latent_dim)``.
        """
        check_count("num_samples", num_samples)
        assert num_samples is not None
        return self.draw(rng_key, params, (num_samples,))

    def sample_posterior(
        self,
        rng_key: Array,
        params: Params,
        *args: Any,
        sample_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Sites:
        """Draws of the latent sites, constrained, with the model's deterministic sites.

        :param rng_key: random key.
        :param dict params: the parameters of guide and model, from ``svi.get_params``.
        :param args: the model's arguments, for deterministic sites that depend on them; without
            any, those of the first call are used (NumPyro's own guides always use those).
        :param tuple sample_shape: the leading axes of every site.
        :return: a dict of arrays of shape ``sample_shape + site shape``.
        """
        latent = self.draw(rng_key, params, sample_shape, args, kwargs)
        return self.constrain(latent, params, args, kwargs)

    def median(self, params: Params) -> Sites:
        """The 0.5 quantiles, see :meth:`quantiles`."""
        return self.quantiles(params, 0.5)

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        """Quantiles of every unconstrained coordinate, constrained, by Monte Carlo.

        They come from 10,000 draws with a fixed key.

        For sites whose bijection acts on each coordinate alone these are the marginal quantiles;
        for others (a simplex) the result satisfies the constraint, which elementwise quantiles of
        the constrained draws would not. Deterministic sites are evaluated there.

        :param dict params: the parameters of guide and model, from ``svi.get_params``.
        :param quantiles: a number or a list of numbers between 0 and 1.
        :return: a dict of arrays, the axis of a list leading.
        """
        q = jnp.asarray(quantiles, dtype=jnp.result_type(float))
        if not_jax_tracer(q) and not bool(((q >= 0) & (q <= 1)).all()):
            raise ValueError(f"quantiles is {quantiles!r}; every entry must be between 0 and 1.")
        draws = self.sample_latent(random.key(0), params, NUM_QUANTILE_DRAWS)
        return self.constrain(jnp.quantile(draws, q, axis=0), params)


@dataclass(kw_only=True, eq=False, repr=False)
class AutoAtModes(AutoJoint):
    r"""Base of the guides that begin at the modes of their posterior.

    At ``svi.init`` the guide searches for the modes of the posterior on the arguments of that call,
    by :func:`~numpyro_ext.optim.find_modes`. Its last layer is the fixed map :math:`z = c + A x` of
    the heaviest one, with the parameters ``{prefix}_center`` and ``{prefix}_root``, which have no
    gradient. What is trained lies inside, where the posterior is near N(0, I). So a learning rate
    means the same for every model, whatever the units of its sites are. The map is part of the
    parameters: it is resumed, pickled and passed on with them. Weight decay acts on it as on any
    other location, so mask these two there.

    It begins at N(init_loc, init_scale^2 I) instead, as NumPyro's guides do, if ``init_loc_fn`` or
    ``init_scale`` is given or ``init_from`` is None; for models of more than 512 latent dimensions
    and models with networks; and, with a warning, where the arguments are traced or the search
    fails.

    :param init_from: ``"search"``; or a result of ``find_modes``, ``(guide, params)`` of a fitted
        ``AutoNormal``, ``AutoDiagonalNormal``, ``AutoMultivariateNormal``,
        ``AutoLowRankMultivariateNormal`` or ``AutoLaplaceApproximation`` on the same model, or a
        ``taylor_proxy`` of it at its mode, in place of the search; or None.

    The other arguments are those of :class:`AutoJoint`.
    """

    init_from: Modes | TaylorProxy | tuple[Any, Params] | str | None = SEARCH

    num_searches, num_modes = 4, 1
    start_arguments = ("init_loc_fn", "init_scale")
    """Arguments that say where NumPyro's start is, so that giving one of them means no search."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        own = any(name in kwargs for name in cls.start_arguments) and "init_from" not in kwargs
        self.searches = not own
        return self

    def __post_init__(self) -> None:
        self.given: Start | None = None
        self.searches = self.searches and isinstance(self.init_from, str)
        if self.init_from is not None and self.init_from != SEARCH:
            self.given = given_start(self.init_from)
        self.init_from = SEARCH if self.searches else None  # a fitted guide may not pickle
        self.find: Callable[[], Start | None] | None = None
        super().__post_init__()

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        info = super().read(*args, **kwargs)
        if self.given is not None:
            check_sites(self.given, info)
        return info

    def check_fitted(self, params: Params) -> None:
        super().check_fitted(params)
        if self.is_mapped:
            check_params(params, [f"{self.prefix}_center", f"{self.prefix}_root"], self)

    @property
    def is_mapped(self) -> bool:
        """True if the last layer is a fixed map."""
        if self.given is not None:
            return True
        trace: Any = self.prototype_trace
        networks = any(n.endswith("$params") for n, x in trace.items() if x["type"] == "param")
        mutable = any(site["type"] == "mutable" for site in trace.values())
        return self.searches and 0 < self.latent_dim <= DENSE_UP_TO and not (networks or mutable)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.called_with(args, kwargs):
            return super().__call__(*args, **kwargs)

    @contextmanager
    def called_with(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """The arguments on which a search is, as long as a call of the guide takes."""
        before, self.find = self.find, cache(partial(self.find_start, args, kwargs))
        try:
            yield
        finally:
            self.find = before

    def find_start(self, args: tuple, kwargs: dict[str, Any]) -> Start | None:
        """What was given, or the modes on these arguments."""
        if self.given is not None:
            return self.given
        several = self.num_modes > 1
        return searched_start(self.model, args, kwargs, self.num_searches, several=several)

    def found(self) -> Start | None:
        """What is found in this call of the guide, once; None for NumPyro's start."""
        return self.find_start((), {}) if self.find is None else self.find()

    def begin(self) -> tuple[Array, Array, list[Transform]]:
        """Where what is trained begins, a location and standard deviations ``(latent_dim,)``; and
        the fixed map after it, if there is one."""
        d, prefix = self.latent_dim, self.prefix
        usual = self.init_latent, jnp.full(d, self.init_scale)
        if not self.is_mapped:
            return *usual, []
        loc, scale = jnp.zeros(d), jnp.ones(d)
        center: Any = numpyro.param(f"{prefix}_center")
        root: Any = numpyro.param(f"{prefix}_root")
        if center is None or root is None:
            start = self.found()
            if start is None:
                (loc, scale), x, A = usual, jnp.zeros(d), jnp.eye(d)
            else:
                x, A = jnp.asarray(start.centers[0]), jnp.asarray(start.roots[0])
            center = numpyro.param(f"{prefix}_center", x)
            root = numpyro.param(f"{prefix}_root", A)
        return loc, scale, [fixed_map(center, root)]


def through(fn: dist.Distribution, fixed: Sequence[Transform]) -> dist.Distribution:
    """The distribution after the fixed map of :meth:`AutoAtModes.begin`."""
    return dist.TransformedDistribution(fn, list(fixed)) if fixed else fn


def back(z: Array, fixed: Sequence[Transform]) -> Array:
    """A value after the fixed map, before it."""
    return jnp.asarray(fixed[0].inv(z)) if fixed else z


def onwards(x: Array, fixed: Sequence[Transform]) -> Array:
    """A value before the fixed map, after it."""
    return jnp.asarray(fixed[0](x)) if fixed else x


def fixed_map(center: Array, root: Array) -> Transform:
    """The map :math:`c + A x`, which has no gradient in c and A."""
    center, root = lax.stop_gradient((center, root))
    if root.ndim == center.ndim:
        return IndependentTransform(AffineTransform(center, root), 1)
    return LowerCholeskyAffine(center, root)


class QuickPositive(type(constraints.softplus_positive)):  # pyright: ignore[reportGeneralTypeIssues]
    """Positive numbers that an optimiser changes by three times its step, relative to their size.

    The networks of a flow change the scale of its draws within a few dozen steps. If ``scale``
    took hundreds of steps, the networks would make that change, differently in every place, and
    undo it slowly.
    """


@biject_to.register(QuickPositive)
def _exp_of_triple(_: QuickPositive) -> Transform:
    return ComposeTransform([AffineTransform(0.0, 3.0), ExpTransform()])


@dataclass(kw_only=True, eq=False, repr=False)
class AutoFlowNormal(AutoAtModes):
    r"""Base of the normalizing-flow guides, over all latent sites together.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::

        z = loc + scale \odot (f_F \circ \dots \circ f_1)(e), \qquad e \sim N(0, I_d),

        \log q(z) = \log N(e; 0, I) - \sum_{i=1}^{F} \log|\det f_i'| - \sum_j \log scale_j .

    A subclass gives the flows :math:`f_i` by :meth:`flow`, near the identity at the start.
    Coordinates are permuted between flows, and brought back into their order after the last, so
    that the guide starts at the normal approximation of the posterior at its mode. There a full
    factor L is trained in place of ``scale``, as ``{prefix}_scale_tril``, and z goes through the
    fixed map of :class:`AutoAtModes`. ``num_flows=0`` with ``init_from=None`` is
    ``AutoDiagonalNormal``, with the same names of parameters.

    *Where it fails.* A flow is a homeomorphism: separated modes stay joined by a thin bridge, and a
    minimised ``KL(q || p)`` may leave modes out; a warning says where the search has found several.
    Training is not convex, and the KL that is reached depends on the learning rate: take
    ``VRELBO(1., 4, gradient="stl")``, or ``num_particles`` of 8 or more and a falling rate.

    :param model: a NumPyro model whose latent sites are continuous and not local to a subsampled
        plate.
    :param int num_flows: the number F of flows.

    The other arguments are those of :class:`AutoAtModes`.

    **Reference:** *Variational inference with normalizing flows*, equation 15,
    Danilo Jimenez Rezende, Shakir Mohamed (2015)
    """

    num_flows: int = 4

    def __post_init__(self) -> None:
        self.num_flows = check_count("num_flows", self.num_flows, minimum=0)
        super().__post_init__()

    @abstractmethod
    def flow(self, i: int) -> Transform:
        """The ``i``-th flow, its parameters registered under a name that ends in ``__{i}``."""

    def permutation(self, i: int) -> np.ndarray:
        """The order in which flow ``i + 1`` sees the coordinates: that of flow ``i`` reversed."""
        return np.arange(self.latent_dim)[::-1]

    def latent_distribution(self) -> dist.TransformedDistribution:
        flows = [self.flow(i) for i in range(self.num_flows)]
        steps = [self.permutation(i) for i in range(self.num_flows - 1)]
        parts = [*permuted_between(flows, steps), *self.last_layers()]
        return dist.TransformedDistribution(self.get_base_dist(), parts)

    def last_layers(self) -> list[Transform]:
        """The maps ``scale e``, or ``L e`` inside a map with a full factor; ``loc + e``; and the
        fixed map, if there is one."""
        loc, scale, fixed = self.begin()
        loc: Any = numpyro.param(f"{self.prefix}_loc", loc)
        zero = jnp.zeros_like(loc)
        shift = IndependentTransform(AffineTransform(loc, jnp.ones_like(loc)), 1)
        if fixed and isinstance(fixed[0], LowerCholeskyAffine):
            lower = constraints.scaled_unit_lower_cholesky
            L: Any = numpyro.param(f"{self.prefix}_scale_tril", jnp.diag(scale), constraint=lower)
            return [LowerCholeskyAffine(zero, L), shift, *fixed]
        scale: Any = numpyro.param(f"{self.prefix}_scale", scale, constraint=QuickPositive())
        return [IndependentTransform(AffineTransform(zero, scale), 1), shift, *fixed]


def permuted_between(flows: Sequence[Transform], steps: Sequence[np.ndarray]) -> list[Transform]:
    """The flows with a permutation after each but the last, and then the order of the start."""
    transforms, order = [], np.arange(len(steps[0]) if steps else 0)
    in_order = order
    for i, flow in enumerate(flows):
        transforms.append(flow)
        step = steps[i] if i < len(steps) else np.argsort(order)
        order = order[step]
        if not np.array_equal(step, in_order):
            # NumPy, not JAX: a constant of the program, and comparable when transforms are.
            transforms.append(PermuteTransform(step))  # pyright: ignore[reportArgumentType]
    return transforms


def other_halves(dim: int, i: int) -> np.ndarray:
    """The permutation after coupling i: first the halves swapped, then odd places before even ones.

    So the halves are those of another digit of the places in base 2 each time, and F couplings
    separate all coordinates up to dimension :math:`2^{F-1}`.
    """
    reverse = np.arange(dim)[::-1]
    odd, even = reverse[reverse % 2 == 1], reverse[reverse % 2 == 0]
    return reverse if i == 0 else np.concatenate([odd, even])


@dataclass(kw_only=True, eq=False, repr=False)
class CouplingFlowNormal(AutoFlowNormal):
    r"""Base of the flow guides whose layers are couplings, each with a network of its own.

    The first :math:`\lfloor d/2 \rfloor` coordinates go through the network; its outputs move the
    others. After the first flow the halves change places; after each other one a new half has
    coordinates of both, since two coordinates that always share a half never move each other, and
    with two flows a correlation of just these two is not found.

    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, in place of
        that network, from :math:`\lfloor d/2 \rfloor` inputs to the coupling's number of outputs
        for each of the :math:`\lceil d/2 \rceil` coordinates that move. Every coupling uses it with
        weights of its own, the vector ``{prefix}_net__{i}$params``. With it the guide starts
        wherever the network's initial weights put it, and pickles only if the pair does (closures
        do not).

    The other arguments are those of :class:`AutoFlowNormal`.
    """

    hidden_dims: Sequence[int] = (32, 32)
    network: Network | None = None

    def __post_init__(self) -> None:
        self.network = as_pair(self.network, optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        super().__post_init__()

    def permutation(self, i: int) -> np.ndarray:
        """First the halves swapped, and then odd places before even ones."""
        return other_halves(self.latent_dim, i)

    def net(self, i: int, outputs: int) -> tuple[Callable[[Array], Array], int]:
        """The network of coupling ``i``, and the number of coordinates that go into it.

        :param int outputs: the number of outputs for each of the other coordinates.
        """
        d = self.latent_dim
        if d == 1:
            raise ValueError(
                "the model has one latent dimension and a coupling needs two halves; use"
                " AutoSplineNormal, or numpyro's AutoDiagonalNormal."
            )
        split = d // 2
        pair = self.network or mlp(self.hidden_dims, outputs * (d - split))
        return flat_module(f"{self.prefix}_net__{i}$params", pair, (split,)), split
