"""The network of :class:`~numpyro_ext.ep.PBP` as a NumPyro model, and its guide."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_median
from scipy.special import gammaincinv

from numpyro_ext._typing import Params, Sites
from numpyro_ext.ep.guide import DiagonalNormal, start_guide

SCALING = ("X_mean", "X_sd", "y_mean", "y_sd")


@dataclass(frozen=True, eq=False)
class Network:
    """A rectifier network for a scalar y, with a Gamma prior on both of its precisions.

    - **priors** - of ``"weight"`` and ``"noise"``: shape and rate, or the known precision.
    """

    layer_sizes: tuple[int, ...]
    priors: dict[str, Any]
    use_bias: bool
    prefix: str

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape ``(outputs, inputs + 1)`` of the matrix of each layer, by its site."""
        pairs = zip(self.layer_sizes[1:], self.layer_sizes[:-1], strict=True)
        return {f"w{i}": (out, into + self.use_bias) for i, (out, into) in enumerate(pairs)}

    def __call__(self, X: Array, y: Array | None = None) -> None:
        """The model; without y it has the deterministic site ``f``, in the units of y."""
        weight, noise = (
            numpyro.sample(f"{name}_precision", dist.Gamma(*prior))
            if isinstance(prior, tuple)
            else jnp.asarray(prior, float)
            for name, prior in self.priors.items()
        )
        d = self.layer_sizes[0]
        starts = jnp.zeros(d), jnp.ones(d), jnp.zeros(()), jnp.ones(())
        scaling: Any = [
            numpyro.param(f"{self.prefix}_{name}", start)
            for name, start in zip(SCALING, starts, strict=True)
        ]
        # An optimiser must not move them.
        X_mean, X_sd, y_mean, y_sd = lax.stop_gradient(scaling)
        z = (jnp.asarray(X) - X_mean) / X_sd
        for i, (name, shape) in enumerate(self.shapes.items()):
            w: Any = numpyro.sample(name, dist.Normal(0, weight**-0.5).expand(shape).to_event(2))
            z = jax.nn.relu(z) if i else z
            if self.use_bias:
                z = jnp.concatenate([z, jnp.ones((len(z), 1), z.dtype)], 1)
            z = z @ w.T / shape[1] ** 0.5
        f = z[:, 0] * y_sd + y_mean
        if y is None:
            numpyro.deterministic("f", f)
        with numpyro.plate("data", len(z)):
            numpyro.sample("y", dist.Normal(f, noise**-0.5 * y_sd), obs=y)


class NetworkGuide(DiagonalNormal):
    """``AutoDiagonalNormal`` on the weights, and a Gamma for each precision that is not known."""

    gammas: dict[str, tuple[float, float]]
    """Shape and rate of the prior, by the site without its ``_precision``."""

    def _gamma(self, name: str, params: Params | None = None) -> dist.Gamma:
        names = [f"{self.prefix}_{name}_{what}" for what in ("concentration", "rate")]
        if params is not None:
            return dist.Gamma(params[names[0]], params[names[1]])
        numbers: Any = [
            numpyro.param(full, float(start), constraint=constraints.positive)
            for full, start in zip(names, self.gammas[name], strict=True)
        ]
        return dist.Gamma(*numbers)

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        sites = super().__call__(*args, **kwargs)
        for name in self.gammas:
            site = f"{name}_precision"
            sites[site] = numpyro.sample(site, self._gamma(name))  # pyright: ignore
        return sites

    def sample_posterior(
        self, rng_key: Array, params: Params, *args: Any, sample_shape: tuple = (), **kwargs: Any
    ) -> Sites:
        key, *keys = jax.random.split(rng_key, len(self.gammas) + 1)
        sites = super().sample_posterior(key, params, *args, sample_shape=sample_shape, **kwargs)
        for name, key_gamma in zip(self.gammas, keys, strict=True):
            sites[f"{name}_precision"] = self._gamma(name, params).sample(key_gamma, sample_shape)
        return sites

    def median(self, params: Params) -> Sites:
        return super().median(params) | self._quantiles_of_gammas(params, 0.5)

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        return super().quantiles(params, quantiles) | self._quantiles_of_gammas(params, quantiles)

    def _quantiles_of_gammas(self, params: Params, quantiles: Any) -> Sites:
        return {
            f"{name}_precision": _quantile(self._gamma(name, params), quantiles)
            for name in self.gammas
        }


def _quantile(gamma: dist.Gamma, quantiles: Any) -> Array:
    """Quantiles of a Gamma, for which NumPyro's own need TensorFlow Probability."""
    q = jnp.asarray(quantiles, float)

    def inverse(a: Any, q: Any) -> np.ndarray:
        return np.asarray(gammaincinv(np.float64(a), np.float64(q)), np.asarray(q).dtype)

    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return jax.pure_callback(inverse, shape, gamma.concentration, q) / jnp.asarray(gamma.rate)


def network_guide(network: Network) -> NetworkGuide:
    """The guide of a network, set up on a row of zeros: nothing in it depends on the data."""
    guide = NetworkGuide(network, prefix=network.prefix, init_loc_fn=init_to_median)
    guide.gammas = {name: x for name, x in network.priors.items() if isinstance(x, tuple)}
    locs = {name: jnp.zeros(shape) for name, shape in network.shapes.items()}
    local = [f"{name}_precision" for name in guide.gammas]
    start_guide(guide, locs, local, (jnp.zeros((1, network.layer_sizes[0])), jnp.zeros(1)), {})
    return guide
