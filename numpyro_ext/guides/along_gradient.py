"""The base of guides that draw along the gradient of the model, with noise on the way."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from jax import Array
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Normal, constraints
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, seed, substitute

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.handlers import every_row
from numpyro_ext._model.operations import gradient
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, drawn_names, read_model
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Params, Shape, Sites, Trace
from numpyro_ext.guides.base import (
    AutoWithoutDensity,
    apply_fixed_map,
    draws_of,
    inverse_fixed_map,
    with_fixed_map,
)
from numpyro_ext.guides.networks import check_widths

_DRAWS_AT_A_TIME = 100


@dataclass(kw_only=True, eq=False, repr=False)
class AutoAlongGradient(AutoWithoutDensity):
    r"""Base of the guides that draw a start and standard normal noise of T steps, and carry the
    start along the gradient of the model.

    A subclass writes :meth:`carry`, which also gives :math:`\log r`, the density of the noise of
    the way back from where the draw is. The factor ``{prefix}_reverse`` subtracts it, so that
    ``Trace_ELBO`` is the bound.
    """

    num_steps: int = 3
    step_size: float = 0.1
    reverse_network: Network | None = None
    hidden_dims: Sequence[int] = (32,)
    noise: ClassVar[str] = "noise"
    """The site ``_{prefix}_{noise}``, ``(T, d)``."""

    def __post_init__(self) -> None:
        check_positive("step_size", self.step_size)
        self.reverse_network = as_pair(self.reverse_network, "reverse_network", optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        self.num_steps = check_count("num_steps", self.num_steps)
        super().__post_init__()

    @abstractmethod
    def carry(
        self, z: Array, noise: Array, grad_u: Callable[[Array], Array], loc: Array, scale: Array
    ) -> tuple[Array, Array]:
        """The last ``z (d,)`` and ``log r`` of each step, from a start ``(d,)`` of :math:`N(loc,
        scale^2)` and noise ``(T, d)``, all before the fixed map; ``grad_u`` is the gradient of
        :math:`-\\log p^*`."""

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        info = super().read(*args, **kwargs)
        if info.mutable:
            raise ValueError(
                f"the model has the mutable site '{info.mutable[0]}', which each of its gradients"
                " would update; make it a numpyro.param, or use AutoAuxiliary."
            )
        return info

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs  # for draws without the model's arguments

    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        loc, scale, fixed = self.loc_and_scale()
        z = self.auxiliary("start", with_fixed_map(Normal(loc, scale).to_event(1), fixed))
        normal = Normal(0.0, 1.0).expand((self.num_steps, self.latent_dim))
        v = self.auxiliary(self.noise, normal.to_event(2))
        z, log_r = self._carried(z, v, args, kwargs)
        numpyro.factor(f"{self.prefix}_reverse", -log_r)
        return z

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: Shape = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        self.check_fitted(params)
        if not args and not kwargs:
            args, kwargs = self.prepared
            if is_traced(self.prepared):
                raise ValueError(
                    f"{type(self).__name__} was called under jax.jit for the first time, so it has"
                    " no data for the gradients of its draws; pass the model's arguments here."
                )

        def draw(key: Array) -> Array:  # with a minibatch of its own
            fn: Any = substitute(seed(self.sample_vector, key), params)
            return fn((), args, kwargs or {})

        with block(), self.on_cuts(params):
            return draws_of(draw, rng_key, sample_shape, _DRAWS_AT_A_TIME)

    def reverse_log_prob(
        self, params: Params, aux: Sites, latents: Sites, *args: Any, **kwargs: Any
    ) -> Array:
        """:math:`\\log r`, a number, with the gradient on all rows, of the guide's sites of the
        start and the noise, from which all others follow."""
        self.check_fitted(params)
        z, v = (aux[f"_{self.prefix}_{name}"] for name in ("start", self.noise))
        with block(), self.on_cuts(params), substitute(data=params), every_row():
            return self._carried(z, v, args, kwargs)[1]

    def _carried(self, z: Array, v: Array, args: tuple, kwargs: Params) -> tuple[Array, Array]:
        """``z_T`` and ``log r``, from ``(d,)`` and ``(T, d)`` draws."""
        loc, scale, fixed = self.loc_and_scale()
        grad_u = self._gradient(args, kwargs, fixed)
        z, log_r = self.carry(inverse_fixed_map(z, fixed), v, grad_u, loc, scale)
        return apply_fixed_map(z, fixed), jnp.sum(log_r)

    def steps(self) -> tuple[Array, Array]:
        """The trained ``{prefix}_step_size``, ``(T,)``, and ``{prefix}_mass``, ``(d,)``."""
        positive, sizes = constraints.positive, jnp.full(self.num_steps, self.step_size)
        eps: Any = numpyro.param(f"{self.prefix}_step_size", sizes, constraint=positive)
        ones = jnp.ones(self.latent_dim)
        mass: Any = numpyro.param(f"{self.prefix}_mass", ones, constraint=positive)
        return eps, mass

    def _gradient(
        self, args: tuple, kwargs: Params, fixed: list[Transform]
    ) -> Callable[[Array], Array]:
        """The gradient of U on the minibatch of this call, in the coordinates before the fixed
        map."""
        if drawn_names(self.model, args, kwargs) != set(self.latent_sites):
            # To predict, the model is called without its data: the posterior is given the others.
            args, kwargs = self.prepared
        info = self.in_cuts(read_model(self.model, args, kwargs))
        trace = cast(Trace, self.prototype_trace)
        theta: dict[str, Any] = {}
        for name in info.params:
            constraint = trace[name]["kwargs"].get("constraint", constraints.real)
            theta[name] = numpyro.param(name, trace[name]["value"], constraint=constraint)
        rows = {}
        for name, (size, batch) in info.plates.items():
            with numpyro.plate(name, size, subsample_size=batch) as idx:
                rows[name] = idx
        potential = Potential(self.model, info, theta, args, kwargs)

        def u(z: Array) -> Array:
            with block():
                return potential(self.unpack(apply_fixed_map(z, fixed)), rows)

        return gradient(u)
