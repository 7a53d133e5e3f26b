"""A guide without a density: a network that turns noise into draws of all latent sites."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array, lax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.handlers import block

from numpyro_ext._checks import check_count, if_given
from numpyro_ext._model.arguments import is_traced
from numpyro_ext._model.handlers import refuse_mutable
from numpyro_ext._model.implicit import Implicit
from numpyro_ext._model.operations import gradient
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.start import params_in_scope
from numpyro_ext._networks import Network, as_pair
from numpyro_ext._typing import Params, Shape
from numpyro_ext.guides.base import AutoWithoutDensity, apply_fixed_map
from numpyro_ext.guides.networks import check_widths, flat_module, mlp
from numpyro_ext.guides.transitions import LearntTransition
from numpyro_ext.transforms.base import checked_output

_DRAWS_AT_A_TIME = 256


@dataclass(kw_only=True, eq=False, repr=False)
class AutoImplicit(AutoWithoutDensity):
    r"""A generator as a guide: a network of noise, over all latent sites together.

    In the model's unconstrained space of dimension d,

    .. math::
        z = loc + scale \odot \epsilon_{1..d} + \mathrm{mlp}(\epsilon), \qquad
        \epsilon \sim N(0, I_{noise\_dim}),

    where the last layer of the network starts at zero, so that the guide starts at the normal
    approximation of the posterior at its mode. It has draws and no density. Train it with
    ``ImplicitELBO``, ``SteinDiscrepancy``, ``AmortizedMCMC``, ``DensityRatioELBO``, or with a field
    of :mod:`numpyro_ext.particles`: ``SVI(model, AutoImplicit(model), optim, SVGD())`` is amortised
    SVGD. A loss that needs log q, such as ``Trace_ELBO``, raises ``IntractableDensityError``.

    **When it fails.** No importance weights say how far off the guide is. Unlike a flow, the
    network can tear the noise apart into separated modes.

    **Transitions.** ``transition=Langevin()`` or ``NNSampler()`` applies T steps with the model's
    gradient to the draw of the generator, on the minibatch that the loss shares with the model, and
    learns their parameters; parameters of the model have no gradient through them. The methods take
    all rows of the data, of their arguments or of the first call; calls of the guide, as by
    ``Predictive``, follow their minibatch and spread further.

    :param int noise_dim: number of standard normal numbers for a draw, at least d and by default d.
        With fewer the draws lie on a surface, where neither a density nor its score exists.
    :param network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from
        ``noise_dim`` to d numbers, for :math:`z = loc + net(\epsilon)`; its initial weights say
        where the guide starts.
    :param hidden_dims: widths of the hidden layers of the default network (ELU).
    :param transition: ``Langevin(...)``, ``NNSampler(...)`` or None.

    **References:** *Gradient estimators for implicit models*, Li and Turner (ICLR 2018); *Learning
    to draw samples with amortized Stein variational gradient descent*, Feng et al. (UAI 2017)

    >>> from numpyro_ext.objectives import ImplicitELBO
    >>> guide = AutoImplicit(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), ImplicitELBO())  # was: Trace_ELBO()
    >>> result = svi.run(jax.random.key(0), 50, progress_bar=False)
    >>> guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(9,))["y"].shape
    (9,)
    """

    noise_dim: int | None = None
    network: Network | None = None
    hidden_dims: Sequence[int] = (64, 64)
    transition: LearntTransition | None = None

    def __post_init__(self) -> None:
        self.network = as_pair(self.network, optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        self.noise_dim = if_given(check_count, "noise_dim", self.noise_dim)
        super().__post_init__()

    def read(self, *args: Any, **kwargs: Any) -> ModelInfo:
        info = super().read(*args, **kwargs)
        if self.noise_dim is not None and self.noise_dim < info.size:
            raise ValueError(
                f"noise_dim is {self.noise_dim}, but the model has {info.size} latent dimensions;"
                f" it must be at least {info.size}: fewer numbers fill only a surface."
            )
        return info

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.transition is None else (args, kwargs)

    def sample_vector(self, sample_shape: Shape, args: tuple, kwargs: Params) -> Array:
        d = self.latent_dim
        n = self.noise_dim or d
        loc, scale, fixed, _ = self.begin()
        loc: Any = numpyro.param(f"{self.prefix}_loc", loc)
        noise = dist.Normal(jnp.zeros((*sample_shape, n)), 1.0).to_event(1)
        eps = self.auxiliary("noise", noise)
        pair = self.network or mlp(self.hidden_dims, d)
        out = flat_module(f"{self.prefix}_net$params", pair, (n,))(eps)
        because = "one number for each latent dimension"
        z = loc + checked_output("the network", eps, out, (*sample_shape, d), because)
        if self.network is None:
            positive = constraints.softplus_positive
            scale: Any = numpyro.param(f"{self.prefix}_scale", scale, constraint=positive)
            z = z + scale * eps[..., :d]
        z = apply_fixed_map(z, fixed)
        if self.transition is not None:
            z = self._moved(z, self.transition, sample_shape, args, kwargs)
        return self.auxiliary("latent", Implicit(z, event_dim=1))

    def draw(
        self,
        rng_key: Array,
        params: Params,
        sample_shape: Shape = (),
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Array:
        if sample_shape or self.transition is None:
            return super().draw(rng_key, params, sample_shape, args, kwargs)
        return super().draw(rng_key, params, (1,), args, kwargs)[0]  # on all rows, not a minibatch

    def _moved(
        self,
        z: Array,
        transition: LearntTransition,
        sample_shape: Shape,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Array:
        """``z`` after the T steps."""
        T, d = transition.num_steps, self.latent_dim
        if not (args or kwargs) and self.prepared is not None:  # of the first call
            args, kwargs = self.prepared
            if is_traced(self.prepared):
                raise ValueError(
                    "the transitions need the model's arguments, which had no values in the guide's"
                    " first call; give them to sample_posterior, or call svi.init outside jax.jit."
                )
        info = self.in_cuts(self.read(*args, **kwargs))
        params = lax.stop_gradient(params_in_scope(self.model, args, kwargs))
        potential = Potential(refuse_mutable(self.model), info, params, args, kwargs)
        by_step, step = transition.begin(self.prefix, d)
        noise = dist.Normal(jnp.zeros((*sample_shape, T, d)), 1.0).to_event(2)
        xi = self.auxiliary("transition_noise", noise)
        rows = {}
        for name, (size, batch) in info.plates.items():
            if sample_shape:
                rows[name] = jnp.arange(size)
            else:  # the minibatch that the loss gives to the model too
                with numpyro.plate(name, size, subsample_size=batch) as idx:
                    rows[name] = jnp.asarray(idx)

        def run(start: tuple[Array, Array]) -> Array:
            z, xi = start
            grad_log_p = gradient(lambda z: -potential(self.unpack(z), rows))

            def move(z: Array, parts: tuple[Any, Array]) -> tuple[Array, None]:
                return step(parts[0], z, grad_log_p(z), parts[1]), None

            return lax.scan(move, z, (by_step, xi))[0]

        with block():  # some draws at a time, because each may take all rows
            starts = z.reshape(-1, d), xi.reshape(-1, T, d)
            return lax.map(run, starts, batch_size=_DRAWS_AT_A_TIME).reshape(*sample_shape, d)
