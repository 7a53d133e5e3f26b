"""The noise of gradients of minibatches around a normal approximation of a posterior."""

from collections.abc import Callable
from typing import Any

from jax import Array, lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.mode_search import Mode, draw_batch
from numpyro_ext._model.normal_fit import at_normal
from numpyro_ext._model.potential import Potential
from numpyro_ext._model.whitening import Whitening
from numpyro_ext._typing import GradientEstimator, Sites
from numpyro_ext.mcmc.gradients import ControlVariate, MinibatchGradient

__all__ = ["NOISE_ESTIMATES", "noise_measure", "probe"]

_PROBES = 4
_NOISE_POINTS, _NOISE_BATCHES = 512, 4
# The noise of a corrected gradient grows as the square of the distance, so it varies from point to
# point by one to two times its mean: few points with many batches would miss the mean by a third.
NOISE_ESTIMATES = _NOISE_POINTS * _NOISE_BATCHES
"""Estimates of a gradient by each estimator, from which its noise is known."""


def noise_measure(
    rng_key: Array, potential: Potential, given: GradientEstimator | None, factor: Any
) -> Callable[[Mode], tuple[Sites, list[np.ndarray], np.ndarray]]:
    """
    What looks around the center of a normal approximation, ``look_around(normal)``;
    compiled while the center is searched. It returns the constrained center, variances of gradient
    estimates, and the gradients of all rows by which :class:`Fitness` knows the data.

    Variances are those over batches, whitened, ``(n,)`` for each estimator: the one that is given,
    or the plain one and the one that is corrected at the center, or none without a plate. Each is
    the mean over points of the normal approximation: of a noise that depends on the place,
    :math:`s^2(\\xi)`, the variance of a Gaussian target feels the mean to first order, without a
    weight, because the function whose drift is :math:`\\xi_k^2 - 1` is a quadratic one. Points at
    which it is not finite are left out; NaN if these are more than half.

    :param factor: one like that of the normal approximation.
    """
    info, sites = potential.info, potential.postprocess()

    def measure(rng_key: Array, center: Array, factor: Array) -> tuple[Sites, list[Array], Array]:
        whitening, values = Whitening(center, factor), info.in_order(sites(info.unravel(center)))
        estimators: list[GradientEstimator] = []
        if given is not None:
            estimators = [given]
        elif potential.plates:
            estimators = [MinibatchGradient(), ControlVariate(values)]
        noises = _noises(rng_key, potential, whitening, estimators) if estimators else []
        return values, noises, probe(potential, whitening)

    run = at_normal(measure, rng_key, factor)

    def look_around(normal: Mode) -> tuple[Sites, list[np.ndarray], np.ndarray]:
        center, noises, gradients = run(rng_key, normal.center, normal.factor)
        return center, [np.asarray(x, float) for x in noises], np.asarray(gradients, float)

    return look_around


def _noises(
    rng_key: Array, potential: Potential, whitening: Whitening, estimators: list[GradientEstimator]
) -> list[Array]:
    info, center = potential.info, whitening.center
    states = [estimator.init(info.unravel(center), potential) for estimator in estimators]

    def at_point(key: Array) -> list[Array]:
        key_xi, key_batches = random.split(key)
        z = info.unravel(whitening.to_z(random.normal(key_xi, center.shape, center.dtype)))

        def one(key: Array) -> list[Array]:
            key_batch, key_gradient = random.split(key)
            i, idx = jnp.zeros((), int), draw_batch(key_batch, potential)
            grads = [
                estimator.estimate(key_gradient, i, z, idx, potential, state)[1]
                for estimator, state in zip(estimators, states, strict=True)
            ]
            return [whitening.pull(info.ravel(grad)) for grad in grads]

        found = lax.map(one, random.split(key_batches, _NOISE_BATCHES))
        return [jnp.var(grads, 0, ddof=1) for grads in found]

    def mean(found: Array) -> Array:
        finite = jnp.all(jnp.isfinite(found), 1)
        share = jnp.mean(finite, dtype=found.dtype)
        mean = jnp.mean(jnp.where(finite[:, None], found, 0), 0) / share
        return jnp.where(share < 0.5, jnp.nan, mean)

    return [mean(x) for x in lax.map(at_point, random.split(rng_key, _NOISE_POINTS))]


def probe(potential: Potential, whitening: Whitening) -> Array:
    """Gradients of all rows at four points of a normal approximation, whitened: ``(4, n)``."""

    def grad(xi: Array) -> Array:
        return whitening.pull(potential.full_value_and_grad_flat(whitening.to_z(xi))[1])

    center = whitening.center
    return lax.map(grad, random.normal(random.key(0), (_PROBES, *center.shape), center.dtype))
