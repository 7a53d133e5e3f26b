"""A guide whose draws follow the gradient of the model: a few leapfrog steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from jax import Array, lax
import jax.numpy as jnp
import numpyro
from numpyro.distributions import Normal, constraints
from numpyro.distributions.transforms import Transform
from numpyro.handlers import block, seed, substitute

from numpyro_ext._checks import check_count, check_positive
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
from numpyro_ext.guides.networks import (
    bounded,
    check_widths,
    conditional_mlp,
    flat_module,
    mean_and_scale,
)
from numpyro_ext.transforms import LeapfrogTransform

# Far beyond what a stable step does to a velocity of unit variance.
KICK = 10.0
_DRAWS_AT_A_TIME = 100


@dataclass(kw_only=True, eq=False, repr=False)
class AutoHVI(AutoWithoutDensity):
    r"""Hamiltonian variational inference: a normal distribution, moved by the model's gradient.

    In the model's unconstrained space of dimension :math:`d`, with :math:`U(z) = -\log p^*(z)`,

    .. math::
        z_0 \sim N(loc, \mathrm{diag}\, scale^2), \qquad
        v_t \sim N(0, I), \quad (z_t, v_t') = \mathrm{leapfrog}_U(z_{t-1}, v_t)
        \quad (t = 1, \dots, T),

    where a round is ``num_leapfrog`` steps of size :math:`\epsilon_t / \sqrt{M_i}` in coordinate i,
    the dynamics of momenta :math:`N(0, M)` in velocities of unit variance. The map from
    :math:`(z_0, v_1, \dots, v_T)` to :math:`(z_T, v_1', \dots, v_T')` keeps volume, so

    .. math::
        L = E\Big[\log p^*(z_T) + \sum_t \log r_t(v_t' \mid z_t) - \log q(z_0)
        - \sum_t \log N(v_t; 0, I)\Big] \le \log p(x) .

    The change of a velocity, :math:`\epsilon \nabla U`, is bounded smoothly by 10 (x becomes 10
    tanh(x / 10)); the map still keeps volume. The guide subtracts the sum of :math:`\log r_t` by
    the factor ``{prefix}_reverse``: ``Trace_ELBO`` is the bound, and other losses of a density work
    on draw and velocities together. A draw costs T ``num_leapfrog`` + T gradients of the model, and
    the gradient of a loss takes its second derivatives.

    *Where it fails.* The bound is too low by the KL of the reverse model. Steps above twice the
    smallest standard deviation of the posterior are unstable. On minibatches the bound holds for
    their joint density, and draws are too wide. A call without data takes those of the first.

    :param int num_steps: the number T of rounds, each with a velocity of its own.
    :param int num_leapfrog: leapfrog steps in a round.
    :param float step_size: the initial value of each :math:`\epsilon_t`.
    :param reverse_network: a stax pair ``(init_fn, apply_fn)``, or a Flax or Equinox module, from
        :math:`(z_t - loc) / scale` and a one-hot vector of t, d + T numbers, to means and
        log-scales, 2 d numbers, kept between -5 and 5. The default is a linear layer plus an MLP of
        ``hidden_dims`` (ELU), which starts at N(0, I).

    **Reference:** *Markov chain Monte Carlo and variational inference: bridging the gap*, equation
    12 and algorithm 3, Salimans, Kingma and Welling (ICML 2015)

    >>> guide = AutoHVI(model, init_from=None)  # was: AutoNormal(model)
    >>> svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO(num_particles=8))
    >>> result = svi.run(jax.random.key(0), 2000, progress_bar=False)
    >>> draws = guide.sample_posterior(jax.random.key(1), result.params, sample_shape=(1000,))
    >>> bool(jax.numpy.corrcoef(draws["x"], draws["y"])[0, 1] > 0.5)  # AutoNormal has 0
    True
    """

    num_steps: int = 3
    num_leapfrog: int = 1
    step_size: float = 0.1
    reverse_network: Network | None = None
    hidden_dims: Sequence[int] = (32,)

    def __post_init__(self) -> None:
        check_positive("step_size", self.step_size)
        self.reverse_network = as_pair(self.reverse_network, "reverse_network", optional=True)
        self.hidden_dims = check_widths(self.hidden_dims)
        self.num_steps = check_count("num_steps", self.num_steps)
        self.num_leapfrog = check_count("num_leapfrog", self.num_leapfrog)
        super().__post_init__()

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
        v = self.auxiliary("velocity", normal.to_event(2))
        z, log_r = self._rounds(z, v, args, kwargs)
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

        def draw(key: Array) -> Array:  # with a minibatch of its own
            fn: Any = substitute(seed(self.sample_vector, key), params)
            return fn((), args, kwargs or {})

        with block():
            return draws_of(draw, rng_key, sample_shape, _DRAWS_AT_A_TIME)

    def reverse_log_prob(
        self, params: Params, aux: Sites, latents: Sites, *args: Any, **kwargs: Any
    ) -> Array:
        """:math:`\\sum_t \\log r_t(v_t' \\mid z_t)`, a number, with U on all rows, of the guide's
        sites ``_{prefix}_start`` and ``_{prefix}_velocity``, from which all others follow."""
        self.check_fitted(params)
        z, v = (aux[f"_{self.prefix}_{name}"] for name in ("start", "velocity"))
        with block(), substitute(data=params), every_row():
            return self._rounds(z, v, args, kwargs)[1]

    def _rounds(self, z: Array, v: Array, args: tuple, kwargs: Params) -> tuple[Array, Array]:
        """``z_T`` and the sum of ``log r_t``, from ``(d,)`` and ``(T, d)`` draws."""
        loc, scale, fixed = self.loc_and_scale()
        grad_u = self._gradient(args, kwargs, fixed)
        z = inverse_fixed_map(z, fixed)
        d, T, prefix = self.latent_dim, self.num_steps, self.prefix
        positive = constraints.positive
        steps: Any = numpyro.param(
            f"{prefix}_step_size", jnp.full(T, self.step_size), constraint=positive
        )
        mass: Any = numpyro.param(f"{prefix}_mass", jnp.ones(d), constraint=positive)
        pair = self.reverse_network or conditional_mlp(self.hidden_dims, d + T, d, 0.0)
        net = flat_module(f"{prefix}_reverse$params", pair, (d + T,))

        def one_round(z: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            v, eps, one_hot = parts
            eps = eps / jnp.sqrt(mass)

            def kick(z: Array) -> Array:
                return bounded(eps * grad_u(z), KICK) / eps

            leapfrog = LeapfrogTransform(kick, eps, self.num_leapfrog)
            z, v = jnp.split(leapfrog(jnp.concatenate([z, v])), 2)
            out = net(jnp.concatenate([(z - loc) / scale, one_hot]))
            mean, sd = mean_and_scale(out, d, "reverse_network")
            return z, Normal(mean, sd).log_prob(v).sum()

        z, log_r = lax.scan(one_round, z, (v, steps, jnp.eye(T, dtype=v.dtype)))
        return apply_fixed_map(z, fixed), jnp.sum(log_r)

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
