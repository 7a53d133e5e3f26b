"""Mixtures of normals with draws that have the right gradient or none."""

from typing import Any

import jax
from jax import Array, lax, random
from jax.lax import stop_gradient
import jax.numpy as jnp
from jax.scipy.special import ndtr
from jax.scipy.stats import norm
import numpyro.distributions as dist

from numpyro_ext._typing import Shape

LOG_SMALLEST_DENSITY = -69.0  # log 1e-30: a smaller density overflows when float32 divides by it


class DiagonalNormalMixture(dist.MixtureSameFamily):
    r"""A mixture of normals with diagonal covariances, with implicitly reparameterised draws.

    With :math:`F_i` the distribution function of coordinate i given those before it,

    .. math::
        F_i(z) = \sum_c w_c(z_{<i})\, \Phi\Big(\frac{z_i - m_{ci}}{s_{ci}}\Big), \qquad
        w_c(z_{<i}) \propto w_c \prod_{j<i} N(z_j; m_{cj}, s_{cj}^2) ,

    :math:`F(z)` is uniform on the cube whatever the parameters are. So a draw that moves with them
    at constant F has the right gradient: :math:`\partial z = -(\partial F / \partial z)^{-1}
    \partial F`, a triangular system that is solved coordinate by coordinate, at a cost of
    :math:`O(C d)`. Only first derivatives of a draw are right. ``logits`` are ``(C,)`` log weights,
    ``loc`` and ``scale`` ``(C, d)``.
    """

    pytree_data_fields = ("loc", "scale")

    def __init__(self, logits: Array, loc: Array, scale: Array) -> None:
        # A traced index into an array of NumPy is an error.
        logits, self.loc, self.scale = map(jnp.asarray, (logits, loc, scale))
        components = dist.Normal(self.loc, self.scale).to_event(1)
        super().__init__(dist.CategoricalLogits(logits), components)

    @property
    def has_rsample(self) -> bool:
        return True

    def sample(self, key: Array | None, sample_shape: Shape = ()) -> Array:
        assert key is not None
        key_component, key_noise = random.split(key)
        c = self.mixing_distribution.sample(key_component, sample_shape)
        noise = random.normal(key_noise, (*sample_shape, *self.event_shape), self.loc.dtype)
        return self.with_gradient(self.loc[c] + self.scale[c] * noise)

    def sample_with_intermediates(
        self, key: Array | None, sample_shape: Shape = ()
    ) -> tuple[Array, list[Array]]:
        return self.sample(key, sample_shape), []

    def with_gradient(self, z: Array) -> Array:
        """The same ``(*batch, d)`` draws, moving with the parameters at constant F."""

        def coordinate(log_w: Array, xs: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            z, loc, scale = xs
            x = (z[..., None] - loc) / scale
            w = jax.nn.softmax(log_w)
            # From the nearer end: in the far tail 1 - F has no digits left.
            side = jnp.where(jnp.sum(w * ndtr(x), -1) > 0.5, -1.0, 1.0)
            F = side * jnp.sum(w * ndtr(side[..., None] * x), -1)
            log_q = jax.nn.logsumexp(log_w + norm.logpdf(x) - jnp.log(scale), axis=-1)
            q = jnp.exp(jnp.maximum(log_q, LOG_SMALLEST_DENSITY))
            z = z - (F - stop_gradient(F)) / stop_gradient(q)
            log_w = log_w + norm.logpdf(z[..., None], loc, scale)
            return jax.nn.log_softmax(log_w), z

        z = stop_gradient(z)
        logits: Any = self.mixing_distribution.logits
        log_w = jax.nn.log_softmax(logits)
        log_w = jnp.broadcast_to(log_w, (*z.shape[:-1], *log_w.shape))
        xs = (jnp.moveaxis(z, -1, 0), self.loc.T, self.scale.T)
        return jnp.moveaxis(lax.scan(coordinate, log_w, xs)[1], 0, -1)


class FullNormalMixture(dist.MixtureSameFamily):
    """A mixture of normals with full covariances; to differentiate its draws is an error."""

    def __init__(self, logits: Array, loc: Array, scale_tril: Array) -> None:
        logits, loc, scale_tril = map(jnp.asarray, (logits, loc, scale_tril))
        components = dist.MultivariateNormal(loc, scale_tril=scale_tril)
        super().__init__(dist.CategoricalLogits(logits), components)

    @property
    def has_rsample(self) -> bool:
        # A loss that is told otherwise stops the gradient, and the guide is trained by half of it.
        return True

    def sample_with_intermediates(
        self, key: Array | None, sample_shape: Shape = ()
    ) -> tuple[Array, list[Array]]:
        z, _ = super().sample_with_intermediates(key, sample_shape)
        return _without_gradient(z), []


@jax.custom_vjp
def _without_gradient(z: Array) -> Array:
    return z


def _forwards(z: Array) -> tuple[Array, None]:
    return z, None


def _backwards(residual: None, cotangent: Any) -> Any:
    raise ValueError(
        'draws of AutoMixtureNormal with covariance="full" have no gradient, so this loss cannot'
        ' train the guide; use numpyro_ext.objectives.MixtureELBO, or covariance="diag".'
    )


_without_gradient.defvjp(_forwards, _backwards)
