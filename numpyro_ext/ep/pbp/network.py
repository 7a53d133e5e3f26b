"""The network of :class:`~numpyro_ext.ep.PBP` as a NumPyro model, and its guide."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

from numpyro_ext._typing import Params, Sites
from numpyro_ext.ep.guide import DiagonalNormal, start_guide

SCALING = ("X_mean", "X_sd", "y_mean", "y_sd")
PRIOR = 6.0, 6.0  # shape and rate of the prior of a precision, in standardised units


@dataclass(frozen=True, eq=False)
class Network:
    """A rectifier network for a scalar y, with a Gamma prior of precisions that are not known."""

    layer_sizes: tuple[int, ...]
    precisions: dict[str, float | None]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape ``(outputs, inputs + 1)`` of the matrix of each layer, by its site."""
        pairs = zip(self.layer_sizes[1:], self.layer_sizes[:-1], strict=True)
        return {f"w{i}": (out, into + 1) for i, (out, into) in enumerate(pairs)}

    def __call__(self, X: Array, y: Array | None = None) -> None:
        """The model; without y it has the deterministic site ``f``, in the units of y."""
        weight, noise = (
            numpyro.sample(f"{name}_precision", dist.Gamma(*PRIOR))
            if precision is None
            else jnp.asarray(precision, float)
            for name, precision in self.precisions.items()
        )
        d = self.layer_sizes[0]
        starts = jnp.zeros(d), jnp.ones(d), jnp.zeros(()), jnp.ones(())
        scaling: Any = [
            numpyro.param(f"auto_{name}", start)
            for name, start in zip(SCALING, starts, strict=True)
        ]
        # An optimiser must not move them.
        X_mean, X_sd, y_mean, y_sd = lax.stop_gradient(scaling)
        z = (jnp.asarray(X) - X_mean) / X_sd
        for i, (name, shape) in enumerate(self.shapes.items()):
            w: Any = numpyro.sample(name, dist.Normal(0, weight**-0.5).expand(shape).to_event(2))
            z = jax.nn.relu(z) if i else z
            z = jnp.concatenate([z, jnp.ones((len(z), 1), z.dtype)], 1)
            z = z @ w.T / shape[1] ** 0.5
        f = z[:, 0] * y_sd + y_mean
        if y is None:
            numpyro.deterministic("f", f)
        with numpyro.plate("data", len(z)):
            numpyro.sample("y", dist.Normal(f, noise**-0.5 * y_sd), obs=y)


class NetworkGuide(DiagonalNormal):
    """``AutoDiagonalNormal`` on the weights, and a Gamma for each precision that is not known."""

    gammas: list[str]
    """The sites of these precisions, without their ``_precision``."""

    def _gamma(self, name: str, params: Params | None = None) -> dist.Gamma:
        names = [f"{self.prefix}_{name}_{what}" for what in ("concentration", "rate")]
        if params is not None:
            return dist.Gamma(params[names[0]], params[names[1]])
        numbers: Any = [
            numpyro.param(full, float(start), constraint=constraints.positive)
            for full, start in zip(names, PRIOR, strict=True)
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


def network_guide(network: Network) -> NetworkGuide:
    """The guide of a network, set up on a row of zeros: nothing in it depends on the data."""
    guide = NetworkGuide(network, init_loc_fn=init_to_median)
    guide.gammas = [name for name, x in network.precisions.items() if x is None]
    locs = {name: jnp.zeros(shape) for name, shape in network.shapes.items()}
    local = [f"{name}_precision" for name in guide.gammas]
    start_guide(guide, locs, local, (jnp.zeros((1, network.layer_sizes[0])), jnp.zeros(1)), {})
    return guide
