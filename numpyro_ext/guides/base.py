"""What guides share: draws, quantiles by Monte Carlo, and the affine layer of flows."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

from jax import Array, random
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
from numpyro.infer.initialization import init_to_uniform
from numpyro.util import not_jax_tracer

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._model.mistakes import read_global
from numpyro_ext._model.read import ModelInfo, latent_sites
from numpyro_ext._model.start import guide_start
from numpyro_ext._numpyro import ContinuousGuide, normal_of_guide
from numpyro_ext._typing import Model, Params, Sites, Trace
from numpyro_ext.guides.networks import Network, check_network, flat_module, mlp

NUM_QUANTILE_DRAWS = 10_000


class AutoJoint(ContinuousGuide):
    """Base of the guides over all latent sites together: their draws, and quantiles of these.

    A subclass registers ``{prefix}_loc`` among its parameters and writes ``latent_distribution``.
    One whose latent vector has no density of its own writes ``sample_vector`` instead, which draws
    it along with the guide's auxiliary sites.

    :param model: a NumPyro model with continuous latent sites.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function, for ``loc``.
    """

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.read(*args, **kwargs)

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        """What is in the model, or an error if a latent site is local to a subsampled plate."""
        # With a key of its own: the stream of keys stays that of AutoDiagonalNormal.
        because = f"{type(self).__name__} is one distribution over all latents together"
        return read_global(self.model, args, kwargs, because=because)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Array, Sites] | None:
        return guide_start(self, self.read(*args, **kwargs), args, kwargs)

    def latent_distribution(self) -> dist.Distribution:
        raise IntractableDensityError(
            f"{type(self).__name__} has no density of its latent vector alone; use its draws, by"
            " sample_posterior, or a guide that has one, such as AutoRealNVPNormal."
        )

    def get_base_dist(self) -> dist.Distribution:
        return self.latent_distribution()  # there is none

    def get_transform(self, params: Params) -> Transform:
        self._check_fitted(params)
        return super().get_transform(params)

    def _check_fitted(self, params: Params) -> None:
        if self.prototype_trace is None:
            raise ValueError(
                f"{type(self).__name__} has not seen its model; call svi.init or svi.run with the"
                " model's arguments first."
            )
        # Without this, numpyro.param would answer with the initial values.
        if f"{self.prefix}_loc" not in params:
            raise ValueError(
                f"params has no '{self.prefix}_loc' but {sorted(params)}; pass what svi.get_params"
                f" gives for this guide (prefix '{self.prefix}')."
            )

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: tuple[int, ...] = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        self._check_fitted(params)
        return super().draw(rng_key, params, sample_shape, args, kwargs)

    def implicit_sites(self, latent: Array, kind: type[Implicit] = Implicit) -> Sites:
        """The model's latent sites at a latent vector, each a draw without a density.

        What ``__call__`` returns in a guide of which ``latent`` is all that can be said.
        """
        result, trace = {}, cast(Trace, self.prototype_trace)
        for name, u in self.unpack(latent).items():
            fn = trace[name]["fn"]
            site = kind(biject_to(fn.support)(u), event_dim=fn.event_dim, support=fn.support)
            result[name] = numpyro.sample(name, site)
        return result

    def pack(self, latents: Sites) -> Array:
        """Constrained sites as a ``(latent_dim,)`` vector."""
        trace = cast(Trace, self.prototype_trace)
        supports = {name: trace[name]["fn"].support for name in self.latent_sites}
        return jnp.concatenate(
            [jnp.ravel(biject_to(support).inv(latents[n])) for n, support in supports.items()]
        )

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Array:
        """Draws in unconstrained space, differentiable in ``params``.

        :param rng_key: random key; the draws are those of :meth:`sample_posterior` before
            constraining.
        :param dict params: the guide's parameters, from ``svi.get_params``.
        :param int num_samples: how many draws.
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
        :param tuple sample_shape: what the shape of every site starts with.
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


class QuickPositive(constraints.Constraint):
    """Positive numbers that an optimiser changes by three times its step, relative to their size.

    The networks of a flow change the scale of its draws within a few dozen steps. A scale that
    takes hundreds leaves it to them, who do it differently in every place and are then slow to
    undo that.
    """

    def __call__(self, x: Any) -> Any:
        return x > 0

    def feasible_like(self, prototype: Any) -> Any:
        return jnp.ones_like(prototype)

    def tree_flatten(self) -> Any:
        return (), ((), {})

    def eq(self, other: object, static: bool = False) -> bool:
        return isinstance(other, QuickPositive)


@biject_to.register(QuickPositive)
def _exp_of_triple(_: QuickPositive) -> Transform:
    return ComposeTransform([AffineTransform(0.0, 3.0), ExpTransform()])


class AutoFlowNormal(AutoJoint):
    r"""Base of the guides :math:`z = loc + scale \odot f_F \circ \dots \circ f_1(e)`, e normal.

    A subclass gives :math:`f_i` by :meth:`flow`, near the identity at the start. Coordinates are
    permuted between flows, and brought back into their order after the last, so that the whole map
    starts at :math:`loc + scale \odot e`.

    :param model: a NumPyro model with continuous latent sites.
    :param int num_flows: the number F of flows; 0 is ``AutoDiagonalNormal``.
    :param float init_scale: the initial ``scale``, in unconstrained units.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function, for ``loc``.
    :param tuple init_from: ``(guide, params)`` of a fitted normal guide, where the flow starts
        instead.
    """

    scale_constraint = QuickPositive()
    scale_tril_constraint = constraints.scaled_unit_lower_cholesky

    def __init__(
        self,
        model: Model,
        *,
        num_flows: int,
        init_scale: float,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
        init_from: tuple[Any, Params] | None = None,
    ) -> None:
        check_positive("init_scale", init_scale)
        self.num_flows = check_count("num_flows", num_flows, minimum=0)
        self.init_scale = init_scale
        self.init_normal = None if init_from is None else _normal_of(init_from)
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    @abstractmethod
    def flow(self, i: int) -> Transform:
        """The ``i``-th flow, its parameters registered under a name that ends in ``__{i}``."""

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        info = self.read(*args, **kwargs)
        if self.init_normal is not None:
            shapes = {name: one.constrained.shape for name, one in info.latents.items()}
            theirs = self.init_normal[0]
            if list(shapes.items()) != list(theirs.items()):
                raise ValueError(
                    f"the guide of init_from has the latent sites {theirs}, but the model has"
                    f" {shapes}; fit it on this model, with the same arguments."
                )

    def permutation(self, i: int) -> np.ndarray:
        """The order in which flow ``i + 1`` sees the coordinates: that of flow ``i`` reversed."""
        return np.arange(self.latent_dim)[::-1]

    def latent_distribution(self) -> dist.TransformedDistribution:
        in_order = order = np.arange(self.latent_dim)
        transforms: list[Transform] = []
        for i in range(self.num_flows):
            transforms.append(self.flow(i))
            step = self.permutation(i) if i < self.num_flows - 1 else np.argsort(order)
            order = order[step]
            if not np.array_equal(step, in_order):
                # NumPy, not JAX: a constant of the program, and comparable when transforms are.
                transforms.append(PermuteTransform(step))  # pyright: ignore[reportArgumentType]
        return dist.TransformedDistribution(
            self.get_base_dist(), [*transforms, *self.scaling_and_shift()]
        )

    def scaling_and_shift(self) -> tuple[Transform, Transform]:
        """The maps ``scale e``, by a triangular factor if the guide starts from one, and
        ``loc + e``."""
        loc, scale = self.init_latent, jnp.full(self.latent_dim, self.init_scale)
        if self.init_normal is not None:
            _, loc, scale = self.init_normal
        loc: Any = numpyro.param(f"{self.prefix}_loc", loc)
        zero = jnp.zeros_like(loc)
        shift = IndependentTransform(AffineTransform(loc, jnp.ones_like(loc)), 1)
        if jnp.ndim(scale) == 2:
            factor: Any = numpyro.param(
                f"{self.prefix}_scale_tril", scale, constraint=self.scale_tril_constraint
            )
            return LowerCholeskyAffine(zero, factor), shift
        scale: Any = numpyro.param(f"{self.prefix}_scale", scale, constraint=self.scale_constraint)
        return IndependentTransform(AffineTransform(zero, scale), 1), shift

    def get_base_dist(self) -> dist.Distribution:
        return dist.Normal(jnp.zeros(self.latent_dim), 1).to_event(1)


class CouplingFlowNormal(AutoFlowNormal):
    r"""Base of the flow guides whose layers are couplings, each with a network of its own.

    The first :math:`\lfloor d/2 \rfloor` coordinates go through the network; its outputs move the
    others. After every other flow the halves change places; after the others each new half has
    coordinates of both, since two that always share a half would never see each other. A subclass
    writes :meth:`coupling` and says how many outputs it takes for each coordinate that moves.

    :param hidden_dims: widths of the hidden layers of each coupling's network (ELU).
    :param network: a stax pair ``(init_fn, apply_fn)`` in place of that network.
    """

    outputs_per_coordinate: int

    def __init__(
        self,
        model: Model,
        *,
        hidden_dims: Sequence[int] = (32, 32),
        network: Network | None = None,
        **kwargs: Any,
    ) -> None:
        check_network(network, hidden_dims)
        self.hidden_dims = tuple(hidden_dims)
        self.network = network
        super().__init__(model, **kwargs)

    def permutation(self, i: int) -> np.ndarray:
        """Turn by turn the halves swapped, and odd places before even ones."""
        reverse = super().permutation(i)
        odd, even = reverse[reverse % 2 == 1], reverse[reverse % 2 == 0]
        return reverse if i % 2 == 0 else np.concatenate([odd, even])

    @abstractmethod
    def coupling(self, net: Callable[[Array], Array], split: int) -> Transform:
        """One layer, given its network and the number of coordinates that stay."""

    def flow(self, i: int) -> Transform:
        d = self.latent_dim
        if d == 1:
            raise ValueError(
                "the model has one latent dimension and a coupling needs two halves; use"
                " AutoSplineNormal, or numpyro's AutoDiagonalNormal."
            )
        split = d // 2
        pair = self.network or mlp(self.hidden_dims, self.outputs_per_coordinate * (d - split))
        return self.coupling(flat_module(f"{self.prefix}_net__{i}$params", pair, (split,)), split)


def _normal_of(init_from: Any) -> tuple[dict[str, tuple[int, ...]], Array, Array]:
    """``({site: shape}, loc, scales or factor)`` of a pair ``(guide, params)``."""
    if not (
        isinstance(init_from, tuple) and len(init_from) == 2 and isinstance(init_from[1], dict)
    ):
        raise TypeError(
            f"init_from is {type(init_from).__name__}; it must be a pair (guide, params) of a"
            " fitted guide such as AutoMultivariateNormal and the params of its svi.run."
        )
    guide, params = init_from
    loc, scale = normal_of_guide(guide, params)
    if not bool(jnp.all(jnp.isfinite(loc)) & jnp.all(jnp.isfinite(scale))):
        raise ValueError(
            f"the mean or the scale of the {type(guide).__name__} of init_from is not finite; fit"
            " it at a smaller learning rate."
        )
    shapes = {
        site["name"]: jnp.shape(site["value"]) for site in latent_sites(guide.prototype_trace)
    }
    return shapes, loc, scale
