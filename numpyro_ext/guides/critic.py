"""A critic beside a guide: a network with which the loss estimates a ratio or a score."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from jax import Array
import jax.numpy as jnp
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_count
from numpyro_ext._model.handlers import inside_plates
from numpyro_ext._model.read import call_and_trace, latent_size, shared_plates
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Model, Params
from numpyro_ext.guides.networks import check_widths, flat_module, mlp
from numpyro_ext.guides.wrapper import GuideWrapper
from numpyro_ext.transforms.base import checked_output


class with_critic(GuideWrapper):
    r"""A guide that carries a critic: a network for the losses that train one.

    The result is called like ``guide`` and registers one parameter more, ``{name}$params``, the
    weights of the network. Everything else, such as ``sample_posterior``, it takes from ``guide``.

    ``DensityRatioELBO`` trains one output, a log ratio of densities; the minimax form of
    ``FisherDivergence`` trains a vector field, with ``output_dim`` the number of unconstrained
    latent numbers. A critic has to keep up: give it a larger rate, and let both fall.

    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from the
        latents (and features) to ``output_dim`` numbers. The default is an MLP of ``hidden_dims``
        (ELU) that starts at 0.
    :param int output_dim: the number of outputs of the critic for a point.
    :param features: for a guide that reads its data: a function of the model's arguments that gives
        ``(M, f)`` numbers, one row for each datum of the minibatch; the critic then judges the
        latents of one datum beside them. The default is ``guide.features``, if there is one. For
        ``DensityRatioELBO(contrast="joint")`` and ``SymmetricKL`` it is the number of the observed
        numbers of a row, which these give to the critic themselves.

    **Reference:** *Adversarial variational Bayes*, section 3, Mescheder et al. (ICML 2017)

    >>> from numpyro_ext.guides import AutoImplicit, with_critic
    >>> from numpyro_ext.objectives import DensityRatioELBO
    >>> def model():
    ...     numpyro.sample("z", dist.Normal(3., 2.))
    >>> guide = AutoImplicit(model, hidden_dims=(8,), init_from=None)
    >>> guide = with_critic(guide, hidden_dims=(8,))
    >>> def is_critic(params):  # by the name of the parameter
    ...     return {name: "critic" if name == "critic$params" else "guide" for name in params}
    >>> rates = {"critic": optax.adam(5e-2), "guide": optax.adam(2e-2)}
    >>> svi = SVI(model, guide, optax.multi_transform(rates, is_critic), DensityRatioELBO())
    >>> params = svi.run(jax.random.key(0), 500, progress_bar=False).params
    >>> low, high = guide.quantiles(params, [0.16, 0.84])["z"]
    >>> print(f"{(low + high) / 2:.0f} {(high - low) / 2:.0f}")
    3 2
    """

    def __init__(
        self,
        guide: Model,
        network: Network | None = None,
        *,
        name: str = "critic",
        hidden_dims: Sequence[int] = (64, 64),
        output_dim: int = 1,
        features: Callable[..., Array] | int | None = None,
    ) -> None:
        super().__init__(guide, "with_critic")
        self.network = as_pair(network, optional=True)
        self.hidden_dims = check_widths(hidden_dims)
        self.output_dim = check_count("output_dim", output_dim)
        self.param_name = f"{name}$params"
        # An amortised guide may have such a function itself.
        self.features = getattr(guide, "features", None) if features is None else features
        if features is not None and not callable(features):
            self.features = check_count("features, unless it is a function,", features)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result, trace = call_and_trace(self.fn, args, kwargs)
        if self.param_name in trace:
            raise ValueError(
                f"the guide has a parameter '{self.param_name}' already; give another name."
            )
        size = getattr(self.fn, "latent_dim", None)
        if self.features is not None:
            plates, number = shared_plates(trace), self.features
            shape = tuple(plates.values())
            if callable(number):
                with inside_plates(trace, plates):
                    features = jnp.asarray(number(*args, **kwargs)).shape
                if features[:-1] != shape or not features:
                    rows = " x ".join(map(str, shape)) or "no"
                    raise ValueError(
                        f"features gives an array of shape {features}, but the plates of the"
                        f" guide's sites have {rows} rows in the minibatch; it must be {shape} and"
                        " one axis more."
                    )
                number = features[-1]
            size = latent_size(self.fn, trace) // math.prod(shape) + number
        elif size is None:
            size = latent_size(self.fn, trace)
        self._apply(size)
        return result

    def critic(self, params: Params, z: Array, features: Array | None = None) -> Array:
        """The critic at unconstrained points ``(..., latent_dim)``; with ``features`` ``(..., f)``,
        at the latents of one datum."""
        if features is not None:
            features = jnp.broadcast_to(features, (*z.shape[:-1], features.shape[-1]))
            z = jnp.concatenate([z, features], -1)
        with block(), substitute(data={self.param_name: params[self.param_name]}):
            out = self._apply(z.shape[-1])(z)
        shape = (*z.shape[:-1], self.output_dim)
        out = checked_output("the critic's network", z, out, shape, "output_dim numbers per point")
        return out[..., 0] if self.output_dim == 1 else out

    def _apply(self, size: int) -> Callable[[Array], Array]:
        pair = self.network or mlp(self.hidden_dims, self.output_dim)
        return flat_module(self.param_name, pair, (size,))
