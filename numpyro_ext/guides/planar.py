"""A normal distribution bent along planes."""

from dataclasses import dataclass
from typing import Any

from jax import Array, random
import jax.numpy as jnp
import numpyro

from numpyro_ext.guides.flows import AutoFlowNormal
from numpyro_ext.transforms import PlanarTransform


@dataclass(kw_only=True, eq=False, repr=False)
class AutoPlanarNormal(AutoFlowNormal):
    r"""A normalizing-flow guide of planar flows, over all latent sites together.

    The flows of :class:`AutoFlowNormal` are each a
    :class:`~numpyro_ext.transforms.planar.PlanarTransform`, with a u that is moved so that it is
    invertible, and starts at 0, beside a random w.

    *Where it fails.* Each flow makes one bend along one direction, so a strongly curved posterior
    needs many; above some ten dimensions :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal` is
    better. The density of a given point takes a scalar root search for each flow.

    :param int num_flows: the number F of planar flows. Flow i has the vector
        ``{prefix}_planar__{i}`` of u, w and b.

    **Reference:** *Variational inference with normalizing flows*, equations 10-13 and appendix A.1,
    Rezende and Mohamed (ICML 2015)

    >>> guide = AutoPlanarNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    num_flows: int = 8

    def flow(self, i: int) -> PlanarTransform:
        d = self.latent_dim

        def start(rng_key: Array) -> Array:
            return jnp.concatenate([jnp.zeros(d), random.normal(rng_key, (d,)), jnp.zeros(1)])

        parameters: Any = numpyro.param(f"{self.prefix}_planar__{i}", start)
        u, w, b = parameters[:d], parameters[d : 2 * d], parameters[2 * d]
        return PlanarTransform(PlanarTransform.constrain(u, w), w, b)
