"""The network of :class:`~numpyro_ext.ep.PBP` as a NumPyro model, and its guide."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import gammainc, ndtri
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

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

    def scaling(self, params: Params | None = None) -> dict[str, Array]:
        """Mean and standard deviation of X and y by name, from params or as ``param`` sites."""
        d = self.layer_sizes[0]
        default = [jnp.zeros(d), jnp.ones(d), jnp.zeros(()), jnp.ones(())]
        names = {name: f"{self.prefix}_{name}" for name in SCALING}
        if params is not None:
            return {name: params[full] for name, full in names.items()}
        found = {}
        for (name, full), value in zip(names.items(), default, strict=True):
            param: Any = numpyro.param(full, value)
            found[name] = lax.stop_gradient(param)  # an optimiser must not move it
        return found

    def __call__(self, X: Array, y: Array | None = None) -> None:
        """The model; without y it has the deterministic site ``f``, in the units of y."""
        weight, noise = (
            numpyro.sample(f"{name}_precision", dist.Gamma(*prior))
            if isinstance(prior, tuple)
            else jnp.asarray(prior, float)
            for name, prior in self.priors.items()
        )
        scaling = self.scaling()
        z = (jnp.asarray(X) - scaling["X_mean"]) / scaling["X_sd"]
        for i, (name, shape) in enumerate(self.shapes.items()):
            w: Any = numpyro.sample(name, dist.Normal(0, weight**-0.5).expand(shape).to_event(2))
            z = jax.nn.relu(z) if i else z
            if self.use_bias:
                z = jnp.concatenate([z, jnp.ones((len(z), 1), z.dtype)], 1)
            z = z @ w.T / shape[1] ** 0.5
        f = z[:, 0] * scaling["y_sd"] + scaling["y_mean"]
        if y is None:
            numpyro.deterministic("f", f)
        with numpyro.plate("data", len(z)):
            numpyro.sample("y", dist.Normal(f, noise**-0.5 * scaling["y_sd"]), obs=y)


class NetworkGuide(DiagonalNormal):
    """``AutoDiagonalNormal`` on the weights, and a Gamma for each precision that is not known."""

    gammas: dict[str, tuple[float, float]]
    """Shape and rate of the prior, by the site without its ``_precision``."""

    def _gamma(self, name: str, params: Params | None = None) -> dist.Gamma:
        names = [f"{self.prefix}_{name}_{what}" for what in ("concentration", "rate")]
        if params is not None:
            return dist.Gamma(*(params[one] for one in names))
        start = zip(names, self.gammas[name], strict=True)
        return dist.Gamma(
            *(numpyro.param(one, float(x), constraint=constraints.positive) for one, x in start)
        )

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
        for name, one in zip(self.gammas, keys, strict=True):
            sites[f"{name}_precision"] = self._gamma(name, params).sample(one, sample_shape)
        return sites

    def median(self, params: Params) -> Sites:
        half = {f"{x}_precision": _quantile(self._gamma(x, params), 0.5) for x in self.gammas}
        return {**super().median(params), **half}

    def quantiles(self, params: Params, quantiles: Any) -> Sites:
        gammas = {name: self._gamma(name, params) for name in self.gammas}
        found = {f"{x}_precision": _quantile(gamma, quantiles) for x, gamma in gammas.items()}
        return {**super().quantiles(params, quantiles), **found}


def _quantile(gamma: dist.Gamma, quantiles: Any) -> Array:
    """Quantiles of a Gamma of shape above 1, for which NumPyro's own need another library."""
    a, q = jnp.asarray(gamma.concentration, float), jnp.asarray(quantiles, float)
    # Wilson and Hilferty: good to 1e-5 where single precision has lost the distribution function.
    cube = (1 - 1 / (9 * a) + ndtri(q) / (3 * jnp.sqrt(a))) ** 3

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = (ends[0] + ends[1]) / 2
        below = gammainc(a, a * jnp.exp(middle)) < q
        return jnp.where(below, middle, ends[0]), jnp.where(below, ends[1], middle)

    low, high = lax.fori_loop(0, 40, halve, (jnp.full(q.shape, -30.0), jnp.full(q.shape, 5.0)))
    scale = a / jnp.asarray(gamma.rate)
    return scale * jnp.where(a > 300, cube, jnp.exp((low + high) / 2))


def network_guide(network: Network) -> NetworkGuide:
    """The guide of a network, set up on a row of zeros: nothing in it depends on the data."""
    guide = NetworkGuide(network, prefix=network.prefix, init_loc_fn=init_to_median)
    guide.gammas = {name: x for name, x in network.priors.items() if isinstance(x, tuple)}
    locs = {name: jnp.zeros(shape) for name, shape in network.shapes.items()}
    local = [f"{name}_precision" for name in guide.gammas]
    start_guide(guide, locs, local, (jnp.zeros((1, network.layer_sizes[0])), jnp.zeros(1)), {})
    return guide
