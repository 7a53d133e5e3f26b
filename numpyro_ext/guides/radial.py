"""A normal distribution contracted and expanded around points."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, random
import jax.numpy as jnp
import numpyro

from numpyro_ext.guides.flows import AutoFlowNormal
from numpyro_ext.transforms import RadialTransform


@dataclass(kw_only=True, eq=False, repr=False)
class AutoRadialNormal(AutoFlowNormal):
    r"""A normalizing-flow guide of radial flows, over all latent sites together.

    The flows of :class:`AutoFlowNormal` are each a
    :class:`~numpyro_ext.transforms.radial.RadialTransform`, which starts at :math:`\beta = 0`.

    *Where it fails.* A flow changes the density around one point, equally in all directions. That
    suits a posterior with a peak or a hole; it does not bend, as
    :class:`~numpyro_ext.guides.realnvp.AutoRealNVPNormal` does. Correlations are in the full factor
    alone.

    :param int num_flows: the number F of radial flows. Flow i has the vector
        ``{prefix}_radial__{i}`` of the centre and of alpha and beta before their constraints.

    **Reference:** *Variational inference with normalizing flows*, equation 14 and appendix A.2,
    Rezende and Mohamed (ICML 2015)

    >>> guide = AutoRadialNormal(banana, init_from=None)  # was: AutoNormal(banana)
    >>> svi = SVI(banana, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["x2"].shape
    (9,)
    """

    num_flows: int = 8

    def flow(self, i: int) -> RadialTransform:
        d = self.latent_dim
        inverse_softplus_of_one = jnp.log(jnp.expm1(1.0))

        def start(rng_key: Array) -> Array:
            center = random.normal(rng_key, (d,))
            return jnp.concatenate([center, jnp.full(2, inverse_softplus_of_one)])

        parameters: Any = numpyro.param(f"{self.prefix}_radial__{i}", start)
        alpha, shifted_beta = jax.nn.softplus(parameters[d:])
        return RadialTransform(parameters[:d], alpha, shifted_beta - alpha)
