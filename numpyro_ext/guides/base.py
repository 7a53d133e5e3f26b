"""What the flow guides share: the affine layer, the draws, and quantiles by Monte Carlo."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
import copy
from functools import partial
from typing import Any

import jax
from jax import Array, random
from jax.example_libraries import stax
from jax.nn.initializers import zeros
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    IndependentTransform,
    PermuteTransform,
    Transform,
)
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.util import constrain_fn
from numpyro.util import not_jax_tracer

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._model.handlers import subsampled_plates, valid_plates
from numpyro_ext._model.read import continuous_latents
from numpyro_ext._typing import Model, Params, Sites, Trace

Network = tuple[Callable[..., Any], Callable[..., Any]]
"""A pair ``(init_fn, apply_fn)`` as in ``jax.example_libraries.stax``."""

NUM_QUANTILE_DRAWS = 10_000


def mlp(hidden_dims: Sequence[int], out_dim: int) -> Network:
    """A multilayer perceptron that starts at zero: its last layer is zero, the others are not."""
    layers: list[Any] = []
    for width in hidden_dims:
        layers += [stax.Dense(width), stax.Elu]
    return stax.serial(*layers, stax.Dense(out_dim, W_init=zeros, b_init=zeros))


def check_network(network: Any, hidden_dims: Any) -> None:
    """A stax pair or None, and widths of at least 1."""
    if network is not None and not (
        isinstance(network, tuple) and len(network) == 2 and all(map(callable, network))
    ):
        raise TypeError(
            f"network is {network!r}; it must be a pair (init_fn, apply_fn), such as"
            " jax.example_libraries.stax.serial returns, or None for an MLP of hidden_dims."
        )
    if not isinstance(hidden_dims, (tuple, list)):
        raise TypeError(
            f"hidden_dims is {hidden_dims!r}; it must be a tuple of layer widths, such as (32, 32)."
        )
    for width in hidden_dims:
        check_count("each of hidden_dims", width)


class AutoFlowNormal(AutoContinuous):
    r"""Base of the guides :math:`z = loc + scale \odot f_F \circ \dots \circ f_1(e)`, :math:`e \sim N(0, I)`.

    A subclass gives :math:`f_i` by :meth:`_flow`, near the identity at the start. Coordinates are
    reversed between flows, and once more after an even number of them, so that the whole map starts at
    :math:`loc + scale \odot e` and not at a mirror image of it.

    :param model: a NumPyro model with continuous latent sites.
    :param int num_flows: the number F of flows; 0 is ``AutoDiagonalNormal``.
    :param float init_scale: the initial ``scale``, in unconstrained units.
    :param str prefix: what the names of the guide's own sites start with.
    :param init_loc_fn: a per-site initialization function, for ``loc``.
    """

    scale_constraint = constraints.softplus_positive

    def __init__(
        self,
        model: Model,
        *,
        num_flows: int,
        init_scale: float,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_uniform,
    ) -> None:
        check_count("num_flows", num_flows, minimum=0)
        check_positive("init_scale", init_scale)
        self.num_flows = num_flows
        self._init_scale = init_scale
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    @abstractmethod
    def _flow(self, i: int) -> Transform:
        """The ``i``-th flow, its parameters registered under a name that ends in ``__{i}``."""
        raise NotImplementedError

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        def check() -> None:
            # A fixed key of its own: the stream of keys stays that of AutoDiagonalNormal.
            seeded = handlers.seed(self.model, random.key(0))
            with handlers.block(), valid_plates():
                trace = handlers.trace(seeded).get_trace(*args, **kwargs)
            self._check_latents(trace)

        jax.eval_shape(check)  # the sites' kinds and shapes are asked, not their values
        super()._setup_prototype(*args, **kwargs)

    def _check_latents(self, trace: Trace) -> None:
        plates = subsampled_plates(trace)
        for name, site in continuous_latents(trace).items():
            local = [frame.name for frame in site["cond_indep_stack"] if frame.name in plates]
            if local:
                raise ValueError(
                    f"latent site '{name}' is local to the subsampled plate '{local[0]}', and"
                    f" {type(self).__name__} is one distribution over all latents together; drop"
                    " subsample_size, or use numpyro's AutoNormal, which has parameters per row."
                )

    def _get_posterior(self) -> dist.TransformedDistribution:
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        scale = numpyro.param(
            f"{self.prefix}_scale",
            jnp.full(self.latent_dim, self._init_scale),
            constraint=self.scale_constraint,
        )
        # NumPy, not JAX: a constant of the program, and comparable when transforms are.
        flip = PermuteTransform(np.arange(self.latent_dim)[::-1])  # pyright: ignore[reportArgumentType]
        transforms: list[Transform] = []
        for i in range(self.num_flows):
            transforms.append(self._flow(i))
            if i < self.num_flows - 1 or self.num_flows % 2 == 0:
                transforms.append(flip)
        transforms.append(IndependentTransform(AffineTransform(loc, scale), 1))  # pyright: ignore[reportArgumentType]
        return dist.TransformedDistribution(self.get_base_dist(), transforms)

    def get_base_dist(self) -> dist.Distribution:
        return dist.Normal(jnp.zeros(self.latent_dim), 1).to_event(1)

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

    def _draw(self, rng_key: Array, params: Params, sample_shape: tuple[int, ...]) -> Array:
        self._check_fitted(params)
        with handlers.block():
            seeded = handlers.seed(self._sample_latent, rng_key)
            latent: Any = handlers.substitute(seeded, params)(sample_shape=sample_shape)
        return latent

    def sample_latent(
        self, rng_key: Array, params: Params, num_samples: int | None = None
    ) -> Array:
        """Draws in unconstrained space, differentiable in ``params``.

        :param rng_key: random key; the draws are those of :meth:`sample_posterior` before constraining.
        :param dict params: the guide's parameters, from ``svi.get_params``.
        :param int num_samples: how many draws.
        :return: an array ``(num_samples, latent_dim)``.
        """
        check_count("num_samples", num_samples)
        assert num_samples is not None
        return self._draw(rng_key, params, (num_samples,))

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
        :param args: the model's arguments, for deterministic sites that depend on them; without any,
            those of the first call are used (NumPyro's own guides always use those).
        :param tuple sample_shape: what the shape of every site starts with.
        :return: a dict of arrays of shape ``sample_shape + site shape``.
        """
        latent = self._draw(rng_key, params, sample_shape)
        guide = self
        if args or kwargs:
            guide = copy.copy(self)
            model = handlers.seed(self.model, 0)  # for minibatch indices alone
            guide._postprocess_fn = partial(
                constrain_fn, model, args, kwargs, return_deterministic=True
            )
        return guide._unpack_and_constrain(latent, params)

    def median(self, params: Params) -> Sites:
        """The 0.5 quantiles, see :meth:`quantiles`."""
        return self.quantiles(params, 0.5)

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        """Quantiles of every unconstrained coordinate, constrained, from 10,000 draws with a fixed key.

        For sites whose bijection acts on each coordinate alone these are the marginal quantiles; for
        others (a simplex) the result satisfies the constraint, which elementwise quantiles of the
        constrained draws would not. Deterministic sites are evaluated there.

        :param dict params: the parameters of guide and model, from ``svi.get_params``.
        :param quantiles: a number or a list of numbers between 0 and 1.
        :return: a dict of arrays, the axis of a list leading.
        """
        q = jnp.asarray(quantiles, dtype=jnp.result_type(float))
        if not_jax_tracer(q) and not bool(((q >= 0) & (q <= 1)).all()):
            raise ValueError(f"quantiles is {quantiles!r}; every entry must be between 0 and 1.")
        draws = self.sample_latent(random.key(0), params, NUM_QUANTILE_DRAWS)
        return self._unpack_and_constrain(jnp.quantile(draws, q, axis=0), params)
