"""Accelerated gradient descent over distributions that are particles (Liu et al., 2019)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import optax

from numpyro_ext._checks import check_nonnegative, check_positive
from numpyro_ext.optim.heavy_ball import HeavyBallState, check_learning_rate, combine, rate_at


class WassersteinState(NamedTuple):
    """State of :func:`wag` and :func:`wnes`."""

    count: Array
    """Number of steps so far, k."""
    lead: Any
    """The lead y_k - x_k of the parameters y that optax holds over x; a tree like them."""


def wag(learning_rate: optax.ScalarOrSchedule, alpha: float = 3.5) -> optax.GradientTransformation:
    r"""Wasserstein accelerated gradient: Nesterov's continuous-time flow, for particles.

    With v the descent direction (minus the update that optax passes in, the velocity of the
    particles) and :math:`\epsilon` the learning rate, step k = 1, 2, ... is

    .. math::
        x_k = y_{k-1} + \epsilon\, v(y_{k-1}), \qquad
        y_k = x_k + \frac{k-1}{k} (y_{k-1} - x_{k-1}) + \frac{k+\alpha-2}{k} \epsilon\, v(y_{k-1}),

    in the shape and the unit of the parameters. The parameters that optax holds, at which gradients
    are taken, are y; :func:`wasserstein_eval_params` gives x, the answer. Both start at the same
    point and agree again at rest.

    **When it fails.** A step is about twice the plain step, so start from half the learning rate
    that suits plain descent. There is no bound on the momentum: noisy gradients with a constant
    learning rate are averaged less and less. Particle i must stay particle i, because y - x stands
    in for the inverse exponential map. It comes last in an :func:`optax.chain`.

    :param learning_rate: :math:`\epsilon`, positive, or a schedule of the step k - 1.
    :param float alpha: acceleration factor, at least 1; the theory requires more than 3.

    **Reference:** Liu et al., *Understanding and accelerating particle-based variational inference*
    (ICML 2019), algorithm 1.

    >>> from numpyro_ext.optim import wag
    >>> optim = wag(0.05)
    >>> params, state = jnp.array(4.0), optim.init(jnp.array(4.0))
    >>> for _ in range(100):
    ...     updates, state = optim.update(2 * (params - 1), state)
    ...     params = optax.apply_updates(params, updates)
    >>> print(f"{params:.2f}")
    1.00
    """
    check_learning_rate(learning_rate)
    check_positive("alpha", alpha)
    if not isinstance(alpha, Tracer) and alpha < 1:
        raise ValueError(f"alpha is {alpha!r}; it must be at least 1.")

    def coefficients(k: Array, eps: Array) -> tuple[Array, Array]:
        return (k + alpha - 2) / k, (k - 1) / k

    return _accelerate(learning_rate, coefficients)


def wnes(
    learning_rate: optax.ScalarOrSchedule, *, mu: float | None = None, beta: float = 0.2
) -> optax.GradientTransformation:
    r"""Wasserstein Nesterov: Nesterov's method on Riemannian manifolds, for particles.

    With v the descent direction (minus the update that optax passes in, the velocity of the
    particles) and :math:`\epsilon` the learning rate, step k = 1, 2, ... is

    .. math::
        x_k = y_{k-1} + \epsilon\, v(y_{k-1}), \qquad y_k = x_k + c\, (x_k - x_{k-1}),

    in the shape and the unit of the parameters, with c = (k - 1) / (k + 2) without ``mu``, and

    .. math::
        c = \frac{2 - S + B}{2 + S + B}, \qquad H = \mu \epsilon, \quad B = \beta \sqrt H, \quad
        S = \sqrt{B^2 + 4 (1 + B) H}

    with it. Gradients are taken at y, which optax holds; :func:`wasserstein_eval_params` gives x,
    the answer, as for :func:`wag`.

    **When it fails.** Without ``mu`` the momentum grows towards 1, which fails after a while with
    noisy gradients. Particles must keep their order, as for :func:`wag`.

    :param learning_rate: :math:`\epsilon`, positive, or a schedule of the step k - 1.
    :param float mu: lower bound of the second derivatives of the negative log density along
        geodesics (strong convexity), with :math:`\mu \epsilon \le 1`; or None.
    :param float beta: shrinkage, non-negative; a larger one gives less momentum.

    **References:** Liu et al., *Understanding and accelerating particle-based variational
    inference* (ICML 2019), algorithm 1; Zhang and Sra, *Towards Riemannian accelerated gradient
    methods* (2018).

    >>> from numpyro_ext.optim import wnes
    >>> optim = wnes(0.1, mu=1.0)
    >>> params, state = jnp.array(4.0), optim.init(jnp.array(4.0))
    >>> for _ in range(100):
    ...     updates, state = optim.update(2 * (params - 1), state)
    ...     params = optax.apply_updates(params, updates)
    >>> print(f"{params:.2f}")
    1.00
    """
    check_learning_rate(learning_rate)
    check_nonnegative("beta", beta)
    if mu is not None:
        check_positive("mu", mu)
        first: Any = learning_rate(0) if callable(learning_rate) else learning_rate
        if not isinstance(mu, Tracer) and not isinstance(first, Tracer) and mu * first > 1 + 1e-6:
            raise ValueError(f"mu {mu} times learning_rate {first} is above 1; use a smaller mu.")

    def coefficients(k: Array, eps: Array) -> tuple[Array, Array]:
        if mu is None:
            c = (k - 1) / (k + 2)
        else:
            h = mu * eps
            b = beta * jnp.sqrt(h)
            s = jnp.sqrt(b**2 + 4 * (1 + b) * h)
            c = (2 - s + b) / (2 + s + b)
        return c, c

    return _accelerate(learning_rate, coefficients)


def wasserstein_eval_params(opt_state: Any, params: Any) -> Any:
    r"""The sequence x of :func:`wag` and :func:`wnes`, which is the answer, from y.

    Continue from y, the parameters that the optimiser holds, and report x. The parameters of
    another optimiser (in :func:`optax.multi_transform` or :func:`optax.masked`) and of :func:`po`
    are returned unchanged.

    :param opt_state: any tree with the state of the optimiser, such as ``optim_state`` of an
        ``SVI`` state.
    :param params: y, unconstrained, such as ``result.params`` of ``SVI.run`` for particles.
    :return: x, in the structure of ``params``.

    >>> from numpyro_ext.optim import wasserstein_eval_params, wnes
    >>> from numpyro_ext.particles import SVGD, AutoParticles
    >>> def model():
    ...     numpyro.sample("w", dist.Normal(3.0, 2.0))
    >>> guide = AutoParticles(model, 20, init_from=None)
    >>> result = SVI(model, guide, wnes(0.5), SVGD()).run(
    ...     jax.random.key(0), 5, progress_bar=False)
    >>> params = wasserstein_eval_params(result.state.optim_state, result.params)
    >>> guide.particles(params)["w"].shape
    (20,)
    """

    def is_state(value: Any) -> bool:
        return isinstance(value, WassersteinState | HeavyBallState)

    states = [s for s in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(s)]
    if not states:
        raise ValueError(
            "opt_state holds no state of wag, wnes or po; give the optim_state of the SVI state."
        )

    def is_other(value: Any) -> bool:
        return isinstance(value, optax.MaskedNode)

    def behind(lead: Any, value: Any) -> Any:
        return value if is_other(lead) else value - lead

    for state in states:
        if isinstance(state, WassersteinState):
            params = jax.tree.map(behind, state.lead, params, is_leaf=is_other)
    return params


def _accelerate(
    learning_rate: optax.ScalarOrSchedule,
    coefficients: Callable[[Array, Array], tuple[Array, Array]],
) -> optax.GradientTransformation:
    """y_k - x_k = a eps v + b (y_{k-1} - x_{k-1}), with ``(a, b) = coefficients(k, eps)``.

    The state holds y - x and not x, because differences of large numbers lose the digits of a small
    momentum. For WNes x_k - x_{k-1} = eps v + (y_{k-1} - x_{k-1}), so that a = b = c.
    """

    def init(params: Any) -> WassersteinState:
        return WassersteinState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, WassersteinState]:
        eps = rate_at(learning_rate, state.count)
        a, b = coefficients(jnp.asarray(state.count + 1, float), eps)
        step = combine((-eps, updates))
        lead = combine((a, step), (b, state.lead))
        # y_k - y_{k-1} = (x_k - y_{k-1}) + (y_k - x_k)
        return combine((1.0, step), (1.0, lead)), WassersteinState(state.count + 1, lead)

    return optax.GradientTransformation(init, update)
