"""A normal distribution around the output of a network that is fed with noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from jax import Array, random
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Distribution, Normal, biject_to, constraints
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, substitute

from numpyro_ext._checks import check_choice, check_count, if_given
from numpyro_ext._model.implicit import Implicit, IntractableDensityError
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Params, Shape, Sites, Trace
from numpyro_ext.guides.base import AutoWithoutDensity, with_fixed_map
from numpyro_ext.guides.networks import bounded, check_widths, flat_module, mlp
from numpyro_ext.transforms.base import checked_output

# Of init_scale: where psi takes over the whole spread, the densities of its conditionals would
# otherwise grow without bound.
FLOOR = 1e-3


@dataclass(kw_only=True, eq=False, repr=False)
class AutoSemiImplicit(AutoWithoutDensity):
    r"""A semi-implicit guide over all latent sites together: a normal with a random mean.

    In the model's unconstrained space of dimension :math:`d`,

    .. math::
        \psi &= (loc + net(\epsilon),\ scale), \quad \epsilon \sim N(0, I), \\
        z &= \psi_{loc} + scale \odot u, \quad u \sim N(0, I_d), \qquad
        q(z) = E_\psi[q(z \mid \psi)] .

    The density of z is an integral, which :class:`~numpyro_ext.objectives.SemiImplicitELBO`, the
    loss for this guide, bounds from below and from above. Losses that need :math:`\log q` raise
    :class:`IntractableDensityError`; losses that need only samples work too. The network starts at
    zero, so the guide starts at the normal approximation of the posterior at its mode.

    *Where it fails.* Training tends to shrink ``scale`` while the network takes over the spread;
    ``scale`` stays above 0.001 of ``init_scale``. The bound is loose where ``scale`` is small
    compared with the spread of :math:`\psi`, as above some tens of dimensions.

    :param int noise_dim: length of :math:`\epsilon`; d if None. Shorter noise spreads the means
        over a manifold, of which ``scale`` is the thickness.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from
        ``noise_dim`` numbers to d shifts (and then d log-scales, if the covariance is conditional),
        with weights in the vector ``{prefix}_net$params``, which say where the guide starts.
    :param hidden_dims: widths of the hidden layers of the default network (ELU).
    :param str covariance: ``"shared"``, one learnt vector ``{prefix}_scale``; or ``"conditional"``,
        that vector times the exponential of the network's log-scales, between -5 and 5.

    **Reference:** *Semi-implicit variational inference*, equations 1-4, Yin and Zhou (ICML 2018)

    >>> from numpyro_ext.objectives import SemiImplicitELBO
    >>> guide = AutoSemiImplicit(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), SemiImplicitELBO())  # was: Trace_ELBO()
    >>> result = svi.run(jax.random.key(0), 2000, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(1000,))
    >>> bool(jax.numpy.corrcoef(draws["x"], draws["y"])[0, 1] > 0.7)  # AutoNormal has 0
    True
    """

    noise_dim: int | None = None
    network: Network | None = None
    hidden_dims: Sequence[int] = (64, 64)
    covariance: str = "shared"

    def __post_init__(self) -> None:
        self.network = as_pair(self.network, optional=True)
        check_choice("covariance", self.covariance, ("shared", "conditional"))
        self.hidden_dims = check_widths(self.hidden_dims)
        self.noise_dim = if_given(check_count, "noise_dim", self.noise_dim)
        super().__post_init__()

    def _mixing(self, noise: Array) -> tuple[Array, Array, list[Transform]]:
        """``loc`` and ``scale`` given noise ``(..., noise_dim)``, and the fixed map after them."""
        d, prefix = self.latent_dim, self.prefix
        conditional = self.covariance == "conditional"
        size = 2 * d if conditional else d
        pair = self.network or mlp(self.hidden_dims, size)
        net = flat_module(f"{prefix}_net$params", pair, noise.shape[-1:])
        loc, scale, fixed, _ = self.begin()
        floor = FLOOR * (1.0 if fixed else self.init_scale)
        loc: Any = numpyro.param(f"{prefix}_loc", loc)
        scale: Any = numpyro.param(
            f"{prefix}_scale", scale, constraint=constraints.greater_than(floor)
        )
        because = f"{d} shifts{f' and {d} log-scales' if conditional else ''}"
        shape = (*noise.shape[:-1], size)
        out = checked_output("the network", noise, net(noise), shape, because)
        if conditional:
            scale = floor + (scale - floor) * jnp.exp(bounded(out[..., d:]))
        return loc + out[..., :d], jnp.broadcast_to(scale, (*noise.shape[:-1], d)), fixed

    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        standard = Normal(0.0, 1.0).expand((*sample_shape, self.noise_dim or self.latent_dim))
        loc, scale, fixed = self._mixing(self.auxiliary("noise", standard.to_event(1)))
        z = with_fixed_map(Normal(loc, scale).to_event(1), fixed)
        return self.auxiliary("latent", z)

    def __call__(self, *args: Any, **kwargs: Any) -> Sites:
        self.begin_fit(*args, **kwargs)
        result, trace = {}, cast(Trace, self.prototype_trace)
        with self.called_with(args, kwargs), self.on_cuts():
            vector = self.sample_vector((), args, kwargs)
            z = self.unpack(vector)
            supports = self.supports_at(z, args, kwargs)
            for name, u in z.items():
                value, event_dim = biject_to(supports[name])(u), trace[name]["fn"].event_dim
                site = SemiImplicitDraw(value, event_dim=event_dim, support=supports[name])
                result[name] = numpyro.sample(name, site)
        return result

    def sample_mixing(
        self, rng_key: Array, params: Params, num_samples: int
    ) -> tuple[Array, Array]:
        """Draws of :math:`\\psi`: locations and scales ``(num_samples, latent_dim)``, before the
        fixed map."""
        self.check_fitted(params)
        shape = (check_count("num_samples", num_samples), self.noise_dim or self.latent_dim)
        with block(), substitute(data=params):
            return self._mixing(random.normal(rng_key, shape))[:2]

    def conditional(self, params: Params, psi: Any) -> Distribution:
        """:math:`q(z \\mid \\psi)` of the draws of :meth:`sample_mixing`, of batch shape
        ``(num_samples,)`` and event shape ``(latent_dim,)``."""
        self.check_fitted(params)
        with block(), substitute(data=params):
            return with_fixed_map(Normal(*psi).to_event(1), self.begin()[2])


class SemiImplicitDraw(Implicit):
    """A latent site of :class:`AutoSemiImplicit`."""

    def log_prob(self, value: Array, intermediates: Any = None) -> NoReturn:
        raise IntractableDensityError(
            "log q of a semi-implicit guide is an integral over psi; use SemiImplicitELBO of"
            " numpyro_ext.objectives, or a loss that only needs samples, such as SVGD."
        )
