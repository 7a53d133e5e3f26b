"""The base of particle inference: a velocity of particles as a loss for ``SVI``.

Reference: Feng, Wang and Liu, *Learning to draw samples with amortized Stein variational gradient
descent* (UAI 2017), eq. 6, for guides that draw their particles.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import jax
from jax import Array, lax, random
from jax.core import Tracer
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.handlers import substitute
from numpyro.infer import ELBO

from numpyro_ext._checks import (
    OwnArgumentsFirst,
    check_choice,
    check_count,
    check_positive,
    check_several,
    if_given,
    summary,
)
from numpyro_ext._model.checks import read_global
from numpyro_ext._model.circles import with_circles
from numpyro_ext._model.handlers import refuse_mutable
from numpyro_ext._model.losses import finite_step, reported
from numpyro_ext._model.operations import in_either_mode
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.read import ModelInfo, refuse_scaled
from numpyro_ext._model.taylor import TaylorProxy, check_proxy
from numpyro_ext._numpyro import unpacking_of
from numpyro_ext._typing import Float, Kwargs, Model, Params, Sites
from numpyro_ext.particles._whitening import CovarianceWhitening, PerModeWhitening
from numpyro_ext.scores import RBF, Linear, MatrixRBF, as_kernel
from numpyro_ext.scores._points import by_rows

# Up to this many particles the m x m matrices are small enough to be built at once.
_DENSE_UP_TO = 2048
_ROWS_AT_A_TIME = 512

_LOST = (
    "{count} of %d particles are where the log density is NaN or a derivative of it is not finite."
    " They stay where they are while the others move without them, and are no draws of the"
    " posterior. Mend the model there, or start nearer to the posterior, or take smaller steps."
)


def find_lost(log_p: Array, *derivatives: Array | None) -> tuple[Array, Array]:
    """Which of m particles are lost, and the indices of those by which the others are moved."""
    # A kernel couples all particles, so that one NaN would be the end of all: in the velocities of
    # the others these stand in for the lost ones. Where all are lost, the step is not finite.
    where, m = jnp.isnan(log_p), log_p.shape[0]
    for g in derivatives:
        if g is not None:
            where |= ~jnp.all(jnp.isfinite(g * g).reshape(m, -1), axis=1)
    where &= ~jnp.all(where)
    others = jnp.argsort(where, stable=True)
    turn = (jnp.cumsum(where) - 1) % (m - jnp.sum(where))
    return where, jnp.where(where, others[turn], jnp.arange(m))


def report_lost(lost: Array) -> Array:
    """The same, which warns of the number of lost particles while the program runs."""
    return lost & (reported(jnp.sum(lost), _LOST % lost.size) > 0)


def _length(kernel: Any, x: Array) -> Array:
    return jnp.asarray(getattr(kernel, "length", jnp.nan), x.dtype)


@dataclass(kw_only=True, eq=False, repr=False)
class ParticleField(ELBO, ABC):
    r"""A velocity :math:`V(x, \nabla \log p)` of m particles, which is also a loss for ``SVI``.

    A subclass writes :meth:`resolved_velocity`; for more arguments than those below it is a
    ``@dataclass(kw_only=True, eq=False, repr=False)`` with a field for each.
    With ``z`` the ``(m, d)`` unconstrained latents that the guide's ``sample_latent`` gives,
    :math:`x = \mathrm{sg}(z)` (no gradient flows) and
    :math:`g_i = \gamma_t \nabla \log p(x_i) / T`, all on one minibatch, the loss is

    .. math::
        -\frac1m \sum_i \log p(x_i; \theta)
        \quad\text{with the gradient of}\quad
        -\sum_i \langle \mathrm{sg}(V_i), z_i \rangle - \frac1m \sum_i \log p(x_i; \theta).

    So ``optax.sgd(eps)`` moves each particle of an ``AutoParticles`` guide by ``eps`` times its
    velocity, any guide with ``sample_latent(rng_key, params, num_samples)`` is trained along the
    field (amortised inference), and a ``numpyro.param`` of the model gets the gradient of the mean.
    The log density is taken in unconstrained space, Jacobian included, in the order in which the
    model samples its sites.

    **Bias.** The value is a mean negative log joint density: it is not a bound, and models cannot
    be compared by it. Each subclass states the bias of its particles. All particles share a
    minibatch, so that their mean follows its noise where the steps are large; a
    ``proxy=taylor_proxy(model, *args)`` takes nearly all of it away.

    **Lost particles.** A particle at which the log density is NaN or a derivative of it not finite
    has no velocity, with a warning, and the others move without it; the value is the mean over
    them. A step that is not finite changes no parameter.

    **Preconditioning.** ``precondition="covariance"`` evaluates the field in the coordinates
    :math:`y = (x - \bar x) L^{-\top}`, :math:`g_y = g L`, and maps it back as :math:`V L^\top`,
    where

    .. math::
        L L^\top = (1 - \lambda)\, \mathrm{cov}(x) + \lambda\, \mathrm{diag}\,\mathrm{cov}(x),
        \qquad \lambda = \frac{d}{d + m}.

    The field then does not depend on the units of the coordinates, and bandwidths are lengths in
    units of the particles' own spread.

    :param kernel: a kernel of :mod:`numpyro_ext.scores`, or a function of ``(n, d)`` and ``(m, d)``
        points that gives an ``(n, m)`` matrix; defaults to ``RBF(default_bandwidth)``.
    :param int num_particles: particles to ask of the guide; ``AutoParticles`` has its own number,
        and other guides draw 100 if None.
    :param float temperature: T, positive.
    :param annealing: :math:`\gamma`, a function of the step with values in (0, 1] that multiplies
        the gradients and ends at 1, as ``lambda t: jnp.tanh((1.3 * (t + 1) / 1000) ** 5)`` for 1000
        steps; ``SVI`` needs ``AutoParticles(model, count_steps=True)`` for it.
    :param int block_size: rows of the kernel matrix at a time; None means all of them up to
        m = 2048, and 512 above.
    :param str precondition: ``"covariance"`` for coordinates in which particles have unit spread,
        which takes at least two particles, or None.
    :param proxy: the result of :func:`~numpyro_ext.objectives.taylor_proxy` for this model and its
        arguments, an expansion that a minibatch of rows then corrects; or None.

    >>> class Ascent(ParticleField):
    ...     def resolved_velocity(self, kernel, x, grad_log_p):
    ...         return grad_log_p  # every particle climbs to a mode
    >>> print(Ascent().velocity(jnp.zeros((2, 1)), jnp.ones((2, 1))))
    [[1.]
     [1.]]
    """

    __signature__ = OwnArgumentsFirst()

    default_bandwidth: ClassVar[str] = "median_distance"
    """The rule of the RBF that ``kernel=None`` means."""
    takes_every_kernel: ClassVar[bool] = True
    """False if ``Linear`` and ``MatrixRBF``, which estimate no density, are refused."""
    needs_hessian: ClassVar[bool] = False
    """True if ``velocity`` takes the ``(m, d, d)`` Hessians as a third argument."""
    can_infer_discrete: ClassVar[bool] = True  # sites of the model, by the sum over their values
    subtracts_score: ClassVar[bool] = False
    """True if the velocity is the gradient minus an estimate of the score of q."""

    kernel: Any = field(default=None, kw_only=False)
    num_particles: int | None = None
    temperature: float | Array = 1.0
    annealing: Callable[[Array], ArrayLike] | None = None
    block_size: int | None = None
    precondition: str | None = None
    proxy: TaylorProxy | None = None

    def __post_init__(self) -> None:
        ELBO.__init__(self, self.num_particles)  # type: ignore[arg-type]
        self.num_particles = if_given(check_count, "num_particles", self.num_particles)
        self.block_size = if_given(check_count, "block_size", self.block_size)
        if self.precondition is not None:
            check_choice("precondition", self.precondition, ("covariance",))
        check_positive("temperature", self.temperature)
        check_proxy(self.proxy)
        self._check_kernel()

    def _check_kernel(self) -> None:
        kernel = RBF(self.default_bandwidth) if self.kernel is None else self.kernel
        self.kernel = as_kernel(kernel)
        if isinstance(kernel, (Linear, MatrixRBF)) and not self.takes_every_kernel:
            raise TypeError(
                f"kernel is {type(kernel).__name__}, which SVGD alone takes; use RBF() or IMQ()"
                f" with {type(self).__name__}."
            )
        if isinstance(kernel, MatrixRBF) and self.precondition is not None:
            raise ValueError(
                "kernel is MatrixRBF, whose metric is in units that precondition changes; give one"
                " of the two."
            )

    def __repr__(self) -> str:
        return summary(self)

    @abstractmethod
    def resolved_velocity(self, kernel: Any, x: Array, grad_log_p: Array) -> Array:
        """The formula: ``(m, d)`` velocities of the particles x, ``(m, d)``, given a kernel with a
        number as its bandwidth, and the ``(m, d)`` gradients of the log density."""

    def velocity(self, x: ArrayLike, grad_log_p: ArrayLike) -> Float[Array, "m d"]:
        """The velocities of all particles, without temperature and annealing."""
        return self.velocity_and_bandwidth(*self.check_arrays(x, grad_log_p))[0]

    def tempered(self, grad_log_p: Array, step: ArrayLike) -> Array:
        """Gradients, or Hessians, times ``annealing(step) / temperature``."""
        scale = 1.0 / self.temperature
        if self.annealing is not None:
            scale = scale * self.annealing(jnp.asarray(step))
        return jnp.asarray(scale, grad_log_p.dtype) * grad_log_p

    def check_arrays(self, x: ArrayLike, grad_log_p: ArrayLike) -> tuple[Array, Array]:
        """Return particles and gradients as arrays, after a check of their shapes."""
        x, g = jnp.asarray(x), jnp.asarray(grad_log_p)
        if x.ndim != 2 or x.shape != g.shape:
            raise ValueError(
                f"x has shape {x.shape} and grad_log_p has shape {g.shape}; both must be"
                " (m, d), one row per particle."
            )
        return x, g

    def velocity_and_bandwidth(
        self,
        x: Array,
        g: Array,
        *,
        bandwidth: ArrayLike | None = None,
        groups: Array | None = None,
    ) -> tuple[Float[Array, "m d"], Float[Array, ""]]:
        """:meth:`velocity` of arrays, and its bandwidth, NaN for a kernel that has none.

        :param bandwidth: the last step's, from which the rule ``"he"`` continues its search.
        :param groups: ``(m, K)``, 1 for the one of K modes at which a particle began; a
            preconditioned field moves the particles of each by themselves, in their part of the
            posterior.
        """
        if self.precondition is not None:
            return self._in_units(x, g, bandwidth, groups)
        kernel = self.kernel.resolve(x, bandwidth)
        return self.resolved_velocity(kernel, x, g), _length(kernel, x)

    def _in_units(
        self, x: Array, g: Array, bandwidth: ArrayLike | None, groups: Array | None
    ) -> tuple[Array, Array]:
        """The same, of a preconditioned field."""
        units = self._units(x, groups)
        apart = units if isinstance(units, PerModeWhitening) else None
        y, g = units.points(x), units.gradients(g if apart is None else g + apart.own_parts(x))
        kernel = self.kernel.resolve(y, bandwidth)
        v = self.resolved_velocity(kernel, y if apart is None else apart.apart(y), g)
        v = v if apart is None else apart.slowed(v)
        return units.velocities(v), _length(kernel, x)

    def _units(self, x: Array, groups: Array | None) -> CovarianceWhitening | PerModeWhitening:
        check_several(x.shape[0], "one particle has no covariance; use precondition=None")
        # A linear kernel grows with the distance of the groups.
        if groups is None or groups.shape[1] < 2 or isinstance(self.kernel, Linear):
            return CovarianceWhitening.from_particles(x)
        return PerModeWhitening.from_particles(x, groups, least=x.shape[1] + 1)

    def bandwidth(self, x: Array, groups: Array | None = None) -> Float[Array, ""]:
        """The bandwidth of the first step from the particles ``x``."""
        y = x if self.precondition is None else self._units(x, groups).points(x)
        return _length(self.kernel.resolve(y), x)

    def rows_at_a_time(self, m: int) -> int:
        """Number of rows of an ``(m, m)`` matrix that are in memory together."""
        return min(m, self.block_size or (m if m <= _DENSE_UP_TO else _ROWS_AT_A_TIME))

    def by_rows(self, fn: Callable[..., Array], *arrays: Array) -> Array:
        """``fn`` of all m rows of the arrays, or of ``block_size`` rows at a time."""
        return by_rows(fn, self.rows_at_a_time(len(arrays[0])), *arrays)

    def with_proxy(
        self, potential: Potential, model: Model, args: tuple, kwargs: Kwargs, *, fresh: bool = True
    ) -> Potential:
        """The potential, by the proxy where there is one; a ``fresh`` program compares all rows."""
        if self.proxy is None or not potential.takes_minibatches:
            return potential
        potential.check_all_rows("a proxy")
        compared = self.proxy.check_data(model, args, kwargs, once=not fresh)
        return self.proxy.of_potential(type(self).__name__, potential, compare=not compared)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: Params, model: Model, guide: Any, *args: Any, **kwargs: Any
    ) -> Any:
        prefix = getattr(guide, "prefix", "auto")
        counter = f"{prefix}_step"
        if self.annealing and counter not in param_map:
            _check_counts(guide)
        step = param_map.get(counter, 0)

        def loss_and_state(param_map: Params) -> tuple[Array, dict[str, Any]]:
            key_minibatch, key_guide = random.split(rng_key)
            num_particles = self.num_particles or getattr(guide, "num_particles", 100)
            z = guide.sample_latent(key_guide, param_map, num_particles)
            # No gradient flows through the particles but the surrogate's.
            x, params = lax.stop_gradient((z, param_map))
            potential = _potential(model, guide, params, args, kwargs)
            # NumPyro's automatic guides know their own order; any other guide follows the model's.
            info, unpack = potential.info, unpacking_of(guide) or _unravel(potential.info, z)
            # The rows of the minibatch, drawn once for all particles.
            idx = potential.draw_rows(key_minibatch)
            if self.proxy is not None:
                fresh = isinstance(rng_key, Tracer)
                potential = self.with_proxy(potential, model, args, kwargs, fresh=fresh)
            potential = potential.with_rows(idx)
            model_params = {n: params[n] for n in info.params if n in params}

            def log_prob(x: Array, model_params: Params) -> Array:
                if model_params:  # a proxy knows none
                    at_params = Potential(model, info, {**params, **model_params}, args, kwargs)
                    return -at_params(unpack(x), idx)
                return -potential(unpack(x), idx)

            log_p, g, grads = in_either_mode(partial(_scores, log_prob, x, model_params))
            hessian = None
            if self.needs_hessian:
                hessian = jax.vmap(jax.hessian(log_prob), (0, None))(x, model_params)
            groups = params.get(f"{prefix}_modes")
            lost, seen = find_lost(log_p, g, hessian)
            lost = report_lost(lost)
            seen_x, g, hessian, groups = jax.tree.map(lambda a: a[seen], (x, g, hessian, groups))
            g = self.tempered(g, step)
            if hessian is None:
                v = self.velocity_and_bandwidth(seen_x, g, groups=groups)[0]
            else:
                v = cast(Any, self.velocity)(seen_x, g, self.tempered(hessian, step))
            v = lax.stop_gradient(jnp.where(lost[:, None], 0, v))
            surrogate = -jnp.sum(v * z)
            if model_params:
                surrogate -= _inner_product(grads, {n: param_map[n] for n in model_params}) / len(x)
            # The difference is 0, so that the value keeps its digits when the surrogate is large.
            mean = jnp.mean(log_p, where=~lost)
            return -mean + (surrogate - lax.stop_gradient(surrogate)), {}

        loss, _ = finite_step(loss_and_state, param_map)
        mutable_state = {counter: step + 1} if counter in param_map else None
        return {"loss": loss, "mutable_state": mutable_state}


def _scores(
    log_prob: Callable[[Array, Params], Array], x: Array, params: Params, forward: bool
) -> tuple[Array, Array, Params]:
    """The log densities of particles, their gradients, and the sum of the gradients by a model's
    parameters, in one evaluation."""
    if forward:
        return _scores_forward(log_prob, x, params)
    log_p, vjp = jax.vjp(jax.vmap(log_prob, (0, None)), x, params)
    return log_p, *vjp(jnp.ones_like(log_p))


def _scores_forward(
    log_prob: Callable[[Array, Params], Array], x: Array, params: Params
) -> tuple[Array, Array, Params]:
    g, grads = jax.vmap(jax.jacfwd(log_prob, (0, 1)), (0, None))(x, params)
    grads = jax.tree.map(lambda grad: jnp.sum(grad, 0), grads)
    return jax.vmap(log_prob, (0, None))(x, params), g, grads


def _inner_product(grads: Params, params: Params) -> Any:
    """The sum of each parameter times its gradient, which has this gradient alone."""
    # Integers and keys have no gradient.
    own = [g for g in jax.tree.leaves(grads) if g.dtype != jax.dtypes.float0]
    leaves = jax.tree.leaves(params)
    leaves = [p for p in leaves if jnp.issubdtype(jnp.result_type(p), jnp.inexact)]
    return sum(jnp.sum(lax.stop_gradient(g) * p) for g, p in zip(own, leaves, strict=True))


def _check_counts(guide: Any) -> None:
    """An error for ``annealing`` with a guide that does not count steps."""
    # SVI.evaluate passes no mutable state; the value does not depend on the step.
    if not getattr(guide, "count_steps", False):
        raise ValueError(
            "annealing needs the number of the step; use AutoParticles(model, count_steps=True)."
        )


def _potential(model: Model, guide: Any, params: Params, args: tuple, kwargs: Kwargs) -> Potential:
    """The potential of a model, which a guide may have read."""
    cut = params.get(f"{getattr(guide, 'prefix', 'auto')}_cut")
    known = guide.potential_on(model, args, kwargs) if hasattr(guide, "potential_on") else None
    if known is None:
        info = read_for_particles(substitute(model, data=params), args, kwargs)
    else:
        info = known.info
        if cut is None and not info.params:
            return known
    return Potential(model, with_circles(info, cut), params, args, kwargs)


def read_for_particles(model: Model, args: tuple, kwargs: Kwargs) -> ModelInfo:
    """The static facts of a model with global latent sites; an error for another model."""
    because = "a particle holds one value of it while the rows change at every step"
    info = read_global(refuse_mutable(model), args, kwargs, because=because, sums=True)
    refuse_scaled(set(info.scaled) - set(info.summed), "a particle")
    return info


def _unravel(info: ModelInfo, z: Array) -> Callable[[Array], Sites]:
    """The function from a latent vector in the order of the model to its unconstrained sites."""
    if info.size != z.shape[1]:
        raise ValueError(
            f"sample_latent of the guide gives vectors of length {z.shape[1]}, but the model's"
            f" latent sites {', '.join(info.latents)} take {info.size} unconstrained numbers."
        )
    return info.unravel
