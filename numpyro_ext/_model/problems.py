"""What is said where a search found no mode near normal, or several, or where rows or digits do not
suffice."""

from collections.abc import Callable, Iterable
import math

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from numpyro_ext._model.exact import has_large, imprecise, may_be_imprecise, numbers_of
from numpyro_ext._model.labels import coordinate_name_of
from numpyro_ext._model.modes import Mode, Problem
from numpyro_ext._model.operations import jit_on_data, quick_options
from numpyro_ext._model.potential import ROWS, Potential
from numpyro_ext._model.read import ModelInfo
from numpyro_ext._model.spheres import has_poles, is_sphere
from numpyro_ext._typing import Trace

_NORMAL_FIT = 0.1
"""The departure up to which the normal of greatest ELBO is taken without a warning."""
_NORMAL_ALONG_ALL = 0.45
"""The worst error of a gradient up to which it does not matter that there is no mode. Where it is
0.36, on ten groups with standard errors of 1, SGHMC has the right law of their scale; where it is
0.65 half the right standard deviation of its logarithm, which moves of the draws do not see."""
_FAR_ALONG_ONE = 0.75
"""The worst error of a gradient from which a departure counts even if it is beyond its limit by
less than its error. Of ten centred groups with a LogNormal scale it is 0.81, and SGHMC has 0.84 of
the right standard deviation of the scale's logarithm; of a decentred one it is 0.67, and SGHMC is
right."""
_STEEP = 3.0
"""The slope of a fit above which it is said to be unfinished."""
_ROWS_EACH = 10  # of a minibatch, for each latent number


def several_problem(modes: list[Mode], num_searches: int) -> tuple[Problem, ...]:
    best, *others = modes
    apart = max(best.distance(other.center) for other in others)
    if apart <= 3 + math.sqrt(len(best.center)):
        return ()
    shares = ", ".join(f"{mode.share:.2g}" for mode in modes)
    copies = ""
    if all(mode.copy_of is not None for mode in others):
        copies = ", or let it be, if the modes are copies of each other, as it seems"
    sentence = (
        f"searches from {num_searches} points ended at different modes, {apart:.2g} standard"
        f" deviations apart, with {shares} of their mass; take particles, AutoMixtureNormal or at"
        f" least four chains with chain_method='vectorized', which begin at all of them{copies}."
    )
    return (Problem(sentence, "several modes"),)


def few_rows_problem(info: ModelInfo) -> tuple[Problem, ...]:
    """What is said where the rows that are given are too few to stand for all."""
    rows = sum(batch for _, batch in info.given.values())
    if not rows or rows >= _ROWS_EACH * info.size:
        return ()
    sentence = (
        f"the arguments of the model are a minibatch of {rows} rows, fewer than {_ROWS_EACH} for"
        f" each of {info.size} latent numbers, so that mode and scales may be far off; begin at the"
        " result of find_modes(model, *args) on more rows (init_from= of a guide, whitening= of a"
        " kernel)."
    )
    return (Problem(sentence, "few rows"),)


def precision_problem(potential: Potential, centers: Iterable[Array]) -> tuple[Problem, ...]:
    """What is said where the log density of a site is wrong in single precision at one of these
    points, the end of a search and the center of the normal."""
    _, idx = next(potential.pieces(ROWS))
    share = math.prod(len(i) / potential.plates[name][0] for name, i in idx.items())

    def trace(x: Array) -> Trace:
        return potential.with_rows(idx).trace(potential.info.unravel(x), idx)

    traces: list[Trace] = []
    points = [jnp.asarray(x, jnp.result_type(float)) for x in centers]
    jax.eval_shape(lambda x: traces.append(trace(x)), points[0])
    if not may_be_imprecise(traces[0]):
        return ()
    is_large = jit_on_data(lambda x: has_large(trace(x)), quick_options())
    points = [x for x in points if is_large(x)]
    run = jit_on_data(lambda x: numbers_of(trace(x)), quick_options())
    each = [imprecise(traces[0], jax.device_get(run(x)), share) for x in points]
    sentences = next(filter(None, each), [])
    return tuple(Problem(f"where a search ended, {x}", "single precision") for x in sentences)


def normal_problems(
    mode: Mode, fit: Mode, info: ModelInfo, labels: Callable[[str], str]
) -> tuple[Problem, ...]:
    """What is said of a search that ended at no mode near normal, and of an unfinished fit. That
    there is no mode is no problem where the posterior is near normal along each coordinate."""
    problems = far_problem(fit, info, labels)
    if not mode.at_mode and (problems or not fit.worst_error <= _NORMAL_ALONG_ALL):
        what = "where the gradient of all rows is not finite"
        if mode.num_negative:
            what = f"where the curvature is no mode's (negative directions: {mode.num_negative})"
        elif np.isfinite(mode.decrement):
            what = f"{mode.decrement:.2g} standard deviations from one"
        sentence = (
            f"the search for a mode ended {what}, so center and scales come from a variational fit"
            f" instead; {advice(info, fit.worst)}, or give init_params near the mode."
        )
        problems = (Problem(sentence, "no mode"),)
    return problems + unfinished(fit)


def far_problem(fit: Mode, info: ModelInfo, labels: Callable[[str], str]) -> tuple[Problem, ...]:
    is_far = fit.departure > _NORMAL_FIT and fit.worst_error > _FAR_ALONG_ONE
    if is_far or fit.sure_departure > _NORMAL_FIT:
        worst = labels(coordinate_name_of(info, fit.worst))
        sentence = (
            "gradients around the center are far from those of a normal posterior (relative error"
            f" {fit.departure**0.5:.2g}, most of all along {worst}), so the scales found do not"
            " hold in all of it. A flow may be right; for a kernel, a proxy or a normal guide"
            f" {advice(info, fit.worst)}, or use NUTS."
        )
        return (Problem(sentence, "far from normal"),)
    return ()


def unfinished(fit: Mode) -> tuple[Problem, ...]:
    if fit.variational and fit.slope - 2 * fit.slope_error > _STEEP:
        sentence = (
            "the normal of greatest ELBO is not found: another step would gain about"
            f" {fit.slope**2 / 2:.2g} nats; reparametrise the model, or give init_params."
        )
        return (Problem(sentence, "not converged"),)
    return ()


def advice(info: ModelInfo, worst: int = 0) -> str:
    """The advice on hierarchies, to a model that has not followed it and to one that has; or on
    spheres, where the coordinate ``worst`` is on one."""
    site = next(name for name, places in info.slices.items() if worst < places.stop)
    if is_sphere(info.latents[site].support):
        name = site.removesuffix("_sphere")
        take = "take GeodesicSGHMC, which moves on the sphere itself"
        if has_poles(info.latents[site].support):
            return f"leave out the SphereReparam of '{name}', or {take}"
        return take
    done = [name.removesuffix("_decentered") for name in info.latents if "_decentered" in name]
    change = "reparametrise the model (LocScaleReparam for hierarchies)"
    if done:
        change = f"change centered in the LocScaleReparam of '{done[0]}' (0 and 1 are its ends)"
    return (
        f"{change}, or, where there are few groups, give their scale a prior that vanishes at 0"
        " (LogNormal)"
    )
