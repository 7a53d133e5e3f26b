"""The step size of particles that needs no tuning: a cosine in units of the particles' spread."""

from typing import Any, NamedTuple, cast

from jax import Array
import jax.numpy as jnp
import optax

from numpyro_ext._checks import check_count, check_positive
from numpyro_ext._typing import Params
from numpyro_ext.particles._whitening import CovarianceWhitening


class ParticleStepState(NamedTuple):
    """State of :func:`particle_step`."""

    count: Array  # steps so far
    num_steps: Array  # the step at which the particles come to rest
    start_sds: Array  # (d,), of particles that begin at modes; otherwise infinite
    others: Any  # state of the transformation of all other parameters


def particle_step(
    num_steps: int,
    *,
    step_size: float = 0.3,
    prefix: str = "auto",
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    r"""An optax transformation that moves particles along a velocity, with nothing to tune.

    In step k of n, with the shrunk covariance :math:`L L^\top` of the particles that
    ``precondition="covariance"`` of :class:`ParticleField` describes, and the standard deviations
    :math:`s_j` of the particles where they began,

    .. math::
        x_i \leftarrow x_i + \frac{\epsilon_k}{\max(1, \mathrm{rms}(L^{-1} V_i),
        \max_j |V_{ij}| / s_j)}\, V_i,
        \qquad \epsilon_k = \frac{\epsilon_0}{2} \left(1 + \cos \frac{\pi k}{n}\right),

    so no particle moves by more than :math:`\epsilon_k` in units of the particles' own spread, and
    all are at rest after n steps. Where the particles do not begin at modes, :math:`s_j = \infty`.
    It is meant for preconditioned fields without a factor 1/m, above all ``RegularizedSVGD()``;
    others may oscillate where the posterior is narrow, and :class:`SVGD` takes more steps.

    :param int num_steps: n, the total number of steps that ``svi.run`` takes.
    :param float step_size: :math:`\epsilon_0`, without unit.
    :param str prefix: prefix of the :class:`AutoParticles` guide.
    :param others: the transformation of all other parameters, which the model has; defaults to Adam
        with a cosine schedule from 0.05 to 0 in n steps.

    >>> x = jax.random.normal(jax.random.key(0), (50, 1))
    >>> optim = particle_step(500)
    >>> move, _ = optim.update(-1e6 * x, optim.init(x), x)
    >>> bool(abs(move).max() / x.std() <= 0.301)
    True
    """
    num_steps = check_count("num_steps", num_steps)
    check_positive("step_size", step_size)
    name = f"{prefix}_particles"
    rest = optax.adam(optax.cosine_decay_schedule(0.05, num_steps)) if others is None else others

    def init(params: Any) -> ParticleStepState:
        count = jnp.zeros((), int)
        x, others = _split(params, name)
        modes = None if others is None else others.get(f"{prefix}_modes")
        at_modes = modes is not None and jnp.shape(modes)[1] > 0  # none of particles that are given
        sds = start_sds(x) if at_modes else jnp.full(x.shape[1:], jnp.inf, x.dtype)
        state = rest.init(cast(Any, others))
        return ParticleStepState(count, jnp.full_like(count, num_steps), sds, state)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        x, params = _split(params, name)
        gradient, updates = _split(updates, name)
        progress = jnp.minimum(state.count / state.num_steps, 1.0).astype(x.dtype)
        epsilon = 0.5 * step_size * (1.0 + jnp.cos(jnp.pi * progress))
        speed = CovarianceWhitening.from_particles(x).speed(gradient)
        farthest = jnp.max(jnp.abs(gradient) / state.start_sds, axis=1)
        too_fast = jnp.maximum(1.0, jnp.maximum(speed, farthest))
        move = -gradient * (epsilon / too_fast)[:, None]
        updates, others = rest.update(cast(Any, updates), state.others, params)
        state = state._replace(count=state.count + 1, others=others)
        return (move if params is None else cast(Params, updates) | {name: move}), state

    return optax.GradientTransformation(init, update)


def start_sds(x: Array) -> Array:
    """Standard deviations ``(d,)``; infinite for a coordinate in which all particles agree."""
    sds = jnp.std(x, axis=0)
    return jnp.where(sds > 0, sds, jnp.inf)


def _split(params: Any, name: str) -> tuple[Array, Params | None]:
    """The particles, and all other parameters; None if the particles are all there is."""
    if isinstance(params, dict) and name in params:
        return params[name], {k: v for k, v in params.items() if k != name}
    if isinstance(params, (dict, list, tuple)):
        names = ", ".join(params) if isinstance(params, dict) else "a list"
        raise ValueError(
            f"particle_step moves the parameter '{name}' of an AutoParticles guide, but the"
            f" parameters are {names}; give the guide's prefix."
        )
    return params, None
